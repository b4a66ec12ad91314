"""Rows of a data set, from local files or from the hub, through `datasets`. Sets nothing global, changes no cache."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kvexp.digests import file_digest
from kvexp.errors import ConfigError
from kvexp.hub import forbidden, unreachable
from kvexp.paths import path_of
from kvexp.tasks.json_rows import json_rows

KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_COMMIT = re.compile("[0-9a-f]{7,40}")
SAMPLES = ("first", "shuffled", "with_replacement")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where rows come from: `data_files` if given, else the hub. `Task` documents the fields."""

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
        found = [named] if named.exists() else [Path(name) for name in sorted(glob.glob(str(named), recursive=True))]
        if not found:
            raise ConfigError(
                f"task.data_files={self.data_files}: there is no such file (seen from {Path.cwd()}); "
                "give the path of a .json, .jsonl or .parquet file, or a glob that matches some"
            )
        for path in found:
            if path.is_dir():
                raise ConfigError(f"task.data_files: {path} is a folder; name its files, as in '{path}/*.jsonl'")
            if path.suffix not in KINDS:
                raise ConfigError(f"task.data_files: {path} must end in .json, .jsonl or .parquet")
        return found

    def places(self) -> list[Path]:
        """The local files that are read, whatever holds the rows in them."""
        return [] if self.data_files is None else self.files()

    def rows(self) -> Iterator[tuple[str, Row]]:
        """("row 3 of rows.jsonl", row) for all rows in order, counted from 1 within a file."""
        if self.data_files is None:
            yield from _hub_rows(self)
            return
        for path in self.files():
            for number, row in enumerate(_file_rows(path), start=1):
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
        draws = np.random.RandomState(seed)
        if sample == "with_replacement":
            order = draws.randint(total, size=limit).tolist()
        else:
            order = draws.permutation(total)[:limit].tolist()
        wanted = set(order)
        picked = {number: found for number, found in enumerate(source.rows()) if number in wanted}
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


def text(row: Row, field: str, where: str, option: str, empty: bool = False) -> str:
    """The text in a field of a row; ConfigError naming row, field and the option that renames it, if there is none.

    A field that only some rows have comes out of `datasets` as None in the others, so missing and null read the same.
    """
    value = row.get(field)
    if value is None:
        has = ", ".join(key for key, other in row.items() if other is not None) or "nothing"
        raise ConfigError(
            f"{where} has no field {field!r} (or null there), it has: {has}; "
            f"correct the row, or name the field that holds it with task.{option}"
        )
    if not isinstance(value, str):
        raise ConfigError(f"{where}: field {field!r} must be a text, got {type(value).__name__} {str(value)[:60]!r}")
    if not empty and not value.strip():
        raise ConfigError(f"{where}: field {field!r} is empty; correct or remove the row")
    return value


def _file_rows(path: Path) -> Iterator[Row]:
    return json_rows(path) if KINDS[path.suffix] == "json" else _parquet_rows(path)


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
            "of the right commit beside it"
        )
