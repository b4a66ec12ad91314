"""PQCache, Fig. 9b: quality against what the choice of tokens has to read."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.data import points
from experiments.lib.divergence import Closer, by_divergence, of
from experiments.lib.draw import curves
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import all_hold, ends, estimate, interval_columns, pooled_difference, positive

RIVALS = ("sparq", "infllm")


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points with what rows' receipts say was read (percent of the keys) and moved (bytes); the ends compared."""
    metric = "rouge2" if "rouge2" in frame else str(frame["headline"].iloc[0])
    read = (100 * frame["search_share"]).to_numpy()
    frame = frame.assign(read=read)
    made = points(frame, metric).assign(read=read, moved_bytes=frame["moved_bytes"].to_numpy())
    for rival in RIVALS:
        found = pooled_difference(frame, _end(frame, "pqcache", least=True), _end(frame, rival, least=True), metric)
        made = made.assign(**interval_columns(f"over_{rival}", found))
    for method in ("pqcache", *RIVALS):
        gain = pooled_difference(frame, _end(frame, method, least=False), _end(frame, method, least=True), metric)
        made = made.assign(**interval_columns(f"gain_{method}", gain))
    return made


def _end(frame: pd.DataFrame, method: str, least: bool):  # type: ignore[no-untyped-def]
    """The run of a method that reads least, or most."""
    runs = frame[frame["method"].eq(method)]["read"]
    wanted = runs.min() if least else runs.max()
    return lambda run: run["method"] == method and run["read"] == wanted


def draw(table: pd.DataFrame, figure: Figure) -> None:
    curves(table.assign(setting=""), figure, x="read", xlabel="read by the choice (% of the keys)")
    figure.set_size_inches(4.2, 3.2)
    for axes in figure.axes:
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Three parts: reading least pqcache is ahead of both, SPARQ gains by reading more, and it gains more than they."""
    first = table.iloc[0]

    def of(name: str) -> list[float]:
        return ends(first, name)

    least = table[table["method"].ne("full")].groupby("method")["read"].min()
    over = ", ".join(f"{estimate(*of(f'over_{r}'), sign=True)} over {r} ({least[r]:.2g} %)" for r in RIVALS)
    gains = ", ".join(f"{m} {estimate(*of(f'gain_{m}'), sign=True)}" for m in ("pqcache", *RIVALS))
    verdicts = [positive(*of(f"over_{rival}")[1:]) for rival in RIVALS] + [positive(*of("gain_sparq")[1:])]
    verdicts += [_less(of(f"gain_{method}"), of("gain_sparq")) for method in ("pqcache", "infllm")]
    return all_hold(verdicts), (
        f"reading {least['pqcache']:.2g} % of the keys pqcache is {over}; from the least to the most that was read "
        "they "
        f"gain: {gains}"
    )


def _less(one: list[float], other: list[float]) -> bool | None:
    """Whether a gain is below another: only intervals that are apart say so."""
    return True if one[2] < other[1] else False if one[1] > other[2] else None


EXHIBITS = {
    "fig9b": Exhibit(
        claim=(
            "With little extra communication PQCache is the best; from 1/128 to 1/16 of the keys it and InfLLM "
            "stay as they are, while SPARQ gains steadily (arXiv:2407.12820, Fig. 9b; in heads of 32 components, "
            "as here, the same choices read four times that share)"
        ),
        sweeps=("pqcache_fig9b", "pqcache_fig9b_sparq", "pqcache_fig9b_infllm"),
        table=table,
        draw=draw,
        holds=holds,
        divergence=by_divergence(
            Closer("pqcache than sparq, reading least", of("pqcache", "method.m=2"), of("sparq", "method.r=1")),
            Closer("pqcache than infllm, reading least", of("pqcache", "method.m=2"), of("infllm", "method.block=64")),
            Closer("sparq reading most than least", of("sparq", "method.r=8"), of("sparq", "method.r=1")),
            Closer(
                "pqcache reading most than least",
                of("pqcache", "method.m=8"),
                of("pqcache", "method.m=2"),
                judged=False,
            ),
        ),
    ),
}
