"""How long a sweep takes on this machine, from a few speeds that are measured first.

    python -m experiments.studies.speed measure -m method=h2o,keyformer kv_ratio=0.2,0.5
    python -m experiments.studies.speed plan -m method=h2o,keyformer kv_ratio=0.2,0.5

`measure` loads the models of the command line, measures each for about 20 seconds on random tokens and keeps that in
the cache folder; `plan` uses what is kept there (of the same model, dtype, device, processor, number of threads,
torch and NUMERICS), and by the estimate of `kvexp run --dry-run` where nothing is. Both print the plan of --dry-run
with these times. Measure on a machine that does nothing else.

From the loaded model on, a command is its prefills, the decode steps of the answers and of the forced texts. Runs
that share prefills decode several prompts in the same steps, on a CPU in several processes (`kvexp.run.batches`).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from kvexp import NUMERICS, util
from kvexp.core import AttentionScoreSpec, Budget, CacheConfig
from kvexp.core.backends import stackable_width
from kvexp.generate import (
    Forcing,
    GenerationParams,
    PrefilledContext,
    decode_batches,
    divergence_of_batches,
    prefill_together,
)
from kvexp.hf.cpu_linear import MAX_MEMORY_SHARE
from kvexp.hf.load import ModelSize
from kvexp.hf.traits import max_positions
from kvexp.methods import A2SF, H2O, TOVA, Full, Keyformer, Window
from kvexp.run.batches import MAX_DECODE_ROWS, MIN_UTILISATION, batch_cost, group_sizes
from kvexp.run.main import main as run_command
from kvexp.run.model_spec import ModelSpec, load, prepare_for_fork, rows_alone
from kvexp.run.plan import Planned, PlannedGroup, second_passes, seconds_of, slots_bytes, slots_of
from kvexp.run.rows import SHARE, environment
from kvexp.run.settings import Settings
from kvexp.run.workers import ForkPool, num_workers
from kvexp.util import ConfigError, Session, available, cache_folder, watch_pipes

if TYPE_CHECKING:
    from kvexp.hf.load import Model


def main(words: Sequence[str] | None = None) -> int:
    """Print the plan of a command line of `kvexp run`, by measured speeds; returns the exit code."""
    words = sys.argv[1:] if words is None else words
    if words[:1] not in (["measure"], ["plan"]):
        print(__doc__)
        return 0 if words[:1] in (["-h"], ["--help"]) else 2
    before, sys.argv = sys.argv, ["run.py", "--dry-run", *words[1:]]
    try:
        run_command(Session(), BySpeed(words[0] == "measure"))
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before


@dataclass
class BySpeed:
    """The times of a plan's groups, by the kept speeds of their models; measuring: each is measured first."""

    measuring: bool
    known: dict[ModelSpec, KeptSpeed | None] = field(default_factory=dict)

    def __call__(self, group: PlannedGroup) -> tuple[float | None, str]:
        """(seconds, where they are from) of a group."""
        if group.shape is None or (known := self._speed(group.lead.model)) is None:
            return seconds_of(group)
        return GroupPlan.of(group, group.shape).seconds(known), f"measured here on {known.date}"

    def _speed(self, spec: ModelSpec) -> KeptSpeed | None:
        if spec not in self.known:
            place = surroundings(spec, environment()["device"])
            if self.measuring:
                keep(place, measure(spec))
            self.known[spec] = kept(place)
        return self.known[spec]


# The model of cost.


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
    fed a text, the full cache's included. slots, text_slots: mean number of slots that such a row holds.
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


# The speeds measured on a machine, kept in the cache folder: a file per model and machine.

FORMAT = 2  # of the file
_NO_SPEED = ("chat", "tokenizer", "template_args", "strip_thinking")  # what of a model changes no speed


@dataclass(frozen=True)
class KeptSpeed:
    """What was measured, and when.

    speeds: for each number of processes that a sweep of this machine may use; date: as YYYY-MM-DD.
    """

    speeds: tuple[Speed, ...]
    date: str

    def of(self, processes: int) -> Speed:
        """The speed with so many processes, else with the nearest number that was measured."""
        return min(self.speeds, key=lambda speed: abs(speed.processes - processes))


def surroundings(spec: ModelSpec, device: str) -> dict[str, Any]:
    """Everything a speed depends on: another model, dtype, device, number of threads, torch or kvexp is measured anew.

    device: its name, as `kvexp.run.rows.environment` gives it.
    """
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
        util.replace(place, json.dumps({"of": key, "measured": asdict(measured)}, default=str).encode())
    except OSError as error:
        raise ConfigError(
            f"cannot write {place} ({error.strerror or error}): set KVEXP_CACHE to a folder that can be written"
        ) from error
    return place


def kept(key: dict[str, Any]) -> KeptSpeed | None:
    """What was measured in these surroundings; None where nothing was.

    ConfigError for a file that does not hold what it should, such as one that was cut off.
    """
    place = place_of(key)
    if not place.exists():
        return None
    try:
        found = json.loads(place.read_text("utf-8"))
        if found["of"] != json.loads(json.dumps(key, default=str)):
            raise ValueError("it is of another model or machine")
        return kept_of(found["measured"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{place} does not hold measured speeds ({type(error).__name__}: {error}): `measure` makes them again, or "
            "remove the file and the time is estimated"
        ) from error


def kept_of(plain: dict[str, Any]) -> KeptSpeed:
    """The speeds of a file's content; ValueError, KeyError or TypeError where it does not hold them."""

    def speed(one: dict[str, Any]) -> Speed:
        each, linear, square = map(_number, one["prefill_s"])
        steps = tuple((_number(rows), _number(seconds)) for rows, seconds in one["step_s"])
        rest = {name: _number(one[name]) for name in ("score_s", "variant_s", "slot_s", "forced_s")}
        return Speed(int(one["processes"]), int(one["threads"]), (each, linear, square), step_s=steps, **rest)

    speeds = tuple(map(speed, plain["speeds"]))
    if not speeds or not all(speed.step_s for speed in speeds):
        raise ValueError("it has no speeds")
    return KeptSpeed(speeds, str(plain["date"]))


def _number(value: Any) -> float:
    made = float(value)
    if not 0 <= made < float("inf"):
        raise ValueError(f"{value!r} is no duration")
    return made


def _processor() -> str:
    """The processor's name; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


# Measuring a model.

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


def measure(spec: ModelSpec) -> KeptSpeed:
    """Load the model and measure it, in one process and in as many as a shared sweep would fork, where these are more.

    ConfigError for a model that holds no prompt of SHORT tokens and the steps behind it.
    """
    model, _ = load(spec)
    room = max_positions(model.config) - STEPS - 2
    if room < SHORT:
        raise ConfigError(f"{spec.path or spec.family} holds {room} tokens; measuring it takes prompts of {SHORT}")
    prepare_for_fork(model)
    several = num_workers(model)
    sizes = (several, 1) if several > 1 else (1,)
    speeds = tuple(_of_processes(model, size, SECONDS / len(sizes), room) for size in sizes)
    return KeptSpeed(speeds, datetime.date.today().isoformat())


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
    """The mean of measured speeds, number by number."""

    def mean(values: Sequence[Any]) -> Any:
        if isinstance(values[0], tuple):
            return tuple(mean(each) for each in zip(*values, strict=True))
        return fmean(values)

    found = {name: mean([getattr(speed, name) for speed in speeds]) for name in asdict(speeds[0])}
    return Speed(**found | {"processes": speeds[0].processes, "threads": speeds[0].threads})


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


# What a group of runs takes: its prompts arranged as `kvexp.run.batches` will arrange them.


@dataclass(frozen=True)
class GroupPlan:
    """Runs that share prefills (or one run) on prompts of so many tokens, with so many new ones each.

    prompts: that lack anything; shared: whether several runs share prefills; free: bytes of memory left
    by the weights; threads: processes that a shared sweep may fork.
    """

    runs: Sequence[Planned]
    shape: ModelSize
    prompts: int
    prompt: float
    new: float
    shared: bool
    free: int
    threads: int

    @classmethod
    def of(cls, group: PlannedGroup, shape: ModelSize) -> GroupPlan:
        """The plan of a group on this machine, as free as it is now."""
        spec, work = group.lead.model, group.work
        free = int(torch.cuda.mem_get_info()[0]) if spec.resolved_device().startswith("cuda") else available()
        return cls(
            group.runs,
            shape,
            group.prefills,
            work.prompt_tokens,
            work.new_tokens,
            shared=len(group.runs) > 1,
            free=max(0, free - shape.weight_bytes(spec.dtype)),
            threads=torch.get_num_threads(),
        )

    @property
    def lead(self) -> Settings:
        return self.runs[0].settings

    @property
    def device(self) -> str:
        return self.lead.model.resolved_device().partition(":")[0]

    @property
    def batches(self) -> int:
        return math.ceil(self.prompts / self.lead.batch_size)

    @property
    def active(self) -> list[Planned]:
        """The runs that lack anything."""
        return [run for run in self.runs if run.left or any(run.forced.values())]

    @property
    def kinds(self) -> list[str]:
        """The kinds of texts that are forced."""
        return sorted({kind for run in self.runs for kind, count in run.forced.items() if count})

    @property
    def packed(self) -> int:
        """Bytes of the copies of linear layers' weights."""
        model = self.lead.model
        packs = model.pack_linear and (self.device, model.dtype) == ("cpu", "float32")
        return min(4 * self.shape.linear, int(MAX_MEMORY_SHARE * self.free)) if packs else 0

    @property
    def copies(self) -> int:
        """How often every cache is held: for answers, and for each kind of texts."""
        return max(1, len(self.kinds) + any(run.left for run in self.runs))

    def held(self) -> list[int]:
        """Bytes of each cache of one batch, and of a full cache where texts are forced."""
        runs = [run.settings for run in self.active]
        if self.kinds and not any(settings.is_baseline for settings in runs):
            runs.append(runs[0].baseline())
        rows = self.lead.batch_size * self.lead.decoding.num_beams
        found = []
        for settings in runs:
            slots = slots_of(settings, self.prompt)
            width = stackable_width(slots, torch.device(self.device)) if settings.cache.stacks else slots
            found.append(rows * slots_bytes(self.shape, settings, width))
        return found

    def arrangement(self) -> Arrangement:
        """How `kvexp.run.batches` will take the batches, if memory is then as free as now."""
        if not (self.shared or self.kinds):
            return Arrangement(1, self.batches, 1)
        members = len(self.active)
        prompt_bytes = int(self.prompt) * self.lead.batch_size * self.shape.token_bytes(self.lead.model.dtype)
        need, room = self.copies * sum(self.held()) + prompt_bytes, (self.free - self.packed) * SHARE
        limited = self.lead.timeout_s is not None
        several = self.threads if self.device == "cpu" and sys.platform == "linux" and not limited else 1
        if math.ceil(self.batches / several) * several > MIN_UTILISATION * self.batches or need > room / several:
            several = 1
        most = (
            1 if limited or rows_alone(self.lead.model) else max(1, MAX_DECODE_ROWS // (members * self.lead.batch_size))
        )
        sizes = group_sizes(self.batches, several, most, *self._cost(self.threads / several))
        groups = self.batches if max(sizes) * need > room / several else len(sizes)
        parts = 1 if need <= room / several else math.ceil((need - prompt_bytes) / max(1.0, room - prompt_bytes))
        return Arrangement(several, groups, min(parts, members))

    def _cost(self, cores: float) -> tuple[float, float]:
        """`batch_cost` of a batch on a CPU."""
        if self.device != "cpu":
            return 0.0, 1.0
        rows = sum(bool(run.left) + sum(map(bool, run.forced.values())) for run in self.active)
        new = self.lead.decoding.max_new_tokens
        return batch_cost(self.shape.parameters, self.lead.batch_size * (self.prompt + rows * new), new, cores)

    def parts(self) -> list[GroupPlan]:
        """What is done in turn: a run alone makes its answers, then reads its prompts anew for its texts."""
        if self.shared:
            return [self]
        (run,) = self.runs
        answers = replace(self, runs=[replace(run, forced={})], prompts=run.left)
        texts = replace(self, runs=[replace(run, left=0)], prompts=max(run.forced.values(), default=0))
        return [part for part in (answers, texts) if part.prompts]

    def seconds(self, known: KeptSpeed) -> float:
        """From the loaded model to the last row."""
        return sum(
            work_seconds(known.of(here.processes), part._work(here))
            for part, here in ((part, part.arrangement()) for part in self.parts())
        )

    def _work(self, here: Arrangement) -> GroupWork:
        runs = [run.settings for run in self.active]
        specs = [spec for settings in runs if (spec := settings.method.score_spec) is not None]
        scores = {spec.sums_key for spec in specs if observes_prompt(spec)}  # runs of equal sums share them
        beams = self.lead.decoding.num_beams
        answered = [(run.settings, run.left * beams) for run in self.active]
        forced = [(run.settings, sum(run.forced.values())) for run in self.active]
        if self.kinds:  # and the full cache's own rows
            most = sum(max(run.forced.get(kind, 0) for run in self.runs) for kind in self.kinds)
            forced.append((self.lead.baseline(), most))
        return GroupWork(
            prompts=self.prompts * self._prefills(here),
            prompt=self.prompt,
            new=self.new,
            scores=len(scores),
            variants=math.ceil(sum(not settings.is_baseline for settings in runs) / here.parts),
            answers=sum(count for _, count in answered),
            texts=sum(count for _, count in forced),
            slots=self._mean_slots(answered),
            text_slots=self._mean_slots(forced),
            groups=here.groups * here.parts,
            second_passes=second_passes(runs),
        )

    def _prefills(self, here: Arrangement) -> int:
        """How often a prompt is read: once for all runs of a part, once more for each that evicts between chunks."""
        own = sum(run.settings.cache.bounded_chunk is not None for run in self.active)
        together = here.parts if own < len(self.active) or self.kinds else 0
        return together + own

    def _mean_slots(self, rows: Sequence[tuple[Settings, int]]) -> float:
        """Slots that a row holds, in the middle of its answer; rows: how many of each run."""
        total = sum(count for _, count in rows)
        return sum(count * self._slots(settings) for settings, count in rows) / total if total else 0.0

    def _slots(self, settings: Settings) -> float:
        """Mean slots of a run's row: all tokens but half the new ones where it evicts nothing."""
        held = slots_of(settings, self.prompt)
        return held - self.new / 2 if held >= int(self.prompt) + self.new else held


@dataclass(frozen=True)
class Arrangement:
    """processes: that share the batches; groups: of batches that decode in the same steps; parts: into which the runs
    of a batch are split where memory does not hold all of them, each with a prefill of its own."""

    processes: int
    groups: int
    parts: int


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
