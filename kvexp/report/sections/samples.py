"""What the runs wrote beside what the full cache wrote: some examples of each run."""

from collections.abc import Iterable
from shlex import quote
from typing import Any

from kvexp.report.section import Section
from kvexp.report.source import ReportSource
from kvexp.results.read import Folder, Row, baseline_of, number
from kvexp.results.stats import lower_is_better

LONGEST = 4_000  # letters of one text
TOTAL = 12_000_000  # letters of all texts together: a page a browser still opens at once


def data(source: ReportSource) -> dict[str, Any]:
    """texts: hash -> example -> what its row says; chosen: hash -> its examples; per_run: how many there could be;
    outputs: the folder of the runs, quoted for a shell.

    Half of a run's examples are the first in order, half those that lost most against the full cache: the latter are
    the worst by choice, and say nothing of how often that happens.
    """
    shown = [source.folders[key] for key in source.frame["hash"] if key in source.folders]
    per_run = source.samples
    while True:
        chosen = {folder.run.hash: _choose(folder, _baseline(source, folder), per_run) for folder in shown}
        texts = _texts(source, shown, chosen)
        letters = sum(len(row[part] or "") for rows in texts.values() for row in rows.values() for part in _PARTS)
        if letters <= TOTAL or per_run <= 1:
            sizes = {"per_run": per_run, "longest": LONGEST, "asked": source.samples}
            return {"texts": texts, "chosen": chosen, "outputs": quote(str(source.outputs)), **sizes}
        per_run //= 2


_PARTS = ("output", "reference")


def _baseline(source: ReportSource, folder: Folder) -> Folder | None:
    return baseline_of(folder, source.folders)


def _choose(folder: Folder, baseline: Folder | None, most: int) -> dict[str, list[str]]:
    """Examples with a text: `first` in order, and `lost` most in the headline metric, the greatest loss first."""
    written = {row["example"]: row for row in folder.rows if isinstance(row.get("output"), str)}
    losses = _losses(folder, baseline)
    lost = sorted((name for name in losses if name in written), key=lambda name: -losses[name])[: most // 2]
    first = [name for name in written if name not in lost][: most - len(lost)]
    return {"first": first, "lost": lost}


def _losses(folder: Folder, baseline: Folder | None) -> dict[str, float]:
    """Example -> points below the full cache, where there is a loss."""
    if baseline is None or folder.is_baseline or not folder.metrics:
        return {}
    metric = folder.metrics[0]
    sign = -1.0 if lower_is_better(metric) else 1.0
    found = {
        name: sign * (number(baseline.scored[name]["metrics"].get(metric)) - number(row["metrics"].get(metric)))
        for name, row in folder.scored.items()
        if name in baseline.scored
    }
    return {name: loss for name, loss in found.items() if loss > 0}


def _texts(source: ReportSource, shown: Iterable[Folder], chosen: dict[str, dict[str, list[str]]]) -> dict[str, Any]:
    """The rows needed: each run's own and the same examples of its baseline, which alone carries the reference."""
    wanted: dict[str, set[str]] = {}
    for folder in shown:
        names = {name for group in chosen[folder.run.hash].values() for name in group}
        wanted.setdefault(folder.run.hash, set()).update(names)
        if baseline := _baseline(source, folder):
            wanted.setdefault(baseline.run.hash, set()).update(names)
    return {key: _rows(source.folders[key], names, source) for key, names in wanted.items()}


def _rows(folder: Folder, names: set[str], source: ReportSource) -> dict[str, Any]:
    alone = _baseline(source, folder) is None
    return {row["example"]: _row(row, alone) for row in folder.rows if row["example"] in names}


def _row(row: Row, with_reference: bool) -> dict[str, Any]:
    output, reference = (_text(row.get(part)) for part in _PARTS)
    scores = {name: number(value) for name, value in (row.get("metrics") or {}).items()}
    kept = {"output": output, "reference": reference if with_reference else None, "metrics": scores}
    kept |= {"skipped": row.get("skipped"), "prompt": row.get("prompt_tokens"), "new": row.get("new_tokens")}
    return kept | {"finish_reason": row.get("finish_reason"), "stop_reason": row.get("stop_reason")}


def _text(value: Any) -> str | None:
    """Cut to LONGEST letters and one more, by which the page sees that it was cut; several references by line."""
    if isinstance(value, list | tuple):
        value = "\n".join(map(str, value))
    return value[: LONGEST + 1] if isinstance(value, str) else None


SECTION = Section(
    "samples",
    "Sample outputs",
    'What a run wrote beside what the full cache wrote for the same prompt, compared word by word: <del class="word">'
    'only the full cache</del>, <ins class="word">only this run</ins>.',
    data,
)
