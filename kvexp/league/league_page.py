"""The league as a page: one table per model, task and place of the question, by KL; static, without scripts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from kvexp.league.entry_file import Entry
from kvexp.results.columns import shared_settings
from kvexp.results.question_place import WORDS
from kvexp.results.units import absent, fixed, seconds, size
from kvexp.terminal import visible

Cell = Callable[[Entry], str]
STYLE = """body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:110em;padding:0 1em}
table{border-collapse:collapse;margin:1em 0 2em;display:block;overflow-x:auto}
td,th{padding:.2em .5em;border-bottom:1px solid #ccc;text-align:right;white-space:nowrap}
td:first-child,th:first-child,td:last-child,th:last-child{text-align:left}code{background:#f3f3f3}"""


def _interval(entry: Entry, name: str, digits: int) -> str:
    low, high = entry.get(f"{name}_low"), entry.get(f"{name}_high")
    if absent(entry.get(name)):
        return "-"
    ends = "too few" if absent(low) else f"{fixed(low, digits)}..{fixed(high, digits)}"
    return f"{fixed(entry[name], digits)} ({ends})"


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
    ("KL (95 %)", lambda entry: _interval(entry, "kl", 3)),
    ("same top-1", lambda entry: "-" if absent(entry["top1"]) else f"{entry['top1']:.1%}"),
    ("score", lambda entry: f"{fixed(entry['score'], 1)} {entry.get('metric') or ''}".strip()),
    ("% of full (95 %)", lambda entry: _interval(entry, "of_full", 1)),
    ("bytes", _bytes),
    ("TTFT, TPOT", _times),
    ("n", lambda entry: str(entry.get("n"))),
    ("baseline", lambda entry: str(entry.get("yardstick"))),
    ("code", lambda entry: "user's" if entry.get("code") else "built in"),
    ("commit, NUMERICS", lambda entry: f"{(entry.get('environment') or {}).get('commit')}, {entry['numerics']}"),
    ("hash", lambda entry: entry["hash"]),
    ("digests", _digests),
)
LEAD = (
    "One line per method, budget and protocol. KL: mean KL divergence from the full cache per token of its own answer, "
    "in nats, the first token left out; less is better. Every entry can be measured again: kvexp league check."
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
    parts = [f"<h1>kvexp league</h1><p>{escape(LEAD)}</p>"]
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
    lines = []
    for title, own in groups_of(entries):
        lines += [f"**{_cell(title)}**", "", _line([name for name, _ in COLUMNS])]
        lines += [_line(["---", *["---:"] * (len(COLUMNS) - 1)])]
        lines += [*(_line([_cell(cell(entry)) for _, cell in COLUMNS]) for entry in own), ""]
    return "\n".join(lines)


def _cell(words: Any) -> str:
    return visible(str(words)).replace("|", "\\|").replace("<", "&lt;")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
