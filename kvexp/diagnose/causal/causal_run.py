"""Measure the effect of removals on a run's examples, and what every method's score says of the removed tokens."""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from omegaconf import OmegaConf
from torch import Tensor

from kvexp.config.group_checks import batch_cache
from kvexp.config.settings import Settings, settings_of
from kvexp.console import Progress
from kvexp.diagnose.causal.causal_files import (
    METHODS,
    REMOVALS,
    SCORES,
    CausalExample,
    read_frame,
    read_measured,
    write_frame,
    write_measured,
)
from kvexp.diagnose.causal.causal_measures import rank_correlation
from kvexp.diagnose.causal.prompt_scores import PromptScores, everything_evicted, prompt_scores
from kvexp.diagnose.causal.removal_effects import ANSWER_SCORES, Effect, ForcedAnswer
from kvexp.diagnose.causal.removal_plan import TOKEN, RemovalPlan, RemovalUnit, removal_units
from kvexp.diagnose.classes import classes_of
from kvexp.diagnose.folders import Row, chosen, rows_of, short_title
from kvexp.diagnose.refusals import check
from kvexp.diagnose.runs import cases, settings_at
from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import waiting_notice
from kvexp.models.texts import texts_of
from kvexp.paths import CONF
from kvexp.record import Run
from kvexp.terminal import say

ALL = "all"
_OWN_OPTIONS = ("method", "cache.mode", "cache.positions")  # options that are another method's


@dataclass(frozen=True)
class CausalOptions:
    """What is measured: the plan of removals; methods: names, or `ALL`; first: so many of the run's examples.

    examples: ids of those that are measured in place of the first (none: the first); new_tokens: of the forced answer,
    at most; rows: removals per forward.
    """

    plan: RemovalPlan
    methods: tuple[str, ...] = (ALL,)
    first: int = 12
    examples: tuple[str, ...] = ()
    new_tokens: int = 32
    rows: int = 8


def measure_causes(run: Run, options: CausalOptions) -> list[CausalExample]:
    """The measurements of the asked examples, made where they are missing; each is written once complete."""
    settings = settings_at(run)
    check(settings)
    methods = method_settings(settings, options.methods)
    rows = _wanted(rows_of(run), options)
    if not rows:
        raise ConfigError(f"{run.path} has no answered example: run it first")
    plan = {**dataclasses.asdict(options.plan), "new_tokens": options.new_tokens}
    todo = [row for row in rows if not _is_complete(run, row, plan, methods)]
    if todo:
        with (
            run.claim(waiting=waiting_notice(run), part="causal"),
            Progress(f"causal {short_title(run)}", len(rows), len(rows) - len(todo), "examples") as progress,
        ):
            for _ in _measured(run, settings, todo, methods, options, plan):
                progress.advance()
    found = [read_measured(run, row["example"]) for row in rows]
    return [each for each in found if each is not None]


def _wanted(rows: Mapping[str, Row], options: CausalOptions) -> list[Row]:
    """The rows that are measured, each once, in the task's order."""
    named = {row["example"]: row for row in (chosen(rows, name) for name in options.examples)}
    order = sorted((named or rows).values(), key=lambda row: row["index"])
    return order if named else order[: options.first]


def method_settings(settings: Settings, names: Sequence[str]) -> dict[str, Settings]:
    """Settings of the run with each method in place of its own, which stays as it was set; a line for what cannot be.

    ConfigError for a name that is no method, and where no method is left.
    """
    known = [name for name in sorted(path.stem for path in (CONF / "method").glob("*.yaml")) if name != "full"]
    for name in names:
        if name not in (*known, ALL):
            raise ConfigError(f"--methods: no method {name!r}; one of {', '.join(known)}, or {ALL}")
    own = settings.command["choices"].get("method", settings.method.name)
    found: dict[str, Settings] = {}
    if settings.method.evicts and (ALL in names or own in names):
        found[own] = settings
    for name in known if ALL in names else names:
        if name in found:
            continue
        try:
            made = _with_method(settings, name)
            if (why := _no_score(made)) is not None:
                raise ConfigError(why)
        except ConfigError as error:
            if name in names:
                raise
            say(f"causal: without {name}: {error}")
            continue
        found[name] = made
    if not found:
        raise ConfigError("no method is left whose score could be measured: name one that evicts, as in --methods h2o")
    return found


def _with_method(settings: Settings, name: str) -> Settings:
    """The run's settings with another method at its own defaults."""
    asked = settings.command
    node = OmegaConf.to_container(OmegaConf.load(CONF / "method" / f"{name}.yaml"), resolve=True)
    cache = {**asked["config"]["cache"], "mode": "auto", "positions": None}
    words = [word for word in asked["overrides"] if not word.lstrip("+~").startswith(_OWN_OPTIONS)]
    return settings_of({**asked["config"], "method": node, "cache": cache}, {**asked["choices"], "method": name}, words)


def _no_score(settings: Settings) -> str | None:
    """Why a method has no score at the end of a prompt; None where it has one."""
    method = settings.method
    if not method.evicts:
        return f"{method.name} evicts nothing"
    if method.per_query or method.full_cache:
        return f"{method.name} chooses anew for every query: it has no score of the prompt's tokens"
    if not settings.cache.cadence.at_prefill:
        return "the run evicts nothing at the end of the prompt (cache.evict_at_prefill=false)"
    return None


def _is_complete(run: Run, row: Row, plan: Mapping[str, object], methods: Mapping[str, Settings]) -> bool:
    known = read_measured(run, row["example"])
    return known is not None and known.plan == plan and set(methods) <= set(known.methods)


def _measured(
    run: Run,
    settings: Settings,
    todo: list[Row],
    methods: Mapping[str, Settings],
    options: CausalOptions,
    plan: dict[str, object],
) -> Iterator[CausalExample]:
    for row, case, _ in cases(settings, todo):
        name = row["example"]
        known = read_measured(run, name)
        before = read_frame(run, name, REMOVALS) if known is not None and known.plan == plan else None
        try:
            forced = ForcedAnswer(case, options.new_tokens, options.rows)
        except ConfigError as error:
            say(f"causal: example {name}: {error}")
            continue
        classes = classes_of(texts_of(case.tokenizer, case.prompt))
        units = removal_units(options.plan, classes, forced.heads, zlib.crc32(name.encode()))
        if known is None or before is None:
            start = time.perf_counter()
            trials = [[unit.removal(forced.heads)] for unit in units]
            frame = removal_frame(units, list(forced.effects(trials)), classes)
            seconds = time.perf_counter() - start
            floor = max(abs(effect.kl) for effect in forced.effects([[] for _ in range(options.rows)]))
            write_frame(run, name, REMOVALS, frame)
            there: list[str] = []
        else:
            frame, seconds, floor, there = before, known.seconds, known.floor, known.methods
        configs = {
            method: batch_cache(made, [len(case.prompt)]) for method, made in methods.items() if method not in there
        }
        scores = prompt_scores(case, configs)
        for part, made_now in (
            (SCORES, score_frame(units, scores, forced)),
            (METHODS, method_frame(frame, scores, forced)),
        ):
            old = read_frame(run, name, part) if there else None
            if old is not None:
                made_now = pd.concat([old[~old["method"].isin(made_now["method"])], made_now], ignore_index=True)
            write_frame(run, name, part, made_now)
        every = list(dict.fromkeys([*there, *scores, *ANSWER_SCORES]))
        made = CausalExample(name, dict(plan), len(case.prompt), forced.judged, floor, seconds, every)
        write_measured(run, made)
        yield made


def removal_frame(units: Sequence[RemovalUnit], effects: Sequence[Effect], classes: Sequence[str]) -> pd.DataFrame:
    """One row per removal: kind, position (the first), length, layer, head, weight, class, and fields of `Effect`."""
    return pd.DataFrame(
        {
            "kind": unit.kind,
            "position": unit.positions[0],
            "length": len(unit.positions),
            "layer": unit.layer,
            "head": unit.head,
            "weight": unit.weight,
            "class": classes[unit.positions[0]],
            **dataclasses.asdict(effect),
        }
        for unit, effect in zip(units, effects, strict=True)
    )


def score_frame(units: Sequence[RemovalUnit], scores: Mapping[str, PromptScores], forced: ForcedAnswer) -> pd.DataFrame:
    """One row per method and removal: rank, the percentile in [0, 1] of its tokens' score among the prompt's, and kept.

    Both are means over the tokens and the layers and heads that the removal takes them from. Scores of the answer's own
    queries keep nothing: kept is NaN.
    """
    parts = []
    for name, values, kept in _all_scores(scores, forced):
        ranks = percentiles(values)
        rows = [_of_unit(unit, ranks, kept) for unit in units]
        parts.append(pd.DataFrame(rows, columns=["rank", "kept"]).assign(method=name, unit=range(len(units))))
    return pd.concat(parts, ignore_index=True)


def _all_scores(
    scores: Mapping[str, PromptScores], forced: ForcedAnswer
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(name, values [L, H, S], kept [L, H, S] or None) of methods, then of the answer's own queries."""
    for name, each in scores.items():
        yield name, each.priority, each.kept
    for name, values in forced.answer_scores().items():
        yield name, values, None


def percentiles(values: Tensor) -> Tensor:
    """[L, H, S]: the rank of each token's value within its layer and head, in (0, 1], equals at their mean rank."""
    layers, heads, tokens = values.shape
    flat = pd.DataFrame(values.reshape(-1, tokens).T.numpy()).replace({-np.inf: -np.finfo(np.float32).max})
    ranks: Tensor = torch.from_numpy(flat.rank(pct=True).to_numpy().T.copy()).view(layers, heads, tokens)
    return ranks


def _of_unit(unit: RemovalUnit, ranks: Tensor, kept: Tensor | None) -> tuple[float, float]:
    layers = slice(None) if unit.layer < 0 else slice(unit.layer, unit.layer + 1)
    heads = slice(None) if unit.head < 0 else slice(unit.head, unit.head + 1)
    place = (layers, heads, list(unit.positions))
    return float(ranks[place].mean()), float("nan") if kept is None else float(kept[place].double().mean())


def method_frame(removals: pd.DataFrame, scores: Mapping[str, PromptScores], forced: ForcedAnswer) -> pd.DataFrame:
    """Rows of layer -1, one per method: what removing all that it evicts does (kl, flips); kept, gone: shares of the
    prompt's tokens held on average, and held in no head of any layer; gone_mass: of the summed effect of tokens, the
    share of these. And one row per score and layer: rho, of the layer's score with the effect of tokens.
    """
    tokens = removals[removals["kind"] == TOKEN]
    at, weights = tokens["position"].to_numpy(), tokens["weight"].to_numpy(dtype=float)
    effect = tokens["kl"].to_numpy(dtype=float)
    joint_effects = forced.effects([everything_evicted(each) for each in scores.values()])
    joints = dict(zip(scores, joint_effects, strict=True))
    rows: list[dict[str, object]] = []
    for name, values, kept in _all_scores(scores, forced):
        by_layer = percentiles(values).mean(1).numpy()
        for layer, ranks in enumerate(by_layer):
            rows.append({"method": name, "layer": layer, "rho": rank_correlation(effect, ranks[at], weights)})
        if kept is None:
            continue
        joint = joints[name]
        gone = ~kept.any(0).any(0).numpy()
        mass = float((weights * np.maximum(effect, 0)).sum())
        row = {"method": name, "layer": -1, "kl": joint.kl, "flips": joint.flips, "judged": forced.judged}
        row |= {"kept": float(kept.double().mean()), "gone": float(gone.mean())}
        rows.append(row | {"gone_mass": float((weights * np.maximum(effect, 0) * gone[at]).sum()) / (mass or 1.0)})
    return pd.DataFrame(rows)
