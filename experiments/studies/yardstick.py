"""The full cache under a published protocol, against the published numbers.

    python -m experiments.studies.yardstick model=NAME

Settings of `kvexp run` are taken as far as they change no number but the model: limit=N compares the first N items of
each benchmark, task.data_dir=FOLDER reads local rows (NAME.SPLIT.jsonl, in the hub's schema), batch_size=N.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import kvexp
from experiments.studies import composed_runs
from kvexp.hf.fetch import located
from kvexp.run.batches import evaluate_run
from kvexp.run.compose import hydra_errors_shown
from kvexp.run.jobs import composed_model
from kvexp.run.session import Session, keys_of
from kvexp.run.settings import Settings
from kvexp.run.store import Run, keep_check
from kvexp.tasks.lm_eval import LMEval
from kvexp.util.errors import CacheError, ConfigError
from kvexp.util.output import say, tells_errors, watch_pipes

SETTINGS = ("model", "limit", "batch_size", "outputs_dir", "retry", "threads", "shard", "task.data_dir")
SLICE = 25


@tells_errors(ConfigError, CacheError)
def main(argv: Sequence[str] | None = None) -> int:
    """0 where every number is inside two standard errors, 1 where one is not (or lm-eval disagrees), 2 for errors."""
    args, words = parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    check_words(words)
    with hydra_errors_shown(words):
        return compare_with(words, args.numbers, args.check_lm_eval)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m experiments.studies.yardstick",
        usage="%(prog)s model=NAME [limit=N] [task.data_dir=FOLDER] [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("--numbers", metavar="NAME", help="whose numbers to compare with (default: the model's name)")
    result.add_argument(
        "--check-lm-eval",
        nargs="?",
        type=int,
        const=SLICE,
        metavar="N",
        help=f"also put the first N items of each (default {SLICE}) through lm-eval's own Hugging Face model",
    )
    return result


def check_words(words: Sequence[str]) -> None:
    """ConfigError for a setting that would make it another protocol."""
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        if key not in SETTINGS and not key.startswith("model."):
            raise ConfigError(
                f"{word}: the yardstick sets task, method and protocol itself; it takes {', '.join(SETTINGS)} and "
                "model.NAME"
            )


FILE = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True)
class PublishedNumber:
    """A benchmark of lm-eval, the metric that was printed, and its number in percent."""

    task: str
    metric: str
    number: float


@dataclass(frozen=True)
class PublishedModel:
    """The published numbers of a model; protocol, weights, source and notes are texts for people."""

    name: str
    protocol: str
    weights: str
    source: str
    numbers: tuple[PublishedNumber, ...]
    notes: tuple[str, ...]


def published(name: str) -> PublishedModel:
    """The published numbers of a model configuration; ConfigError where nothing is known."""
    known: Any = OmegaConf.to_container(OmegaConf.load(FILE))
    if name not in known:
        raise ConfigError(
            f"no published number is known for model={name}; there are numbers for {', '.join(map(str, known))} (add "
            "others, with their source, to experiments/studies/published.yaml; of a local copy say --numbers NAME)"
        )
    node = known[name]
    numbers = tuple(PublishedNumber(task, **values) for task, values in node["numbers"].items())
    protocol, weights, source = (" ".join(node[key].split()) for key in ("protocol", "weights", "source"))
    return PublishedModel(name, protocol, weights, source, numbers, tuple(node.get("notes", ())))


ERRORS = 2  # standard errors within which a number counts as the published one


@dataclass(frozen=True)
class FullCacheScore:
    """score and published in percent, the mean over n of the task's `items`; stderr: of the mean over these n.

    The published number has an error of its own, over the same items: two models' scores on the same items differ by
    less than two independent samples would, so the interval is on the wide side where n is all.
    """

    task: str
    metric: str
    n: int
    items: int
    score: float
    stderr: float
    published: float

    @property
    def distance(self) -> float:
        """Points above (or below) the published number."""
        return self.score - self.published

    @property
    def inside(self) -> bool:
        return abs(self.distance) <= ERRORS * self.stderr

    def plain(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "distance": self.distance, "inside": self.inside}


def mean_score(rows: Sequence[Mapping[str, Any]], items: int, number: PublishedNumber) -> FullCacheScore:
    """The mean score of rows of a benchmark of `items` items; stderr is lm-eval's, of the sample, over n - 1.

    ConfigError where there are fewer than two rows, or one has no score.
    """
    scores = [row["metrics"].get(number.metric) for row in rows]
    if len(scores) < 2:
        raise ConfigError(f"{number.task}: {len(scores)} items are too few for a mean with an error; raise limit")
    if lost := [row for row, score in zip(rows, scores, strict=True) if score is None]:
        why = lost[0].get("skipped") or f"no metric {number.metric}"
        raise ConfigError(f"{number.task}: {len(lost)} of {len(rows)} items have no {number.metric} ({why})")
    n, mean = len(scores), math.fsum(scores) / len(scores)
    variance = math.fsum((score - mean) ** 2 for score in scores) / (n - 1)
    return FullCacheScore(number.task, number.metric, n, items, mean, math.sqrt(variance / n), number.number)


def verdict(scores: Sequence[FullCacheScore]) -> str:
    """ "checked", or "off by -3.1 points in arc_easy (published 54.12)", the farthest first; and of how many items."""
    outside = sorted((score for score in scores if not score.inside), key=lambda score: -abs(score.distance))
    words = "checked"
    if outside:
        misses = (f"{score.distance:+.1f} points in {score.task} (published {score.published:g})" for score in outside)
        words = f"off by {', '.join(misses)}"
    n, items = sum(score.n for score in scores), sum(score.items for score in scores)
    return words if n == items else f"{words}, on {n} of {items} items"


WITHIN = 1e-3  # nats, per log-likelihood


@dataclass(frozen=True)
class HFLMAgreement:
    """requests: log-likelihoods compared; largest: their largest difference in nats; other: items scored otherwise."""

    task: str
    items: int
    requests: int
    largest: float
    other: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return self.largest <= WITHIN and not self.other


def agreement(settings: Settings, rows: Sequence[Mapping[str, Any]], lm: Any) -> HFLMAgreement:
    """Rows of a full cache against what lm-eval's model `lm` says of the same items of the settings' task."""
    task = settings.task
    assert isinstance(task, LMEval)
    known = {row["example"]: row for row in rows}
    items = [item for item in task.examples() if item.id in known]
    said = iter(lm.loglikelihood([instance for item in items for instance in item.instances], disable_tqdm=True))
    largest, other, requests = 0.0, [], 0
    for item in items:
        results = [next(said) for _ in item.instances]
        ours = known[item.id]
        pairs = list(zip(ours["choices"]["logprobs"], results, strict=True))
        largest = max([largest, *(abs(mine - theirs) for mine, (theirs, _) in pairs)])
        requests += len(pairs)
        if task.score_item(item, results) != ours["metrics"]:
            other.append(item.id)
    return HFLMAgreement(task.label(""), len(items), requests, largest, tuple(other))


def stock_model(settings: Settings) -> Any:
    """lm-eval's own model of the same files, which kvexp has no hand in."""
    from lm_eval.models.huggingface import HFLM

    from kvexp.tasks.lm_eval import quiet

    spec = settings.model
    if spec.kind == "random":
        raise ConfigError("--check-lm-eval needs a model with files: lm-eval loads it by itself")
    options: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code, "revision": spec.revision or "main"}
    with quiet():
        return HFLM(
            pretrained=located(spec.path)[0],
            tokenizer=spec.tokenizer,
            dtype=spec.dtype,
            device=spec.resolved_device(),
            batch_size=settings.batch_size,
            **options,
        )


BATCH = 8  # prompts per forward where nothing else is asked for: in float32 it changes no number


def composed_settings(words: Sequence[str], benchmarks: Callable[[str], tuple[str, ...]]) -> tuple[str, list[Settings]]:
    """(name of the model's configuration, one run per benchmark); ConfigError for settings that cannot be.

    words: overrides of the command line; benchmarks: name of the model -> lm-eval's names of its benchmarks.
    """
    name, _ = composed_model(
        [word for word in words if word.lstrip("+").partition("=")[0].partition(".")[0] == "model"]
    )
    task_words = ["task=lm_eval", f"task.tasks=[{','.join(benchmarks(name))}]", "method=full"]
    if not any(word.partition("=")[0] == "batch_size" for word in words):
        task_words.append(f"batch_size={BATCH}")
    _, settings = composed_runs([*words, *task_words], Session(typed_keys=keys_of(words)))
    for run in settings:
        if run.model.kind == "random":
            raise ConfigError(f"model={name} has random weights: there is nothing to compare them with")
    return name, settings


def compare_with(words: Sequence[str], name: str | None, check_lm_eval: int | None) -> int:
    """Run, compare, print and keep. words: of the command line; name: whose numbers, None: the model's.

    The exit code: 0 where every number is inside two standard errors and lm-eval agrees, else 1.
    """
    model, runs = composed_settings(words, lambda model: tuple(goal.task for goal in published(name or model).numbers))
    known = published(name or model)
    if check_lm_eval is not None and check_lm_eval < 1:
        raise ConfigError(f"--check-lm-eval must be at least 1 item, got {check_lm_eval}")
    lm = None if check_lm_eval is None else stock_model(runs[0])  # before the runs, which take long
    scores, agreements = [], []
    for settings, number in zip(runs, known.numbers, strict=True):
        record = evaluate_run(settings)
        rows = _rows(settings, record)
        scores.append(mean_score(rows, _items(settings), number))
        if lm is not None:
            agreements.append(agreement(settings, rows[:check_lm_eval], lm))
    said = verdict(scores)
    content = {
        "verdict": said,
        "numerics": kvexp.NUMERICS,
        "published": known.name,
        "source": known.source,
        "scores": [score.plain() for score in scores],
        "lm_eval": [{**asdict(same), "agrees": same.agrees} for same in agreements],
    }
    file = keep_check(runs[0].outputs_dir, runs[0].identity["model"], content)
    _print(known, scores, agreements, said, file)
    return 0 if all(score.inside for score in scores) and all(score.agrees for score in agreements) else 1


def _rows(settings: Settings, run: Run) -> list[dict[str, Any]]:
    """The rows of the first `limit` items, in their order; ConfigError while some are other shards' to make."""
    wanted = _items(settings) if settings.limit is None else min(settings.limit, _items(settings))
    rows = sorted((row for row in run.rows() if row["index"] < wanted), key=lambda row: row["index"])
    if len(rows) < wanted:
        raise ConfigError(f"{run.path} has {len(rows)} of {wanted} rows so far: run the other shards, then this again")
    return rows


def _items(settings: Settings) -> int:
    """How many items the benchmark has."""
    assert isinstance(settings.task, LMEval)
    return len(settings.task.definition.eval_docs)


def _print(
    known: PublishedModel,
    scores: Sequence[FullCacheScore],
    agreements: Sequence[HFLMAgreement],
    words: str,
    file: Path,
) -> None:
    say(f"\nfull cache of {known.name}: {known.protocol}")
    say(f"{'benchmark':<16}{'metric':<10}{'items':>12}{'here':>8}{'+-2 se':>8}{'published':>11}{'distance':>10}")
    for score in scores:
        count = f"{score.n}/{score.items}"
        say(
            f"{score.task:<16}{score.metric:<10}{count:>12}{score.score:>8.2f}{ERRORS * score.stderr:>8.2f}"
            f"{score.published:>11.2f}{score.distance:>+10.2f}  {'inside' if score.inside else 'OUTSIDE'}"
        )
    for peer in agreements:
        outcome = "agree" if peer.agrees else f"DISAGREE ({len(peer.other)} items scored otherwise)"
        say(
            f"lm-eval's HFLM, {peer.task}: {peer.requests} log-likelihoods of {peer.items} items differ by at most "
            f"{peer.largest:.1e} nats (allowed: {WITHIN:g}): {outcome}"
        )
    say(f"baseline {words}")
    say(f"published: {known.source}")
    say(f"measured there: {known.weights}")
    for line in known.notes:
        say(f"note: {line}")
    say(f"kept in {file}, which tables of this model read")


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
