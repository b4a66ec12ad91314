"""Data sets that come as one file per subset: in a folder, in a .zip, or in a .zip on the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvexp.errors import ConfigError
from kvexp.hub import forbidden, unreachable
from kvexp.paths import path_of
from kvexp.tasks import data
from kvexp.tasks.archive import Archive
from kvexp.tasks.json_rows import json_row


@dataclass(frozen=True, kw_only=True)
class Members(data.DataSource):
    """A `DataSource` of which the file `member`.jsonl is wanted where `data_files` is a folder or a .zip.

    The member may lie at any depth. Without `data_files`, `hub_file` is the .zip in the hub repository (a loading
    script, which `datasets` 4 and later refuse, is not needed to read it); null: the repository is in a format that
    `datasets` reads, with the member's name as configuration.
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
        found = sorted(path for ending in data.KINDS for path in folder.rglob(f"{self.member}{ending}"))
        if not found:
            names = {path.stem for ending in data.KINDS for path in folder.rglob(f"*{ending}")}
            raise self._missing(f"the folder {folder}", names)
        if len(found) > 1:
            each = ", ".join(str(path.relative_to(folder)) for path in found)
            raise ConfigError(
                f"task.data_files: {self.member} is in the folder {folder} {len(found)} times ({each}); name one of "
                f"them, as in task.data_files={found[0]}"
            )
        return found

    def places(self) -> list[Path]:
        archive = self._archive() if self.data_files is not None else None
        return super().places() if archive is None else [archive]

    def rows(self) -> Iterator[tuple[str, data.Row]]:
        archive = self._archive()
        if archive is None:
            yield from super().rows()
            return
        for number, line in Archive(archive, self.member).lines():
            if line.strip():
                row = json_row(line, f"line {number} of {self.member} in {archive}")
                yield f"row {number} of {self.member} in {archive}", row

    def fingerprint(self) -> str:
        """Of a .zip the member's, as if it were unpacked; else as for any `DataSource`."""
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

    def _missing(self, where: str, names: set[str]) -> ConfigError:
        listed = ", ".join(sorted(names)) or "no .jsonl file"
        return ConfigError(f"task.data_files: {self.member}.jsonl is not in {where}, which holds {listed}")
