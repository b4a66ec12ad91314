"""The command `kvexp results`: tables of recorded runs, printed, exported and drawn."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvexp.results import views
from kvexp.results.divergence import print_compared
from kvexp.results.read import Runs, add_choice, chosen_by, read_runs, unmatched
from kvexp.results.table import markdown_of, print_blocks
from kvexp.results.views import VIEWS
from kvexp.run.store import EPSILON_KL, EPSILON_TOP1, OWN, TEXTS
from kvexp.util import ConfigError, Console, say, tells_errors

DESCRIPTION = (
    """Tables of recorded runs, with intervals and verdicts: kvexp results OUTPUTS [--view NAME] [--plot FILE]."""
)
OF = {  # option: the views that have it
    "x": (views.RUNS, views.DIVERGENCE),
    "metric": (views.RUNS, views.DIVERGENCE, "bytes", "needle"),
    **dict.fromkeys(("measure", "compare", "alike", "epsilon", "epsilon_top1"), (views.DIVERGENCE,)),
}


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 1 if nothing matched, 2 if the request cannot work."""
    methods: list[str] = []
    words = list(sys.argv[1:] if argv is None else argv)
    if "--measure" in words:  # which may need the code of a method of the user's own
        from kvexp.run.compose import without_method_words

        methods, words = without_method_words(words)
    return results(parser().parse_args(words), methods)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="kvexp results", description=DESCRIPTION)
    add = result.add_argument
    add("outputs", nargs="?", default="outputs", help="the folder of the runs (default: outputs)")
    add_choice(result)
    add("--view", choices=VIEWS, default=views.RUNS, help="which table (default: runs)", metavar="NAME")
    add("--x", help="runs: order by kv_ratio or bytes; figure of divergence: kv_ratio, bytes or position")
    add(
        "--metric", metavar="NAME", help="of a figure or of needle: a metric of the task; divergence: kl or top1 orders"
    )
    add("--csv", type=Path, metavar="FILE", help="write every column as CSV")
    add("--parquet", type=Path, metavar="FILE", help="write every column as parquet")
    add("--markdown", type=Path, metavar="FILE", help="write what is printed as Markdown")
    add("--plot", type=Path, metavar="FILE", help="draw the view into a .png, .pdf or .svg")
    group = result.add_argument_group("--view divergence")
    add = group.add_argument
    add("--measure", action="store_true", help="measure what runs lack first: their models are loaded")
    add("--text", choices=(*TEXTS, "both"), default=OWN, help="forced text: full's own answer, the reference, or both")
    add("--epsilon", type=float, metavar="NATS", help=f"of KL (default: the runs' own epsilon_kl, {EPSILON_KL})")
    add("--epsilon-top1", type=float, metavar="SHARE", help=f"(default: the runs' own, {EPSILON_TOP1})")
    add("--compare", action="store_true", help="every two runs, corrected by Holm")
    add("--alike", nargs="+", default=[], metavar="LABEL", help="compare only runs that share these, such as kv_ratio")
    result.epilog = "Views: " + "; ".join(f"{name}: {view.title}" for name, view in VIEWS.items()) + "."
    return result


def results(args: argparse.Namespace, methods: Sequence[str]) -> int:
    """Measure what is to be measured, write what is to be written, print the table."""
    far = args.view == views.DIVERGENCE
    for name, of in OF.items():
        if getattr(args, name) and args.view not in of:
            raise ConfigError(f"--{name.replace('_', '-')} is of --view {' or '.join(of)}, not of {args.view}")
    if any(value is not None and value <= 0 for value in (args.epsilon, args.epsilon_top1)):
        raise ConfigError("--epsilon and --epsilon-top1 must be positive")
    runs, console = read_runs(args.outputs, chosen_by(args)), Console(markup=False)
    unmeasured = measured(runs, methods, TEXTS if args.text == "both" else (args.text,)) if args.measure else {}
    asked = {"epsilon_kl": args.epsilon, "epsilon_top1": args.epsilon_top1, "metric": args.metric}
    given = {name: value for name in VIEWS[args.view].options if (value := asked[name]) is not None}
    order = args.metric if far else args.x
    frame, blocks, below = views.shown(runs, args.view, order, given)
    if frame.empty:
        nothing = unmatched(args.outputs, chosen_by(args))
        say(nothing if not runs.shown else f"no run under {args.outputs} {VIEWS[args.view].missing or nothing}")
    else:
        write(args.csv, lambda path: frame.to_csv(path, index=False))
        write(args.parquet, lambda path: frame.to_parquet(path, index=False))
        write(args.markdown, lambda path: path.write_text(markdown_of(blocks, below), encoding="utf-8"))
        if args.compare or args.alike:
            print_compared(runs, frame, args.alike, console)
        else:
            print_blocks(blocks, below, console)
    if args.plot is not None:
        from kvexp.results.plots import write_figure  # late: a table waits for no matplotlib

        text = OWN if args.text == "both" else args.text
        write(args.plot, lambda path: write_figure(path, runs, args.view, args.metric, args.x, text))
    for name, why in unmeasured.items():
        say(f"{name}: {why}")
    return 1 if frame.empty else 0


def measured(runs: Runs, methods: Sequence[str], texts: Sequence[str]) -> dict[str, str]:
    """Measure the divergence that runs lack; why not, by the name of a run."""
    from kvexp.run.batches import measure_claimed
    from kvexp.run.compose import with_user_methods

    with_user_methods(methods)
    return measure_claimed([folder.run for folder in runs.ran], texts)


def write(path: Path | None, writer: Callable[[Path], Any]) -> None:
    """Have a file written that was asked for; ConfigError where it cannot be."""
    if path is None:
        return
    try:
        writer(path)
    except (OSError, ImportError) as error:
        raise ConfigError(f"cannot write {path}: {error}; choose another file") from error
    say(f"wrote {path}", file=sys.stderr)
