"""What is asked of a cache: a budget in slots, shares or bytes. The one place where a ratio becomes an integer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvexp.core.quantized import Quantization, SlotBytes
from kvexp.util import ConfigError

# How slots are shared out among kv heads. In all but the first two ways, heads hold different numbers of slots.
Heads = Literal["uniform", "union", "adaptive", "global", "duo"]
STREAM_SINKS, STREAM_RECENT = 128, 256  # slots of a streaming head, as in kvpress
THRESHOLD_RECENT = 128
DEFAULT_FLOORS = {"adaptive": 0.2, "global": 0.0}
MOST_TOKENS = 1 << 62  # times 1 + pyramid, which is below 2, it is still an int64
LONGEST_WAIT = 1 << 16  # decode steps between two evictions


def floor_share(ratio: float, count: int) -> int:
    """ratio * count, rounded down: the one way in which a share becomes a number of slots.

    1e-9 is added first, because 0.29 * 100 is 28.999999999999996 in binary fractions and means 29.
    """
    return math.floor(ratio * count + 1e-9)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class PromptSizes:
    """What is known of a batch of prompts before the model runs, for which budgets are resolved.

    lengths: real tokens of each; padded: columns, padding included; new_tokens: to come after them, None: not known;
    layers: of the model.
    """

    lengths: Sequence[int]
    padded: int
    new_tokens: int | None
    layers: int


@dataclass(frozen=True)
class Budget:
    """How many slots a kv head may hold: as a ratio, a number of tokens, or by a threshold. Give exactly one of these.

    `kv_ratio` in (0, 1] is a share of the row's real prompt tokens (`of="prompt"`, the papers' x axis), of the prompt
    with its padding (`of="padded"`, what the releases of Keyformer and A2SF do), or of prompt plus `max_new_tokens`
    (`of="sequence"`). Ratios are floored, as the papers' code does.

    `threshold`: at the end of the prompt every head keeps the slots of at least this priority, and, whatever method,
    its sinks and the newest `threshold_recent` tokens (null: 128, as kvpress's DMSPress; after DMS, arXiv:2506.05345).
    From then on it holds as many. What ratio that is, is an outcome.

    `counts_self`: the token being generated occupies one of the slots, so a query attends to exactly k keys (Keyformer,
    arXiv:2403.09054, Fig. 2d). False is the habit of the releases that really drop slots: k kept, k + 1 attended.

    Because of that `kv_ratio=1` still evicts one prompt token: its slot is the next token's.

    `pyramid` in [0, 1): layer 0 gets (1 + pyramid) times the budget, the last layer (1 - pyramid) times, linearly in
    between and floored, so the mean over layers is the budget or just below it (after PyramidKV, arXiv:2406.02069).

    `heads`: what becomes of the kv heads' budgets at the end of the prompt, from then on (docs/head_budgets.md).
    uniform: every head keeps its own best. union: all heads of a layer keep the same positions, the best on average.
    adaptive (AdaKV, arXiv:2407.11550): the slots of a layer's heads go to the best of all its heads; global: those of
    all layers to the best of the model. In both, each head has at least `head_floor` of its uniform share (null: 0.2
    for adaptive, 0 for global). duo (DuoAttention, arXiv:2410.10819): retrieval heads, as many as the budget has room
    for, evict nothing; all others are streaming heads, which hold `stream_sinks` first and `stream_recent` newest
    tokens (null: 128, 256).

    `layers` shares the budget out over layers whose slots add up to as many as ever (`kvexp.core.budget`):
    uniform, pyramid (PyramidKV's own rule) or cake (by what each layer's attention looks like); None: as the method's
    paper does, which for most is uniform. Give one of `pyramid` and `layers`.

    ConfigError for values outside these ranges.
    """

    kv_ratio: float | None = None
    tokens: int | None = None
    of: Literal["prompt", "padded", "sequence"] = "prompt"
    counts_self: bool = True
    pyramid: float = 0.0
    heads: Heads = "uniform"
    head_floor: float | None = None
    stream_sinks: int | None = None
    stream_recent: int | None = None
    threshold: float | None = None
    threshold_recent: int | None = None
    layers: Literal["uniform", "pyramid", "cake"] | None = None

    def __post_init__(self) -> None:
        self._check_threshold()
        if self.threshold is None and (self.kv_ratio is None) == (self.tokens is None):
            threshold = ", or a number as threshold" if self.kv_ratio is None else ""
            raise ConfigError(
                f"give exactly one of kv_ratio and tokens, got kv_ratio={self.kv_ratio} tokens={self.tokens}{threshold}"
            )
        ratio = self.kv_ratio
        if ratio is not None and (not _is_number(ratio) or not 0 < ratio <= 1):
            shown = f"{ratio:g}" if isinstance(ratio, float) else repr(ratio)
            raise ConfigError(f"kv_ratio must be in (0, 1], got {shown}")
        if self.tokens is not None and (isinstance(self.tokens, bool) or not isinstance(self.tokens, int)):
            raise ConfigError(f"tokens must be a whole number of slots, got {self.tokens!r}")
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError(f"tokens must be at least 1, got {self.tokens}")
        if self.tokens is not None and self.tokens >= MOST_TOKENS:
            raise ConfigError("tokens must be below 2**62; more than any prompt has is everything")
        self.check_base()

    def check_base(self) -> None:
        """ConfigError for `of` or `pyramid` outside their values."""
        if self.of not in ("prompt", "padded", "sequence"):
            raise ConfigError(f"budget.of must be prompt, padded or sequence, got {self.of!r}")
        if not _is_number(self.pyramid) or not 0 <= self.pyramid < 1:
            raise ConfigError(f"pyramid must be in [0, 1), got {self.pyramid!r}")
        if self.layers not in (None, "uniform", "pyramid", "cake"):
            raise ConfigError(f"budget.layers must be uniform, pyramid, cake or null, got {self.layers!r}")
        if self.pyramid and self.layers not in (None, "uniform"):
            raise ConfigError(
                f"budget.pyramid={self.pyramid:g} and budget.layers={self.layers} both share the budget out over "
                "layers: set budget.pyramid=0, or leave budget.layers at null"
            )
        self._check_heads()

    def _check_threshold(self) -> None:
        """ConfigError for a threshold that is no number, or does not go with the other settings."""
        limit, recent = self.threshold, self.threshold_recent
        if limit is None:
            if recent is not None:
                raise ConfigError("budget.threshold_recent has no effect without budget.threshold: leave it at null")
            return
        if self.kv_ratio is not None or self.tokens is not None:
            raise ConfigError(
                f"give exactly one of kv_ratio, tokens and threshold, got kv_ratio={self.kv_ratio} "
                f"tokens={self.tokens} threshold={limit}"
            )
        if not _is_number(limit) or not math.isfinite(limit):
            raise ConfigError(f"threshold must be a finite number, got {limit!r}")
        if recent is not None and not _is_whole(recent, 1):
            raise ConfigError(f"threshold_recent must be a whole number of at least 1, got {recent!r}")
        if self.heads != "uniform" or self.pyramid or self.layers not in (None, "uniform") or self.of != "prompt":
            raise ConfigError(
                "budget.threshold decides head by head what stays: leave budget.heads at uniform, budget.pyramid at 0, "
                "budget.layers at null (or uniform) and budget.of at prompt"
            )

    def _check_heads(self) -> None:
        """ConfigError for ways to share out slots among heads that are unknown, or exclude other settings."""
        if self.heads not in get_args(Heads):
            raise ConfigError(f"budget.heads must be one of {', '.join(get_args(Heads))}, got {self.heads!r}")
        if self.head_floor is not None and self.heads not in DEFAULT_FLOORS:
            raise ConfigError(
                f"budget.head_floor has no effect with budget.heads={self.heads}: leave it at null, or set "
                f"budget.heads to one of {', '.join(DEFAULT_FLOORS)}"
            )
        if self.head_floor is not None and (not _is_number(self.head_floor) or not 0 <= self.head_floor <= 1):
            raise ConfigError(f"head_floor must be in [0, 1], got {self.head_floor!r}")
        if self.heads in ("global", "duo"):
            shares = f"budget.heads={self.heads} shares out the slots of all layers among all heads"
            if self.pyramid:
                raise ConfigError(f"{shares}, budget.pyramid by depth: set budget.pyramid=0, or budget.heads=adaptive")
            if self.layers not in (None, "uniform"):
                raise ConfigError(f"{shares}, budget.layers={self.layers} among layers: leave one of the two alone")
        for name, least in (("stream_sinks", 0), ("stream_recent", 1)):
            value = getattr(self, name)
            if value is not None and self.heads != "duo":
                raise ConfigError(
                    f"budget.{name} has no effect with budget.heads={self.heads}: leave it at null, or set "
                    "budget.heads=duo"
                )
            if value is not None and not _is_whole(value, least):
                raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")

    @property
    def ragged(self) -> bool:
        """Whether kv heads of a layer may hold different numbers of slots."""
        return self.heads not in ("uniform", "union") or self.threshold is not None

    @property
    def among_all_layers(self) -> bool:
        """Whether something other than `layers` says what each layer holds: depth, all layers' heads, a threshold."""
        return bool(self.pyramid) or self.heads in ("global", "duo") or self.threshold is not None

    @property
    def shares_heads(self) -> bool:
        """Whether what one kv head holds goes by the priorities of others, or by a threshold."""
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

        ConfigError where `of="sequence"` and new_tokens is None, and where a prompt would get no slot.
        """
        return [self._one(length, prompts, layer) for length in prompts.lengths]

    def _one(self, length: int, prompts: PromptSizes, layer: int) -> int:
        """Slots per kv head for the prompt of `length` real tokens."""
        if self.threshold is not None:
            return length + 1  # room for all, until the priorities are known
        if self.tokens is not None:
            slots = self.tokens
        else:
            assert self.kv_ratio is not None
            slots = floor_share(self.kv_ratio, self._base(length, prompts))
        if self.pyramid and prompts.layers > 1:
            slots = floor_share(self._share_of_depth(prompts, layer), slots)
        if slots < 1:
            raise ConfigError(
                f"the budget of layer {layer} is {slots} slots for a prompt of {length} tokens; "
                "raise kv_ratio or budget.tokens, or lower budget.pyramid (and pass prompt_tokens= for a prompt fed in "
                "chunks)"
            )
        return slots

    def _share_of_depth(self, prompts: PromptSizes, layer: int) -> float:
        """What `pyramid` gives this layer, as a multiple of the mean."""
        return 1 + self.pyramid * (1 - 2 * layer / (prompts.layers - 1))

    def _base(self, length: int, prompts: PromptSizes) -> int:
        """The tokens of which a ratio is a share, by `of`."""
        if self.of != "sequence":
            return length if self.of == "prompt" else prompts.padded
        if prompts.new_tokens is None:
            raise ConfigError("budget.of=sequence needs max_new_tokens: say how many tokens will be generated")
        return length + prompts.new_tokens


@dataclass(frozen=True)
class Cadence:
    """When to evict: at the end of prefill, and after every `every`-th decode step (None: never while decoding).

    ConfigError where `every` is no whole number from 1 to LONGEST_WAIT.
    """

    at_prefill: bool = True
    every: int | None = 1

    def __post_init__(self) -> None:
        if self.every is not None and (not isinstance(self.every, int) or isinstance(self.every, bool)):
            raise ConfigError(f"cadence.every must be a whole number of decode steps or null, got {self.every!r}")
        if self.every is not None and self.every < 1:
            raise ConfigError(f"cadence.every must be at least 1 decode step or null, got {self.every}")
        if self.every is not None and self.every > LONGEST_WAIT:
            raise ConfigError(
                f"cadence.every may be at most {LONGEST_WAIT} decode steps, for which slots are laid out, or null for "
                f"never, got {self.every}"
            )


@dataclass(frozen=True)
class BytesBudget(Budget):
    """How many slots a kv head may hold, as a share of the bytes of the row's prompt in a full cache at 16 bits.

    bytes_ratio: the share, in (0, 1]; key_dim, value_dim: channels of a head; quantization: how slots are stored, None
    for 16 bits. Slots' bytes are those of codes, scales and zeros, and of the window in full precision (`SlotBytes`),
    with numbers that are not quantised as 16 bits whatever dtype runs. With few bits more slots may fit than the prompt
    has tokens: then nothing is evicted until they are used. The other fields are those of `Budget`; `pyramid` moves
    bytes between layers. ConfigError for a share outside its range, for kv_ratio or tokens beside it, and where not one
    slot fits.
    """

    bytes_ratio: float = 0.25
    key_dim: int = 64
    value_dim: int = 64
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        if self.kv_ratio is not None or self.tokens is not None or self.threshold is not None:
            raise ConfigError(
                f"give bytes_ratio, kv_ratio or tokens, one of the three, got bytes_ratio={self.bytes_ratio} "
                f"kv_ratio={self.kv_ratio} tokens={self.tokens} threshold={self.threshold}"
            )
        if isinstance(self.bytes_ratio, bool) or not 0 < self.bytes_ratio <= 1:
            raise ConfigError(f"bytes_ratio must be in (0, 1], got {self.bytes_ratio!r}")
        if min(self.key_dim, self.value_dim) < 1:
            raise ConfigError(f"key_dim and value_dim must be at least 1, got {self.key_dim} and {self.value_dim}")
        self.check_base()

    @property
    def slot_bytes(self) -> SlotBytes:
        """The bytes of this budget's slots, at 16 bits per unquantised number."""
        return SlotBytes(self.key_dim, self.value_dim, self.quantization)

    def _one(self, length: int, prompts: PromptSizes, layer: int) -> int:
        tokens, share = self._base(length, prompts), self.bytes_ratio
        if self.pyramid and prompts.layers > 1:
            share *= self._share_of_depth(prompts, layer)
        allowed = share * SlotBytes(self.key_dim, self.value_dim).of(tokens)
        slots = self.slot_bytes.most_slots(allowed + 1e-9)
        if slots < 1:
            raise ConfigError(
                f"bytes_ratio={self.bytes_ratio:g} of a prompt of {length} tokens is {allowed:.0f} bytes per kv head "
                f"in layer {layer}, and one slot takes {self.slot_bytes.of(1)}: raise bytes_ratio"
            )
        return slots
