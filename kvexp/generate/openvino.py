"""OpenVINO GenAI, an engine that evicts: its ContinuousBatchingPipeline on a CPU, fed token ids, one prompt at a time.

The engine reads a model from a GGUF file. Its reader takes Q4_1 as if every block's minimum were a whole number of
steps, which changes the weights; what it reads of float16 is exact. So a model is written as float16 for it
(`write_gguf`), and its own tokenizer is not used: that file has place holders for tokens.

Source: openvinotoolkit/openvino.genai 2026.4.1.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from torch import Tensor

from kvexp.hf.gguf import LAYERS, LLAMA, read_header
from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast, check_fields

BLOCK = 32  # tokens of a block of the engine's cache on a CPU
FAMILIES = ("llama", "qwen2", "qwen3")  # model types that its reader of GGUF files builds
WHEEL = "openvino-genai==2026.4.1.0"


def genai() -> Any:
    """The module openvino_genai; ConfigError where it is not installed."""
    try:
        return import_module("openvino_genai")
    except ImportError as error:
        raise ConfigError(
            f"engine=openvino needs {WHEEL}, which cannot be imported here ({error}): pip install 'kvexp[openvino]'"
        ) from error


def check_family(config: Any) -> None:
    """ConfigError for a model that the engine cannot be given. config: Hugging Face's."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"engine=openvino reads models of type {', '.join(FAMILIES)}, and this one is {config.model_type}: take "
            "another model, or leave out engine"
        )
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default" or getattr(config, "sliding_window", None):
        raise ConfigError(
            "engine=openvino knows plain RoPE and no sliding window, and this model has "
            f"rope_type={rope.get('rope_type')} and sliding_window={getattr(config, 'sliding_window', None)}: take "
            "another model, or leave out engine"
        )


def write_gguf(model: Any, path: Path) -> None:
    """Write a Hugging Face model as a GGUF file: matrices in float16, vectors in float32, place holders for tokens.

    ConfigError as of `check_family`.
    """
    from gguf import GGUFWriter

    config = model.config
    check_family(config)
    writer, name = GGUFWriter(path, config.model_type), config.model_type
    writer.add_file_type(1)  # mostly float16
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    for key, value in {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": width,
        "attention.value_length": width,
    }.items():
        writer.add_uint32(f"{name}.{key}", value)
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{name}.rope.freq_base", config.rope_parameters["rope_theta"])
    _place_holders(writer, config.vocab_size)
    for known, weight in model.state_dict().items():
        if known == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name == "llama" and known.endswith(("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")):
            weight = _neighbouring(weight, heads if ".q_proj." in known else kv_heads)
        numbers = weight.detach().float().cpu().contiguous().numpy()
        writer.add_tensor(gguf_name(known), numbers.astype(np.float16) if numbers.ndim > 1 else numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _place_holders(writer: Any, count: int) -> None:
    """A vocabulary of `count` tokens that the engine accepts and nothing uses."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = ["<end>", "a", "b", "ab", *(f"<{number}>" for number in range(4, count))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (count - 1)])  # it cannot be compiled without a control token
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def gguf_name(known: str) -> str:
    """The GGUF name of a weight that Hugging Face calls `known`; ConfigError for one that the families do not have."""
    stem, _, kind = known.rpartition(".")
    place = ""
    if stem.startswith(f"{LAYERS}."):
        number, _, stem = stem.removeprefix(f"{LAYERS}.").partition(".")
        place = f"blk.{number}."
    names = [theirs for theirs, ours in LLAMA.items() if ours == stem]
    if not names:
        raise ConfigError(f"engine=openvino has no place for the weight {known}: take another model")
    return f"{place}{names[0]}.{kind}"


def _neighbouring(weight: Tensor, heads: int) -> Tensor:
    """A llama's query or key projection in llama.cpp's order: rows half a head apart become neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


@dataclass(frozen=True)
class Eviction:
    """The engine's CacheEvictionConfig: sizes in tokens, each a multiple of BLOCK.

    start: first tokens, never evicted; recent: newest ones; size: the most that is held, up to BLOCK - 1 more; mode:
    how scores are added up; window: last queries of the prompt that count, 0: all. crush: blocks that KVCrush keeps on
    top of size; anchor, seed: its own.
    """

    size: int
    start: int = 32
    recent: int = 128
    mode: Literal["sum", "norm_sum", "adaptive_rkv"] = "norm_sum"
    window: int = 8
    crush: int = 0
    anchor: Literal["random", "zeros", "ones", "mean", "alternating"] = "random"
    seed: int = 0

    def made(self) -> Any:
        """The engine's own object."""
        engine = genai()
        crush = engine.KVCrushConfig(self.crush, getattr(engine.KVCrushAnchorPointMode, self.anchor.upper()), self.seed)
        mode = getattr(engine.AggregationMode, self.mode.upper())
        return engine.CacheEvictionConfig(
            self.start, self.recent, self.size, mode, False, self.window, crush if self.crush else None
        )


@dataclass(frozen=True)
class OpenVINO:
    """Precisions of the engine; u8 is its own default for the cache, and 32 for activations.

    activations: channels of an activation that share a scale in 8 bits, where weights are compressed; 0: none are.
    """

    cache: Literal["f32", "bf16", "f16", "u8"] = "f32"
    inference: Literal["f32", "bf16"] = "f32"
    activations: Annotated[int, AtLeast(0)] = 0

    def __post_init__(self) -> None:
        check_fields(self)

    def properties(self) -> dict[str, str]:
        """The engine's own names and values."""
        return {
            "KV_CACHE_PRECISION": self.cache,
            "INFERENCE_PRECISION_HINT": self.inference,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(self.activations),
        }


@dataclass(frozen=True)
class EngineAnswer:
    """What the engine returned for one prompt.

    tokens, logprobs: greedy ones, the end token included; first_s, rest_s: seconds to the first token and after it;
    peak_blocks, blocks: blocks of its cache in use at most after a step, and after the last one but one.
    """

    tokens: list[int]
    logprobs: list[float]
    first_s: float
    rest_s: float
    peak_blocks: int
    blocks: int


class Engine:
    """A pipeline of OpenVINO GenAI on a CPU, with one precision and one eviction setting (None: full cache).

    gguf: the model's file; tokens: the most that one prompt and its answer have; threads: None for the engine's own
    choice. blocks: of its cache in all; layers: of the model. ConfigError where the wheel is absent.
    """

    def __init__(
        self,
        gguf: Path,
        tokens: int,
        eviction: Eviction | None = None,
        options: OpenVINO | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        engine = genai()
        scheduler = engine.SchedulerConfig()
        self.blocks = -(-tokens // BLOCK) + 2
        scheduler.num_kv_blocks = self.blocks
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = False  # a prompt is read whole, in one step
        scheduler.max_num_batched_tokens = max(tokens, 256)
        if eviction is not None:
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = eviction.made()
        properties = (options or OpenVINO()).properties()
        if threads is not None:
            properties["INFERENCE_NUM_THREADS"] = str(threads)
        tokenizer = engine.Tokenizer(str(gguf))
        self.pipeline = engine.ContinuousBatchingPipeline(str(gguf), tokenizer, scheduler, "CPU", **properties)
        self.layers = read_header(gguf).integer("block_count")
        self.count = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, as the engine counts them; 0 before the first answer."""
        return int(self.pipeline.get_metrics().kv_cache_size_in_bytes) // self.blocks

    def answer(self, ids: Sequence[int], new: int, ends: Collection[int] = (), least: int = 0) -> EngineAnswer:
        """Decode greedily up to `new` tokens, or an end token after `least` of them."""
        engine, tensor = genai(), import_module("openvino").Tensor
        settings = engine.GenerationConfig()
        settings.max_new_tokens, settings.min_new_tokens, settings.logprobs = new, least, 1
        settings.do_sample, settings.ignore_eos = False, not ends
        settings.stop_token_ids = set(ends)
        self.count += 1
        start, first, used = time.perf_counter(), None, list[int]()
        handle = self.pipeline.add_request(self.count, tensor(np.array([ids], dtype=np.int64)), settings)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            first = first or time.perf_counter()
            used.append(round(self.pipeline.get_metrics().cache_usage * self.blocks / 100))
        end = time.perf_counter()
        (output,) = handle.read_all()
        held = used[:-1] or used
        return EngineAnswer(
            [int(token) for token in output.generated_ids],
            [float(logprob) for logprob in output.generated_log_probs],
            (first or end) - start,
            end - (first or end),
            max(used),
            held[-1],
        )
