"""What model.path may name besides a folder and a hub id: a GGUF file, and a model in a wheel (pypi:NAME==VERSION)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvexp.errors import ConfigError
from kvexp.paths import path_of

if TYPE_CHECKING:
    from kvexp.models.converted import ConvertedModel

SCHEME = "pypi:"
ENDING = ".gguf"


def located(path: str, option: str = "model.path") -> tuple[str, ConvertedModel | None]:
    """(folder or hub id, what it was converted from if it was); fetches and converts what is not in the cache.

    option: in whose words errors are told. ConfigError where the GGUF file cannot be used or the wheel not be fetched.
    """
    if path.startswith(SCHEME):
        from kvexp.models.fetch import fetched, wheel_of  # late, as below: most models need neither

        found = fetched(wheel_of(path))
    elif is_gguf(path, option):
        from kvexp.models.converted import converted

        found = converted(path_of(path, option))
    elif path.endswith(ENDING):
        raise ConfigError(f"{option}={path}: there is no such file")
    else:
        return path, None
    return str(found.folder), found


def is_gguf(path: str, option: str = "model.path") -> bool:
    """Whether it names a GGUF file: by its ending, or by what an existing file begins with."""
    file = path_of(path, option)
    return file.is_file() and (file.suffix.lower() == ENDING or _begins(file) == b"GGUF")


def _begins(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(4)
    except OSError:  # told by whoever opens it next
        return b""
