"""A text whose tokens are marked by how many heads keep them: as HTML without a script, and as plain lines."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any
from unicodedata import east_asian_width

from kvexp.terminal import visible

STYLE = """
.kept { font: 15px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.kept { color: #111; background: #fff; }
.kept span { border-bottom: 2px solid transparent; border-radius: 2px; }
.kept .none { color: #767676; text-decoration: line-through; }
.kept .all { border-bottom-color: #00553d; }
.kept .later { font-style: italic; color: #555; }
.kept .question { outline: 1px dotted #0072b2; }
.kept .answer { outline: 1px dotted #d55e00; }
"""


def section(data: dict[str, Any]) -> str:
    """The text as one element; what it needs is in STYLE. Everything from model or data is escaped.

    data: tokens (text; kept, the heads that keep it, and by_layer, those of each layer, or None of tokens to come),
    heads, heads_by_layer, prompt_tokens, question_tokens.
    """
    spans = [_span(data, place, token) for place, token in enumerate(data["tokens"])]
    return f'<div class="kept">{"".join(spans)}</div>'


def _span(data: dict[str, Any], place: int, token: dict[str, Any]) -> str:
    text = escape(visible(token["text"])) or "&#8203;"
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


def mark(count: int, heads: int) -> str:
    """`.` no head, `#` all, else tenths of the heads, rounded down but at least 1."""
    if count <= 0:
        return "."
    return "#" if count >= heads else str(max(1, 10 * count // heads))


@dataclass(frozen=True)
class KeptText:
    """A prompt's tokens, coloured in a notebook and marked in a terminal by how many heads keep each.

    by_layer [tokens][layers]: heads that keep the token; heads: kv heads of each layer.
    """

    texts: list[str]
    by_layer: list[list[int]]
    heads: list[int]

    def _repr_html_(self) -> str:
        every = sum(self.heads)
        tokens = [
            {"text": text, "kept": sum(counts), "by_layer": counts}
            for text, counts in zip(self.texts, self.by_layer, strict=True)
        ]
        data = {"tokens": tokens, "heads": every, "heads_by_layer": self.heads}
        data |= {"prompt_tokens": len(tokens), "question_tokens": 0}
        said = f"the greener, the more of {every} heads keep a token; struck out: none. Hover for its layers."
        return f"<style>{STYLE}</style>{section(data)}<p><small>{said}</small></p>"

    def __repr__(self) -> str:
        """Two lines each: the text, and under every token its mark."""
        every, width = sum(self.heads), 80
        made, words, marks = [], "", ""
        for text, counts in zip(self.texts, self.by_layer, strict=True):
            shown = "".join("\u21b5" if letter == "\n" else letter if letter.isprintable() else " " for letter in text)
            cells = sum(2 if east_asian_width(letter) in "WF" else 1 for letter in shown)
            if marks and len(marks) + cells > width:
                made += [words, marks]
                words, marks = "", ""
            words, marks = words + shown, marks + mark(sum(counts), every) * cells
        return "\n".join([*made, words, marks, f"# all {every} heads, 9-1 tenths of them, . none"])
