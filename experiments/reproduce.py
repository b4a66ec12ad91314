"""Make exhibits again: run what is missing, write the table and the figure, say whether the claim holds.

python -m experiments.reproduce keyformer_fig7
python -m experiments.reproduce all --smoke                 every exhibit with two examples, under outputs/smoke
python -m experiments.reproduce fig7 --scale paper          the paper's models and data, from the hub
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.exhibits import HERE, ROOT, SCALES, load, name_of, names, sweeps
from experiments.smoke import smaller
from kvexp.errors import ConfigError

VERDICT = {True: "holds", False: "does not hold", None: "undecided"}
MEASURED = HERE / "measured.json"


@dataclass(frozen=True)
class Made:
    """One exhibit: its table, what became of the claim, and the seconds it took now (less where runs existed)."""

    name: str
    table: pd.DataFrame
    holds: bool | None
    words: str
    seconds: float
    folder: Path


def make(module: ModuleType, scale: str, outputs: Path, smoke: bool = False) -> Made:
    """Run, tabulate, draw and judge. ConfigError where a job fails or the yaml of this scale is missing."""
    start, name = time.monotonic(), name_of(module)
    folder = outputs / "exhibits" / (name if scale == "testbed" else f"{name}_{scale}")
    folder.mkdir(parents=True, exist_ok=True)
    frame = _frame(module, scale, outputs, folder, smoke)
    table = module.table(frame)
    holds, words = module.holds(table)
    write(module, table, folder, holds, words)
    return Made(name, table, holds, words, time.monotonic() - start, folder)


def _frame(module: ModuleType, scale: str, outputs: Path, folder: Path, smoke: bool) -> pd.DataFrame:
    """What the exhibit's table is made of. What the sweep prints goes to sweep.log in the folder."""
    from experiments.collect import collected
    from experiments.frame import frame_of
    from experiments.sweep import sweep

    hashes: list[str] = []
    with (
        (folder / "sweep.log").open("w", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        wanted = sweeps(module, scale)
        for experiment in wanted:
            if not (ROOT / "conf" / "experiment" / f"{experiment}.yaml").exists():
                raise ConfigError(f"{name_of(module)} has no sweep at this scale (conf/experiment/{experiment}.yaml)")
        each = {name: [f"outputs_dir={outputs}", *(smaller(name) if smoke else ())] for name in wanted}
        if hasattr(module, "COLLECT"):
            parts = [collected(module, [name], given, outputs / "collected") for name, given in each.items()]
            return pd.concat(parts, ignore_index=True)
        for experiment, overrides in each.items():
            hashes += [name for name in sweep(experiment, overrides) if name not in hashes]
    return frame_of(outputs, hashes) if hashes else pd.DataFrame()


def write(module: ModuleType, table: pd.DataFrame, folder: Path, holds: bool | None, words: str) -> None:
    """table.csv, table.md, figure.png, figure.pdf; an exhibit with nothing to draw leaves no figure."""
    table.to_csv(folder / "table.csv", index=False)
    lines = [f"# {name_of(module)}", "", module.CLAIM, "", f"**{VERDICT[holds]}**: {words}", "", markdown(table), ""]
    (folder / "table.md").write_text("\n".join(lines), encoding="utf-8")
    figure = Figure()
    module.draw(table, figure)
    for ending in ("png", "pdf"):
        # Without a date the same table gives the same file.
        about = {"CreationDate": None} if ending == "pdf" else None
        figure.savefig(folder / f"figure.{ending}", dpi=200, metadata=about)


def markdown(table: pd.DataFrame) -> str:
    """A table as Markdown, numbers to four digits, columns without any value left out."""
    shown = table.dropna(axis=1, how="all")
    shown = shown[[name for name in shown if not shown[name].astype(str).eq("").all()]]
    rows = [["" if pd.isna(cell) else _cell(cell) for cell in row] for row in shown.itertuples(index=False)]
    lines = [list(map(str, shown.columns)), ["---"] * shown.shape[1], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def record(made: Made, scale: str) -> None:
    """Keep what came out for the index: experiments/measured.json."""
    known = json.loads(MEASURED.read_text("utf-8")) if MEASURED.exists() else {}
    before = known.get(scale, {}).get(made.name, {})
    seconds = max(round(made.seconds), before.get("seconds", 0))  # a run that found its rows there took no time
    entry = {"holds": made.holds, "words": made.words, "seconds": seconds}
    known.setdefault(scale, {})[made.name] = entry
    known = {one: dict(sorted(known[one].items())) for one in sorted(known)}
    MEASURED.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m experiments.reproduce", description=__doc__.splitlines()[0])
    result.add_argument(
        "names", nargs="+", metavar="NAME", help="exhibits, or all; python -m experiments.index lists them"
    )
    result.add_argument("--scale", choices=SCALES, default=SCALES[0])
    result.add_argument(
        "--smoke", action="store_true", help="two examples, one model, two budgets: does it run at all?"
    )
    result.add_argument("--outputs", type=Path, help="default: outputs, or outputs/smoke with --smoke")
    result.add_argument("--record", action="store_true", help="keep verdict and time for experiments/README.md")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all were made, whether or not claims hold; 1 if one could not be made; 2 for a name there is not."""
    args = parser().parse_args(arguments)
    if args.smoke and args.record:
        print("error: --record keeps numbers, and a --smoke run has none", file=sys.stderr)
        return 2
    try:
        modules = [load(name) for name in (names() if args.names == ["all"] else args.names)]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    outputs, failed = (args.outputs or Path("outputs/smoke" if args.smoke else "outputs")).resolve(), []
    for module in modules:
        print(f"\n{name_of(module)} ({args.scale}): {module.CLAIM}", flush=True)
        try:
            made = make(module, args.scale, outputs, args.smoke)
        except ConfigError as error:
            failed.append(name_of(module))
            print(f"error: {error}", file=sys.stderr, flush=True)
            continue
        except Exception:  # a defect of one exhibit, told in full, keeps no other from being made
            failed.append(name_of(module))
            traceback.print_exc()
            continue
        if len(modules) == 1:
            print(markdown(made.table))
        print(f"  {VERDICT[made.holds]}: {made.words}\n  {made.seconds:.0f} s, {made.folder}", flush=True)
        if args.record:
            record(made, args.scale)
    if failed:
        print(f"\n{len(failed)} of {len(modules)} could not be made: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
