"""Where kvexp keeps what it can make again: digests of files, fetched and converted models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """KVEXP_CACHE, else the system's cache folder for kvexp (Linux: $XDG_CACHE_HOME/kvexp or ~/.cache/kvexp).

    The folder need not exist.
    """
    own = os.environ.get("KVEXP_CACHE")
    if own:
        return Path(os.path.expanduser(own))
    import platformdirs  # late: a GPU machine with torch and transformers alone reads models without it

    return Path(platformdirs.user_cache_dir("kvexp", appauthor=False))
