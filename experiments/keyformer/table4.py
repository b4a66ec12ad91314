"""Keyformer, Table 4: what is added to the logits before the score, 60 % of the cache."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.bars import bars
from experiments.lib.data import ahead, option, points
from experiments.lib.divergence import Closer, by_divergence, of
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import all_hold, better, estimate

NOISES = ("gumbel", "gaussian", "constant", "none")
FRESH = {"true": "drawn anew for each query and key (the authors' code)", "false": "drawn once per key (Algorithm 1)"}


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """`behind`: the paired difference to Gumbel noise drawn the same way, negative where Gumbel is better."""
    made = points(frame, "rouge2")
    noise = made["setting"].map(lambda words: option(words, "method.noise"))
    fresh = made["setting"].map(lambda words: option(words, "method.fresh"))
    made = made.assign(bar=noise, shade=fresh.map(FRESH).fillna(""))
    columns = {}
    for kind in FRESH:
        each = ahead(frame, "rouge2", "keyformer", f"method.fresh={kind} method.noise=gumbel", "behind")
        columns = (
            each
            if not columns
            else {
                name: [
                    new if one == kind else old for old, new, one in zip(columns[name], each[name], fresh, strict=True)
                ]
                for name in each
            }
        )
    places = {name: place for place, name in enumerate(NOISES)}
    made = made.assign(**columns, _place=noise.map(places).fillna(-1), _shade=fresh.ne("true"))
    return made.sort_values(["model", "_place", "_shade"], ignore_index=True).drop(columns=["_place", "_shade"])


def draw(table: pd.DataFrame, figure: Figure) -> None:
    words = table["setting"].str.replace("method.fresh=true", "").str.strip()
    bars(table.assign(setting=words), figure, "keyformer_table4")


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """Gumbel above each of the others on every model, noise drawn as in the authors' code."""
    code, paper = (_others(table, kind) for kind in ("true", "false"))
    verdicts = [better(-high, -low) for low, high in zip(code["behind_low"], code["behind_high"], strict=True)]
    values = code.pivot_table(index="model", columns="bar", values="value")
    both = {"constant", "none"} <= set(values)
    same = both and bool((values["constant"] == values["none"]).all())
    remark = "; constant and none are the same to the last digit, as the softmax demands" if same else ""
    found = f"Gumbel less the other, ROUGE-2 points: {_cells(code)}{remark}"
    return all_hold(verdicts), f"{found}. Drawn once per key (not part of the verdict): {_cells(paper)}"


def _others(table: pd.DataFrame, fresh: str) -> pd.DataFrame:
    return table[table["shade"].eq(FRESH[fresh]) & table["bar"].ne("gumbel")]


def _cells(runs: pd.DataFrame) -> str:
    return "; ".join(
        f"{r.model} {r.bar} {estimate(-r.behind, -r.behind_high, -r.behind_low, sign=True)}" for r in runs.itertuples()
    )


def _closer(fresh: str, judged: bool) -> list[Closer]:
    """Gumbel noise against each other, drawn the same way."""
    runs = {name: of("keyformer", f"method.fresh={fresh} method.noise={name}") for name in NOISES}
    how = "" if judged else ", once per key"
    return [Closer(f"gumbel than {name}{how}", runs["gumbel"], runs[name], judged) for name in NOISES[1:]]


EXHIBITS = {
    "table4": Exhibit(
        claim=(
            "Gumbel noise in the score gives a better ROUGE-2 than Gaussian noise, a constant and none, at 60 % "
            "of the KV cache (arXiv:2403.09054, Table 4)"
        ),
        table=table,
        draw=draw,
        holds=holds,
        divergence=by_divergence(*_closer("true", judged=True), *_closer("false", judged=False)),
    ),
}
