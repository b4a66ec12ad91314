"""The lm-eval package: imported late, quietly, and missed in words that say what to install."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from kvexp.errors import ConfigError


def require() -> str:
    """lm-eval's version; ConfigError where it is not installed."""
    try:
        import lm_eval.tasks  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"lm-eval tasks need the package lm-eval ({error}); install it with: pip install kvexp[eval]"
        ) from error
    return _version()


@functools.cache
def _version() -> str:
    """Read once: every item's metrics ask for it."""
    return metadata.version("lm_eval")


@contextmanager
def quiet() -> Iterator[None]:
    """Without lm-eval's remarks and the progress bars of `datasets`, both as they were afterwards."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger, bars = logging.getLogger("lm_eval"), not are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            enable_progress_bars()
