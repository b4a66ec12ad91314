"""docs/causes.md: how scores rank tokens by their measured effects, and what their evictions lose."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.pages import ROOT, blank, dots, log_nats, markdown

NAMES = {
    **{"answer_attention_value": "answer's attention", "kvzap": "KVzap", "kvzip_plus": "KVzip+", "tova": "TOVA"},
    **{"keyformer": "Keyformer", "h2o": "H2O", "expected_attention": "ExpectedAttention", "snapkv": "SnapKV"},
    **{"spatten": "SpAtten", "compactor": "Compactor", "random": "random", "window": "newest tokens"},
}
TEXTS = {"news": "summaries, news", "cnn_dailymail": "summaries, CNN", "news_qa": "hidden questions"}
PANELS = (("rank_correlation", "low", "high"), ("kl", "kl_low", "kl_high"))


def scores() -> pd.DataFrame:
    """The recorded columns of every (text, score)."""
    return pd.read_csv(ROOT / "docs" / "causes.csv").set_index(["text", "score"])


def draw() -> Figure:
    figure, panels = blank(2, height=5.6)
    recorded = scores()
    for axes, columns in zip(panels, PANELS, strict=True):
        rows = []
        for name, label in NAMES.items():
            cells = (recorded.loc[(text, name), list(columns)] for text in TEXTS)
            rows.append((label, [(float(mean), float(low), float(high)) for mean, low, high in cells]))
        dots(axes, rows, [*TEXTS.values()])
    ranks, nats = panels
    ranks.axvline(0, color="black", linewidth=1)
    ranks.set_xlabel("rank correlation of score and effect")
    ranks.get_legend().remove()
    log_nats(nats)
    nats.set_xlabel("KL of what it evicts, nats per token")
    nats.tick_params(labelleft=False)
    return figure


def table() -> str:
    recorded, rows = scores(), []
    for name, label in NAMES.items():
        cells = [recorded.loc[(text, name), column] for column in ("rank_correlation", "kl") for text in TEXTS]
        rows.append([label, *("" if pd.isna(value) else f"{value + 0:.2f}" for value in cells)])
    head = [f"{what}, {text}" for what in ("correlation", "KL") for text in ("news", "CNN", "questions")]
    return markdown(["score", *head], rows)
