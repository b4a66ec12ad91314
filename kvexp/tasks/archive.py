"""One member of a .zip, read as a stream: what it unpacks to is bounded, and never in memory as a whole."""

from __future__ import annotations

import contextlib
import hashlib
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from kvexp.errors import ConfigError

MEMBER = 1 << 30  # bytes; the largest of LongBench has 40 MB
LINE = 64 << 20  # bytes; the longest of LongBench has 1 MB
METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # zipfile unpacks others a block at a time, however large it gets

NAMES = {9: "deflate64", zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "lzma", 93: "zstandard"}


@dataclass(frozen=True)
class Archive:
    """A .zip of which the file NAME.jsonl is wanted, at whatever depth."""

    path: Path
    name: str

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(number from 1, line) of the member; ConfigError for one that cannot be read or is longer than `LINE`."""
        with self._open() as stream:
            for number in range(1, MEMBER + 1):
                line = stream.readline(LINE + 1)
                if not line:
                    return
                if len(line) > LINE:
                    raise self._refused(
                        f"line {number} of {self.name}.jsonl is longer than {_size(LINE)}", "look at what it holds"
                    )
                yield number, line

    def digest(self) -> bytes:
        """SHA-256 of the member's bytes, unpacked."""
        total = hashlib.sha256()
        with self._open() as stream:
            while chunk := stream.read(1 << 20):
                total.update(chunk)
        return total.digest()

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        """The member, checked before its first byte is unpacked. zipfile gives no more than the declared size."""
        with self._said(), zipfile.ZipFile(self.path) as zipped:
            found = [info for info in zipped.infolist() if info.filename.endswith(".jsonl")]
            mine = [info for info in found if PurePosixPath(info.filename).stem == self.name]
            if len(mine) != 1:
                each = ", ".join(info.filename for info in mine)
                held = ", ".join(sorted({PurePosixPath(info.filename).stem for info in found})) or "no .jsonl file"
                what = (
                    f"is in {self.path} {len(mine)} times ({each}); unpack the right one and name it"
                    if mine
                    else f"is not in {self.path}, which holds {held}"
                )
                raise ConfigError(f"task.data_files: {self.name}.jsonl {what}")
            self._check(mine[0])
            with zipped.open(mine[0]) as member:
                yield io.BufferedReader(member, 1 << 16)  # type: ignore[type-var]

    def _check(self, info: zipfile.ZipInfo) -> None:
        if info.flag_bits & 1:
            raise self._refused(f"{info.filename} is encrypted", "unpack it with its password and name the folder")
        if info.compress_type not in METHODS:
            kind = NAMES.get(info.compress_type, f"method {info.compress_type}")
            raise self._refused(
                f"{info.filename} is compressed with {kind}; kvexp unpacks deflate", "unpack it and name the folder"
            )
        if info.file_size > MEMBER:
            raise self._refused(
                f"{info.filename} unpacks to {_size(info.file_size)}, more than the {_size(MEMBER)} that are read of "
                "an archive",
                "unpack it and name the file, if it is what it should be",
            )

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, struct.error, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            raise self._refused(str(error) or type(error).__name__, "fetch it again") from error

    def _refused(self, why: str, way: str) -> ConfigError:
        return ConfigError(f"task.data_files: cannot read {self.path}: {why}; {way}")


def _size(number: int) -> str:
    return f"{number / (1 << 20):,.0f} MiB" if number >= 1 << 20 else f"{number:,} bytes"
