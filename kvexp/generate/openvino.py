"""OpenVINO GenAI, an engine that evicts: its ContinuousBatchingPipeline on a CPU, fed token ids, one prompt at a time.

The engine reads a model from a GGUF file. Its reader takes Q4_1 as if every block's minimum were a whole number of
steps, which changes the weights; what it reads of float16 is exact. So a model is written as float16 for it
(`kvexp.generate.engine`).

Source: openvinotoolkit/openvino.genai 2026.4.1.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from kvexp.generate.engine import EngineAnswer
from kvexp.hf.gguf import read_header
from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast, check_fields

BLOCK = 32  # tokens of a block of the engine's cache on a CPU
WHEEL = "openvino-genai==2026.4.1.0"


def genai() -> Any:
    """The module openvino_genai; ConfigError where it is not installed."""
    try:
        return import_module("openvino_genai")
    except ImportError as error:
        raise ConfigError(
            f"engine=openvino needs {WHEEL}, which cannot be imported here ({error}): pip install 'kvexp[openvino]'"
        ) from error


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

    name: ClassVar[str] = "openvino"
    gives_logits: ClassVar[bool] = False
    halves: ClassVar[str] = ""
    cache: Literal["f32", "bf16", "f16", "u8"] = "f32"
    inference: Literal["f32", "bf16"] = "f32"
    activations: Annotated[int, AtLeast(0)] = 0

    def __post_init__(self) -> None:
        check_fields(self)

    def identity(self) -> dict[str, Any]:
        """What identifies the engine of a run."""
        return {"name": WHEEL, **asdict(self)}

    def reference(self) -> OpenVINO:
        """The setting of the full cache that runs are measured from: each precision is its own."""
        return self

    def properties(self) -> dict[str, str]:
        """The engine's own names and values."""
        return {
            "KV_CACHE_PRECISION": self.cache,
            "INFERENCE_PRECISION_HINT": self.inference,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(self.activations),
        }


class Engine:
    """A pipeline of OpenVINO GenAI on a CPU, with one precision and one eviction setting (None: full cache).

    gguf: the model's file; tokens: the most that one prompt and its answer have; threads: None for the engine's own
    choice. blocks: of its cache in all; layers: of the model. ConfigError where the wheel is absent.
    """

    block = BLOCK

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
        self.eviction = eviction
        self.count = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, as the engine counts them; 0 before the first answer."""
        return int(self.pipeline.get_metrics().kv_cache_size_in_bytes) // self.blocks

    def first_eviction(self, prompt: int) -> int | None:
        """The step that first evicts behind a prompt of so many tokens; None for the full cache."""
        return None if self.eviction is None else max(1, self.eviction.size + BLOCK - prompt)

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
