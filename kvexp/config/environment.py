"""Where and with what a run was made."""

from __future__ import annotations

import contextlib
import functools
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


@functools.cache  # asked for by every run of a sweep, and git is a process
def environment() -> dict[str, Any]:
    """Versions, device, commit."""
    import torch

    import kvexp

    where = Path(__file__).resolve().parents[2]
    commit = None
    with contextlib.suppress(OSError):  # no git, or not in a checkout
        if (where / ".git").exists():
            line = ["git", "describe", "--always", "--dirty"]
            commit = subprocess.run(line, cwd=where, capture_output=True, text=True).stdout.strip() or None
    return {
        "kvexp": kvexp.__version__,
        "numerics": kvexp.NUMERICS,
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
    }
