"""kvexp divergence outputs/: measure what runs lack, then print how far each is from the full cache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvexp.config.typed_methods import with_user_methods, without_method_words
from kvexp.console import Console
from kvexp.errors import ConfigError
from kvexp.record.divergence_lines import EPSILON_KL, EPSILON_TOP1, OWN, TEXTS
from kvexp.results.columns import parts
from kvexp.results.divergence_print import (
    divergence_frames,
    legend,
    print_block,
    print_choices,
    print_divergence,
    print_pairs,
    said,
)
from kvexp.results.divergence_table import compared
from kvexp.results.read import Folder, chosen, folders, unmatched
from kvexp.results.where import add_choice, chosen_by
from kvexp.terminal import say


def main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 1 if nothing was, 2 if the request cannot work."""
    methods, others = without_method_words(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(others)
    console = Console()
    try:
        with_user_methods(methods)
        wanted = chosen_by(args)
        texts = TEXTS if args.text == "both" else (args.text,)
        if any(value is not None and value <= 0 for value in (args.epsilon, args.epsilon_top1)):
            raise ConfigError("--epsilon and --epsilon-top1 must be positive")
        shown = [folder for folder in chosen(folders(args.outputs), wanted) if not folder.refused]
        refused: dict[str, str] = {}
        if not args.no_measure:
            from kvexp.divergence.measure import measure_claimed

            refused = measure_claimed([folder.run for folder in shown], texts)
        alike = labels_of(args.alike, shown)
        frame, choices = divergence_frames(args.outputs, wanted, args.epsilon, args.epsilon_top1)
        if args.csv is not None and not frame.empty:
            frame.to_csv(args.csv, index=False)
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    if frame.empty and choices.empty:
        console.print(unmatched(args.outputs, wanted) if not shown else "no run here has a divergence")
    if (args.compare or alike) and len(frame):
        for title, labels, part in parts(frame, "text"):
            text = str(labels["text"])
            print_block(f"{title}: KL divergence from the full cache along {said(text)}", part, console)
            by_hash = {folder.run.hash: folder for folder in shown if folder.run.hash in set(part["hash"])}
            print_pairs(compared(by_hash, text, alike), part, console)
        console.print(legend(frame), highlight=False)
    elif len(frame):
        print_divergence(frame, console)
    print_choices(choices, console)
    for name, why in refused.items():
        console.print(f"{name}: {why}")
    return 0 if len(frame) or len(choices) else 1


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="kvexp divergence", description=__doc__)
    add = result.add_argument
    add("outputs", nargs="?", default="outputs", help="the folder of the runs (default: outputs)")
    add_choice(result)
    add("--text", choices=(*TEXTS, "both"), default=OWN, help="forced text: full's own answer, the reference, or both")
    add("--epsilon", type=float, metavar="NATS", help=f"of KL (default: the runs' own epsilon_kl, {EPSILON_KL})")
    add("--epsilon-top1", type=float, metavar="SHARE", help=f"(default: the runs' own, {EPSILON_TOP1})")
    add("--compare", action="store_true", help="every two runs, corrected by Holm")
    add("--alike", nargs="+", default=[], metavar="LABEL", help="compare only runs that share these, such as kv_ratio")
    add("--no-measure", action="store_true", help="only read what was measured before")
    add("--csv", type=Path, metavar="FILE", help="write every column as CSV")
    return result


def labels_of(names: Sequence[str], shown: Sequence[Folder]) -> list[str]:
    """The labels named; a ConfigError where no run has one of them."""
    known = sorted({name for folder in shown for name in folder.labels})
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ConfigError(f"--alike: no run has a label {', '.join(wrong)}; their labels are {', '.join(known)}")
    return list(names)
