"""Errors before anything runs or a number becomes wrong, the name that was meant, settings that exclude each other."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar


class ConfigError(ValueError):
    """A setting that cannot work. The message says what was found, what is allowed and what to change."""


class CacheError(RuntimeError):
    """A use of a cache that would give a wrong number, refused instead."""


class NotFinite(CacheError):
    """The model put out NaN or inf: every number after it would be chosen by nothing."""


# Names that other programs (transformers, kvpress, vLLM) have, or kvexp once had -> the name here.
OTHER_NAMES = {
    **dict.fromkeys(("ratio", "budget_ratio", "cache_ratio", "keep_ratio", "compression_ratio"), "kv_ratio"),
    **dict.fromkeys(("cache_size", "max_capacity_prompt", "n_tokens", "num_tokens"), "tokens"),
    **dict.fromkeys(("max_length", "max_tokens"), "max_new_tokens"),
    **dict.fromkeys(("press", "policy", "strategy", "eviction", "eviction_method"), "method"),
    **dict.fromkeys(("model_name", "model_id", "model_path", "checkpoint", "pretrained_model_name_or_path"), "model"),
    **dict.fromkeys(("dataset", "data_file", "benchmark"), "task"),
    **dict.fromkeys(("n_beams", "beams"), "num_beams"),
    "stop": "stop_strings",
    "torch_dtype": "dtype",
    "facts": "babilong",
}
REMARKS = {"compression_ratio": " It is the share that stays: 1 - compression_ratio."}


def folded(name: str) -> str:
    """A name without what people write differently: case, dashes, underscores; "SmolLM2-135M" -> "smollm2135m"."""
    return re.sub(r"[\W_]", "", name).lower()


def nearest(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Known names that a word was probably meant to be, the nearest first, at most `count`; none where none is near."""
    names = list(known)
    if (other := OTHER_NAMES.get(word)) in names:
        return [other]
    same = [name for name in names if folded(name) == folded(word)][:count]
    close = functools.partial(difflib.get_close_matches, possibilities=names, n=count, cutoff=cutoff)
    return same or close(word) or close(word.lower())


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean h2o?", or nothing where no known name is near."""
    near = nearest(word, known)
    return f"; did you mean {near[0]}?{REMARKS.get(word, '')}" if near else ""


T = TypeVar("T")
Rule = tuple[Callable[[T], object], str]  # whether it applies; the sentence, in which {c.mode} is the object's mode


def reason_against(item: T, rules: Iterable[Rule[T]]) -> str | None:
    """The sentence of the first rule that applies to the object, filled in; None: no rule does."""
    return next((sentence.format(c=item) for applies, sentence in rules if applies(item)), None)


def refuse(item: T, rules: Iterable[Rule[T]]) -> None:
    """ConfigError with the sentence of the first rule that applies to the object."""
    if (why := reason_against(item, rules)) is not None:
        raise ConfigError(why)


@contextmanager
def as_config_error(problem: str) -> Iterator[None]:
    """A block whose errors, of transformers', torch's or peft's code and without a common base, become ConfigErrors.

    problem: the beginning of their message.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:800] or type(error).__name__
        raise ConfigError(f"{problem}: {reason}") from error
