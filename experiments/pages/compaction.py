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
SMOLLM, GEMMA = "smollm2_135m", "gemma3_270m"
SUMMARIES = {  # (model, task, question, bytes_ratio): head of the column
    (SMOLLM, "news", "in_prompt", 0.125): "summary, 1/8",
    (SMOLLM, "news", "in_prompt", 0.25): "1/4",
    (SMOLLM, "news", "in_prompt", 0.5): "1/2",
}
QUARTERS = {
    (SMOLLM, "news_qa", "in_prompt", 0.25): "question, seen",
    (SMOLLM, "news_qa", "after_eviction", 0.25): "hidden",
    (SMOLLM, "news_needle", "in_prompt", 0.25): "needle, seen",
    (SMOLLM, "news_needle", "after_eviction", 0.25): "hidden",
    (GEMMA, "news", "in_prompt", 0.777): "Gemma 3, summary",
}
Number = tuple[float, float, float]


def recorded() -> dict[tuple[str, str], dict[tuple[str, str, str, float], Number]]:
    """(method, variant) -> place -> KL with its interval."""
    rows = pd.read_csv(ROOT / "docs" / "compaction.csv")
    numbers: dict[tuple[str, str], dict[tuple[str, str, str, float], Number]] = {}
    for row in rows[rows["setting"].str.contains("bytes_ratio")].to_dict("records"):
        words = row["setting"].split()
        (ratio,) = (float(word.partition("=")[2]) for word in words if word.startswith("bytes_ratio="))
        key = row["method"], " ".join(word for word in words if word.startswith("method."))
        numbers.setdefault(key, {})[row["model"], row["task"], row["question"], ratio] = row["kl"], row["kl_low"], row["kl_high"]
    return numbers


def draw() -> Figure:
    figure, (axes,) = blank()
    numbers = recorded()
    drawn = [(name, [numbers[key][place] for place in SUMMARIES]) for key, name in NAMES.items()]
    dots(axes, drawn, ("1/8 of the bytes", "1/4", "1/2"))
    log_nats(axes)
    axes.set_xlabel("KL from the full cache, nats per token")
    return figure


def table() -> str:
    numbers = recorded()
    parts = []
    for head, places in (("KL (95 %)", SUMMARIES), ("KL (95 %), 1/4", QUARTERS)):
        shown = {name: [numbers[key].get(place) for place in places] for key, name in NAMES.items()}
        rows = [
            (name, *("-" if number is None else with_interval(*number) for number in row)) for name, row in shown.items()
        ]
        parts.append(markdown((head, *places.values()), rows))
    return "\n\n".join(parts)
