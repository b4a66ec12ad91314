"""The same text as a page of its own: HTML without a script, hovering over a token tells the heads of each layer."""

from __future__ import annotations

from html import escape
from typing import Any

from kvexp.evictions.view import View

STYLE = """
.kept { font: 15px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; color: #111; }
.kept span { border-bottom: 2px solid transparent; border-radius: 2px; }
.kept .none { color: #767676; text-decoration: line-through; }
.kept .all { border-bottom-color: #00553d; }
.kept .later { font-style: italic; color: #555; }
.kept .question { outline: 1px dotted #0072b2; }
.kept .answer { outline: 1px dotted #d55e00; }
"""


def section(view: View) -> str:
    """The text as one element; what it needs is in STYLE. Everything from model or data is escaped."""
    data = view.data()
    spans = [_span(data, place, token) for place, token in enumerate(data["tokens"])]
    return f'<div class="kept">{"".join(spans)}</div>'


def _span(data: dict[str, Any], place: int, token: dict[str, Any]) -> str:
    text = escape(token["text"]) or "&#8203;"
    start, question = data["prompt_tokens"], data["question_tokens"]
    part = "" if place < start else " question" if place < start + question else " answer"
    if token["kept"] is None:
        return f'<span class="later{part}" title="position {place}: not read yet">{text}</span>'
    kept, heads = token["kept"], data["heads"]
    each = enumerate(zip(token["by_layer"], data["heads_by_layer"], strict=True))
    layers = [f"layer {layer}: {count} of {of}" for layer, (count, of) in each]
    title = escape("\n".join([f"position {place}: kept by {kept} of {heads} heads", *layers]))
    kind = "none" if kept == 0 else "all" if kept == heads else "some"
    shade = f' style="background:rgba(0,158,115,{0.55 * kept / heads:.2f})"' if kept else ""
    return f'<span class="{kind}{part}"{shade} title="{title}">{text}</span>'


def page(view: View, title: str) -> str:
    """A whole document."""
    told = view.told
    when = "at the end of the prompt" if view.step == 0 else f"after {view.step} decode tokens"
    layer = "" if view.layer is None else f", shaded by layer {view.layer}"
    head = f"{told.example} {when}{layer}: the greener, the more of {view.heads} heads keep a token; struck out: none"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body {{ margin: 2em auto; max-width: 60em; padding: 0 1em; font-family: sans-serif; }}{STYLE}</style></head>
<body><h1>{escape(title)}</h1>
<p>{escape(head)}. Hover over a token for its layers. Dotted boxes: the question that was read after the eviction (blue)
and the answer (orange); in italics what had not been read yet.</p>
{section(view)}
</body></html>
"""
