"""kvexp submit RUN ...: make league entries of runs whose divergence is measured."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvexp.diagnose.folders import run_at
from kvexp.errors import ConfigError
from kvexp.league.entry_file import FORMAT, VERSION, Entry, words_of, write_entry
from kvexp.record import Run
from kvexp.record.canonical_json import load
from kvexp.record.divergence_lines import NAME, OWN, Line, read
from kvexp.results import table
from kvexp.results.divergence_table import divergence_table
from kvexp.results.read import Folder, folders
from kvexp.results.units import absent
from kvexp.terminal import say


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 for a run that makes no entry."""
    parser = argparse.ArgumentParser(prog="kvexp submit", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="its folder, or outputs@method=h2o,kv_ratio=0.3")
    parser.add_argument("--league", type=Path, default=Path("league"), metavar="FOLDER", help="default: league")
    args = parser.parse_args(argv)
    try:
        for run in [run_at(words) for words in args.runs]:
            entry = entry_of(run)
            file = write_entry(args.league, entry)
            say(f"wrote {file}: KL {entry['kl']:.4f} over {entry['n']} examples")
            if entry["code"]:
                say(
                    f"  its method is code of yours ({named_code(entry['code'])}): CI checks it once a maintainer has "
                    "approved that; put the file into the pull request too"
                )
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        say(f"error: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


def named_code(source: Mapping[str, Any]) -> str:
    """The class and the files of a user's method, as "keydiff.KeyDiff of keydiff.py"; source: an entry's `code`."""
    files = ", ".join(source.get("files") or ())
    return f"{source.get('class')}" + (f" of {files}" if files else "")


def entry_of(run: Run) -> Entry:
    """The league entry of a run; ConfigError where it has no divergence, no baseline or no command."""
    if run.baseline is None:
        raise ConfigError(f"{run.path} is a run of the full cache, which entries are measured against: name another")
    if run.command is None:
        raise ConfigError(f"{run.path} does not know how it was asked for: run it again")
    own = {line["example"]: line for (_, text), line in read(run).items() if text == OWN}
    if not own:
        raise ConfigError(f"{run.path} has no divergence yet: run kvexp divergence {run.path.parent}")
    by_hash = {folder.run.hash: folder for folder in folders(run.path.parent)}
    folder, full = by_hash[run.hash], by_hash.get(run.baseline)
    divergence = divergence_table([folder]).to_dict("records")
    (line,) = [row for row in divergence if row["text"] == OWN]
    (row,) = table(run.path.parent, {"hash": [run.hash]}).to_dict("records")
    metric = row.get("headline")
    env, labels = load(run.path / "env.json"), folder.labels
    entry: Entry = {"format": FORMAT, "version": VERSION, "hash": run.hash, "baseline": run.baseline}
    entry |= {
        "numerics": run.numerics,
        "environment": env,
        "words": words_of(list(run.command["overrides"]), run.command["choices"]),
    }
    entry |= {name: labels.get(name) for name in ("model", "task", "method", "setting", "kv_ratio", "tokens")}
    entry |= {"question": folder.question, "protocol": run.command["choices"].get("protocol"), "n": line["n"]}
    entry |= {name: _number(line[name]) for name in ("kl", "kl_low", "kl_high", "top1", "kv_bytes")}
    entry |= {"metric": None if absent(metric) else metric}
    for name, column in (("score", ""), ("of_full", "_of_full"), ("of_full_low", "_low"), ("of_full_high", "_high")):
        entry[name] = None if absent(metric) else _number(row.get(f"{metric}{column}"))
    entry |= _of_full(full, entry["metric"])
    entry |= {name: _number(row.get(name)) for name in ("peak_kv_bytes", "ttft_s", "tpot_s")}
    entry |= {"yardstick": folder.baseline_check, "code": run.config["method"].get("source")}
    entry["digests"] = {name: _digest(run.path / name) for name in ("examples.jsonl", NAME)}
    digests = {name: each.get("prompt_digest") for name, each in folder.scored.items()}
    outputs = {name: hashlib.sha256(each["output"].encode()).hexdigest() for name, each in folder.scored.items()}
    entry["rows"] = [
        {**_row(each), "prompt_digest": digests.get(name), "output_sha256": outputs.get(name)}
        for name, each in sorted(own.items(), key=lambda item: item[1]["index"])
    ]
    return entry


def _of_full(full: Folder | None, metric: str | None) -> dict[str, float | None]:
    """Mean score and bytes of the full cache, None where it has none."""
    rows = [] if full is None else list(full.scored.values())
    scores = [row["metrics"][metric] for row in rows if metric in row["metrics"]]
    sizes = [row["receipt"]["kv_bytes"] for row in rows if row.get("receipt")]
    mean: Any = lambda values: sum(values) / len(values) if values else None  # noqa: E731
    return {"full": mean(scores), "full_kv_bytes": mean(sizes)}


def _row(line: Line) -> dict[str, Any]:
    """The teacher-forced numbers of one example: means over the tokens that the prefill does not predict."""
    skip = int(line["first_by_prefill"]) if len(line["tokens"]) > 1 else 0
    judged = {name: line[name][skip:] for name in ("kl", "full_logprob", "logprob")}
    row = {name: line[name] for name in ("example", "index", "tokens")} | {"first_by_prefill": bool(skip)}
    return row | {name: float(f"{sum(values) / len(values):.7g}") for name, values in judged.items()}


def _number(value: Any) -> float | None:
    return None if absent(value) else float(value)


def _digest(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
