"""The digest of a model folder: changes with every byte of it that a model or a tokenizer is made from."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvexp.digests import file_digest
from kvexp.errors import ConfigError

READ = (
    *("*.json", "*.model", "*.txt", "*.jinja", "*.safetensors", "*.bin", "*.bpe", "*.tiktoken"),
    "additional_chat_templates/*.jinja",
)
CODE = ("**/*.py",)  # run with trust_remote_code alone


def folder_digest(folder: Path, *, code: bool) -> str:
    """16 hex digits of names and contents, wherever the folder lies."""
    files = sorted(_files(folder, code))
    try:
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as readers:  # hashing lets other threads run
            digests = list(readers.map(lambda name: file_digest(folder / name), files))
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror or error}") from error
    lines = (f"{name} {digest}\n" for name, digest in zip(files, digests, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _files(folder: Path, code: bool) -> set[str]:
    patterns = READ + CODE if code else READ
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    for index in folder.glob("*.index.json"):  # weights in parts may lie deeper
        found |= {folder / name for name in _parts(index)}
    return {os.path.relpath(path, folder) for path in found if path.is_file()}


def _parts(index: Path) -> set[str]:
    try:
        return {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):  # said when the model is loaded
        return set()
