"""Text from models, data and file names on its way to a person: control characters are shown, never obeyed.

A terminal takes ESC, BEL, backspace and the C1 codes of a model's answer as commands: to rename the window, to write
over lines that are there, to send keys. Whatever a command prints goes through `say` or `kvexp.console.Console`.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0 without tab and line feed, DEL, C1


def visible(text: str) -> str:
    r"""The text with its control characters as Python writes them: ESC is `\x1b`. Tabs and line feeds stay."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def say(*words: object, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """`print`, of visible text."""
    print(*(visible(str(word)) for word in words), end=end, file=file or sys.stdout, flush=flush)
