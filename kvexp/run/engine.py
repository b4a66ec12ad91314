"""An engine in place of kvexp's own model and cache: what it can be asked, and its answers as a run records them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvexp.generate.inputs import EvictionStats, eos_ids
from kvexp.generate.openvino import BLOCK, Engine, EngineAnswer, Eviction, OpenVINO, check_family, genai, write_gguf
from kvexp.hf.fetch import folder_lock, put_in_place
from kvexp.methods import OpenVINO as Policy
from kvexp.run.build import made
from kvexp.run.labels import generates
from kvexp.run.model_spec import config_of_spec, generation_config_of, max_positions, model_digest
from kvexp.util.errors import ConfigError, Rule, refuse
from kvexp.util.fields import typed
from kvexp.util.files import cache_folder

if TYPE_CHECKING:
    from kvexp.hf.load import Model, Tokenizer
    from kvexp.run.prompts import Items
    from kvexp.run.settings import Settings

FILE_VERSION = 1  # of `write_gguf`


def engine_of(config: Mapping[str, Any]) -> OpenVINO | None:
    """The option of `engine` of a resolved configuration; None for kvexp itself, and in older ones."""
    node = dict(typed(config.get("engine", {}), dict, "engine"))
    if typed(node.pop("name", None), Literal["openvino"] | None, "engine.name") is None:
        if node:
            raise ConfigError(f"engine=none has no {', '.join(map(str, node))}; choose engine=openvino")
        return None
    options: OpenVINO = made(OpenVINO, node, "engine")
    return options


def _policy(c: Settings) -> Policy | None:
    return c.method if isinstance(c.method, Policy) else None


REFUSED: tuple[Rule[Settings], ...] = (
    (
        lambda c: c.method.name not in ("full", "openvino"),
        "engine=openvino evicts by a rule of its own: set method=openvino or method=full, got method={c.method.name}",
    ),
    (
        lambda c: c.budget is not None and c.budget.tokens is None,
        "engine=openvino holds one number of tokens whatever the prompt: set budget=tokens budget.tokens=N in place of "
        "a ratio",
    ),
    (
        lambda c: c.budget and (c.budget.tokens or 0) % BLOCK,
        f"engine=openvino counts in blocks of {BLOCK} tokens: budget.tokens must be a multiple of {BLOCK}, got "
        "{c.budget.tokens}",
    ),
    (
        lambda c: (policy := _policy(c)) and policy.block != BLOCK,
        f"engine=openvino has blocks of {BLOCK} tokens on a CPU: set method.block={BLOCK}, got {{c.method.block}}",
    ),
    (
        lambda c: (policy := _policy(c)) and policy.aggregation == "adaptive_rkv",
        "method.aggregation=adaptive_rkv does not run in engine=openvino 2026.4.1 on a CPU, which never computes the "
        "diversity that it asks for: set sum or norm_sum, or leave out engine",
    ),
    (
        lambda c: c.budget and not c.budget.counts_self,
        "engine=openvino has no budget.counts_self=false: leave it out",
    ),
    (
        lambda c: not generates(c) or c.task.name == "lm_eval" or c.task.has_turns or c.task.needs_nll,
        "engine=openvino gives greedy answers and no log-probabilities of given texts, which task={c.task.name} asks "
        "for: take a task that generates one answer, or leave out engine",
    ),
    (
        lambda c: getattr(c.task, "question", None) == "after_eviction",
        "engine=openvino reads a prompt whole, its question too: set task.question=in_prompt",
    ),
    (
        lambda c: (d := c.decoding).sample or d.num_beams > 1 or d.stop_strings or d.prefill_chunk is not None,
        "engine=openvino is asked for greedy answers from whole prompts: set generation=greedy, and leave "
        "generation.stop_strings and generation.prefill_chunk alone",
    ),
    (
        lambda c: c.model.dtype != "float32" or c.model.weights is not None or c.model.resolved_device() != "cpu",
        "engine=openvino gets float16 weights of a model that is loaded in float32 on a CPU: set model.dtype=float32 "
        "model.weights=null model.device=cpu",
    ),
    (
        lambda c: c.cache.renumbered or c.cache.quantization is not None or c.cache.beyond_context or c.cache.keep,
        "engine=openvino keeps original positions and has no cache.bits (engine.cache=u8 is its own), "
        "cache.beyond_context or keep: leave them out",
    ),
)


def check_engine(settings: Settings) -> None:
    """ConfigError for what the engine cannot be asked; neither weights nor the engine are loaded."""
    if settings.engine is None:
        return
    refuse(settings, REFUSED)
    check_family(config_of_spec(settings.model))
    generation = generation_config_of(settings.model)
    if (penalty := getattr(generation, "repetition_penalty", None)) not in (None, 1.0):
        raise ConfigError(
            f"the model's generation_config.json sets repetition_penalty={penalty}, which engine=openvino is not asked "
            "for: take another model, or leave out engine"
        )


def check_installed(settings: Settings) -> None:
    """ConfigError where the run's engine is not installed."""
    if settings.engine is not None:
        genai()


def eviction_of(settings: Settings) -> Eviction | None:
    """The engine's own setting for the run's method and budget; None for its full cache."""
    policy = _policy(settings)
    if policy is None:
        return None
    assert settings.budget is not None and settings.budget.tokens is not None
    return Eviction(
        settings.budget.tokens,
        policy.start_size,
        policy.recent_size,
        policy.aggregation,
        policy.window,
        policy.crush,
        policy.anchor,
        policy.crush_seed,
    )


def gguf_of(settings: Settings, model: Model) -> Path:
    """The model's GGUF file for the engine, written into the cache unless it is there."""
    name = hashlib.sha256(f"{FILE_VERSION} {model_digest(settings.model)}".encode()).hexdigest()[:32]
    folder = cache_folder() / "engines" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, "writing a model for OpenVINO GenAI"):
            if not folder.exists():
                put_in_place(folder, lambda place: write_gguf(model, place / "model.gguf"))
    return folder / "model.gguf"


@functools.lru_cache(maxsize=1)
def _loaded(gguf: Path, tokens: int, eviction: Eviction | None, options: OpenVINO, threads: int) -> Engine:
    return Engine(gguf, tokens, eviction, options, threads=threads)


def engine_answers(settings: Settings, model: Model, tokenizer: Tokenizer, batch: Items) -> dict[int, Any]:
    """Index -> `ModelOutput`, of prompts that the run's engine answers one after the other."""
    import torch

    from kvexp.run.answers import ModelOutput

    assert settings.engine is not None
    eviction, decoding, tokens = eviction_of(settings), settings.decoding, max_positions(settings.model)
    engine = _loaded(gguf_of(settings, model), tokens, eviction, settings.engine, torch.get_num_threads())
    ends, answers = eos_ids(model, decoding.eos), dict[int, Any]()
    for index, prompt in batch:
        answer = engine.answer(prompt.ids, decoding.max_new_tokens, ends, decoding.min_new_tokens)
        stopped = answer.tokens[-1] in ends
        answers[index] = ModelOutput(
            tokenizer.decode(answer.tokens, skip_special_tokens=True),
            len(answer.tokens),
            vars(_receipt(engine, answer, eviction, len(prompt.ids))),
            {"ttft": answer.first_s, "tt2t": None, "tpot": answer.rest_s / max(1, len(answer.tokens) - 1)},
            finish_reason="stop" if stopped else "length",
            stop_reason=tokenizer.decode(answer.tokens[-1:]) if stopped else None,
            tokens=answer.tokens,
            info={"output_logprobs": answer.logprobs},
        )
    return answers


def _receipt(engine: Engine, answer: EngineAnswer, eviction: Eviction | None, prompt: int) -> EvictionStats:
    """What the engine says of its cache; a slot is one of a block that is in use, which all layers have as many of."""
    first = None if eviction is None else max(1, eviction.size + BLOCK - prompt)
    return EvictionStats(
        slots=float(answer.blocks * BLOCK),
        slots_by_layer=[float(answer.blocks * BLOCK)] * engine.layers,
        kv_bytes=answer.blocks * engine.block_bytes,
        peak_kv_bytes=answer.peak_blocks * engine.block_bytes,
        first_eviction_step=first if first is not None and first < len(answer.tokens) else None,
        kept_digest="",
        attention_kept=None,
        batch_size=1,
    )
