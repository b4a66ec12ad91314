"""All of `kvexp yardstick`: runs of the full cache, the table beside the published numbers, the file for tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kvexp
from kvexp.config.settings import Settings
from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import evaluate_run
from kvexp.record import Run
from kvexp.record.baseline_check import keep_check
from kvexp.tasks.lm_eval import LMEval
from kvexp.terminal import say
from kvexp.yardstick.full_cache_score import ERRORS, FullCacheScore, mean_score, verdict
from kvexp.yardstick.hflm_agreement import WITHIN, HFLMAgreement, agreement, stock_model
from kvexp.yardstick.published_numbers import PublishedModel, published
from kvexp.yardstick.run_settings import composed_settings


def compare_with(words: Sequence[str], name: str | None, check_lm_eval: int | None) -> int:
    """Run, compare, print and keep. words: of the command line; name: whose numbers, None: the model's.

    The exit code: 0 where every number is inside two standard errors and lm-eval agrees, else 1.
    """
    model, runs = composed_settings(words, lambda model: tuple(each.task for each in published(name or model).numbers))
    known = published(name or model)
    if check_lm_eval is not None and check_lm_eval < 1:
        raise ConfigError(f"--check-lm-eval must be at least 1 item, got {check_lm_eval}")
    scores, agreements, lm = [], [], None
    for settings, number in zip(runs, known.numbers, strict=True):
        made = evaluate_run(settings)
        rows = _rows(settings, made)
        scores.append(mean_score(rows, _items(settings), number))
        if check_lm_eval is not None:
            lm = lm or stock_model(settings)
            agreements.append(agreement(settings, rows[:check_lm_eval], lm))
    words_of = verdict(scores)
    file = keep_check(runs[0].outputs_dir, runs[0].identity["model"], _content(known, scores, agreements, words_of))
    _print(known, scores, agreements, words_of, file)
    return 0 if all(one.inside for one in scores) and all(one.agrees for one in agreements) else 1


def _rows(settings: Settings, made: Run) -> list[dict[str, Any]]:
    """The rows of the first `limit` items, in their order; ConfigError while some are other shards' to make."""
    wanted = _items(settings) if settings.limit is None else min(settings.limit, _items(settings))
    rows = sorted((row for row in made.rows() if row["index"] < wanted), key=lambda row: row["index"])
    if len(rows) < wanted:
        raise ConfigError(f"{made.path} has {len(rows)} of {wanted} rows so far: run the other shards, then this again")
    return rows


def _items(settings: Settings) -> int:
    """How many items the benchmark has."""
    assert isinstance(settings.task, LMEval)
    return len(settings.task.definition.eval_docs)


def _content(
    known: PublishedModel, scores: Sequence[FullCacheScore], agreements: Sequence[HFLMAgreement], words: str
) -> dict[str, Any]:
    return {
        "verdict": words,
        "numerics": kvexp.NUMERICS,
        "published": known.name,
        "source": known.source,
        "scores": [score.plain() for score in scores],
        "lm_eval": [{**asdict(one), "agrees": one.agrees} for one in agreements],
    }


def _print(
    known: PublishedModel,
    scores: Sequence[FullCacheScore],
    agreements: Sequence[HFLMAgreement],
    words: str,
    file: Path,
) -> None:
    say(f"\nfull cache of {known.name}: {known.protocol}")
    say(f"{'benchmark':<16}{'metric':<10}{'items':>12}{'here':>8}{'+-2 se':>8}{'published':>11}{'distance':>10}")
    for one in scores:
        count = f"{one.n}/{one.items}"
        say(
            f"{one.task:<16}{one.metric:<10}{count:>12}{one.score:>8.2f}{ERRORS * one.stderr:>8.2f}"
            f"{one.published:>11.2f}{one.distance:>+10.2f}  {'inside' if one.inside else 'OUTSIDE'}"
        )
    for each in agreements:
        found = "agree" if each.agrees else f"DISAGREE ({len(each.other)} items scored otherwise)"
        say(
            f"lm-eval's HFLM, {each.task}: {each.requests} log-likelihoods of {each.items} items differ by at most "
            f"{each.largest:.1e} nats (allowed: {WITHIN:g}): {found}"
        )
    say(f"baseline {words}")
    say(f"published: {known.source}")
    say(f"measured there: {known.weights}")
    for line in known.beside:
        say(f"beside: {line}")
    say(f"kept in {file}, which tables of this model read")
