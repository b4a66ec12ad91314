"""docs/decoding.md: KL of rules for long answers over that of random slots."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from experiments.pages import ROOT, Curve, blank, curves, markdown
from experiments.studies.decoding import FIRST, PROMPT, logs, paired, percent, read_rows

RULES = {"snapkv": "SnapKV", "rkv": "R-KV", "vase": "VaSE", "recency": "newest tokens", "triattention": "TriAttention"}
LATER = {"gkv": "G-KV", "lagkv": "LagKV, causal", "epikv": "EpiKV"}  # at one number of slots: in the table alone
KINDS = {"solution": "solutions, worked out step by step", "ledger": "ledgers of codes from the prompt"}


def percents() -> dict[tuple[str, str], dict[int, tuple[float, float, float]]]:
    """(kind, rule) -> slots -> percent of KL above random slots (redrawn), as many: mean, low, high."""
    cells = logs(read_rows(ROOT / "experiments" / "decoding"))
    table: dict[tuple[str, str], dict[int, tuple[float, float, float]]] = {}
    for (kind, slots), cell in sorted(cells.items()):
        for rule in (*RULES, *LATER) if kind in KINDS else ():
            gaps = paired(cell[rule, PROMPT], cell["redrawn", PROMPT])
            if len(gaps) >= FIRST:
                table.setdefault((kind, rule), {})[slots] = percent(gaps)
    return table


def draw() -> Figure:
    figure, panels = blank(2)
    table = percents()
    for axes, (kind, title) in zip(panels, KINDS.items(), strict=True):
        lines = []
        for rule, name in RULES.items():
            slots = sorted(table[kind, rule])
            mean, low, high = np.array([table[kind, rule][count] for count in slots]).T
            lines.append(Curve(name, slots, mean, low, high))
        axes.axhline(0, color="black", linewidth=1)
        curves(axes, lines, "slots of a kv head", "% more KL than random slots", log="x")
        axes.set_title(title, fontsize=10.5)
    return figure


def table() -> str:
    cells = percents()
    columns = [(kind, slots) for kind in KINDS for slots in sorted(cells[kind, "rkv"])]
    rows = []
    for rule, name in (RULES | LATER).items():
        gaps = [cells.get((kind, rule), {}).get(slots) for kind, slots in columns]
        if any(gaps):
            rows.append([name, *("-" if gap is None else f"{gap[0]:+.0f}" for gap in gaps)])
    return markdown(["% more KL than random", *(f"{kind}, {slots}" for kind, slots in columns)], rows)
