"""One color and one marker per method, in every figure: Okabe and Ito's color-blind-safe palette and shades of it."""

from __future__ import annotations

import zlib
from typing import Any

MARK_COLOR = "#c00000"  # of the 99 % mark

# Of the settings of one method; the mark's own dashes, short and even, are none of them.
DASHES: tuple[Any, ...] = ("-", ":", "-.", (0, (8, 2)), (0, (8, 2, 1, 2, 1, 2)))

_COLORS = {
    "full": "#000000",
    "window": "#999999",
    "streaming_llm": "#56b4e9",
    "h2o": "#e69f00",
    "keyformer": "#0072b2",
    "a2sf": "#009e73",
    "ideal": "#4d4d4d",
    "random": "#cccccc",
    "key_attention": "#cc79a7",
    "snapkv": "#d55e00",
    "tova": "#b8a500",
    "pqcache": "#882255",
    "sparq": "#44aa99",
    "infllm": "#ddaa33",
    "oracle": "#4d4d4d",
    "h2o_c": "#aa6600",
}
_OTHERS = ("#332288", "#88ccee", "#117733", "#aa4499", "#661100", "#6699cc")
_MARKERS = "osD^vPX*<>hp"


def color_of(method: str) -> str:
    """The method's color; one that has none of its own gets the same in every figure."""
    return _COLORS.get(method, _OTHERS[zlib.crc32(method.encode()) % len(_OTHERS)])


def marker_of(method: str) -> str:
    """The method's marker, so that lines can be told apart without color."""
    names = list(_COLORS)
    place = names.index(method) if method in names else zlib.crc32(method.encode())
    return _MARKERS[place % len(_MARKERS)]
