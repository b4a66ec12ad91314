"""Two methods on the same examples: where only one is right, and what it kept that the other did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.markup import escape
from rich.table import Table

from kvexp.console import Console
from kvexp.diagnose.classes import CLASSES, classes_of
from kvexp.diagnose.folders import Row, baseline_of, headline, rows_of, short_title
from kvexp.diagnose.needed import ensure_diagnosed
from kvexp.errors import ConfigError
from kvexp.evictions.eviction_files import EVICTIONS, ExampleLog, has, read_table, require_example_log
from kvexp.record import Run
from kvexp.record.sent_prompts import check_same_prompts

DECILES = tuple(f"{10 * part}-{10 * part + 10} %" for part in range(10))
WORDS = 12  # tokens that are named one by one


@dataclass
class HeldCounts:
    """Sums over examples of what one side held and the other did not: one count per token, layer and kv head.

    by_class, by_decile, by_text: such counts; there: the same of all prompt tokens, held or not.
    """

    by_class: Counter[str] = field(default_factory=Counter)
    by_decile: Counter[str] = field(default_factory=Counter)
    by_text: Counter[str] = field(default_factory=Counter)
    there: Counter[str] = field(default_factory=Counter)

    def add(self, told: ExampleLog, positions: Sequence[int]) -> None:
        """positions: of prompt tokens, one for each head."""
        count, kinds = told.prompt_tokens, classes_of(told.texts[: told.prompt_tokens])
        deciles = [DECILES[10 * place // count] for place in range(count)]
        for name in (*kinds, *deciles):
            self.there[name] += sum(told.heads)
        for place, times in Counter(positions).items():
            self.by_class[kinds[place]] += times
            self.by_decile[deciles[place]] += times
            self.by_text[told.texts[place].strip() or repr(told.texts[place])] += times


@dataclass(frozen=True)
class PairedOutcome:
    """Examples by who is right: as good as the full cache, which scores more than nothing, in the first metric."""

    both: list[str]
    only_a: list[str]
    only_b: list[str]
    neither: list[str]


def outcome(a: Run, b: Run) -> PairedOutcome:
    """The examples of two runs by who is right; ConfigError for runs that cannot be compared."""
    if a.baseline is None or a.baseline != b.baseline:
        raise ConfigError(
            f"{a.path} and {b.path} are not measured against the same full-attention run: compare runs of one model, "
            "task and generation"
        )
    full, rows_a, rows_b = (rows_of(run) for run in (baseline_of(a), a, b))
    check_same_prompts(a.path, rows_a, b.path, rows_b)
    check_same_prompts(a.path, rows_a, baseline_of(a).path, full)
    result = PairedOutcome([], [], [], [])
    for name in (name for name in rows_a if name in rows_b and name in full):
        if not _solvable(full[name]):
            continue
        right = headline(rows_a[name]) >= headline(full[name]), headline(rows_b[name]) >= headline(full[name])
        places = {(True, True): result.both, (True, False): result.only_a, (False, True): result.only_b}
        places.get(right, result.neither).append(name)
    return result


def _solvable(row: Row) -> bool:
    value = headline(row)
    return value > 0 or value < 0  # a negative log-likelihood has no zero to be wrong at


def differences(a: Run, b: Run, names: Sequence[str], step: int = 0) -> tuple[HeldCounts, HeldCounts]:
    """What A held and B did not, and what B did, of the prompt after this step (or the last, where it comes first)."""
    only_a, only_b = HeldCounts(), HeldCounts()
    for name in names:
        told = require_example_log(a, name)
        if require_example_log(b, name).ids[: told.prompt_tokens] != told.ids[: told.prompt_tokens]:
            raise ConfigError(f"example {name} has other tokens in {a.path} than in {b.path}")
        gone_a, gone_b = (_gone(run, name, told, step) for run in (a, b))
        only_a.add(told, (np.setdiff1d(gone_b, gone_a) % told.prompt_tokens).tolist())
        only_b.add(told, (np.setdiff1d(gone_a, gone_b) % told.prompt_tokens).tolist())
    return only_a, only_b


def _gone(run: Run, name: str, told: ExampleLog, step: int) -> np.ndarray:
    """A number for each (layer, head, prompt position) that was evicted by then."""
    frame = read_table(run, name, EVICTIONS)
    frame = frame[(frame["step"] <= step) & (frame["position"] < told.prompt_tokens)]
    place = frame["layer"].to_numpy(dtype=np.int64) * max(told.heads) + frame["head"].to_numpy()
    return np.asarray(place * told.prompt_tokens + frame["position"].to_numpy())


def diff(a: Run, b: Run, step: int, console: Console) -> None:
    """Print the outcome of two runs, and what each kept that the other did not where only one is right."""
    found = outcome(a, b)
    name_a, name_b = short_title(a), short_title(b)
    if name_a == name_b:
        name_a, name_b = f"{name_a} ({a.hash[:6]})", f"{name_b} ({b.hash[:6]})"
    console.print(f"A: {name_a}\nB: {name_b}", highlight=False, markup=False)
    console.print(
        f"right (as good as the full cache): both {len(found.both)}, only A {len(found.only_a)}, only B "
        f"{len(found.only_b)}, neither {len(found.neither)}",
        highlight=False,
    )
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        for line in _told(a, b, side, names, step):
            console.print(line, highlight=False, soft_wrap=not isinstance(line, Table))


def _told(a: Run, b: Run, side: str, names: list[str], step: int) -> Iterator[str | Table]:
    if not names:
        return
    yield f"\nonly {side} is right: {escape(', '.join(names[:8]))}{', ...' if len(names) > 8 else ''}"
    logged = [name for name in names if has(a, name, EVICTIONS) and has(b, name, EVICTIONS)]
    if not logged:
        for run in (a, b):
            rows = rows_of(run)
            ensure_diagnosed(run, [rows[name] for name in names])
        logged = names
    if len(logged) < len(names):
        yield f"of {len(logged)} of them, which both runs have logged:"
    when = "the end of the prompt" if step == 0 else f"{step} decode tokens"
    yield f"prompt tokens times layers times heads, held after {when}:"
    kept = differences(a, b, logged, step)
    for title, keys, counters in (
        ("token", CLASSES, tuple(each.by_class for each in kept)),
        ("position", DECILES, tuple(each.by_decile for each in kept)),
    ):
        yield _table(title, keys, counters, kept[0].there)
    for name, mine, other in (("A", kept[0], kept[1]), ("B", kept[1], kept[0])):
        most = (mine.by_text - other.by_text).most_common(WORDS)
        words = ", ".join(f"{escape(text)} {count}" for text, count in most)
        yield f"most where {name} kept more, less what the other did: {words}"


def _table(title: str, keys: Sequence[str], counters: tuple[Counter[str], ...], there: Counter[str]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for head in (title, "there", "A held, B not", "B held, A not"):
        table.add_column(head, justify="left" if head == title else "right", no_wrap=True)
    for key in keys:
        if there[key]:
            shares = (f"{counter[key]} ({100 * counter[key] / there[key]:.1f} %)" for counter in counters)
            table.add_row(key, str(there[key]), *shares)
    return table
