"""A2SF (arXiv:2407.20485): its figures and tables as exhibits."""

from __future__ import annotations

import textwrap
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.lib import inside
from experiments.lib.draw import METRICS, bars, by_method, curves, legend, model_words, panel_grid
from experiments.lib.exhibits import Exhibit
from experiments.lib.tables import (
    Side,
    ahead,
    interval,
    interval_columns,
    judge,
    mean_columns,
    means_by,
    of,
    option,
    paired_gap,
    points,
    signed,
    with_gaps,
)
from experiments.lib.verdicts import (
    KL,
    Closer,
    Verdict,
    above,
    all_hold,
    better,
    by_divergence,
    count_closer,
    positive,
)
from kvexp.results.plots import color_of
from kvexp.results.read import WORDS, titled

# Words of a command line: what is fixed | what is swept.
TESTBED, PAPERS = "testbed_rope,testbed_learned,testbed_alibi,testbed_gqa", "llama2_7b,llama_7b,opt_6b7,opt_2b7"
REAL = "limit=24 task.max_new_tokens=64 | model=smollm2_135m task=cnn_dailymail"
REAL_CHOICE = (
    "limit=40 task.protocol=a2sf task.tasks=[openbookqa,winogrande,piqa,copa,arc_easy] | "
    "model=smollm2_135m task=lm_eval"
)
ONE_SHOT = {
    "testbed": f"task=testbed_choice limit=60 task.num_fewshot=1 | model={TESTBED}",
    "real": f"task.num_fewshot=1 {REAL_CHOICE}",
    "paper": f"task=lm_eval protocol=a2sf limit=null task.num_fewshot=1 | model={PAPERS}",
}
INSIDE = {
    "testbed": f"task=testbed_choice limit=60 kv_ratio=0.2 | model={TESTBED}",
    "real": "limit=12 task.max_prompt_tokens=512 | model=smollm2_135m task=cnn_dailymail",
    "paper": "task=xsum limit=20 kv_ratio=0.2 task.max_prompt_tokens=512 task.truncate=right | model=llama2_7b",
}
MASKS = INSIDE | {"paper": INSIDE["paper"].replace("kv_ratio=0.2 ", "")}
ALPHA = "method.alpha"


# Figs. 1, 4, 6 and Table 2: attention itself.

EVEN = 50.0  # percent of the score that the older half would hold if age did not matter
SINK_KEPT = 95.0  # percent of pruned rows that see the first token, for it to count as a sink, and as kept
MAPS = (("ideal", ""), ("window", ""), ("h2o", ""), ("a2sf", "method.alpha=0.1"), ("a2sf", "method.alpha=0.5"))
COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73")  # of tokens


def fig1_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per model, factor, quantity and part of the prompt; and what the older half holds, of all models."""
    table = means_by(frame, ["model", "method", "kv_ratio", "setting", "of", "bin"], ["percent"])
    return table.assign(**_older_half(frame, "score"), **_older_half(frame, "kept"))


def _older_half(frame: pd.DataFrame, name: str) -> dict[str, float]:
    """What it holds under either factor, and how much nearer to even the second comes, over prompts of all models."""
    old = frame[(frame["bin"] < inside.BINS // 2) & (frame["of"] == name)]
    old = old.groupby(["model", "setting", "prompt"], as_index=False)["percent"].sum()
    old = old.assign(off=(old["percent"] - EVEN).abs())
    plain = old["setting"].str.endswith("alpha=1.0")
    columns = interval_columns(f"{name}_closer", paired_gap(old, "off", plain, ~plain, ("prompt",)))
    for which, scores in (("plain", old[plain]), ("forgetting", old[~plain])):
        columns |= mean_columns(f"{name}_{which}", scores["percent"].tolist())
    return columns


def fig1_holds(table: pd.DataFrame) -> Verdict:
    """True if forgetting brings the older half's share of the score nearer to one half, by more than chance."""
    row = table.iloc[0]
    return judge(row, "score_closer", positive), (
        f"the older half of a prompt holds {interval(row, 'score_plain')} % of A2S and "
        f"{interval(row, 'score_forgetting')} % of A2SF, {signed(row, 'score_closer')} points nearer to even; of the "
        f"tokens that would be kept {interval(row, 'kept_plain')} % and {interval(row, 'kept_forgetting')} %, "
        f"{signed(row, 'kept_closer')} points nearer (not part of the verdict)"
    )


def fig1_draw(table: pd.DataFrame, figure: Figure) -> None:
    """A row per model, a column per factor: bars are scores, red marks the tokens that a budget would keep."""
    models, settings = sorted(set(table["model"])), sorted(set(table["setting"]), reverse=True)
    panels = panel_grid(figure, len(models), len(settings), (3.6 * len(settings), 1.9 * len(models) + 0.5))
    top = 1.05 * table["percent_high"].fillna(table["percent"]).max()
    for row, model in enumerate(models):
        for column, setting in enumerate(settings):
            axes = panels[row, column]
            runs = table[(table["model"] == model) & (table["setting"] == setting)]
            score, kept = (runs[runs["of"] == name].sort_values("bin") for name in ("score", "kept"))
            reach = score[["percent_low", "percent_high"]].sub(score["percent"], axis=0).abs().T.to_numpy()
            color = color_of("h2o" if setting.endswith("=1.0") else "a2sf")
            axes.bar(score["bin"], score["percent"], yerr=reach, color=color, error_kw={"elinewidth": 0.7})
            axes.plot(kept["bin"], kept["percent"], "_", color="#c00000", markersize=9, markeredgewidth=2)
            axes.axhline(100 / inside.BINS, color="black", linewidth=0.8, linestyle=":")
            axes.set_ylim(0, top)
            alpha = setting.rpartition("=")[2]
            name = "A2S, alpha 1" if alpha == "1.0" else f"A2SF, alpha {alpha}"
            axes.set_title(f"{name}: {model_words(model)}", fontsize=8)
            axes.set_xticks([0, inside.BINS - 1], ["oldest", "newest"], fontsize=8)
            if column == 0:
                axes.set_ylabel("% of score", fontsize=8)
    figure.supxlabel("sixteenths of the prompt; red: tokens a fifth of the cache would keep; dotted: even", fontsize=8)


def fig4_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Means over prompts per model and mask, the maps of the first model, and how near to ideal each middle comes."""
    frame = frame.assign(setting=frame["setting"].fillna("").astype(str))
    counted, maps = frame[frame["sink"].notna()], frame[frame["map"].notna()]
    means = means_by(counted, ["model", "method", "setting"], ["sink", "middle"])
    shown = maps[maps["model"] == maps["model"].iloc[0]][["model", "method", "setting", "layer", "map"]]
    ideal = counted[counted["method"] == "ideal"][["model", "prompt", "middle"]]
    off = counted.merge(ideal, on=["model", "prompt"], suffixes=("", "_ideal"))
    off = off.assign(off=(off["middle"] - off["middle_ideal"]).abs())
    mine = (off["method"] == "a2sf") & (off["setting"] == "method.alpha=0.1")
    nearer = interval_columns("nearer", paired_gap(off, "off", off["method"] == "h2o", mine, ("prompt",)))
    return pd.concat([means, shown], ignore_index=True).assign(**nearer)


def fig4_holds(table: pd.DataFrame) -> Verdict:
    """Two parts, of alpha 0.1: its middle is nearer to the ideal's than H2O's is, and it keeps the sink, where there is
    one: a model whose ideal choice has no use for the first token cannot say.
    """
    counted, first = table[table["sink"].notna()], table.iloc[0]
    middle = counted.groupby(["method", "setting"])["middle"].mean()
    named = ", ".join(f"{m} {s.rpartition('=')[2]} {v:.1f}".replace("  ", " ") for (m, s), v in middle.items())
    sinks, kept = [], []
    for model, means in counted.groupby("model"):
        mine = means[means["setting"] == "method.alpha=0.1"].iloc[0]
        ideal = means[means["method"] == "ideal"].iloc[0]["sink"]
        sinks.append(judge(mine, "sink", partial(above, mark=SINK_KEPT)) if ideal >= SINK_KEPT else None)
        kept.append(f"{model} {mine['sink']:.1f} (ideal {ideal:.1f}{'' if ideal >= SINK_KEPT else ': no sink'})")
    return all_hold([judge(first, "nearer", positive), *sinks]), (
        f"% of attention on the middle of the past: {named}; a2sf 0.1 is {signed(first, 'nearer')} points nearer to "
        f"the ideal than h2o. It keeps the first token in % of rows: {', '.join(kept)}"
    )


def fig4_draw(table: pd.DataFrame, figure: Figure) -> None:
    """A row per layer, a column per mask; the color is the cube root of attention, as in the paper."""
    maps = table[table["map"].notna()]
    layers = sorted(set(maps["layer"]))
    panels = panel_grid(figure, len(layers), len(MAPS), (2.1 * len(MAPS), 2.2 * len(layers) + 0.3))
    for row, layer in enumerate(layers):
        for column, (method, setting) in enumerate(MAPS):
            axes = panels[row, column]
            drawn = maps[(maps["layer"] == layer) & (maps["method"] == method) & (maps["setting"] == setting)]
            axes.set_xticks([])
            axes.set_yticks([])
            if drawn.empty:
                continue
            cells = np.array([line.split() for line in drawn["map"].iloc[0].split(";")], dtype=float) / 1000
            axes.imshow(np.cbrt(cells), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(f"{method} {setting.removeprefix('method.')}".strip(), fontsize=9)
            if column == 0:
                axes.set_ylabel(f"layer {layer:.0f}\nquery", fontsize=8)
            if row == len(layers) - 1:
                axes.set_xlabel("key", fontsize=8)
    figure.suptitle(model_words(str(maps["model"].iloc[0])), fontsize=9)


def fig6_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Means over prompts ("held" rows), and the curves of one prompt and head of the first model ("curve" rows)."""
    held = frame[frame["held"].notna()]
    means = means_by(held, ["model", "setting", "score"], ["held"])
    gap = paired_gap(held, "held", held["score"] == "A2SF", held["score"] == "A2S", ("prompt",))
    followed = frame[frame["curve"].notna() & (frame["model"] == frame["model"].iloc[0])]
    followed = followed.drop(columns=["held", "prompt", "task", "method", "kv_ratio"])
    return pd.concat([means, followed], ignore_index=True).assign(**interval_columns("ahead", gap))


def fig6_holds(table: pd.DataFrame) -> Verdict:
    """True if A2SF's choice holds more of the next rows' attention than A2S's, by more than chance."""
    first = table.iloc[0]
    means = table[table["held"].notna()].groupby("score")["held"].mean()
    named = ", ".join(f"{name} {means[name]:.1f} %" for name in inside.SCORES)
    return judge(first, "ahead", positive), (
        f"of the next {inside.NEXT} queries' attention is on what would be kept by {named}; "
        f"A2SF - A2S {signed(first, 'ahead')} points"
    )


def fig6_draw(table: pd.DataFrame, figure: Figure) -> None:
    """Three panels as in the paper, of one head of the first model; the red line is where pruning would happen."""
    followed = table[table["curve"].notna()]
    first = followed.iloc[0]
    (panels,) = panel_grid(figure, 1, len(inside.SCORES), (9.6, 2.9))
    for axes, name in zip(panels, inside.SCORES, strict=True):
        scores = followed[followed["score"] == name]
        for token, color in zip(sorted(set(scores["token"])), COLORS, strict=False):
            values = [float(value) for value in scores[scores["token"] == token]["curve"].iloc[0].split()]
            label = "first token (sink)" if token == 0 else f"token {token:.0f}"
            steps = [int(token) + i for i in range(len(values))]
            axes.plot(steps, values, color=color, linewidth=1.0, label=label)
        axes.axvline(first["pruned"], color="#c00000", linewidth=1.2)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("step (query)", fontsize=8)
    figure.axes[0].set_ylabel("score", fontsize=8)
    legend(figure)
    place = f"layer {first['layer'] + 1:.0f}, head {first['head'] + 1:.0f}"
    figure.suptitle(f"{model_words(first['model'])}: {place}", fontsize=9)


def table2_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per model, method and setting: means over prompts with 95 % intervals.

    over_h2o_ALPHA: how much more like the ideal a2sf is than h2o, over the prompts of all models.
    """
    frame = frame.assign(setting=frame["setting"].fillna("").astype(str))
    table = means_by(frame, ["model", "method", "kv_ratio", "setting"], inside.ALIKE)
    table = table.sort_values(["model", "method", "setting"], ignore_index=True)
    for alpha in ("0.1", "0.5"):
        mine = (frame["method"] == "a2sf") & frame["setting"].str.contains(f"alpha={alpha}", regex=False)
        gap = paired_gap(frame, "cosine", mine, frame["method"] == "h2o", ("prompt",))
        table = table.assign(**interval_columns(f"over_h2o_{alpha}", gap))
    return table


def table2_holds(table: pd.DataFrame) -> Verdict:
    """True if a2sf with both factors is above h2o by more than chance, and the window below both."""
    first, alphas = table.iloc[0], ("0.1", "0.5")
    means = table.groupby(["method", "setting"])["cosine"].mean()
    named = ", ".join(f"{' '.join(key).replace('method.', '').strip()} {value:.3f}" for key, value in means.items())
    over = "; ".join(f"a2sf {alpha} is {signed(first, f'over_h2o_{alpha}', 3)} over h2o" for alpha in alphas)
    common = ", ".join(f"{method} {value:.2f}" for method, value in table.groupby("method")["overlap"].mean().items())
    said = f"mean cosine to the ideal: {named}; {over}. Keys in common (not part of the verdict): {common}"
    verdicts = [judge(first, f"over_h2o_{alpha}", positive) for alpha in alphas]
    if False in verdicts or None in verdicts:
        return (False if False in verdicts else None), said
    return bool(means["window"].max() < means["h2o"].min()), said


def table2_draw(table: pd.DataFrame, figure: Figure) -> None:
    """A panel per measure, a bar per model and method."""
    models = list(dict.fromkeys(table["model"]))
    methods = ("window", "h2o", "a2sf")
    series = [(m, s) for m in methods for s in sorted(set(table[table["method"] == m]["setting"]))]
    (panels,) = panel_grid(figure, 1, len(inside.ALIKE), (3.3 * len(inside.ALIKE), 3.4))
    width = 0.8 / len(series)
    for axes, (name, title) in zip(panels, inside.ALIKE.items(), strict=True):
        for step, (method, setting) in enumerate(series):
            rows = table[(table["method"] == method) & (table["setting"] == setting)].set_index("model")
            rows = rows.reindex(models)
            spots = [at + (step + 0.5) * width - 0.4 for at in range(len(models))]
            reach = (rows[[f"{name}_low", f"{name}_high"]].sub(rows[name], axis=0)).abs().T.to_numpy()
            label = f"{method} {setting.removeprefix('method.')}".strip()
            look = {"color": color_of(method), "hatch": "//" if "0.5" in setting else None, "edgecolor": "white"}
            axes.bar(spots, rows[name], width * 0.92, yerr=reach, label=label, error_kw={"elinewidth": 0.8}, **look)
        axes.set_xticks(range(len(models)), [textwrap.fill(model_words(model), 12) for model in models], fontsize=8)
        axes.set_ylim(0, 1.02)
        axes.set_title(title, fontsize=9)
        axes.set_ylabel("mean cosine to ideal" if name.startswith("cosine") else "share of the ideal keys", fontsize=8)
    legend(figure)


# Figs. 3 and 5, Table 1 and section 4.4: accuracy, and answers that are written.

NEAR = 0.4  # the share of the cache from which A2SF is said to approach the ideal choice
LOW = (0.1, 0.3)  # factors where the peak is said to be
PEAK = "0.1"  # of these the factor of the authors' sweeps
SHOTS, CLAIMED = "task.num_fewshot", ("0", "1")
PAIRS = (("a2sf", "h2o"), ("h2o", "window"))
ASKED = "task.question"


def fig3_table(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The points, with what a2sf is ahead of h2o and of ideal, run by run and over all of them."""
    table = points(frame, metric, rival="h2o").assign(**ahead(frame, metric, "ideal", name="to_ideal"))
    pairs = {"overall": (of("a2sf"), of("h2o")), "overall_window": (of("a2sf"), of("window"))}
    return with_gaps(table, frame, metric, pairs)


def fig3_holds(table: pd.DataFrame) -> Verdict:
    """Two parts: a2sf leads h2o over all examples of all models and budgets, and at most points by the means."""
    rows, first = table[table["method"].eq("a2sf")], table.iloc[0]
    better_at, worse_at = int((rows["ahead_low"] > 0).sum()), int((rows["ahead_high"] < 0).sum())
    leads = int((rows["ahead"] > 0).sum())
    late = rows[rows["kv_ratio"] >= NEAR]
    short = int((late["to_ideal_high"] < 0).sum())
    return all_hold([judge(first, "overall", positive), 2 * leads > len(rows)]), (
        f"a2sf - h2o is {signed(first, 'overall')} points over all; it leads at {leads} of {len(rows)} points (by more "
        f"than chance at {better_at}, and is behind so at {worse_at}). From {NEAR} on it is below ideal by more than "
        f"chance at {short} of {len(late)}; a2sf - window is {signed(first, 'overall_window')} (neither is part of the "
        "verdict)"
    )


def fig5_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points with alpha; h2o, which has none, stands at both ends of the axis."""
    alphas = [
        float(option(setting, ALPHA, "nan")) if method == "a2sf" else float("nan")
        for method, setting in zip(frame["method"], frame["setting"], strict=True)
    ]
    frame = frame.assign(alpha=alphas)
    rows = points(frame, "acc", rival="h2o").assign(alpha=alphas, setting="")
    low, none = _with_alpha(*LOW), _with_alpha(0.0, 0.0)
    above_it = _with_alpha(LOW[1] + 0.05, 1.0)
    pairs = {"low_over_high": (low, above_it), "none_over_h2o": (none, of("h2o")), "low_over_none": (low, none)}
    rows = with_gaps(rows, frame, "acc", pairs)
    flat = rows[rows["method"].eq("h2o")]
    return pd.concat([rows[rows["method"].ne("h2o")], flat.assign(alpha=0.0), flat.assign(alpha=rows["alpha"].max())])


def _with_alpha(low: float, high: float) -> Side:
    return lambda run: low - 1e-9 <= run["alpha"] <= high + 1e-9


def fig5_holds(table: pd.DataFrame) -> Verdict:
    """Three parts over all models: 0.1 to 0.3 beats what is above and what is below it, and 0 beats H2O."""
    first = table.iloc[0]
    means = table[table["method"].eq("a2sf")].groupby("alpha")["value"].mean()
    parts = ("low_over_high", "none_over_h2o", "low_over_none")
    return all_hold(judge(first, name, positive) for name in parts), (
        f"best mean accuracy at {means.idxmax():g} ({means.max():.1f}); 0.1 to 0.3 is {signed(first, 'low_over_high')} "
        f"points over 0.4 and more, 0 is {signed(first, 'none_over_h2o')} over h2o; 0.1 to 0.3 is "
        f"{signed(first, 'low_over_none')} over 0"
    )


def table1_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points by shots, and the pooled differences of each pair and number of shots."""
    frame = frame.assign(shots=[option(setting, SHOTS) for setting in frame["setting"]])
    table = points(frame, "acc", rival="h2o").assign(shots=frame["shots"].to_numpy())
    pairs = {
        f"{first}_over_{other}_{shots}": (of(first, shots=shots), of(other, shots=shots))
        for first, other in PAIRS
        for shots in sorted(set(frame["shots"]), reverse=True)
    }
    table = with_gaps(table, frame, "acc", pairs)
    return by_method(table, ["model", "shots", "method"])


def table1_draw(table: pd.DataFrame, figure: Figure) -> None:
    """A panel per model, number of shots and task, which each have a full cache of their own."""
    tasks = table["task"] if table["task"].nunique() > 1 else [""] * len(table)
    named = [f"{task} {shots}-shot".strip() for task, shots in zip(tasks, table["shots"], strict=True)]
    shown = table.assign(task=named, bar=table["method"])
    bars(shown.sort_values("shots", ascending=False, kind="stable"), figure, columns=4, width=1.9)


def table1_holds(table: pd.DataFrame) -> Verdict:
    """Every pair with one shot and with none, pooled over the models; further numbers of shots are only shown."""
    first, verdicts, said = table.iloc[0], [], []
    for shots in sorted(set(table["shots"]), reverse=True):
        for mine, other in PAIRS:
            name = f"{mine}_over_{other}_{shots}"
            verdicts += [judge(first, name, positive)] if shots in CLAIMED else []
            said.append(f"{mine} - {other} {signed(first, name)} ({shots}-shot)")
    return all_hold(verdicts), "points of accuracy over all models: " + "; ".join(said)


def factors_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points of each task by its headline metric, with `alpha`; h2o, which has none, stands at both ends.

    `task` says when the question is read, where that was swept.
    """
    setting = [" ".join(word for word in words.split() if not word.startswith(ASKED)) for words in frame["setting"]]
    frame = frame.assign(task=_tasks(frame), setting=setting)
    parts = [points(runs, _metric(runs), rival="h2o") for _, runs in frame.groupby("task", sort=False)]
    table = pd.concat(parts, ignore_index=True)
    alpha = [float(option(words, ALPHA, "nan")) for words in table["setting"]]
    table = table.assign(alpha=alpha, setting="")
    flat = table[table["method"].eq("h2o")]
    ends = [flat.assign(alpha=0.0), flat.assign(alpha=1.0)]
    return pd.concat([table[table["method"].ne("h2o")], *ends], ignore_index=True)


def _metric(runs: pd.DataFrame) -> str:
    """ROUGE-2 of summaries, else the task's own first metric."""
    headline = str(runs["headline"].iloc[0])
    return "rouge2" if headline.startswith("rouge") else headline


def _tasks(frame: pd.DataFrame) -> list[str]:
    places = [option(words, ASKED) for words in frame["setting"]]
    return [f"{task} {where}".strip() for task, where in zip(frame["task"], places, strict=True)]


def factors_draw(table: pd.DataFrame, figure: Figure) -> None:
    """A panel per model, task and place of the question, each in its own metric."""
    bare = [" ".join(word for word in task.split() if word not in WORDS) for task in table["task"]]
    parts = zip(bare, table["question"], table["metric"], strict=True)
    named = [titled(f"{task} {METRICS.get(m, m)}", [place]) for task, place, m in parts]
    curves(table.assign(task=named).drop(columns="question"), figure, x="alpha", xlabel="forgetting factor")
    for axes in figure.axes:
        axes.set_ylabel("%" if axes.get_ylabel() else "", fontsize=8)


def factors_holds(table: pd.DataFrame) -> Verdict:
    """A factor of PEAK is better than H2O on every model and task; the best factor is shown too."""
    verdicts, said = [], []
    for (model, task), runs in table[table["method"].eq("a2sf")].groupby(["model", "task"], sort=False):
        mine, most = runs[runs["alpha"].eq(float(PEAK))], runs[runs["value"].eq(runs["value"].max())]
        if mine.empty:
            return None, f"a factor of {PEAK} was not run"
        verdicts.append(judge(mine.iloc[0], "ahead", better))
        best = "all alike" if len(most) == len(runs) else ", ".join(f"{alpha:g}" for alpha in most["alpha"])
        said.append(f"{model} {task} {signed(mine.iloc[0], 'ahead')}, best factor {best}")
    return all_hold(verdicts), f"a factor of {PEAK} over h2o, points of each task's metric: {'; '.join(said)}"


def factors_by_divergence(frame: pd.DataFrame) -> Verdict:
    """Judge the factor of PEAK against H2O by divergence; other factors and each task's best are only shown."""
    frame = frame.assign(task=_tasks(frame), alpha=[option(words, ALPHA) for words in frame["setting"]])
    parts, best = [], []
    for task, runs in frame.groupby("task", sort=False):
        for alpha in sorted(set(runs["alpha"]) - {""}):
            sides = (of("a2sf", task=task, alpha=alpha), of("h2o", task=task, alpha=""))
            parts.append(Closer(f"{alpha} than h2o in {task}", *sides, judged=float(alpha) == float(PEAK)))
        for _, least in runs[runs["method"].eq("a2sf")].nsmallest(1, KL).iterrows():
            best.append(f"{task} {least['alpha']} ({least[KL]:.3f})")
    return by_divergence(*parts, remark=lambda _: f"least divergence of a2sf's factors: {', '.join(best)}")(frame)


METHODS_AND_BUDGETS = "method=window,h2o,a2sf,ideal kv_ratio=0.1,0.2,0.3,0.4,0.6,0.8"
FACTORS = "method=a2sf method.alpha=0.0,0.1,0.3,0.5,0.7,0.9,1.0 kv_ratio=0.3"
QUESTIONS = "limit=24 | model=smollm2_135m task=news_qa task.question=in_prompt,after_eviction"
BOTH = ("", "h2o")  # a2sf, and H2O

EXHIBITS = (
    Exhibit(
        "a2sf_fig1",
        title=(
            "A2SF, Fig. 1: where in the prompt accumulated attention lies: plain (A2S) and with a forgetting factor "
            "(A2SF)"
        ),
        claim=(
            "Accumulated attention compares tokens of a decoder unfairly, since old ones were counted more often; "
            "with a forgetting factor scores are spread evenly over old and new tokens (arXiv:2407.20485, Fig. "
            "1; its panel of an encoder has no counterpart here)"
        ),
        axes="method=a2sf | method.alpha=1.0,0.1 kv_ratio=0.2",
        at=INSIDE,
        measure=inside.by_age,
        table=fig1_table,
        draw=fig1_draw,
        holds=fig1_holds,
    ),
    Exhibit(
        "a2sf_fig3",
        title="A2SF, Fig. 3: accuracy of multiple choice against the share of the cache, one shot",
        claim=(
            "In most cases A2SF is more accurate than H2O, from a tenth to four fifths of the cache; from 0.4 on "
            "it can come near the ideal choice (arXiv:2407.20485, Fig. 3 and section 4.2)"
        ),
        axes=METHODS_AND_BUDGETS,
        at={
            "testbed": ONE_SHOT["testbed"],
            "real": f"{ONE_SHOT['real']} kv_ratio=0.2,0.4,0.6",
            "paper": f"{ONE_SHOT['paper']} kv_ratio=0.1,0.2,0.3,0.4,0.5,0.6,0.8",
        },
        table=partial(fig3_table, metric="acc"),
        draw=partial(curves, paper="a2sf_fig3", xlabel="cache ratio (%)"),
        holds=fig3_holds,
    ),
    Exhibit(
        "a2sf_fig3_rouge",
        title="A2SF, Fig. 3 with summaries, which the paper does not have: ROUGE-2 against the share of the cache",
        claim=(
            "A2SF is better than H2O in generation as well (arXiv:2407.20485 claims it of multiple choice alone, "
            "in section 4.2; this is Fig. 3 with summaries)"
        ),
        axes=METHODS_AND_BUDGETS,
        at={
            "testbed": f"task=testbed_summary limit=60 | model={TESTBED}",
            "real": REAL,
            "paper": "task=cnn_dailymail limit=1000 | model=llama2_7b kv_ratio=0.1,0.2,0.3,0.4,0.5,0.6,0.8",
        },
        table=partial(fig3_table, metric="rouge2"),
        draw=partial(curves, xlabel="cache ratio (%)"),
        holds=fig3_holds,
        divergence=by_divergence(
            Closer("a2sf than h2o, over all budgets", of("a2sf"), of("h2o")),
            Closer("a2sf than window, over all budgets", of("a2sf"), of("window"), judged=False),
            remark=count_closer("a2sf", "h2o"),
        ),
    ),
    Exhibit(
        "a2sf_fig4",
        title="A2SF, Fig. 4: attention maps under row masks: what is left of the prompt in the eyes of each query",
        claim=(
            "H2O's mask is lambda-shaped: the middle of the past disappears from it, while A2SF's looks like the "
            "ideal one and keeps the first token, the sink, unprotected (arXiv:2407.20485, Fig. 4 and section "
            "4.3)"
        ),
        axes={"": "method=ideal,window,h2o kv_ratio=0.2", "alpha": "method=a2sf | method.alpha=0.1,0.5 kv_ratio=0.2"},
        at=MASKS | {"testbed": "task=testbed_choice limit=20 | model=testbed_rope,testbed_gqa"},
        measure=inside.maps,
        table=fig4_table,
        draw=fig4_draw,
        holds=fig4_holds,
    ),
    Exhibit(
        "a2sf_fig5",
        title="A2SF, Fig. 5: accuracy against the forgetting factor at 0.3 of the cache",
        claim=(
            "Accuracy peaks at a forgetting factor of 0.1 to 0.3 and falls above it; a factor of 0, no history at "
            "all, is still better than H2O in all cases (arXiv:2407.20485, Fig. 5 and section 4.4)"
        ),
        axes={
            "": "method=a2sf | method.alpha=0.0,0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9 kv_ratio=0.3",
            "h2o": "method=h2o | kv_ratio=0.3",
        },
        at=ONE_SHOT
        | {"real": {"": f"{ONE_SHOT['real']} method.alpha=0.0,0.1,0.2,0.3,0.5,0.9", "h2o": ONE_SHOT["real"]}},
        table=fig5_table,
        draw=partial(curves, x="alpha", xlabel="forgetting factor"),
        holds=fig5_holds,
    ),
    Exhibit(
        "a2sf_fig6",
        title=(
            "A2SF, Fig. 6: attention, A2S and A2SF of single tokens over the steps, and which foresees the next queries"
        ),
        claim=(
            "A late token that is attended to strongly has a small accumulated score, so that pruning by A2S "
            "removes it; A2SF keeps it (arXiv:2407.20485, Fig. 6): of the next queries' attention, more lies on "
            "what A2SF would keep"
        ),
        axes="method=a2sf | method.alpha=0.1 kv_ratio=0.2",
        at=INSIDE,
        measure=inside.foresight,
        table=fig6_table,
        draw=fig6_draw,
        holds=fig6_holds,
    ),
    Exhibit(
        "a2sf_table1",
        title="A2SF, Table 1: accuracy at a fifth of the cache, with one example before the question and with none",
        claim=(
            "At a fifth of the cache A2SF is more accurate than H2O, by 7.8 points with one shot and 5.1 without "
            "on average of seven data sets, and H2O than local attention (arXiv:2407.20485, Table 1, LLaMA-2-7B)"
        ),
        axes="task.num_fewshot=1,0 method=window,h2o,a2sf kv_ratio=0.2",
        at={
            "testbed": f"task=testbed_choice limit=120 task.size=120 | model={TESTBED}",
            "real": REAL_CHOICE,
            "paper": "task=lm_eval protocol=a2sf limit=null | model=llama2_7b",
        },
        table=table1_table,
        draw=table1_draw,
        holds=table1_holds,
    ),
    Exhibit(
        "a2sf_table2",
        title=(
            "A2SF, Table 2: how like the ideal choice's attention each method's attention is, under row masks at one "
            "budget"
        ),
        claim=(
            "A2SF's attention is more like the ideal choice's than H2O's or a local window's: mean cosine 0.991 "
            "(alpha 0.1) and 0.989 (0.5) against 0.967 and 0.318 at a fifth of the cache (arXiv:2407.20485, Table "
            "2)"
        ),
        axes={"": "method=window,h2o kv_ratio=0.2", "alpha": "method=a2sf | method.alpha=0.1,0.5 kv_ratio=0.2"},
        at=MASKS | {"testbed": f"task=testbed_choice limit=20 task.num_fewshot=1 | model={TESTBED}"},
        measure=inside.likeness,
        table=table2_table,
        draw=table2_draw,
        holds=table2_holds,
    ),
    Exhibit(
        "a2sf_factors",
        title="A2SF, section 4.4 in answers that are written: the forgetting factor, task by task",
        claim=(
            "A small forgetting factor, 0.1 to 0.3, is better than H2O's plain accumulation, whatever the task "
            "(arXiv:2407.20485, section 4.4, which has multiple choice alone; this is its Fig. 5 where answers are "
            "written)"
        ),
        axes={"": FACTORS, "h2o": "method=h2o kv_ratio=0.3", "qa": FACTORS, "qa_h2o": "method=h2o kv_ratio=0.3"},
        at={
            "testbed": dict.fromkeys(BOTH, "limit=60 | model=testbed_rope,testbed_gqa task=testbed_summary,testbed_qa"),
            "real": {"": REAL, "h2o": REAL, "qa": QUESTIONS, "qa_h2o": QUESTIONS},
            "paper": dict.fromkeys(BOTH, "limit=1000 | model=llama2_7b task=cnn_dailymail"),
        },
        table=factors_table,
        draw=factors_draw,
        holds=factors_holds,
        divergence=factors_by_divergence,
    ),
)
