"""The header of a GGUF file: its metadata, and where each tensor lies. No tensor is read.

Layout: llama.cpp's docs, "GGUF", versions 2 and 3, little-endian. Every count is bounded by the bytes that are there.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexp.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, where the file names no other
STRING, ARRAY = 8, 9  # types of values that have no fixed width
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MOST_AXES = 4
UNQUANTISED = ("F32", "F16", "BF16")
READABLE = (
    *UNQUANTISED,
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies in the file.

    shape: in torch's order; kind: F32, Q4_1 …; start: its first byte in the file; size: its bytes there.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    size: int  # bytes in the file

    @property
    def elements(self) -> int:
        """Number of the tensor's elements."""
        total = 1
        for length in self.shape:
            total *= length
        return total


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file: metadata by key and tensors by name, both in the file's order."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's family, such as llama or gpt2."""
        return str(self.fields["general.architecture"])

    @property
    def quantisation(self) -> str:
        """The type that holds most of the weights: Q4_1, Q8_0, F16 …"""
        held: Counter[str] = Counter()
        for tensor in self.tensors.values():
            held[tensor.kind] += tensor.elements
        return held.most_common(1)[0][0]

    @property
    def elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors.values())


class _Damaged(Exception):
    """Raised where the bytes are not those of a GGUF header; its text says why."""


class _Bytes:
    """Reads a file's bytes from front to back; _Damaged past the end. at: the next byte."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > len(self.data) - self.at:
            raise _Damaged("it ends within its header")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        """The next number, of a format of Python's `struct`, little-endian."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        """The next string: its length as 64 bits, then UTF-8."""
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Damaged("a text in its header is no UTF-8") from error

    def value(self, kind: int, inside: bool = False) -> Any:
        """The next value of metadata, of GGUF's type number `kind`; inside: of an array, which holds no arrays."""
        if kind in FORMATS:
            return self.number(FORMATS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY or inside:
            raise _Damaged(f"its header holds a value of unknown type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in FORMATS:
            form = FORMATS[inner]
            raw = self.take(count * struct.calcsize(f"<{form}"))
            return list(struct.unpack(f"<{count}{form}", raw))
        return [self.value(inner, inside=True) for _ in range(count)]  # every one takes bytes, which run out


def read_header(path: Path) -> GgufHeader:
    """The header of the GGUF file at `path`.

    ConfigError for a file that cannot be read, is no GGUF file, is damaged or cut short, or has tensors of unknown
    types.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(path, data)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is empty: fetch or copy it again") from error  # mmap's word for no bytes
    except _Damaged as error:
        raise ConfigError(f"{path} is no whole GGUF file ({error}): fetch or copy it again") from error


def _header(path: Path, data: mmap.mmap) -> GgufHeader:
    """The header in the bytes `data` of the file at `path`; _Damaged or ConfigError as of `read_header`."""
    read = _Bytes(data)
    if data[:4] != MAGIC:
        raise _Damaged("it does not begin with GGUF")
    read.at = 4
    version = read.number("I")
    if version not in VERSIONS:
        raise ConfigError(f"{path} is GGUF version {version}; versions 2 and 3, little-endian, can be read")
    tensors, keys = read.number("Q"), read.number("Q")
    fields: dict[str, Any] = {}
    for _ in range(keys):
        key = read.text()
        if key in fields:
            raise _Damaged(f"it sets {key} twice")
        fields[key] = read.value(read.number("I"))
    if not isinstance(fields.get("general.architecture"), str):
        raise _Damaged("it does not name its architecture")
    table = [_entry(read) for _ in range(tensors)]
    twice = [name for name, count in Counter(entry[0] for entry in table).items() if count > 1]
    if twice:
        raise _Damaged(f"it holds tensor {twice[0]} twice")
    alignment = fields.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise _Damaged(f"general.alignment is {alignment!r}")
    start = -(-read.at // alignment) * alignment
    found = {name: _placed(path, name, shape, kind, start + offset) for name, shape, kind, offset in table}
    end = max((tensor.start + tensor.size for tensor in found.values()), default=start)
    if not found:
        raise _Damaged("it holds no tensors, a vocabulary alone")
    if end > len(data):
        raise _Damaged(f"it has {len(data)} of {end} bytes")
    return GgufHeader(path, fields, found)


def _entry(read: _Bytes) -> tuple[str, tuple[int, ...], int, int]:
    """The next tensor of the header: name, shape in torch's order, number of its type, offset into the data."""
    name, axes = read.text(), read.number("I")
    if not 0 < axes <= MOST_AXES:
        raise _Damaged(f"tensor {name!r} has {axes} axes")
    shape = tuple(reversed([read.number("Q") for _ in range(axes)]))
    return name, shape, read.number("I"), read.number("Q")


def _placed(path: Path, name: str, shape: tuple[int, ...], number: int, start: int) -> GgufTensor:
    """The tensor called `name`, of GGUF's type `number`, whose first byte in the file is `start`.

    ConfigError for a type that cannot be dequantised; _Damaged where its rows are no whole number of blocks.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        kind = None
    if kind is None or kind.name not in READABLE:
        what = f"type {number}" if kind is None else kind.name
        raise ConfigError(
            f"{path}: tensor {name} is of {what}, which cannot be turned into numbers here; the types that can: "
            f"{', '.join(READABLE)}"
        )
    block, size = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise _Damaged(f"tensor {name!r} has rows of {shape[-1]} numbers, {kind.name} packs {block} at a time")
    tensor = GgufTensor(name, shape, kind.name, start, 0)
    return GgufTensor(name, shape, kind.name, start, tensor.elements // block * size)
