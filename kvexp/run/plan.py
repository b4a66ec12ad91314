"""What a command would do: runs, tokens, memory, time."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from kvexp.core.backends import stackable_width
from kvexp.hf.cache import bin_by_bytes
from kvexp.hf.cpu_linear import MAX_MEMORY_SHARE
from kvexp.hf.load import ModelSize, parse_dtype, shape_of
from kvexp.run import speed as speed_files
from kvexp.run.batches import MAX_DECODE_ROWS, MIN_UTILISATION, prefill_groups
from kvexp.run.jobs import HydraJob, duration, report_failure, runs_of
from kvexp.run.labels import refusal
from kvexp.run.limits import SHARE, head_slot_bytes, slots_held
from kvexp.run.model_spec import ModelSpec, check_cache_fits_model, config_of_spec, rows_alone, tokenizer_of
from kvexp.run.prompts import Prompts, check_beforehand, check_length, fit_examples, tokenize
from kvexp.run.rows import environment
from kvexp.run.settings import Settings
from kvexp.run.speed import GroupWork, KeptSpeed, observes_prompt, work_seconds
from kvexp.run.store import identity, runs
from kvexp.tasks import Example, LMEval, Task
from kvexp.util import CacheError, ConfigError, Session, available, say

if TYPE_CHECKING:
    from kvexp.hf.load import Tokenizer


# How much a run has to read and write: its examples, the tokens of their prompts, the tokens of their answers.


SAMPLED = 32  # prompts that are tokenised to know the mean: enough for a plan
LETTERS = 4  # per token of English, where no tokenizer is at hand


@dataclass(frozen=True)
class Workload:
    """examples: ids, or None each where the data are not at hand; prompt_tokens, new_tokens: means per example, the
    latter at most; source: how they are known; asked: the examples themselves, where they are at hand."""

    examples: tuple[str | None, ...]
    prompt_tokens: float
    new_tokens: float
    source: str
    asked: tuple[Example, ...] = ()

    @property
    def prefills(self) -> int:
        """How many all examples take: one each, or one per context where its questions share it (questions=all), or per
        conversation.
        """
        alone = sum(not (example.questions or example.turns) for example in self.asked)
        contexts = {example.prompt for example in self.asked if example.questions or example.turns}
        return alone + len(contexts) if self.asked else len(self.examples)


@functools.lru_cache
def model_config(spec: ModelSpec) -> tuple[Any, str]:
    """(the model's configuration or None, how it is known): its own, else the published one of its hub id."""
    from kvexp.hf.load import random_config

    try:
        return config_of_spec(spec), "its configuration"
    except ConfigError:
        if spec.path not in MODELS:
            return None, "unknown: neither the hub nor its cache has the model's configuration"
    family, config = MODELS[spec.path]
    return random_config(family, **config), "the published configuration"


@functools.lru_cache
def model_shape(spec: ModelSpec) -> ModelSize | None:
    config, _ = model_config(spec)
    return None if config is None else shape_of(config)


class Workloads:
    """The workloads of a plan's runs, each looked up once for all runs that differ in method and budget alone."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ModelSpec, int | None], Workload] = {}

    def of(self, settings: Settings) -> Workload:
        """Of one run; reads local data as the run would (ConfigError for a bad row), the hub's from its cache alone."""
        same = [settings.identity[name] for name in ("task", "data", "generation")]
        place = json.dumps(same, sort_keys=True, default=str), settings.model, settings.limit
        if place not in self._known:
            self._known[place] = _workload(settings)
        return self._known[place]


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


def _workload(settings: Settings) -> Workload:
    task = settings.task
    local = task.generated and not isinstance(task, LMEval)
    if not (local or task.data_files is not None or getattr(task, "data_dir", None)):
        return _typical(settings)
    task.check()
    examples = list(task.examples())
    step = max(1, len(examples) // SAMPLED)
    some = examples[::step][:SAMPLED]
    try:
        tokenizer: Tokenizer | None = tokenizer_of(settings.model)
        how = "tokenised" if step == 1 else f"{len(some)} of {len(examples)} prompts tokenised"
    except ConfigError:
        tokenizer, how = None, f"letters / {LETTERS}"
    if tokenizer is not None:
        some = [example for _, example in fit_examples(settings, tokenizer, list(enumerate(some)))]
    sizes = [_size(settings, example, tokenizer) for example in some]
    prompt, new = fmean(size[0] for size in sizes), fmean(size[1] for size in sizes)
    return Workload(tuple(example.id for example in examples), prompt, new, how, tuple(examples))


def _size(settings: Settings, example: Example, tokenizer: Tokenizer | None) -> tuple[float, float]:
    """(prompt tokens, new tokens) of an example as it will be asked."""
    given = example.choices or ((example.continuation,) if settings.task.needs_nll else ())
    if isinstance(settings.task, LMEval):
        given = ()
    new = 0 if settings.task.only_nll or example.choices else settings.decoding.max_new_tokens
    room = _room(settings, new)
    if tokenizer is None and type(settings.task).fit is not Task.fit:  # its prompts have the length it says, in tokens
        return min(float(example.info.get("length", room)), room), float(new)
    if tokenizer is None:
        return min(len(example.prompt + example.question) / LETTERS, room), new + _letters(given)
    asked = tokenize(example, settings.task, tokenizer, 1 << 40, chat=settings.model.chat)
    fed = sum(len(tokenizer(text, add_special_tokens=False).input_ids) for text in given)
    return min(asked.size, room), new + fed


def _room(settings: Settings, new: int) -> float:
    shape = model_shape(settings.model)
    holds = float("inf") if settings.cache.beyond_context or shape is None else shape.positions - new
    return max(1, min(holds, settings.task.max_prompt_tokens or float("inf")))


def _letters(texts: Sequence[str]) -> float:
    return sum(map(len, texts)) / LETTERS


def _typical(settings: Settings) -> Workload:
    """From the table of published sizes; a data set that is not in it counts as `limit` rows of a full prompt."""
    task, name = settings.task, settings.task.name
    new = float(settings.decoding.max_new_tokens)
    if isinstance(task, LMEval):
        name, new = f"lm_eval {task.tasks[0]}", 0.0
    elif hasattr(task, "subset"):
        name = f"longbench {task.subset}"
    room = _room(settings, int(new))
    if name not in DATA:
        count = settings.limit or 1000
        return Workload((None,) * count, min(room, 2048), new, f"guessed: {count} rows, full prompts")
    rows, tokens = DATA[name]
    count = min(settings.limit or rows, rows)
    if isinstance(task, LMEval):
        tokens *= 1 + (task.num_fewshot or 0)
    elif task.only_nll:
        tokens, new = getattr(task, "prefill_tokens", tokens), float(getattr(task, "total_tokens", 0))
        new -= tokens
    return Workload((None,) * count, min(tokens, room), new, "published sizes of the data set")


# Sizes of the models and data sets the configurations name, for plans made where neither can be asked. Models: fields
# of the config.json beside the weights. Data: rows of the split and mean tokens of a prompt, from the data sets' papers
# and cards (words times 1.3); good for a plan, and for nothing else.
_LLAMA: dict[str, Any] = {
    **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"vocab_size": 32000, "max_position_embeddings": 4096},
}
_OPT: dict[str, Any] = {"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048}
_MPT: dict[str, Any] = {"d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432, "max_seq_len": 2048}
_GROUPED = {**_LLAMA, "num_key_value_heads": 8, "intermediate_size": 14336}

# hub id -> (family, what differs from the family's defaults)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "cerebras/Cerebras-GPT-6.7B": ("gpt2", {"n_embd": 4096, "n_layer": 32, "n_head": 32, "n_positions": 2048}),
    "EleutherAI/gpt-j-6b": ("gptj", {"n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64}),
    "meta-llama/Llama-2-7b-hf": ("llama", _LLAMA),
    "meta-llama/Llama-2-7b-chat-hf": ("llama", _LLAMA),
    "huggyllama/llama-7b": ("llama", {**_LLAMA, "max_position_embeddings": 2048}),
    "meta-llama/Llama-3.1-8B-Instruct": (
        "llama",
        {**_GROUPED, "vocab_size": 128256, "max_position_embeddings": 131072},
    ),
    "mistralai/Mistral-7B-Instruct-v0.2": ("mistral", {**_GROUPED, "max_position_embeddings": 32768}),
    "mosaicml/mpt-7b": ("mpt", _MPT),
    "mosaicml/mpt-7b-chat": ("mpt", _MPT),
    "mosaicml/mpt-7b-storywriter": ("mpt", {**_MPT, "max_seq_len": 65536}),
    "facebook/opt-2.7b": ("opt", {**_OPT, "hidden_size": 2560, "word_embed_proj_dim": 2560, "ffn_dim": 10240}),
    "facebook/opt-6.7b": ("opt", {**_OPT, "hidden_size": 4096, "word_embed_proj_dim": 4096, "ffn_dim": 16384}),
    "Qwen/Qwen2.5-7B-Instruct": (
        "qwen2",
        {
            **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
            **{"num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768},
        },
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        "llama",
        {
            **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
            **{"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192},
        },
    ),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (
        "llama",
        {
            **{"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15},
            **{"num_key_value_heads": 5, "vocab_size": 49152, "max_position_embeddings": 8192},
        },
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (
        "llama",
        {
            **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32},
            **{"vocab_size": 49152, "max_position_embeddings": 8192},
        },
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": (
        "qwen2",
        {
            **{"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
            **{"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768},
        },
    ),
    "meta-llama/Llama-3.2-1B-Instruct": (
        "llama",
        {
            **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072},
        },
    ),
    "Qwen/Qwen3-8B": (
        "qwen3",
        {
            **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960},
        },
    ),
}

# task -> (rows of its split, mean tokens of a prompt)
DATA: dict[str, tuple[int, int]] = {
    "cnn_dailymail": (13368, 1050),  # 781 words an article, arXiv:1704.04368
    "xsum": (11332, 600),  # 431 words, arXiv:1808.08745
    "govreport": (973, 12300),  # 9409 words, arXiv:2104.02112
    "soda": (146346, 160),  # 7.6 turns of 16 words, arXiv:2212.10465
    "gsm8k_cot": (1319, 2600),  # eight of the ten worked examples, and 60 tokens of a question
    "stories": (21990, 180),  # three fifths of 230 tokens
    "perplexity": (100, 4096),  # the task sets its own length
    # LongBench, arXiv:2308.14508, table 1: words, or Chinese characters
    **{f"longbench {name}": (rows, words * 13 // 10) for name, (rows, words) in {
        "narrativeqa": (200, 18409), "qasper": (200, 3619), "multifieldqa_en": (150, 4559),
        "multifieldqa_zh": (200, 6701), "hotpotqa": (200, 9151), "2wikimqa": (200, 4887), "musique": (200, 11214),
        "dureader": (200, 15768), "gov_report": (200, 8734), "qmsum": (200, 10614), "multi_news": (200, 2113),
        "vcsum": (200, 15380), "trec": (200, 5177), "triviaqa": (200, 8209), "samsum": (200, 6258),
        "lsht": (200, 22337), "passage_count": (200, 11141), "passage_retrieval_en": (200, 9289),
        "passage_retrieval_zh": (200, 6745), "lcc": (500, 1235), "repobench-p": (500, 4206),
    }.items()},
    # lm-eval's tasks: items of the split it takes; tokens of all choices' requests together, per example in the prompt
    "lm_eval piqa": (1838, 90),
    "lm_eval winogrande": (1267, 60),
    "lm_eval openbookqa": (500, 90),
    "lm_eval copa": (100, 40),
    "lm_eval mathqa": (2985, 400),
    "lm_eval arc_easy": (2376, 140),
    "lm_eval arc_challenge": (1172, 160),
}  # fmt: skip


# The most memory a group of runs holds at one time, from the model's size and the slots that its runs keep.


BASE_BYTES = 450 << 20  # a process without its model: Python and libraries; measured with torch 2.13 on Linux
# Of a forward over a prompt, in widths of the model and per token: its widest layer, and what malloc keeps of it
# (SmolLM2-135M, 512 and 1024 tokens).
ACTIVATION_WIDTHS = 25
# Share of the bytes of the stacked caches (`kvexp.core.decode_stack`) that comes new from the system. What is freed
# layer by layer is hardly used again: malloc keeps it in pieces. Answers; texts, which come after them (SmolLM2-135M,
# 20 variants on 512 and 1024 tokens).
ANSWERS_STACKED, TEXTS_STACKED = 1.0, 0.7
LOGITS_COPIES = 4  # of a step's logits: processed, as log-probabilities, compared


@dataclass(frozen=True)
class PeakMemory:
    """Bytes at the peak. base: of the process; packed: copies of linear layers' weights; caches: of all runs and
    texts; working: what prefill and decode steps hold beside."""

    base: int
    weights: int
    packed: int
    caches: int
    working: int

    @property
    def total(self) -> int:
        return self.base + self.weights + self.packed + self.caches + self.working


@dataclass(frozen=True)
class HeldCaches:
    """What the runs of a group hold of one batch of prompts.

    slots: of every run, all its rows and kv heads alike; sizes: bytes of them in all layers, in as many bits as the run
    stores them; stacks: whether its rows join others in a decode step. kinds: of texts that are forced; answers:
    whether answers are generated too. token: bytes of a slot of a model's dtype in all layers; layers: their number.
    """

    slots: Sequence[int]
    sizes: Sequence[int]
    stacks: Sequence[bool]
    kinds: int
    answers: bool
    token: int
    layers: int

    @property
    def copies(self) -> int:
        """How often every cache is held, answers and texts counted apart."""
        return max(1, self.kinds + self.answers)

    @property
    def bytes(self) -> int:
        """Of all runs' caches, once."""
        return sum(self.sizes)

    @property
    def stacked_bytes(self) -> int:
        """Of the buffers in which the caches take a step together: each as wide as the widest of its stack."""
        widths = {place: slots for place, (slots, on) in enumerate(zip(self.slots, self.stacks, strict=True)) if on}
        layer = self.token // self.layers
        stacks = bin_by_bytes({place: (width, width * layer) for place, width in widths.items()})
        several = [[widths[place] for place in stack] for stack in stacks if len(stack) > 1]
        return sum(max(stack) * len(stack) for stack in several) * self.token

    def peak(self, batches: int) -> int:
        """Bytes once so many batches are read and all their caches, for answers and for texts, have taken a step.

        Copies share keys and values with what they are of until a step stacks them, or for those that no stack takes,
        until it adds a token.
        """
        taken = (ANSWERS_STACKED if self.answers else 0) + TEXTS_STACKED * self.kinds
        if not self.answers and self.kinds:  # the first to be stacked
            taken += ANSWERS_STACKED - TEXTS_STACKED
        alone = sum(size for size, on in zip(self.sizes, self.stacks, strict=True) if not on)
        return batches * (self.bytes + (self.copies - 1) * alone + int(taken * self.stacked_bytes))


def working_bytes(shape: ModelSize, prompt: int, rows: int, itemsize: int) -> int:
    """Of a prefill of so many tokens (batch included), or of a decode step of so many rows, whichever is more.

    itemsize: bytes of a number in the model's dtype.
    """
    return max(ACTIVATION_WIDTHS * shape.width * prompt * itemsize, LOGITS_COPIES * rows * shape.vocabulary * 4)


def width_of(slots: int, device: str) -> int:
    """Slots that a cache of a run takes on this kind of device."""
    import torch

    return stackable_width(slots, torch.device(device))


# The runs of a plan: what each lacks, and the groups that share prefills with what they take.


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
        """Prompts that it reads; one that shares its prefill with no other run reads them once more for the texts."""
        again = max(self.forced.values(), default=0)
        examples = max(self.left, again) if shared else self.left + again
        return -(-examples * self.work.prefills // max(1, self.total))

    @property
    def decodes(self) -> int:
        """Answers and texts, each of which takes a step per token."""
        return self.left + self.texts


@dataclass(frozen=True)
class PlannedGroup:
    """Runs that share prefills, or one alone.

    seconds, peak: bytes at one time; None where the model's size is not known, peak also on a machine that is not this
    one. start_s: seconds of the command before any group, where they were measured.
    """

    runs: list[Planned]
    shape: ModelSize | None
    seconds: float | None
    basis: str
    start_s: float = 0.0
    peak: PeakMemory | None = None

    @property
    def prefills(self) -> int:
        """One per example for all runs of the group."""
        return max(run.prefills(shared=len(self.runs) > 1) for run in self.runs)

    @property
    def prompt_tokens(self) -> float:
        return self.prefills * self.runs[0].work.prompt_tokens

    @property
    def new_tokens(self) -> float:
        return sum(run.left * run.work.new_tokens for run in self.runs)

    @property
    def texts(self) -> int:
        return sum(run.texts for run in self.runs)


def total_seconds(groups: Sequence[PlannedGroup]) -> float:
    """Of the whole command, as far as known: with its start, where that was measured and anything is left to do."""
    start = max((group.start_s for group in groups if group.prefills), default=0.0)
    return start + sum(group.seconds for group in groups if group.seconds is not None)


# How long a group of runs takes and what it holds: from rows of the same model and machine, else from an estimate.


@dataclass(frozen=True)
class Machine:
    """flops: per second of dense matrix products at the model's usual precision; bandwidth: bytes per second."""

    name: str
    flops: float
    bandwidth: float
    layer_s: float  # of Python and launches, per layer and decode step


# Data sheets; a third of the peak, two thirds of the bandwidth and the time per layer are what eager code reaches.
MACHINES = {
    "a100": Machine("one A100 of 80 GB", 312e12 / 3, 2.0e12 * 2 / 3, 6e-4),
    "h100": Machine("one H100 of 80 GB", 989e12 / 3, 3.35e12 * 2 / 3, 6e-4),
    "h200": Machine("one H200 of 141 GB", 989e12 / 3, 4.8e12 * 2 / 3, 6e-4),
    "cpu": Machine("one CPU thread", 40e9, 10e9, 1e-3),
}


@dataclass(frozen=True)
class Rates:
    """Measured: seconds of a row per prompt token and per new token, its share of the batch it was in."""

    prompt: float
    new: dict[str, float]  # by method
    rows: int

    def of(self, method: str) -> float:
        return self.new.get(method) or fmean(self.new.values())


def measured(settings: Settings, device: str) -> Rates | None:
    """From timed rows of this model on this device under outputs_dir; rows of shared prefills hold no times."""
    if not settings.outputs_dir.is_dir():
        return None
    prompts: list[tuple[float, int]] = []
    new: dict[str, list[float]] = {}
    for run in runs(settings.outputs_dir):
        if run.config.get("model") != settings.identity["model"] or run.env.get("device") != device:
            continue
        for row in run.rows():
            spent, batch = row.get("seconds") or {}, (row.get("receipt") or {}).get("batch_size") or 1
            if spent.get("ttft") and spent.get("tpot"):
                prompts.append((spent["ttft"] / batch, row["prompt_tokens"]))
                new.setdefault(run.config["method"]["name"], []).append(spent["tpot"] / batch)
    if not prompts:
        return None
    per_token = sum(seconds for seconds, _ in prompts) / max(1, sum(tokens for _, tokens in prompts))
    return Rates(per_token, {method: fmean(each) for method, each in new.items()}, len(prompts))


def measured_seconds(
    rates: Rates, runs: Sequence[tuple[Settings, int]], prefills: int, prompt: float, new: float
) -> float:
    """Of runs with so many answers and forced texts to do each, after so many prefills."""
    return prefills * prompt * rates.prompt + sum(rows * new * rates.of(s.method.name) for s, rows in runs)


def estimated_seconds(
    machine: Machine, shape: ModelSize, runs: Sequence[tuple[Settings, int]], prefills: int, prompt: float, new: float
) -> float:
    """2 operations per parameter and token and 4 per query, key and component; a step reads weights and held slots.

    A second pass over a prompt takes what twice the prompt takes beyond the prompt.
    runs: with the answers and forced texts of each, which go side by side; prefills: of the whole group.
    """
    lead = runs[0][0]
    passes = second_passes([settings for settings, rows in runs if rows])
    attention = 4 * shape.layers * shape.width * prompt**2
    operations = 2 * shape.parameters * prompt * (1 + passes) + attention * (1 + 3 * passes)
    batch = lead.batch_size * lead.decoding.num_beams
    held = sum(slots_bytes(shape, settings, slots_of(settings, prompt)) for settings, rows in runs if rows)
    many = sum(1 for _, rows in runs if rows) * batch
    reading = (shape.weight_bytes(lead.model.dtype) + batch * held) / machine.bandwidth
    step = max(reading, 2 * shape.parameters * many / machine.flops) + shape.layers * machine.layer_s
    most = max(rows for _, rows in runs)
    return prefills * operations / machine.flops + math.ceil(most / lead.batch_size) * new * step


def second_passes(runs: Sequence[Settings]) -> int:
    """How often a prompt is fed once more before its evictions: runs that declare the same pass share it."""
    return len({settings.method.needs.second_pass for settings in runs} - {None})


def slots_of(settings: Settings, prompt: float) -> int:
    """Slots per kv head that a prompt holds once it is evicted; all of them where the budget is too small for it."""
    try:
        return slots_held(settings, [max(1, int(prompt))])[0]
    except ConfigError:
        return int(prompt) + settings.decoding.max_new_tokens


def kv_bytes(shape: ModelSize, runs: Sequence[Settings], prompt: float) -> int:
    """At most, of a batch: the prompts as they are read, and what every run keeps of them."""
    lead = runs[0]
    batch = lead.batch_size * lead.decoding.num_beams
    kept = sum(slots_bytes(shape, settings, slots_of(settings, prompt)) for settings in runs)
    return batch * (int(prompt) * shape.token_bytes(lead.model.dtype) + kept)


def slots_bytes(shape: ModelSize, settings: Settings, slots: int) -> int:
    """Bytes of so many slots per kv head in all layers, in as many bits as the run stores them."""
    itemsize = parse_dtype(settings.model.dtype).itemsize
    return shape.layers * shape.kv_heads * head_slot_bytes(settings, shape.head_dim, itemsize).of(slots)


def machine_here(device: str) -> Machine:
    """The one of `MACHINES` that this device's name fits; a CUDA device of another name counts as an A100."""
    import torch

    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        one = MACHINES["cpu"]
        return Machine(f"{threads} CPU thread(s)", one.flops * threads, one.bandwidth, one.layer_s)
    fitting = [machine for name, machine in MACHINES.items() if name in device.lower()]
    return fitting[0] if fitting else MACHINES["a100"]


def folder_rows(path: Path) -> set[str]:
    """Examples that have their row in a run folder; changes nothing there."""
    from kvexp.run.store import Run

    return {row["example"] for row in Run.load(path).rows()} if (path / "config.json").exists() else set()


def folder_texts(path: Path) -> tuple[set[tuple[str, str]], set[str]]:
    """((example, kind of text) that were forced, examples that were skipped) in a run folder; changes nothing there."""
    from kvexp.run import store as divergence_lines
    from kvexp.run.store import Run

    if not (path / "config.json").exists():
        return set(), set()
    run = Run.load(path)
    return set(divergence_lines.read(run)), {row["example"] for row in run.rows() if row.get("skipped")}


def gigabytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def tokens(count: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


# A plan in words: the runs, what each model and task takes, and the whole.


LISTED = 40  # runs shown one by one; more are told in groups


def print_plan(planned: list[PlannedGroup], jobs: int) -> None:
    """The plan of so many jobs, on stdout."""
    runs = [run for group in planned for run in group.runs]
    if not runs:
        return
    full = sum(run.settings.is_baseline for run in runs)
    say(f"plan: {jobs} job(s), {len(runs)} runs with {full} full-attention baseline(s) among them; nothing is run")
    if len(runs) <= LISTED:
        for run in runs:
            rows = f"{run.total - run.left:>6}/{run.total} rows" if not run.settings.divergence.only else ""
            texts = f", {run.texts} texts to force" if run.texts else ""
            say(f"  {run.state:6} {rows}  {name_of(run.settings)}{texts}")
    by_part: dict[str, list[PlannedGroup]] = {}
    for group in planned:
        by_part.setdefault(_title(group.runs[0].settings), []).append(group)
    for part in by_part.values():
        _show_part(part)
    for spec in dict.fromkeys(group.runs[0].settings.model for group in planned):
        _show_model(next(group for group in planned if group.runs[0].settings.model == spec))
    for basis in dict.fromkeys(group.basis for group in planned):
        say(f"time: {basis}")
    states = [run.state for run in runs]
    prompt, new = sum(group.prompt_tokens for group in planned), sum(group.new_tokens for group in planned)
    say(
        f"total: {states.count('done')} done, {states.count('partly')} partly, {states.count('to do')} to do; "
        f"{tokens(prompt)} prompt tokens, at most {tokens(new)} new tokens, "
        f"about {_time(planned, total_seconds(planned))}"
    )


def _show_part(groups: list[PlannedGroup]) -> None:
    """The groups of one model and task."""
    lead = groups[0].runs[0]
    runs = [run for group in groups for run in group.runs]
    sharing = f", prefills shared by {max(len(group.runs) for group in groups)}" if len(groups) < len(runs) else ""
    memory = "memory not known"
    if (shape := groups[0].shape) is not None:
        weights = shape.weight_bytes(lead.settings.model.dtype)
        each = ([run.settings for run in group.runs] for group in groups)
        kv = max(kv_bytes(shape, settings, lead.work.prompt_tokens) for settings in each)
        memory = f"weights {gigabytes(weights)} + KV {gigabytes(kv)}"
        if peaks := [group.peak.total for group in groups if group.peak is not None]:
            memory += f", peak about {gigabytes(max(peaks))}"
    prompts, new = sum(group.prefills for group in groups), sum(group.new_tokens for group in groups)
    texts = sum(group.texts for group in groups)
    say(
        f"{_title(lead.settings)}: {len(runs)} runs{sharing}; {prompts} prefills of {lead.work.prompt_tokens:.0f} "
        f"tokens ({lead.work.source}), {tokens(new)} new tokens{f', {texts} texts forced' if texts else ''}; "
        f"{memory}; about {_time(groups)}"
    )


def _time(groups: list[PlannedGroup], seconds: float | None = None) -> str:
    """Of these groups in words; seconds: None for their sum."""
    known = [group.seconds for group in groups if group.seconds is not None]
    more = "" if len(known) == len(groups) else " and what is not known"
    return duration(sum(known) if seconds is None else seconds) + more


def _title(settings: Settings) -> str:
    return f"{settings.labels['model']} {settings.labels['task']}"


def _show_model(group: PlannedGroup) -> None:
    settings = group.runs[0].settings
    shape, (_, source) = model_shape(settings.model), model_config(settings.model)
    size = f"{shape.parameters:,} parameters, " if shape else ""
    say(f"model {settings.labels['model']}: {size}{source}")


def name_of(settings: Settings) -> str:
    """A run in the words of its labels."""
    labels = settings.labels
    ratio = f"kv_ratio={labels['kv_ratio']:g}" if labels.get("kv_ratio") is not None else ""
    words = (labels["model"], labels["task"], labels["method"], ratio, labels["setting"])
    return " ".join(str(word) for word in words if word)


# What a group of runs takes by measured speeds, and holds at most: as `kvexp.run.batches` will arrange its prompts.


@dataclass(frozen=True)
class RunWork:
    """What one run lacks. answers: rows; texts: by kind, those it has still to be forced."""

    settings: Settings
    answers: int
    texts: dict[str, int]


@dataclass(frozen=True)
class GroupPlan:
    """Runs that share prefills (or one run) on prompts of so many tokens, with so many new ones each.

    prompts: that lack anything; shared: whether several runs share prefills; free: bytes of memory that are there
    beside the weights; threads: processes that a shared sweep may fork.
    """

    runs: Sequence[RunWork]
    shape: ModelSize
    prompts: int
    prompt: float
    new: float
    shared: bool
    free: int
    threads: int

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
    def active(self) -> list[RunWork]:
        """The runs that lack anything."""
        return [run for run in self.runs if run.answers or any(run.texts.values())]

    @property
    def kinds(self) -> list[str]:
        """Of texts that are forced."""
        return sorted({kind for run in self.runs for kind, count in run.texts.items() if count})

    @property
    def packed(self) -> int:
        """Bytes of the copies of linear layers' weights."""
        model = self.lead.model
        packs = model.pack_linear and (self.device, model.dtype) == ("cpu", "float32")
        return min(4 * self.shape.linear, int(MAX_MEMORY_SHARE * self.free)) if packs else 0

    def held(self) -> HeldCaches:
        """The caches of one batch; with a full cache's beside them where texts are forced."""
        runs = [run.settings for run in self.active]
        if self.kinds and not any(settings.is_baseline for settings in runs):
            runs.append(runs[0].baseline())
        rows = self.lead.batch_size * self.lead.decoding.num_beams
        stacks = [settings.cache.stacks for settings in runs]
        held = [slots_of(settings, self.prompt) for settings in runs]
        widths = [width_of(slots, self.device) if on else slots for slots, on in zip(held, stacks, strict=True)]
        return HeldCaches(
            [rows * width for width in widths],
            [rows * slots_bytes(self.shape, each, width) for each, width in zip(runs, widths, strict=True)],
            stacks,
            len(self.kinds),
            any(run.answers for run in self.runs),
            self.shape.token_bytes(self.lead.model.dtype),
            self.shape.layers,
        )

    def arrangement(self) -> Arrangement:
        """How `kvexp.run.batches` will take the batches, if memory is then as free as now."""
        if not (self.shared or self.kinds):
            return Arrangement(1, self.batches, 1)
        members, held = len(self.active), self.held()
        prompt_bytes = int(self.prompt) * self.lead.batch_size * held.token
        need, room = held.copies * held.bytes + prompt_bytes, (self.free - self.packed) * SHARE
        limited = self.lead.timeout_s is not None
        several = self.threads if self.device == "cpu" and sys.platform == "linux" and not limited else 1
        if math.ceil(self.batches / several) * several > MIN_UTILISATION * self.batches or need > room / several:
            several = 1
        most = (
            1 if limited or rows_alone(self.lead.model) else max(1, MAX_DECODE_ROWS // (members * self.lead.batch_size))
        )
        groups = min(self.batches, several * math.ceil(self.batches / (several * most)))
        if math.ceil(self.batches / groups) * need > room / several:
            groups = self.batches
        parts = 1 if need <= room / several else math.ceil((need - prompt_bytes) / max(1.0, room - prompt_bytes))
        return Arrangement(several, groups, min(parts, members))

    def parts(self) -> list[GroupPlan]:
        """What is done in turn: a run alone makes its answers, then reads its prompts anew for its texts."""
        if self.shared:
            return [self]
        (run,) = self.runs
        answers = replace(self, runs=[replace(run, texts={})], prompts=run.answers)
        texts = replace(self, runs=[replace(run, answers=0)], prompts=max(run.texts.values(), default=0))
        return [part for part in (answers, texts) if part.prompts]

    def peak(self, base: int | None = None) -> PeakMemory:
        """Bytes held at the peak by all processes; base: as measured, None: as it was elsewhere."""
        model = self.lead.model
        process = (BASE_BYTES if base is None else base) if self.device == "cpu" else 0
        held = [part._held_at_peak() for part in self.parts()]
        caches, working = max(held, key=sum, default=(0, 0))
        return PeakMemory(process, self.shape.weight_bytes(model.dtype), self.packed, caches, working)

    def _held_at_peak(self) -> tuple[int, int]:
        """Bytes of (caches, what prefill and decode steps hold beside), of all processes."""
        here, held, lead = self.arrangement(), self.held(), self.lead
        together = math.ceil(self.batches / here.groups)
        caches = math.ceil(held.peak(together) / here.parts)
        rows = together * len(held.slots) * lead.batch_size * lead.decoding.num_beams
        itemsize = parse_dtype(lead.model.dtype).itemsize
        working = working_bytes(self.shape, int(self.prompt) * lead.batch_size, rows, itemsize)
        return here.processes * caches, here.processes * working

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
        answered = [(run.settings, run.answers * beams) for run in self.active]
        forced = [(run.settings, sum(run.texts.values())) for run in self.active]
        if self.kinds:  # the full cache's own rows beside them
            most = sum(max(run.texts.get(kind, 0) for run in self.runs) for kind in self.kinds)
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
        """Of a run: all tokens but half the new ones where it evicts nothing."""
        held = slots_of(settings, self.prompt)
        return held - self.new / 2 if held >= int(self.prompt) + self.new else held


@dataclass(frozen=True)
class Arrangement:
    """processes: that share the batches; groups: of batches that decode in the same steps; parts: into which the runs
    of a batch are split where memory does not hold all of them, each with a prefill of its own."""

    processes: int
    groups: int
    parts: int


# `python run.py --dry-run`: what a command would do, how much of it is done, what the rest takes. Loads no weights.


MEASURE = "measure"


def dry_run(main: Callable[[], None], option: str, session: Session) -> int:
    """The exit code of run.py: 1 where the option or a job is wrong, which is told."""
    try:
        plan(main, option, session)
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 1
    return session.exit_code


def plan(main: Callable[[], None], option: str, session: Session) -> list[PlannedGroup]:
    """Let Hydra compose the jobs of sys.argv without running one, print their plan and return it.

    option: --dry-run, --dry-run=NAME of another machine (`cost.MACHINES`), or --dry-run=measure, which first loads
    the models, measures them on this one (`speed_measurement`) and keeps that in the cache folder. Else nothing is
    written: Hydra's own notes on a sweep go to a folder that is removed. Whatever the launcher, jobs are composed here,
    one after the other.
    """
    name = option.partition("=")[2] or None
    if name not in (None, MEASURE, *MACHINES):
        raise ConfigError(
            f"--dry-run may be {MEASURE} (this machine, from now on) or name a machine, "
            f"one of {', '.join(MACHINES)}, got {name!r}"
        )
    words = [word for word in sys.argv[1:] if word.partition("=")[0] != "--dry-run"]
    if any(word.startswith("hydra/sweeper=") and not word.endswith(("=basic", "=once_composed")) for word in words):
        raise ConfigError(
            "--dry-run plans grids; a search chooses its runs one after the other: leave out hydra/sweeper"
        )
    basic = "hydra/launcher=basic" in words
    words = [word for word in words if not word.startswith(("hydra/launcher", "hydra.launcher."))]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = [*words, "hydra/launcher=basic", f"hydra.sweep.dir={folder}"]
        session.collect_jobs()
        try:
            main()
        finally:
            jobs = session.collected_jobs()
    swept = any(job.number is not None for job in jobs)
    return show_plan(jobs, name, session, shares=swept and not basic)


def show_plan(jobs: Sequence[HydraJob], machine: str | None, session: Session, *, shares: bool) -> list[PlannedGroup]:
    """shares: the launcher lets runs share prefills. Jobs that cannot run are told as their turn would tell them."""
    wanted: dict[str, Settings] = {}
    workloads = Workloads()
    for job in jobs:
        try:
            for settings in runs_of(job, session):
                config, _ = model_config(settings.model)
                if config is not None and not settings.is_baseline:
                    check_cache_fits_model(settings.model, settings.cache, config)
                check_workload(settings, workloads.of(settings))
                for one in (settings if settings.is_baseline else settings.baseline(), settings):
                    wanted.setdefault(identity(one.identity), one)
        except Exception as error:
            if len(jobs) > 1:
                say(" ".join(job.overrides), end=": ", file=sys.stderr)
            report_failure(job, error, session)
    together = prefill_groups(wanted.values()) if shares else []
    taken = {str(settings.identity) for group in together for settings in group}
    alone = [[settings] for settings in wanted.values() if str(settings.identity) not in taken]
    if machine == MEASURE:
        _measure(wanted.values(), session)
        machine = None
    planned = []
    for group in [*together, *alone]:
        try:
            planned.append(_group(group, machine, workloads))
        except ConfigError as error:
            say(f"error: {error}", file=sys.stderr, flush=True)
            session.add_failure(name_of(group[0]), str(error), told=True)
    print_plan(planned, len(jobs))
    return planned


def _group(members: list[Settings], machine: str | None, workloads: Workloads) -> PlannedGroup:
    runs = []
    for settings in members:
        work = workloads.of(settings)
        done = folder_rows(settings.outputs_dir / identity(settings.identity))
        known = [example for example in work.examples if example is not None]
        left = sum(example not in done for example in known) if known else max(0, len(work.examples) - len(done))
        runs.append(Planned(settings, work, 0 if settings.divergence.only else left, _texts(settings, work)))
    lead, work = members[0], runs[0].work
    shape, device = model_shape(lead.model), environment()["device"]
    planned = PlannedGroup(runs, shape, None, "not known")
    todo = [(run.settings, run.decodes) for run in runs]
    if machine is None and shape is not None:
        planned = _on_this_machine(planned, shape, device)
        if planned.seconds is not None:
            return planned
    rates = measured(lead, device) if machine is None else None
    if rates is not None:
        seconds = measured_seconds(rates, todo, planned.prefills, work.prompt_tokens, work.new_tokens)
        return replace(planned, seconds=seconds, basis=f"measured on {rates.rows} rows")
    on = machine_here(device) if machine is None else MACHINES[machine]
    if shape is None:
        return planned
    seconds = estimated_seconds(on, shape, todo, planned.prefills, work.prompt_tokens, work.new_tokens)
    return replace(planned, seconds=seconds, basis=f"estimated for {on.name}")


def _on_this_machine(planned: PlannedGroup, shape: ModelSize, device: str) -> PlannedGroup:
    """With the peak of memory here; with the time as well where the model was measured here."""
    lead, work = planned.runs[0].settings, planned.runs[0].work
    known = speed_files.kept(speed_files.surroundings(lead.model, device))
    group = GroupPlan(
        [RunWork(run.settings, run.left, run.forced) for run in planned.runs],
        shape,
        planned.prefills,
        work.prompt_tokens,
        work.new_tokens,
        shared=len(planned.runs) > 1,
        free=max(0, _free_bytes(lead.model) - shape.weight_bytes(lead.model.dtype)),
        threads=torch.get_num_threads(),
    )
    peak = group.peak(known.base_bytes if known else None) if planned.prefills else None
    if known is None:
        return replace(planned, peak=peak)
    seconds, basis = group.seconds(known), f"measured here on {known.date}"
    return replace(planned, seconds=seconds, basis=basis, start_s=known.start_s, peak=peak)


def _free_bytes(spec: ModelSpec) -> int:
    """Of the device that the model will be on."""
    if spec.resolved_device().startswith("cuda"):
        return int(torch.cuda.mem_get_info()[0])
    return available()


def _measure(wanted: Iterable[Settings], session: Session) -> None:
    """Measure every model of these runs on this machine, and keep what was found."""
    from kvexp.run.speed import (
        measure,
        process_age,  # late: it imports what a plan does without
    )

    started = process_age()
    for spec in dict.fromkeys(settings.model for settings in wanted):
        try:
            speed_files.keep(speed_files.surroundings(spec, environment()["device"]), measure(spec, started))
        except ConfigError as error:
            say(f"error: {error}", file=sys.stderr, flush=True)
            session.add_failure(MEASURE, str(error), told=True)


def _texts(settings: Settings, work: Workload) -> dict[str, int]:
    """Kind of text -> how many a run has still to be forced, as far as its folder tells."""
    if refusal(settings) is not None:
        return {}
    measured, skipped = folder_texts(settings.outputs_dir / identity(settings.identity))
    left = len(work.examples) - len(skipped)
    return {kind: max(0, left - sum(text == kind for _, text in measured)) for kind in settings.divergence.texts}


BITS_AND_TOKENS_DOC = """kvexp bytes [bytes_ratio=R,...] [model=NAME]: which numbers of tokens and of bits fit into a
share of bytes.

The share is of the keys and values of a prompt's full cache at 16 bits per number. For each number of bits the command
prints how many slots a kv head gets, what share of the prompt's tokens that is, and what the slots take, with scales,
zeros and the window in full precision. Settings, several values with commas where marked:
  bytes_ratio=0.5,0.25,0.125   shares of bytes (several)
  prompt_tokens=1000           tokens of a prompt
  cache.bits=16,8,4,2          bits of keys and values (several)
  cache.key_bits, cache.value_bits   bits of one of the two alone (several)
  cache.residual, cache.group, cache.key_axis, cache.value_axis, cache.symmetric   as of kvexp run
  model=NAME, model.SETTING=VALUE    the model whose heads are counted
The last line is a sweep over the pairs, to be completed with methods and a task.
"""


SEVERAL = {"bytes_ratio": "0.5,0.25,0.125", "cache.bits": "16,8,4,2", "cache.key_bits": "", "cache.value_bits": ""}
ONE = {"prompt_tokens": "1000", "cache.residual": "", "cache.group": "", "cache.key_axis": "", "cache.value_axis": ""}
ONE |= {"cache.symmetric": ""}


@dataclass(frozen=True)
class BitsAndTokens:
    """One possibility: slots of a kv head at key_bits and value_bits within a share of bytes.

    slots: 0 where not even one fits; prompt_share: slots over prompt tokens; bytes: of these slots, per kv head;
    allowed: bytes that the share is.
    """

    bytes_ratio: float
    key_bits: int
    value_bits: int
    slots: int
    prompt_share: float
    bytes: int
    allowed: int


def possibilities(
    shares: Sequence[float], bits: Sequence[tuple[int, int]], storage: Mapping[str, object], width: int, tokens: int
) -> list[BitsAndTokens]:
    """What fits into each share at each (key bits, value bits), for heads of `width` channels and a prompt of `tokens`.

    storage: residual, group, key_axis, value_axis, symmetric as of the group `cache`; ConfigError as of `Quantization`.
    """
    from kvexp.core.quantized import SlotBytes
    from kvexp.run.build import CACHE_KEYS, keys_named, quantization_of

    found = []
    for share, (key_bits, value_bits) in itertools.product(shares, bits):
        how = quantization_of({**storage, "key_bits": key_bits, "value_bits": value_bits})
        if how is not None:
            with keys_named(CACHE_KEYS):
                how.check_head(width, width)
        counted, allowed = SlotBytes(width, width, how), share * SlotBytes(width, width).of(tokens)
        slots = counted.most_slots(allowed + 1e-9)
        numbers = (slots, slots / tokens, counted.of(slots) if slots else 0, int(allowed))
        found.append(BitsAndTokens(share, key_bits, value_bits, *numbers))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 for what cannot be done, which is told."""
    from kvexp.run.compose import told

    _, words = parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        model_words, own = parted(words)
        with told(model_words):
            from kvexp.hf.patch import head_dim
            from kvexp.run.jobs import composed_model
            from kvexp.run.model_spec import config_of_spec

            name, spec = composed_model(model_words)
            width = head_dim(config_of_spec(spec))
        shares = [number(text, "bytes_ratio") for text in own["bytes_ratio"].split(",")]
        tokens = int(number(own["prompt_tokens"], "prompt_tokens"))
        given = [key for key in ONE if key.startswith("cache.") and own[key]]
        storage = {key.partition(".")[2]: value_of(own[key]) for key in given}
        found = possibilities(shares, pairs_of(own), storage, width, tokens)
        show(name, width, tokens, found, [f"{key}={own[key]}" for key in given] + list(model_words))
    except (ConfigError, CacheError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="kvexp bytes",
        usage="%(prog)s [bytes_ratio=R,...] [prompt_tokens=N] [cache.bits=N,...] [cache.SETTING=VALUE] [model=NAME]",
        description=BITS_AND_TOKENS_DOC,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parted(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words that choose a model, and the values of the command's own settings; ConfigError for any other word."""
    own, model_words = {**SEVERAL, **ONE}, []
    for word in words:
        key, equals, value = word.partition("=")
        if key in own and equals:
            own[key] = value
        elif key.lstrip("+").partition(".")[0] == "model" and equals:
            model_words.append(word)
        else:
            raise ConfigError(f"{word}: kvexp bytes takes model=NAME, model.SETTING=…, {', '.join(own)}")
    return model_words, own


def pairs_of(own: Mapping[str, str]) -> list[tuple[int, int]]:
    """(key bits, value bits): the same for both, unless bits of one of them are given."""
    each = {name: own[f"cache.{name}"] for name in ("bits", "key_bits", "value_bits")}
    lists = {
        name: [int(number(word, f"cache.{name}")) for word in text.split(",") if word] for name, text in each.items()
    }
    if lists["key_bits"] or lists["value_bits"]:
        return list(itertools.product(lists["key_bits"] or lists["bits"], lists["value_bits"] or lists["bits"]))
    return [(bits, bits) for bits in lists["bits"]]


def number(text: str, key: str) -> float:
    """A positive number; bytes_ratio is at most 1, all others are whole."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if key == "bytes_ratio" and not 0 < value <= 1:
        raise ConfigError(f"bytes_ratio must be in (0, 1], got {text!r}")
    if key != "bytes_ratio" and (value < 1 or value != int(value)):
        raise ConfigError(f"{key} must be a whole number of at least 1, got {text!r}")
    return value


def value_of(text: str) -> object:
    """A setting's value as YAML reads it."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index, call-overload]


def show(name: str, width: int, tokens: int, found: Sequence[BitsAndTokens], more: Sequence[str]) -> None:
    """Print the possibilities and a sweep over those that hold at least one slot; more: its other words."""
    say(f"{name}: heads of {width} channels, prompts of {tokens} tokens; bytes of one kv head")
    heads = {"bytes_ratio": 11, "key_bits": 8, "value_bits": 10, "slots": 7, "of prompt": 9, "bytes": 9, "allowed": 9}
    say("  ".join(f"{head:>{wide}}" for head, wide in heads.items()))
    for one in found:
        slots, share = (f"{one.slots}", f"{100 * one.prompt_share:.1f} %") if one.slots else ("none", "-")
        say(
            f"{one.bytes_ratio:>11g}  {one.key_bits:>8}  {one.value_bits:>10}  {slots:>7}  {share:>9}  {one.bytes:>9}  "
            f"{one.allowed:>9}"
        )
    fits = [one for one in found if one.slots]
    if fits:
        apart = any(one.key_bits != one.value_bits for one in fits)
        keys = {"bytes_ratio": "bytes_ratio", "key_bits": "cache.key_bits" if apart else "cache.bits"}
        keys |= {"value_bits": "cache.value_bits"} if apart else {}
        values = {key: dict.fromkeys(f"{getattr(one, name):g}" for one in fits) for name, key in keys.items()}
        say(" ".join(["kvexp run -m", *(f"{key}={','.join(each)}" for key, each in values.items()), *more]))
