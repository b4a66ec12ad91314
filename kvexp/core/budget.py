"""What is asked of a cache: a budget in slots, shares or bytes. The one place where a ratio becomes an integer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from kvexp.core.quantized import EngineQuantization, Quantization, SlotBytes
from kvexp.util.errors import ConfigError, Rule, refuse
from kvexp.util.fields import AtLeast, Range, check_fields

STREAM_SINKS, STREAM_RECENT = 128, 256  # slots of a streaming head, as in kvpress
THRESHOLD_RECENT = 128
DEFAULT_FLOORS = {"adaptive": 0.2, "global": 0.0}
LONGEST_WAIT = 1 << 16  # decode steps between two evictions


def floor_share(ratio: float, count: int) -> int:
    """ratio * count, rounded down: the one way in which a share becomes a number of slots.

    1e-9 is added first, because 0.29 * 100 is 28.999999999999996 in binary fractions and means 29.
    """
    return math.floor(ratio * count + 1e-9)


@dataclass(frozen=True)
class PromptSizes:
    """What is known of a batch of prompts before the model runs, for which budgets are resolved.

    lengths: real tokens of each; padded: columns, padding included; new_tokens: to come after them, None: not known;
    layers: whose slots are evicted. windows: tokens of each layer's sliding window, of which its budget then is, None
    for a layer without; empty: windows make no difference.
    """

    lengths: Sequence[int]
    padded: int
    new_tokens: int | None
    layers: int
    windows: Sequence[int | None] = ()

    def held(self, tokens: int, layer: int) -> int:
        """How many of so many tokens a layer holds that evicts nothing."""
        window = self.windows[layer] if self.windows else None
        return tokens if window is None else min(tokens, window)


@dataclass(frozen=True)
class Budget:
    """How many slots a kv head may hold: as a ratio, a number of tokens, or by a threshold. Give exactly one of these.

    `kv_ratio` in (0, 1] is a share of the row's real prompt tokens (`of="prompt"`, the papers' x axis), of the prompt
    with its padding (`of="padded"`, what the releases of Keyformer and A2SF do), or of prompt plus `max_new_tokens`
    (`of="sequence"`). Ratios are floored, as the papers' code does. `of="generated"`, with `keep="prompt"`: of
    `max_new_tokens`, and the prompt's slots come on top, as they do on top of `tokens`.

    `threshold`: at the end of the prompt every head keeps the slots of at least this priority, and, whatever method,
    its sinks and the newest `threshold_recent` tokens (null: 128, as kvpress's DMSPress; after DMS, arXiv:2506.05345).
    From then on it holds as many. What ratio that is, is an outcome.

    `counts_self`: the token being generated occupies one of the slots, so a query attends to exactly k keys (Keyformer,
    arXiv:2403.09054, Fig. 2d). False is the habit of the releases that really drop slots: k kept, k + 1 attended.

    Because of that `kv_ratio=1` still evicts one prompt token: its slot is the next token's.

    `heads`: what becomes of the kv heads' budgets at the end of the prompt, from then on (docs/head_budgets.md).
    uniform: every head keeps its own best. union: all heads of a layer keep the same positions, the best on average.
    adaptive (AdaKV, arXiv:2407.11550): the slots of a layer's heads go to the best of all its heads; global: the slots
    of all layers go to the best of the model. In both, each head has at least `head_floor` of its uniform share (null:
    0.2 for adaptive, 0 for global). duo (DuoAttention, arXiv:2410.10819): retrieval heads, as many as the budget has
    room for, evict nothing; all others are streaming heads, which hold `stream_sinks` first and `stream_recent` newest
    tokens (null: 128, 256).

    `layers` shares the budget out over layers whose slots add up to as many as ever (`kvexp.core.budget`):
    uniform, pyramid (PyramidKV's own rule) or cake (by what each layer's attention looks like); None: as the method's
    paper does, which for most is uniform.

    ConfigError for values outside these ranges.
    """

    kv_ratio: Annotated[float, Range(0, 1, above=True)] | None = None
    tokens: Annotated[int, AtLeast(1)] | None = None
    of: Literal["prompt", "padded", "sequence", "generated"] = "prompt"
    counts_self: bool = True
    heads: Literal["uniform", "union", "adaptive", "global", "duo"] = "uniform"
    head_floor: Annotated[float, Range(0, 1)] | None = None
    stream_sinks: Annotated[int, AtLeast(0)] | None = None
    stream_recent: Annotated[int, AtLeast(1)] | None = None
    threshold: float | None = None
    threshold_recent: Annotated[int, AtLeast(1)] | None = None
    layers: Literal["uniform", "pyramid", "cake"] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        refuse(self, REFUSED)

    @property
    def sizes(self) -> int:
        """How many of kv_ratio, tokens and threshold are given: one, or none of a `BytesBudget`."""
        return sum(given is not None for given in (self.kv_ratio, self.tokens, self.threshold))

    @property
    def counts_ahead(self) -> bool:
        """Whether the slots depend on how many tokens will follow the prompt."""
        return self.of == "sequence" or (self.of == "generated" and self.tokens is None)

    @property
    def splits_layers(self) -> bool:
        """Whether `layers` shares the budget out."""
        return self.layers not in (None, "uniform")

    @property
    def ragged(self) -> bool:
        """Whether kv heads of a layer may hold different numbers of slots."""
        return self.heads not in ("uniform", "union") or self.threshold is not None

    @property
    def fixes_layer_budgets(self) -> bool:
        """Whether `heads` (global, duo) or a threshold decides what each layer holds, so that `layers` cannot."""
        return self.heads in ("global", "duo") or self.threshold is not None

    @property
    def shares_heads(self) -> bool:
        """Whether what one kv head holds depends on the priorities of others, or on a threshold."""
        return self.heads != "uniform" or self.threshold is not None

    @property
    def heads_setting(self) -> str:
        """What says how many slots each kv head holds, as it is typed."""
        return f"budget.heads={self.heads}" if self.threshold is None else f"budget.threshold={self.threshold:g}"

    @property
    def heads_remedy(self) -> str:
        """What to set where heads must hold equally many slots."""
        if self.threshold is None:
            return "set budget.heads=uniform"
        return "give kv_ratio or tokens in its place (budget=ratio, budget=tokens)"

    @property
    def newest(self) -> int:
        """`threshold_recent`, or what stands for null."""
        return THRESHOLD_RECENT if self.threshold_recent is None else self.threshold_recent

    @property
    def stream(self) -> tuple[int, int]:
        """First and newest tokens that a streaming head holds, the token being generated included."""
        sinks = STREAM_SINKS if self.stream_sinks is None else self.stream_sinks
        return sinks, STREAM_RECENT if self.stream_recent is None else self.stream_recent

    @property
    def floor(self) -> float:
        """`head_floor`, or what stands for null."""
        return DEFAULT_FLOORS.get(self.heads, 0.0) if self.head_floor is None else self.head_floor

    def resolve(self, prompts: PromptSizes, layer: int) -> list[int]:
        """Slots per kv head of layer `layer`, one number per prompt, before layers share them out otherwise.

        ConfigError where a budget that counts tokens to come has new_tokens None, and where a prompt would get no slot.
        """
        return [self._one(length, prompts, layer) for length in prompts.lengths]

    def _one(self, length: int, prompts: PromptSizes, layer: int) -> int:
        """Slots per kv head for the prompt of `length` real tokens."""
        if self.threshold is not None:
            return length + 1  # room for all, until the priorities are known
        if self.tokens is not None:
            slots = prompts.held(self.tokens, layer)
        else:
            assert self.kv_ratio is not None
            slots = floor_share(self.kv_ratio, prompts.held(self._base(length, prompts), layer))
        if slots < 1:
            raise ConfigError(
                f"the budget of layer {layer} is {slots} slots for a prompt of {length} tokens; "
                "raise kv_ratio or budget.tokens (and pass prompt_tokens= for a prompt fed in chunks)"
            )
        return slots + length if self.of == "generated" else slots

    def _base(self, length: int, prompts: PromptSizes) -> int:
        """The tokens of which a ratio is a share, by `of`."""
        if not self.counts_ahead:
            return length if self.of == "prompt" else prompts.padded
        if prompts.new_tokens is None:
            raise ConfigError(f"budget.of={self.of} needs max_new_tokens: say how many tokens will be generated")
        return prompts.new_tokens + (length if self.of == "sequence" else 0)


# Settings of a budget that exclude each other, looked through from top to bottom.
REFUSED: tuple[Rule[Budget], ...] = (
    (
        lambda b: isinstance(b, BytesBudget) and b.sizes,
        "bytes_ratio={c.bytes_ratio} is a budget by itself: leave out kv_ratio, tokens and threshold",
    ),
    (
        lambda b: not isinstance(b, BytesBudget) and b.sizes != 1,
        "give exactly one of kv_ratio, tokens and threshold, got kv_ratio={c.kv_ratio} tokens={c.tokens} "
        "threshold={c.threshold}",
    ),
    (
        lambda b: isinstance(b, BytesBudget) and b.of == "generated",
        "budget.of=generated counts slots on top of the prompt's, bytes_ratio={c.bytes_ratio} bytes of all: set "
        "budget.of=sequence, or give kv_ratio or tokens in place of bytes_ratio",
    ),
    (
        lambda b: b.threshold is not None and not math.isfinite(b.threshold),
        "threshold must be a finite number, got {c.threshold}",
    ),
    (
        lambda b: b.threshold is None and b.threshold_recent is not None,
        "budget.threshold_recent has no effect without budget.threshold: leave it at null",
    ),
    (
        lambda b: b.threshold is not None and (b.heads != "uniform" or b.splits_layers or b.of != "prompt"),
        "budget.threshold decides head by head what stays: leave budget.heads at uniform, budget.layers at null (or "
        "uniform) and budget.of at prompt",
    ),
    (
        lambda b: b.head_floor is not None and b.heads not in DEFAULT_FLOORS,
        "budget.head_floor has no effect with budget.heads={c.heads}: leave it at null, or set budget.heads to "
        "adaptive or global",
    ),
    (
        lambda b: b.heads in ("global", "duo") and b.splits_layers,
        "budget.heads={c.heads} shares out the slots of all layers among all heads, budget.layers={c.layers} among "
        "layers: leave one of the two alone",
    ),
    (
        lambda b: b.heads != "duo" and (b.stream_sinks, b.stream_recent) != (None, None),
        "budget.stream_sinks and budget.stream_recent have no effect with budget.heads={c.heads}: leave them at null, "
        "or set budget.heads=duo",
    ),
)


@dataclass(frozen=True)
class Cadence:
    """When to evict: at the end of prefill, and after every `every`-th decode step (None: never while decoding)."""

    at_prefill: bool = True
    every: Annotated[int, Range(1, LONGEST_WAIT)] | None = 1

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class OtherLayers:
    """What a cache holds besides the slots that are evicted, for budgets in bytes.

    heads: kv heads H of a layer whose slots are evicted. windows: of each layer that keeps one, how many numbers keys
    and values of a token are, and the most tokens it keeps. states: numbers of all states; 0 too where they are not
    known before the model is loaded.
    """

    heads: int
    windows: tuple[tuple[int, int], ...] = ()
    states: int = 0

    def bytes_at(self, tokens: int) -> int:
        """Bytes after so many tokens, with 16 bits for each number."""
        return 2 * (self.states + sum(numbers * min(tokens, most) for numbers, most in self.windows))


@dataclass(frozen=True)
class BytesBudget(Budget):
    """How many slots a kv head may hold, as a share of the bytes of the row's prompt in a full cache at 16 bits.

    bytes_ratio: the share, in (0, 1]; key_dim, value_dim: channels of a head; quantization: how slots are stored, None
    for 16 bits. Codes, scales, zeros and the window in full precision count as slots' bytes (`SlotBytes`),
    with numbers that are not quantised as 16 bits whatever dtype runs. With few bits more slots may fit than the prompt
    has tokens: then nothing is evicted until they are used. The other fields are as in `Budget`, without kv_ratio,
    tokens and threshold. `resolve` raises ConfigError where not one slot fits.

    others: windows and states of other layers, which count and are not evicted: `bytes_ratio` is of all bytes, and what
    they take is taken from the slots. None: there are none. `EvictionCache` fills it in. bias: bytes of a slot's bias;
    `CacheConfig` fills it in.
    """

    bytes_ratio: Annotated[float, Range(0, 1, above=True)] = 0.25
    key_dim: Annotated[int, AtLeast(1)] = 64
    value_dim: Annotated[int, AtLeast(1)] = 64
    quantization: Quantization | EngineQuantization | None = None
    others: OtherLayers | None = None
    bias: int = 0

    @property
    def slot_bytes(self) -> SlotBytes:
        """The bytes of this budget's slots, at 16 bits per unquantised number."""
        return SlotBytes(self.key_dim, self.value_dim, self.quantization, bias=self.bias)

    def _one(self, length: int, prompts: PromptSizes, layer: int) -> int:
        whole = self._base(length, prompts)
        full = SlotBytes(self.key_dim, self.value_dim).of(prompts.held(whole, layer))
        allowed = self._share_of_slots(whole, prompts) * full
        slots = self.slot_bytes.most_slots(allowed + 1e-9)
        if slots < 1:
            if self.others is not None:
                raise self._no_room(whole, prompts)
            raise ConfigError(
                f"bytes_ratio={self.bytes_ratio:g} of a prompt of {length} tokens is {allowed:.0f} bytes per kv head "
                f"in layer {layer}, and one slot takes {self.slot_bytes.of(1)}: raise bytes_ratio"
            )
        return slots

    def _full_bytes(self, tokens: int, prompts: PromptSizes) -> tuple[int, int]:
        """Bytes of a full cache of so many tokens: of the slots that may be evicted, and of the other layers."""
        assert self.others is not None
        slot_bytes = SlotBytes(self.key_dim, self.value_dim)
        slots = sum(slot_bytes.of(prompts.held(tokens, layer)) for layer in range(prompts.layers))
        return self.others.heads * slots, self.others.bytes_at(tokens)

    def _share_of_slots(self, tokens: int, prompts: PromptSizes) -> float:
        """The share of a full cache's slots that is left to them, of so many tokens."""
        if self.others is None:
            return self.bytes_ratio
        slots, rest = self._full_bytes(tokens, prompts)
        return self.bytes_ratio - (1 - self.bytes_ratio) * rest / slots

    def _no_room(self, tokens: int, prompts: PromptSizes) -> ConfigError:
        slots, rest = self._full_bytes(tokens, prompts)
        return ConfigError(
            f"bytes_ratio={self.bytes_ratio:g} of the {slots + rest} bytes of a full cache of {tokens} tokens is "
            f"{self.bytes_ratio * (slots + rest):.0f}, and windows and states, which are not evicted, take {rest}: "
            "raise bytes_ratio, or let windows be evicted from (cache.evict_sliding=true)"
        )
