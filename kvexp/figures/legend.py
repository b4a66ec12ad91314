"""One legend for all panels of a figure."""

from __future__ import annotations

import textwrap
from math import ceil

from matplotlib.figure import Figure

LETTER = 0.062  # inches of a letter in the legend


def legend_below(figure: Figure, width: float) -> int:
    """Every line of every panel once, below all of them, where it covers nothing; returns its number of lines of text.

    width: of the figure, in inches.
    """
    entries = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    labels = [textwrap.fill(label, 60) for label in entries]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, min(len(labels), int((width - 0.4) / (LETTER * longest + 0.55))))
    figure.legend(list(entries.values()), labels, fontsize=7, loc="outside lower center", ncols=columns)
    return ceil(len(labels) / columns) * (1 + max(label.count("\n") for label in labels))
