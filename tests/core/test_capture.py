"""Decode steps that are captured as a CUDA graph: replayed by a stand-in, and why they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from capture_steps import (
    FAMILIES,
    NEW,
    NOT_LOOKED_AT,
    RecordedGraphs,
    case_of,
    obstacles,
    prompts_for,
)
from commands import composed
from device_runs import METHODS, config_of
from host_reads import on_gpu, reads_of_decode_steps
from test_retrieval import METHODS as RETRIEVAL
from test_retrieval import SCARCE
from tiny import tiny

from kvexp.core import Budget, Cadence, Method, Quantization, decode_stack
from kvexp.core.decode import BatchedEviction
from kvexp.core.graph import capture_obstacle
from kvexp.core.selection import SlotSelection
from kvexp.generate import CacheConfig, GenerationParams, decode, generate, prefill_together
from kvexp.generate import graph as decode_graph
from kvexp.methods import H2O
from kvexp.run.build import build_cache
from kvexp.run.settings import Settings, settings_of
from kvexp.util.errors import ConfigError


@pytest.fixture(autouse=True)
def columns_as_on_a_gpu(monkeypatch):
    """Caches that grow read many columns at a time, on the CPU too."""
    monkeypatch.setattr(decode_stack, "growing_width", lambda slots, device: -(-slots // 64) * 64)


class Users(Method):
    """A user's method, whose priorities are looked at for NaN and whose arguments for changes in place."""

    def priority(self, ctx):
        return -ctx.slots.keys[:, :, : ctx.slots.length].float().norm(dim=-1)


# -- cache.graph=auto, with a stand-in for CUDA graphs --------------------------------------------------------------


def with_graphs(monkeypatch, graphs):
    monkeypatch.setattr(decode_graph, "graph_device", lambda cache: graphs)


def both(monkeypatch, graphs, method, budget, family="llama", new=NEW, **options):
    """(with graphs, without)."""
    decoding = GenerationParams(new, eos=None)
    prompts = prompts_for(method.method if isinstance(method, CacheConfig) else method)
    run = lambda: generate(  # noqa: E731
        tiny(family), prompts, method, budget, decoding=decoding, seeds=[1, 2], keep_logits=True, **options
    )
    plain = run()
    with_graphs(monkeypatch, graphs)
    return run(), plain


@pytest.mark.parametrize(("family", "case"), FAMILIES)
def test_replayed_steps_are_the_eager_ones(family, case, monkeypatch):
    graphs = RecordedGraphs()
    made, plain = both(monkeypatch, graphs, case_of(family, case), None, family=family)
    assert graphs.calls[:2] == ["warm_up", "capture"] and graphs.calls.count("replay") > NEW - 10
    assert made.tokens == plain.tokens
    assert all(torch.equal(a, b) for a, b in zip(made.logits, plain.logits, strict=True))
    for a, b in zip(made.cache.layer_states, plain.cache.layer_states, strict=True):
        assert a.kept_positions() == b.kept_positions() and a.first_eviction == b.first_eviction
        assert torch.equal(a.slots.score, b.slots.score) and a.seq_len == b.seq_len
    replayed = graphs.calls.count("replay") - graphs.calls.count("capture")  # the first is compared and thrown away
    assert made.cuda_graph == f"{replayed} of {NEW - 1} decode steps were replayed from a CUDA graph"
    assert plain.cuda_graph is None


def test_caches_that_decode_together_are_captured_together(monkeypatch):
    """In the second run some end before others: then the others' step is captured anew."""
    variants = [case_of("llama", name) for name in ("keyformer", "h2o", "window", "snapkv", "full")]
    model = tiny("llama")

    def run(eos):
        contexts = prefill_together(model, prompts_for(), variants, max_new_tokens=NEW, seeds=[1, 2])
        return decode(model, contexts, GenerationParams(NEW, eos=eos), [1, 2], None, start=0.0)

    whole = run(None)
    ends = [tokens[NEW // 2] for tokens in whole[0].tokens]
    plain, graphs = [whole, run(ends)], RecordedGraphs()
    with_graphs(monkeypatch, graphs)
    for eos, expected in zip((None, ends), plain, strict=True):
        made = run(eos)
        for one, other in zip(made, expected, strict=True):
            assert one.tokens == other.tokens and one.sequences.tolist() == other.sequences.tolist()
            assert one.cache.kept_positions(0) == other.cache.kept_positions(0)
        if eos is None:
            assert graphs.calls.count("capture") == 2  # the second when full needs more columns
            assert graphs.calls.count("replay") == NEW - 6


def not_captured():
    """Name -> why, of every method with small settings, those that keep everything too."""
    configs = {name: config_of("llama", name, **NOT_LOOKED_AT) for name in METHODS}
    configs |= {name: CacheConfig(method, SCARCE) for name, method in RETRIEVAL.items()}
    found = {name: capture_obstacle(config) for name, config in configs.items()}
    return {name: why for name, why in found.items() if why is not None}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        pytest.param(name, why, marks=[] if name in ("full", "rkv") else pytest.mark.slow)
        for name, why in not_captured().items()
    ],
)
def test_what_cannot_be_captured_says_why(name, why, monkeypatch):
    """Its answer is that of eager steps, with a note."""
    config = config_of("llama", name) if name in METHODS else CacheConfig(RETRIEVAL[name], SCARCE)
    graphs = RecordedGraphs()
    made, plain = both(monkeypatch, graphs, config, None, new=6)
    assert made.tokens == plain.tokens and graphs.calls == []
    said = f"0 of 5 decode steps were replayed from a CUDA graph; {config.method.name} is not captured: {why}"
    assert made.cuda_graph == said


def test_a_capture_that_fails_changes_nothing(monkeypatch):
    graphs = RecordedGraphs(forbidden=frozenset({"argmin"}))
    made, plain = both(monkeypatch, graphs, case_of("llama", "keyformer"), None, new=12)
    assert made.tokens == plain.tokens and graphs.calls == ["warm_up", "capture"]
    assert all(torch.equal(a, b) for a, b in zip(made.logits, plain.logits, strict=True))
    assert "0 of 11" in made.cuda_graph and "the capture failed: operation not permitted" in made.cuda_graph


def test_a_replay_that_differs_is_not_trusted(monkeypatch):
    """A number of the host that is part of a step, which a graph would keep as it was."""
    original = BatchedEviction.accumulate

    def by_step(self, score, sums):
        original(self, score, sums * (1 + self.states[0].sequence.seq_len / 1000))

    monkeypatch.setattr(BatchedEviction, "accumulate", by_step)
    graphs = RecordedGraphs()
    made, plain = both(monkeypatch, graphs, case_of("llama", "h2o"), None, new=12)
    assert made.tokens == plain.tokens and graphs.calls == ["warm_up", "capture", "replay"]
    assert all(torch.equal(a, b) for a, b in zip(made.logits, plain.logits, strict=True))
    assert "0 of 11" in made.cuda_graph and "differed" in made.cuda_graph


def test_a_step_of_a_users_method_is_captured_and_waits_for_no_device(monkeypatch):
    """What is looked at leaves its answer on the device until the end."""
    made, plain = both(monkeypatch, RecordedGraphs(), CacheConfig(Users(), HALF), None, new=12)
    assert made.tokens == plain.tokens and made.cuda_graph.startswith("6 of 11")
    model = on_gpu("llama")
    with reads_of_decode_steps(model) as reads:
        generate(model, prompts_for(Users()), Users(), HALF, decoding=GenerationParams(12, eos=None))
    assert not [place for place in reads.places + reads.sends + reads.strays if place.startswith("core/")]


def reads(self, score, sums):
    if float(score.max()) < 0:
        score.zero_()


def masks(self, score, sums):
    score[score > 1e30] = score[score > 1e30]


def copies(self, score, sums):
    score.add_(torch.tensor([0.0]))


@pytest.mark.parametrize("offence", [reads, masks, copies])
def test_a_step_that_waits_for_the_host_is_not_captured(offence, monkeypatch):
    monkeypatch.setattr(BatchedEviction, "accumulate", offence)
    made, plain = both(monkeypatch, RecordedGraphs(), case_of("llama", "h2o"), None, new=12)
    assert made.tokens == plain.tokens and "0 of 11" in made.cuda_graph and "the capture failed" in made.cuda_graph


# docs/gpu_details.md says of every method whether its decode steps can be captured as a CUDA graph.


ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- capture: begin -->", "<!-- capture: end -->"
HALF = Budget(kv_ratio=0.5)


def table() -> str:
    """The options of `method` under their defaults, by what keeps their steps from being captured."""
    found: dict[str | None, list[str]] = {None: []}
    for name, (_, why) in obstacles().items():
        found.setdefault(why, []).append(f"`{name}`")
    lines = ["| captured | methods |", "|---|---|"]
    for why, names in sorted(found.items(), key=lambda pair: (pair[0] is not None, -len(pair[1]))):
        lines.append(f"| {'yes' if why is None else f'no: {why}'} | {', '.join(names)} |")
    return "\n".join(lines)


def test_the_page_says_what_the_code_decides() -> None:
    page = (ROOT / "docs" / "gpu_details.md").read_text("utf-8")
    written = page.partition(BEGIN)[2].partition(END)[0].strip()
    assert written == table(), "docs/gpu_details.md: put this table between the marks\n" + table()


def settings(*overrides: str) -> Settings:
    config, choices = composed(*overrides)
    return settings_of(config, choices, [word for word in overrides if not word.startswith("method=")])


def test_a_run_with_graphs_is_the_run_it_was() -> None:
    """The first replay is compared to the bit, so neither hash nor label tells the two apart."""
    plain, asked = settings("method=h2o", "cache.graph=off"), settings("method=h2o")
    assert (plain.cache.graph, asked.cache.graph) == ("off", "auto")
    assert plain.identity == asked.identity and plain.labels == asked.labels
    assert asked.baseline().cache.graph == "auto" and plain.baseline().identity == asked.baseline().identity
    older = {name: value for name, value in composed("method=h2o")[0]["cache"].items() if name != "graph"}
    assert build_cache(H2O(), HALF, older).graph == "auto"
    with pytest.raises(ConfigError, match=r"cache.graph must be one of auto, off, got 'on'"):
        settings("method=h2o", "cache.graph=on")


def test_settings_decide_too() -> None:
    """Other settings of the cache under one method; each reason names what to change."""

    def why(**options: Any) -> str:
        return capture_obstacle(CacheConfig(H2O(), HALF, **options)) or ""

    assert why() == ""
    assert "drops nothing" in why(mode="mask") and "new buffers" in why(mode="compact")
    assert why(cadence=Cadence(every=4)) == why(cadence=Cadence(every=None)) == ""
    assert "quantised" in why(quantization=Quantization(4, 4))
    assert "as prompts are" in why(positions="renumbered")
    assert "grow with the text" in why(select=SlotSelection(by="chunk"))
