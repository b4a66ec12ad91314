"""Measure the speeds of a model on this machine (`speed_model.Speed`): about 20 seconds on random tokens."""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from kvexp.config.model_spec import ModelSpec, load, prepare_for_fork
from kvexp.core import Budget, CacheConfig
from kvexp.dry_run.peak_memory import TABLES_BYTES
from kvexp.dry_run.speed_files import KeptSpeed
from kvexp.dry_run.speed_model import Speed, observation_coefficients, prefill_coefficients
from kvexp.errors import ConfigError
from kvexp.generate import (
    ForcedBatch,
    GenerationParams,
    PrefilledContext,
    decode_batches,
    divergence_of_batches,
    prefill_together,
)
from kvexp.methods import A2SF, H2O, TOVA, Full, Keyformer, Window
from kvexp.models.families import max_positions
from kvexp.sweep.fork_pool import ForkPool, num_workers

if TYPE_CHECKING:
    from kvexp.models.types import Model

SECONDS = 20.0  # aimed at; a model whose shortest prompts take long takes longer
FEW, SHORT = 8, 64  # tokens of the shortest prompts
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
# Shares of the time that one prefill of the middle and of the longest length may take.
MIDDLE_SHARE, LONGEST_SHARE = 0.09, 0.17
OBSERVING = (H2O(), Keyformer())  # each by a score of its own
RATIOS = (0.2, 0.5, 0.7, 0.9)
# Twice twenty variants, as in a sweep over methods and budgets of two prompts.
VARIANTS = tuple(
    CacheConfig(method, Budget(kv_ratio=ratio))
    for _ in range(2)
    for method in (*OBSERVING, A2SF(), TOVA(), Window())
    for ratio in RATIOS
)
ROWS = (1, 8, len(VARIANTS))  # of the decode steps
FORCED_ROWS = 8  # of which the first is the full cache
STEPS = 4  # that are timed of a decode; one more comes first


def measure(spec: ModelSpec, started: float) -> KeptSpeed:
    """Load the model and measure it, in one process and in as many as a shared sweep would fork, where these are more.

    started: seconds from the command's begin to here, as far as every command has them. ConfigError for a model that
    holds no prompt of SHORT tokens and the steps behind it.
    """
    base, now = resident_bytes() + TABLES_BYTES, time.perf_counter()
    model, _ = load(spec)
    start_s = started + time.perf_counter() - now
    room = max_positions(model.config) - STEPS - 2
    if room < SHORT:
        raise ConfigError(f"{spec.path or spec.family} holds {room} tokens; measuring it takes prompts of {SHORT}")
    prepare_for_fork(model)
    several = num_workers(model)
    sizes = (several, 1) if several > 1 else (1,)
    speeds = tuple(_of_processes(model, size, SECONDS / len(sizes), room) for size in sizes)
    return KeptSpeed(speeds, start_s, base, datetime.date.today().isoformat())


def process_age() -> float:
    """Seconds since this process began; 0 where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def resident_bytes() -> int:
    """Bytes of this process in memory; 0 where the system does not tell."""
    try:
        found = re.search(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def _of_processes(model: Model, size: int, seconds: float, room: int) -> Speed:
    """The mean of what so many processes measure at the same time."""

    def task(_: int) -> Iterator[dict[str, Any]]:
        yield asdict(_Measurement(model, seconds, room).speed(size))

    with ForkPool(size, task) as pool:
        found = list(pool.imap(list(range(size))))
    if not found:
        raise ConfigError("the processes that measured the model ended before they had: is there memory for them?")
    return _mean([Speed(**one) for one in found])


def _mean(speeds: Sequence[Speed]) -> Speed:
    """Number by number."""

    def mean(rows: Sequence[Sequence[float]]) -> list[float]:
        return [fmean(column) for column in zip(*rows, strict=True)]

    first = speeds[0]
    each, linear, square = mean([speed.prefill_s for speed in speeds])
    rows = [row for row, _ in first.step_s]
    steps = mean([[seconds for _, seconds in speed.step_s] for speed in speeds])
    return Speed(
        first.processes,
        first.threads,
        (each, linear, square),
        fmean(speed.score_s for speed in speeds),
        fmean(speed.variant_s for speed in speeds),
        tuple(zip(rows, steps, strict=True)),
        fmean(speed.slot_s for speed in speeds),
        fmean(speed.forced_s for speed in speeds),
    )


@dataclass(frozen=True)
class _Measurement:
    """One process's measurement. seconds: it may take; room: tokens of the longest prompt."""

    model: Model
    seconds: float
    room: int

    def speed(self, processes: int) -> Speed:
        observing = [CacheConfig(method, Budget(kv_ratio=0.5)) for method in OBSERVING]
        self._prefill(SHORT, observing)  # warms up, and draws the noise that a process draws once
        short, _ = self._prefill(SHORT, ())
        middle = self._length(short, MIDDLE_SHARE, SHORT)
        longest = self._length(short, LONGEST_SHARE, min(2 * middle, self.room))
        least, _ = self._prefill(FEW, ())
        plain, _ = self._prefill(middle, ())
        at_longest, _ = self._prefill(longest, ())
        observed, _ = self._prefill(longest, observing)
        together, (_, *big) = self._prefill(middle, VARIANTS)
        score, variant = observation_coefficients(
            len(OBSERVING), (longest, observed - at_longest), len(VARIANTS), (middle, together - plain)
        )
        _, (full, *small) = self._prefill(SHORT, VARIANTS)
        small_slots, big_slots = _slots(small), _slots(big)
        at_small = [self._step([one.fork([0]) for one in small[:rows]]) for rows in ROWS]
        forced = max(0.0, self._forced(full, small) - at_small[ROWS.index(FORCED_ROWS)]) / FORCED_ROWS
        slot = max(0.0, self._step(big) - at_small[-1]) / max(1, sum(big_slots) - sum(small_slots))
        steps = tuple(
            (float(rows), max(0.0, taken - slot * sum(small_slots[:rows])))
            for rows, taken in zip(ROWS, at_small, strict=True)
        )
        coefficients = prefill_coefficients([(FEW, least), (middle, plain), (longest, at_longest)])
        return Speed(processes, torch.get_num_threads(), coefficients, score, variant, steps, slot, forced)

    def _length(self, short: float, share: float, least: int) -> int:
        """The longest prompt whose prefill is within the share of the time, from `least` to what the model holds."""
        tokens = self.seconds * share / short * SHORT
        fitting = [length for length in LENGTHS if length <= min(tokens, self.room)]
        return max([least, *fitting])

    def _prefill(self, tokens: int, variants: Sequence[CacheConfig]) -> tuple[float, list[PrefilledContext]]:
        """(seconds, the contexts of the full cache and of the variants) of a prompt of random tokens."""
        draws = torch.Generator().manual_seed(tokens)
        ids = torch.randint(1, self.model.get_input_embeddings().num_embeddings, (1, tokens), generator=draws).tolist()
        configs = [CacheConfig(Full()), *variants]
        made = prefill_together(self.model, ids, configs, max_new_tokens=STEPS + 2)
        return made[0].seconds, made

    def _step(self, contexts: Sequence[PrefilledContext]) -> float:
        """Seconds of a decode step after the first, in which caches are put together."""
        decoding = GenerationParams(STEPS + 2, eos=None)
        made = decode_batches(self.model, [contexts], decoding, [[0]], None, start=0.0)[0][0].timing
        return (made.ttft_s + (STEPS + 1) * made.tpot_s - made.tt2t_s) / STEPS

    def _forced(self, full: PrefilledContext, variants: Sequence[PrefilledContext]) -> float:
        """Seconds of a step of a forced text of FORCED_ROWS rows, after the first."""
        taken = []
        for tokens in (2, STEPS + 2):  # the last is not fed
            reference, *others = (one.fork([0]) for one in (full, *variants[: FORCED_ROWS - 1]))
            start = time.perf_counter()
            divergence_of_batches(self.model, [ForcedBatch(reference, others, [[1] * tokens])])
            taken.append(time.perf_counter() - start)
        return (taken[1] - taken[0]) / STEPS


def _slots(contexts: Sequence[PrefilledContext]) -> list[int]:
    """Slots per kv head and layer that each context holds."""
    return [max(layer.state.require_slots().length for layer in context.cache.layers) for context in contexts]
