"""python -m kvexp.divergence outputs/: measure what runs lack, then print how far each is from the full cache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.text import Text

from kvexp.config.typed_methods import with_user_methods, without_method_words
from kvexp.console import Console
from kvexp.divergence.divergence_file import OWN, TEXTS
from kvexp.divergence.divergence_table import EPSILON_KL, EPSILON_TOP1, compared, divergence_table
from kvexp.errors import ConfigError
from kvexp.pipes import watch_pipes
from kvexp.results.columns import Column, Row, plain, shared_settings
from kvexp.results.read import chosen, folders, unmatched
from kvexp.results.render import print_columns
from kvexp.results.units import TOO_FEW, absent, fixed
from kvexp.results.where import where
from kvexp.terminal import say


def main(argv: Sequence[str] | None = None) -> int:
    """0 if there was something to show, 1 if nothing was, 2 if the request cannot work."""
    methods, others = without_method_words(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(others)
    console = Console()
    try:
        with_user_methods(methods)
        wanted = where(args.where)
        texts = TEXTS if args.text == "both" else (args.text,)
        if min(args.epsilon, args.epsilon_top1) <= 0:
            raise ConfigError("--epsilon and --epsilon-top1 must be positive")
        shown = [folder for folder in chosen(folders(args.outputs), wanted) if not folder.refused]
        refused: dict[str, str] = {}
        if not args.no_measure:
            from kvexp.divergence.measure import measure_claimed

            refused = measure_claimed([folder.run for folder in shown], texts)
        frame = divergence_table(shown, args.epsilon, args.epsilon_top1)
        if args.csv is not None and not frame.empty:
            frame.to_csv(args.csv, index=False)
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    if frame.empty:
        console.print(unmatched(args.outputs, wanted) if not shown else "no run here has a divergence")
    for (model, task, text), part in frame.groupby(["model", "task", "text"], sort=False) if len(frame) else ():
        _print(console, f"{model} / {task}: KL divergence from the full cache along {_said(str(text))}", part)
        if args.compare:
            by_hash = {folder.run.hash: folder for folder in shown if folder.run.hash in set(part["hash"])}
            _pairs(console, compared(by_hash, str(text)), part)
    if len(frame):
        console.print(
            f"KL in nats per token, mean over tokens with a 95 % interval over examples; equivalent: below "
            f"{args.epsilon:g}, worse: above; top-1: the same likeliest token, against {1 - args.epsilon_top1:.0%}; "
            "the first token, which the full prefill predicts, is left out"
        )
    for name, why in refused.items():
        console.print(f"{name}: {why}")
    return 0 if len(frame) else 1


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="kvexp divergence", description=__doc__)
    add = result.add_argument
    add("outputs", nargs="?", default="outputs", help="the folder of the runs (default: outputs)")
    add("--where", "-w", nargs="+", action="extend", default=[], metavar="LABEL=VALUE", help="only these runs")
    add("--text", choices=(*TEXTS, "both"), default=OWN, help="forced text: full's own answer, the reference, or both")
    add("--epsilon", type=float, default=EPSILON_KL, metavar="NATS", help=f"of KL (default: {EPSILON_KL})")
    add("--epsilon-top1", type=float, default=EPSILON_TOP1, metavar="SHARE", help=f"default: {EPSILON_TOP1}")
    add("--compare", action="store_true", help="every two runs, corrected by Holm")
    add("--no-measure", action="store_true", help="only read what was measured before")
    add("--csv", type=Path, metavar="FILE", help="write every column as CSV")
    return result


def _said(text: str) -> str:
    return "its own greedy answer" if text == OWN else "the reference answer"


def _print(console: Console, title: str, part: pd.DataFrame) -> None:
    made: list[dict[str, Any]] = part.sort_values(["kv_ratio", "kl"]).to_dict("records")  # type: ignore[assignment]
    shared, rows = shared_settings(made)
    console.print(Text(", ".join([title, *shared]), style="bold"))
    columns = [
        Column("method", lambda row: f"{row['method']} {row.get('setting') or ''}".strip(), right=False),
        plain("kv_ratio", "kv_ratio"),
        plain("n", "n"),
        plain("tokens", "tokens"),
        Column("KL", lambda row: fixed(row["kl"], 4)),
        Column("95 %", lambda row: _ends(row, "kl", 4)),
        Column("median", lambda row: fixed(row["kl_p50"], 4)),
        Column("99 % of\ntokens", lambda row: fixed(row["kl_p99"], 2)),
        Column("verdict\non KL", lambda row: row["verdict_kl"], right=False),
        Column("same\ntop-1", lambda row: f"{row['top1']:.1%}"),
        Column("95 %", lambda row: _ends(row, "top1", 3)),
        Column("verdict\non top-1", lambda row: row["verdict_top1"], right=False),
        Column("perplexity\nratio", lambda row: fixed(row["ppl_ratio"], 3)),
    ]
    print_columns(rows, columns, 2, console)


def _ends(row: Row, name: str, digits: int) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return TOO_FEW if absent(low) else f"{low:.{digits}f}..{high:.{digits}f}"


def _pairs(console: Console, pairs: pd.DataFrame, part: pd.DataFrame) -> None:
    names = {row["hash"]: f"{row['method']} {row['kv_ratio']:g}" for _, row in part.iterrows()}
    rows: list[dict[str, Any]] = pairs.to_dict("records")  # type: ignore[assignment]
    columns = [
        Column("one", lambda row: names[row["one"]], right=False),
        Column("other", lambda row: names[row["other"]], right=False),
        plain("n", "n"),
        Column("KL of one\nless other", lambda row: f"{row['difference']:+.4f}"),
        Column("95 %", lambda row: TOO_FEW if absent(row["low"]) else f"{row['low']:+.4f}..{row['high']:+.4f}"),
        Column("p (Holm)", lambda row: "-" if absent(row["holm"]) else f"{row['holm']:.2g}"),
        Column("less divergence", lambda row: names.get(row["better"], "undecided"), right=False),
    ]
    print_columns(rows, columns, 2, console)


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
