"""docs/compaction.md: KL at equal bytes of methods that rewrite what they keep, and of methods that choose it."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.lib.tables import with_interval
from experiments.pages import ROOT, blank, dots, log_nats, markdown

CHOICE = "method.bias=none method.values=kept"
NAMES = {  # (method, what else its setting says): name on the page
    ("attention_matching", ""): "attention matching",
    ("attention_matching", CHOICE): "its choice alone",
    ("keyformer", ""): "Keyformer",
    ("kvzip", ""): "KVzip",
    ("d2o", ""): "D2O",
    ("cam", ""): "CaM",
    ("ideal", ""): "ideal choice",
    ("snapkv", ""): "SnapKV",
    ("random", ""): "random",
}
PLACES = {  # (task, question, bytes_ratio): head of the column
    ("news", "in_prompt", 0.25): "summary, 1/4",
    ("news", "in_prompt", 0.5): "summary, 1/2",
    ("news_qa", "in_prompt", 0.25): "question seen, 1/4",
}
DRAWN = [place for place in PLACES if place[0] == "news"]
Number = tuple[float, float, float]


def recorded() -> dict[tuple[str, str], dict[tuple[str, str, float], Number]]:
    """(method, variant) -> place -> KL with its interval."""
    rows = pd.read_csv(ROOT / "docs" / "compaction.csv")
    numbers: dict[tuple[str, str], dict[tuple[str, str, float], Number]] = {}
    for row in rows[rows["setting"].str.contains("bytes_ratio")].to_dict("records"):
        words = row["setting"].split()
        (ratio,) = (float(word.partition("=")[2]) for word in words if word.startswith("bytes_ratio="))
        key = row["method"], " ".join(word for word in words if word.startswith("method."))
        numbers.setdefault(key, {})[row["task"], row["question"], ratio] = row["kl"], row["kl_low"], row["kl_high"]
    return numbers


def draw() -> Figure:
    figure, (axes,) = blank()
    numbers = recorded()
    drawn = [key for key in NAMES if all(place in numbers[key] for place in DRAWN)]
    dots(axes, [(NAMES[key], [numbers[key][place] for place in DRAWN]) for key in drawn], ("1/4 of the bytes", "1/2"))
    log_nats(axes)
    axes.set_xlabel("KL from the full cache, nats per token")
    return figure


def table() -> str:
    numbers = recorded()
    lines = []
    for key, name in NAMES.items():
        shown = [numbers[key].get(place) for place in PLACES]
        cells = ["-" if number is None else with_interval(*number) for number in shown]
        lines.append((name, *cells))
    return markdown(("KL (95 %)", *PLACES.values()), lines)
