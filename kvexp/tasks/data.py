"""Rows of data sets: local files, archives, the hub. Sets nothing global, changes no cache.

JSON is read without `datasets`, as it is written: its reader guesses a type for every column from the first rows (a
text that looks like a date becomes one) and, on some lines that hold no object, takes the process down with it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from kvexp.util.errors import ConfigError
from kvexp.util.files import file_digest, path_of
from kvexp.util.hub import forbidden, unreachable
from kvexp.util.output import size


def json_rows(path: Path, option: str = "task.data_files") -> Iterator[Row]:
    """A list of objects, or one object per line (empty lines are none); ConfigError names the line or row.

    option: that named the file.
    """
    try:
        if path.stat().st_size == 0:
            raise ConfigError(f"{option}: {path} is empty; name a file with at least one row")
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            if path.suffix == ".json" and not _is_lines(file.readline()):
                file.seek(0)
                value = _parsed(file.read(), str(path))
                for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
                    yield _row(row, f"row {number} of {path}")
                return
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield json_row(line, f"line {number} of {path}")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: {path} is not UTF-8 text ({error}); save it in that encoding") from error
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path}: {error.strerror or error}") from error


def json_row(line: str | bytes, where: str) -> Row:
    """The object on a line; ConfigError that starts with `where`."""
    return _row(_parsed(line, where), where)


def _parsed(data: str | bytes, where: str) -> Any:
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        return json.loads(text, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}; correct or remove it") from error


def _is_lines(first: str) -> bool:
    """Whether a .json file holds an object per line after all."""
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ConfigError(f"{where} is no object with fields but of type {kind}; correct or remove it")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ConfigError(f"{where} has half of a character, {half} alone; correct or remove it") from error
    return value


def _constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")


KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_COMMIT = re.compile("[0-9a-f]{7,40}")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Source of rows: `data_files` if given, else the hub. `Task` documents the fields."""

    data_files: str | None = None
    hub_id: str = ""
    hub_config: str | None = None
    revision: str | None = None
    split: str = "validation"
    streaming: bool = True

    def __str__(self) -> str:
        if self.data_files is not None:
            return f"task.data_files={self.data_files}"
        config = f"/{self.hub_config}" if self.hub_config else ""
        return f"{self.hub_id}{config}, split {self.split}, revision {self.revision or 'main'}"

    def files(self) -> list[Path]:
        """The local files, a glob's in the order of their names; ConfigError if there is none or one is no data."""
        assert self.data_files is not None
        named = path_of(self.data_files, "task.data_files")
        paths = [named] if named.exists() else [Path(name) for name in sorted(glob.glob(str(named), recursive=True))]
        if not paths:
            raise ConfigError(
                f"task.data_files={self.data_files}: there is no such file (seen from {Path.cwd()}); "
                "give the path of a .json, .jsonl or .parquet file, or a glob that matches some"
            )
        for path in paths:
            if path.is_dir():
                raise ConfigError(f"task.data_files: {path} is a folder; name its files, as in '{path}/*.jsonl'")
            if path.suffix not in KINDS:
                raise ConfigError(f"task.data_files: {path} must end in .json, .jsonl or .parquet")
        return paths

    def places(self) -> list[Path]:
        """The local files that are read, whatever holds the rows in them."""
        return [] if self.data_files is None else self.files()

    def rows(self) -> Iterator[tuple[str, Row]]:
        """("row 3 of rows.jsonl", row) for all rows in order, counted from 1 within a file."""
        if self.data_files is None:
            yield from _hub_rows(self)
            return
        for path in self.files():
            rows = json_rows(path) if KINDS[path.suffix] == "json" else _parquet_rows(path)
            for number, row in enumerate(rows, start=1):
                yield f"row {number} of {path}", row

    def choose(self, limit: int | None, sample: str, seed: int) -> Iterator[tuple[str, Row]]:
        """The rows a task uses, in the order in which it uses them; a larger limit only adds rows at the end.

        sample=with_replacement repeats numpy's legacy stream, the one `np.random.seed` and `randint` draw from.
        """
        if sample == "first":
            yield from islice(self.rows(), limit)
            return
        assert limit is not None
        source = replace(self, streaming=False)  # of no effect on files; of the hub a copy to pick rows from
        total = sum(1 for _ in source.rows())
        if total == 0:
            return
        draws = random_state(seed)
        if sample == "with_replacement":
            order = draws.randint(total, size=limit).tolist()
        else:
            order = draws.permutation(total)[:limit].tolist()
        wanted = set(order)
        picked = {number: row for number, row in enumerate(source.rows()) if number in wanted}
        for number in order:
            yield picked[number]

    def fingerprint(self) -> str:
        """Names the data: digest of the files' bytes (not of their names), or hub id, config, revision and split."""
        if self.data_files is None:
            return f"hub:{self}"
        digest = hashlib.sha256()
        for path in self.files():
            try:
                digest.update(bytes.fromhex(file_digest(path)))
            except OSError as error:
                raise _unreadable(path, error) from error
        return f"files:{digest.hexdigest()[:16]}"


def random_state(seed: int | list[int]) -> Any:
    """numpy's legacy generator, whose stream is the same in all of its versions."""
    import numpy as np  # late: a command line that is only composed waits for no numpy

    return np.random.RandomState(seed)


def text(row: Row, field: str, where: str, option: str, empty: bool = False) -> str:
    """The text in a field of a row; ConfigError naming row, field and the option that renames it, if there is none.

    A field that only some rows have comes out of `datasets` as None in the others, so missing and null read the same.
    """
    value = row.get(field)
    if value is None:
        has = ", ".join(key for key, other in row.items() if other is not None) or "nothing"
        way = "take a file whose rows have it" if option == "data_files" else "name the field that holds it"
        raise ConfigError(
            f"{where} has no field {field!r} (or null there), it has: {has}; "
            f"correct the row, or {way} with task.{option}"
        )
    if not isinstance(value, str):
        raise ConfigError(f"{where}: field {field!r} must be a text, got {type(value).__name__} {str(value)[:60]!r}")
    if not empty and not value.strip():
        raise ConfigError(f"{where}: field {field!r} is empty; correct or remove the row")
    return value


def texts(row: Mapping[str, Any], field: str, where: str, least: int = 1) -> list[str]:
    """The texts in a field of a row, at least so many; ConfigError otherwise."""
    given = row.get(field)
    if not isinstance(given, list | tuple) or len(given) < least or not all(isinstance(text, str) for text in given):
        raise misshapen(row, field, where, "a list of texts" if least == 1 else f"a list of at least {least} texts")
    return list(given)


def misshapen(row: Mapping[str, Any], field: str, where: str, wanted: str) -> ConfigError:
    """The error of a field that is not what is wanted: what it holds, or what the row has instead."""
    shown = f"got {row[field]!r:.80}" if field in row else f"it has: {', '.join(row)}"
    return ConfigError(f"{where}: field {field!r} must be {wanted}, {shown}")


def _parquet_rows(path: Path) -> Iterator[Row]:
    from datasets import load_dataset

    try:
        with path.open("rb"):
            pass  # `datasets` reports a file it may not read as one that is not there
        name = glob.escape(str(path))  # `datasets` would take [ and * for a pattern
        with TemporaryDirectory() as cache:  # for the lock it takes: the rows themselves come straight from the file
            loaded = load_dataset("parquet", data_files=[name], split="train", streaming=True, cache_dir=cache)
        yield from loaded
    except StopIteration:  # what `datasets` says when a file holds no row
        return
    except Exception as error:  # pyarrow's, pandas' and datasets' own: no common base
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"task.data_files: cannot read {path}: {error}; give one object per line (.jsonl), "
        "a list of objects (.json) or a table (.parquet)"
    )


def _hub_rows(source: DataSource) -> Iterator[tuple[str, Row]]:
    from datasets import load_dataset_builder

    if not source.hub_id:
        raise ConfigError("the task names no data: set task.data_files=PATH or task.hub_id=OWNER/NAME")
    files = "give local files with the same fields: task.data_files=PATH (.json, .jsonl or .parquet)"
    cached = forbidden() and not source.streaming
    if not cached and (offline := unreachable()):
        raise ConfigError(
            f"cannot load {source}: the Hugging Face hub cannot be asked ({offline}). Either make the hub reachable "
            f"(a copy in the cache is read with HF_HUB_OFFLINE=1 and task.streaming=false), or {files}"
        )
    try:
        builder = load_dataset_builder(source.hub_id, source.hub_config, revision=source.revision)
        _check_copy(builder, source)
        if source.streaming:
            loaded = builder.as_streaming_dataset(source.split)
        else:
            builder.download_and_prepare()
            loaded = builder.as_dataset(source.split)
        for number, row in enumerate(loaded, start=1):
            yield f"row {number} of {source}", row
    except ConfigError:
        raise
    except Exception as error:  # huggingface_hub's, httpx', fsspec's and datasets' own: no common base
        where, way = "from the Hugging Face hub", "correct that"
        if cached:
            where, way = "from the cache (HF_HUB_OFFLINE=1)", "make the hub reachable"
        raise ConfigError(f"cannot load {source} {where}: {error}. Either {way}, or {files}") from error


def _check_copy(builder: Any, source: DataSource) -> None:
    """ConfigError where `datasets` fell back on a copy in its cache that is not of the commit asked for.

    It takes the newest one whatever the revision, also where the hub answers and this data set cannot be fetched.
    """
    wanted = source.revision or ""
    cached = type(builder).__module__.startswith("datasets.packaged_modules.cache")
    if cached and _COMMIT.fullmatch(wanted) and not str(builder.hash).startswith(wanted):
        raise ConfigError(
            f"cannot load {source}: the newest copy in the cache ({builder.cache_dir}) is of commit {builder.hash}. "
            f"Make the hub reachable, set task.revision={builder.hash} to use that copy, or remove it if there is one "
            "of the right commit too"
        )


LINE = 64 << 20  # bytes; the longest of LongBench has 1 MB


@dataclass(frozen=True)
class Archive:
    """A .zip of which the file NAME.jsonl is wanted, at whatever depth.

    Read as a stream: what it unpacks to is never in memory as a whole.
    """

    path: Path
    name: str

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(number from 1, line) of the member; ConfigError for one that cannot be read or is longer than `LINE`."""
        with self._open() as stream:
            for number, line in enumerate(iter(lambda: stream.readline(LINE + 1), b""), start=1):
                if len(line) > LINE:
                    raise self._refused(
                        f"line {number} of {self.name}.jsonl is longer than {size(LINE)}", "look at what it holds"
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
        """The member; zipfile gives no more than the declared size."""
        try:
            with zipfile.ZipFile(self.path) as zipped, zipped.open(self._member(zipped)) as member:
                yield io.BufferedReader(member, 1 << 16)  # type: ignore[type-var]
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, struct.error, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            raise self._refused(
                str(error) or type(error).__name__, "fetch it again, or unpack it and name the folder"
            ) from error

    def _member(self, zipped: zipfile.ZipFile) -> zipfile.ZipInfo:
        members = [info for info in zipped.infolist() if info.filename.endswith(".jsonl")]
        mine = [info for info in members if PurePosixPath(info.filename).stem == self.name]
        if len(mine) != 1:
            listed = ", ".join(info.filename for info in mine)
            held = ", ".join(sorted({PurePosixPath(info.filename).stem for info in members})) or "no .jsonl file"
            problem = (
                f"is in {self.path} {len(mine)} times ({listed}); unpack the right one and name it"
                if mine
                else f"is not in {self.path}, which holds {held}"
            )
            raise ConfigError(f"task.data_files: {self.name}.jsonl {problem}")
        return mine[0]

    def _refused(self, why: str, way: str) -> ConfigError:
        return ConfigError(f"task.data_files: cannot read {self.path}: {why}; {way}")


@dataclass(frozen=True, kw_only=True)
class Members(DataSource):
    """A `DataSource` of which the file `member`.jsonl is wanted where `data_files` is a folder or a .zip.

    The member may lie at any depth. Without `data_files`, `hub_file` is the .zip in the hub repository (a loading
    script, which `datasets` 4 and later refuse, is not needed to read it), or the .json or .jsonl file itself; null:
    the repository is in a format that `datasets` reads, with the member's name as configuration.
    """

    member: str
    hub_file: str | None = None

    def __str__(self) -> str:
        if self.data_files is not None or self.hub_file is None:
            return super().__str__()
        return f"{self.hub_id}/{self.hub_file}, {self.member}, revision {self.revision or 'main'}"

    def files(self) -> list[Path]:
        """A folder's member; else the files named, as they are."""
        assert self.data_files is not None
        folder = path_of(self.data_files, "task.data_files")
        if not folder.is_dir():
            return super().files()
        paths = sorted(path for ending in KINDS for path in folder.rglob(f"{self.member}{ending}"))
        if not paths:
            held = ", ".join(sorted({path.stem for ending in KINDS for path in folder.rglob(f"*{ending}")}))
            raise ConfigError(
                f"task.data_files: {self.member}.jsonl is not in the folder {folder}, which holds "
                f"{held or 'no .jsonl file'}"
            )
        if len(paths) > 1:
            listed = ", ".join(str(path.relative_to(folder)) for path in paths)
            raise ConfigError(
                f"task.data_files: {self.member} is in the folder {folder} {len(paths)} times ({listed}); name one of "
                f"them, as in task.data_files={paths[0]}"
            )
        return paths

    def places(self) -> list[Path]:
        archive = self._archive() if self.data_files is not None else None
        return super().places() if archive is None else [archive]

    def rows(self) -> Iterator[tuple[str, Row]]:
        archive = self._archive()
        if archive is None:
            yield from super().rows()
            return
        if archive.suffix != ".zip":  # the file itself
            yield from replace(self, data_files=str(archive)).rows()
            return
        for number, line in Archive(archive, self.member).lines():
            if line.strip():
                row = json_row(line, f"line {number} of {self.member} in {archive}")
                yield f"row {number} of {self.member} in {archive}", row

    def fingerprint(self) -> str:
        """The fingerprint of a .zip's member, as if it were unpacked; else as for any `DataSource`."""
        if self.data_files is None:
            return f"hub:{self}"
        archive = self._archive()
        if archive is None:
            return super().fingerprint()
        digest = Archive(archive, self.member).digest()
        return f"files:{hashlib.sha256(digest).hexdigest()[:16]}"

    def _archive(self) -> Path | None:
        """The .zip to read, fetched from the hub if need be (once, into its cache); None if there is none."""
        if self.data_files is not None:
            path = path_of(self.data_files, "task.data_files")
            return path if path.suffix == ".zip" and path.is_file() else None
        return self._fetched() if self.hub_file is not None else None

    def _fetched(self) -> Path:
        from huggingface_hub import hf_hub_download

        assert self.hub_file is not None
        local = f"give it, unpacked or not: task.data_files=PATH ({self.hub_file}, a folder of .jsonl files, one file)"
        offline = None if forbidden() else unreachable()
        try:  # out of the cache alone where the hub cannot be asked, so that nobody waits for its retries
            named = hf_hub_download(
                self.hub_id,
                self.hub_file,
                repo_type="dataset",
                revision=self.revision,
                local_files_only=bool(offline),
            )
        except Exception as error:  # huggingface_hub's, httpx' and the file system's: no common base
            raise ConfigError(
                f"cannot fetch {self} from the Hugging Face hub: {offline or error}. Either make the hub reachable "
                f"(network, no HF_HUB_OFFLINE=1), or {local}"
            ) from error
        return Path(named)
