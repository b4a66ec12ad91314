"""The table and the figures of docs/causes.md, from what was recorded in docs/causes.csv.

python -m experiments.studies.causes --page docs/causes.md --figures docs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lib.exhibits import HERE
from experiments.lib.tables import estimate, markdown
from experiments.studies import carried_out, write_tables
from kvexp.diagnose.twin import save
from kvexp.util.output import watch_pipes

RECORDED = HERE.parent / "docs" / "causes.csv"
BEGIN = "<!-- causes: made by python -m experiments.studies.causes --page PAGE -->"
END = "<!-- end of causes -->"
SHOWN = (
    *("answer_attention_value", "answer_attention", "kvzap", "kvzip_plus", "tova", "keyformer", "h2o"),
    *("expected_attention", "snapkv", "spatten", "keydiff", "random", "window"),
)
TEXTS = {"news": "news", "cnn_dailymail": "CNN/DailyMail", "news_qa": "news_qa"}
SHARES = ("top_5", "effect_kept")  # in percent
METHOD, BY_ANSWER = "#4477aa", "#aaaaaa"  # scores of methods, and of the answer's own queries
HEIGHT = 0.24  # inches of a row


def table(recorded: pd.DataFrame) -> str:
    """The scores SHOWN as Markdown: correlations on all TEXTS; on news also shares kept in percent, and the KL."""
    by_text = {text: rows.set_index("score") for text, rows in recorded.groupby("text")}
    news = by_text["news"]
    lines = []
    for score in SHOWN:
        correlations = (
            estimate(*by_text[text].loc[score, ["rank_correlation", "low", "high"]].astype(float), digits=2)
            for text in TEXTS
        )
        shares = ("" if np.isnan(news.loc[score, name]) else f"{news.loc[score, name]:.0f}" for name in SHARES)
        kl = news.loc[score, ["kl", "kl_low", "kl_high"]].astype(float)
        lines.append((f"`{score}`", *correlations, *shares, "" if np.isnan(kl["kl"]) else estimate(*kl, digits=2)))
    first, *others = TEXTS.values()
    head = ("score", f"rank correlation, {first}", *others, f"top 5 % kept, {first}", f"effect kept, {first}")
    return markdown((*head, f"KL of all evicted, {first}"), *lines, right=True)


def draw(rows: pd.DataFrame, title: str) -> Figure:
    """Draw one text's scores: rank correlation, effect kept and KL of all evicted. rows: of one text, best first."""
    figure = Figure(figsize=(10, 1.4 + HEIGHT * len(rows)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    correlation, kept, kl = figure.subplots(1, 3, sharey=True)
    places = range(len(rows))
    colors = [BY_ANSWER if score.startswith("answer_") else METHOD for score in rows["score"]]
    correlation.barh(places, rows["rank_correlation"], color=colors, height=0.7)
    correlation.hlines(places, rows["low"], rows["high"], color="k", lw=1)
    correlation.axvline(0, color="k", lw=0.8)
    correlation.set_yticks(places, rows["score"], fontsize=8)
    correlation.set_ylim(len(rows) - 0.5, -0.5)
    kl.set_xscale("log")
    kl.hlines(places, rows["kl_low"], rows["kl_high"], color=METHOD, lw=1)
    _dots(kept, rows["effect_kept"])
    _dots(kl, rows["kl"])
    titles = (
        "rank correlation of the score\nwith the effect of a token",
        "effect kept\n(percent of the sum over tokens)",
        "KL of all evicted\n(nats per token)",
    )
    for axis, words in zip((correlation, kept, kl), titles, strict=True):
        axis.set_title(words, fontsize=9)
        axis.grid(axis="x", alpha=0.3)
    return figure


def _dots(axis: Axes, values: pd.Series) -> None:
    axis.plot(values, range(len(values)), "o", color=METHOD, ms=5)


def main(words: Sequence[str] | None = None) -> int:
    """0, or 2 if the request cannot work."""
    parser = argparse.ArgumentParser(prog="python -m experiments.studies.causes", description=__doc__)
    parser.add_argument("--page", type=Path, help="write the table into this page (default: print it)")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="write causes_TEXT.svg of news and news_qa")
    parser.set_defaults(command=_write)
    return carried_out(parser, words)


def _write(args: argparse.Namespace) -> int:
    recorded = pd.read_csv(RECORDED)
    write_tables(table(recorded), args.page, BEGIN, END)
    if args.figures is not None:
        for text in ("news", "news_qa"):
            rows = recorded[recorded["text"] == text].reset_index(drop=True)
            figure = draw(rows, f"{text}: SmolLM2-135M-Instruct, half the cache (n = 10)")
            save(figure, args.figures / f"causes_{text}.svg")
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
