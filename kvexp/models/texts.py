"""The text that each token adds: joined, these are the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LONGEST = 4  # bytes of a character: more tokens than that end none


def texts_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each of the tokens `ids` adds to the text.

    A token that ends inside a character adds nothing, and the next one adds the character. Tokenizers move the space
    between two words to either of them, so each token is decoded together with the one before.
    """
    texts: list[str] = []
    before = told = 0  # decoded together: from `before` on; of that, told already: up to `told`
    for end in range(1, len(ids) + 1):
        known, whole = _decoded(tokenizer, ids[before:told]), _decoded(tokenizer, ids[before:end])
        if whole.endswith("\ufffd") and end - told < LONGEST and end < len(ids):
            texts.append("")
            continue
        texts.append(whole[len(known) :])
        before, told = told, end
    return texts


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens included."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
