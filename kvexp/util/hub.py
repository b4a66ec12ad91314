"""What is to be known of the Hugging Face hub before it is used: whether it answers, and which commit `main` is."""

from __future__ import annotations

import functools
import time
from pathlib import Path

from kvexp.util.errors import ConfigError

TIMEOUT_S = 5.0
TRUSTED_S = 60.0  # a model is loaded in several requests: an answer holds for all of them


def forbidden() -> bool:
    """Whether HF_HUB_OFFLINE=1 says to use the cache alone."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def unreachable() -> str | None:
    """Reason why the hub cannot be asked now; None if it answers.

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
    folder = cached_snapshot(model, revision)
    return folder.name if folder else None


def cached_snapshot(model: str, revision: str | None) -> Path | None:
    """The folder with that commit's files; None where nothing was fetched, ConfigError for what is no hub id."""
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError as error:
        raise ConfigError(f"{model!r} is no folder, file or hub id (OWNER/NAME): correct it") from error
    return Path(file).parent if isinstance(file, str) else None
