"""The text of an example in a terminal, each token with a mark of how many heads still hold it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len
from rich.text import Text

from kvexp.console import Console
from kvexp.evictions.held_tokens import View
from kvexp.kept_text import mark
from kvexp.terminal import visible

STYLES = ("dim", "cyan", "green", "yellow", "bold")  # none, a third, two thirds, nearly all, all


def style(count: int, heads: int) -> str:
    if count <= 0 or count >= heads:
        return STYLES[0 if count <= 0 else -1]
    return STYLES[1 + 3 * count // heads]


def show(view: View, console: Console) -> None:
    """Two lines each: the text, and under every token its mark; what is to come at this step has no mark."""
    told, heads = view.told, view.heads
    where = "all layers" if view.layer is None else f"layer {view.layer}"
    when = "the end of the prompt" if view.step == 0 else f"{view.step} decode tokens"
    console.print(f"{told.example}: kept after {when}, {where} ({heads} heads a token)", highlight=False, markup=False)
    for words, marks in lines(view, console.width):
        console.print(words, overflow="crop", no_wrap=True)
        console.print(marks, overflow="crop", no_wrap=True)
    console.print(f"# all {heads} heads, 9-1 tenths of them, . none; no mark: not read yet", highlight=False)
    counts = view.counts[: view.present]
    whole, some = int((counts >= heads).sum()), int(((counts > 0) & (counts < heads)).sum())
    gone = len(counts) - whole - some
    console.print(
        f"of {len(counts)} tokens {whole} are held by all heads, {some} by some, {gone} by none", highlight=False
    )
    if not told.same_output:
        console.print("alone this example is answered otherwise than in the batch of its row", highlight=False)


def lines(view: View, width: int) -> Iterator[tuple[Text, Text]]:
    """Text and marks, broken between tokens."""
    words, marks = Text(), Text()
    for place, text in enumerate(view.told.texts):
        pieces = text.replace("\t", " ").replace("\r", "").split("\n")
        for number, piece in enumerate(pieces):
            shown = visible(piece) + ("\u21b5" if number < len(pieces) - 1 else "")
            if marks.cell_len + cell_len(shown) > width and marks.cell_len:
                yield words, marks
                words, marks = Text(), Text()
            count = int(view.counts[place])
            known = place < view.present
            words.append(shown, style=style(count, view.heads) if known else "italic")
            marks.append((mark(count, view.heads) if known else " ") * cell_len(shown))
            if number < len(pieces) - 1:
                yield words, marks
                words, marks = Text(), Text()
    if marks.cell_len:
        yield words, marks
