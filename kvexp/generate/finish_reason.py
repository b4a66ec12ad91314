"""Where each row of a batch ended, and at what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from kvexp.errors import ConfigError


@dataclass(frozen=True)
class Ending:
    """reason, in vLLM's words: "stop" at an end token or stop string (`token`, `text`), "length" at max_new_tokens."""

    reason: str
    token: int | None = None
    text: str | None = None


def stop_criteria(strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """Which rows of ids [R, columns] have just written one of the stop strings; None where there are none."""
    if not strings:
        return None
    if tokenizer is None:
        raise ConfigError("stop_strings need the tokenizer: pass tokenizer=")
    return StopStringCriteria(tokenizer, list(strings))


def endings(
    ids: Tensor, columns: int, eos: Sequence[int], strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[list[list[int]], list[Ending]]:
    """(new tokens, how they ended) of every row of ids [R, columns + new].

    Tokens up to and including the end token, or the one that completes a stop string: what follows is padding.
    """
    ids, stops = ids.cpu(), stop_criteria(strings, tokenizer)
    ended = torch.isin(ids[:, columns:], torch.tensor(list(eos), dtype=ids.dtype, device=ids.device))
    wrote = torch.zeros_like(ended)
    for end in range(columns + 1, ids.shape[1] + 1) if stops is not None else ():
        wrote[:, end - columns - 1] = stops(ids[:, :end], None)
    tokens, made = [], []
    for row, new in enumerate(ids[:, columns:].tolist()):
        at = (ended[row] | wrote[row]).nonzero()
        kept = new[: int(at[0]) + 1] if len(at) else new
        tokens.append(kept)
        if not len(at):
            made.append(Ending("length"))
        elif ended[row, at[0]]:
            made.append(Ending("stop", token=kept[-1]))
        else:
            assert tokenizer is not None
            made.append(Ending("stop", text=_last(tokenizer.decode(ids[row, : columns + len(kept)].tolist()), strings)))
    return tokens, made


def _last(text: str, strings: Sequence[str]) -> str:
    """The stop string that ends last in the text."""
    return max(strings, key=lambda each: text.rfind(each) + len(each) if each in text else -1)
