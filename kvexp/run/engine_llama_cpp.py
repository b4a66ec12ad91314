"""engine=llama_cpp: a run's settings as llama.cpp's, and what it cannot be asked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvexp.core import EvictionContext
from kvexp.core.budget import Cadence, PromptSizes
from kvexp.core.budget_resolution import LayerSlots, resolve_layer_slots
from kvexp.core.ranking import among_heads, float_priority
from kvexp.core.slots import Slots
from kvexp.generate.engine import check_family, model_file
from kvexp.generate.llama_cpp import (
    BLOCK,
    PLAIN,
    READ,
    TURNED,
    VERSION,
    Eviction,
    LlamaCpp,
    LlamaEngine,
    Places,
    Weights,
    library,
)
from kvexp.hf.fetch import is_gguf
from kvexp.hf.traits import head_dim, rope_of
from kvexp.methods import Full, Random, StreamingLLM, TriAttention, Window
from kvexp.run.model_spec import config_of_spec, load, model_digest
from kvexp.util.errors import CacheError, ConfigError, Rule
from kvexp.util.files import path_of
from kvexp.util.output import say, tells_errors

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvexp.core import Budget, CacheConfig, RoPE
    from kvexp.hf.load import Model
    from kvexp.run.settings import Settings


def _uneven(budget: Budget) -> bool:
    return budget.heads not in ("uniform", "union") or budget.threshold is not None or budget.splits_layers


def _shifts(c: Settings) -> bool:
    return c.method.is_window and c.cache.renumbered


def _unturned(c: Settings) -> bool:
    """Whether keys are in blocks that are not rotated, which the library cannot move."""
    options = c.engine
    assert isinstance(options, LlamaCpp)
    return options.cache_k not in PLAIN and not (options.rotate and head_dim(config_of_spec(c.model)) % TURNED == 0)


def _one_set(c: Settings) -> bool:
    """Whether the method is TriAttention with one set of positions for all layers and heads."""
    pruning = c.method.pruning if isinstance(c.method, TriAttention) else None
    return pruning == "union" or (pruning == "per_head" and c.cache.is_union)


REFUSED: tuple[Rule[Settings], ...] = (
    (
        lambda c: not isinstance(c.method, Full | StreamingLLM | Window | Random | TriAttention),
        "engine=llama_cpp can only drop the same positions in all layers and heads, and shows keys but no attention "
        "weights (its callback cb_eval might, untested), so method={c.method.name} cannot choose there: set "
        "method=full, streaming_llm, window, random or triattention, or leave out engine",
    ),
    (
        lambda c: isinstance(c.method, TriAttention) and not _one_set(c),
        "engine=llama_cpp drops the same positions in all layers and heads: set method.pruning=union, got "
        "{c.method.pruning} (budget.heads=union alone is a set for each layer)",
    ),
    (
        lambda c: isinstance(c.engine, LlamaCpp) and _one_set(c) and c.engine.cache_k not in (*PLAIN, *READ),
        "method={c.method.name} reads keys, which kvexp cannot in engine.cache_k={c.engine.cache_k}: set "
        f"{', '.join((*PLAIN, *READ))}",
    ),
    (
        lambda c: isinstance(c.method, Random) and c.method.per != "model",
        "engine=llama_cpp drops the same positions in all layers and heads: set method.per=model, got {c.method.per}",
    ),
    (
        lambda c: isinstance(m := c.method, Random | TriAttention) and m.protect_recent < 2 and not c.cache.renumbered,
        "engine=llama_cpp reads a token only behind the one before it, which method={c.method.name} may drop: set "
        "method.protect_recent=2 or more, or cache.positions=renumbered",
    ),
    (
        lambda c: isinstance(c.engine, LlamaCpp) and c.engine.shift == "half" and not _shifts(c),
        "engine.shift=half is llama-server's context shift, of the oldest tokens and with the others moved: set "
        "method=streaming_llm (or window) and cache.positions=renumbered, or leave it at one",
    ),
    (
        lambda c: c.method.evicts and c.cache.renumbered and _unturned(c),
        f"llama.cpp {VERSION} moves keys in blocks only where they are rotated, for which heads are of a multiple of "
        f"{TURNED}, and else ends the process: set cache.positions=original, or engine.cache_k=f16",
    ),
    (
        lambda c: c.budget is not None and _uneven(c.budget),
        "engine=llama_cpp drops the same positions in all layers and heads: give kv_ratio or budget.tokens, set "
        "budget.heads=uniform or union, and leave budget.layers alone",
    ),
    (
        lambda c: c.budget is not None and (c.cache.cadence != Cadence() or c.cache.bounded_chunk is not None),
        "engine=llama_cpp evicts at the end of the prompt and at every step: leave out cache.evict_every, "
        "cache.evict_at_prefill and prefill=bounded",
    ),
    (
        lambda c: not c.cache.select.plain,
        "engine=llama_cpp drops tokens one by one, as the method says: leave out select",
    ),
    (
        lambda c: isinstance(c.engine, LlamaCpp) and c.engine.weights == "file" and _file(c) is None,
        "engine.weights=file gives the engine the GGUF file that model.path names, and it names none: set model=local "
        "model.path=FILE.gguf, or leave it at f32",
    ),
    (
        lambda c: isinstance(c.engine, LlamaCpp) and c.engine.blocked and head_dim(config_of_spec(c.model)) % BLOCK,
        f"engine.cache_k and engine.cache_v in blocks of {BLOCK} numbers need heads of a multiple of {BLOCK}, and this "
        "model's have another size: set f32 or f16",
    ),
)


def _file(settings: Settings) -> Path | None:
    """The GGUF file that model.path names; None for other models."""
    path = str(settings.model.path)
    return path_of(path, "model.path") if is_gguf(path) else None


def _joined(
    cache: CacheConfig, allowed: LayerSlots, rope: RoPE | None, held: Places, positions: Places, keys: Tensor
) -> NDArray[np.float32]:
    """The one priority [S] of tokens in all layers and heads, which the method makes of their keys [L, H, S, D].

    held: their positions in the text; positions: those at which their keys stand.
    """
    method, calibration = cache.method, cache.calibration
    assert isinstance(method, TriAttention) and calibration is not None
    places = torch.from_numpy(held).expand(1, keys.shape[1], -1)
    moved, newest = places - torch.from_numpy(positions), places[:, 0, -1]
    priorities = []
    for layer, states in enumerate(keys[:, None]):
        states = states if rope is None else rope.rotate_by(states, moved)
        slots = Slots(states, states, places, torch.zeros(places.shape))
        statistics = calibration.layer(layer)
        limits = allowed.slots_t, allowed.recent_t, newest, torch.zeros(1, dtype=torch.int64)
        ctx = EvictionContext(slots, layer, *limits, calibration=statistics, rope=rope, layers=len(keys))
        priorities.append(among_heads(cache, allowed, float_priority(method, ctx), places))
    return method.join_layers(torch.stack(priorities))[0, 0, 0].numpy()


def eviction_of(settings: Settings, seed: int, rope: RoPE | None = None) -> Eviction | None:
    """What the run's method keeps of an example with this seed; None for the full cache. rope: the model's."""
    from kvexp.run.settings import batch_cache

    method, options = settings.method, settings.engine
    assert isinstance(options, LlamaCpp)
    if not method.evicts:
        return None

    @functools.cache
    def allowed(prompt: int) -> LayerSlots:
        sizes = PromptSizes([prompt], prompt, settings.decoding.max_new_tokens, 1)
        return resolve_layer_slots(batch_cache(settings, [prompt]), sizes, 0, torch.device("cpu"))

    def dropped(prompt: int, held: Places, keys: Callable[[], tuple[Places, Tensor]]) -> Places:
        (kept,), (recent,) = allowed(prompt).kept, allowed(prompt).recent
        if (many := len(held) - kept) <= 0:
            return held[:0]
        order: NDArray[Any] = held
        free = (held >= method.sinks) & (held <= held[-1] - recent)
        if isinstance(method, Random):
            newest = torch.from_numpy(held[-1:]) if method.redraw else None
            draws = method.draws(torch.from_numpy(held)[None, None], torch.tensor([seed]), 0, 1, newest)
            order = draws[0, 0].numpy()
        if isinstance(method, TriAttention):
            order = _joined(settings.cache, allowed(prompt), rope, held, *keys())
        if options.shift == "half":
            many = max(many, free.sum() // 2)
        return np.sort(np.argsort(np.where(free, order, np.inf), kind="stable")[:many])

    reads_keys = isinstance(method, TriAttention)
    return Eviction(lambda prompt: allowed(prompt).kept[0], dropped, settings.cache.renumbered, reads_keys)


@functools.lru_cache(maxsize=1)
def _loaded(gguf: Path) -> Weights:
    return Weights(gguf)


class LlamaCppDriver:
    """llama.cpp for runs."""

    options, refused = LlamaCpp, REFUSED

    @staticmethod
    def check_installed() -> None:
        """ConfigError where the package is absent, of another version, or laid out in another way."""
        library()

    @staticmethod
    def engine(settings: Settings, model: Model, seed: int) -> LlamaEngine:
        """The engine with the model in float32 or its own file; the weights are kept until others are asked for."""
        options = settings.engine
        assert isinstance(options, LlamaCpp)
        gguf = _file(settings) if options.weights == "file" else None
        if gguf is None:
            gguf = model_file(model, model_digest(settings.model), np.float32)
        eviction = eviction_of(settings, seed, rope_of(model))
        engine = LlamaEngine(_loaded(gguf), options, eviction, torch.get_num_threads())
        if eviction is not None and eviction.reads_keys:
            engine.check_keys(model)
        return engine


@tells_errors(ConfigError, CacheError)
def fetch_main(words: Sequence[str]) -> int:
    """`kvexp fetch llama_cpp model=NAME`: write the float32 GGUF file that runs would; 2 for what cannot be done."""
    from kvexp.run.jobs import composed_model

    if words[:1] in (["-h"], ["--help"]):
        say("usage: kvexp fetch llama_cpp [model=NAME]\n\nWrite the float32 file that engine=llama_cpp reads, once.")
        raise SystemExit(0)
    library()
    name, spec = composed_model(words)
    check_family(config_of_spec(spec))
    gguf = model_file(load(spec)[0], model_digest(spec), np.float32)
    say(f"{name} for engine=llama_cpp: {gguf}, {gguf.stat().st_size / 1e6:.0f} MB")
    return 0
