"""Keyformer (arXiv:2403.09054): its figures and tables as exhibits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.clock import Ratio, ratio
from experiments.lib import inside
from experiments.lib.draw import (
    MODELS,
    bars,
    best_of,
    by_method,
    curves,
    in_order,
    legend,
    model_lines,
    model_words,
    panel_grid,
    settings_curves,
    settings_grid,
)
from experiments.lib.exhibits import Exhibit
from experiments.lib.speed import (
    NONE_YET,
    cells,
    draw_speed,
    found_of,
    newest,
    ours,
    over,
    samples,
    times_at,
    with_paper,
)
from experiments.lib.tables import ahead, interval, judge, means_by, option, paper_numbers, points, signed
from experiments.lib.verdicts import (
    Closer,
    Near,
    Part,
    Verdict,
    above,
    all_hold,
    beats_rival,
    below_mark,
    better,
    by_divergence,
    count_closer,
    each_panel,
    each_row,
    leads,
    lowest,
    of,
    reaches,
    stays_below,
)
from kvexp.results.plots import color_of

# Words of a command line: what is fixed | what is swept.
TESTBED, PAPERS = "testbed_rope,testbed_learned,testbed_alibi", "gptj_6b,cerebras_6b7,mpt_7b"
REAL = "limit=24 task.max_new_tokens=64 | model=smollm2_135m task=cnn_dailymail"
SAMPLED = "generation=beam4 limit=1000 task.sample=with_replacement"
FULL_TASKS = "task.tasks=[copa,openbookqa,winogrande,piqa]"
INSIDE = {
    "testbed": f"limit=40 | model={TESTBED} task=testbed_summary",
    "real": "limit=12 task.max_prompt_tokens=512 | model=smollm2_135m task=cnn_dailymail",
    "paper": f"limit=20 task.max_prompt_tokens=1024 | model={PAPERS} task=cnn_dailymail",
}


def summaries(testbed: str = TESTBED, paper: str = PAPERS) -> dict[str, str]:
    """Summaries at each scale, by these models of the testbed and of the paper."""
    return {
        "testbed": f"limit=120 task.size=120 | model={testbed} task=testbed_summary",
        "real": REAL,
        "paper": f"{SAMPLED} | model={paper} task=cnn_dailymail",
    }


# Figs. 1, 9, 10 and Table 1: speed, from benchmarks/results.

LENGTHS, FASTER = ("1024+1024", "2048+2048", "4096+4096"), ("h2o@0.9", "keyformer@0.5")
GROWTH = ("total_time_over_512", "kv_GB")
PARTS, PART_MARK = ("kv_movement_of_full", "gumbel_overhead_of_full"), 1 / 2.9
NAMES = {512: "512", 1024: "1k", 2048: "2k", 4096: "4k"}


def fig1_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Total time of full attention over that of 512 tokens, and GB of KV cache and weights."""
    rows = []
    for cell in cells("keyformer_figures", figure=1)[-1:]:
        for row in cell["rows"]:
            ratio = over(samples(cell, row["variant"]), samples(cell, "512"), "total_s")
            if ratio is not None:
                rows.append(ours(row["variant"], "full", GROWTH[0], ratio, cell))
            size = row.get("kv_bytes", 0) / 2**30
            rows.append(ours(row["variant"], "full", GROWTH[1], Ratio(size, size, size), cell))
    table = with_paper("keyformer_fig1", rows)
    return table[table["metric"].isin(GROWTH)].reset_index(drop=True)


def fig9_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Total time of full attention (kvexp's own) over that of the method, four beams as in the paper."""
    rows = []
    for length, cell in newest(LENGTHS, batch=1, beams=4):
        for method in FASTER:
            ratio = over(samples(cell, "full"), samples(cell, method), "total_s")
            rows += [] if ratio is None else [ours(length, method, "speedup", ratio, cell)]
    return with_paper("keyformer_fig9", rows)


def fig10_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A step's time less that of a step with 64 slots, over the same of full; moving and multiplying are not parted."""
    rows = []
    for cell in cells("keyformer_figures", figure=10)[-1:]:
        for n in cell["key"]["lengths"]:
            for metric, share in zip(PARTS, _parts_of_a_step(cell, n), strict=True):
                if share is not None:
                    rows.append(ours(NAMES.get(n, str(n)), "keyformer@0.5", metric, share, cell))
    table = with_paper("keyformer_fig10", rows)
    return table[table["metric"].isin(PARTS)].reset_index(drop=True)


def _parts_of_a_step(cell: Any, n: int) -> tuple[Ratio | None, Ratio | None]:
    """(without noise, the noise), over full's part; None where full's part is not above the clock's noise."""
    names = (f"{n} full", f"{n} keyformer@0.5", f"{n} keyformer_quiet@0.5", "little")
    times = [[sample["tpot_s"] for sample in samples(cell, name)] for name in names]
    if not all(times):
        return None, None
    full, noisy, quiet, least = times
    whole = [a - b for a, b in zip(full, least, strict=True)]
    if min(whole) <= 0:
        return None, None
    moved = ratio([a - b for a, b in zip(quiet, least, strict=True)], whole)
    return moved, ratio([a - b for a, b in zip(noisy, quiet, strict=True)], whole)


def fig10_holds(table: pd.DataFrame) -> Verdict:
    """The cache's part at 4k against 1 / 2.9 of full's."""
    row, noise = (found_of(table, "4k", "keyformer@0.5", metric) for metric in PARTS)
    if row is None:
        taken = [cell["from"]["machine"] for cell in cells("keyformer_figures", figure=10)[-1:]]
        return None, f"{taken[0]}: full attention's cache takes no longer than the clock's noise" if taken else NONE_YET
    said = f"the cache's part is {row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f}) of full's"
    said += "" if noise is None else f", the noise {noise['value']:.2f}"
    verdict = True if row["high"] <= PART_MARK else False if row["low"] > PART_MARK else None
    return verdict, f"{said}, {row['machine']}"


def table1_table(frame: pd.DataFrame) -> pd.DataFrame:
    """New tokens of all prompts over the seconds of the whole generation, four beams as in the paper."""
    rows = []
    for batch in (1, 2):
        for length, cell in newest(LENGTHS, batch=batch, beams=4):
            for method in ("full", *FASTER):
                new = int(length.partition("+")[2])
                rates = sorted(batch * new / sample["total_s"] for sample in samples(cell, method))
                if rates:
                    ratio = Ratio(rates[len(rates) // 2], rates[0], rates[-1])
                    name = method if batch == 1 else f"{method} batch {batch}"
                    rows.append(ours(length, name, "tokens_per_s", ratio, cell))
    return with_paper("keyformer_table1", rows)


def table1_holds(table: pd.DataFrame) -> Verdict:
    """Lowest over highest and highest over lowest of the rates, against 2 (the larger batch is only shown)."""
    names = ("full", "keyformer@0.5", "keyformer@0.5 batch 2")
    full, half, larger = (found_of(table, LENGTHS[-1], name, "tokens_per_s") for name in names)
    if full is None or half is None:
        return None, NONE_YET
    low, high = half["low"] / full["high"], half["high"] / full["low"]
    batch = "" if larger is None else f"; batch 2: {larger['value'] / full['value']:.2f}"
    said = f"{half['value'] / full['value']:.2f} ({low:.2f} to {high:.2f}) times full at {LENGTHS[-1]}{batch}"
    return above(low, high, 2.0), f"{said}, {full['machine']}"


# Figs. 3 and 4: attention itself.

SHARE, HELD = 0.4, 90.0  # the key tokens' share of the tokens; percent of the attention that they hold
MOST_TICKS = 12  # layers; of more every fifth is named
UNEVEN = 1.0  # percent of the kept tokens' score that must change hands for the gain to be called uneven


def per_prompt(frame: pd.DataFrame, by: str, value: str) -> pd.DataFrame:
    """One row per model and value of `by`: the mean over prompts, with its interval."""
    return means_by(frame, ["model", "task", by], [value], "n", sort=False)


def fig3a_draw(table: pd.DataFrame, figure: Figure) -> None:
    paper = paper_numbers("keyformer_fig3a").rename(columns={"value": "sparsity"})
    axes = model_lines(table, paper, figure, "layer", "sparsity", "layer", "attention sparsity (%)")
    layers = sorted(table["layer"].unique())
    axes.set_xticks(layers if len(layers) <= MOST_TICKS else [layers[0], *layers[4::5]])
    axes.set_ylim(0, 100)


def fig3a_holds(table: pd.DataFrame) -> Verdict:
    """On every model the intervals of two layers do not touch. How sparse is sparse the paper does not say."""
    verdicts: list[bool | None] = []
    said = []
    for model, layers in table.groupby("model", sort=False):
        most, least = layers.loc[layers["sparsity"].idxmax()], layers.loc[layers["sparsity"].idxmin()]
        verdicts.append(True if most["sparsity_low"] > least["sparsity_high"] else None)
        edges = [f"{interval(row, 'sparsity')} % (layer {row['layer']})" for row in (least, most)]
        said.append(f"{model} from {' to '.join(edges)}")
    return all_hold(verdicts), "; ".join(said)


def fig3b_draw(table: pd.DataFrame, figure: Figure) -> None:
    paper = paper_numbers("keyformer_fig3b")
    paper = paper.assign(share=100 * paper["kv_ratio"], mass=100 * paper["value"])
    labels = ("tokens, best first (%)", "attention score (%)")
    axes = model_lines(table.assign(share=100 * table["share"]), paper, figure, "share", "mass", *labels)
    axes.axhline(HELD, color="0.4", linewidth=0.8, linestyle="--")
    axes.axvline(100 * SHARE, color="0.4", linewidth=0.8, linestyle="--")
    axes.set_ylim(0, 102)


def fig3b_holds(table: pd.DataFrame) -> Verdict:
    """At least 90 % of the score on 40 % of the tokens, on every model."""
    rows = [row for _, row in table[table["share"].sub(SHARE).abs().lt(1e-9)].iterrows()]
    cells = "; ".join(f"{row['model']} {interval(row, 'mass')} %" for row in rows)
    verdicts = [judge(row, "mass", partial(above, mark=HELD)) for row in rows]
    return all_hold(verdicts), f"40 % of the tokens hold {cells} of the score"


def fig3c_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points, methods in the papers' order."""
    table = points(frame, "rouge2")
    return by_method(table.assign(bar=table["method"].str.replace("_", " ")), ["method"]).reset_index(drop=True)


def fig4_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per model, before or after, and rank: percent of the attention; what was lost, what changed hands."""
    return means_by(frame, ["model", "of", "rank"], ["score", "lost", "uneven"], "n", sort=False)


def fig4_draw(table: pd.DataFrame, figure: Figure) -> None:
    models = in_order(table["model"].tolist(), MODELS)
    (panels,) = panel_grid(figure, 1, len(models), (2.6 * len(models) + 0.3, 2.7))
    for place, (axes, model) in enumerate(zip(panels, models, strict=True)):
        for name, color, shift in (("before", color_of("full"), -0.2), ("after", color_of("h2o"), 0.2)):
            bars = table[table["model"].eq(model) & table["of"].eq(name)].sort_values("rank")
            label = "full attention" if name == "before" else "after the reduction"
            reach = [bars["score"] - bars["score_low"], bars["score_high"] - bars["score"]]
            look = {"color": color, "label": label, "width": 0.4, "error_kw": {"elinewidth": 0.6, "ecolor": "0.4"}}
            axes.bar(bars["rank"] + shift, bars["score"], yerr=reach, **look)
        axes.set_yscale("log")
        axes.set_title(f"{model_words(model)} (n = {int(table['n'].min())})", fontsize=8)
        axes.set_xticks([0, int(table["rank"].max())], ["best", "last"], fontsize=7)
        axes.set_xlabel("tokens that stay, by score", fontsize=8)
        axes.set_ylabel("attention (%)" if place == 0 else "", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    legend(figure)


def fig4_holds(table: pd.DataFrame) -> Verdict:
    """At least UNEVEN percent of the kept tokens' score changes hands on every model: 0 if all gained alike."""
    rows = [(model, tokens.iloc[0]) for model, tokens in table.groupby("model", sort=False)]
    said = [
        f"{model}: {interval(row, 'lost')} % of the attention is dropped, and {interval(row, 'uneven')} % of what "
        "stays changes hands"
        for model, row in rows
    ]
    return all_hold(judge(row, "uneven", partial(above, mark=UNEVEN)) for _, row in rows), "; ".join(said)


# Figs. 5 and 7, and section 2.3: settings of H2O.

RECENT = "method.recent_ratio"
CONTROLS = ("streaming_llm", "window", "random")
PLACED = "cache.positions=original"  # of the controls, so that they differ from H2O in the choice of tokens alone
HALF, NONE = f"{RECENT}=0.5", f"{RECENT}=0.0"


def fig5_holds(table: pd.DataFrame) -> Verdict:
    """Every factor's interval below 99 % of full."""
    runs = table[table["damping"].notna()]
    best = runs.loc[runs["of_full"].idxmax()]
    # Without intervals: theirs are of a factor named beforehand, and this one was chosen by the same numbers.
    said = f"the best of {len(runs)} factors, {best['damping']:g}, reaches {best['of_full']:.1f} % of full"
    if best["damping"] != 1 and not pd.isna(best["ahead"]):
        said += f", {best['ahead']:+.1f} ROUGE-2 points from no damping"
    return all_hold(judge(row, "of_full", below_mark) for _, row in runs.iterrows()), said


def fig5_by_divergence(frame: pd.DataFrame) -> Verdict:
    """Every factor away from the full cache."""
    factors = sorted(set(frame["setting"]))
    near = [Near(setting.rpartition("=")[2], of(setting=setting), within=False) for setting in factors]
    return by_divergence(*near, remark=partial(lowest, key="method.damping", method="h2o_damping"))(frame)


FIG7: dict[str, Any] = {  # ROUGE-1 and ROUGE-L are of the runs of ROUGE-2
    "draw": partial(curves, paper="keyformer_fig7"),
    "holds": each_panel(
        "{model}, {task}: keyformer at 0.7 {0}; h2o at 0.9 {1}; window at 0.9 {2}.",
        reaches("keyformer", 0.7),
        stays_below("h2o", 0.9),
        stays_below("window", 0.9),
        before="% of full: ",
        between=" ",
        after=leads("keyformer", "h2o"),
    ),
}


def fig7_in(metric: str, name: str) -> Exhibit:
    """Appendix A.5: Fig. 7 in another metric."""
    return Exhibit(
        f"keyformer_fig7_{metric}",
        title=f"Keyformer, appendix A.5: Fig. 7 in {name}, from the runs of Fig. 7",
        claim=(
            "What Fig. 7 shows in ROUGE-2 (keyformer at 70 % of the KV cache reaches 99 % of full attention; window "
            f"and H2O at 90 % do not) holds in {name} (arXiv:2403.09054, section 4.1 and appendix A.5)"
        ),
        runs_of="keyformer_fig7",
        table=partial(points, metric=metric, rival="h2o"),
        **FIG7,
    )


def mixture_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points with `recent`, the window's share of the budget: 0 to 0.9 of H2O, 1 of the two windows.

    over_CONTROL, over_none: the paired difference to each control, and to H2O without a recent window.
    """
    against = {f"over_{name}": (name, PLACED) for name in CONTROLS} | {"over_none": ("h2o", NONE)}
    table = points(frame, "rouge2", over=against, numbers={"recent": RECENT})
    table.loc[table["method"].isin(["window", "streaming_llm"]), "recent"] = 1.0
    table.loc[table["method"].eq("random"), "recent"] = 0.0
    return table


def mixture_holds(table: pd.DataFrame) -> Verdict:
    """H2O, half of it recent, is better than the recent window with sinks and than key tokens alone, at each budget."""
    verdicts, said = [], []
    for _, row in table[table["setting"].eq(HALF)].iterrows():
        verdicts += [judge(row, f"over_{name}", better) for name in ("streaming_llm", "none")]
        cells = [f"{name} {signed(row, f'over_{name}')}" for name in ("streaming_llm", "none", "window", "random")]
        said.append(f"{row['model']} at {row['kv_ratio']:g}: {', '.join(cells)}")
    return all_hold(verdicts), (
        "h2o, half of it recent, over the recent window with four sinks (streaming_llm), key tokens alone (none), and, "
        f"not part of the verdict, the window and a random choice, ROUGE-2 points: {'; '.join(said)}"
    )


def _mixture_parts(at: float) -> list[Near | Closer]:
    mixed, judged = of("h2o", HALF, kv_ratio=at), ("key tokens alone", "streaming_llm")
    rivals = {"key tokens alone": of("h2o", NONE, kv_ratio=at)}
    rivals |= {name: of(name, PLACED, kv_ratio=at) for name in CONTROLS}
    near = [Near(f"{name} at {at:g}", runs, judged=False) for name, runs in ({"h2o": mixed} | rivals).items()]
    closer = [Closer(f"h2o than {name} at {at:g}", mixed, runs, name in judged) for name, runs in rivals.items()]
    return [*near, *closer]


# Tables 2 to 4 and the appendix: Keyformer's own settings.


def table2_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`shots` and the place of the question, from the setting: the task's name says both, so each has a full cache."""
    table = points(frame, "acc", rival="h2o")
    shots = [option(words, "task.num_fewshot", "0") for words in table["setting"]]
    places = [option(words, "task.question") for words in table["setting"]]
    task = [f"{name}{f' {where}' if where else ''}" for name, where in zip(table["task"], places, strict=True)]
    return table.assign(shots=shots, task=task, bar=table["method"], shade=[f"{count} shots" for count in shots])


def table2_draw(table: pd.DataFrame, figure: Figure) -> None:
    """The paper names its cells by shots alone."""
    shown = table.assign(setting="task.num_fewshot=" + table["shots"])
    bars(shown.sort_values(["task", "shots"], kind="stable"), figure, "keyformer_table2", columns=2, full_as_bar=True)


OURS = "cache.positions=original method.score_scope=layer"
NEW = "cache.positions=renumbered method.score_scope=layer"
SHARED = "cache.positions=original method.score_scope=shared"
ORDER = ("full", "window", "h2o", "streaming_llm", f"keyformer {NEW}", f"keyformer {OURS}", f"keyformer {SHARED}")
DIFFERENCES = {
    "layer less shared": ("shared", OURS),
    "original less new positions": ("renumbered", OURS),
    "new positions less H2O": ("h2o", NEW),
}


def table3_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Points of ROUGE-2 with the other two metrics; columns of the three differences that the claim is about."""
    against = {"shared": ("keyformer", SHARED), "renumbered": ("keyformer", NEW), "h2o": ("h2o", "")}
    named = [_table3_name(*pair) for pair in zip(frame["method"], frame["setting"], strict=True)]
    table = points(frame, "rouge2", over=against).assign(rouge1=frame["rouge1"], rougeL=frame["rougeL"], bar=named)
    order = (frame["method"] + " " + frame["setting"]).str.strip()
    places = order.map(lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    return table.assign(_place=places).sort_values("_place", kind="stable", ignore_index=True).drop(columns="_place")


def _table3_name(method: str, setting: str) -> str:
    """The table's own words for a row."""
    if method != "keyformer":
        return method.replace("_", " ")
    place = "new pos" if option(setting, "cache.positions") == "renumbered" else "org pos"
    return f"keyformer {place} {'shared' if option(setting, 'method.score_scope') == 'shared' else 'per layer'}"


def table3_draw(table: pd.DataFrame, figure: Figure) -> None:
    """The paper writes a default setting as none."""
    words = table["setting"].str.replace("cache.positions=original", "").str.replace("method.score_scope=layer", "")
    bars(table.assign(setting=words.str.strip()), figure, "keyformer_table3", columns=1, width=6.0)


def table3_holds(table: pd.DataFrame) -> Verdict:
    """The three differences, each above 0 on every model."""
    verdicts, said = [], []
    for model, runs in table.groupby("model", sort=False):
        rows = runs.set_index("setting")
        for name, (column, which) in DIFFERENCES.items():
            if which not in rows.index:
                return None, f"keyformer {which} was not run"
            verdicts.append(judge(rows.loc[which], column, better))
            said.append(f"{model} {name} {signed(rows.loc[which], column)}")
    return all_hold(verdicts), "ROUGE-2 points: " + "; ".join(said)


NOISES = ("gumbel", "gaussian", "constant", "none")
FRESH = {"true": "drawn anew for each query and key (the authors' code)", "false": "drawn once per key (Algorithm 1)"}


def table4_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`behind`: the paired difference to Gumbel noise drawn the same way, negative where Gumbel is better."""
    table = points(frame, "rouge2")
    noise = table["setting"].map(lambda words: option(words, "method.noise"))
    fresh = table["setting"].map(lambda words: option(words, "method.fresh"))
    behind_of = {
        kind: ahead(frame, "rouge2", "keyformer", f"method.fresh={kind} method.noise=gumbel", "behind")
        for kind in FRESH
    }
    behind = {
        name: [behind_of["false" if kind == "false" else "true"][name][i] for i, kind in enumerate(fresh)]
        for name in behind_of["true"]
    }
    places = noise.map({name: place for place, name in enumerate(NOISES)}).fillna(-1)
    table = table.assign(bar=noise, shade=fresh.map(FRESH).fillna(""), **behind, _place=places, _shade=fresh.ne("true"))
    return table.sort_values(["model", "_place", "_shade"], ignore_index=True).drop(columns=["_place", "_shade"])


def table4_draw(table: pd.DataFrame, figure: Figure) -> None:
    words = table["setting"].str.replace("method.fresh=true", "").str.strip()
    bars(table.assign(setting=words), figure, "keyformer_table4")


def table4_holds(table: pd.DataFrame) -> Verdict:
    """Gumbel above each of the others on every model, noise drawn as in the authors' code."""
    gained = table.assign(gain=-table["behind"], gain_low=-table["behind_high"], gain_high=-table["behind_low"])
    sides = [gained[gained["shade"].eq(FRESH[kind]) & gained["bar"].ne("gumbel")] for kind in ("true", "false")]
    code, paper = ([row for _, row in side.iterrows()] for side in sides)
    values = sides[0].pivot_table(index="model", columns="bar", values="value")
    same = {"constant", "none"} <= set(values) and bool((values["constant"] == values["none"]).all())
    remark = "; constant and none are the same to the last digit, as the softmax demands" if same else ""
    said = ["; ".join(f"{row['model']} {row['bar']} {signed(row, 'gain')}" for row in rows) for rows in (code, paper)]
    return all_hold(judge(row, "gain", better) for row in code), (
        f"Gumbel less the other, ROUGE-2 points: {said[0]}{remark}. Drawn once per key (not part of the verdict): "
        f"{said[1]}"
    )


def _gumbel_closer(fresh: str, judged: bool) -> list[Closer]:
    """Gumbel noise against each other, drawn the same way."""
    runs = {name: of("keyformer", f"method.fresh={fresh} method.noise={name}") for name in NOISES}
    how = "" if judged else ", once per key"
    return [Closer(f"gumbel than {name}{how}", runs["gumbel"], runs[name], judged) for name in NOISES[1:]]


def recent_ratio_holds(table: pd.DataFrame) -> Verdict:
    """True if 0.2 or 0.3 is better than each ratio outside on every model, False if one outside beats both."""
    runs = table[table["recent"].notna()]
    outside = ~runs["recent"].isin([0.2, 0.3])
    wins = runs[outside & (runs["over_0.2_low"] > 0) & (runs["over_0.3_low"] > 0)]
    lost = outside & ((runs["over_0.2_high"] < 0) | (runs["over_0.3_high"] < 0))
    best = best_of(runs, "recent")
    if len(wins):
        cells = (f"{r['model']} {r['recent']:g} against 0.3: {signed(r, 'over_0.3')}" for _, r in wins.iterrows())
        return False, f"better than both 0.2 and 0.3, ROUGE-2 points: {'; '.join(cells)}. Best ratio: {best}"
    said = f"no other ratio is better than both; worse than one of them: {int(lost.sum())} of {int(outside.sum())}"
    return (True if lost.sum() == outside.sum() else None), f"{said}. Best ratio: {best}"


def recent_ratio_by_divergence(frame: pd.DataFrame) -> Verdict:
    """As by the metric: 0.2 or 0.3 diverges less than each ratio outside, and none outside less than both."""
    others = [word for word in sorted(set(frame["setting"])) if word not in (f"{RECENT}=0.2", f"{RECENT}=0.3")]
    pairs = [
        [
            Closer(
                f"{best} than {word.rpartition('=')[2]}",
                of("keyformer", f"{RECENT}={best}"),
                of("keyformer", word),
                judged=False,
            )
            for best in ("0.2", "0.3")
        ]
        for word in others
    ]
    least = partial(lowest, key=RECENT, method="keyformer")
    _, words = by_divergence(*(pair for group in pairs for pair in group), remark=least)(frame)
    verdicts = [[said[0] for pair in group if (said := pair.found(frame)) is not None] for group in pairs]
    if any(group and all(verdict is False for verdict in group) for group in verdicts):
        return False, words
    return (True if verdicts and all(True in group for group in verdicts) else None), words


TAU = "method.tau_end=2.0 method.tau_init=1.0"  # the paper's choice


def tau_holds(table: pd.DataFrame) -> Verdict:
    """Some schedule is better than the paper's on some model (False), or every one is worse on every model (True)."""
    schedule = [f"{start:g} to {end:g}" for start, end in zip(table["tau_init"], table["tau_end"], strict=True)]
    table = table.assign(schedule=schedule)
    runs = table[table["tau_init"].notna() & table["over"].notna()]
    wins, lost = runs[runs["over_low"] > 0], runs[runs["over_high"] < 0]
    spread = table[table["tau_init"].eq(1.0)].groupby("model")["value"].agg(lambda v: v.max() - v.min()).max()
    flat = f"with tau_init 1, tau_end moves ROUGE-2 by at most {spread:.1f} points"
    if len(wins):
        cells = (f"{row['model']} {row['schedule']} {signed(row, 'over')}" for _, row in wins.iterrows())
        return False, f"better than 1 to 2, ROUGE-2 points: {'; '.join(cells)}; {flat}"
    said = f"worse than 1 to 2: {len(lost)} of {len(runs)}, better: none; {flat}"
    best = best_of(table[table["tau_init"].notna()], "schedule")
    return (True if len(lost) == len(runs) else None), f"{said}. Best: {best}"


def tau_by_divergence(frame: pd.DataFrame) -> Verdict:
    """The paper's schedule diverges less than every other."""
    others = [word for word in sorted(set(frame["setting"])) if word != TAU]
    schedules = {
        word: "{1:g} to {0:g}".format(*(float(value.rpartition("=")[2]) for value in word.split())) for word in others
    }
    mine = of("keyformer", TAU)
    return by_divergence(
        *(Closer(f"1 to 2 than {words}", mine, of("keyformer", word)) for word, words in schedules.items())
    )(frame)


EXHIBITS = (
    Exhibit(
        "keyformer_fig1",
        title="Keyformer, Fig. 1: what full attention costs as sequences grow",
        claim=(
            "From 512 to 8192 tokens, 16 times as many, MPT-7B takes about 50 times as long, and its KV cache "
            "outgrows its weights (arXiv:2403.09054, Fig. 1, four beams)"
        ),
        table=fig1_table,
        draw=partial(draw_speed, ylabel="", metrics=GROWTH),
        holds=times_at(
            *("8192", "full", GROWTH[0], 25.0),  # half of the paper's 50
            "{value:.1f} ({low:.1f} to {high:.1f}) times as long for 16 times the tokens, one beam, {machine}",
        ),
    ),
    Exhibit(
        "keyformer_fig3a",
        title="Keyformer, Fig. 3a: how sparse full attention is, layer by layer",
        claim=(
            "Attention is sparse by itself, and how sparse varies with the model and from layer to layer "
            "(arXiv:2403.09054, Fig. 3a and section 2.2; its threshold is not stated, ours counts weights below 1 "
            "% of their row's largest)"
        ),
        axes="method=full",
        at=INSIDE,
        measure=inside.sparsity,
        table=partial(per_prompt, by="layer", value="sparsity"),
        draw=fig3a_draw,
        holds=fig3a_holds,
    ),
    Exhibit(
        "keyformer_fig3b",
        title="Keyformer, Fig. 3b: the share of the attention that the best-scored tokens hold",
        claim=(
            "Around 40 % of the tokens, the key tokens, hold 90 % of the attention score (arXiv:2403.09054, Fig. 3b)"
        ),
        axes="method=full",
        at=INSIDE,
        measure=inside.mass,
        table=partial(per_prompt, by="share", value="mass"),
        draw=fig3b_draw,
        holds=fig3b_holds,
    ),
    Exhibit(
        "keyformer_fig3c",
        title="Keyformer, Fig. 3c: full attention, window attention and the heaviest hitters at half the cache",
        claim=(
            "With half the KV cache neither the newest tokens (window) nor the tokens of the highest accumulated "
            "attention (H2O, key attention) give full attention's quality (arXiv:2403.09054, Fig. 3c and section "
            "2.3.1)"
        ),
        axes="method=window,h2o,key_attention kv_ratio=0.5",
        at=summaries(),
        table=fig3c_table,
        draw=partial(bars, paper="keyformer_fig3c"),
        holds=each_row(
            lambda table: table[table["method"].ne("full")],
            "of_full",
            below_mark,
            "{model} {method} {number}",
            "% of full: {}",
        ),
        divergence=by_divergence(*(Near(name, of(name), within=False) for name in ("window", "h2o", "key_attention"))),
    ),
    Exhibit(
        "keyformer_fig4",
        title="Keyformer, Fig. 4: the score of the tokens that stay, before and after the others are dropped",
        claim=(
            "Dropping half the tokens spreads their attention unevenly over those that stay, so that scores are "
            "no longer what full attention would give (arXiv:2403.09054, Fig. 4, equations 2 and 3)"
        ),
        axes="method=h2o kv_ratio=0.5",
        at=INSIDE,
        measure=inside.reduction,
        table=fig4_table,
        draw=fig4_draw,
        holds=fig4_holds,
    ),
    Exhibit(
        "keyformer_fig5",
        title="Keyformer, Fig. 5: damping the accumulated scores at half the cache",
        claim=(
            "With half the KV cache and 20 % of it recent, no damping factor of the accumulated attention reaches "
            "full attention's quality (arXiv:2403.09054, Fig. 5 and section 2.3.3; the figure's numbers are not "
            "published)"
        ),
        axes="method=h2o_damping method.damping=0.0,0.25,0.5,0.7,0.8,0.9,0.95,0.99,1.0 kv_ratio=0.5",
        at=summaries("testbed_learned", "cerebras_6b7") | {"real": f"{REAL} method.damping=0.0,0.5,0.9,0.99,1.0"},
        table=partial(
            points,
            metric="rouge2",
            rival="h2o_damping",
            setting="method.damping=1.0",
            numbers={"damping": "method.damping"},
        ),
        draw=partial(settings_curves, x="damping", xlabel="damping factor (1: none)"),
        holds=fig5_holds,
        divergence=fig5_by_divergence,
    ),
    Exhibit(
        "keyformer_fig7",
        title="Keyformer, Fig. 7: ROUGE-2 against the share of the cache, summaries above and conversation below",
        claim=(
            "Keyformer reaches 99 % of full attention's ROUGE-2 with 70 % of the KV cache, while window attention "
            "and H2O stay below it even with 90 % (arXiv:2403.09054, Fig. 7 and section 4.1)"
        ),
        axes="method=window,h2o,keyformer kv_ratio=0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9",
        at={
            "testbed": {
                "": f"limit=120 task.size=120 | model={TESTBED} task=testbed_summary",
                "soda": f"limit=120 task.size=120 | model={TESTBED} task=testbed_dialogue",
            },
            "real": REAL,  # of SODA a folder of samples has too few rows
            "paper": {
                "": f"{SAMPLED} | model={PAPERS} task=cnn_dailymail",
                "soda": f"{SAMPLED} | model=mpt_7b_chat,cerebras_6b7,mpt_7b task=soda",
            },
        },
        table=partial(points, metric="rouge2", rival="h2o"),
        divergence=by_divergence(
            Near("keyformer at 0.7", of("keyformer", kv_ratio=0.7)),
            Near("h2o at 0.9", of("h2o", kv_ratio=0.9), within=False),
            Near("window at 0.9", of("window", kv_ratio=0.9), within=False),
            remark=count_closer("keyformer", "h2o"),
        ),
        **FIG7,
    ),
    fig7_in("rouge1", "ROUGE-1"),
    fig7_in("rougeL", "ROUGE-L"),
    Exhibit(
        "keyformer_fig8",
        title="Keyformer, Fig. 8: ROUGE-2 of long documents against the share of the cache",
        claim=(
            "On long documents Keyformer keeps 99 % of full attention's ROUGE-2 with half the KV cache, and H2O "
            "is significantly lower at the same size (arXiv:2403.09054, Fig. 8 and section 4.1)"
        ),
        axes="method=h2o,keyformer kv_ratio=0.1,0.2,0.3,0.4,0.5",
        at={  # the testbed's models were trained on up to 560 tokens
            "testbed": "limit=120 task.size=120 task.tokens=512 | model=testbed_alibi task=testbed_summary",
            "real": "limit=20 task.max_prompt_tokens=4096 task.max_new_tokens=64 | model=smollm2_135m task=govreport",
            "paper": (
                "generation=beam4 limit=200 task.sample=with_replacement | model=mpt_7b_storywriter task=govreport"
            ),
        },
        table=partial(points, metric="rouge2", rival="h2o"),
        draw=partial(curves, paper="keyformer_fig8"),
        holds=each_panel(
            "{model} at 0.5: keyformer {0} % of full, h2o {1} %, difference {2} ROUGE-2 points",
            reaches("keyformer", 0.5),
            Part("h2o", 0.5),
            beats_rival("keyformer", 0.5),
        ),
        divergence=by_divergence(
            Near("keyformer at 0.5", of("keyformer", kv_ratio=0.5)),
            Near("h2o at 0.5", of("h2o", kv_ratio=0.5), judged=False),
            Closer("keyformer than h2o at 0.5", of("keyformer", kv_ratio=0.5), of("h2o", kv_ratio=0.5)),
        ),
    ),
    Exhibit(
        "keyformer_fig9",
        title="Keyformer, Fig. 9: inference speed-up over full attention at equal quality",
        claim=(
            "Keyformer with half the KV cache generates 4096 tokens after 4096 about twice as fast as full "
            "attention, and H2O, which needs 90 %, 1.7 times (arXiv:2403.09054, Fig. 9: 2.05 and 1.71 on an A100)"
        ),
        table=fig9_table,
        draw=partial(draw_speed, ylabel="speed-up over full attention", metrics=["speedup"]),
        holds=times_at(
            *("4096+4096", "keyformer@0.5", "speedup", 2.0),
            "{value:.2f} ({low:.2f} to {high:.2f}) times full attention at 4096+4096 on {machine}",
        ),
    ),
    Exhibit(
        "keyformer_fig10",
        title="Keyformer, Fig. 10: the part of a step that depends on the cache, over full attention's",
        claim=(
            "At 4k tokens half the cache makes moving keys and values 2.9 times cheaper, and the Gumbel noise "
            "costs a few percent of it (arXiv:2403.09054, Fig. 10: 0.35 and 0.06 of full)"
        ),
        table=fig10_table,
        draw=partial(draw_speed, ylabel="", metrics=PARTS),
        holds=fig10_holds,
    ),
    Exhibit(
        "keyformer_table1",
        title="Keyformer, Table 1: generated tokens per second",
        claim=(
            "With half the KV cache Keyformer generates twice as many tokens per second as full attention at "
            "4096+4096, and 2.4 times as many with the larger batch that the smaller cache allows "
            "(arXiv:2403.09054, Table 1)"
        ),
        table=table1_table,
        draw=partial(draw_speed, ylabel="tokens per second", metrics=["tokens_per_s"]),
        holds=table1_holds,
    ),
    Exhibit(
        "keyformer_table2",
        title="Keyformer, Table 2: choice by log-likelihood with 0 and 5 answered questions before it, half the cache",
        claim=(
            "In few-shot choice with half the KV cache Keyformer surpasses H2O in all tasks and shot settings "
            "(arXiv:2403.09054, section 4.3; its own Table 2 has three losses and one tie in 16 cells)"
        ),
        axes="task.num_fewshot=0,5 method=h2o,keyformer kv_ratio=0.5",
        at={
            "testbed": (
                "limit=200 task.size=200 | model=testbed_learned,testbed_alibi task=testbed_choice "
                "task.question=in_prompt,after_eviction"
            ),
            "real": f"limit=40 task.fewshot_split=validation {FULL_TASKS} | model=smollm2_135m task=lm_eval",
            "paper": f"limit=null {FULL_TASKS} | model=cerebras_6b7,mpt_7b task=lm_eval",
        },
        table=table2_table,
        draw=table2_draw,
        holds=each_row(
            lambda table: table[table["method"].eq("keyformer")].sort_values(["model", "task", "shots"], kind="stable"),
            "ahead",
            better,
            "{model} {task} {shade} {number}",
            "keyformer less H2O, accuracy points: {}",
        ),
    ),
    Exhibit(
        "keyformer_table3",
        title="Keyformer, Table 3: methods, positions and score functions at 60 % of the cache",
        claim=(
            "At 60 % of the KV cache a score function per layer is better than one shared by all layers, original "
            "positions are better than new ones, and even with new positions Keyformer is better than H2O "
            "(arXiv:2403.09054, Table 3)"
        ),
        axes={
            "": "method=window,h2o,streaming_llm kv_ratio=0.6",
            "variants": (
                "method=keyformer method.score_scope=layer,shared cache.positions=original,renumbered kv_ratio=0.6"
            ),
        },
        at=summaries("testbed_alibi", "mpt_7b"),
        table=table3_table,
        draw=table3_draw,
        holds=table3_holds,
        divergence=by_divergence(
            Closer("layer than shared", of("keyformer", OURS), of("keyformer", SHARED)),
            Closer("original than new positions", of("keyformer", OURS), of("keyformer", NEW)),
            Closer("new positions than H2O", of("keyformer", NEW), of("h2o")),
        ),
    ),
    Exhibit(
        "keyformer_table4",
        title="Keyformer, Table 4: what is added to the logits before the score, 60 % of the cache",
        claim=(
            "Gumbel noise in the score gives a better ROUGE-2 than Gaussian noise, a constant and none, at 60 % "
            "of the KV cache (arXiv:2403.09054, Table 4)"
        ),
        axes=("method=keyformer method.noise=gumbel,gaussian,constant,none method.fresh=true,false kv_ratio=0.6"),
        at=summaries(),
        table=table4_table,
        draw=table4_draw,
        holds=table4_holds,
        divergence=by_divergence(*_gumbel_closer("true", judged=True), *_gumbel_closer("false", judged=False)),
    ),
    Exhibit(
        "keyformer_mixture",
        title="Keyformer, section 2.3: a recent window, key tokens, and a mixture of the two as in H2O",
        claim=(
            "Neither the newest tokens nor the key tokens are enough by themselves: a mixture of a recent window and "
            "key tokens, as H2O has it, is better than either with the same budget (arXiv:2403.09054, sections 2.3.1, "
            "3.1 and 4.4.4)"
        ),
        axes={
            "": "method=h2o method.recent_ratio=0.0,0.25,0.5,0.75,0.9 kv_ratio=0.3,0.5",
            "controls": "method=streaming_llm,window,random cache.positions=original kv_ratio=0.3,0.5",
        },
        at={
            "testbed": f"limit=60 | model={TESTBED} task=testbed_summary",
            "real": REAL,
            "paper": f"limit=1000 task.sample=with_replacement | model={PAPERS} task=cnn_dailymail",
        },
        table=mixture_table,
        draw=partial(settings_curves, x="recent", xlabel="recent window (share of the budget)"),
        holds=mixture_holds,
        divergence=by_divergence(*_mixture_parts(0.3), *_mixture_parts(0.5)),
    ),
    Exhibit(
        "keyformer_recent_ratio",
        title="Keyformer, appendix A.4: how much of the budget is the recent window",
        claim=(
            "Keyformer works best when the recent window is 20 to 30 % of the budget (arXiv:2403.09054, section "
            "4.4.4 and appendix A.4; the appendix' numbers are not in the text we hold)"
        ),
        axes="method=keyformer method.recent_ratio=0.0,0.1,0.2,0.3,0.5,0.7,0.9 kv_ratio=0.5",
        at=summaries(),
        table=partial(
            points,
            metric="rouge2",
            over={f"over_{best}": ("keyformer", f"{RECENT}={best}") for best in ("0.2", "0.3")},
            numbers={"recent": RECENT},
        ),
        draw=partial(settings_curves, x="recent", xlabel="recent window (share of the budget)"),
        holds=recent_ratio_holds,
        divergence=recent_ratio_by_divergence,
    ),
    Exhibit(
        "keyformer_streaming",
        title="Keyformer, section 4.4.5 and appendix A.7: attention sinks and a recent window against key tokens",
        claim=(
            "StreamingLLM, four sinks and a recent window in 60 % of the KV cache, struggles where Keyformer "
            "keeps the summary (ROUGE-1 1.4 against 38.7; arXiv:2403.09054, Table 3 and section 4.4.5)"
        ),
        axes="method=streaming_llm,keyformer kv_ratio=0.2,0.4,0.6,0.8",
        at=summaries("testbed_rope,testbed_alibi", "mpt_7b"),
        table=partial(points, metric="rouge1", rival="streaming_llm"),
        draw=partial(curves, paper="keyformer_table3"),
        holds=each_panel(
            "{model}: streaming_llm {0} % of full, keyformer {1} ROUGE-1 points from it",
            Part("streaming_llm", 0.6),
            beats_rival("keyformer", 0.6),
        ),
        divergence=by_divergence(
            Near("streaming_llm at 0.6", of("streaming_llm", kv_ratio=0.6), judged=False),
            Closer(
                "keyformer than streaming_llm at 0.6", of("keyformer", kv_ratio=0.6), of("streaming_llm", kv_ratio=0.6)
            ),
        ),
    ),
    Exhibit(
        "keyformer_tau",
        title="Keyformer, appendix A.8: the temperature's start and end",
        claim=(
            "tau from 1 at the prompt to 2 at the last token gives the best outcome (arXiv:2403.09054, section "
            "3.3.2 and appendix A.8; the appendix' numbers are not in the text we hold)"
        ),
        axes="method=keyformer method.tau_init=0.5,1.0,2.0,4.0 method.tau_end=1.0,2.0,4.0,10.0 kv_ratio=0.5",
        at=summaries() | {"real": f"{REAL} method.tau_init=0.5,1.0,2.0 method.tau_end=1.0,2.0,4.0"},
        table=partial(
            points,
            metric="rouge2",
            over={"over": ("keyformer", TAU)},
            numbers={"tau_init": "method.tau_init", "tau_end": "method.tau_end"},
        ),
        draw=partial(settings_grid, down="tau_init", across="tau_end"),
        holds=tau_holds,
        divergence=tau_by_divergence,
    ),
)
