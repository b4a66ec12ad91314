"""Which calls of the kernels are compiled: head sizes, dtypes, methods and position encodings of supported models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

HEAD_SIZES = (64, 80, 96, 128, 256)
DTYPES = ("bf16", "fp16", "fp32")
METHODS = ("h2o", "tempered", "keyformer", "keyformer per key")  # no noise, temperature alone, fresh noise, fixed noise
POSITIONS = ("rope", "alibi", "window")
DECODED = ("unobserved", "h2o", "keyformer")  # a decode kernel has one branch for all kinds of noise


@dataclass(frozen=True)
class Case:
    """One call of a launcher.

    phase: prompt (`triton_observe`) or decode (`triton_decode`). head_size: D = Dv. dtype: of DTYPES. method: of
    METHODS or DECODED. position: of POSITIONS. upcast: logits in float32 whatever the dtype (GPT-J). in_order: slot i
    holds column i, as in a prompt that nothing was evicted from. slots: S.
    """

    phase: str
    head_size: int
    dtype: str
    method: str
    position: str = "rope"
    upcast: bool = False
    in_order: bool = True
    slots: int = 4099  # no multiple of 16: what holds for every length

    @property
    def heads(self) -> tuple[int, int]:
        """(kv heads, query heads of each): grouped heads but for the families that have none."""
        return (32, 1) if self.position == "alibi" or self.upcast else (8, 4)

    def __str__(self) -> str:
        words = [f"D={self.head_size}", self.dtype, self.method, *([self.position] if self.position != "rope" else [])]
        words += ["float32 logits"] * self.upcast + ["slots in any order"] * (not self.in_order)
        return " ".join(words) + (f" S={self.slots}" if self.slots != 4099 else "")


def _default() -> Iterator[Case]:
    """Every branch of every kernel at one head size, and every head size with the heaviest branches."""
    for size, dtype, method in product((64, 128, 256), ("bf16", "fp32"), ("h2o", "keyformer")):
        yield Case("prompt", size, dtype, method)
        yield Case("decode", size, dtype, method)
    for size in (80, 96):
        yield Case("prompt", size, "bf16", "keyformer")
        yield Case("decode", size, "bf16", "keyformer")
    for method in ("h2o", "keyformer"):
        yield Case("prompt", 128, "fp16", method)
    yield Case("decode", 128, "fp16", "keyformer")
    for method in ("tempered", "keyformer per key"):
        yield Case("prompt", 128, "bf16", method)
    for position in ("alibi", "window"):
        yield Case("prompt", 128, "bf16", "keyformer", position)
        yield Case("decode", 128, "bf16", "keyformer", position)
    yield Case("prompt", 128, "fp32", "keyformer", "alibi")
    yield Case("prompt", 128, "bf16", "keyformer", in_order=False)
    yield Case("decode", 128, "bf16", "unobserved")
    yield Case("decode", 128, "bf16", "keyformer", slots=51)
    for phase in ("prompt", "decode"):
        yield Case(phase, 256, "fp16", "keyformer", upcast=True)


def _all() -> Iterator[Case]:
    """The default ones, then every head size, dtype, method and position encoding."""
    yield from _default()
    for size, dtype, position in product(HEAD_SIZES, DTYPES, POSITIONS):
        for method in METHODS:
            yield Case("prompt", size, dtype, method, position)
        for method in DECODED:
            yield Case("decode", size, dtype, method, position)
    for size, dtype, method in product(HEAD_SIZES, DTYPES, ("h2o", "keyformer")):
        yield Case("prompt", size, dtype, method, in_order=False)
    for size, dtype, method, phase in product(HEAD_SIZES, ("bf16", "fp16"), ("h2o", "keyformer"), ("prompt", "decode")):
        yield Case(phase, size, dtype, method, upcast=True)


DEFAULT = tuple(dict.fromkeys(_default()))
ALL = tuple(dict.fromkeys(_all()))
