"""PQCache, Tables 2 and 3: many tasks, with a fifth and a tenth of the tokens; grouped heads, and one key per head."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.bars import bars
from experiments.lib.data import points
from experiments.lib.divergence import Closer, Near, by_divergence, of
from experiments.lib.draw import METHODS, METRICS, in_order
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import all_hold, ends, estimate, interval_columns, pooled_difference, positive, runs_of

RIVALS = ("h2o_c", "infllm", "sparq")
ALL = "score"  # any task's headline metric, in percent


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Points of every task, and per budget what pqcache is ahead of each rival and of full attention over all tasks."""
    parts = [
        points(part, str(part["headline"].iloc[0]), rival="h2o_c") for _, part in frame.groupby("task", sort=False)
    ]
    made = pd.concat(parts, ignore_index=True)
    same = frame.assign(scores=[_headline(run) for _, run in frame.iterrows()])
    for ratio in _ratios(made):
        mine = runs_of("pqcache", kv_ratio=ratio)
        gaps = {rival: pooled_difference(same, mine, runs_of(rival, kv_ratio=ratio), ALL) for rival in RIVALS}
        gaps["full"] = pooled_difference(same, mine, runs_of("full"), ALL)
        for rival, found in gaps.items():
            made = made.assign(**interval_columns(f"over_{rival}_{ratio:g}", found))
    place = {name: i for i, name in enumerate(in_order(made["method"].tolist(), METHODS))}
    return made.sort_values(["task", "kv_ratio", "method"], key=lambda c: c.map(place) if c.name == "method" else c)


def _headline(run: pd.Series) -> dict[str, dict[str, float]]:
    name = run["headline"]
    return {example: {ALL: scored[name]} for example, scored in run["scores"].items() if name in scored}


def _ratios(made: pd.DataFrame) -> list[float]:
    return sorted(made["kv_ratio"].dropna().unique(), reverse=True)


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """A panel per task: a bar per method, the darker one with more tokens."""
    named = table.assign(bar=table["method"], shade=[_share(ratio) for ratio in table["kv_ratio"]])
    named = named.assign(
        task=[f"{task}, {METRICS.get(m, m)}" for task, m in zip(table["task"], table["metric"], strict=True)]
    )
    runs = named[named["method"].ne("full")].sort_values("kv_ratio", ascending=False, kind="stable")
    bars(pd.concat([named[named["method"].eq("full")], runs]), figure, columns=4, width=2.7)
    for axes in figure.axes:
        axes.set_ylabel("%" if axes.get_ylabel() else "", fontsize=8)


def _share(ratio: float) -> str:
    return "" if pd.isna(ratio) else f"{100 * ratio:g} % of the tokens"


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Pqcache against every rival at every budget, over all tasks; against full attention it is only told."""
    first, verdicts, found = table.iloc[0], [], []
    means = table.groupby(["method", "kv_ratio"])["value"].mean()
    for ratio in _ratios(table):
        each = {name: ends(first, f"over_{name}_{ratio:g}") for name in (*RIVALS, "full")}
        verdicts += [positive(each[name][1], each[name][2]) for name in RIVALS]
        over = ", ".join(f"{estimate(*each[name], sign=True)} over {name}" for name in RIVALS)
        found.append(
            f"at {ratio:g} mean {means['pqcache', ratio]:.1f}, {over}; {estimate(*each['full'], sign=True)} to full "
            "attention"
        )
    return all_hold(verdicts), "; ".join(found)


BY_DIVERGENCE = by_divergence(
    Near("pqcache at 0.2", of("pqcache", kv_ratio=0.2)),
    Near("oracle at 0.2", of("oracle", kv_ratio=0.2), judged=False),
    *(
        Closer(f"pqcache than {rival} at {ratio:g}", of("pqcache", kv_ratio=ratio), of(rival, kv_ratio=ratio))
        for ratio in (0.2, 0.1)
        for rival in RIVALS
    ),
)

EXHIBITS = {
    "table2": Exhibit(
        title="PQCache, Table 2: a model with grouped heads on many tasks, with a fifth and a tenth of the tokens",
        claim=(
            "With 1/5 and 1/10 of the tokens and as little to read for the choice, PQCache is better on average "
            "than H2O(C), InfLLM and SPARQ: by 3.88 and 6.21 points over the best of them on LongBench, and no "
            "worse than full attention at 1/5 (arXiv:2407.12820, Table 2, Mistral-7B; tasks of the testbed stand "
            "for LongBench's)"
        ),
        sweeps=("pqcache_table2", "pqcache_table2_infllm"),
        table=table,
        draw=draw,
        holds=holds,
        divergence=BY_DIVERGENCE,
    ),
    "table3": Exhibit(
        title="PQCache, Table 3: a model whose every query head has its own keys, otherwise as Table 2",
        claim=(
            "The same holds where every query head has its own keys: PQCache is 1.61 and 1.60 points over the "
            "best of H2O(C), InfLLM and SPARQ with 1/5 and 1/10 of the tokens (arXiv:2407.12820, Table 3, "
            "LLaMA-2-7B-Chat)"
        ),
        testbed_only="it is about models whose every query head has its own keys; SmolLM2's heads are grouped",
        sweeps=("pqcache_table3", "pqcache_table3_infllm"),
        table=table,
        draw=draw,
        holds=holds,
    ),
}
