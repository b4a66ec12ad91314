"""What stands before ROUGE: are its packages installed, can rouge_score read the references, how are they imported."""

from __future__ import annotations

import importlib.util
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from kvexp.errors import ConfigError

TOKENIZERS = ("default", "unicode")
# Of all references' letters, of their words, and so many different words: more is no English text with some names.
LETTERS, WORDS, DIFFERENT = 0.10, 0.05, 10
MOST = 0.5  # of a single reference's letters: next to nothing of it would be compared
PACKAGES = {"rouge_score": "rouge-score", "nltk": "nltk"}  # module: what pip calls it


def check_rouge_installed() -> None:
    """ConfigError for a package that scores would miss after the first answer. Importing them takes time: not here."""
    for module, package in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"ROUGE needs {package}, which is not installed; run: pip install {package}")


def dropped_letters(text: str) -> int:
    """How many letters, marks and digits of a text rouge_score's own tokenizer leaves out: all but a-z and 0-9."""
    if text.isascii():
        return 0
    return sum(c > "\x7f" and unicodedata.category(c)[0] in "LMN" for c in text.lower())


def check_references(references: Iterable[str]) -> None:
    """ConfigError where rouge_score's own tokenizer would leave out more of the references than some names' accents."""
    dropped = letters = 0
    words: list[str] = []
    unread = False
    for reference in references:
        here, of = dropped_letters(reference), sum(unicodedata.category(c)[0] in "LMN" for c in reference)
        dropped, letters, unread = dropped + here, letters + of, unread or here > MOST * of
        words += re.findall(r"\S+", reference)
    hurt = [word for word in words if dropped_letters(word)]
    many = len(hurt) > WORDS * len(words) and len({word.lower() for word in hurt}) >= DIFFERENT
    if not (many or unread or dropped > LETTERS * letters):
        return
    raise ConfigError(
        f"rouge_score's own tokenizer knows a-z and 0-9 alone and would leave out {dropped} of the {letters} letters "
        f"of the references, as in {', '.join(map(repr, list(dict.fromkeys(hurt))[:3]))}: equal texts would get less "
        "than 100, and others score by the digits they share; set task.rouge_tokenizer=unicode (or correct the rows)"
    )


@contextmanager
def unimported(*names: str) -> Iterator[None]:
    """In the block, modules of these names that are not loaded yet cannot be imported; afterwards they can.

    nltk imports scikit-learn (and with it pandas) and scipy.stats for classifiers and collocations, or does without
    where they are missing: three quarters of the processor time of importing its stemmer. Of nltk only the stemmer is
    used here; a program that wants the rest imports nltk first.
    """
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: Python's own mark for "cannot be imported"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
