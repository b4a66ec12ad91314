"""What is compared: model layouts with random weights and one real model, prompts, and variants of the cache.

Hugging Face's own full cache, in the leanest loop its models allow, is the measure common to kvexp and to its peers.
Imports neither transformers' newest parts nor kvexp's models, because kvpress runs in an environment of its own with an
older transformers; kvexp's own modules come where they are needed. Where platformdirs is missing, as there, KVEXP_CACHE
has to name the cache folder.
"""

from __future__ import annotations

import copy
import functools
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from benchmarks.clock import Sample, peak, settle

NAME = "smollm2_135m"  # as in conf/model
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"  # the file that `kvexp fetch` converts, as its manifest names it


class NotFetched(RuntimeError):
    """The weights are not in the cache."""


@functools.cache
def folder() -> Path:
    """The folder of the converted weights; NotFetched where `kvexp fetch` has not put them there."""
    from kvexp.util.files import cache_folder

    for manifest in sorted((cache_folder() / "models").glob("*/manifest.json")):
        if json.loads(manifest.read_text("utf-8"))["source"]["file"] == FILE:
            return manifest.parent
    raise NotFetched(f"{NAME} is not in {cache_folder()}; fetch it: kvexp fetch {NAME} (make setup does)")


def _real(attention: str) -> Any:
    """The model as Hugging Face loads it, in float32; attention: its attn_implementation."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32, attn_implementation=attention)


@functools.cache
def text_ids() -> list[int]:
    """Token ids of all news articles that come with kvexp, one after the other: about 30,000."""
    from transformers import AutoTokenizer

    from kvexp.tasks.articles import articles

    tokenizer = AutoTokenizer.from_pretrained(folder())
    ids: list[int] = tokenizer("\n\n".join(article.text for article in articles()), verbose=False).input_ids
    return ids


@dataclass(frozen=True)
class Shape:
    """A layout by its Hugging Face configuration; family is the model_type, dtype a torch dtype's name.

    real: whether it has the weights and prompts of `benchmarks.shapes`; else both are random.
    """

    name: str
    family: str
    dtype: str
    config: dict[str, Any]
    real: bool = False

    def fitted(self, positions: int) -> Shape:
        """The layout for at least so many positions (more change no weight: RoPE and ALiBi have no table)."""
        field = "max_seq_len" if self.family == "mpt" else "max_position_embeddings"
        return replace(self, config={**self.config, field: max(positions, self.config.get(field, 0))})

    def tiny(self) -> Shape:
        """The layout made small enough for a test: the same family, heads grouped where they were."""
        if self.family == "mpt":
            small = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 97, "expansion_ratio": 2}
        else:
            grouped = self.config["num_key_value_heads"] < self.config["num_attention_heads"]
            small = {
                **{"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 97},
                **{"num_attention_heads": 4, "num_key_value_heads": 2 if grouped else 4},
            }
        return replace(self, name=f"{self.name}, tiny", dtype="float32", config={**self.config, **small}, real=False)


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> dict[str, Any]:
    return {
        **{"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": mlp, "vocab_size": 32000},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, **more},
    }


# "to_beat" is the shape other libraries were measured on; its vocabulary is the Llama configuration's default.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("to_beat", "llama", "float32", _llama(512, 8, 8, 4, 1408)),
        Shape("llama_100m", "llama", "float32", _llama(768, 12, 12, 4, 2048, tie_word_embeddings=True)),
        Shape("llama2_7b", "llama", "bfloat16", _llama(4096, 32, 32, 32, 11008)),
        Shape("mistral_7b", "mistral", "bfloat16", _llama(4096, 32, 32, 8, 14336, sliding_window=None)),
        Shape(
            "mpt_7b",
            "mpt",
            "bfloat16",
            {"d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4, "vocab_size": 50432},
        ),
        Shape(NAME, "llama", "float32", _llama(576, 30, 9, 3, 1536), real=True),
    )
}


def stock(shape: Shape, device: str, attention: str | None = None) -> PreTrainedModel:
    """The layout as Hugging Face runs it, weights drawn on `device` in their own dtype: no copy passes elsewhere; or
    the real model.

    attention: as attn_implementation; None takes sdpa where the family has it.
    """
    if shape.real:
        return _real(attention or "sdpa").to(device).eval()
    config = AutoConfig.for_model(shape.family, **shape.config)
    attention = attention or ("eager" if shape.family in ("mpt", "gptj") else "sdpa")
    dtype = getattr(torch, shape.dtype)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    model.config.use_cache = True
    return model.eval()


def ours(model: PreTrainedModel) -> PreTrainedModel:
    """A model with the same weights (shared, not copied) that attends through kvexp, packed as run.py packs it."""
    from kvexp.hf import pack_linear, patch_model

    return pack_linear(patch_model(_sharing(model), check_weights=False))


def packed(model: PreTrainedModel) -> PreTrainedModel:
    """Hugging Face's own model with the same weights and its own attention, and the linear layers that `ours` has."""
    from kvexp.hf import pack_linear

    return pack_linear(_sharing(model))


def _sharing(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


def prompt_of(shape: Shape, tokens: int, device: str = "cpu") -> torch.Tensor:
    """[1, tokens] token ids, the same for every variant."""
    if shape.real:
        return torch.tensor([text_ids()[:tokens]], device=device)
    dice = torch.Generator().manual_seed(tokens)
    return torch.randint(0, shape.config["vocab_size"], (1, tokens), generator=dice).to(device)


THEIRS = ("hf", "hf_packed", "hf_static")


@dataclass(frozen=True)
class Variant:
    """hf: Hugging Face's own cache; hf_packed: the same with kvexp's linear layers; hf_static: preallocated.

    kvexp's else: a method, and the share of the prompt it may keep (None: all). short: full attention over a prompt of
    the budget's length: the same slots, and no bookkeeping. heads: as budget.heads; bits: of keys and values; graph: as
    cache.graph.
    """

    name: str
    kind: str
    kv_ratio: float | None = None
    heads: str = "uniform"
    bits: int = 16
    graph: Literal["off", "auto"] = "off"

    @property
    def theirs(self) -> bool:
        return self.kind in THEIRS

    @property
    def model(self) -> str:
        """Which of the models with the same weights it runs on: hf, hf_packed or kvexp."""
        return ("hf_packed" if self.kind == "hf_packed" else "hf") if self.theirs else "kvexp"

    @property
    def grows(self) -> bool:
        """Whether the bytes on the device grow with every token: nothing is dropped."""
        return self.theirs or self.kind in ("full", "short", "sparq", "infllm", "pqcache", "quest")

    def prompt_tokens(self, prompt: int) -> int:
        return self.kept(prompt) if self.kind == "short" else prompt

    def slots(self, prompt: int, new: float) -> float:
        """Slots a decode step reads on average: what is kept, or everything and half of the new tokens."""
        if self.kv_ratio is not None and self.kind != "short":
            return self.kept(prompt)
        return self.prompt_tokens(prompt) + new / 2

    def plan(self, prompt: int) -> tuple[Any, Any]:
        """kvexp's method, and its budget of a prompt of so many tokens."""
        from kvexp.core import Budget

        keeps_all = self.kind in ("full", "short")
        return _method(self.kind), None if keeps_all else Budget(tokens=self.kept(prompt), heads=self.heads)  # type: ignore[arg-type]

    def quantization(self, model: Any) -> Any:
        """How a cache of few bits holds this model's keys and values; None at 16 bits."""
        from kvexp.core import Quantization

        width = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads
        return Quantization(self.bits, self.bits, group=min(32, width)) if self.bits < 16 else None

    def kept(self, prompt: int) -> int:
        """The budget: the share of the prompt, floored as kvexp does."""
        return int((self.kv_ratio or 1) * prompt + 1e-9)


def variant(name: str) -> Variant:
    """Read a name; ValueError says what is allowed."""
    plain, *settings = name.split(",")
    kind, _, share = plain.partition("@")
    if (kind in (*THEIRS, "full")) != (not share):
        raise ValueError(f"{name!r}: {', '.join(THEIRS)} and full take no kv_ratio, all else does, as in h2o@0.2")
    if kind not in THEIRS:
        _method(kind)
    more = dict(setting.split("=") for setting in settings)
    known = more.keys() <= {"heads", "bits", "graph"} and more.get("graph", "off") in ("off", "auto")
    if (kind in THEIRS and more) or not known:
        raise ValueError(f"{name!r}: kvexp's variants take heads=…, bits=…, graph=auto, as in h2o@0.5,bits=4")
    bits = int(more.get("bits", 16))
    graph: Any = more.get("graph", "off")
    return Variant(name, kind, float(share) if share else None, more.get("heads", "uniform"), bits, graph)


def _method(kind: str) -> Any:
    from kvexp import methods, retrieval

    makers = {
        "full": methods.Full,
        "short": methods.Full,
        "h2o": methods.H2O,
        "keyformer": methods.Keyformer,
        "keyformer_quiet": lambda: methods.Keyformer(noise="none"),
        "a2sf": methods.A2SF,
        "streaming_llm": methods.StreamingLLM,
        "snapkv": methods.SnapKV,
        "window": methods.Window,
        "tova": methods.TOVA,
        "sparq": lambda: retrieval.SparQ(n_sinks=32),
        "infllm": lambda: retrieval.InfLLM(n_sinks=32),
        "pqcache": lambda: retrieval.PQCache(n_sinks=32),
    }
    if kind not in makers:
        raise ValueError(f"{kind!r} is not measured; allowed: {', '.join(THEIRS)}, {', '.join(makers)}")
    return makers[kind]()


@torch.no_grad()
def prefilled(model: PreTrainedModel, ids: Tensor, cache: Any | None = None) -> Any:
    """A cache (DynamicCache unless given) that has seen ids [B, T]; for MPT too, whose configuration says no cache."""
    cache = DynamicCache() if cache is None else cache
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def static_cache(model: PreTrainedModel, columns: int) -> StaticCache:
    """Hugging Face's preallocated cache for so many columns."""
    return StaticCache(config=model.config, max_cache_len=columns)


@torch.no_grad()
def decoded(model: PreTrainedModel, cache: Any, rows: int, seen: int, new: int, device: str) -> Sample:
    """Greedy decoding after `seen` columns: one token is fed, `new` come out; seconds per token as kvexp counts them.

    tpot_s: from the first token known to the last; wall_s, cpu_s: by either clock, per forward.
    """
    token = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    place, stamps = torch.full((rows, 1), seen, device=device), []
    takes_positions = model.config.model_type != "mpt"
    settle(device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(new):
        options = {"position_ids": place} if takes_positions else {}
        logits = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1, **options).logits
        token, place = logits[:, -1:].argmax(-1), place + 1
        token[0].item()  # as generation does, which has to see whether it ended
        stamps.append(time.perf_counter())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"tpot_s": (stamps[-1] - stamps[0]) / max(1, new - 1), "wall_s": wall / new, "cpu_s": cpu / new}


def copied(cache: Any, rows: int) -> Any:
    """The cache of one prompt, as a cache of so many rows of it; the original stays as it is."""
    cache = copy.deepcopy(cache)
    if rows > 1:
        cache.batch_repeat_interleave(rows)
    return cache


def one(
    v: Variant, models: dict[str, Any], shape: Shape, prompt: int, batch: int, beams: int, new: int, budget_of: int
) -> Sample:
    """Seconds to the first and second token, per token after that; bytes needed above the weights at the peak.

    models: by `Variant.model`; budget_of: the prompt tokens that a kv_ratio is of.
    """
    model = models[v.model]
    device = str(next(model.parameters()).device)
    ids = prompt_of(shape, prompt)
    if v.theirs:
        stamps, took, how = peak(lambda: _hf(v, model, ids, batch, beams, new, device), device)
        return {**_times(stamps), "peak_bytes": took, "peak_by": how}
    answer, took, how = peak(lambda: _kvexp(v, model, ids.tolist() * batch, beams, new, budget_of), device)
    timing, held = answer.timing, answer.cache.memory_tracker
    times = {"ttft_s": timing.ttft_s, "tt2t_s": timing.tt2t_s, "tpot_s": timing.tpot_s}
    return {
        **times,
        "peak_bytes": took,
        "peak_by": how,
        "kv_bytes": held.bytes,
        "offloaded_bytes": held.offloaded_bytes,
    }


def _kvexp(v: Variant, model: Any, prompts: list[list[int]], beams: int, new: int, budget_of: int) -> Any:
    from kvexp.generate import GenerationParams, generate

    decoding = GenerationParams(new, num_beams=beams, eos=None)
    return generate(model, prompts, *v.plan(budget_of), decoding=decoding, beyond_context=True, graph=v.graph)


@torch.no_grad()
def _hf(v: Variant, model: Any, ids: Any, batch: int, beams: int, new: int, device: str) -> list[float]:
    """Seconds after which each token was known."""
    ids = ids.to(device).repeat(batch, 1)
    cache = static_cache(model, ids.shape[1] + new) if v.kind == "hf_static" else DynamicCache()
    settle(device)
    start = time.perf_counter()
    if beams > 1:
        clock = _Clock(start, device)
        options = {"num_beams": beams, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            use_cache=True,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([clock]),
            **options,
        )
        return clock.stamps
    stamps, token, seen = [], ids, ids.shape[1]
    places = torch.arange(seen, device=device)[None].expand(batch, -1)
    for _ in range(new):
        options = {} if model.config.model_type == "mpt" else {"position_ids": places}
        logits = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1, **options).logits
        token, places = logits[:, -1:].argmax(-1), places[:, -1:] + 1
        token[0].item()
        stamps.append(time.perf_counter() - start)
    return stamps


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """Notes when each token of generate() is known; stops nothing."""

    def __init__(self, start: float, device: str) -> None:
        self.start, self.device, self.stamps = start, device, list[float]()

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        settle(self.device)
        self.stamps.append(time.perf_counter() - self.start)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _times(stamps: list[float]) -> Sample:
    return {
        "ttft_s": stamps[0],
        "tt2t_s": stamps[min(1, len(stamps) - 1)],
        "tpot_s": (stamps[-1] - stamps[0]) / max(1, len(stamps) - 1),
    }
