"""How fast this machine and others run a model, for plans."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from kvexp import NUMERICS
from kvexp.core import AttentionScoreSpec, Budget, CacheConfig
from kvexp.generate import (
    Forcing,
    GenerationParams,
    PrefilledContext,
    decode_batches,
    divergence_of_batches,
    prefill_together,
)
from kvexp.hf.patch import max_positions
from kvexp.methods import A2SF, H2O, TOVA, Full, Keyformer, Window
from kvexp.run.model_spec import ModelSpec, load, prepare_for_fork
from kvexp.run.workers import ForkPool, num_workers
from kvexp.util import ConfigError, cache_folder

if TYPE_CHECKING:
    from kvexp.hf.load import Model


TABLES_BYTES = 75 << 20  # of these, the libraries that only the tables at the end bring in


# Seconds of a group of runs from a handful of speeds that were measured on this machine (`speed_measurement`).
#
# A command is its start-up, the prefills, the decode steps of the answers and those of the forced texts. Runs that
# share prefills decode several prompts in the same steps, on a CPU in several processes (`kvexp.run.batches`).


def observes_prompt(spec: AttentionScoreSpec | None) -> bool:
    """Whether this score looks at the attention of all of a prompt's rows, which costs time; of few rows costs none."""
    return spec is not None and spec.last_rows is None and spec.decay == 1


@dataclass(frozen=True)
class Speed:
    """Seconds of the parts of a command, measured while so many processes did the same side by side.

    prefill_s: of a prefill of one row whatever its length, per prompt token, and per prompt token squared.
    score_s: per prompt token squared and score that observes the whole prompt (`observes_prompt`).
    variant_s: per prompt token and variant: storing, choosing and copying its slots.
    step_s: (rows, seconds) of a decode step whose rows hold no slots; rows ascending.
    slot_s: per slot that a row holds and decode step, all layers and kv heads together.
    forced_s: per row and step of a forced text, beyond the decode step: log-probabilities of the vocabulary.
    """

    processes: int
    threads: int
    prefill_s: tuple[float, float, float]
    score_s: float
    variant_s: float
    step_s: tuple[tuple[float, float], ...]
    slot_s: float
    forced_s: float

    def prefill(self, tokens: float, scores: int, variants: int) -> float:
        """Seconds of the prefill of one prompt of so many tokens, whose rows so many scores observe."""
        each, linear, square = self.prefill_s
        square += scores * self.score_s
        return each + (linear + variants * self.variant_s) * tokens + square * tokens**2

    def step(self, rows: float, slots: float) -> float:
        """Seconds of a decode step of so many rows that hold so many slots together.

        Between the measured numbers of rows by straight lines, beyond the largest along the last of them.
        """
        (low, at_low), (high, at_high) = self.step_s[0], self.step_s[-1]
        if rows > low and len(self.step_s) > 1:
            pairs = [*pairwise(self.step_s)]
            (low, at_low), (high, at_high) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
            at_low += (rows - low) * (at_high - at_low) / (high - low)
        return at_low + slots * self.slot_s


def prefill_coefficients(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """`Speed.prefill_s` of three measured prefills (tokens, seconds), shortest first; none is below 0.

    The shortest is taken as what a forward costs whatever its length, so it should be of a few tokens.
    """
    (_, least), (short, at_short), (long, at_long) = points
    x, y = max(0.0, at_short - least), max(0.0, at_long - least)
    square = (y / long - x / short) / (long - short)
    linear = x / short - square * short
    if square < 0:
        linear, square = y / long, 0.0
    elif linear < 0:
        linear, square = 0.0, y / long**2
    return least, linear, square


def observation_coefficients(
    scores: int, observed: tuple[int, float], variants: int, stored: tuple[int, float]
) -> tuple[float, float]:
    """(`Speed.score_s`, `Speed.variant_s`) of two measured differences to a prefill without variants, none below 0.

    observed: (tokens, seconds more) with one variant for each of so many scores; stored: the same with so many variants
    that have the same scores.
    """
    (long, with_few), (short, with_many) = observed, stored
    share = (short / long) ** 2
    variant = max(0.0, with_many - share * with_few) / (variants * short - share * scores * long)
    return max(0.0, with_few - scores * variant * long) / (scores * long**2), variant


@dataclass(frozen=True)
class GroupWork:
    """What is left to do of runs that share prefills, or of one run.

    prompts: that are read; prompt, new: mean tokens of a prompt, and of those that are fed for an answer or a text.
    scores: that a prefill observes; variants: runs that evict. answers: rows that are generated; texts: rows that are
    fed a text, the full cache's beside them included. slots, text_slots: mean number of slots that such a row holds.
    groups: of prompts that are decoded in the same steps. second_passes: over each prompt, before it is evicted.
    """

    prompts: int
    prompt: float
    new: float
    scores: int
    variants: int
    answers: int
    texts: int
    slots: float
    text_slots: float
    groups: int
    second_passes: int = 0


def work_seconds(speed: Speed, work: GroupWork) -> float:
    """Seconds from the loaded model to the last row; processes share the groups of prompts as evenly as these go."""
    if not work.prompts or not work.groups:
        return 0.0
    total = work.prompts * speed.prefill(work.prompt, work.scores, work.variants)
    # The prompt behind itself: what twice the prompt takes beyond the prompt.
    again = speed.prefill(2 * work.prompt, 0, 0) - speed.prefill(work.prompt, 0, 0)
    total += work.prompts * work.second_passes * again
    for rows, slots, more in ((work.answers, work.slots, 0.0), (work.texts, work.text_slots, speed.forced_s)):
        each = rows / work.groups
        total += work.groups * work.new * (speed.step(each, each * slots) + each * more) if rows else 0.0
    return total * math.ceil(work.groups / speed.processes) / work.groups


# The speeds measured on a machine (`speed_model.Speed`), kept in the cache folder: a file per model and machine.


FORMAT = 1  # of the file
_NO_SPEED = ("chat", "tokenizer", "template_args", "strip_thinking")  # what of a model changes no speed


@dataclass(frozen=True)
class KeptSpeed:
    """What was measured, and when.

    speeds: for each number of processes that a sweep of this machine may use; start_s: seconds of a command until its
    model is loaded; base_bytes: held by the process without the model; date: as YYYY-MM-DD.
    """

    speeds: tuple[Speed, ...]
    start_s: float
    base_bytes: int
    date: str

    def of(self, processes: int) -> Speed:
        """The speed with so many processes, else with the nearest number that was measured."""
        return min(self.speeds, key=lambda speed: abs(speed.processes - processes))


def surroundings(spec: ModelSpec, device: str) -> dict[str, Any]:
    """Everything a speed depends on: another model, dtype, device, number of threads, torch or kvexp is measured anew.

    device: its name, as `kvexp.run.rows.environment` gives it.
    """
    import torch

    model = {name: value for name, value in spec.identity().items() if name not in _NO_SPEED}
    return {
        "format": FORMAT,
        "model": model,
        "device": device,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "numerics": NUMERICS,
    }


def place_of(key: dict[str, Any]) -> Path:
    """The file of these surroundings."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return cache_folder() / "speeds" / f"{name}.json"


def keep(key: dict[str, Any], measured: KeptSpeed) -> Path:
    """Write the file, whole or not at all; returns its path. ConfigError where nothing can be written."""
    place = place_of(key)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fd, draft = tempfile.mkstemp(dir=place.parent, suffix=".tmp")
        try:
            with open(fd, "w", encoding="utf-8") as file:
                json.dump({"of": key, "measured": asdict(measured)}, file, default=str)
            os.replace(draft, place)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        raise ConfigError(
            f"the measured speeds cannot be kept in {place.parent} ({error.strerror or error}): set KVEXP_CACHE to a "
            "folder that can be written to"
        ) from error
    return place


def kept(key: dict[str, Any]) -> KeptSpeed | None:
    """What was measured in these surroundings; None where nothing was.

    ConfigError for a file that does not hold what it should, such as one that was cut off.
    """
    place = place_of(key)
    try:
        text = place.read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(_damaged(place, str(error))) from error
    try:
        found = json.loads(text)
        if found["of"] != json.loads(json.dumps(key, default=str)):
            raise ValueError("it is of another model or machine")
        return kept_of(found["measured"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(_damaged(place, f"{type(error).__name__}: {error}")) from error


def _damaged(place: Path, why: str) -> str:
    return (
        f"{place} does not hold measured speeds ({why}): --dry-run=measure measures them again, or remove the file and "
        "the time is estimated"
    )


def kept_of(plain: dict[str, Any]) -> KeptSpeed:
    speeds = tuple(
        Speed(
            int(one["processes"]),
            int(one["threads"]),
            _numbers(one["prefill_s"], 3),
            _number(one["score_s"]),
            _number(one["variant_s"]),
            tuple((_number(rows), _number(seconds)) for rows, seconds in one["step_s"]),
            _number(one["slot_s"]),
            _number(one["forced_s"]),
        )
        for one in plain["speeds"]
    )
    if not speeds or not all(speed.step_s for speed in speeds):
        raise ValueError("it has no speeds")
    return KeptSpeed(speeds, _number(plain["start_s"]), int(plain["base_bytes"]), str(plain["date"]))


def _number(value: Any) -> float:
    made = float(value)
    if not 0 <= made < float("inf"):
        raise ValueError(f"{value!r} is no duration")
    return made


def _numbers(values: Any, count: int) -> Any:
    made = tuple(_number(value) for value in values)
    if len(made) != count:
        raise ValueError(f"{len(made)} numbers where {count} are")
    return made


def _processor() -> str:
    """The processor's name; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


# Measure the speeds of a model on this machine (`speed_model.Speed`): about 20 seconds on random tokens.


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
            divergence_of_batches(self.model, [Forcing(reference, others, [[1] * tokens])])
            taken.append(time.perf_counter() - start)
        return (taken[1] - taken[0]) / STEPS


def _slots(contexts: Sequence[PrefilledContext]) -> list[int]:
    """Slots per kv head and layer that each context holds."""
    return [max(layer.state.require_slots().length for layer in context.cache.layers) for context in contexts]
