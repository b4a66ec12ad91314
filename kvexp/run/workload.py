"""What a run has to read and write: its examples, the tokens of their prompts and of their answers.

Looked up without weights: in the task's data and the tokenizer where they are at hand, else in a table of published
sizes.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvexp.hf.load import ModelSize, random_config, shape_of
from kvexp.run.model_spec import ModelSpec, config_of_spec, tokenizer_of
from kvexp.run.prompts import Prompts, check_beforehand, check_length, fit_examples, tokenize
from kvexp.run.settings import Settings
from kvexp.tasks import Example, LMEval, Task
from kvexp.util import ConfigError

if TYPE_CHECKING:
    from kvexp.hf.load import Tokenizer

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


class Workloads:
    """The workloads of a plan's runs, each looked up once for all runs that differ in method and budget alone."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ModelSpec, int | None], Workload] = {}

    def of(self, settings: Settings) -> Workload:
        """The workload of one run; reads local data as the run would (ConfigError for a bad row), the hub's from its
        cache alone.
        """
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
        return _published(settings)
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
        prompt = len(example.prompt + example.question) / LETTERS
        return min(prompt, room), new + sum(map(len, given)) / LETTERS
    asked = tokenize(example, settings.task, tokenizer, 1 << 40, chat=settings.model.chat)
    fed = sum(len(tokenizer(text, add_special_tokens=False).input_ids) for text in given)
    return min(asked.size, room), new + fed


def _room(settings: Settings, new: int) -> float:
    """Tokens that a prompt may have."""
    shape = model_shape(settings.model)
    holds = float("inf") if settings.cache.beyond_context or shape is None else shape.positions - new
    return max(1, min(holds, settings.task.max_prompt_tokens or float("inf")))


def _published(settings: Settings) -> Workload:
    """The workload by the table of published sizes; a data set not in it counts as `limit` rows of a full prompt."""
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
def _like_llama(
    width: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, positions: int, **more: int
) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip(names, (width, mlp, layers, heads, kv_heads), strict=True))
    return {**sizes, "vocab_size": vocabulary, "max_position_embeddings": positions, **more}


_OPT = {"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048}
_MPT = {"d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432, "max_seq_len": 2048}
_LLAMA2 = _like_llama(4096, 11008, 32, 32, 32, 32000, 4096)

# hub id -> (family, what differs from the family's defaults)
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "cerebras/Cerebras-GPT-6.7B": ("gpt2", {"n_embd": 4096, "n_layer": 32, "n_head": 32, "n_positions": 2048}),
    "EleutherAI/gpt-j-6b": ("gptj", {"n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64}),
    "meta-llama/Llama-2-7b-hf": ("llama", _LLAMA2),
    "meta-llama/Llama-2-7b-chat-hf": ("llama", _LLAMA2),
    "huggyllama/llama-7b": ("llama", {**_LLAMA2, "max_position_embeddings": 2048}),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", _like_llama(4096, 14336, 32, 32, 8, 128256, 131072)),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama", _like_llama(2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64)),
    "mistralai/Mistral-7B-Instruct-v0.2": ("mistral", _like_llama(4096, 14336, 32, 32, 8, 32000, 32768)),
    "mosaicml/mpt-7b": ("mpt", _MPT),
    "mosaicml/mpt-7b-chat": ("mpt", _MPT),
    "mosaicml/mpt-7b-storywriter": ("mpt", {**_MPT, "max_seq_len": 65536}),
    "facebook/opt-2.7b": ("opt", {**_OPT, "hidden_size": 2560, "word_embed_proj_dim": 2560, "ffn_dim": 10240}),
    "facebook/opt-6.7b": ("opt", {**_OPT, "hidden_size": 4096, "word_embed_proj_dim": 4096, "ffn_dim": 16384}),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llama", _like_llama(576, 1536, 30, 9, 3, 49152, 8192)),
    "HuggingFaceTB/SmolLM2-360M-Instruct": ("llama", _like_llama(960, 2560, 32, 15, 5, 49152, 8192)),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": ("llama", _like_llama(2048, 8192, 24, 32, 32, 49152, 8192)),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", _like_llama(896, 4864, 24, 14, 2, 151936, 32768)),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", _like_llama(3584, 18944, 28, 28, 4, 152064, 32768)),
    "Qwen/Qwen3-8B": ("qwen3", _like_llama(4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128)),
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
