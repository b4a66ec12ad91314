"""PQCache, Fig. 10d: how many of the tokens chosen are in the block cache, by policy and blocks noted per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.data import option, paper_numbers
from experiments.lib.draw import finish, legend
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import above, all_hold, ends, estimate, interval_columns, mean_columns, paired_gap
from kvexp.generate import GenerationParams, generate, receipts
from kvexp.results.plots import DASHES, color_of
from kvexp.retrieval import PQCache
from kvexp.run.settings import Settings
from kvexp.util import ConfigError

NEW = 48  # tokens decoded after each document
ALIKE = 0.05  # the difference between policies up to which they count as alike
LEVEL = 0.5  # "around 0.5", and 0.6 at the paper's best: what the best number of blocks must reach


def measure(model: Any, prompts: Sequence[Sequence[int]], settings: Settings) -> pd.DataFrame:
    """One row per prompt: the share of chosen (kv head, token) pairs that were in the cache, all steps and layers."""
    if not isinstance(settings.method, PQCache):
        raise ConfigError(f"only method=pqcache has this block cache, got {settings.method.name}")
    rows = []
    for number, ids in enumerate(prompts):
        made = generate(model, [list(ids)], settings.cache, decoding=GenerationParams(NEW, eos=None))
        account = receipts(made.cache)[0].retrieval
        assert account is not None
        rows.append({"prompt": number, "rate": account["cache_hit_rate"], "prompt_tokens": len(ids)})
    return pd.DataFrame(rows)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean hit rate per policy and number of blocks; the policies compared, and the rise and the fall of each."""
    policy = frame["setting"].map(lambda setting: option(setting, "method.cache_policy"))
    blocks = frame["setting"].map(lambda setting: int(option(setting, "method.cache_blocks_per_step")))
    frame = frame.assign(policy=policy, blocks=blocks)
    rows = []
    for (model, name, count), part in frame.groupby(["model", "policy", "blocks"]):
        row: dict[str, Any] = {"model": model, "method": "pqcache", "policy": name, "blocks": count}
        row |= {"prompts": len(part), "prompt_tokens": part["prompt_tokens"].mean()}
        rows.append(row | mean_columns("rate", part["rate"].tolist()))
    made = pd.DataFrame(rows)
    lru = frame["policy"] == "lru"
    made = made.assign(**interval_columns("lru_over_lfu", paired_gap(frame, "rate", lru, ~lru, ("prompt",))))
    for name, part in made.groupby("policy"):
        mine = frame["policy"] == name
        best, fewest, most = part.loc[part["rate"].idxmax(), "blocks"], part["blocks"].min(), part["blocks"].max()
        top = mine & (frame["blocks"] == best)
        for word, end in (("rise", fewest), ("fall", most)):
            found = paired_gap(frame, "rate", top, mine & (frame["blocks"] == end), ("prompt",))
            made = made.assign(**interval_columns(f"{word}_{name}", found))
    return made


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """A line per policy; the text's own "around 0.5" as a thin line."""
    figure.set_layout_engine("constrained")
    figure.set_size_inches(3.8, 3.0)
    axes = figure.add_subplot()
    for (policy, part), dash, marker in zip(table.groupby("policy"), DASHES, "os", strict=False):
        reach = part[["rate_low", "rate_high"]].sub(part["rate"], axis=0).abs().T.to_numpy()
        look = {"color": color_of("pqcache"), "linestyle": dash, "marker": marker, "markersize": 4, "capsize": 2}
        axes.errorbar(part["blocks"], part["rate"], reach, label=str(policy).upper(), linewidth=1.2, **look)
    around = paper_numbers("pqcache_fig10d")
    axes.axhline(around["value"].min(), color="0.5", linewidth=0.8, linestyle=":", label="the paper's text: around 0.5")
    axes.set_xscale("log", base=2)
    finish(axes, "blocks noted per step", "hit rate")
    axes.set_xticks(sorted(set(table["blocks"])), [str(n) for n in sorted(set(table["blocks"]))])
    legend(figure)


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Three parts: policies at most ALIKE apart on average, rates that reach LEVEL, a rise and a fall of each."""
    first, policies = table.iloc[0], sorted(set(table["policy"]))

    def of(name: str) -> list[float]:
        return ends(first, name)

    apart = of("lru_over_lfu")
    alike = True if max(abs(apart[1]), abs(apart[2])) <= ALIKE else False if min(map(abs, apart[1:])) > ALIKE else None
    turns = [_turns(of(f"{word}_{name}")) for name in policies for word in ("rise", "fall")]
    told = "; ".join(
        f"{n}: {estimate(*of(f'rise_{n}'), 3)} up to its best, {estimate(*of(f'fall_{n}'), 3)} down" for n in policies
    )
    best = [part.loc[part["rate"].idxmax()] for _, part in table.groupby("policy")]
    levels = [above(row["rate_low"], row["rate_high"], LEVEL) for row in best]
    return all_hold([alike, *levels, *turns]), (
        f"hit rates {table['rate'].min():.2f} to {table['rate'].max():.2f}; lru - lfu "
        f"{estimate(*apart, 3, sign=True)}; {told}"
    )


def _turns(found: list[float]) -> bool | None:
    """A best that stands at an end has nothing to rise from, or to fall to: its gap is exactly 0."""
    return True if found[1] > 0 else False if found[0] == 0 else None


EXHIBITS = {
    "fig10d": Exhibit(
        claim=(
            "LRU and LFU have alike hit rates of around 0.5, and 0.6 at best; as more blocks are noted per step "
            "the rate rises first and then falls (arXiv:2407.12820, Fig. 10d and section 4.3.4)"
        ),
        measure=measure,
        table=table,
        draw=draw,
        holds=holds,
    ),
}
