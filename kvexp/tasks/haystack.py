"""The text that needles are hidden in: files read in the order of their names, or a filler said over and over."""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvexp.digests import Stamp, stamp
from kvexp.errors import ConfigError
from kvexp.paths import path_of

_LATIN = r"[.!?][\"')\]\u201d\u2019]*\s+"
_MARKS = (  # Unicode's Sentence_Terminal of the scripts in use today, without . ! ?
    "\u0589\u061d-\u061f\u06d4\u0700-\u0702\u07f9\u0964\u0965\u104a\u104b\u1362\u1367\u1368\u166e\u1735\u1736\u17d4\u17d5"
    "\u1803\u1809\u1944\u1945\u1aa8-\u1aab\u1b5a\u1b5b\u1c3b\u1c3c\u1c7e\u1c7f\u203c\u203d\u2047-\u2049\u3002\ua4ff\ua60e\ua60f"
    "\ua876\ua877\ua8ce\ua8cf\ua92f\ua9c8\ua9c9\uaa5d-\uaa5f\uaaf0\uaaf1\uabeb\ufe12\ufe15\ufe16\ufe52\ufe56\ufe57\uff01\uff0e\uff1f"
    "\uff61\U00011141\U00011142\U0001144b\U0001144c"
    "\u0f0d\u0f0e"  # Tibetan's shads, which Unicode does not count
)
_CLOSE = "\"')\\]\u201d\u2019\u00bb\u300d\u300f\u3009\u300b\u3011\u3015\uff02\uff07\uff09\uff3d\uff63"
# These end a sentence without white space; so do . ! ? between Chinese or Japanese letters.
_OTHER = rf"[{_MARKS}][{_MARKS}.!?{_CLOSE}]*\s*|[.!?][{_CLOSE}]*(?=[\u3040-\u30ff\u3400-\u9fff])"
OTHER_ENDS = re.compile(_OTHER)
_ENDS = re.compile(f"{_LATIN}|{_OTHER}")
LONGEST = 600  # characters of a sentence; what goes on for longer was written without their marks
LONGEST_LINE, LONGEST_WORD = 200, 60
LINES = (
    4  # line ends inside of what would be a sentence, those of code counted twice: it is code, verse, a list or a table
)
_CODE = re.compile(r"^[ \t]+\S|[{};(]\s*\n", re.MULTILINE)  # a line end next to an indented line, or behind such a mark
_FLAGS = "".join(map(chr, range(0x1F1E6, 0x1F200)))  # two of these letters are a flag
_CLOSERS = "\"')]\u201d\u2019 \n\t"
_WHITE = " \t\n\u3000\u200b"  # with the space of no width that Thai and Khmer may have


class Hidden(NamedTuple):
    """A text with needles: the whole, and for each needle the share of the text's characters in front, in percent."""

    text: str
    depths: list[float]


def read(haystack: str) -> str:
    """All .txt files of a folder (or one file) as one text."""
    path = path_of(haystack, "task.haystack")
    if not path.exists():
        raise ConfigError(f"task.haystack={haystack}: there is no such folder or file (seen from {Path.cwd()})")
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    try:
        whole = _read(tuple((file, stamp(file)) for file in files))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"task.haystack={haystack}: cannot read it as text: {error}") from error
    if not whole:
        raise ConfigError(f"task.haystack={haystack}: found no text; give a folder of .txt files, or one text file")
    return whole


@functools.lru_cache(maxsize=4)  # the tasks of a sweep share one text
def _read(files: tuple[tuple[Path, Stamp], ...]) -> str:
    texts = (file.read_text(encoding="utf-8").strip() for file, _ in files)
    return "\n\n".join(text for text in texts if text)


def repeated(filler: str, characters: int) -> str:
    """The filler, a space between its repetitions, at least so many characters long."""
    return " ".join([filler.strip()] * (characters // (len(filler.strip()) + 1) + 1))


def from_sentence(text: str, share: float) -> str:
    """The same text beginning with the first sentence past `share` of it, and going on with what was in front.

    Where the text has no sentences there: with the line, word or character at `share`.
    """
    if share <= 0:
        return text
    near = int(share * len(text))
    if _sentence(text, near) is None:
        at, _ = _boundary(text, near, len(text))
    else:
        found = _ENDS.search(text, near)
        at = found.end() if found else 0
    return f"{text[at:]}\n\n{text[:at].rstrip()}" if at else text


def insert(text: str, needles: Sequence[tuple[float, str]]) -> str:
    """The text with the needles, as `hide` makes it."""
    return hide(text, needles).text


def hide(text: str, needles: Sequence[tuple[float, str]], characters: int | None = None) -> Hidden:
    """The first `characters` of a text (None: all) with each (depth in percent, needle) put where it would fall.

    A needle goes in front of the sentence at its depth; in code, verse, lists and tables in front of the line; where
    there is neither, between two words, and where nothing parts words, between two characters. Depth 0 is in front of
    all, 100 behind all.
    """
    length = len(text) if characters is None else min(characters, len(text))
    parts, end, depths = [], length, [0.0] * len(needles)
    for number in reversed(sorted(range(len(needles)), key=lambda each: needles[each][0])):
        depth, needle = needles[number]
        at, line = _boundary(text, int(length * depth / 100), length)
        at = min(at, end)
        before, after = "" if at == 0 or text[at - 1].isspace() else " ", " "
        if line:
            before, after = "" if at == 0 or text[at - 1] == "\n" else "\n", "\n"
        parts += [text[at:end], f"{before}{needle}{after}"]
        depths[number], end = round(100 * at / length, 2) if length else 0.0, at
    parts.append(text[:end])
    return Hidden("".join(reversed(parts)).rstrip(), depths)


def has_plain_sentences(text: str) -> bool:
    """Whether all of the text is in sentences that . ! ? and white space end: needles stand where they always did."""
    begins = [0, *(found.end() for found in _ENDS.finditer(text))]
    return OTHER_ENDS.search(text) is None and all(_ends_as_sentence(text, begin) for begin in begins)


def _boundary(text: str, near: int, length: int) -> tuple[int, bool]:
    """(Where the sentence, line, word or character that holds character `near` begins, whether it is a line.)

    0 and `length`, the place where the text is cut, stay what they are.
    """
    begin = _sentence(text, min(near, length))
    if begin is not None:
        return (length if near >= length else begin), False
    start, stop = text.rfind("\n", 0, near) + 1, text.find("\n", near)
    line = (start > 0 or stop >= 0) and (stop if stop >= 0 else len(text)) - start <= LONGEST_LINE
    if near <= 0 or near >= length:
        return min(near, length), line
    if line:
        return start, True
    words = [found for mark in _WHITE if (found := text.rfind(mark, max(0, near - LONGEST_WORD), near)) >= 0]
    return (max(words) + 1 if words else _character(text, near)), False


def _sentence(text: str, near: int) -> int | None:
    """Where the sentence that holds character `near` begins; None where the text has no sentences there."""
    window = max(0, near - 2000)
    ends = list(_ENDS.finditer(text[window:near]))
    if window and not ends:
        return None  # whatever began in front of the window is no sentence
    begin = window + ends[-1].end() if ends else 0
    return begin if _ends_as_sentence(text, begin) else None


def _ends_as_sentence(text: str, begin: int) -> bool:
    """Whether what begins here is a sentence: its end is not far, and few lines end inside that are not full."""
    reach = begin + 2 * LONGEST
    found = _ENDS.search(text, begin, reach)
    if found is None and (len(text) > reach or (begin == 0 and text.rstrip(_CLOSERS)[-1:] not in (*".!?",))):
        return False
    words = text[begin : found.end() if found else len(text)].strip()
    if len(words) > LONGEST:
        return False
    begin = text.find(words, begin)
    *full, last = re.split(r"\n\s*\n|\n", text[text.rfind("\n", 0, begin) + 1 : begin + len(words)])
    width = max(map(len, [*full, last]))
    follow = [*full[1:], last] if full else []
    ends = 0
    for line, after in zip(full, follow, strict=True):
        # Where lines are filled, the next one's first word would not have gone into the line.
        if len(line) + 1 + len(after.split(" ", 1)[0]) <= width:
            ends += 2 if _CODE.search(f"{line}\n{after}") else 1
    return ends < LINES


def _character(text: str, near: int) -> int:
    """The last place up to `near` where no letter is parted from its marks, and no emoji in two."""
    while 0 < near < len(text):
        before, after = text[near - 1], text[near]
        joined = unicodedata.category(after)[0] == "M" or "\U0001f3fb" <= after <= "\U0001f3ff"
        joined |= "\u200d" in (before, after) or unicodedata.combining(before) == 9 or "\u1160" <= after <= "\u11ff"
        flags = len(text[:near]) - len(text[:near].rstrip(_FLAGS)) if after in _FLAGS else 0
        if not joined and flags % 2 == 0:
            break
        near -= 1
    return near


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
