"""What is to be known of the Hugging Face hub before it is used: whether it answers, and which commit `main` is."""

from __future__ import annotations

import functools
import time
from pathlib import Path

TIMEOUT_S = 5.0
TRUSTED_S = 60.0  # a model is loaded in several requests: an answer holds for all of them


def forbidden() -> bool:
    """Whether HF_HUB_OFFLINE=1 says to use the cache alone."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def unreachable() -> str | None:
    """Why the hub cannot be asked now, in words; None if it answers.

    One request without retries, so that an error comes at once and not after half a minute of them, through the session
    that huggingface_hub itself uses (proxies, HF_ENDPOINT). Any answer counts: whether a repository is there is for the
    real request to find out.
    """
    from huggingface_hub import constants

    if forbidden():
        return "HF_HUB_OFFLINE=1 forbids asking it"
    return _asked(constants.ENDPOINT, int(time.monotonic() / TRUSTED_S))


@functools.lru_cache(maxsize=1)
def _asked(endpoint: str, period: int) -> str | None:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=TIMEOUT_S)
    except Exception as error:  # httpx's, requests' (older hubs) or a proxy's own: no common base
        return f"{endpoint} does not answer: {error or type(error).__name__}"
    return None


def cached_commit(model: str, revision: str | None) -> str | None:
    """The commit that this revision of a model (None: main) stood for when its config.json was last fetched."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(file).parent.name if isinstance(file, str) else None
