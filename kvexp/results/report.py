"""One HTML file of everything that was run: kvexp report outputs/ (or: make report).

The file needs no server and no network: plotly.js, the page's own scripts and the data are in it. Filters act on all
sections at once. No torch.

A `Section` is an entry of SECTIONS (the order of the page), whose function gives what JSON can hold (None leaves the
section out), and a script:

    assets/NAME.js     kvexp.section("NAME", (root, data, page) => draw): called once; `root` is the section's empty
                       element, `page.runs` the runs, and draw(shown) is called with the runs that pass the filters,
                       now and whenever a filter changes

Whatever comes from rows or configurations is text, never markup: Python hands it over as JSON only (`embed`), a
script makes elements with `kvexp.el` (text nodes) and passes what plotly shows through `kvexp.plain`. The page's
Content-Security-Policy names each script by its digest and forbids all requests, should that ever be forgotten.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from shlex import quote
from string import Template
from typing import Any

import pandas as pd

import kvexp
from kvexp.results.blocks import Block, absent, records
from kvexp.results.divergence import conclusion, per_example
from kvexp.results.plots import DASHES, color_of, dashes_of, marker_of
from kvexp.results.read import (
    Folder,
    Row,
    Runs,
    add_choice,
    baseline_of,
    chosen_by,
    number,
    question_words,
    read_runs,
    titled,
    unmatched,
)
from kvexp.results.screen import with_distances
from kvexp.results.stats import lower_is_better
from kvexp.results.table import called, few, groups, metrics_of, notes, quality_table
from kvexp.results.views import DIVERGENCE as KL_VIEW
from kvexp.results.views import VIEWS, View, chart_of, grid, is_needle
from kvexp.run.evictions import has_log, read_evictions, require_example_log, view_of
from kvexp.run.store import TEXTS
from kvexp.util.errors import ConfigError
from kvexp.util.output import say, tells_errors, tells_warnings, visible


def plain(value: Any) -> Any:
    """The value as JSON can hold it: numpy's scalars as Python's, NaN, NA and infinities as None, texts visible."""
    if isinstance(value, dict):
        return {visible(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is pd.NA:
        return None
    value = getattr(value, "item", lambda: value)()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float) else visible(str(value))


def embed(value: Any) -> str:
    """JSON for a <script type="application/json">, in ASCII: without `<`, nothing in it can end the element."""
    text = json.dumps(plain(value), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def digest(script: str) -> str:
    """A script's name in a Content-Security-Policy (w3.org/TR/CSP3, hash-source)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


_SYMBOLS = {
    **{"o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross"},
    **{"X": "x", "*": "star", "<": "triangle-left", ">": "triangle-right", "h": "hexagon", "p": "pentagon"},
}
_DASHES = {"-": "solid", ":": "dot", "-.": "dashdot"}


def look(method: str, dashes: Any) -> dict[str, str]:
    """color, symbol and dash of one line in plotly's words; dashes: as matplotlib takes them."""
    dash = _DASHES[dashes] if isinstance(dashes, str) else ",".join(f"{length}px" for length in dashes[1])
    return {"color": color_of(method), "symbol": _SYMBOLS[marker_of(method)], "dash": dash}


@dataclass(frozen=True)
class RunGroup:
    """The runs of one table; setting: of each row, without the overrides that all of them share.

    panel: model and task, and NUMERICS where the page has several.
    """

    panel: str
    model: str
    task: str
    block: Block


@dataclass(frozen=True)
class ReportSource:
    """What a report is made of. frame: `quality_table` of the runs shown; samples: texts per run."""

    runs: Runs
    frame: pd.DataFrame
    samples: int

    @property
    def shown(self) -> list[Folder]:
        """The runs of the frame, in its order; refused jobs are none."""
        ran = {folder.run.hash: folder for folder in self.runs.ran}
        return [ran[key] for key in self.frame["hash"] if key in ran]

    @cached_property
    def groups(self) -> list[RunGroup]:
        several = self.frame.loc[self.frame["status"] != "refused", "numerics"].nunique() > 1
        run_groups: list[RunGroup] = []
        for block in groups(self.runs.frame(with_distances), "kv_ratio"):
            rows = block.rows
            # A job refused before its labels were known has none.
            model, task = ("-" if pd.isna(value := rows[0].get(name)) else str(value) for name in ("model", "task"))
            panel = f"{model} / {task}" + (f", NUMERICS {rows[0]['numerics']}" if several else "")
            panel = titled(panel, [row.get("question") for row in rows])
            run_groups.append(RunGroup(panel, model, task, block))
        return run_groups


def read(outputs: str | Path, where: Mapping[str, Any] | None = None, samples: int = 20) -> ReportSource:
    """Everything under the folder; ConfigError if there is no such folder, or no run that `where` leaves."""
    if samples < 0:
        raise ConfigError(f"--samples must be 0 or more, got {samples}")
    runs = read_runs(outputs, where)
    if not runs.shown:
        raise ConfigError(unmatched(outputs, where or {}))
    return ReportSource(runs, runs.frame(quality_table), samples)


COST = ("slots", "kv_bytes", "peak_kv_bytes", "ttft_s", "tpot_s", "tokens_per_s", "smallest_batch", "batch_size")
SAID = ("kv_ratio", "status", "note", "verdict99", "verdict999", "n", "paired", "headline", "numerics", "baseline")


def index(source: ReportSource) -> list[dict[str, Any]]:
    """One entry per run, as every section's script sees them (`page.runs`), in the table's order.

    `line` parts the lines of a chart, `of` holds percentages of full. Refused jobs are none: they have nothing that a
    filter could choose.
    """
    return [entry for group in source.groups for entry in _entries(source, group)]


def _entries(source: ReportSource, group: RunGroup) -> list[dict[str, Any]]:
    places = [row.get("question") for row in group.block.rows]
    codes: dict[str, set[Any]] = defaultdict(set)
    for row in group.block.rows:
        codes[str(row.get("method"))].add(row.get("code"))
    several = {method for method, versions in codes.items() if len(versions) > 1}
    most = max(row["n"] for row in group.block.rows)
    lines = [_line(row, several, most, by_place=len(set(places)) > 1) for row in group.block.rows]
    dashes = dashes_of(pd.DataFrame(lines, columns=["method", "setting"]))
    return [
        {
            **{name: row[name] for name in ("hash", *SAID, *COST) if name in row},
            **{"model": group.model, "task": group.task, "panel": group.panel, "method": method, "line": setting},
            **{"headline": called(str(row["headline"]), row.get("task")) if row["headline"] else None},
            **{"of": _percentages(row), "full": row["verdict99"] == "baseline", "few": few(row)},
            **look(method, dashes[method, setting]),
            **_where(source, row["hash"]),
        }
        for row, (method, setting) in zip(group.block.rows, lines, strict=True)
    ]


def _line(row: Mapping[str, Any], several: set[str], most: int, *, by_place: bool) -> tuple[str, str]:
    """Method and setting: what one line of a chart may join. Two versions of a method's code are two lines.

    several: methods with more than one; most: examples of the run of the panel that has most: those with fewer are
    lines of their own. by_place: whether eviction has seen the question in some of these runs alone, which parts lines.
    """
    method = "-" if absent(row.get("method")) else str(row["method"])
    setting = "" if absent(row.get("setting")) else str(row["setting"])
    if by_place:
        setting = ", ".join(filter(None, [setting, question_words([row.get("question")])]))
    if method in several:
        setting = f"{setting} code={row['code']}".lstrip()
    return method, f"{setting} (n = {row['n']})".lstrip() if 0 < row["n"] < most else setting


def _percentages(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Metric -> [percent of full, ends of its 95 % interval, mean score]."""
    return {
        called(name, row.get("task")): [row[f"{name}{ending}"] for ending in ("_of_full", "_low", "_high", "")]
        for name in metrics_of([row])[0]
    }


def _where(source: ReportSource, key: str) -> dict[str, str]:
    """The commit that made the rows, and what their seconds depend on."""
    env = source.runs.known[key].run.env if key in source.runs.known else {}
    place = [str(env.get("device", "")), f"{env['threads']} threads" if "threads" in env else ""]
    place += [f"torch {env['torch']}" if "torch" in env else ""]
    return {"commit": str(env.get("commit") or ""), "place": ", ".join(word for word in place if word)}


@dataclass(frozen=True)
class Section:
    """name: of assets/NAME.js and of the element; title, lead: the page's own words, as HTML.

    data: what its script gets, in what JSON can hold; None leaves the section out.
    """

    name: str
    title: str
    lead: str
    data: Callable[[ReportSource], Any]


def about_data(source: ReportSource) -> dict[str, Any]:
    """Runs by NUMERICS, commit and machine (one who-when-where per line); runs that are not done, with the reason."""
    real = source.frame[source.frame["status"] != "refused"]
    envs = [folder.run.env for folder in source.shown]
    names = ("kvexp", "commit", "device", "threads", "python", "torch", "transformers")
    counts: dict[tuple[str, ...], int] = {}
    for env, numerics in zip(envs, real["numerics"], strict=True):
        key = (str(numerics), *(str(env.get(name, "-")) for name in names))
        counts[key] = counts.get(key, 0) + 1
    problems = source.frame[source.frame["status"] != "done"].to_dict("records")  # refused jobs too: here alone
    said = ("status", "model", "task", "method", "kv_ratio", "n", "note", "hash")
    return {
        "outputs": source.runs.outputs.name,
        "numerics": kvexp.NUMERICS,
        "heads": ["NUMERICS", *names, "runs"],
        "made": [[*key, count] for key, count in counts.items()],
        "problem_heads": list(said),
        "problems": [[row.get(name) for name in said] for row in problems],
    }


DIVERGENCE = (
    *("kl", "kl_low", "kl_high", "kl_p99", "top1", "ppl_ratio", "verdict_kl", "verdict_top1"),
    *("text", "n", "tokens", "kv_bytes", "epsilon", "epsilon_top1"),
)


def divergence_data(source: ReportSource) -> dict[str, Any] | None:
    """runs: hash -> kind of text -> numbers and KL by position; said: panel -> its conclusion, along the first kind of
    text.
    """
    runs = {folder.run.hash: folder.run for folder in source.shown}
    frame = source.runs.frame(VIEWS[KL_VIEW].table)
    if frame.empty:
        return None
    by_run: dict[str, dict[str, Any]] = {}
    for row in frame.to_dict("records"):
        measured = per_example(runs[row["hash"]], row["text"])
        assert measured is not None  # it has a row
        along = measured.by_position()
        entry = {name: row[name] for name in DIVERGENCE}
        entry |= {"position": along["position"].tolist(), "along": [float(f"{kl:.4g}") for kl in along["kl"]]}
        by_run.setdefault(row["hash"], {})[row["text"]] = entry
    by_run = {key: by_run[key] for key in runs if key in by_run}  # in the order of the page
    texts = [text for text in TEXTS if text in set(frame["text"])]
    judged = {row["hash"]: row for row in records(frame[frame["text"] == texts[0]])}
    conclusions = {
        group.panel: conclusion([judged[row["hash"]] for row in group.block.rows if row["hash"] in judged])
        for group in source.groups
    }
    return {"runs": by_run, "texts": texts, "said": conclusions}


MOST = 4  # examples of a run
TOTAL = 60_000  # tokens of all texts together: a page a browser still opens at once


def kept_data(source: ReportSource) -> dict[str, Any] | None:
    """hash -> its diagnosed examples, the first in order; None where no run was made with diagnose=log."""
    by_run: dict[str, Any] = {}
    room = TOTAL
    for folder in source.shown:
        logged = [row["example"] for row in folder.rows if has_log(folder.run, row["example"])]
        for example in logged[:MOST]:
            text = _text(folder, example)
            room -= len(text["tokens"]) if text else 0
            if text and room >= 0:
                by_run.setdefault(folder.run.hash, []).append(text)
    return {"texts": by_run, "cut": room < 0} if by_run else None


def _text(folder: Folder, example: str) -> dict[str, Any] | None:
    """kept: at the end of the prompt and after the last token, [layer][token] heads; None for a log that is broken."""
    try:
        log = require_example_log(folder.run, example)
        evictions = read_evictions(folder.run, example)
        views = [view_of(log, evictions, step) for step in sorted({0, log.steps})]
    except ConfigError:
        return None
    return {
        "example": example,
        "tokens": log.texts,
        "heads": log.heads,
        "prompt": log.prompt_tokens,
        "question": log.question_tokens,
        "times": [{"step": view.step, "read": view.present, "kept": view.kept.tolist()} for view in views],
    }


def life_data(source: ReportSource) -> list[dict[str, Any]] | None:
    """A part for each view with a chart of which there are runs: its tables, and a chart of each."""
    parts = []
    for name, view in VIEWS.items():
        if not view.sides or not any(map(view.applies, source.shown)):
            continue
        frame = source.runs.frame(view.table)
        if blocks := [_block(view, block) for block in view.blocks(frame)]:
            legend = " ".join(view.lines_below(source.runs, frame))
            command = f"kvexp results --view {name}"
            parts.append({"name": name, "title": view.title, "command": command, "legend": legend, "blocks": blocks})
    return parts or None


def _block(view: View, block: Block) -> dict[str, Any]:
    """One table, and its chart: places along the axis, and lines with points (place, hash, values and their ends)."""
    places, lines = chart_of(view, block.rows)
    sides = [{"title": side.title, "log": side.log, "level": side.level} for side in view.sides]
    drawn = [
        {"label": line.label, "points": line.points, **look(line.method, DASHES[line.before % len(DASHES)])}
        for line in lines
    ]
    return {**block.cells(), "x": view.x, "places": places, "sides": sides, "lines": drawn}


def needle_data(source: ReportSource) -> dict[str, Any] | None:
    """hash -> lengths, depths and, per metric, rows of percentages; None where no run has a length and a depth."""
    by_run: dict[str, Any] = {}
    for folder in filter(is_needle, source.shown):
        rows = [{**row, "metrics": row.get("metrics") or {}} for row in folder.rows]
        cells = {metric: grid(rows, metric) for metric in folder.metrics}
        first = next(iter(cells.values()))
        lengths = [f"{length:g}" for length in first.columns]
        values = {metric: cells_of_metric.to_numpy(dtype=float).tolist() for metric, cells_of_metric in cells.items()}
        by_run[folder.run.hash] = {"lengths": lengths, "depths": first.attrs["depths"], "cells": values}
    return by_run or None


LONGEST = 4_000  # letters of one text
SAMPLES_TOTAL = 12_000_000  # letters of all texts together: a page a browser still opens at once


def samples_data(source: ReportSource) -> dict[str, Any]:
    """texts: hash -> example -> what its row says; chosen: hash -> its examples; per_run: how many there could be;
    outputs: the folder of the runs, quoted for a shell.

    Half of a run's examples are the first in order, half those that lost most against the full cache: the latter are
    the worst by choice, and say nothing of how often that happens.
    """
    shown, per_run = source.shown, source.samples
    while True:
        chosen = {folder.run.hash: _choose(folder, baseline_of(folder, source.runs.known), per_run) for folder in shown}
        texts = _texts(source, shown, chosen)
        letters = sum(len(row[text] or "") for rows in texts.values() for row in rows.values() for text in _PARTS)
        if letters <= SAMPLES_TOTAL or per_run <= 1:
            sizes = {"per_run": per_run, "longest": LONGEST, "asked": source.samples}
            return {"texts": texts, "chosen": chosen, "outputs": quote(str(source.runs.outputs)), **sizes}
        per_run //= 2


_PARTS = ("output", "reference")


def _choose(folder: Folder, baseline: Folder | None, most: int) -> dict[str, list[str]]:
    """Examples with a text: `first` in order, and `lost` most in the headline metric, the greatest loss first."""
    written = [row["example"] for row in folder.rows if isinstance(row.get("output"), str)]
    losses: dict[str, float] = {}  # points below the full cache
    if baseline is not None and not folder.is_baseline and folder.metrics:
        metric = folder.metrics[0]
        for name in written:
            if name in folder.scored and name in baseline.scored:
                full, score = (number(side.scored[name]["metrics"].get(metric)) for side in (baseline, folder))
                losses[name] = score - full if lower_is_better(metric) else full - score
    lost = [name for name, loss in losses.items() if loss > 0]
    lost = sorted(lost, key=lambda name: -losses[name])[: most // 2]
    return {"first": [name for name in dict.fromkeys(written) if name not in lost][: most - len(lost)], "lost": lost}


def _texts(source: ReportSource, shown: Iterable[Folder], chosen: dict[str, dict[str, list[str]]]) -> dict[str, Any]:
    """The rows needed: each run's own and the same examples of its baseline, which alone carries the reference."""
    wanted: dict[str, set[str]] = {}
    for folder in shown:
        names = {name for group in chosen[folder.run.hash].values() for name in group}
        for needed in filter(None, (folder, baseline_of(folder, source.runs.known))):
            wanted.setdefault(needed.run.hash, set()).update(names)
    rows_by_run = {}
    for key, names in wanted.items():
        folder = source.runs.known[key]
        alone = baseline_of(folder, source.runs.known) is None
        rows_by_run[key] = {row["example"]: _row(row, alone) for row in folder.rows if row["example"] in names}
    return rows_by_run


def _row(row: Row, with_reference: bool) -> dict[str, Any]:
    """What the page shows of a row; its texts cut to LONGEST letters and one more, by which the page sees the cut."""
    shown_row: dict[str, Any] = {"metrics": {name: number(value) for name, value in (row.get("metrics") or {}).items()}}
    for field in _PARTS:
        value = row.get(field)
        text = "\n".join(map(str, value)) if isinstance(value, list | tuple) else value  # several references by line
        shown = with_reference or field == "output"
        shown_row[field] = text[: LONGEST + 1] if shown and isinstance(text, str) else None
    shown_row |= {"skipped": row.get("skipped"), "prompt": row.get("prompt_tokens"), "new": row.get("new_tokens")}
    return shown_row | {"finish_reason": row.get("finish_reason"), "stop_reason": row.get("stop_reason")}


def verdicts_data(source: ReportSource) -> dict[str, Any]:
    """Tables with heads and cells as the terminal prints them, divergences first, and the notes below them.

    Method and budget come first, then what became of them: a narrow window shows little more without scrolling.
    """
    view = VIEWS[KL_VIEW]
    far = source.runs.frame(view.table)
    blocks = [_first(block, 3) for block in view.blocks(far)] + [_first(group.block, 4) for group in source.groups]
    notes_below = [*view.lines_below(source.runs, far), *notes(source.frame)]
    return {"tables": [block.cells() for block in blocks], "notes": notes_below}


def _first(block: Block, decisive: int) -> Block:
    """The table with so many of the columns behind the names moved behind the first two names."""
    names, others = block.columns[: block.keys], block.columns[block.keys :]
    return replace(block, columns=[*names[:2], *others[:decisive], *names[2:], *others[decisive:]])


def asset(name: str) -> str:
    return files("kvexp.results").joinpath("assets", name).read_text(encoding="utf-8")


WORDS = json.loads(asset("sections.json"))  # name -> title, lead
SECTIONS = tuple(
    Section(name, **WORDS[name], data=data)
    for name, data in (
        ("divergence", divergence_data),
        ("verdicts", verdicts_data),
        ("explorer", lambda source: {}),
        ("life", life_data),
        ("cost", lambda source: {}),
        ("samples", samples_data),
        ("kept", kept_data),
        ("needle", needle_data),
        ("about", about_data),
    )
)
BEFORE = ("dom", "table", "filters", "panels", "diff")  # scripts the sections use
AFTER = ("start",)


def page(source: ReportSource) -> str:
    """The HTML, in ASCII but for the scripts; the same runs give the same text."""
    contents = [(section, section.data(source)) for section in SECTIONS]
    shown = [(section, data) for section, data in contents if data is not None]
    names = [*BEFORE, *(section.name for section, _ in shown), *AFTER]
    scripts = [plotly(), *(asset(f"{name}.js") for name in names)]
    if any(word in script.lower() for script in scripts for word in ("</script", "<!--")):
        raise ValueError("a script holds </script or <!--, which would end its element early; take another plotly")
    data = {"runs": index(source), "sections": {section.name: data for section, data in shown}}
    return Template(asset("page.html")).substitute(
        allowed=" ".join(map(digest, scripts)),
        style=asset("page.css"),
        links="".join(f'<a href="#{section.name}">{section.title}</a>' for section, _ in shown),
        sections="".join(map(_element, (section for section, _ in shown))),
        data=embed(data),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def _element(section: Section) -> str:
    name, title, lead = section.name, section.title, section.lead
    return f'<section id="{name}"><h2>{title}</h2><p class="lead">{lead}</p><div class="body"></div></section>\n'


def plotly() -> str:
    """plotly.js, from the Python package of that name."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ConfigError("the report needs plotly, which is not installed; run: pip install 'kvexp[eval]'") from error
    return str(get_plotlyjs())


REPORT_DOC = """kvexp report [OUTPUTS] [FILE]: write one HTML file of whatever has been run."""


@tells_warnings
@tells_errors(ConfigError)
def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvexp report`; exit code 0, or 2 where there is nothing to show or no place to put it."""
    parser = argparse.ArgumentParser(prog="kvexp report", description=REPORT_DOC)
    parser.add_argument("outputs", nargs="?", type=Path, default=Path("outputs"), help="the folder of the runs")
    parser.add_argument("file", nargs="?", type=Path, help="what to write (default: report.html in that folder)")
    add_choice(parser)
    parser.add_argument("--samples", type=int, default=20, help="sample outputs per run (default: 20)")
    args = parser.parse_args(argv)
    file = args.file or args.outputs / "report.html"
    source = read(args.outputs, chosen_by(args), args.samples)
    text = page(source)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error}; choose another file") from error
    runs = int(source.frame["status"].ne("refused").sum())
    say(f"wrote {file}: {runs} runs, {len(text) / 1e6:.1f} MB; open it in a browser")
    return 0
