"""Where and how to publish: what wandb can take, said before anything runs."""

import contextlib
import importlib.util
import netrc
import os
from urllib.parse import urlsplit

from kvexp.errors import ConfigError

PROJECT = "kvexp"
MODES = ("online", "offline", "disabled")
NOT_IN_NAMES = "/\\#?%:"  # wandb's rule for projects


def check(project: object, mode: object) -> str:
    """The mode to publish in; ConfigError if wandb could not take these settings, or is not there."""
    if not isinstance(project, str) or not project.strip():
        raise ConfigError(f"log.project must be a name, got {project!r}")
    if len(project) > 128 or (wrong := [letter for letter in NOT_IN_NAMES if letter in project]):
        found = f"{len(project)} characters" if len(project) > 128 else " ".join(wrong)
        raise ConfigError(f"log.project may have 128 characters and none of {' '.join(NOT_IN_NAMES)}, got {found}")
    if mode is not None and mode not in MODES:
        raise ConfigError(f"log.mode must be one of auto, {', '.join(MODES)}, got {mode!r}")
    mode = mode or default_mode()
    if mode not in MODES:
        raise ConfigError(f"the variable WANDB_MODE must be one of {', '.join(MODES)}, got {mode!r}: or set log.mode")
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("log=wandb needs wandb, which is not installed; run: pip install 'kvexp[eval]'")
    return str(mode)


def default_mode() -> str:
    if found := os.environ.get("WANDB_MODE"):
        return found
    return "online" if has_account() else "offline"


def has_account() -> bool:
    """Whether wandb would find a key where it looks for one: its variable, or the netrc entry `wandb login` makes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False
