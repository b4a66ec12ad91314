"""kvexp diagnose COMMAND: read what diagnose=log and diagnose=twin have written, or make it, and ask on."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kvexp.config.typed_methods import with_user_methods, without_method_words
from kvexp.console import Console
from kvexp.errors import CacheError, ConfigError
from kvexp.session import Session, active, keys_of
from kvexp.terminal import say

# May stand anywhere (method=MODULE.CLASS and method_file=FILE.py: before --where), for a run's own files cannot ask for
# this. See docs/scaling.md, What is trusted.
TRUSTED = re.compile(r"model\.(trust_remote_code|allow_pickle)=true|task\.tasks=.*")
RUN = "a run: its folder outputs/HASH, or outputs@LABEL=VALUE,... where that is one run"


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 if the request cannot work."""
    return carried_out(parser(), sys.argv[1:] if argv is None else argv)


def carried_out(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Do what `parser`'s arguments say: its `command` gets them and a console. 0, or 2 for an error, which is told."""
    trusted = [word for word in words if TRUSTED.fullmatch(word)]
    methods, others = without_method_words([word for word in words if word not in trusted])
    args = parser.parse_args(others)
    try:
        with active(Session(typed_keys=keys_of(trusted))):
            with_user_methods(methods)
            args.command(args, Console())
    except (ConfigError, CacheError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        say(f"error: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="kvexp diagnose", description=__doc__)
    commands = result.add_subparsers(required=True, metavar="COMMAND")
    show = _command(commands, "show", _show, "the text of an example, marked by how many heads keep each token")
    _run_and_example(show)
    show.add_argument("--step", type=int, default=0, help="decode tokens after which to look (default: 0, the prompt)")
    show.add_argument("--layer", type=int, help="this layer's heads alone")
    show.add_argument("--html", type=Path, metavar="FILE", help="write a page instead: hovering tells of each layer")
    prompt = _command(commands, "prompt", _prompt, "the text of an example's prompt as it was fed to the model")
    _run_and_example(prompt)
    draw = _command(commands, "draw", _draw, "heat-maps (layer x head) and curves (over steps) of a twin run")
    draw.add_argument("run", metavar="RUN", help=RUN)
    draw.add_argument("--example", nargs="+", metavar="EXAMPLE", help="of these alone (default: the mean of all)")
    draw.add_argument("--out", type=Path, metavar="FOLDER", help="default: the run's own folder diagnose")
    draw.add_argument("--format", choices=("png", "svg", "pdf"), default="png")
    replay = _command(commands, "replay", _replay, "undo evictions of an example until the full cache's answer returns")
    _run_and_example(replay)
    _searches(replay)
    explain = _command(commands, "explain", _explain, "replay every example of runs that scores less than with full")
    explain.add_argument("runs", nargs="+", metavar="RUN", help=RUN)
    explain.add_argument("--first", type=int, metavar="N", help="only the first so many of each run")
    _searches(explain)
    explain.add_argument("--kl", action="store_true", help="the token of largest divergence (--first: of so many)")
    gap = _command(commands, "gap", _gap, "quality lost to the budget and to selection, against runs of method=ideal")
    gap.add_argument("outputs", metavar="OUTPUTS", help="the folder of the runs")
    gap.add_argument("--metric", help="default: the task's first")
    gap.add_argument("--where", "-w", nargs="+", action="extend", default=[], metavar="LABEL=VALUE")
    gap.add_argument("--draw", type=Path, metavar="FILE", help="stacked bars: a .png, .pdf or .svg")
    gap.add_argument("--csv", type=Path, metavar="FILE", help="write every column")
    diff = _command(commands, "diff", _diff, "where only one of two runs is right, and what each kept")
    diff.add_argument("a", metavar="RUN_A", help=RUN)
    diff.add_argument("b", metavar="RUN_B", help="another of the same model and task")
    diff.add_argument("--step", type=int, default=0, help="decode tokens after which to look (default: 0, the prompt)")
    return result


def _searches(command: argparse.ArgumentParser) -> None:
    command.add_argument("--until", choices=("output", "score"), default="output", help="what has to come back")
    command.add_argument("--trials", type=int, default=1000, help="answers per example at most (default: 1000)")
    command.add_argument("--again", action="store_true", help="search even where a result is saved")


def _command(commands: argparse._SubParsersAction, name: str, do, words: str) -> argparse.ArgumentParser:  # type: ignore
    made: argparse.ArgumentParser = commands.add_parser(name, help=words, description=words)
    made.set_defaults(command=do)
    return made


def _run_and_example(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help=RUN)
    command.add_argument("example", metavar="EXAMPLE", help="id of an example, its beginning, or its index")


def _show(args: argparse.Namespace, console: Console) -> None:
    from kvexp.diagnose.folders import chosen, rows_of, run_at, title_of
    from kvexp.diagnose.kept_tokens_page import page
    from kvexp.diagnose.needed import ensure_diagnosed
    from kvexp.diagnose.show import show
    from kvexp.evictions.held_tokens import view

    run = run_at(args.run)
    row = chosen(rows_of(run), args.example)
    ensure_diagnosed(run, [row])
    seen = view(run, row["example"], args.step, args.layer)
    if args.html is None:
        show(seen, console)
        return
    args.html.write_text(page(seen, title_of(run)), encoding="utf-8")
    console.print(f"wrote {args.html}", highlight=False, markup=False)


def _prompt(args: argparse.Namespace, console: Console) -> None:
    from kvexp.diagnose.folders import chosen, rows_of, run_at
    from kvexp.diagnose.prompt import fed_prompt

    run = run_at(args.run)
    found = fed_prompt(run, chosen(rows_of(run), args.example))
    say(found.told, file=sys.stderr)
    if sys.stdout.isatty():
        say(found.text)
    else:
        print(found.text)  # into a file or a pipe: the prompt to the letter


def _draw(args: argparse.Namespace, console: Console) -> None:
    from kvexp.diagnose.diagnosis_options import Twin
    from kvexp.diagnose.draw import curves, heatmaps, losses, save
    from kvexp.diagnose.folders import chosen, rows_of, run_at, title_of
    from kvexp.diagnose.needed import ensure_diagnosed
    from kvexp.evictions.eviction_files import FOLDER, TWIN, has

    run = run_at(args.run)
    rows = rows_of(run)
    some = [chosen(rows, name) for name in args.example or ()]
    if some or not any(has(run, name, TWIN) for name in rows):
        ensure_diagnosed(run, some or list(rows.values()), Twin())
    names = [row["example"] for row in some] or None
    frame = losses(run, names)
    title = title_of(run) + (f", {', '.join(names)}" if names else "")
    folder = args.out or run.path / FOLDER
    for name, figure in (("heatmap", heatmaps(frame, title)), ("curves", curves(frame, title))):
        file = folder / f"{name}.{args.format}"
        save(figure, file)
        console.print(f"wrote {file}", highlight=False, markup=False, soft_wrap=True)


def _replay(args: argparse.Namespace, console: Console) -> None:
    from kvexp.diagnose.explain import Options, tell
    from kvexp.diagnose.folders import chosen, rows_of, run_at
    from kvexp.diagnose.needed import ensure_diagnosed
    from kvexp.diagnose.runs import settings_at
    from kvexp.diagnose.undo import check_undoing

    run = run_at(args.run)
    check_undoing(settings_at(run).cache)  # before a log is made, which loads the model
    row = chosen(rows_of(run), args.example)
    ensure_diagnosed(run, [row])
    tell(run, row, Options(args.until, args.trials, args.again), console)


def _explain(args: argparse.Namespace, console: Console) -> None:
    from kvexp.diagnose.explain import Options, explain
    from kvexp.diagnose.folders import run_at
    from kvexp.diagnose.runs import settings_at
    from kvexp.diagnose.undo import check_undoing

    runs = [run_at(path) for path in args.runs]
    for run in runs:
        check_undoing(settings_at(run).cache)
    if args.kl:
        from kvexp.diagnose.worst_token import explain_worst

        for run in runs:
            explain_worst(run, Options(args.until, args.trials, args.again), args.first, console)
        return
    explain(runs, Options(args.until, args.trials, args.again), args.first, console)


def _gap(args: argparse.Namespace, console: Console) -> None:
    from kvexp.diagnose.draw import save
    from kvexp.diagnose.gap import draw, gaps, parse_where, show
    from kvexp.diagnose.ideals import make_ideals

    where = parse_where(args.where)
    make_ideals(args.outputs, where, console)
    frame = gaps(args.outputs, where, args.metric)
    show(frame, console)
    if args.draw is not None:
        save(draw(frame), args.draw)
        console.print(f"wrote {args.draw}", highlight=False, markup=False)
    if args.csv is not None:
        frame.to_csv(args.csv, index=False)
        console.print(f"wrote {args.csv}", highlight=False, markup=False)


def _diff(args: argparse.Namespace, console: Console) -> None:
    from kvexp.diagnose.diff import diff
    from kvexp.diagnose.folders import run_at

    diff(run_at(args.a), run_at(args.b), args.step, console)
