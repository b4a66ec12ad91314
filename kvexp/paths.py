"""Where kvexp's own configurations lie, and a path as somebody typed it."""

from __future__ import annotations

from pathlib import Path

from kvexp.errors import ConfigError

CONF = Path(__file__).with_name("conf")  # in a checkout a link to conf/, in a wheel the folder
WHEEL = "pypi:"  # begins a model.path that names a wheel of the Python package index
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, of the file systems of Linux and macOS


def path_of(words: str, option: str) -> Path:
    """The path with ~ filled in; ConfigError, in the words of the option, for one that no file system can hold."""
    try:
        path = Path(words).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{option}={words[:60]}: nobody of that name has a home folder; write the path out"
        ) from error
    size = max((_bytes(part) for part in path.parts), default=0)
    if size > LONGEST_NAME or _bytes(str(path)) > LONGEST_PATH:
        raise ConfigError(
            f"{option}={words[:60]}... is too long for a file: a name has {size} bytes, {LONGEST_NAME} are allowed "
            f"({LONGEST_PATH} for the whole path); shorten it"
        )
    return path


def _bytes(words: str) -> int:
    return len(words.encode(errors="replace"))
