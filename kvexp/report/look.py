"""The colors, markers and dashes of `kvexp.figures.style` in plotly's words."""

from typing import Any

from kvexp.figures.style import color_of, marker_of

_SYMBOLS = {
    **{"o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross"},
    **{"X": "x", "*": "star", "<": "triangle-left", ">": "triangle-right", "h": "hexagon", "p": "pentagon"},
}
_DASHES = {"-": "solid", ":": "dot", "-.": "dashdot"}


def look(method: str, dashes: Any) -> dict[str, str]:
    """color, symbol and dash of one line; dashes: as matplotlib takes them."""
    dash = _DASHES[dashes] if isinstance(dashes, str) else ",".join(f"{length}px" for length in dashes[1])
    return {"color": color_of(method), "symbol": _SYMBOLS[marker_of(method)], "dash": dash}
