"""docs/gpu.md says of every method whether its decode steps can be captured as a CUDA graph, as the code decides it."""

from pathlib import Path
from typing import Any

import pytest
from capture_steps import obstacles
from test_conf import composed

from kvexp.build import build_cache
from kvexp.config.settings import Settings, settings_of
from kvexp.core import Budget, CacheConfig, Cadence, Quantization
from kvexp.core.decode.capture_obstacles import capture_obstacle
from kvexp.errors import ConfigError
from kvexp.methods import H2O

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- capture: begin -->", "<!-- capture: end -->"
HALF = Budget(kv_ratio=0.5)


def table() -> str:
    """The methods of conf/method under their defaults, by what keeps their steps from being captured."""
    found: dict[str | None, list[str]] = {None: []}
    for name, (_, why) in obstacles().items():
        found.setdefault(why, []).append(f"`{name}`")
    lines = ["| captured | methods |", "|---|---|"]
    for why, names in sorted(found.items(), key=lambda pair: (pair[0] is not None, -len(pair[1]))):
        lines.append(f"| {'yes' if why is None else f'no: {why}'} | {', '.join(names)} |")
    return "\n".join(lines)


def test_the_page_says_what_the_code_decides() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    written = page.partition(BEGIN)[2].partition(END)[0].strip()
    assert written == table(), "docs/gpu.md: put this table between the marks\n" + table()


def settings(*overrides: str) -> Settings:
    config, choices = composed(*overrides)
    return settings_of(config, choices, [word for word in overrides if not word.startswith("method=")])


def test_a_run_with_graphs_is_the_run_it_was() -> None:
    """The first replay is compared to the bit, so neither hash nor label tells the two apart."""
    plain, asked = settings("method=h2o"), settings("method=h2o", "cache.graph=auto")
    assert (plain.cache.graph, asked.cache.graph) == ("off", "auto")
    assert plain.identity == asked.identity and plain.labels == asked.labels
    assert asked.baseline().cache.graph == "auto" and plain.baseline().identity == asked.baseline().identity
    older = {name: value for name, value in composed("method=h2o")[0]["cache"].items() if name != "graph"}
    assert build_cache(H2O(), HALF, older).graph == "off"
    with pytest.raises(ConfigError, match=r"cache.graph must be one of auto, off, got 'on'"):
        settings("method=h2o", "cache.graph=on")


def test_settings_decide_too() -> None:
    """The same method under other settings of the cache; each reason names what to change."""

    def why(**options: Any) -> str:
        return capture_obstacle(CacheConfig(H2O(), HALF, **options)) or ""

    assert why() == ""
    assert "drops nothing" in why(mode="mask") and "new buffers" in why(mode="compact")
    assert "every 4th step" in why(cadence=Cadence(every=4))
    assert "every new token is kept" in why(cadence=Cadence(every=None))
    assert "quantised" in why(quantization=Quantization(4, 4))
    assert "general step" in why(positions="renumbered")
