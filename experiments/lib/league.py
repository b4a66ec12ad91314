"""The league of methods: its sweeps, what methods learn beforehand, and its rows as tables and intervals.

A piece is one sweep: a task, whether eviction sees the question, and methods at four budgets. What it holds at once
is its caches at the longest prompt of the task; `MOST_BYTES` of them at most, so that no piece needs a larger machine.
`frame_of` reads run folders; what `record` keeps of it (methods_league.csv) is what docs/methods_league.md shows.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.lib.exhibits import HERE
from experiments.lib.real_scale import MODEL
from experiments.lib.tables import kl_estimate, markdown
from kvexp.results.divergence import (
    compared_means,
    divergence_table,
    example_means,
    share_interval,
)
from kvexp.results.read import AFTER_EVICTION, IN_PROMPT, folders
from kvexp.results.stats import corrected_level
from kvexp.results.table import table, without_question
from kvexp.run.store import EPSILON_KL, OWN
from kvexp.tasks.articles import training_articles
from kvexp.util.errors import ConfigError
from kvexp.util.files import replace

RATIOS = (0.125, 0.25, 0.5, 0.75)
QUESTIONS = (AFTER_EVICTION, IN_PROMPT)
LONGEST = {"news": 1200, "news_qa": 1200, "cnn_dailymail": 1920, "needle": 8000}  # tokens of a prompt, by task
TOKEN_BYTES = 30 * 3 * 64 * 2 * 4  # of a slot of SmolLM2-135M in all layers: 30 layers, 3 kv heads, keys and values
MOST_BYTES = 4 << 30  # as much again is held for the texts that are forced, where answers are written too

OLD = [
    *("random", "window", "dilated_window", "streaming_llm", "h2o", "keyformer"),
    *("a2sf", "tova", "spatten", "snapkv", "knorm", "vatp"),
]
NEW = [
    *("keydiff", "lagkv", "cur", "compactor", "caote"),
    *("expected_attention", "qfilters", "pyramidkv", "cake", "kvzap"),
    *("defensivekv", "capkv"),
]
EVERY_128 = ["triattention", "rkv", "vase"]
READ_TWICE = ["kvzip", "kvzip_plus"]
ADAPTIVE = ["snapkv", "expected_attention"]
KEEP_ALL = ["ideal", "pqcache", "sparq", "quest", "infllm"]
# A chunk is fed behind the prompt, and behind 8,000 tokens the model's 8,192 positions have no room for 2,000 more. On
# the fifteen prompts where both fit KL moves by 0.03 or less at a quarter and half.
SHORT_CHUNKS, CHUNKED = ("method.chunk=128",), "chunk128"
# Prompts of news have a few hundred tokens, an eighth of which kvpress's 128 and 256 would overrun.
DUO = ("budget.heads=duo", "budget.stream_sinks=4", "budget.stream_recent=28")
CALIBRATED = ("qfilters", "triattention", "kvzap")  # methods that need a calibration; the heads of DUO need one too
LEFT_OUT = {
    **dict.fromkeys(("attention_matching", "cam", "d2o"), "it rewrites what it keeps: to be compared at equal bytes"),
    **dict.fromkeys(("epikv", "gkv"), "it is of decoding: experiments.studies.decoding records it"),
    "full": "what all are measured against",
    "h2o_c": "it takes more slots than the budget",
    "h2o_keyformer_paper": "h2o with another recent window",
    "h2o_damping": "an ablation of h2o",
    "key_attention": "an ablation of h2o",
    "keyformer_a2sf": "an ablation of keyformer",
    "oracle": "ideal once more: the exact top of every query",
    "openvino": "it counts in blocks of 32 tokens and protects 160: experiments.studies.engines records it",
}


@dataclass(frozen=True)
class MethodGroup:
    """Methods that are run in one sweep. words: overrides that all of them get; keeps_all: they hold every token.

    label: what the page puts behind a method's name for these words, "" nothing; tasks: those the group is run on.
    """

    name: str
    methods: tuple[str, ...]
    words: tuple[str, ...] = ()
    keeps_all: bool = False
    label: str = ""
    tasks: tuple[str, ...] = tuple(LONGEST)

    @property
    def bytes_per_token(self) -> float:
        """Bytes per prompt token of one method's caches at all budgets."""
        return TOKEN_BYTES * (len(RATIOS) if self.keeps_all else sum(RATIOS))


GROUPS = (
    MethodGroup("old", tuple(OLD)),
    MethodGroup("new", tuple(NEW)),
    # Their papers evict every 128 tokens; at every step R-KV, which compares all keys, takes longer than all others.
    MethodGroup("every_128", tuple(EVERY_128), ("cache.evict_every=128",)),
    MethodGroup("read_twice", tuple(READ_TWICE), tasks=("news", "news_qa", "cnn_dailymail")),
    MethodGroup("short_chunks", tuple(READ_TWICE), SHORT_CHUNKS, label=CHUNKED, tasks=("needle",)),
    MethodGroup("adaptive", tuple(ADAPTIVE), ("budget.heads=adaptive",), label="adaptive"),
    MethodGroup("duo", ("h2o",), DUO, label="duo"),
    MethodGroup("keep_all", tuple(KEEP_ALL), keeps_all=True),
)


@dataclass(frozen=True)
class Piece:
    """One sweep of the league: overrides of `experiment=real/league_TASK`."""

    task: str
    question: str
    group: MethodGroup
    methods: tuple[str, ...]

    @property
    def name(self) -> str:
        """TASK/QUESTION/GROUP, and the first method where a group has several pieces."""
        first = "" if self.methods == self.group.methods else f"/{self.methods[0]}"
        return f"{self.task}/{self.question}/{self.group.name}{first}"

    @property
    def words(self) -> tuple[str, ...]:
        """The overrides, without where rows are from and where runs go."""
        return (f"task.question={self.question}", f"method={','.join(self.methods)}", *self.group.words)


def pieces(
    tasks: Sequence[str], only: Sequence[str] = (), questions: Sequence[str] = QUESTIONS, *, answers: bool = True
) -> list[Piece]:
    """Every piece of these tasks; only: of these methods; questions: where the question stands.

    answers: whether answers are generated too; without them twice as many methods go together, but of methods that keep
    everything, of which five took more than 19 GB on needles.
    """
    return [
        Piece(task, question, group, part)
        for task in tasks
        for question in questions
        for group in GROUPS
        if task in group.tasks
        for part in parts_by_memory(group, LONGEST[task], only, MOST_BYTES * (1 if answers or group.keeps_all else 2))
    ]


def parts_by_memory(
    group: MethodGroup, tokens: int, only: Sequence[str] = (), most_bytes: int = MOST_BYTES
) -> Iterator[tuple[str, ...]]:
    """The methods of a group in parts whose caches take at most so many bytes at prompts of so many tokens."""
    methods = [name for name in group.methods if not only or name in only]
    most = max(1, int(most_bytes / (group.bytes_per_token * tokens)))
    count = -(-len(methods) // most)
    ends = [len(methods) * (place + 1) // count for place in range(count)]
    for start, end in zip([0, *ends], ends, strict=False):
        yield tuple(methods[start:end])


TEXTS = "calibration_texts.jsonl"  # in the league's outputs
DIGESTS = "calibrations.json"


def calibrate_for_league(outputs: Path) -> None:
    """Make the calibrations that are missing or that are not the league's: of queries, heads, and KVzap's scores.

    They are made on the articles that are kept for training, and take the place of the model's older ones in the cache
    folder. ConfigError where one cannot be made.
    """
    from kvexp.hf.calibrate import SURROGATES
    from kvexp.run.calibrate import calibrate_model, train_kvzap
    from kvexp.run.jobs import composed_model
    from kvexp.run.model_spec import model_digest

    words = [f"model={MODEL}"]
    digest = model_digest(composed_model(words)[1])
    outputs.mkdir(parents=True, exist_ok=True)
    kept = outputs / DIGESTS
    if not kept.exists() or json.loads(kept.read_text("utf-8")) != _digests(digest):
        texts = outputs / TEXTS
        lines = [json.dumps({"text": f"{one.title}\n\n{one.text}"}) for one in training_articles()]
        replace(texts, ("\n".join(lines) + "\n").encode())
        calibrate_model(words, str(texts), tokens=2048, count=20)
        replace(kept, json.dumps(_digests(digest)).encode())
    wanted = [one.id for one in training_articles()]
    if list(SURROGATES.about(digest).get("articles", ())) != wanted:
        train_kvzap(words, "", tokens=1250, count=400)


def _digests(model: str) -> dict[str, str | None]:
    """Digests of what the cache folder holds of a model's queries and heads; None for what is not there."""
    from kvexp.hf.calibrate import HEADS, QUERIES

    found: dict[str, str | None] = {}
    for name, file in (("queries", QUERIES), ("heads", HEADS)):
        try:
            made = file.read(model)
        except ConfigError:  # written by another version: made anew
            made = None
        found[name] = None if made is None else made.digest
    return found


RECORDED = HERE / "methods_league.csv"
NOT_RECORDED = "The league is not recorded yet."
COLUMNS = ("numerics", "task", "question", "method", "how", "kv_ratio")
COLUMNS += ("n", "kl", "kl_low", "kl_high", "top1", "of_full", "slots")
OF_ROWS = ["of_full", "slots"]  # known where answers were written
EACH = "kl_each"  # "EXAMPLES: kl kl …", EXAMPLES a digest of their names

MARKS = ("ahead_of", "behind")
TASKS = {"news": "news", "cnn_dailymail": "CNN", "news_qa": "questions", "needle": "needles"}  # as pages say
SHORT = {AFTER_EVICTION: "hidden", IN_PROMPT: "seen"}


def frame_of(outputs: Path) -> pd.DataFrame:
    """One row per run under OUTPUTS/TASK that has as many examples as any of its block: COLUMNS, EACH and MARKS.

    how: the label of the methods' group; of_full: the task's first metric in percent of the full
    cache's, NaN where not all answers were written; EACH: mean KL of each example. MARKS: see `marked`.
    """
    parts = [_of_task(outputs / task) for task in LONGEST if (outputs / task).is_dir()]
    parts = [part for part in parts if len(part)]
    if not parts:
        return pd.DataFrame(columns=[*COLUMNS, EACH, *MARKS])
    return marked(pd.concat(parts, ignore_index=True))


def _of_task(outputs: Path) -> pd.DataFrame:
    found = [folder for folder in folders(outputs) if not folder.refused]
    frame = divergence_table(found)
    if frame.empty:
        return frame
    frame = pd.DataFrame(without_question(frame[frame["text"].eq(OWN)].to_dict("records")))  # type: ignore[arg-type]
    frame = finished(frame).copy()
    frame["how"] = [how_of(str(setting)) for setting in frame["setting"]]
    answered = {
        (row["hash"], row["n"]): row.get(f"{row['headline']}_of_full")
        for row in table(outputs).to_dict("records")
        if isinstance(row["headline"], str)
    }
    runs = list(zip(frame["hash"], frame["n"], strict=True))
    frame["of_full"] = [answered.get(run, math.nan) for run in runs]
    frame["slots"] = frame["slots"].where([run in answered for run in runs])  # else of some of the examples
    by_hash = {folder.run.hash: folder for folder in found}
    frame[EACH] = [_joined(example_means(by_hash[name], OWN)) for name in frame["hash"]]
    return frame[[*COLUMNS, EACH]]


def _joined(means: Mapping[str, float]) -> str:
    examples = hashlib.sha256(repr(list(means)).encode()).hexdigest()[:8]
    return f"{examples}: {' '.join(f'{kl:.6g}' for kl in means.values())}"


def _split(joined: str) -> dict[str, float]:
    """Name of an example -> its mean KL, of what `_joined` made; names are equal where the examples were the same."""
    examples, _, values = joined.partition(":")
    return {f"{examples}/{place}": float(kl) for place, kl in enumerate(values.split())}


def finished(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that have as many examples as any other of their block; one with fewer was interrupted."""
    return frame[frame["n"].eq(frame.groupby(["task", "question"])["n"].transform("max"))]


def how_of(setting: str) -> str:
    """The label of the group that runs have with this `setting`, words separated by spaces; "" for most."""
    words = set(setting.split())
    return next((group.label for group in GROUPS if group.label and words.issuperset(group.words)), "")


def marked(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with MARKS of every row.

    ahead_of, behind: names of methods that diverge more, or less, at this budget and by more than chance (Holm over all
    pairs of the budget).
    """
    frame = frame.assign(**dict.fromkeys(MARKS, ""))
    for _, part in frame.groupby(["task", "question", "kv_ratio"]):
        means = {name_of(row): _split(row[EACH]) for _, row in part.iterrows()}
        pairs = compared_means(means)
        ahead: dict[str, list[str]] = {name: [] for name in means}
        behind: dict[str, list[str]] = {name: [] for name in means}
        for _, pair in pairs[pairs["better"].ne("")].iterrows():
            worse = pair["other"] if pair["better"] == pair["one"] else pair["one"]
            ahead[pair["better"]].append(worse)
            behind[worse].append(pair["better"])
        for mark, found in zip(MARKS, (ahead, behind), strict=True):
            frame.loc[part.index, mark] = [" ".join(sorted(found.get(name, []))) for name in means]
    return frame


def name_of(row: Any) -> str:
    """A method as the page calls it: snapkv, snapkv+adaptive."""
    return f"{row['method']}+{row['how']}" if row["how"] else str(row["method"])


def _blocks(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The name and rows of each block that has rows."""
    for question, task in itertools.product(QUESTIONS, TASKS):
        part = frame[frame["task"].eq(task) & frame["question"].eq(question)]
        if len(part):
            yield f"{TASKS[task]}, {SHORT[question]}", part


def leaders(frame: pd.DataFrame) -> str:
    """A Markdown table of the method of least KL that evicts: a row for each block, a column for each budget.

    NOT_RECORDED without a row.
    """
    if frame.empty:
        return NOT_RECORDED
    rows = [(name, *(_leader(part[part["kv_ratio"].eq(ratio)]) for ratio in RATIOS)) for name, part in _blocks(frame)]
    return markdown(["nearest at", *(f"{100 * ratio:g} %" for ratio in RATIOS)], *rows)


def entries(frame: pd.DataFrame) -> list[str]:
    """The methods' names of all rows; one with another chunk on long prompts keeps its plain name."""
    return [name_of(row).removesuffix(f"+{CHUNKED}") for row in frame.to_dict("records")]


def keep_all() -> set[str]:
    """Methods that keep every token."""
    return {name for group in GROUPS if group.keeps_all for name in group.methods}


def nearest(at: pd.DataFrame) -> Any:
    """The row of least KL among the methods that evict (with an interval, if any has one); None where none evicts."""
    evicting = at[~at["method"].isin(keep_all())]
    sure = evicting[np.isfinite(evicting["kl_low"].astype(float))]
    some = sure if len(sure) else evicting
    return some.sort_values("kl").iloc[0] if len(some) else None


def _leader(at: pd.DataFrame) -> str:
    """The nearest method of a block and budget, its KL, and how many others are not significantly farther.

    The interval is of the mean over examples, at a level corrected for the methods that the smallest was chosen from.
    Bold: the whole interval is near the full cache. "-" where nobody evicts.
    """
    best, count = nearest(at), int((~at["method"].isin(keep_all())).sum())
    if best is None:
        return "-"
    name = entries(best.to_frame().T)[0]
    if not np.isfinite(best["kl_low"]):
        return f"{name}<br>{best['kl']:.3f} (too few)"
    each = np.array([*_split(best[EACH]).values()])
    low, high = share_interval(each, np.ones(len(each)), corrected_level(count))
    kl = kl_estimate(best["kl"], low, high, each).replace(" … ", "..")
    behind = [other for other in best["ahead_of"].split() if other.partition("+")[0] not in keep_all()]
    alike = count - 1 - len(behind)
    return f"{name}{f', +{alike}' if alike else ''}<br>{f'**{kl}**' if high < EPSILON_KL else kl}"


def recorded() -> pd.DataFrame:
    """What was kept of a recording; empty where there is none."""
    if not RECORDED.exists():
        return pd.DataFrame(columns=[*COLUMNS, EACH, *MARKS])
    kept = pd.read_csv(RECORDED, keep_default_na=True).reindex(columns=[*COLUMNS, EACH, *MARKS])
    return kept.fillna(dict.fromkeys(("how", *MARKS), ""))


def merged(kept: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """Both recordings: of a method at a budget the row of more examples, that of `found` if they have equally many.

    A recording may so be made a few methods at a time, on several machines; a later and smaller trial replaces nothing.
    Where answers were not written once more, OF_ROWS stays.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    both = pd.concat([frame for frame in (kept, found) if len(frame)])
    for row in finished(both).to_dict("records"):
        place = tuple(row[name] for name in ("task", "question", "kv_ratio", "method", "how"))
        if before := rows.get(place):
            row |= {name: before[name] for name in OF_ROWS if row[name] != row[name]}
        rows[place] = row
    frame = pd.DataFrame(rows.values(), columns=[*COLUMNS, EACH, *MARKS])
    blocks = list(itertools.product(LONGEST, QUESTIONS))
    order = [blocks.index(block) for block in zip(frame["task"], frame["question"], strict=True)]
    return marked(frame.iloc[np.argsort(order, kind="stable")].reset_index(drop=True))


def record(outputs: Path) -> Path:
    """Keep the numbers of a recording in the file that is returned; ConfigError without rows."""
    found = frame_of(outputs)
    if found.empty:
        raise ConfigError(f"{outputs} has no run with a divergence: run the league first")
    merged(recorded(), found.round(6)).to_csv(RECORDED, index=False)
    return RECORDED
