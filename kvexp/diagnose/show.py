"""What was kept, as a page; and the command `kvexp diagnose`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from rich.cells import cell_len
from rich.text import Text

from kvexp.hf.cache import STYLE, mark, section
from kvexp.run.compose import with_user_methods, without_method_words
from kvexp.run.evictions import View
from kvexp.util import CacheError, ConfigError, Console, Session, active, keys_of, say, visible

# The text of an example in a terminal, each token with a mark of how many heads still hold it.


STYLES = ("dim", "cyan", "green", "yellow", "bold")  # none, a third, two thirds, nearly all, all


def style(count: int, heads: int) -> str:
    if count <= 0 or count >= heads:
        return STYLES[0 if count <= 0 else -1]
    return STYLES[1 + 3 * count // heads]


def show(view: View, console: Console) -> None:
    """Two lines each: the text, and under every token its mark; what is to come at this step has no mark."""
    told, heads = view.told, view.heads
    where = "all layers" if view.layer is None else f"layer {view.layer}"
    when = "the end of the prompt" if view.step == 0 else f"{view.step} decode tokens"
    console.print(f"{told.example}: kept after {when}, {where} ({heads} heads a token)", highlight=False, markup=False)
    for words, marks in lines(view, console.width):
        console.print(words, overflow="crop", no_wrap=True)
        console.print(marks, overflow="crop", no_wrap=True)
    console.print(f"# all {heads} heads, 9-1 tenths of them, . none; no mark: not read yet", highlight=False)
    counts = view.counts[: view.present]
    whole, some = int((counts >= heads).sum()), int(((counts > 0) & (counts < heads)).sum())
    gone = len(counts) - whole - some
    console.print(
        f"of {len(counts)} tokens {whole} are held by all heads, {some} by some, {gone} by none", highlight=False
    )
    if not told.same_output:
        console.print("alone this example is answered otherwise than in the batch of its row", highlight=False)


def lines(view: View, width: int) -> Iterator[tuple[Text, Text]]:
    """Text and marks, broken between tokens."""
    words, marks = Text(), Text()
    for place, text in enumerate(view.told.texts):
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


# The same text as a page of its own: HTML without a script, hovering over a token tells the heads of each layer.


def page(view: View, title: str) -> str:
    """A whole document."""
    told, title = view.told, visible(title)
    when = "at the end of the prompt" if view.step == 0 else f"after {view.step} decode tokens"
    layer = "" if view.layer is None else f", shaded by layer {view.layer}"
    head = f"{told.example} {when}{layer}: the greener, the more of {view.heads} heads keep a token; struck out: none"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body {{ margin: 2em auto; max-width: 60em; padding: 0 1em; font-family: sans-serif; }}{STYLE}</style></head>
<body><h1>{escape(title)}</h1>
<p>{escape(visible(head))}. Hover over a token for its layers. Dotted boxes: the question that was read after the
eviction (blue) and the answer (orange); in italics what had not been read yet.</p>
{section(view.data())}
</body></html>
"""


DIAGNOSE_DOC = """kvexp diagnose COMMAND: read what diagnose=log and diagnose=twin have written, or make it, and ask
on."""


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
    result = argparse.ArgumentParser(prog="kvexp diagnose", description=DIAGNOSE_DOC)
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
    from kvexp.diagnose.case import chosen, rows_of, run_at, title_of
    from kvexp.diagnose.options import ensure_diagnosed
    from kvexp.run.evictions import view

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
    from kvexp.diagnose.case import chosen, fed_prompt, rows_of, run_at

    run = run_at(args.run)
    found = fed_prompt(run, chosen(rows_of(run), args.example))
    say(found.told, file=sys.stderr)
    if sys.stdout.isatty():
        say(found.text)
    else:
        print(found.text)  # into a file or a pipe: the prompt to the letter


def _draw(args: argparse.Namespace, console: Console) -> None:
    from kvexp.diagnose.case import chosen, rows_of, run_at, title_of
    from kvexp.diagnose.options import Twin, ensure_diagnosed
    from kvexp.diagnose.twin import curves, heatmaps, losses, save
    from kvexp.run.evictions import FOLDER, TWIN, has

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
    from kvexp.diagnose.case import chosen, rows_of, run_at
    from kvexp.diagnose.options import ensure_diagnosed
    from kvexp.diagnose.replay import Options, check_undoing, tell
    from kvexp.run.batches import settings_at

    run = run_at(args.run)
    check_undoing(settings_at(run).cache)  # before a log is made, which loads the model
    row = chosen(rows_of(run), args.example)
    ensure_diagnosed(run, [row])
    tell(run, row, Options(args.until, args.trials, args.again), console)


def _explain(args: argparse.Namespace, console: Console) -> None:
    from kvexp.diagnose.case import run_at
    from kvexp.diagnose.replay import Options, check_undoing, explain
    from kvexp.run.batches import settings_at

    runs = [run_at(path) for path in args.runs]
    for run in runs:
        check_undoing(settings_at(run).cache)
    if args.kl:
        from kvexp.diagnose.replay import explain_worst

        for run in runs:
            explain_worst(run, Options(args.until, args.trials, args.again), args.first, console)
        return
    explain(runs, Options(args.until, args.trials, args.again), args.first, console)


def _gap(args: argparse.Namespace, console: Console) -> None:
    from kvexp.diagnose.gap import draw, gaps, make_ideals, parse_where, show
    from kvexp.diagnose.twin import save

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
    from kvexp.diagnose.case import run_at
    from kvexp.diagnose.gap import diff

    diff(run_at(args.a), run_at(args.b), args.step, console)
