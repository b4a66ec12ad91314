"""Divergence from the full cache against budget and bytes, and along the answer."""

from typing import Any

from kvexp.record.divergence_lines import TEXTS, read
from kvexp.report.section import Section
from kvexp.report.source import ReportSource
from kvexp.results.divergence_scale import scale_of
from kvexp.results.divergence_table import by_position, divergence_table

SHOWN = ("kl", "kl_low", "kl_high", "kl_p99", "top1", "ppl_ratio", "verdict_kl", "verdict_top1")
MORE = ("text", "n", "tokens", "kv_bytes", "epsilon", "epsilon_top1")


def data(source: ReportSource) -> dict[str, Any] | None:
    """runs: hash -> kind of text -> numbers and KL by position; marks: (model, task) -> known changes of the model."""
    shown = [source.folders[key] for key in source.frame["hash"] if key in source.folders]
    shown = [folder for folder in shown if not folder.refused]
    runs = {folder.run.hash: folder.run for folder in shown}
    frame = divergence_table(shown)
    if frame.empty:
        return None
    found: dict[str, dict[str, Any]] = {}
    for row in frame.to_dict("records"):
        lines = [line for (_, text), line in read(runs[row["hash"]]).items() if text == row["text"]]
        along = by_position(lines)
        entry = {name: row[name] for name in (*SHOWN, *MORE)}
        entry |= {"position": along["position"].tolist(), "along": [float(f"{kl:.4g}") for kl in along["kl"]]}
        found.setdefault(row["hash"], {})[row["text"]] = entry
    marks = [
        {"model": group.model, "task": group.task, "changes": [[row["change"], row["kl"]] for row in rows]}
        for group in source.groups
        if (rows := scale_of(runs[row["hash"]] for row in group.rows if row["hash"] in runs))
    ]
    return {"runs": found, "texts": [text for text in TEXTS if text in set(frame["text"])], "marks": marks}


SECTION = Section(
    "divergence",
    "Divergence from the full cache",
    "Mean KL divergence per token, in nats, of the next-token distributions from the full cache&#8217;s, all fed the "
    "same text; lower is better. Bars are 95 % intervals over examples. Black: epsilon, within which a run counts as "
    "equivalent; grey: known changes of the same model (docs/divergence.md).",
    data,
)
