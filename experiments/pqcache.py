"""PQCache (arXiv:2407.12820): its figures and tables as exhibits."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.clock import Ratio
from benchmarks.store import RESULTS
from experiments.lib import inside
from experiments.lib.draw import (
    METHODS,
    METRICS,
    bars,
    by_method,
    curves,
    finish,
    in_order,
    legend,
    model_words,
    panel_grid,
)
from experiments.lib.exhibits import Exhibit
from experiments.lib.record import WAITS
from experiments.lib.speed import COLUMNS, NONE_YET, draw_speed, found_of, newest, note, ours, over, samples
from experiments.lib.tables import (
    Side,
    interval,
    interval_columns,
    judge,
    mean_columns,
    means_by,
    of,
    option,
    paired_gap,
    paper_numbers,
    points,
    signed,
    with_gaps,
)
from experiments.lib.verdicts import Closer, Near, Verdict, above, all_hold, by_divergence, lowest, positive
from kvexp.results.plots import DASHES, color_of, heatmap

# Words of a command line: what is fixed | what is swept.
MISTRAL = "protocol=pqcache limit=null method.n_sinks=32 | model=mistral_7b_instruct_v02"
HOTPOTQA = f"task=longbench task.subset=hotpotqa {MISTRAL}"
CUT = "task.max_prompt_tokens=2048"
TWOWIKI = f"limit=20 {CUT} task.max_new_tokens=16 | model=smollm2_135m task=longbench task.subset=2wikimqa"
QUESTIONS = "limit=20 task.question=in_prompt | model=smollm2_135m task=news_qa"
SUMMARIES = "limit=60 | model=testbed_gqa task=testbed_summary"
NEEDLES = "task.depths=[0,25,50,75,100]"
FOUR_TASKS = "task=testbed_qa,testbed_needle,testbed_summary,testbed_dialogue"
FOURTEEN = (
    "task.subset=narrativeqa,qasper,multifieldqa_en,hotpotqa,2wikimqa,musique,gov_report,qmsum,multi_news,trec,"
    "triviaqa,samsum,passage_count,passage_retrieval_en"
)
RIVALS = ("h2o_c", "infllm", "sparq")
ALL = "score"  # any task's headline metric, in percent


def with_infllm(words: str, block: int) -> dict[str, str]:
    """A sweep and InfLLM's own, whose representative token stands for `block` tokens: it reads as much as SparQ."""
    return {"": words, "infllm": f"method.block={block} {words}"}


def by_rivals(methods: str, ratios: str) -> dict[str, str]:
    """What is swept of these methods, and of InfLLM in a sweep of its own: its block differs from scale to scale."""
    return {"": f"method={methods} kv_ratio={ratios}", "infllm": f"method=infllm | kv_ratio={ratios}"}


def headlines(run: pd.Series) -> dict[str, dict[str, float]]:
    """The scores of a run by its task's first metric, under one name for all tasks."""
    name = run["headline"]
    return {example: {ALL: scored[name]} for example, scored in run["scores"].items() if name in scored}


def by_task(frame: pd.DataFrame, make: Callable[[pd.DataFrame, str], pd.DataFrame]) -> list[pd.DataFrame]:
    """What is made of each task's runs and of its headline metric."""
    return [make(runs, str(runs["headline"].iloc[0])) for _, runs in frame.groupby("task", sort=False)]


def titled_by_metric(table: pd.DataFrame) -> pd.DataFrame:
    """The table with each task's metric behind its name."""
    named = [f"{task}, {METRICS.get(m, m)}" for task, m in zip(table["task"], table["metric"], strict=True)]
    return table.assign(task=named)


def in_percent(figure: Figure) -> None:
    """Label the axes of tasks whose metrics differ."""
    for axes in figure.axes:
        axes.set_ylabel("%" if axes.get_ylabel() else "", fontsize=8)


def rouge2_or_headline(frame: pd.DataFrame) -> str:
    """The metric of a sweep's one task."""
    return "rouge2" if "rouge2" in frame else str(frame["headline"].iloc[0])


# Figs. 1b and 5: attention itself.

PLACE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # of the places that are drawn


def fig5_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Per model, means over prompts; and the places that are drawn."""
    columns = ["top", "power", "exponential", "power_better"]
    means = frame.groupby(["model", "prompt"], as_index=False)[columns].mean()
    shown = frame[frame["scores"].notna()][["model", "layer", "head", "query", "scores"]]
    return pd.concat([means_by(means, ["model"], columns), shown], ignore_index=True)


def fig5_draw(table: pd.DataFrame, figure: Figure) -> None:
    """A panel per model: sorted scores of single queries in log-log axes, where a power law is a straight line."""
    shown = table[table["scores"].notna()]
    models = sorted(set(shown["model"]))
    (panels,) = panel_grid(figure, 1, len(models), (3.6 * len(models), 3.1))
    for place, (axes, model) in enumerate(zip(panels, models, strict=True)):
        for color, (_, row) in zip(PLACE_COLORS, shown[shown["model"].eq(model)].iterrows(), strict=False):
            scores = np.array(row["scores"].split(), dtype=float)
            label = f"{model_words(model)}: layer {row['layer'] + 1:.0f}, head {row['head'] + 1:.0f}"
            axes.loglog(range(1, len(scores) + 1), scores, color=color, linewidth=1.2, label=label)
        axes.set_title(model_words(model), fontsize=8)
        axes.set_xlabel("rank of the token", fontsize=8)
        axes.set_ylabel("attention score" if place == 0 else "", fontsize=8)
        axes.set_ylim(1e-8, 1.2)
    legend(figure)


def fig5_holds(table: pd.DataFrame) -> Verdict:
    """Whether a power law fits more than half of the places better than an exponential does, in every model."""
    rows = [row for _, row in table[table["prompts"].notna()].iterrows()]
    verdicts = [judge(row, "power_better", partial(above, mark=50.0)) for row in rows]
    said = [
        f"{row['model']}: a power law is the better fit at {interval(row, 'power_better')} % of the places "
        f"(R2 {row['power']:.2f} against {row['exponential']:.2f}); a tenth of the tokens holds {interval(row, 'top')} "
        "% of the attention"
        for row in rows
    ]
    return (None if None in verdicts else all(verdicts)), "; ".join(said)


# Figs. 7, 10a and 10b: speed, from benchmarks/results.

FIG7_FILE = RESULTS / "retrieval_latency.json"
FIG7_NONE = f"{WAITS}: python -m benchmarks.retrieval_latency --json benchmarks/results/{FIG7_FILE.name}, on a GPU"
FIG7_TIMES = (
    ("prefill_s", "prefill", "#0072b2"),
    ("offload_s", "offload", "#009e73"),
    ("kmeans_s", "clustering", "#882255"),
)
LENGTHS = ("2048+30", "4096+30", "8192+30", "16384+30", "32768+30")  # benchmarks.suite measures some of them
NAMES = ("h2o@0.2", "sparq@0.2", "infllm@0.2", "pqcache@0.2")
FIRST, FURTHER, SECONDS = "tt2t_s", "tpot_s", "seconds_per_token"
READING = 60 / 333  # seconds per token of a reader, as the paper counts


def fig7_table(frame: pd.DataFrame, path: Path = FIG7_FILE) -> pd.DataFrame:
    """The file's rows of one layer, one per length, if its device was a GPU: a CPU's copies go nowhere."""
    content = json.loads(path.read_text("utf-8")) if path.exists() else {"options": {}, "one_layer": []}
    on_gpu = str(content["options"].get("device", "")).startswith("cuda")
    return pd.DataFrame(content["one_layer"] if on_gpu else [], columns=["length", *(name for name, *_ in FIG7_TIMES)])


def fig7_draw(table: pd.DataFrame, figure: Figure) -> None:
    if table.empty:
        note(figure, FIG7_NONE)
        return
    axes = panel_grid(figure, 1, 1, (3.8, 3.0))[0, 0]
    for (name, label, color), marker in zip(FIG7_TIMES, "osD", strict=True):
        axes.plot(table["length"], 1000 * table[name], color=color, marker=marker, markersize=4, label=label)
    finish(axes, "prompt (tokens)", "ms for one layer")
    legend(figure)


def fig7_holds(table: pd.DataFrame) -> Verdict:
    """At the longest prompt: offload below prefill below clustering. One measurement each, so no interval."""
    if table.empty:
        return None, FIG7_NONE
    last = table.sort_values("length").iloc[-1]
    verdict = bool(last["offload_s"] < last["prefill_s"] < last["kmeans_s"])
    times = ", ".join(f"{label} {1000 * last[name]:.1f} ms" for name, label, _ in FIG7_TIMES)
    return verdict, f"one layer of {last['length']:.0f} tokens: {times}; measured once each, without an interval"


def over_full(metric: str) -> pd.DataFrame:
    """Seconds of each method over full attention's (kvexp's own) per length: median, least and most of the turns."""
    rows = []
    for length, cell in newest(LENGTHS, shape="mistral_7b", batch=1):
        for name in NAMES:
            ratio = over(samples(cell, name), samples(cell, "full"), metric)
            rows += [] if ratio is None else [ours(length, name, metric, ratio, cell)]
    return pd.DataFrame(rows, columns=COLUMNS)


def over_full_draw(table: pd.DataFrame, figure: Figure, metric: str, ylabel: str) -> None:
    """The points, or one line that says that there are none: the paper prints no numbers to show in their place."""
    table = table[table["metric"].eq(metric)]
    if table.empty:
        note(figure, NONE_YET)
        return
    draw_speed(table, figure, ylabel, [metric])


def _lengths(table: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(table["seqlen"]))


def _faster(table: pd.DataFrame, metric: str, length: str, first: str, other: str) -> bool | None:
    """Whether one method takes less than another: the turns' ranges must not overlap to say so."""
    mine, theirs = (found_of(table, length, name, metric) for name in (first, other))
    if mine is None or theirs is None:
        return None
    return True if mine["high"] < theirs["low"] else False if mine["low"] > theirs["high"] else None


def _said(table: pd.DataFrame, metric: str) -> str:
    """Every number of a metric as one sentence."""
    sentences = []
    for length in _lengths(table):
        values = [(name, found_of(table, length, name, metric)) for name in NAMES]
        words = [
            f"{n} {row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f})" for n, row in values if row is not None
        ]
        sentences.append(f"{', '.join(words)} at {length}")
    return f"{metric} over full attention's on {table['machine'].iloc[0]}: {'; '.join(sentences)}"


def fig10a_holds(table: pd.DataFrame) -> Verdict:
    """At every length measured, pqcache's slowest turn against the others' fastest."""
    if table.empty:
        return None, NONE_YET
    places = [(length, name) for length in _lengths(table) for name in NAMES[:-1]]
    verdicts = [_faster(table, FIRST, length, "pqcache@0.2", name) for length, name in places]
    return all_hold(verdicts), _said(table, FIRST)


def fig10b_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What is drawn, over full attention's; and the plain seconds of pqcache, which are held against a reader's."""
    rows = []
    for length, cell in newest(LENGTHS, shape="mistral_7b", batch=1):
        seconds = [sample[FURTHER] for sample in samples(cell, "pqcache@0.2")]
        if seconds:
            ratio = Ratio(statistics.median(seconds), min(seconds), max(seconds))
            rows.append(ours(length, "pqcache@0.2", SECONDS, ratio, cell))
    over = over_full(FURTHER)
    return pd.concat([over, pd.DataFrame(rows, columns=over.columns)], ignore_index=True) if rows else over


def fig10b_holds(table: pd.DataFrame) -> Verdict:
    """At every length measured: SPARQ slower than the others, and pqcache's slowest turn below a reader's time."""
    if table.empty:
        return None, NONE_YET
    others = [name for name in NAMES if not name.startswith("sparq")]
    verdicts = [_faster(table, FURTHER, at, name, "sparq@0.2") for at in _lengths(table) for name in others]
    plain = [(at, found_of(table, at, "pqcache@0.2", SECONDS)) for at in _lengths(table)]
    verdicts += [None if row is None else bool(row["high"] < READING) for _, row in plain]
    known = [(at, row) for at, row in plain if row is not None]
    words = ", ".join(f"{row['value']:.3f} ({row['low']:.3f} to {row['high']:.3f}) at {at}" for at, row in known)
    return all_hold(verdicts), f"{_said(table, FURTHER)}; pqcache takes {words} seconds a token, a reader {READING:.2f}"


# Figs. 8 and 9, Tables 2 and 3: quality at a share of the tokens.

NEARLY_ALL = 95.0  # percent of the needles
FIG8_RIVALS = ("h2o_c", "sparq", "infllm")
EXCEPT = ("h2o_c", 0.1)  # what Fig. 9a does not claim
READERS = ("sparq", "infllm")


def fig8_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per method, length and depth: percent found, mean over texts; and what pqcache finds more than each."""
    metric = str(frame["headline"].iloc[0])
    found_at = [
        {"model": run["model"], "method": run["method"], "length": place[0], "depth": place[1], "found": scored[metric]}
        for _, run in frame.iterrows()
        for example, scored in run["scores"].items()
        if (place := _place(example)) is not None
    ]
    keys = ["model", "method", "length", "depth"]
    table = pd.DataFrame(found_at).groupby(keys, as_index=False).agg(found=("found", "mean"), n=("found", "size"))
    recalls = [scored[metric] for scored in frame[frame["method"].eq("pqcache")].iloc[0]["scores"].values()]
    table = table.assign(metric=metric, **mean_columns("pqcache", recalls))
    return with_gaps(table, frame, metric, {f"over_{rival}": (of("pqcache"), of(rival)) for rival in FIG8_RIVALS})


def _place(example: str) -> tuple[float, float] | None:
    """(length, depth) of an example's name: split-length-depth-repeat, or "length 512 depth 25"."""
    match = re.match(r"\w+-(\d+)-(\d+)|length (\d+) depth (\d+)", example)
    if match is None:
        return None
    length, depth = (float(word) for word in match.groups() if word is not None)
    return length, depth


def fig8_draw(table: pd.DataFrame, figure: Figure) -> None:
    """A heat-map per method as the paper has it: length across, depth down, greener is better."""
    methods = in_order(table["method"].tolist(), METHODS)
    (panels,) = panel_grid(figure, 1, len(methods), (2.2 * len(methods) + 0.8, 2.5))
    for place, (axes, method) in enumerate(zip(panels, methods, strict=True)):
        trials = table[table["method"].eq(method)]
        shown = trials.pivot_table("found", "depth", "length", aggfunc="mean")
        image = heatmap(shown, axes, f"{method}, mean {trials['found'].mean():.0f}", bar=False)
        axes.tick_params(labelsize=7)
        axes.set_ylabel(axes.get_ylabel() if place == 0 else "")
    figure.colorbar(image, ax=figure.axes).set_label(f"{table['metric'].iloc[0].replace('_', ' ')} (%)", fontsize=8)


def fig8_holds(table: pd.DataFrame) -> Verdict:
    """Pqcache finds nearly all, and more than every rival."""
    first, means = table.iloc[0], table.groupby("method")["found"].mean()
    verdicts = [judge(first, "pqcache", partial(above, mark=NEARLY_ALL))]
    verdicts += [judge(first, f"over_{rival}", positive) for rival in FIG8_RIVALS]
    over = ", ".join(f"{signed(first, f'over_{rival}')} over {rival} ({means[rival]:.0f})" for rival in FIG8_RIVALS)
    return all_hold(verdicts), f"pqcache finds {interval(first, 'pqcache')} %; {over}"


def fig9a_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points, and at each budget what pqcache is ahead of each rival."""
    metric = rouge2_or_headline(frame)  # GSM8K's is exact
    table = points(frame, metric)
    pairs = {
        f"over_{rival}_{at:g}": (of("pqcache", kv_ratio=at), of(rival, kv_ratio=at))
        for rival in FIG8_RIVALS
        for at in sorted(table["kv_ratio"].dropna().unique())
    }
    return with_gaps(table, frame, metric, pairs)


def fig9a_draw(table: pd.DataFrame, figure: Figure) -> None:
    # Of InfLLM's block, which has a name of its own in another sweep, nothing is varied here.
    curves(table.assign(setting=""), figure, xlabel="tokens attended to (%)")


def fig9a_holds(table: pd.DataFrame) -> Verdict:
    """At every budget and against every rival; the paper's own exception is shown and not judged."""
    first, verdicts, said = table.iloc[0], [], []
    ratios = sorted(table["kv_ratio"].dropna().unique())
    for rival in FIG8_RIVALS:
        gaps = [f"{signed(first, f'over_{rival}_{at:g}')} at {at:g}" for at in ratios]
        verdicts += [judge(first, f"over_{rival}_{at:g}", positive) for at in ratios if (rival, at) != EXCEPT]
        said.append(f"over {rival} {', '.join(gaps)}")
    return all_hold(verdicts), "pqcache is " + "; ".join(said)


def fig9b_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points with what rows' receipts say was read (percent of the keys) and moved (bytes); the ends compared."""
    metric = rouge2_or_headline(frame)
    read = (100 * frame["search_share"]).to_numpy()
    frame = frame.assign(read=read)
    table = points(frame, metric).assign(read=read, moved_bytes=frame["moved_bytes"].to_numpy())

    def end(method: str, least: bool) -> Side:
        """The run of a method that reads least, or most."""
        runs = frame[frame["method"].eq(method)]["read"]
        return of(method, read=runs.min() if least else runs.max())

    pairs = {f"over_{rival}": (end("pqcache", least=True), end(rival, least=True)) for rival in READERS}
    pairs |= {f"gain_{name}": (end(name, least=False), end(name, least=True)) for name in ("pqcache", *READERS)}
    return with_gaps(table, frame, metric, pairs)


def fig9b_draw(table: pd.DataFrame, figure: Figure) -> None:
    curves(table.assign(setting=""), figure, x="read", xlabel="read by the choice (% of the keys)")
    figure.set_size_inches(4.2, 3.2)
    for axes in figure.axes:
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])


def fig9b_holds(table: pd.DataFrame) -> Verdict:
    """Three parts: reading least pqcache is ahead of both, SPARQ gains by reading more, and it gains more than they."""
    first = table.iloc[0]
    least = table[table["method"].ne("full")].groupby("method")["read"].min()
    over = ", ".join(f"{signed(first, f'over_{r}')} over {r} ({least[r]:.2g} %)" for r in READERS)
    gains = ", ".join(f"{m} {signed(first, f'gain_{m}')}" for m in ("pqcache", *READERS))
    verdicts = [judge(first, name, positive) for name in ("over_sparq", "over_infllm", "gain_sparq")]
    for name in ("gain_pqcache", "gain_infllm"):  # below SPARQ's: only intervals that are apart say so
        below = first[f"{name}_high"] < first["gain_sparq_low"]
        verdicts.append(True if below else False if first[f"{name}_low"] > first["gain_sparq_high"] else None)
    return all_hold(verdicts), (
        f"reading {least['pqcache']:.2g} % of the keys pqcache is {over}; from the least to the most that was read "
        f"they gain: {gains}"
    )


SHAPES = ("2x6", "2x8", "4x3", "4x4", "8x2")


def fig9c_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points by m x b, each task by its headline metric; two sub-vectors compared with more, over all tasks."""
    frame = frame.assign(shape=[_shape(setting) for setting in frame["setting"]])
    parts = by_task(
        frame,
        lambda runs, metric: points(runs, metric).assign(
            bar=runs["shape"].to_numpy(), fell_back=runs["fell_back"].to_numpy()
        ),
    )
    same = frame.assign(scores=[headlines(run) for _, run in frame.iterrows()])
    pairs = {
        "two_over_more": (lambda run: run["shape"].startswith("2"), lambda run: run["shape"][:1] in ("4", "8")),
        "eight_over_six": (of(shape="2x8"), of(shape="2x6")),
    }
    return with_gaps(pd.concat(parts), same, ALL, pairs)


def _shape(setting: str) -> str:
    m, b = option(setting, "method.m"), option(setting, "method.b")
    return f"{m}x{b}" if m else ""


def _shaped(*shapes: str) -> Side:
    return lambda run: _shape(run["setting"]) in shapes


def fig9c_draw(table: pd.DataFrame, figure: Figure) -> None:
    bars(titled_by_metric(table).sort_values("bar"), figure, columns=2, width=2.9)
    in_percent(figure)


def fig9c_holds(table: pd.DataFrame) -> Verdict:
    """Two parts: two sub-vectors beat four and eight, and 2 x 8 beats 2 x 6, over both tasks."""
    first = table.iloc[0]
    means = table[table["bar"].ne("")].groupby("bar")["value"].mean()
    named = ", ".join(f"{name} {value:.1f}" for name, value in means.items())
    short = table[table["fell_back"].fillna("").ne("")]
    why = "".join(f"; {row['bar']} on {row['task']}: {row['fell_back']}" for _, row in short.iterrows())
    return all_hold(judge(first, name, positive) for name in ("two_over_more", "eight_over_six")), (
        f"means {named}; two sub-vectors are {signed(first, 'two_over_more')} points over more, "
        f"2x8 is {signed(first, 'eight_over_six')} over 2x6{why}"
    )


def table2_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Points of every task, and per budget what pqcache is ahead of each rival and of full attention over all tasks."""
    table = pd.concat(by_task(frame, partial(points, rival="h2o_c")), ignore_index=True)
    same = frame.assign(scores=[headlines(run) for _, run in frame.iterrows()])
    pairs = {}
    for at in _ratios(table):
        mine = of("pqcache", kv_ratio=at)
        pairs |= {f"over_{rival}_{at:g}": (mine, of(rival, kv_ratio=at)) for rival in RIVALS}
        pairs[f"over_full_{at:g}"] = (mine, of("full"))
    table = with_gaps(table, same, ALL, pairs)
    return by_method(table, ["task", "kv_ratio", "method"])


def _ratios(table: pd.DataFrame) -> list[float]:
    return sorted(table["kv_ratio"].dropna().unique(), reverse=True)


def table2_draw(table: pd.DataFrame, figure: Figure) -> None:
    """A panel per task: a bar per method, the darker one with more tokens."""
    shade = ["" if pd.isna(at) else f"{100 * at:g} % of the tokens" for at in table["kv_ratio"]]
    named = titled_by_metric(table.assign(bar=table["method"], shade=shade))
    runs = named[named["method"].ne("full")].sort_values("kv_ratio", ascending=False, kind="stable")
    bars(pd.concat([named[named["method"].eq("full")], runs]), figure, columns=4, width=2.7)
    in_percent(figure)


def table2_holds(table: pd.DataFrame) -> Verdict:
    """Pqcache against every rival at every budget, over all tasks; the difference to full attention is only shown."""
    first, verdicts, said = table.iloc[0], [], []
    means = table.groupby(["method", "kv_ratio"])["value"].mean()
    for at in _ratios(table):
        verdicts += [judge(first, f"over_{rival}_{at:g}", positive) for rival in RIVALS]
        over = ", ".join(f"{signed(first, f'over_{rival}_{at:g}')} over {rival}" for rival in RIVALS)
        full = signed(first, f"over_full_{at:g}")
        said.append(f"at {at:g} mean {means['pqcache', at]:.1f}, {over}; {full} to full attention")
    return all_hold(verdicts), "; ".join(said)


# Figs. 10c and 10d: iterations of k-means, and the block cache.

ITERATIONS = "method.max_iter"
ALIKE = 0.05  # the difference between policies up to which they count as alike
LEVEL = 0.5  # "around 0.5", and 0.6 at the paper's best: what the best number of blocks must reach


def fig10c_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The points with the iterations that were really made, and the most allowed compared with the fewest."""
    metric = rouge2_or_headline(frame)
    limits = [option(setting, ITERATIONS) for setting in frame["setting"]]
    frame = frame.assign(limit=limits, allowed=[float(limit) if limit.isdigit() else math.nan for limit in limits])
    low, high = frame["allowed"].min(), frame["allowed"].max()
    table = points(frame, metric).assign(
        iterations=frame["kmeans_iterations"].to_numpy(), limit=limits, fewest=low, most=high
    )
    pairs = {
        "most_over_fewest": (of(allowed=high), of(allowed=low)),
        "adaptive_over_most": (of(limit="adaptive"), of(allowed=high)),
    }
    return with_gaps(table, frame, metric, pairs)


def fig10c_draw(table: pd.DataFrame, figure: Figure) -> None:
    """A line over the fixed numbers, and the adaptive one apart, hollow."""
    fixed = table[table["limit"].ne("adaptive")].assign(setting="")
    curves(fixed, figure, x="iterations", xlabel="iterations made (mean)")
    figure.set_size_inches(3.8, 3.0)
    axes = figure.axes[0]
    axes.set_ylim(bottom=0.8 * table["low"].min())  # a few points apart: from 0 on they would be one line
    adaptive = table[table["limit"].eq("adaptive")]
    axes.plot(adaptive["iterations"], adaptive["value"], "o", color="#882255", markerfacecolor="none", markersize=9)
    for _, row in adaptive.iterrows():
        place = (row["iterations"], row["value"])
        axes.annotate("adaptive", place, (-6, -14), textcoords="offset points", fontsize=7, ha="right")


def fig10c_holds(table: pd.DataFrame) -> Verdict:
    """Whether the most iterations are better than the fewest; the adaptive number is only shown."""
    first = table.iloc[0]
    return judge(first, "most_over_fewest", positive), (
        f"{first['most']:.0f} iterations are {signed(first, 'most_over_fewest')} points over {first['fewest']:.0f}; "
        f"adaptive is {signed(first, 'adaptive_over_most')} to {first['most']:.0f} (not part of the verdict)"
    )


def fig10d_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean hit rate per policy and number of blocks; the policies compared, and the rise and the fall of each."""
    policy = frame["setting"].map(lambda setting: option(setting, "method.cache_policy"))
    blocks = frame["setting"].map(lambda setting: int(option(setting, "method.cache_blocks_per_step")))
    frame = frame.assign(policy=policy, blocks=blocks)
    keys = ["model", "policy", "blocks"]
    lengths = frame.groupby(keys)["prompt_tokens"].mean()
    table = means_by(frame, keys, ["rate"]).join(lengths, on=keys).assign(method="pqcache")
    lru = frame["policy"] == "lru"
    gaps = {"lru_over_lfu": paired_gap(frame, "rate", lru, ~lru, ("prompt",))}
    for name, rates in table.groupby("policy"):
        mine = frame["policy"] == name
        best, fewest, most = rates.loc[rates["rate"].idxmax(), "blocks"], rates["blocks"].min(), rates["blocks"].max()
        top = mine & (frame["blocks"] == best)
        for word, end in (("rise", fewest), ("fall", most)):
            gaps[f"{word}_{name}"] = paired_gap(frame, "rate", top, mine & (frame["blocks"] == end), ("prompt",))
    for name, gap in gaps.items():
        table = table.assign(**interval_columns(name, gap))
    return table


def fig10d_draw(table: pd.DataFrame, figure: Figure) -> None:
    """A line per policy; the text's own "around 0.5" as a thin line."""
    axes = panel_grid(figure, 1, 1, (3.8, 3.0))[0, 0]
    for (policy, rates), dash, marker in zip(table.groupby("policy"), DASHES, "os", strict=False):
        reach = rates[["rate_low", "rate_high"]].sub(rates["rate"], axis=0).abs().T.to_numpy()
        look = {"color": color_of("pqcache"), "linestyle": dash, "marker": marker, "markersize": 4, "capsize": 2}
        axes.errorbar(rates["blocks"], rates["rate"], reach, label=str(policy).upper(), linewidth=1.2, **look)
    around = paper_numbers("pqcache_fig10d")
    axes.axhline(around["value"].min(), color="0.5", linewidth=0.8, linestyle=":", label="the paper's text: around 0.5")
    axes.set_xscale("log", base=2)
    finish(axes, "blocks noted per step", "hit rate")
    axes.set_xticks(sorted(set(table["blocks"])), [str(n) for n in sorted(set(table["blocks"]))])
    legend(figure)


def fig10d_holds(table: pd.DataFrame) -> Verdict:
    """Three parts: policies at most ALIKE apart on average, rates that reach LEVEL, a rise and a fall of each."""
    first, policies = table.iloc[0], sorted(set(table["policy"]))
    apart = [abs(first[f"lru_over_lfu_{end}"]) for end in ("low", "high")]
    alike = True if max(apart) <= ALIKE else False if min(apart) > ALIKE else None
    best = [rates.loc[rates["rate"].idxmax()] for _, rates in table.groupby("policy")]
    levels = [judge(row, "rate", partial(above, mark=LEVEL)) for row in best]
    # A best that stands at an end has nothing to rise from, or to fall to: its gap is exactly 0.
    turns = [f"{word}_{name}" for name in policies for word in ("rise", "fall")]
    turned = [True if first[f"{turn}_low"] > 0 else False if first[turn] == 0 else None for turn in turns]
    turns_said = "; ".join(
        f"{n}: {interval(first, f'rise_{n}', 3)} up to its best, {interval(first, f'fall_{n}', 3)} down"
        for n in policies
    )
    return all_hold([alike, *levels, *turned]), (
        f"hit rates {table['rate'].min():.2f} to {table['rate'].max():.2f}; lru - lfu "
        f"{signed(first, 'lru_over_lfu', 3)}; {turns_said}"
    )


EXHIBITS = (
    Exhibit(
        "pqcache_fig5",
        title="PQCache, Figs. 1b and 5: how a query's attention is shared out over its past",
        claim=(
            "Attention scores generally follow a power law: few tokens matter much more than all others, which is "
            "why a query can do with some of them (arXiv:2407.12820, Figs. 1b and 5, section 3.1)"
        ),
        at={
            "testbed": "task=testbed_summary method=full limit=20 task.tokens=512 | model=testbed_gqa,testbed_rope",
            "real": "limit=12 task.max_prompt_tokens=1000 | model=smollm2_135m task=cnn_dailymail method=full",
            "paper": "task=xsum method=full limit=20 | model=mistral_7b_instruct_v02",
        },
        measure=inside.power_law,
        table=fig5_table,
        draw=fig5_draw,
        holds=fig5_holds,
    ),
    Exhibit(
        "pqcache_fig7",
        title="PQCache, Fig. 7: one layer's prefill, sending its keys and values home, clustering its keys",
        claim=(
            "One layer's prefill grows with the square of the prompt and sending its keys and values home only in "
            "proportion, so that on long prompts the copy hides behind it; clustering on the CPU takes longer "
            "than both (arXiv:2407.12820, Fig. 7)"
        ),
        table=fig7_table,
        draw=fig7_draw,
        holds=fig7_holds,
    ),
    Exhibit(
        "pqcache_fig8",
        title="PQCache, Fig. 8: a needle in a haystack, by the length of the haystack and the depth of the needle",
        claim=(
            "With a fifth of the tokens PQCache finds the needle in nearly all places, while H2O(C), SPARQ and "
            "InfLLM miss it in a substantial part of them (arXiv:2407.12820, Fig. 8)"
        ),
        axes=by_rivals("h2o_c,sparq,pqcache", "0.2"),
        at={
            "testbed": with_infllm(
                f"task=testbed_needle limit=120 task.lengths=[128,256,384,512] {NEEDLES} task.size=120 | "
                "model=testbed_gqa",
                32,
            ),
            "real": with_infllm(
                f"limit=20 task.lengths=[1000,2000,4000,8000] {NEEDLES} task.max_new_tokens=32 | model=smollm2_135m "
                "task=needle",
                64,
            ),
            "paper": f"task=needle task.haystack=data/PaulGrahamEssays {MISTRAL}",
        },
        table=fig8_table,
        draw=fig8_draw,
        holds=fig8_holds,
        divergence=by_divergence(
            Near("pqcache", of("pqcache")),
            *(Closer(f"pqcache than {rival}", of("pqcache"), of(rival)) for rival in FIG8_RIVALS),
        ),
    ),
    Exhibit(
        "pqcache_fig9a",
        title="PQCache, Fig. 9a: quality of a longer answer against the share of tokens that are attended to",
        claim=(
            "PQCache is better than H2O(C), SPARQ and InfLLM at every share of the tokens, but for H2O(C) at "
            "1/10, which may attend to more (arXiv:2407.12820, Fig. 9a and section 4.2.3, GSM8K; summaries stand "
            "for it here)"
        ),
        axes=by_rivals("h2o_c,sparq,pqcache", "0.1,0.2,0.3"),
        at={
            "testbed": with_infllm(f"{SUMMARIES} kv_ratio=0.05,0.1,0.2,0.3", 32),
            # Its own answers decide, not its sums: a model of this size cannot do them.
            "real": with_infllm("limit=20 task.max_new_tokens=64 | model=smollm2_135m task=gsm8k_cot", 64),
            "paper": f"task=gsm8k_cot {MISTRAL} kv_ratio=0.1,0.2,0.3,0.4,0.5",
        },
        table=fig9a_table,
        draw=fig9a_draw,
        holds=fig9a_holds,
        divergence=by_divergence(
            *(
                Closer(
                    f"pqcache than {rival} at {at:g}",
                    of("pqcache", kv_ratio=at),
                    of(rival, kv_ratio=at),
                    judged=(rival, at) != EXCEPT,
                )
                for at in (0.1, 0.2, 0.3)
                for rival in FIG8_RIVALS
            )
        ),
    ),
    Exhibit(
        "pqcache_fig9b",
        title="PQCache, Fig. 9b: quality against what the choice of tokens has to read",
        claim=(
            "With little extra communication PQCache is the best; from 1/128 to 1/16 of the keys it and InfLLM "
            "stay as they are, while SPARQ gains steadily (arXiv:2407.12820, Fig. 9b; in heads of 32 components, "
            "as here, the same choices read four times that share)"
        ),
        axes={
            "": "method=pqcache | method.m=2,4,8,16 kv_ratio=0.1",
            "sparq": "method=sparq | method.r=1,2,4,8 kv_ratio=0.1",
            "infllm": "method=infllm | method.block=32,16,8,4 kv_ratio=0.1",
        },
        at={
            "testbed": SUMMARIES,
            **{
                scale: {
                    "": f"{words} method.m=2,4,8",
                    "sparq": words,
                    "infllm": f"{words} method.block=64,32,16",
                }
                for scale, words in (("real", TWOWIKI), ("own", QUESTIONS))
            },
            "paper": {"": HOTPOTQA, "sparq": HOTPOTQA, "infllm": f"{HOTPOTQA} method.block=128,64,32,16"},
        },
        table=fig9b_table,
        draw=fig9b_draw,
        holds=fig9b_holds,
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
    Exhibit(
        "pqcache_fig9c",
        title="PQCache, Fig. 9c: sub-vectors and bits per code at nearly the same number of bits per key",
        claim=(
            "At 12 to 16 bits a key all shapes of codes do well, those with two sub-vectors best and most stably; "
            "2 x 8 is better than 2 x 6 (arXiv:2407.12820, Fig. 9c and section 4.2.5)"
        ),
        axes={
            "": "method=pqcache | method.m=2 method.b=6,8 kv_ratio=0.1",
            "m4": "method=pqcache | method.m=4 method.b=3,4 kv_ratio=0.1",
            "m8": "method=pqcache | method.m=8 method.b=2 kv_ratio=0.1",
        },
        at={
            "testbed": "limit=60 | model=testbed_gqa task=testbed_summary,testbed_needle",
            "real": TWOWIKI,
            "own": QUESTIONS,
            "paper": f"task=longbench {MISTRAL} task.subset=hotpotqa,qasper",
        },
        table=fig9c_table,
        draw=fig9c_draw,
        holds=fig9c_holds,
        divergence=by_divergence(
            Closer("two sub-vectors than more", _shaped("2x6", "2x8"), _shaped("4x3", "4x4", "8x2")),
            Closer("2x8 than 2x6", _shaped("2x8"), _shaped("2x6")),
            *(Near(shape, _shaped(shape), judged=False) for shape in SHAPES),
        ),
    ),
    Exhibit(
        "pqcache_fig10a",
        title="PQCache, Fig. 10a: time to the second token against the length of the prompt",
        claim=(
            "PQCache has the second token earliest of H2O, SPARQ, InfLLM and itself, since its clustering hides "
            "behind the prefill (arXiv:2407.12820, Fig. 10a; no number of it is printed)"
        ),
        table=lambda frame: over_full(FIRST),
        draw=partial(over_full_draw, metric=FIRST, ylabel="time to token 2 over full attention's"),
        holds=fig10a_holds,
    ),
    Exhibit(
        "pqcache_fig10b",
        title="PQCache, Fig. 10b: time per further token against the length of the prompt",
        claim=(
            "Per token SPARQ is the slowest, as it searches and fetches one after the other; PQCache is faster "
            "than it and faster than people read, 333 tokens a minute, at a fifth of the tokens "
            "(arXiv:2407.12820, Fig. 10b and section 4.3.2; no number of it is printed)"
        ),
        table=fig10b_table,
        draw=partial(over_full_draw, metric=FURTHER, ylabel="time per token over full attention's"),
        holds=fig10b_holds,
    ),
    Exhibit(
        "pqcache_fig10c",
        title="PQCache, Fig. 10c: quality against the iterations of k-means",
        claim=(
            "Clustering with more iterations gives better scores; as many as hide behind the prefill (adaptive) "
            "are good enough (arXiv:2407.12820, Fig. 10c and section 4.3.3; its times are a GPU's and not "
            "measured here)"
        ),
        axes="method=pqcache | method.max_iter=1,2,5,10,25,adaptive kv_ratio=0.1",
        at={
            "testbed": SUMMARIES,
            "real": f"{TWOWIKI} method.max_iter=1,3,10,30,adaptive",
            "own": f"{QUESTIONS} method.max_iter=1,3,10,30,adaptive",
            "paper": f"{HOTPOTQA} method.max_iter=1,3,5,10,25,adaptive",
        },
        table=fig10c_table,
        draw=fig10c_draw,
        holds=fig10c_holds,
        divergence=by_divergence(
            Closer("30 iterations than 1", of("pqcache", f"{ITERATIONS}=30"), of("pqcache", f"{ITERATIONS}=1")),
            remark=partial(lowest, key=ITERATIONS, method="pqcache"),
        ),
    ),
    Exhibit(
        "pqcache_fig10d",
        title=(
            "PQCache, Fig. 10d: how many of the tokens chosen are in the block cache, by policy and blocks "
            "noted per step"
        ),
        claim=(
            "LRU and LFU have alike hit rates of around 0.5, and 0.6 at best; as more blocks are noted per step "
            "the rate rises first and then falls (arXiv:2407.12820, Fig. 10d and section 4.3.4)"
        ),
        axes="method=pqcache | method.cache_policy=lru,lfu method.cache_blocks_per_step=4,16,64 kv_ratio=0.1",
        at={
            # The cache is half of the document, in 32 blocks, as the paper's 4096 tokens of 8k.
            "testbed": (
                "task=testbed_qa limit=4 task.tokens=1024 task.facts=40 task.per_document=1 method.cache_tokens=512 "
                "method.cache_block=16 method.b=4 | model=testbed_gqa method.cache_blocks_per_step=4,8,16,32,64"
            ),
            "real": (
                f"limit=4 {CUT} method.cache_tokens=1024 method.cache_block=32 | model=smollm2_135m task=longbench "
                "task.subset=2wikimqa"
            ),
            "own": "limit=4 method.cache_tokens=512 method.cache_block=16 | model=smollm2_135m task=news",
            "paper": f"{HOTPOTQA} method.cache_blocks_per_step=8,16,32,64,128".replace("limit=null", "limit=20"),
        },
        measure=inside.hit_rate,
        table=fig10d_table,
        draw=fig10d_draw,
        holds=fig10d_holds,
    ),
    Exhibit(
        "pqcache_table2",
        title="PQCache, Table 2: a model with grouped heads on many tasks, with a fifth and a tenth of the tokens",
        claim=(
            "With 1/5 and 1/10 of the tokens and as little to read for the choice, PQCache is better on average "
            "than H2O(C), InfLLM and SPARQ: by 3.88 and 6.21 points over the best of them on LongBench, and no "
            "worse than full attention at 1/5 (arXiv:2407.12820, Table 2, Mistral-7B; tasks of the testbed stand "
            "for LongBench's)"
        ),
        axes=by_rivals("oracle,h2o_c,sparq,pqcache", "0.2,0.1"),
        at={
            "testbed": with_infllm(f"limit=60 | model=testbed_gqa {FOUR_TASKS}", 32),
            "real": with_infllm(
                f"limit=5 {CUT} task.max_new_tokens=16 | model=smollm2_135m task=longbench "
                "task.subset=hotpotqa,2wikimqa,qasper,multifieldqa_en",
                64,
            ),
            "own": with_infllm(QUESTIONS.replace("limit=20", "limit=24"), 64),
            "paper": f"task=longbench {MISTRAL} {FOURTEEN}",
        },
        table=table2_table,
        draw=table2_draw,
        holds=table2_holds,
        divergence=by_divergence(
            Near("pqcache at 0.2", of("pqcache", kv_ratio=0.2)),
            Near("oracle at 0.2", of("oracle", kv_ratio=0.2), judged=False),
            *(
                Closer(f"pqcache than {rival} at {at:g}", of("pqcache", kv_ratio=at), of(rival, kv_ratio=at))
                for at in (0.2, 0.1)
                for rival in RIVALS
            ),
        ),
    ),
    Exhibit(
        "pqcache_table3",
        title="PQCache, Table 3: a model whose every query head has its own keys, otherwise as Table 2",
        claim=(
            "The same holds where every query head has its own keys: PQCache is 1.61 and 1.60 points over the "
            "best of H2O(C), InfLLM and SPARQ with 1/5 and 1/10 of the tokens (arXiv:2407.12820, Table 3, "
            "LLaMA-2-7B-Chat)"
        ),
        testbed_only="it is about models whose every query head has its own keys; SmolLM2's heads are grouped",
        axes=by_rivals("oracle,h2o_c,sparq,pqcache", "0.2,0.1"),
        at={
            "testbed": with_infllm(f"limit=40 | model=testbed_rope {FOUR_TASKS}", 32),
            "paper": f"task=longbench {MISTRAL} {FOURTEEN}".replace("mistral_7b_instruct_v02", "llama2_7b_chat"),
        },
        table=table2_table,
        draw=table2_draw,
        holds=table2_holds,
    ),
)
