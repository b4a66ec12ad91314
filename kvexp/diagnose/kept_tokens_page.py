"""The same text as a page of its own: HTML without a script, hovering over a token tells the heads of each layer."""

from __future__ import annotations

from html import escape

from kvexp.evictions.held_tokens import View
from kvexp.kept_text import STYLE, section
from kvexp.terminal import visible


def page(view: View, title: str) -> str:
    """A whole document."""
    told, title = view.told, visible(title)
    when = "at the end of the prompt" if view.step == 0 else f"after {view.step} decode tokens"
    layer = "" if view.layer is None else f", shaded by layer {view.layer}"
    head = f"{told.example} {when}{layer}: the greener, the more of {view.heads} heads keep a token; struck out: none"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body {{ margin: 2em auto; max-width: 60em; padding: 0 1em; font-family: sans-serif; }}{STYLE}</style></head>
<body><h1>{escape(title)}</h1>
<p>{escape(visible(head))}. Hover over a token for its layers. Dotted boxes: the question that was read after the
eviction (blue) and the answer (orange); in italics what had not been read yet.</p>
{section(view.data())}
</body></html>
"""
