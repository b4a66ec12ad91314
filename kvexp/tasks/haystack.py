"""The text that needles are hidden in: files read in the order of their names, or a filler said over and over."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from kvexp.digests import Stamp, stamp
from kvexp.errors import ConfigError
from kvexp.paths import path_of

_SENTENCE = re.compile(r"[.!?][\"')\]\u201d\u2019]*\s+")


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
    """The same text beginning with the first sentence past `share` of it, and going on with what was in front."""
    found = _SENTENCE.search(text, int(share * len(text)))
    return text if found is None or share <= 0 else f"{text[found.end() :]}\n\n{text[: found.end()].rstrip()}"


def insert(text: str, needles: list[tuple[float, str]]) -> str:
    """The text with each (depth in percent, needle) put in front of the sentence it would fall into.

    Depth 0 is in front of all, 100 behind all. Where nothing ends a sentence, a needle goes between two words.
    """
    parts, end = [], len(text)
    for depth, needle in reversed(sorted(needles, key=lambda pair: pair[0])):
        at = min(_boundary(text, int(len(text) * depth / 100)), end)
        parts += [text[at:end], f"{needle} " if at == 0 or text[at - 1].isspace() else f" {needle} "]
        end = at
    parts.append(text[:end])
    return "".join(reversed(parts)).rstrip()


def _boundary(text: str, near: int) -> int:
    """Where the sentence that holds character `near` begins; 0 and the text's end stay."""
    if near >= len(text):
        return len(text)
    window = text[max(0, near - 2000) : near]
    ends = list(_SENTENCE.finditer(window))
    if ends:
        return max(0, near - 2000) + ends[-1].end()
    return 0 if near <= 2000 else near - len(window) + window.rfind(" ") + 1


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
