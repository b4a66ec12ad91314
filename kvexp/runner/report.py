"""What a person reads at the end: the table of what this command ran, and the list of what failed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback


@dataclass
class _Command:
    """The runs of this process, in the order they were asked for."""

    hashes: list[str] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)


COMMAND = _Command()


def note(*hashes: str | None) -> None:
    """These runs belong to what the command shows."""
    COMMAND.hashes += [h for h in hashes if h is not None and h not in COMMAND.hashes]


def note_failure(job: str, error: BaseException) -> None:
    COMMAND.failures.append((job, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__))


def exit_code() -> int:
    """Non-zero if any job of this process failed."""
    return 1 if COMMAND.failures else 0


def show(outputs_dir: str | Path) -> None:
    """Print the table of this command's runs and their baselines, then the failures."""
    from rich.console import Console

    from kvexp.results import print_table, table

    console = Console()
    if COMMAND.hashes:
        frame = table(outputs_dir, {"hash": COMMAND.hashes})
        print_table(frame, console)
        console.print(f"rows, configurations and environments: {outputs_dir}/<hash>/", highlight=False)
    if COMMAND.failures:
        console.print(f"\n{len(COMMAND.failures)} run(s) failed:", highlight=False)
        for job, message in COMMAND.failures:
            console.print(f"  {job}\n    {message}", highlight=False, markup=False)


class SweepTable(Callback):  # type: ignore[misc]
    """Hydra callback: prints the table when a sweep or a single run has ended."""

    def on_run_end(self, config: Any, **_: Any) -> None:
        self._end(config)

    def on_multirun_end(self, config: Any, **_: Any) -> None:
        self._end(config)

    def _end(self, config: Any) -> None:
        try:
            self._show_and_publish(config)
        except Exception as error:  # Hydra would turn it into a warning and exit code 0
            print(f"error after the runs: {type(error).__name__}: {error}", file=sys.stderr)
            note_failure("table and publishing", error)

    def _show_and_publish(self, config: Any) -> None:
        show(config.outputs_dir)
        if config.log.wandb and COMMAND.hashes:
            from kvexp.log import publish

            # All at once: the verdicts are corrected for the number of runs compared.
            folders = [Path(config.outputs_dir) / name for name in COMMAND.hashes]
            written = publish(folders, config.log.project, None if config.log.mode == "auto" else config.log.mode)
            print(f"wandb: {len(written)} runs, beside the rows; python -m kvexp.log replays them at any time")
