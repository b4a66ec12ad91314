"""Where each row's answer ended, and at what: an end token, a stop string or its length."""

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
    """What ended a row.

    reason, in vLLM's words: "stop" at an end token (its id: token) or a stop string (text), else "length".
    """

    reason: str
    token: int | None = None
    text: str | None = None


def stop_criteria(strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """A function of ids [R, columns] that tells which rows have just written a stop string; None without strings.

    ConfigError where there are strings but no tokenizer.
    """
    if not strings:
        return None
    if tokenizer is None:
        raise ConfigError("stop_strings need the tokenizer: pass tokenizer=")
    return StopStringCriteria(tokenizer, list(strings))


def truncate_at_end(
    ids: Tensor, columns: int, eos: Sequence[int], strings: Sequence[str], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[list[list[int]], list[Ending]]:
    """New tokens of every row of ids [R, columns + new], cut at the row's end, and how it ended.

    The cut is behind the first end token, or behind the token that completes a stop string: what follows is padding.
    columns: of the prompt; eos: ids of end tokens; strings: the stop strings.
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
    """The stop string whose occurrence ends last in the text."""
    return max(strings, key=lambda each: text.rfind(each) + len(each) if each in text else -1)
