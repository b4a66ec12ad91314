"""A2SF, section 4.4 in answers that are written: the forgetting factor, task by task, at 0.3 of the cache."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.data import option, points
from experiments.lib.divergence import KL, Closer, by_divergence
from experiments.lib.draw import METRICS, curves
from experiments.lib.exhibits import Exhibit
from experiments.lib.stats import all_hold, better, ends, estimate
from kvexp.results.read import WORDS, titled

KEY, ASKED = "method.alpha", "task.question"
PEAK = "0.1"  # of the paper's peak, 0.1 to 0.3, the factor of the authors' sweeps


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points of each task by its headline metric, with `alpha`; h2o, which has none, stands at both ends.

    `task` says when the question is read, where that was swept.
    """
    setting = [" ".join(word for word in words.split() if not word.startswith(ASKED)) for words in frame["setting"]]
    frame = frame.assign(task=_tasks(frame), setting=setting)
    parts = [points(part, _metric(part), rival="h2o") for _, part in frame.groupby("task", sort=False)]
    made = pd.concat(parts, ignore_index=True)
    alpha = [float(option(words, KEY, "nan")) for words in made["setting"]]
    made = made.assign(alpha=alpha, setting="")
    flat = made[made["method"].eq("h2o")]
    return pd.concat(
        [made[made["method"].ne("h2o")], flat.assign(alpha=0.0), flat.assign(alpha=1.0)], ignore_index=True
    )


def _metric(part: pd.DataFrame) -> str:
    """ROUGE-2 of summaries, else the task's own first metric."""
    headline = str(part["headline"].iloc[0])
    return "rouge2" if headline.startswith("rouge") else headline


def _tasks(frame: pd.DataFrame) -> list[str]:
    asked = [option(words, ASKED) for words in frame["setting"]]
    return [f"{task} {where}".strip() for task, where in zip(frame["task"], asked, strict=True)]


def draw(table: pd.DataFrame, figure: Figure) -> None:
    """A panel per model, task and place of the question, each in its own metric."""
    parts = zip(table["task"], table["question"], table["metric"], strict=True)
    named = [titled(f"{_bare(task)} {METRICS.get(m, m)}", [asked]) for task, asked, m in parts]
    curves(table.assign(task=named).drop(columns="question"), figure, x="alpha", xlabel="forgetting factor")
    for axes in figure.axes:
        axes.set_ylabel("%" if axes.get_ylabel() else "", fontsize=8)


def _bare(task: str) -> str:
    """The task without its place of the question."""
    return " ".join(word for word in task.split() if word not in WORDS)


def holds(table: pd.DataFrame) -> tuple[bool | None, str]:
    """A factor of PEAK is better than H2O on every model and task; where the best factor lies is told."""
    verdicts, found = [], []
    for (model, task), part in table[table["method"].eq("a2sf")].groupby(["model", "task"], sort=False):
        mine, most = part[part["alpha"].eq(float(PEAK))], part[part["value"].eq(part["value"].max())]
        if mine.empty:
            return None, f"a factor of {PEAK} was not run"
        gap = ends(mine.iloc[0], "ahead")
        verdicts.append(better(*gap[1:]))
        best = "all alike" if len(most) == len(part) else ", ".join(f"{alpha:g}" for alpha in most["alpha"])
        found.append(f"{model} {task} {estimate(*gap, sign=True)}, best factor {best}")
    return all_hold(verdicts), f"a factor of {PEAK} over h2o, points of each task's metric: {'; '.join(found)}"


def holds_by_divergence(frame: pd.DataFrame) -> tuple[bool | None, str]:
    """The same by divergence; of each task every factor against H2O is told, and which diverges least."""
    frame = frame.assign(task=_tasks(frame), alpha=[option(words, KEY) for words in frame["setting"]])
    parts, best = [], []
    for task, part in frame.groupby("task", sort=False):
        for alpha in sorted(set(part["alpha"]) - {""}):
            mine, rival = _runs(str(task), "a2sf", alpha), _runs(str(task), "h2o", "")
            parts.append(Closer(f"{alpha} than h2o in {task}", mine, rival, judged=float(alpha) == float(PEAK)))
        for _, least in part[part["method"].eq("a2sf")].nsmallest(1, KL).iterrows():
            best.append(f"{task} {least['alpha']} ({least[KL]:.3f})")
    return by_divergence(*parts, told=lambda _: f"least divergence of a2sf's factors: {', '.join(best)}")(frame)


def _runs(task: str, method: str, alpha: str):  # type: ignore[no-untyped-def]
    return lambda run: run["task"] == task and run["method"] == method and run["alpha"] == alpha


EXHIBITS = {
    "factors": Exhibit(
        title="A2SF, section 4.4 in answers that are written: the forgetting factor, task by task",
        claim=(
            "A small forgetting factor, 0.1 to 0.3, is better than H2O's plain accumulation, whatever the task "
            "(arXiv:2407.20485, section 4.4, which has multiple choice alone; this is its Fig. 5 where answers are "
            "written)"
        ),
        sweeps=("a2sf_factors", "a2sf_factors_h2o"),
        real_sweeps=("a2sf_factors", "a2sf_factors_h2o", "a2sf_factors_qa", "a2sf_factors_qa_h2o"),
        table=table,
        draw=draw,
        holds=holds,
        divergence=holds_by_divergence,
    ),
}
