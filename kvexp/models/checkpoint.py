"""Whether a checkpoint is whole, and holds the weights that its configuration asks for: all of them and no others."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open

from kvexp.errors import ConfigError

SHOWN = 4  # names of each kind in a message
# Tables that older versions of transformers saved and now make anew; what a family's own class ignores is not repeated.
TABLES = re.compile(r"(^|\.)(attn\.(masked_)?bias|attn\.embed_positions|rotary_emb\.inv_freq)$")


def check_headers(folder: Path, layers: int) -> None:
    """ConfigError for a safetensors file that is cut short, empty, of wrong sizes or unreadable. Weights are not read.

    layers: of the configuration. ConfigError too where it has more layers than the files have weights: making so many
    layers would take long before the missing weights are noticed.
    """
    held = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                held += len(opened.keys())
        except Exception as error:  # safetensors' own have no public base
            # No rights, or no memory to map it, which torch tells as a RuntimeError: the file may be whole.
            if isinstance(error, OSError) or os.strerror(errno.ENOMEM) in str(error):
                raise ConfigError(f"{file} cannot be read: {error}") from error
            raise ConfigError(f"{file} is damaged ({error}): fetch or copy it again") from error
    if held < layers and not any(folder.glob("*.index.json")):  # parts may lie deeper
        raise ConfigError(
            f"config.json of {folder} asks for {layers} layers, and its files hold {held} weights: correct "
            "num_hidden_layers or fetch the checkpoint again"
        )


def check_complete(path: str, found: Mapping[str, Any]) -> None:
    """ConfigError where some weights of the model were not in the checkpoint, or some of the checkpoint's not in it.

    path: named in the message. found: from_pretrained's loading info, which leaves out tied heads and follows the
    renamings that it knows.
    """
    kinds = {
        "missing": list(found["missing_keys"]),
        "unexpected": [name for name in found["unexpected_keys"] if not TABLES.search(name)],
        "of another shape": [
            f"{name} {list(there)} instead of {list(wanted)}" for name, there, wanted in found["mismatched_keys"]
        ],
    }
    wrong = "; ".join(f"{kind}: {_some(names)}" for kind, names in kinds.items() if names)
    if wrong:
        raise ConfigError(
            f"the weights in {path} are not those of its config.json ({wrong}): what is missing would be random "
            "numbers; correct config.json or fetch the checkpoint again"
        )


def _some(names: Iterable[str]) -> str:
    """The first few of some weight names, in the order of the layers, as text for a message."""
    ordered = sorted(
        names, key=lambda name: [(word.isdigit(), len(word) * word.isdigit(), word) for word in name.split(".")]
    )
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more


@contextmanager
def without_report() -> Iterator[None]:
    """Silence transformers' table of missing and surplus weights, which `check_complete` reports as an error."""

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
