"""llama.cpp, the engine that most people run: its C API in the package xllamacpp, by ctypes, one prompt at a time.

The package's extension module exports the whole C API. Its structures are read up to the last field that is used here;
defaults that are known say whether they lie where they are looked for (`library`). A cache of keys or values in blocks
is turned by a Hadamard rotation first, where a head's size is a multiple of 64, unless `LlamaCpp.rotate` is off.

Source: ggml-org/llama.cpp as of xllamacpp 2026.10.11549, include/llama.h.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint8, c_uint32, c_void_p
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from kvexp.core.codecs import GGMLBlocks
from kvexp.generate.engine import EngineAnswer, log_softmax
from kvexp.hf.gguf import read_header
from kvexp.util.errors import CacheError, ConfigError, NotFinite
from kvexp.util.fields import check_fields
from kvexp.util.files import file_digest

PACKAGE, VERSION = "xllamacpp", "2026.10.11549"
NO_ROTATION = "LLAMA_ATTN_ROT_DISABLE"  # the library's environment variable
TURNED = 64  # channels of a head that are rotated together: a head's size must be a multiple
BLOCK = 32  # numbers of a head that share a scale
CacheType = Literal["f32", "f16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20}  # ggml_type
Places = NDArray[np.int64]
PLAIN = ("f32", "f16")  # types without blocks
READ = {"q8_0": 8, "q4_0": 4}  # types in blocks of which keys can be read back, and their bits
STATE = 0xAF143CD8  # what a saved sequence begins with
UNKNOWN_STATE = "llama.cpp saved its cache in another way than is known here, so keys cannot be read: leave out engine"
KEYS_APART = 0.7  # of a key's size, at most, between engine and transformers: in another order it is about 1.4


class _ModelParams(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("devices", "buffer_types")),
        *((name, c_int32) for name in ("gpu_layers", "split_mode", "load_mode", "lazy_mode", "main_gpu")),
        *((name, c_void_p) for name in ("tensor_split", "progress", "progress_data", "overrides")),
        *((name, c_bool) for name in ("vocab_only", "check_tensors", "extra_buffers", "no_host", "no_alloc")),
        ("room", c_uint8 * 128),
    ]


class _ContextParams(ctypes.Structure):
    _fields_ = [
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c_int32) for name in ("n_threads", "n_threads_batch", "kind", "rope", "pooling", "attention")),
        ("flash", c_int32),
        *((name, c_float) for name in ("rope_base", "rope_scale", "yarn_ext", "yarn_attn", "yarn_fast", "yarn_slow")),
        ("yarn_context", c_uint32),
        ("defragment", c_float),
        *((name, c_void_p) for name in ("callback", "callback_data")),
        *((name, c_int32) for name in ("type_k", "type_v")),
        ("room", c_uint8 * 256),  # fields behind these, of which there may be more in another version
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("count", c_int32),
        ("tokens", POINTER(c_int32)),
        ("embeddings", c_void_p),
        ("positions", POINTER(c_int32)),
        ("sequence_counts", POINTER(c_int32)),
        ("sequences", POINTER(POINTER(c_int32))),
        ("wanted", POINTER(c_int8)),
    ]


# Name -> result and arguments, of the functions that are called.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_log_set": (None, [c_void_p, c_void_p]),
    "llama_backend_init": (None, []),
    "llama_model_default_params": (_ModelParams, []),
    "llama_context_default_params": (_ContextParams, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, _ModelParams]),
    "llama_model_free": (None, [c_void_p]),
    "llama_init_from_model": (c_void_p, [c_void_p, _ContextParams]),
    "llama_free": (None, [c_void_p]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_memory_seq_add": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "llama_state_seq_get_size": (c_size_t, [c_void_p, c_int32]),
    "llama_state_seq_get_data": (c_size_t, [c_void_p, c_void_p, c_size_t, c_int32]),
    "llama_state_seq_set_data": (c_size_t, [c_void_p, c_void_p, c_size_t, c_int32]),
    "llama_decode": (c_int32, [c_void_p, _Batch]),
    "llama_get_logits_ith": (POINTER(c_float), [c_void_p, c_int32]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_vocab_is_eog": (c_bool, [c_void_p, c_int32]),
    "ggml_type_name": (c_char_p, [c_int32]),
    "ggml_row_size": (c_size_t, [c_int32, ctypes.c_int64]),
}
# Defaults of the context's structure that show where its fields lie.
_DEFAULTS: dict[str, Any] = {
    **{"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_threads": 4, "n_threads_batch": 4},
    **{"rope": -1, "pooling": -1, "attention": -1, "flash": -1, "yarn_ext": -1.0, "defragment": -1.0},
    **{"callback": None, "type_k": TYPES["f16"], "type_v": TYPES["f16"]},
}
LOG: deque[str] = deque(maxlen=400)  # last lines that the library wrote


def _write_log(level: int, text: bytes | None, _: Any, log: deque[str] = LOG) -> None:  # outlives the module's names
    log.append((text or b"").decode(errors="replace"))


_log = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(_write_log)  # which must live as long as the library


def _place() -> Path:
    """The package's library; ConfigError where the package is absent or of another version."""
    remedy = f"engine=llama_cpp needs {PACKAGE}=={VERSION}, and %s: pip install 'kvexp[llama_cpp]'"
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        raise ConfigError(remedy % "it is not installed here") from None
    if installed != VERSION:
        raise ConfigError(remedy % f"version {installed} is installed here")
    spec = find_spec(PACKAGE)
    folders = (spec and spec.submodule_search_locations) or []
    places = [place for folder in folders for place in Path(folder).glob(f"{PACKAGE}.*") if place.suffix != ".py"]
    if len(places) != 1:
        raise ConfigError(remedy % f"{len(places)} libraries are in its folder")
    return places[0]


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The loaded library; ConfigError where it is absent, of another version, or laid out in another way."""
    loaded = ctypes.CDLL(str(_place()))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    loaded.llama_log_set(ctypes.cast(_log, c_void_p), None)
    loaded.llama_backend_init()
    check_layout(loaded)
    return loaded


def check_layout(loaded: Any) -> None:
    """ConfigError where a default or a number of a type is not the known one: fields would be written elsewhere."""
    params = loaded.llama_context_default_params()
    wrong = [f"{name}={getattr(params, name)}" for name, known in _DEFAULTS.items() if getattr(params, name) != known]
    model = loaded.llama_model_default_params()
    wrong += [] if (model.gpu_layers, model.split_mode, model.extra_buffers) == (-1, 1, True) else ["model parameters"]
    wrong += [name for name, number in TYPES.items() if loaded.ggml_type_name(number) != name.encode()]
    if wrong:
        raise ConfigError(
            f"the library of {PACKAGE} is laid out in another way than that of {VERSION} ({', '.join(wrong)}): "
            "pip install --force-reinstall 'kvexp[llama_cpp]'"
        )


@dataclass(frozen=True)
class LlamaCpp:
    """Formats of the engine's cache. None is replaced when the object is made: cache_v: as cache_k; flash: on but where
    keys and values are both f32, of which it would not be exact. rotate: False where nothing is in blocks.

    weights: float32 ones that kvexp writes for the engine, or the model's own GGUF file as it is. shift: where there
    are too many tokens, one: those go that are too many; half: half of those that are not sinks, as llama-server does.
    """

    name: ClassVar[str] = "llama_cpp"
    gives_logits: ClassVar[bool] = True
    cache_k: CacheType = "f32"
    cache_v: CacheType | None = None
    flash: bool | None = None
    rotate: bool = True
    weights: Literal["f32", "file"] = "f32"
    shift: Literal["one", "half"] = "one"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.cache_v is None:
            object.__setattr__(self, "cache_v", self.cache_k)
        if self.flash is None:
            object.__setattr__(self, "flash", (self.cache_k, self.cache_v) != ("f32", "f32"))
        if self.cache_v not in PLAIN and not self.flash:
            raise ConfigError(
                f"cache_v={self.cache_v} needs flash attention, without which llama.cpp keeps values in f32 or f16 "
                "alone: leave out flash=false"
            )
        if not self.blocked:
            object.__setattr__(self, "rotate", False)

    @property
    def halves(self) -> str:
        """What sums in half precision, by the number of threads."""
        return "llama.cpp's flash attention" if self.flash else ""

    @property
    def blocked(self) -> bool:
        """Whether keys or values are stored in blocks that share a scale."""
        return self.cache_k not in PLAIN or self.cache_v not in PLAIN

    @property
    def types(self) -> tuple[int, int]:
        """Numbers of the types of keys and values."""
        return TYPES[self.cache_k], TYPES[str(self.cache_v)]

    @property
    def stored(self) -> LlamaCpp:
        """The settings that decide how a prompt is stored."""
        return replace(self, shift="one")

    def identity(self) -> dict[str, Any]:
        """What identifies the engine of a run: package, digest of its library, settings."""
        return {"name": f"{PACKAGE}=={VERSION}", "library": file_digest(_place()), **asdict(self)}

    def reference(self) -> LlamaCpp:
        """Settings of the full cache that runs are measured from: f32, flash attention off, the same weights."""
        return LlamaCpp(weights=self.weights)


@dataclass(frozen=True)
class Eviction:
    """What goes before a token is read.

    kept: prompt's length -> tokens that stay at most. dropped: prompt's length, the positions in the text of the
    tokens that are held, ascending, and what reads their keys (`LlamaEngine.keys`) -> places among these of those that
    go, ascending. renumbered: survivors get the positions 0, 1, 2, ... reads_keys: whether it looks at keys.
    """

    kept: Callable[[int], int]
    dropped: Callable[[int, Places, Callable[[], tuple[Places, Tensor]]], Places]
    renumbered: bool
    reads_keys: bool = False


class Weights:
    """A GGUF file's model, as the engine holds it. ConfigError where it cannot load it."""

    def __init__(self, gguf: Path) -> None:
        self.library, self.header = library(), read_header(gguf)
        params = self.library.llama_model_default_params()
        params.gpu_layers = 0
        self._context: Context | None = None
        self.checked = set[LlamaCpp]()  # settings of whose cache keys were read and compared (`LlamaEngine.check_keys`)
        self.pointer = self.library.llama_model_load_from_file(str(gguf).encode(), params)
        if not self.pointer:
            raise ConfigError(f"engine=llama_cpp cannot load {gguf}: {''.join(list(LOG)[-3:]).strip()}")
        self.tokens = self.library.llama_model_get_vocab(self.pointer)
        self.vocabulary = self.library.llama_vocab_n_tokens(self.tokens)

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer by the file's tokenizer."""
        is_end = self.library.llama_vocab_is_eog
        return frozenset(token for token in range(self.vocabulary) if is_end(self.tokens, token))

    def context(self, options: LlamaCpp, threads: int, tokens: int) -> Context:
        """A context of at least so many tokens: the last one, where it stores its cache so, else a new one."""
        known = self._context
        if known is None or (known.options, known.threads) != (options.stored, threads) or known.tokens < tokens:
            self._close()
            self._context = known = Context(self, options.stored, threads, tokens)
        return known

    def _close(self) -> None:
        if self._context is not None:
            self._context.close()
        self._context = None

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._close()
            self.library.llama_model_free(self.pointer)


class Context:
    """A cache of the engine that holds up to `tokens` tokens of one prompt and what follows.

    The prompt read last is kept as it was stored, so that runs that store it alike read it once. held: positions in the
    text of the tokens that the cache holds; peak: most of them so far; seconds: reading the prompt took.
    """

    def __init__(self, weights: Weights, options: LlamaCpp, threads: int, tokens: int) -> None:
        self.library, self.vocabulary = weights.library, weights.vocabulary
        self.options, self.threads, self.tokens = options, threads, tokens
        params = self.library.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = tokens, threads, threads
        params.flash, (params.type_k, params.type_v) = int(bool(options.flash)), options.types
        before = os.environ.pop(NO_ROTATION, None)
        try:
            if not options.rotate:
                os.environ[NO_ROTATION] = "1"
            self.pointer = self.library.llama_init_from_model(weights.pointer, params)
        finally:
            os.environ.pop(NO_ROTATION, None)
            if before is not None:
                os.environ[NO_ROTATION] = before
        if not self.pointer:
            raise CacheError(f"llama.cpp made no context of {tokens} tokens: {''.join(list(LOG)[-3:]).strip()}")
        self.memory, self.most = self.library.llama_get_memory(self.pointer), params.n_batch
        self.prompt: tuple[list[int], NDArray[np.float32], Any] | None = None  # ids, logits behind them, the cache
        self.seconds = 0.0

    def close(self) -> None:
        """Free the context."""
        self.library.llama_free(self.pointer)

    def begin(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits [V] behind a prompt, which alone is held then."""
        self._remove(-1, -1)
        self.held, self.seen, self.next, self.peak = np.arange(0), 0, 0, 0
        if self.prompt is not None and self.prompt[0] == list(ids):
            _, logits, stored = self.prompt
            self._count(len(ids))
            self._copy(self.library.llama_state_seq_set_data, stored)
        else:
            self.prompt, start = None, time.perf_counter()
            logits = self.read(ids)
            self.seconds = time.perf_counter() - start
            self.prompt = list(ids), logits, self._saved()
        return logits

    def _saved(self) -> Any:
        """The bytes that hold the tokens' cells, keys and values."""
        stored = (c_uint8 * self.library.llama_state_seq_get_size(self.pointer, 0))()
        self._copy(self.library.llama_state_seq_get_data, stored)
        return stored

    def _copy(self, copy: Callable[..., int], stored: Any) -> None:
        if (done := copy(self.pointer, stored, len(stored), 0)) != len(stored):
            raise CacheError(f"llama.cpp copied {done} of the {len(stored)} bytes of its cache")

    @property
    def positions(self) -> Places:
        """Positions in the engine of the tokens that are held."""
        return np.arange(self.next) if self.next == len(self.held) else self.held

    def stored_keys(self, layers: int, heads: int, row: int, turn: int) -> NDArray[Any]:
        """Keys [L, S, H, n] of the tokens that are held, as the cache stores them: numbers, or in blocks bytes.

        row: bytes of a token in a layer; turn: channels that are rotated together, 0: none. A saved sequence is words
        of 32 bits: STATE, its number, streams, and how many cells there are; each cell's position, number of sequences,
        and sequence, in any order; whether values are transposed, layers, and channels that are rotated together of
        keys and of values; then each layer's type, bytes of a row, and rows of keys; values come last. CacheError where
        it is not so. Source: `llama_kv_cache::state_write` (src/llama-kv-cache.cpp), and the bytes that it writes.
        """
        count, state, kind = len(self.held), self._saved(), self.options.cache_k
        number = np.dtype({"f32": "<f4", "f16": "<f2"}.get(kind, "u1"))
        keys = (count, heads, row // heads // number.itemsize)
        layer = np.dtype([("type", "<i4"), ("row", "<u8"), ("keys", number, keys)])
        start = 4 * (4 + 3 * count + 4)
        if len(state) < start + layers * layer.itemsize:
            raise CacheError(UNKNOWN_STATE)
        words, stored = np.frombuffer(state, "<u4", start // 4), np.frombuffer(state, layer, layers, start)
        cells = words[4:-4].reshape(count, 3)
        order = cells[:, 0].argsort()
        if not (
            [*words[:4], *words[-3:-1]] == [STATE, 0, 1, count, layers, turn]
            and np.array_equal(cells[order, 0], self.positions)
            and (cells[:, 1:] == (1, 0)).all()
            and (stored["type"] == TYPES[kind]).all()
            and (stored["row"] == row).all()
        ):
            raise CacheError(UNKNOWN_STATE)
        return np.asarray(stored["keys"][:, order])

    def read(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits [V] behind the tokens that come next."""
        for first in range(0, len(tokens), self.most):
            now = tokens[first : first + self.most]
            count, sequence = len(now), c_int32(0)
            batch = _Batch(
                count,
                (c_int32 * count)(*now),
                None,
                (c_int32 * count)(*range(self.next, self.next + count)),
                (c_int32 * count)(*[1] * count),
                (POINTER(c_int32) * count)(*[ctypes.pointer(sequence)] * count),
                (c_int8 * count)(*[0] * (count - 1), 1),
            )
            if (code := self.library.llama_decode(self.pointer, batch)) != 0:
                raise CacheError(f"llama.cpp could not read {count} tokens (code {code})")
            self._count(count)
        row = self.library.llama_get_logits_ith(self.pointer, -1)
        logits = np.ctypeslib.as_array(row, (self.vocabulary,)).copy()
        if not np.isfinite(logits).all():
            raise NotFinite("llama.cpp gave a logit that is not finite")
        return logits

    def _count(self, more: int) -> None:
        """Note that so many more tokens are held."""
        self.held = np.append(self.held, np.arange(self.seen, self.seen + more))
        self.seen, self.next, self.peak = self.seen + more, self.next + more, max(self.peak, len(self.held))

    def drop(self, gone: Places, *, renumbered: bool) -> None:
        """Remove the tokens at these places of `held`; renumbered: others get the positions 0, 1, 2, ..."""
        places = self.positions
        for neighbours in reversed(np.split(gone, np.flatnonzero(np.diff(places[gone]) != 1) + 1)):
            first, end = int(places[neighbours[0]]), int(places[neighbours[-1]]) + 1
            self._remove(first, end)
            if renumbered:
                self.library.llama_memory_seq_add(self.memory, 0, end, self.next, first - end)
                self.next -= end - first
        self.held = np.delete(self.held, gone)

    def _remove(self, first: int, end: int) -> None:
        if not self.library.llama_memory_seq_rm(self.memory, 0, first, end):
            raise CacheError(f"llama.cpp did not remove positions {first} to {end - 1}")


class LlamaEngine:
    """llama.cpp on a CPU with one setting of its cache; eviction: None for the full cache; threads: that it uses.

    layers: of the model; block_bytes: of one token in all layers.
    """

    block = 1

    def __init__(self, weights: Weights, options: LlamaCpp, eviction: Eviction | None = None, threads: int = 1) -> None:
        self.weights, self.options, self.eviction, self.threads = weights, options, eviction, threads
        header = weights.header
        self.layers, self.width = header.integer("block_count"), header.head_size
        self.heads = header.integer("attention.head_count_kv", header.integer("attention.head_count"))
        self.rows = [weights.library.ggml_row_size(kind, self.heads * self.width) for kind in options.types]
        self.block_bytes = self.layers * sum(self.rows)

    def first_eviction(self, prompt: int) -> int | None:
        """The step that first evicts behind a prompt of so many tokens, 0: its end; None for the full cache."""
        return None if self.eviction is None else max(0, self.eviction.kept(prompt) + 1 - prompt)

    def answer(self, ids: Sequence[int], new: int, ends: Collection[int] = (), least: int = 0) -> EngineAnswer:
        """Decode greedily up to `new` tokens, or an end token after `least` of them."""
        context = self.weights.context(self.options, self.threads, len(ids) + new)
        rows, tokens, logprobs = [context.begin(ids)], list[int](), list[float]()
        start = time.perf_counter()
        while True:
            open_ends = list(ends) if len(tokens) < least else []
            allowed = rows[-1].copy()
            allowed[open_ends] = -np.inf
            tokens.append(int(allowed.argmax()))
            logprobs.append(float(log_softmax(allowed)[tokens[-1]]))
            if len(tokens) == new or tokens[-1] in ends:
                break
            rows.append(self._step(context, len(ids), tokens[-1]))
        seconds = time.perf_counter() - start
        self._evict(context, len(ids))
        logits = np.stack(rows)
        return EngineAnswer(tokens, logprobs, context.seconds, seconds, context.peak, len(context.held), logits)

    def logits(self, ids: Sequence[int], text: Sequence[int]) -> NDArray[np.float32]:
        """Logits [N, V] that predict each of the N tokens of a text behind a prompt."""
        context = self.weights.context(self.options, self.threads, len(ids) + len(text))
        return np.stack([context.begin(ids), *(self._step(context, len(ids), token) for token in text[:-1])])

    def _step(self, context: Context, prompt: int, token: int) -> NDArray[np.float32]:
        """Logits [V] behind one more token, before which room is made for it; prompt: its tokens."""
        self._evict(context, prompt)
        return context.read([token])

    def _evict(self, context: Context, prompt: int) -> None:
        if self.eviction is not None:
            gone = self.eviction.dropped(prompt, context.held, partial(self.keys, context))
            if len(gone):
                context.drop(gone, renumbered=self.eviction.renumbered)

    def keys(self, context: Context) -> tuple[Places, Tensor]:
        """Positions in the engine [S] of the tokens that a context holds, and their keys there [L, H, S, D] float32.

        Channels are in transformers' order: llama.cpp has those that RoPE turns together side by side in a llama.
        CacheError where keys cannot be read.
        """
        bits, turned = READ.get(self.options.cache_k), self.options.rotate and self.width % TURNED == 0
        turn = self.width & -self.width if bits and turned else 0
        stored = torch.from_numpy(context.stored_keys(self.layers, self.heads, self.rows[0], turn))
        if bits:
            stored = GGMLBlocks(bits, turn=-1 if turn else 0).decode(stored, self.width)
        if self.weights.header.architecture == "llama":
            stored = stored.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return context.positions, stored.float().transpose(1, 2)

    @torch.no_grad()
    def check_keys(self, model: Any) -> None:
        """CacheError where keys that are read are not the model's: of a few tokens, once for weights and settings."""
        if self.options.stored in self.weights.checked:
            return
        ids = list(range(8))
        context = self.weights.context(self.options, self.threads, len(ids))
        context.begin(ids)
        layers = model(torch.tensor([ids]), past_key_values=DynamicCache()).past_key_values.layers
        for layer, (keys, known) in enumerate(zip(self.keys(context)[1], layers, strict=True)):
            if not (apart := float((keys - known.keys[0]).norm() / known.keys.norm())) < KEYS_APART:
                raise CacheError(
                    f"keys of layer {layer} that are read from llama.cpp are {apart:.2g} of their size from the "
                    "model's, so it stores them in another way than is known here: leave out engine"
                )
        self.weights.checked.add(self.options.stored)
