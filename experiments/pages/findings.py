"""experiments/FINDINGS.md: leads in KL that three papers claim, and what was found of their claims."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.findings import words
from experiments.index import SHORT
from experiments.lib.exhibits import HERE, REAL, load, names
from experiments.lib.record import real_status, recorded
from experiments.lib.tables import Gap, paired_gap
from experiments.pages import COLORS, blank, markdown

PAGE = HERE / "FINDINGS.md"
INTERVAL = r"[+-]?\d+(?:\.\d+)?(?: \([^()]*(?: … |, )[^()]*\))?"


def said(entry: dict[str, Any], before: str) -> str:
    """The number and interval behind these words in what is recorded of an exhibit; "" if there is none."""
    sentences = " | ".join([entry.get("divergence", {}).get("words", ""), entry["words"]])
    found = re.search(rf"{re.escape(before)} ({INTERVAL})", sentences)
    return found[1] if found else ""


def number(name: str, entry: dict[str, Any]) -> str:
    """`number` of findings.yaml with the recorded numbers in it."""
    return re.sub(r"\{(.+?)\}", lambda match: said(entry, match[1]).replace(" … ", ".."), words(name)["number"])


def leads() -> dict[str, Gap]:
    """Label -> mean and 95 % interval, in nats per token, of the pairs that the figure shows."""
    rows = pd.read_csv(HERE / "recent_share.csv").query("kv_ratio == 0.5")
    found = {}
    for label, h2o in (("as published", 0.5), ("equal windows", 0.3)):
        one, two = (
            rows["method"].eq(name) & rows["recent_ratio"].eq(at) for name, at in (("h2o", h2o), ("keyformer", 0.3))
        )
        found[f"Keyformer over H2O, {label}"] = paired_gap(rows, "kl", one, two, ["example"])
    for name in names():
        for label, before in words(name).get("leads", {}).items():
            mean, low, high = map(float, re.findall(r"[+-]?\d+\.\d+", said(recorded(REAL)[name], before)))
            found[label] = (mean, low, high)
    return found


def draw() -> Figure:
    figure, (axes,) = blank(height=4.6)
    kinds = {"nearer, as claimed": COLORS[0], "farther": COLORS[1], "undecided": "#777777"}
    found = leads()
    for place, (mean, low, high) in enumerate(found.values()):
        color = list(kinds.values())[0 if low > 0 else 1 if high < 0 else 2]
        axes.plot([low, high], [-place, -place], color=color, linewidth=2)
        axes.plot(mean, -place, "o", color=color, markersize=6)
    for kind, color in kinds.items():
        axes.plot([], [], "o-", color=color, label=kind)
    axes.axvline(0, color="black", linewidth=1)
    ticks = [-0.3, -0.1, -0.03, 0, 0.03, 0.1, 0.3, 1]
    axes.set_xscale("symlog", linthresh=0.03)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlim(-0.9, 1.6)
    axes.set_yticks([-place for place in range(len(found))], list(found))
    axes.set_xlabel("nats per token nearer to the full cache")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 0.1), labelcolor="linecolor")
    return figure


def table() -> str:
    rows = []
    for name in names():
        if "short" in words(name):
            entry = recorded(REAL)[name]
            status = (SHORT.get(verdict, verdict) for verdict in real_status(name, entry))
            title = re.split(": | and appendix | in answers ", load(name).title)[0]
            rows.append([title, words(name)["short"], number(name, entry), *status])
    return markdown(["exhibit", "the paper", "here", "by its metric", "by KL"], rows).replace("---:", "---")
