"""A league table of eviction methods whose entries can be measured again: docs/league.md.

    python -m experiments.studies.league submit|check|page|tolerance --help

An entry is one run as one JSON file, with the words that make it again and the numbers of every row. It holds no code
and no path: `words` are arguments of `kvexp run`, and whoever checks it composes them anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from experiments.lib.tables import between
from experiments.lib.tables import markdown as markdown_table
from experiments.studies import carried_out, composed_runs
from kvexp import NUMERICS
from kvexp.diagnose.case import Case, cases, run_at
from kvexp.generate.kl import divergence_from_full, read_questions
from kvexp.results.divergence import divergence_table
from kvexp.results.read import WORDS, Folder, folders
from kvexp.results.table import absent, estimate, fixed, seconds, shared_settings, size, table
from kvexp.run import compose as composing
from kvexp.run.batches import with_limit_of
from kvexp.run.compose import FILE_KEY, with_user_methods
from kvexp.run.prompts import prompt_of
from kvexp.run.settings import Settings
from kvexp.run.store import DIVERGENCE, OWN, Line, Run, run_hash
from kvexp.util import (
    CacheError,
    ConfigError,
    Session,
    explained,
    load,
    replace,
    say,
    visible,
    watch_pipes,
)

FORMAT, VERSION = "kvexp-league", 1
Entry = dict[str, Any]

# What of a command line is of this machine or changes no number, and no part of an entry.
LEFT_OUT = (
    *("outputs_dir", "limit", "batch_size", "timeout_s", "retry", "shard", "threads", "log"),
    *("diagnose", "divergence", "hydra"),
)
NUMBERS = ("kl", "full_logprob", "logprob")  # of a row: means over its judged tokens, teacher-forced
TEXTS = ("hash", "model", "task", "method")
OPTIONAL = ("kv_ratio", "tokens", "score", "full", "kl", "kl_low", "kl_high", "top1", "kv_bytes", "full_kv_bytes")


def words_of(overrides: list[str], choices: Mapping[str, Any] | None = None) -> list[str]:
    """The words of a command line that make the run on another machine.

    choices: group -> the option taken; model, task and method are said even where they are the defaults of today.
    """
    words = [word for word in overrides if word.lstrip("+~").partition("=")[0].split(".")[0] not in LEFT_OUT]
    typed = {word.lstrip("+").partition("=")[0] for word in words}
    if "method_file" in typed:
        typed.add("method")
    taken = [f"{group}={(choices or {}).get(group)}" for group in ("model", "task", "method") if group not in typed]
    return [*(word for word in taken if not word.endswith("=None")), *words]


def write_entry(folder: Path, entry: Entry) -> Path:
    """Write an entry under a name that says what it is; ConfigError for one that could not be read again."""
    if why := wrong_entry(entry):
        raise ConfigError(f"the run makes no entry: {why}")
    size = entry["kv_ratio"] if entry["kv_ratio"] is not None else entry["tokens"]
    name = "-".join(_plain(str(part)) for part in (entry["model"], entry["task"], entry["method"], size, entry["hash"]))
    file = folder / f"{name}.json"
    with explained(file):
        folder.mkdir(parents=True, exist_ok=True)
        replace(file, (json.dumps(entry, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode())
    return file


def _plain(words: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in words)[:40]


def entries_in(folder: Path) -> Iterator[tuple[Path, Entry]]:
    """Every entry of a folder, by name; ConfigError where there is none, or a file that is none."""
    files = sorted(file for file in folder.glob("*.json") if file.name != "tolerance.json")
    if not files:
        raise ConfigError(f"{folder} has no entries: python -m experiments.studies.league submit RUN makes one")
    for file in files:
        yield file, read_entry(file)


def read_entry(file: Path) -> Entry:
    """One entry; ConfigError for a file that is none."""
    try:
        entry = load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no entry of the league: {error}") from error
    if why := wrong_entry(entry):
        raise ConfigError(
            f"{file} is no entry of the league: {why}; make it again with python -m experiments.studies.league submit"
        )
    return entry


def wrong_entry(entry: Mapping[str, Any]) -> str | None:
    """Why this is no entry; None if it is one. It may come from anybody: nothing in it is trusted to have a type."""
    if (entry.get("format"), entry.get("version")) != (FORMAT, VERSION):
        return f"format and version must be {FORMAT} and {VERSION}"
    for name in TEXTS:
        if not isinstance(entry.get(name), str) or not entry[name]:
            return f"{name} must be a text"
    for name in OPTIONAL:
        if name not in entry or not (entry[name] is None or _finite(entry[name])):
            return f"{name} must be a number or null"
    if not isinstance(entry.get("numerics"), int):
        return "numerics must be a whole number"
    words = entry.get("words")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return "words must be a list of texts"
    rows = entry.get("rows")
    if not isinstance(rows, list) or not rows:
        return "rows must be a list with at least one row"
    return next((why for row in rows if (why := _wrong_row(row)) is not None), None)


def _wrong_row(row: Any) -> str | None:
    if not isinstance(row, dict) or not isinstance(row.get("example"), str):
        return "a row must have the example's id"
    name, tokens = row["example"], row.get("tokens")
    if not isinstance(row.get("index"), int) or not isinstance(row.get("first_by_prefill"), bool):
        return f"row {name}: index must be a whole number and first_by_prefill true or false"
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, int) for token in tokens):
        return f"row {name}: tokens must be a list of token ids"
    if not all(_finite(row.get(key)) for key in NUMBERS):
        return f"row {name}: {', '.join(NUMBERS)} must be finite numbers"
    return None


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


Cell = Callable[[Entry], str]
STYLE = """body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:110em;padding:0 1em}
table{border-collapse:collapse;margin:1em 0 2em;display:block;overflow-x:auto}
td,th{padding:.2em .5em;border-bottom:1px solid #ccc;text-align:right;white-space:nowrap}
td:first-child,th:first-child,td:last-child,th:last-child{text-align:left}code{background:#f3f3f3}"""


def _budget(entry: Entry) -> str:
    return f"{entry['kv_ratio']:g}" if entry["kv_ratio"] is not None else f"{fixed(entry['tokens'], 0)} slots"


def _bytes(entry: Entry) -> str:
    own, full = entry["kv_bytes"], entry["full_kv_bytes"]
    return size(own) + (f" of {size(full)}" if full else "")


def _times(entry: Entry) -> str:
    """Times where the run measured them, which one machine alone says."""
    if absent(entry.get("tpot_s")):
        return "-"
    return f"{seconds(entry['ttft_s'])}, {seconds(entry['tpot_s'])}"


def _digests(entry: Entry) -> str:
    """The first eight hex digits of what the entry says of the run's files: answers, then divergences."""
    return " ".join(str(digest)[:8] for _, digest in sorted((entry.get("digests") or {}).items(), reverse=True)) or "-"


COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("method", lambda entry: " ".join(str(each) for each in (entry["method"], entry.get("setting")) if each)),
    ("budget", _budget),
    ("KL (95 %)", lambda entry: estimate(entry, "kl", 3)),
    ("same top-1", lambda entry: "-" if absent(entry["top1"]) else f"{entry['top1']:.1%}"),
    ("score", lambda entry: f"{fixed(entry['score'], 1)} {entry.get('metric') or ''}".strip()),
    ("% of full (95 %)", lambda entry: estimate(entry, "of_full", 1)),
    ("bytes", _bytes),
    ("TTFT, TPOT", _times),
    ("n", lambda entry: str(entry.get("n"))),
    ("baseline", lambda entry: str(entry.get("yardstick"))),
    ("code", lambda entry: "user's" if entry.get("code") else "built in"),
    ("commit, NUMERICS", lambda entry: f"{(entry.get('environment') or {}).get('commit')}, {entry['numerics']}"),
    ("hash", lambda entry: entry["hash"]),
    ("digests", _digests),
)
HTML_ONLY = ("TTFT, TPOT", "baseline", "code", "commit, NUMERICS", "digests")  # columns that docs/league.md leaves out
LEAD = (
    "One line per method, budget and protocol. KL: mean KL divergence from the full cache per token of its own answer, "
    "in nats, the first token left out; less is better. Every entry can be measured again: "
    "python -m experiments.studies.league check."
)


def groups_of(entries: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    """(title, entries by KL) of every model, task, protocol and place of the question.

    What all entries of a group set alike stands in the title, and no more in them.
    """
    groups: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
    for entry in entries:
        names = (entry["model"], entry["task"], entry.get("protocol"), entry.get("question"))
        groups[tuple(str(name or "") for name in names)].append(entry)
    found = []
    for (model, task, protocol, question), own in sorted(groups.items()):
        more = [f"protocol {protocol}" if protocol else "", WORDS.get(question, "")]
        title = ", ".join([f"{model} / {task}", *(word for word in more if word)])
        shared, own = shared_settings(own)
        title = f"{title}: {' '.join(shared)}" if shared else title
        by_kl = sorted(own, key=lambda entry: (float("inf") if absent(entry["kl"]) else entry["kl"], entry["hash"]))
        found.append((title, by_kl))
    return found


def html_page(entries: Sequence[Entry]) -> str:
    """The page as one file. Whatever an entry says is text in it and nothing else."""
    parts = [f"<h1>python -m experiments.studies.league</h1><p>{escape(LEAD)}</p>"]
    for title, own in groups_of(entries):
        heads = "".join(f"<th>{escape(name)}</th>" for name, _ in COLUMNS)
        rows = "".join(f"<tr>{''.join(f'<td>{_text(cell, entry)}</td>' for _, cell in COLUMNS)}</tr>" for entry in own)
        parts.append(f"<h2>{escape(visible(title))}</h2><table><tr>{heads}</tr>{rows}</table>")
        commands = "".join(f"<li><code>{escape(visible(command(entry)))}</code></li>" for entry in own)
        parts.append(f"<details><summary>commands</summary><ul>{commands}</ul></details>")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
    return (
        f"<!doctype html><html lang=en><head>{head}<title>kvexp league</title><style>{STYLE}</style></head><body>"
        + ("\n".join(parts) + "</body></html>\n")
    )


def _text(cell: Cell, entry: Entry) -> str:
    return escape(visible(cell(entry)))


def command(entry: Entry) -> str:
    """The command line of an entry's run."""
    return " ".join(["kvexp run", *entry["words"], f"limit={entry.get('n')}", "divergence=true"])


def markdown(entries: Sequence[Entry]) -> str:
    """The tables as Markdown, for docs/league.md."""
    columns = {name: cell for name, cell in COLUMNS if name not in HTML_ONLY}
    parts = []
    for title, own in groups_of(entries):
        rows = [[_plain_text(cell(entry)) for cell in columns.values()] for entry in own]
        parts += [f"**{_plain_text(title)}**", markdown_table(list(columns), *rows, right=True)]
    return "\n\n".join(parts)


def _plain_text(words: Any) -> str:
    return visible(str(words)).replace("<", "&lt;")


BEGIN, END = "<!-- league: made by python -m experiments.studies.league page -->", "<!-- end of league -->"
SAFETY = 4.0  # the tolerance is so many times the largest difference that was measured
# Environments of one machine whose sums differ: threads, and the instruction sets that torch and oneDNN may use.
_ONE = {"OMP_NUM_THREADS": "1"}
_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
_SSE = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
ENVIRONMENTS: tuple[dict[str, str], ...] = (_ONE, {"OMP_NUM_THREADS": "2"}, _ONE | _AVX2, _ONE | _SSE)
OF_ENVIRONMENT = ("environment", "torch", "instructions", "threads")
# What torch takes itself to have in such an environment, a line each: it may not know a name, or the CPU lack it.
SAYS = r"""import torch
print(torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), sep="\n")"""


def main(words: Sequence[str] | None = None) -> int:
    """0, 1 where an entry was refused, 2 if the request cannot work."""
    parser = argparse.ArgumentParser(prog="python -m experiments.studies.league", description=(__doc__ or "").strip())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, do: Callable[[argparse.Namespace], int], words: str) -> Any:
        made = commands.add_parser(name, help=words, description=words)
        made.set_defaults(command=do)
        made.add_argument("--league", type=Path, default=Path("league"), metavar="FOLDER", help="default: league")
        return made.add_argument

    def entries(add: Any) -> None:
        add("entries", nargs="*", type=Path, metavar="ENTRY", help="files (default: all of --league)")
        add("--rows", type=int, default=5, metavar="N", help="of every entry (default: 5)")

    add = command("submit", _submit, "make entries of runs whose divergence is measured")
    add("runs", nargs="+", metavar="RUN", help="its folder, or outputs@method=h2o,kv_ratio=0.3")
    add = command("check", _check, "measure five random rows of every entry again")
    entries(add)
    add("--seed", type=int, default=0, metavar="N", help="other rows for other numbers (default: 0)")
    add("--sample", type=int, metavar="N", help="only so many entries, which the seed draws")
    add("--outputs", action="store_true", help="also generate, and say whether the answers are the same")
    add("--method-file", metavar="FILE", help="the code of an entry's method, which is run")
    add("--built-in", action="store_true", help="pass over entries whose method is a user's code")
    add("--json", type=Path, metavar="FILE", help="write what was found")
    add = command("page", _page, "the table of all entries")
    add("--out", type=Path, default=Path("build/league/index.html"), metavar="FILE")
    add("--markdown", type=Path, metavar="FILE", help="also put the tables into this page")
    add = command("tolerance", _tolerance, "measure rows under several threads and instruction sets")
    entries(add)
    add("--python", nargs="*", default=[], metavar="PYTHON", help="of environments with other torch")
    return carried_out(parser, words)


def _chosen(args: argparse.Namespace) -> list[tuple[Path, Entry]]:
    """The entries that were named, or all; of them those that --sample draws."""
    found = [(file, read_entry(file)) for file in args.entries] if args.entries else list(entries_in(args.league))
    if getattr(args, "sample", None) is not None:
        found = random.Random(args.seed).sample(found, min(args.sample, len(found)))
    return sorted(found, key=lambda each: (each[1]["model"], str(each[0])))  # a model is loaded once


def _check(args: argparse.Namespace) -> int:
    if args.rows < 1:
        raise ConfigError(f"--rows must be at least 1, got {args.rows}")
    tolerance = tolerance_of(args.league)
    code = with_user_methods([f"+method_file={args.method_file}"]) if args.method_file else []
    refused, found = 0, []
    for file, entry in _chosen(args):
        if entry.get("code") and args.built_in:
            say(f"{file.name}: passed over, its method is a user's code")
            continue
        if entry["numerics"] != NUMERICS:
            commit = (entry.get("environment") or {}).get("commit")
            made = f"made under NUMERICS {entry['numerics']}: kvexp of commit {commit} measures it again"
            say(f"{file.name}: stale, {made}")
            continue
        try:
            settings = entry_settings(entry, code)
            rows = list(check_entry(entry, drawn_rows(entry, args.rows, args.seed), tolerance, settings, args.outputs))
        except (ConfigError, CacheError) as error:
            refused += 1
            say(f"{file.name}: REFUSED: {error}")
            continue
        wrong = [row for row in rows if row.why]
        refused += bool(wrong)
        far = ", ".join(f"{name} {max(row.distance(name) for row in rows):.1e}" for name in NUMBERS)
        answers = [row.same_output for row in rows if row.same_output is not None]
        also = f"; {sum(answers)} of {len(answers)} answers the same" if answers else ""
        say(f"{file.name}: {'REFUSED' if wrong else 'ok'}, {len(rows)} rows, largest differences: {far}{also}")
        for row in wrong:
            say(f"  {row.example}: {row.why}")
        found += [{"hash": entry["hash"], "example": row.example, **row.found} for row in rows]
    if args.json is not None:
        args.json.write_text(json.dumps(found), encoding="utf-8")
    return 1 if refused else 0


def _page(args: argparse.Namespace) -> int:
    entries = [entry for _, entry in entries_in(args.league)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(html_page(entries), encoding="utf-8")
    say(f"wrote {args.out}: {len(entries)} entries")
    if args.markdown is not None:
        text = between(args.markdown.read_text("utf-8"), BEGIN, END, markdown(entries), args.markdown)
        args.markdown.write_text(text, encoding="utf-8")
        say(f"wrote {args.markdown}")
    return 0


def _tolerance(args: argparse.Namespace) -> int:
    """Check the same rows in processes of other environments; the largest difference times SAFETY is the tolerance."""
    files = [str(file) for file, _ in _chosen(args)]
    pythons = [sys.executable, *args.python]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for python in pythons:
            for number, environment in enumerate(ENVIRONMENTS):
                out = Path(folder) / f"{len(found)}.json"
                how: Any = {"env": os.environ | environment, "capture_output": True, "text": True}
                words = [python, "-m", "experiments.studies.league", "check", *files, "--league", str(args.league)]
                done = subprocess.run([*words, "--rows", str(args.rows), "--json", str(out)], **how)
                if done.returncode == 2 or not out.is_file():
                    raise ConfigError(f"environment {number} measured nothing: {done.stderr.strip()[-400:]}")
                said = subprocess.run([python, "-c", SAYS], check=True, **how)
                version, instructions, threads = said.stdout.split("\n")[:3]
                made = {"torch": version, "instructions": instructions, "threads": int(threads)}
                found.append({"environment": environment, **made, "rows": json.loads(out.read_text("utf-8"))})
                say(f"torch {version}, {instructions}, threads {threads}: measured")
    content = tolerance_file(found)
    file = args.league / "tolerance.json"
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    say(f"wrote {file}: " + ", ".join(f"{name} {value:.2e}" for name, value in content["tolerance"].items()))
    return 0


def tolerance_file(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What league/tolerance.json holds: per environment the largest difference to the first, and the tolerance."""
    first = {(row["hash"], row["example"]): row for row in found[0]["rows"]}
    each = []
    for other in found:
        largest = {
            name: max((abs(row[name] - first[row["hash"], row["example"]][name]) for row in other["rows"]), default=0.0)
            for name in NUMBERS
        }
        each.append({key: other[key] for key in OF_ENVIRONMENT} | {"largest": largest})
    least = 1e-5  # what seven digits in an entry leave open
    tolerance = {name: max(least, SAFETY * max(one["largest"][name] for one in each)) for name in NUMBERS}
    return {"tolerance": tolerance, "safety": SAFETY, "rows": len(first), "measured": each}


# Judged are teacher-forced quantities alone: the entry's own text is fed to the full cache and to the method, and
# mean KL and log-probabilities must agree with the entry within a tolerance that was measured across thread counts,
# instruction sets and torch versions (league/tolerance.json). What a model writes freely is shown and not judged.

ROWS = 5  # of every entry, drawn at random
# Until they are measured (`python -m experiments.studies.league tolerance`): nats per token, of a row's mean.
UNMEASURED = {"kl": 0.02, "full_logprob": 0.005, "logprob": 0.02}


@dataclass(frozen=True)
class CheckedRow:
    """One row measured again.

    found, said: its NUMBERS; why: what is wrong with it, or ""; same_output: None where it was not asked.
    """

    example: str
    found: dict[str, float]
    said: dict[str, float]
    why: str
    same_output: bool | None = None

    def distance(self, name: str) -> float:
        """By how much a number differs, in nats per token."""
        return abs(self.found[name] - self.said[name])


def tolerance_of(folder: Path) -> dict[str, float]:
    """The tolerance of each of NUMBERS: as measured, or `UNMEASURED` where league/tolerance.json is not there."""
    file = folder / "tolerance.json"
    if not file.exists():
        return dict(UNMEASURED)
    try:
        found = load(file)["tolerance"]
        return {name: float(found[name]) for name in NUMBERS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} holds no tolerance: {error}; make it again with python -m experiments.studies.league tolerance"
        ) from error


def drawn_rows(entry: Entry, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of an entry to check: other ones for other seeds, in the task's order."""
    draw = random.Random(f"{seed} {entry['hash']}")
    rows = draw.sample(entry["rows"], min(count, len(entry["rows"])))
    return sorted(rows, key=lambda row: int(row["index"]))


def entry_settings(entry: Entry, allow_code: Sequence[str] = ()) -> Settings:
    """The settings that an entry's words make; ConfigError where its run is another one today.

    allow_code: words that choose a user's method (method=MODULE.CLASS, +method_file=FILE), which a person has typed;
    words of the entry itself never load code, nor any key that has to be typed.
    """
    words = list(entry["words"])
    names_a_file = any(word.lstrip("+").partition("=")[0] == FILE_KEY for word in words)
    if entry.get("code") or names_a_file:
        if not allow_code:
            raise ConfigError("its method is a user's code: name it, once it is read and trusted (--method-file FILE)")
        words = [word for word in words if word.lstrip("+").partition("=")[0] != FILE_KEY]
        words = [word for word in words if word.partition("=")[0] != "method"] + list(allow_code)
    try:
        asked = [*words, "divergence=true", f"limit={_limit(entry)}"]
        _, (settings,) = composed_runs(asked, Session(typed_keys=set()))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(composing.explained(error, words)) from error
    if run_hash(settings.identity) != entry["hash"]:
        raise ConfigError(
            f"its words make the run {run_hash(settings.identity)} today, not {entry['hash']}: model, data or settings "
            "are others"
        )
    return settings


def _limit(entry: Entry) -> int:
    return 1 + max(int(row["index"]) for row in entry["rows"])


def check_entry(
    entry: Entry, rows: Sequence[Mapping[str, Any]], tolerance: Mapping[str, float], settings: Settings, outputs: bool
) -> Iterator[CheckedRow]:
    """Measure these rows of an entry again; loads the model. outputs: also generate, and say whether it is the same."""
    wanted = [{"example": row["example"], "index": row["index"]} for row in rows]
    by_name = {row["example"]: row for row in rows}
    settings = with_limit_of(settings, _limit(entry))
    for given, case, example in cases(settings, wanted):
        row = by_name[given["example"]]
        said = {name: float(row[name]) for name in NUMBERS}
        digest = prompt_of(settings, case.model, case.tokenizer, example).digest
        found = forced_numbers(case, row["tokens"], bool(row["first_by_prefill"]))
        why = [
            f"{name} is {found[name]:.5f} here and {said[name]:.5f} in the entry"
            for name in NUMBERS
            if not abs(found[name] - said[name]) <= tolerance[name]
        ]
        if row.get("prompt_digest") not in (None, digest):
            why.insert(0, f"its prompt has the digest {digest} here and {row['prompt_digest']} in the entry")
        same = _same_output(case, row) if outputs else None
        yield CheckedRow(row["example"], found, said, "; ".join(why), same)


def forced_numbers(case: Case, tokens: Sequence[int], first_by_prefill: bool) -> dict[str, float]:
    """NUMBERS of one example along a text: means over the tokens that the prefill does not predict."""
    contexts = [case.full().prefill_prompt(), case.prefill_prompt()]
    if case.question:
        read_questions(case.model, contexts, [case.question])
    ((line,),) = divergence_from_full(case.model, contexts[0], contexts[1:], [list(tokens)])
    skip = int(first_by_prefill)
    return {name: float(np.mean(getattr(line, name)[skip:])) for name in NUMBERS}


def _same_output(case: Case, row: Mapping[str, Any]) -> bool | None:
    if row.get("output_sha256") is None:
        return None
    text = case.tokenizer.decode(case.generate_again().tokens[0], skip_special_tokens=True)
    return bool(hashlib.sha256(text.encode()).hexdigest() == row["output_sha256"])


def _submit(args: argparse.Namespace) -> int:
    for run in [run_at(words) for words in args.runs]:
        entry = entry_of(run)
        file = write_entry(args.league, entry)
        say(f"wrote {file}: KL {entry['kl']:.4f} over {entry['n']} examples")
        if entry["code"]:
            say(
                f"  its method is code of yours ({named_code(entry['code'])}): CI checks it once a maintainer has "
                "approved that; put the file into the pull request too"
            )
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
    own = {line["example"]: line for (_, text), line in run.divergence().items() if text == OWN}
    if not own:
        raise ConfigError(
            f"{run.path} has no divergence yet: run kvexp results {run.path.parent} --view divergence --measure"
        )
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
    entry["digests"] = {name: _digest(run.path / name) for name in ("examples.jsonl", DIVERGENCE)}
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


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
