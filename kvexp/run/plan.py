"""What a command would do, `kvexp run --dry-run`: its runs, what they lack, tokens, bytes, time; loads no weights."""

from __future__ import annotations

import functools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import yaml

from kvexp.core.quantized import SlotBytes
from kvexp.hf.load import ModelSize, parse_dtype, random_config, shape_of
from kvexp.run.batches import prefill_groups
from kvexp.run.jobs import HydraJob, report_failure, runs_of
from kvexp.run.labels import refusal
from kvexp.run.model_spec import ModelSpec, check_cache_fits_model, config_of_spec, tokenizer_of
from kvexp.run.prompts import Prompts, check_beforehand, check_length, fit_examples, no_room, tokenize
from kvexp.run.rows import environment, slots_held
from kvexp.run.session import Session
from kvexp.run.settings import Settings
from kvexp.run.store import IN_ITS_TABLE, TABLE, Run, run_hash, run_name, runs
from kvexp.tasks import Example, LMEval, Mathematics, Task
from kvexp.tasks.base import AFTER_EVICTION
from kvexp.util.errors import ConfigError
from kvexp.util.files import CONF
from kvexp.util.output import duration, say, size
from kvexp.util.strict_json import canonical

if TYPE_CHECKING:
    from kvexp.hf.load import Tokenizer


# What a run has to read and write is looked up in the task's data and the tokenizer where they are at hand, else in a
# table of published sizes.


SAMPLED = 32  # prompts that are tokenised to know the mean: enough for a plan
LETTERS = 4  # per token of English, where no tokenizer is at hand


@dataclass(frozen=True)
class Workload:
    """Examples of a run and their mean sizes.

    examples: ids, or None each where the data are not at hand; prompt_tokens, new_tokens: means per example, the
    latter at most; source: how they are known; asked: the examples themselves, where they are at hand.
    """

    examples: tuple[str | None, ...]
    prompt_tokens: float
    new_tokens: float
    source: str
    asked: tuple[Example, ...] = ()

    @property
    def prefills(self) -> int:
        """Prefills of all examples: one each, or one per conversation or context that questions share."""
        alone = sum(not (example.questions or example.turns) for example in self.asked)
        contexts = {example.prompt for example in self.asked if example.questions or example.turns}
        return alone + len(contexts) if self.asked else len(self.examples)


@functools.lru_cache
def model_config(spec: ModelSpec) -> tuple[Any, str]:
    """(the model's configuration or None, how it is known): its own, else the published one of its hub id."""
    try:
        return config_of_spec(spec), "its configuration"
    except ConfigError:
        if spec.path not in MODELS:
            return None, "unknown: neither the hub nor its cache has the model's configuration"
    family, config = MODELS[spec.path]
    return random_config(family, **config), "the published configuration"


@functools.lru_cache
def model_shape(spec: ModelSpec) -> ModelSize | None:
    """The model's size; None where its configuration is not known."""
    config, _ = model_config(spec)
    return None if config is None else shape_of(config)


def workload_of(settings: Settings, known: dict[Any, Workload]) -> Workload:
    """The workload of one run; reads local data as the run would (ConfigError for a bad row), the hub's from its cache
    alone. known: workloads of runs so far, which those share that differ in method and budget alone.
    """
    same = [settings.identity[name] for name in ("task", "data", "generation")]
    key = json.dumps(same, sort_keys=True, default=str), settings.model, settings.limit
    if key not in known:
        task = settings.task
        local = not isinstance(task, LMEval) and (task.generated or not task.hub_id)  # or nowhere, which is an error
        at_hand = local or task.data_files is not None or getattr(task, "data_dir", None)
        known[key] = _sampled(settings) if at_hand else _published(settings)
    return known[key]


def check_workload(settings: Settings, work: Workload) -> None:
    """ConfigError where none of the examples can be run, as far as data, tokenizer and configuration are at hand."""
    config = model_config(settings.model)[0]
    if not work.asked:
        if config is not None and settings.budget is not None and settings.budget.tokens is not None:
            check_length(settings, settings.budget, config, int(work.prompt_tokens), [int(work.new_tokens)])
        return
    try:
        _ = tokenizer_of(settings.model), config_of_spec(settings.model)
    except ConfigError:  # not at hand: the run will load it, and look then
        return
    check_beforehand(settings, Prompts(settings, work.asked))


def _sampled(settings: Settings) -> Workload:
    """The workload by the task's own examples, some of which are tokenised."""
    task = settings.task
    task.check()
    examples = list(task.examples())
    step = max(1, len(examples) // SAMPLED)
    sample = examples[::step][:SAMPLED]
    try:
        tokenizer: Tokenizer | None = tokenizer_of(settings.model)
        how = "tokenised" if step == 1 else f"{len(sample)} of {len(examples)} prompts tokenised"
    except ConfigError:
        tokenizer, how = None, f"letters / {LETTERS}"
    if tokenizer is not None:
        sample = [example for _, example in fit_examples(settings, tokenizer, list(enumerate(sample)))]
    sizes = [_size(settings, example, tokenizer) for example in sample]
    prompt, new = fmean(size[0] for size in sizes), fmean(size[1] for size in sizes)
    return Workload(tuple(example.id for example in examples), prompt, new, how, tuple(examples))


def _size(settings: Settings, example: Example, tokenizer: Tokenizer | None) -> tuple[float, float]:
    """(prompt tokens, new tokens) of an example as it will be asked."""
    given = example.choices or ((example.continuation,) if settings.task.needs_nll else ())
    if isinstance(settings.task, LMEval):
        given = ()
    new = 0 if settings.task.only_nll or example.choices else settings.decoding.max_new_tokens
    room = _room(settings, new)
    fitted = type(settings.task).fit is not Task.fit and "length" in example.info
    if tokenizer is None and fitted:  # its prompts have the length it says, in tokens
        return min(float(example.info["length"]), room), float(new)
    if tokenizer is None:
        prompt = len(example.prompt + example.question) / LETTERS
        return min(prompt, room), new + sum(map(len, given)) / LETTERS
    tokenized = tokenize(example, settings.task, tokenizer, 1 << 40, chat=settings.model.chat)
    fed = sum(len(tokenizer(text, add_special_tokens=False).input_ids) for text in given)
    return min(tokenized.size, room), new + fed


def _room(settings: Settings, new: int) -> float:
    """Tokens that a prompt may have."""
    shape = model_shape(settings.model)
    holds = float("inf") if settings.cache.beyond_context or shape is None else shape.positions - new
    if shape is not None and holds < 1:
        raise no_room(settings, new, shape.positions)
    return max(1, min(holds, settings.task.max_prompt_tokens or float("inf")))


def _published(settings: Settings) -> Workload:
    """The workload by the table of published sizes; a data set not in it counts as `limit` rows of a full prompt."""
    task, name = settings.task, settings.task.name
    new = float(settings.decoding.max_new_tokens)
    if isinstance(task, LMEval):
        name, new = f"lm_eval {task.tasks[0]}", 0.0
    elif hasattr(task, "subset"):
        name = f"longbench {task.subset}"
    elif isinstance(task, Mathematics):
        name = task.hub_id
    room = _room(settings, 0 if task.only_nll else int(new))
    if name not in DATA:
        count = settings.limit or 1000
        return Workload((None,) * count, min(room, 2048), new, f"guessed: {count} rows, full prompts")
    rows, tokens = DATA[name]
    rows *= getattr(task, "samples", 1)
    count = min(settings.limit or rows, rows)
    if isinstance(task, LMEval):
        tokens *= 1 + (task.num_fewshot or 0)
    elif task.only_nll:
        tokens, new = getattr(task, "prefill_tokens", tokens), float(getattr(task, "total_tokens", 0))
        new -= tokens
    return Workload((None,) * count, min(tokens, room), new, "published sizes of the data set")


PUBLISHED = yaml.safe_load((CONF / "published.yaml").read_bytes())
MODELS: dict[str, tuple[str, dict[str, int]]] = PUBLISHED["models"]
DATA: dict[str, tuple[int, int]] = PUBLISHED["data"]


LISTED = 40  # runs shown one by one; more are shown in groups


def dry_run(main: Callable[[Session], None], option: str, session: Session) -> int:
    """Let Hydra compose the jobs of sys.argv without running one and print their plan; returns the exit code.

    option: --dry-run, or --dry-run=NAME of another machine (`MACHINES`). Nothing is written: Hydra's own notes on a
    sweep go to a folder that is removed. Whatever the launcher, jobs are composed here, one after the other.
    ConfigError for an option that cannot be planned.
    """
    name = option.partition("=")[2] or None
    if name not in (None, *MACHINES):
        raise ConfigError(f"--dry-run may name a machine, one of {', '.join(MACHINES)}, got {name!r}")
    words = [word for word in sys.argv[1:] if word.partition("=")[0] != "--dry-run"]
    basic = "hydra/launcher=basic" in words
    words = [word for word in words if not word.startswith(("hydra/launcher", "hydra.launcher."))]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = [*words, "hydra/launcher=basic", f"hydra.sweep.dir={folder}"]
        session.collect_jobs()
        try:
            main(session)
        finally:
            jobs = session.collected_jobs()
    swept = any(job.number is not None for job in jobs)
    show_plan(jobs, name, session, shares=swept and not basic)
    return session.exit_code


def show_plan(jobs: Sequence[HydraJob], machine: str | None, session: Session, *, shares: bool) -> list[PlannedGroup]:
    """Print the plan of these jobs and return it. Jobs that cannot run are reported as their turn would report them.

    shares: the launcher lets runs share prefills.
    """
    wanted: dict[str, Settings] = {}
    workloads: dict[Any, Workload] = {}
    for job in jobs:
        try:
            for settings in runs_of(job, session):
                config, _ = model_config(settings.model)
                if config is not None and not settings.is_baseline:
                    check_cache_fits_model(settings.model, settings.cache, config)
                check_workload(settings, workload_of(settings, workloads))
                for run in (settings if settings.is_baseline else settings.baseline(), settings):
                    wanted.setdefault(run_hash(run.identity), run)
        except Exception as error:
            if len(jobs) > 1:
                say(" ".join(job.overrides), end=": ", file=sys.stderr)
            report_failure(job, error, session)
    together = prefill_groups(wanted.values()) if shares else []
    taken = {str(settings.identity) for group in together for settings in group}
    alone = [[settings] for settings in wanted.values() if str(settings.identity) not in taken]
    planned, known = [], functools.cache(pace_of)  # of all groups, the rows of a model are read once
    for group in [*together, *alone]:
        try:
            group_plan = PlannedGroup([_planned(settings, workload_of(settings, workloads)) for settings in group])
            seconds, basis = seconds_of(group_plan, machine, known)
            planned.append(replace(group_plan, seconds=seconds, basis=basis))
        except ConfigError as error:
            say(f"error: {error}", file=sys.stderr, flush=True)
            session.add_failure(run_name(group[0].labels, *TABLE, *IN_ITS_TABLE), str(error), reported=True)
    print_plan(planned, len(jobs))
    return planned


# What runs lack, and the groups that share prefills.


@dataclass(frozen=True)
class Planned:
    """One run. left: rows it lacks; forced: texts it has still to be forced for its divergence, by kind of text."""

    settings: Settings
    work: Workload
    left: int
    forced: dict[str, int]

    @property
    def total(self) -> int:
        return len(self.work.examples)

    @property
    def state(self) -> str:
        """done, partly or to do."""
        if not self.left and not self.texts:
            return "done"
        only = self.settings.divergence.only
        untouched = self.texts == len(self.forced) * self.total if only else self.left == self.total
        return "to do" if untouched else "partly"

    @property
    def texts(self) -> int:
        """Texts of all kinds that it lacks."""
        return sum(self.forced.values())

    def prefills(self, shared: bool) -> int:
        """Prefills needed; a run that shares none needs one more per prompt for the KL passes."""
        again = max(self.forced.values(), default=0)
        examples = max(self.left, again) if shared else self.left + again
        return -(-examples * self.work.prefills // max(1, self.total))


@dataclass(frozen=True)
class PlannedGroup:
    """Runs that share prefills, or one alone. seconds: None where unknown; basis: their source."""

    runs: list[Planned]
    seconds: float | None = None
    basis: str = "not known"

    @property
    def lead(self) -> Settings:
        return self.runs[0].settings

    @property
    def work(self) -> Workload:
        return self.runs[0].work

    @property
    def shape(self) -> ModelSize | None:
        return model_shape(self.lead.model)

    @property
    def prefills(self) -> int:
        """Prompts that are read: one per example for all runs of the group."""
        return max(run.prefills(shared=len(self.runs) > 1) for run in self.runs)

    @property
    def copies(self) -> int:
        """How often a run's cache is held, at most: to answer, to be forced each kind of text, and to be asked more."""
        kinds = {kind for run in self.runs for kind, texts in run.forced.items() if texts}
        answers = any(run.left for run in self.runs)
        asks_more = getattr(self.lead.task, "question", None) == AFTER_EVICTION
        return max(1, answers + len(kinds)) + asks_more


def _planned(settings: Settings, work: Workload) -> Planned:
    """Rows and texts that a run lacks, as far as its folder shows; changes nothing there."""
    path, rows, lines = settings.outputs_dir / run_hash(settings.identity), list[Any](), list[tuple[str, str]]()
    if (path / "config.json").exists():
        run = Run.load(path)
        rows, lines = list(run.rows()), list(run.divergence())
    done = {row["example"] for row in rows}
    known = [example for example in work.examples if example is not None]
    left = sum(example not in done for example in known) if known else max(0, len(work.examples) - len(done))
    possible = len(work.examples) - len({row["example"] for row in rows if row.get("skipped")})
    texts = settings.divergence.texts if refusal(settings) is None else ()
    lacking = {kind: max(0, possible - sum(text == kind for _, text in lines)) for kind in texts}
    return Planned(settings, work, 0 if settings.divergence.only else left, lacking)


# How long a group takes: from rows of the same model and machine, else an estimate from data sheets.


@dataclass(frozen=True)
class Machine:
    """flops: per second of dense matrix products at the model's usual precision; bandwidth: bytes per second;
    layer_s: seconds of Python and launches, per layer and decode step."""

    name: str
    flops: float
    bandwidth: float
    layer_s: float


# Data sheets; a third of the peak, two thirds of the bandwidth and the time per layer are what eager code reaches.
MACHINES = {
    "a100": Machine("one A100 of 80 GB", 312e12 / 3, 2.0e12 * 2 / 3, 6e-4),
    "h100": Machine("one H100 of 80 GB", 989e12 / 3, 3.35e12 * 2 / 3, 6e-4),
    "h200": Machine("one H200 of 141 GB", 989e12 / 3, 4.8e12 * 2 / 3, 6e-4),
    "cpu": Machine("one CPU thread", 40e9, 10e9, 1e-3),
}


@dataclass(frozen=True)
class Pace:
    """Seconds of a model on this machine, per prompt token and per new token of each method; rows: their number."""

    rows: int
    per_token: float
    new: dict[str, float]


def pace_of(outputs_dir: Path, device: str, model: bytes) -> Pace | None:
    """Pace of a model (its identity, canonical) by the rows under outputs_dir that were timed on this device, if any.

    Rows of shared prefills hold no times.
    """
    first: list[tuple[float, int]] = []  # seconds of a row's share of its batch until its first token, prompt tokens
    new: dict[str, list[float]] = {}  # method: seconds per new token
    for run in runs(outputs_dir) if outputs_dir.is_dir() else ():
        if canonical(run.config.get("model")) != model or run.env.get("device") != device:
            continue
        for row in run.rows():
            spent, batch = row.get("seconds") or {}, (row.get("receipt") or {}).get("batch_size") or 1
            if spent.get("ttft") and spent.get("tpot"):
                first.append((spent["ttft"] / batch, row["prompt_tokens"]))
                new.setdefault(run.config["method"]["name"], []).append(spent["tpot"] / batch)
    if not first:
        return None
    per_token = sum(seconds for seconds, _ in first) / max(1, sum(tokens for _, tokens in first))
    return Pace(len(first), per_token, {method: fmean(times) for method, times in new.items()})


def seconds_of(
    group: PlannedGroup,
    machine: str | None = None,
    pace_of: Callable[[Path, str, bytes], Pace | None] = pace_of,
) -> tuple[float | None, str]:
    """(seconds, their source) of a group on a machine of `MACHINES`; None: this one, by its own rows if any."""
    device = environment()["device"]
    model = canonical(group.lead.identity["model"])
    if machine is None and (pace := pace_of(group.lead.outputs_dir, device, model)) is not None:
        other = fmean(pace.new.values())  # of a method without rows
        step = sum((run.left + run.texts) * pace.new.get(run.settings.method.name, other) for run in group.runs)
        seconds = group.prefills * group.work.prompt_tokens * pace.per_token + step * group.work.new_tokens
        return seconds, f"measured on {pace.rows} rows"
    if group.shape is None:
        return None, "not known"
    on = machine_here(device) if machine is None else MACHINES[machine]
    return _estimated(group, group.shape, on), f"estimated for {on.name}"


def _estimated(group: PlannedGroup, shape: ModelSize, machine: Machine) -> float:
    """2 operations per parameter and token and 4 per query, key and component; a step reads weights and held slots.

    A second pass over a prompt takes what twice the prompt takes beyond the prompt; runs go side by side.
    """
    lead, prompt = group.lead, group.work.prompt_tokens
    busy = [run.settings for run in group.runs if run.left + run.texts]
    passes = second_passes(busy)
    attention = 4 * shape.layers * shape.width * prompt**2
    operations = 2 * shape.parameters * prompt * (1 + passes) + attention * (1 + 3 * passes)
    batch = lead.batch_size * lead.decoding.num_beams
    held = sum(slots_bytes(shape, settings, slots_of(settings, prompt)) for settings in busy)
    reading = (shape.weight_bytes(lead.model.dtype) + batch * held) / machine.bandwidth
    products = 2 * shape.parameters * len(busy) * batch / machine.flops
    step = max(reading, products) + shape.layers * machine.layer_s
    most = max(run.left + run.texts for run in group.runs)
    steps = math.ceil(most / lead.batch_size) * group.work.new_tokens
    return group.prefills * operations / machine.flops + steps * step


def second_passes(settings: Sequence[Settings]) -> int:
    """How often a prompt is fed once more before its evictions: runs that declare the same pass share it."""
    return len({run.method.needs.second_pass for run in settings} - {None})


def slots_of(settings: Settings, prompt: float, *, cached: bool = False) -> int:
    """Slots per kv head that a prompt holds once it is evicted; all of them where the budget is too small for it.

    cached: as of `slots_held`.
    """
    try:
        return slots_held(settings, [max(1, int(prompt))], cached=cached)[0]
    except ConfigError:
        return int(prompt) + settings.decoding.max_new_tokens


def kv_bytes(shape: ModelSize, settings: Sequence[Settings], prompt: float, copies: int = 1) -> int:
    """Bytes of a batch, at most: the prompts as they are read, and copies of what every run keeps of them."""
    lead = settings[0]
    batch = lead.batch_size * lead.decoding.num_beams
    kept = sum(slots_bytes(shape, run, slots_of(run, prompt, cached=True)) for run in settings)
    return batch * (int(prompt) * shape.token_bytes(lead.model.dtype) + copies * kept)


def slots_bytes(shape: ModelSize, settings: Settings, slots: int) -> int:
    """Bytes of so many slots per kv head in all layers, in as many bits as the run stores them."""
    itemsize = parse_dtype(settings.model.dtype).itemsize
    cache = settings.cache
    held = SlotBytes(shape.key_dim, shape.value_dim, cache.quantization, itemsize, cache.slot_bias)
    return shape.layers * shape.kv_heads * held.of(slots)


def machine_here(device: str) -> Machine:
    """The one of `MACHINES` that this device's name fits; a CUDA device of another name counts as an A100."""
    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        core = MACHINES["cpu"]
        return Machine(f"{threads} CPU thread(s)", core.flops * threads, core.bandwidth, core.layer_s)
    fitting = [machine for name, machine in MACHINES.items() if name in device.lower()]
    return fitting[0] if fitting else MACHINES["a100"]


# What is printed of a plan.


def print_plan(planned: list[PlannedGroup], jobs: int) -> None:
    """The plan of so many jobs, on stdout."""
    all_runs = [run for group in planned for run in group.runs]
    if not all_runs:
        return
    full = sum(run.settings.is_baseline for run in all_runs)
    say(f"plan: {jobs} job(s), {len(all_runs)} runs with {full} full-attention baseline(s) among them; nothing is run")
    if len(all_runs) <= LISTED:
        for run in all_runs:
            rows = f"{run.total - run.left:>6}/{run.total} rows" if not run.settings.divergence.only else ""
            texts = f", {run.texts} KL passes" if run.texts else ""
            say(f"  {run.state:6} {rows}  {run_name(run.settings.labels, *TABLE, *IN_ITS_TABLE)}{texts}")
    parts: dict[str, list[PlannedGroup]] = {}
    for group in planned:
        parts.setdefault(run_name(group.lead.labels, *TABLE), []).append(group)
    for block in parts.values():
        _print_part(block)
    for lead in {group.lead.model: group.lead for group in reversed(planned)}.values():
        shape, (_, source) = model_shape(lead.model), model_config(lead.model)
        say(f"model {lead.labels['model']}: {f'{shape.parameters:,} parameters, ' if shape else ''}{source}")
    for basis in dict.fromkeys(group.basis for group in planned):
        say(f"time: {basis}")
    states = [run.state for run in all_runs]
    say(
        f"total: {states.count('done')} done, {states.count('partly')} partly, {states.count('to do')} to do; "
        f"{scaled(sum(group.prefills * group.work.prompt_tokens for group in planned))} prompt tokens, "
        f"at most {scaled(_new_tokens(planned))} new tokens, about {_time(planned)}"
    )


def _print_part(groups: list[PlannedGroup]) -> None:
    """The groups of one model and task."""
    lead, work, shape = groups[0].lead, groups[0].work, groups[0].shape
    count, texts = sum(len(group.runs) for group in groups), sum(run.texts for group in groups for run in group.runs)
    sharing = f", prefills shared by {max(len(group.runs) for group in groups)}" if len(groups) < count else ""
    memory = "memory not known"
    if shape is not None:
        kv = max(
            kv_bytes(shape, [run.settings for run in group.runs], work.prompt_tokens, group.copies) for group in groups
        )
        memory = f"weights {size(shape.weight_bytes(lead.model.dtype))} + KV {size(kv)}"
    prefills = sum(group.prefills for group in groups)
    say(
        f"{run_name(lead.labels, *TABLE)}: {count} runs{sharing}; {prefills} prefills of "
        f"{work.prompt_tokens:.0f} tokens ({work.source}), {scaled(_new_tokens(groups))} new tokens"
        f"{f', {texts} KL passes' if texts else ''}; {memory}; about {_time(groups)}"
    )


def _new_tokens(groups: Sequence[PlannedGroup]) -> float:
    return sum(run.left * run.work.new_tokens for group in groups for run in group.runs)


def _time(groups: Sequence[PlannedGroup]) -> str:
    more = " and what is not known" if any(group.seconds is None for group in groups) else ""
    return duration(total_seconds(groups)) + more


def total_seconds(groups: Sequence[PlannedGroup]) -> float:
    """Seconds of these groups together, as far as known."""
    return sum(group.seconds or 0.0 for group in groups)


def scaled(count: float) -> str:
    """A number with its prefix: 1.35 G, 12 k, 300."""
    for prefix, least in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= least:
            return f"{count / least:.3g} {prefix}"
    return f"{count:.0f}"
