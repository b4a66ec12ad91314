"""docs/compaction.md: KL at equal bytes of methods that rewrite what they keep, and of methods that choose it."""

from __future__ import annotations

import math

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
}
SMOLLM, GEMMA = "smollm2_135m", "gemma3_270m"
SUMMARIES = {  # (model, task, question, bytes_ratio): head of the column
    (SMOLLM, "news", "in_prompt", 0.125): "summary, 1/8",
    (SMOLLM, "news", "in_prompt", 0.25): "summary, 1/4",
    (SMOLLM, "news", "in_prompt", 0.5): "summary, 1/2",
}
TASKS = {"news_qa": "question", "news_needle": "needle"}
ASKED = {"in_prompt": "seen", "after_eviction": "hidden"}
QUESTIONS = {(task, asked): f"{name} {ASKED[asked]}" for task, name in TASKS.items() for asked in ASKED}
PLACES = SUMMARIES | {(SMOLLM, *of, 0.25): f"{head}, 1/4" for of, head in QUESTIONS.items()}
PLACES |= {(GEMMA, *of, 0.25): head for of, head in ({("news", "in_prompt"): "Gemma: summary"} | QUESTIONS).items()}
Number = tuple[float, float, float]


def recorded() -> dict[tuple[str, str], dict[tuple[str, str, str, float], Number]]:
    """(method, variant) -> place -> KL with its interval."""
    rows = pd.read_csv(ROOT / "docs" / "compaction.csv")
    numbers: dict[tuple[str, str], dict[tuple[str, str, str, float], Number]] = {}
    for row in rows.to_dict("records"):
        setting = dict(word.split("=") for word in row["setting"].split())
        if "bytes_ratio" in setting:
            ratio = row["kv_ratio"] if setting["bytes_ratio"] == "null" else float(setting["bytes_ratio"])
            key = row["method"], " ".join(word for word in row["setting"].split() if word.startswith("method."))
            place = row["model"], row["task"], row["question"], ratio
            numbers.setdefault(key, {})[place] = row["kl"], row["kl_low"], row["kl_high"]
    return numbers


def draw() -> Figure:
    figure, (axes,) = blank()
    numbers = recorded()
    complete = [(name, numbers[key]) for key, name in NAMES.items() if SUMMARIES.keys() <= numbers[key].keys()]
    dots(
        axes,
        [(name, [known[place] for place in SUMMARIES]) for name, known in complete],
        ("1/8 of the bytes", "1/4", "1/2"),
    )
    log_nats(axes)
    axes.set_xlabel("KL from the full cache, nats per token")
    return figure


def table() -> str:
    numbers = recorded()
    lines = []
    for key, name in NAMES.items():
        shown = [(place[0], numbers[key].get(place, (math.nan,) * 3)) for place in PLACES]
        # Gemma's intervals are wide, and in the recording alone.
        cells = (with_interval(*number) if model == SMOLLM else f"{number[0]:#.2g}" for model, number in shown)
        lines.append((name, *("-" if "nan" in cell else cell for cell in cells)))
    return markdown(("KL (95 %)", *PLACES.values()), lines)
