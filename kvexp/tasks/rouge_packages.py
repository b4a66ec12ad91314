"""The packages behind ROUGE: whether they are installed, and how they are imported without what no score needs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvexp.errors import ConfigError

PACKAGES = {"rouge_score": "rouge-score", "nltk": "nltk"}  # module: what pip calls it


def check_rouge_installed() -> None:
    """ConfigError for a package that scores would miss after the first answer. Importing them takes time: not here."""
    for module, package in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"ROUGE needs {package}, which is not installed; run: pip install {package}")


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
