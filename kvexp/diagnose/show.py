"""What was kept of an example, in a terminal; and the command `kvexp diagnose`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from kvexp.diagnose import gap, replay
from kvexp.diagnose.case import chosen, fed_prompt, opened, rows_of, run_at
from kvexp.diagnose.options import check_diagnosable, ensure_diagnosed
from kvexp.hf.cache import mark
from kvexp.results.read import where as parse_where
from kvexp.run import evictions
from kvexp.run.batches import settings_at
from kvexp.run.compose import with_user_classes, without_class_words
from kvexp.run.evictions import View
from kvexp.run.session import Session, active, keys_of
from kvexp.run.store import Run
from kvexp.util.errors import CacheError, ConfigError
from kvexp.util.output import Console, say, tells_errors, visible

STYLES = ("dim", "cyan", "green", "yellow", "bold")  # none, a third, two thirds, nearly all, all


def style(count: int, heads: int) -> str:
    """The style of a token that so many of the heads hold."""
    if count <= 0 or count >= heads:
        return STYLES[0 if count <= 0 else -1]
    return STYLES[1 + 3 * count // heads]


def show(view: View, console: Console) -> None:
    """Print the text, and under every token its mark; what is to come at this step has none."""
    log, heads = view.log, view.heads
    where = "all layers" if view.layer is None else f"layer {view.layer}"
    when = "the end of the prompt" if view.step == 0 else f"{view.step} decode tokens"
    console.print(f"{log.example}: kept after {when}, {where} ({heads} heads a token)", highlight=False, markup=False)
    for words, marks in lines(view, console.width):
        console.print(words, overflow="crop", no_wrap=True)
        console.print(marks, overflow="crop", no_wrap=True)
    console.print(f"# all {heads} heads, 9-1 tenths of them, . none; no mark: not read yet", highlight=False)
    counts = view.counts[: view.present]
    whole, partly = int((counts >= heads).sum()), int(((counts > 0) & (counts < heads)).sum())
    gone = len(counts) - whole - partly
    console.print(
        f"of {len(counts)} tokens {whole} are held by all heads, {partly} by some, {gone} by none", highlight=False
    )
    if not log.same_output:
        console.print("alone this example is answered otherwise than in the batch of its row", highlight=False)


def lines(view: View, width: int) -> Iterator[tuple[Text, Text]]:
    """Text and marks, broken between tokens."""
    words, marks = Text(), Text()
    for place, text in enumerate(view.log.texts):
        pieces = text.replace("\t", " ").replace("\r", "").split("\n")
        for number, piece in enumerate(pieces):
            shown = visible(piece) + ("\u21b5" if number < len(pieces) - 1 else "")
            if marks.cell_len + cell_len(shown) > width and marks.cell_len:
                yield words, marks
                words, marks = Text(), Text()
            count = int(view.counts[place])
            known = place < view.present
            words.append(shown, style=style(count, view.heads) if known else "italic")
            marks.append((mark(count, view.heads) if known else " ") * cell_len(shown))
            if number < len(pieces) - 1:
                yield words, marks
                words, marks = Text(), Text()
    if marks.cell_len:
        yield words, marks


DIAGNOSE_DOC = "kvexp diagnose COMMAND: read what diagnose=log has written, or make it, and ask on."


# May stand anywhere (method=MODULE.CLASS, task=FILE.py: before --where), for a run's own files cannot ask for
# this. See docs/scaling.md, What is trusted.
TRUSTED = re.compile(r"model\.(trust_remote_code|allow_pickle)=true|task\.tasks=.*")
RUN = "a run: its folder outputs/HASH, or outputs@LABEL=VALUE,... where that is one run"


@tells_errors(ConfigError, CacheError, OSError)
def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 after printing why the request cannot work."""
    words = list(sys.argv[1:] if argv is None else argv)
    trusted = [word for word in words if TRUSTED.fullmatch(word)]
    methods, others = without_class_words([word for word in words if word not in trusted])
    args = parser().parse_args(others)
    with active(Session(typed_keys=keys_of(trusted))):
        with_user_classes(methods)
        args.command(args, Console())
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="kvexp diagnose", description=DIAGNOSE_DOC)
    commands = result.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, do: Any, words: str) -> Any:
        subparser = commands.add_parser(name, help=words, description=words)
        subparser.set_defaults(command=do)
        return subparser.add_argument

    def of_example(name: str, do: Any, words: str) -> Any:
        add = command(name, do, words)
        add("run", metavar="RUN", help=RUN)
        add("example", metavar="EXAMPLE", help="id of an example, its beginning, or its index")
        return add

    def searches(add: Any) -> None:
        add("--until", choices=("output", "score"), default="output", help="what has to come back")
        add("--trials", type=int, default=1000, help="answers per example at most (default: 1000)")
        add("--again", action="store_true", help="search even where a result is saved")

    step = {"type": int, "default": 0, "help": "decode tokens after which to look (default: 0, the prompt)"}
    add = of_example("show", _show, "the text of an example, marked by how many heads keep each token")
    add("--step", **step)
    add("--layer", type=int, help="this layer's heads alone")
    of_example("prompt", _prompt, "the text of an example's prompt as it was fed to the model")
    searches(of_example("replay", _replay, "undo evictions of an example until the full cache's answer returns"))
    add = command("explain", _explain, "replay every example of runs that scores less than with full")
    add("runs", nargs="+", metavar="RUN", help=RUN)
    add("--first", type=int, metavar="N", help="only the first so many of each run")
    searches(add)
    add = command("gap", _gap, "quality lost to the budget and to selection, against runs of method=ideal")
    add("outputs", metavar="OUTPUTS", help="the folder of the runs")
    add("--metric", help="default: the task's first")
    add("--where", "-w", nargs="+", action="extend", default=[], metavar="LABEL=VALUE")
    add("--draw", type=Path, metavar="FILE", help="stacked bars: a .png, .pdf or .svg")
    add("--csv", type=Path, metavar="FILE", help="write every column")
    return result


def _show(args: argparse.Namespace, console: Console) -> None:
    run, row = opened(args.run, args.example)
    ensure_diagnosed(run, [row])
    show(evictions.view(run, row["example"], args.step, args.layer), console)


def _wrote(console: Console, file: Path) -> None:
    console.print(f"wrote {file}", highlight=False, markup=False, soft_wrap=True)


def _prompt(args: argparse.Namespace, console: Console) -> None:
    text, summary = fed_prompt(*opened(args.run, args.example))
    say(summary, file=sys.stderr)
    if sys.stdout.isatty():
        say(text)
    else:
        print(text)  # into a file or a pipe: the prompt to the letter


def _replay(args: argparse.Namespace, console: Console) -> None:
    run = run_at(args.run)
    _check_undoing(run)
    row = chosen(rows_of(run), args.example)
    ensure_diagnosed(run, [row])
    replay.show_cause(run, row, replay.Options(args.until, args.trials, args.again), console)


def _check_undoing(run: Run) -> None:
    """ConfigError for a run of which no eviction can be undone, before a log is made, which loads the model."""
    settings = settings_at(run)
    check_diagnosable(settings)
    replay.check_undoing(settings.cache)


def _explain(args: argparse.Namespace, console: Console) -> None:
    runs, options = [run_at(path) for path in args.runs], replay.Options(args.until, args.trials, args.again)
    for run in runs:
        _check_undoing(run)
    replay.explain(runs, options, args.first, console)


def _gap(args: argparse.Namespace, console: Console) -> None:
    where = parse_where(args.where)
    gap.make_ideals(args.outputs, where, console)
    frame = gap.gaps(args.outputs, where, args.metric)
    gap.show(frame, console)
    if args.draw is not None:
        gap.save(gap.draw(frame), args.draw)
        _wrote(console, args.draw)
    if args.csv is not None:
        frame.to_csv(args.csv, index=False)
        _wrote(console, args.csv)
