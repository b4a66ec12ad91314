"""What a calibration pass reads: texts from a file or kvexp's own, joined and cut into sequences of token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexp.articles import articles, articles_digest
from kvexp.errors import ConfigError
from kvexp.paths import path_of


@dataclass(frozen=True)
class CalibrationTexts:
    """Texts with what to call them and 16 hex digits of what they were read from."""

    name: str
    digest: str
    texts: tuple[str, ...]


def calibration_texts(data: str) -> CalibrationTexts:
    """The texts of a file, or kvexp's articles for an empty name; ConfigError for a file without texts."""
    if not data:
        found = articles()
        return CalibrationTexts(
            f"kvexp's {len(found)} articles", articles_digest(), tuple(f"{one.title}\n\n{one.text}" for one in found)
        )
    file = path_of(data, "data")
    try:
        content = file.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"data={data}: cannot read it: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"data={data} is not UTF-8 text ({error}); save it in that encoding") from error
    texts = _rows(data, text) if file.suffix == ".jsonl" else [text]
    texts = [one for one in texts if one.strip()]
    if not texts:
        raise ConfigError(f"data={data} has no text in it")
    return CalibrationTexts(Path(file).name, hashlib.sha256(content).hexdigest()[:16], tuple(texts))


def _rows(data: str, content: str) -> list[str]:
    """The field `text` of each line that is not empty."""
    found = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"line {number} of data={data} is no JSON object with a field text") from error
        if not isinstance(text, str):
            raise ConfigError(f"line {number} of data={data}: text must be a text, got {text!r:.60}")
        found.append(text)
    return found


def sequences_of(texts: Sequence[str], tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """At most `count` sequences of `length` token ids: the texts one behind the other, cut; a rest is left out.

    Texts of fewer tokens in all are one shorter sequence. Each begins with the tokenizer's begin token where it puts
    one in front of a text.
    """
    joined = tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False).input_ids
    begin = tokenizer.bos_token_id
    first = [begin] if begin is not None and tokenizer(texts[0][:64]).input_ids[:1] == [begin] else []
    room = length - len(first)
    if room < 1 or not joined:
        raise ConfigError(f"tokens must be at least {1 + len(first)}, got {length}, and the texts must have a token")
    whole = max(1, min(count, len(joined) // room))
    return [[*first, *joined[at * room : (at + 1) * room]] for at in range(whole)]
