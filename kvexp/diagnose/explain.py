"""Replays of a run's lost examples, one told in full or all of them counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from rich.markup import escape
from rich.table import Table

from kvexp.console import Console, Progress
from kvexp.diagnose.folders import Row, baseline_of, headline, rows_of, short_title, title_of
from kvexp.diagnose.needed import ensure_diagnosed
from kvexp.diagnose.replay import FoundCause, evidence, replayed, save, saved
from kvexp.diagnose.runs import cases, settings_at
from kvexp.diagnose.undo import Replay
from kvexp.errors import CacheError
from kvexp.evictions.eviction_files import EVICTIONS, has, read_table
from kvexp.record import Run
from kvexp.record.sent_prompts import check_same_prompts

NOTHING = "not even with every eviction undone does the full cache's answer come back"


@dataclass(frozen=True)
class Options:
    """The options of a search.

    until: output or score; trials: at most so many per example; again: search even where a result is saved.
    """

    until: str = "output"
    trials: int = 1000
    again: bool = False


def lost(run: Run) -> list[Row]:
    """The rows that score less than the full cache's of the same example, in the order of the task."""
    full, rows = rows_of(baseline_of(run)), rows_of(run)
    check_same_prompts(run.path, rows, baseline_of(run).path, full)
    worse = [row for name, row in rows.items() if name in full and headline(row) < headline(full[name])]
    return sorted(worse, key=lambda row: row["index"])


def find_causes(run: Run, rows: list[Row], options: Options) -> Iterator[FoundCause | str]:
    """The cause of every row, or why there is none; each is saved once found."""
    known = {row["example"]: _known(run, row, options) for row in rows}
    todo = [row for row in rows if known[row["example"]] is None]
    made = _made(run, todo, options) if todo else iter(())
    for row in rows:
        yield known[row["example"]] or next(made)


def _known(run: Run, row: Row, options: Options) -> FoundCause | None:
    """The saved cause; None where more trials may find a smaller one than an earlier search that ran out of them."""
    found = None if options.again else saved(run, row["example"], options.until)
    unfinished = found is not None and not found.cause.whole and found.cause.trials < options.trials
    return None if unfinished else found


def _made(run: Run, rows: list[Row], options: Options) -> Iterator[FoundCause | str]:
    settings = settings_at(run)
    alone = len(rows) == 1
    total, what = (options.trials, "trials at most") if alone else (len(rows), "examples")
    with Progress(f"replay {short_title(run)}", total, 0, what) as progress:
        size = settings.batch_size
        for row, case, example in cases(settings, rows):
            replay = Replay(case, size, progress.advance if alone else None)
            try:
                found = replayed(run, row, replay, example, settings.task, options.until, options.trials)
            except CacheError as error:
                yield str(error)
            else:
                save(run, found)
                yield found
            if not alone:
                progress.advance()


def tell(run: Run, row: Row, options: Options, console: Console) -> None:
    """One example in words, and how the method scored what it lost."""
    (found,) = find_causes(run, [row], options)
    console.print(f"{title_of(run)}: {row['example']}", highlight=False, markup=False)
    if isinstance(found, str):
        console.print(found, highlight=False, markup=False)
        return
    for name, output in (("full cache", found.full), ("method", found.answer)):
        console.print(f"{name + ':':12}{output.strip()}", highlight=False, markup=False)
    undone = found.cause.undone
    if undone is None:
        why = (
            "not even with every eviction undone does it come back" if found.answer != found.full else "nothing to find"
        )
        console.print(f"{why} ({found.cause.trials} trials)", highlight=False)
        return
    console.print(f"\n{found.phrase}.", highlight=False, markup=False, soft_wrap=True, style="bold")
    slots = len(evidence(read_table(run, row["example"], EVICTIONS), undone))
    few = "" if found.cause.whole else "; the trials ran out, there may be less in it"
    console.print(
        f"With {slots} evictions of {len(undone.positions)} tokens undone it answers: {found.back.strip()} "
        f"({found.cause.trials} trials{few})\n",
        highlight=False,
        markup=False,
    )
    console.print(_scores(run, row, found))


def _scores(run: Run, row: Row, found: FoundCause) -> Table:
    assert found.cause.undone is not None
    table = Table(box=None, header_style="bold", caption="rank: place among the slots there, 1 is kept longest")
    for name in ("token", "position", "layer", "head", "step", "score", "least score kept", "rank"):
        table.add_column(name, justify="left" if name == "token" else "right")
    rows = evidence(read_table(run, row["example"], EVICTIONS), found.cause.undone)
    for each in list(rows.itertuples())[:40]:
        table.add_row(
            escape(repr(each.text)),
            *(str(value) for value in (each.position, each.layer, each.head, each.step)),
            f"{each.score:.3g}",
            f"{each.threshold:.3g}",
            f"{each.rank} of {each.of}",
        )
    if len(rows) > 40:
        table.add_row(f"... and {len(rows) - 40} more")
    return table


def explain(runs: list[Run], options: Options, first: int | None, console: Console) -> None:
    """How often one span explains a loss, per run."""
    table = Table(box=None, header_style="bold")
    heads = ("run", "lost", "explained", "one span", "two", "more", "tokens", "evictions", "step 0", "trials")
    for name in heads:
        table.add_column(name, justify="left" if name == "run" else "right")
    for run in runs:
        rows = lost(run)
        logged = [row for row in rows if has(run, row["example"], EVICTIONS)]
        if not logged:
            logged = rows[:first]
            ensure_diagnosed(run, logged)
        asked, name = logged[:first], short_title(run)
        made = list(find_causes(run, asked, options))
        table.add_row(escape(name), *_counts(run, made, len(rows)))
        for row, found in zip(asked, made, strict=True):
            what = found if isinstance(found, str) else found.phrase or NOTHING
            what += (
                "" if isinstance(found, str) or found.cause.whole else " (the trials ran out: there may be less in it)"
            )
            console.print(f"{name}: {row['example']}: {what}", highlight=False, markup=False, soft_wrap=True)
        if len(logged) < len(rows):
            console.print(f"{name}: {len(rows) - len(logged)} lost examples have no log", highlight=False, markup=False)
    console.print(table)
    console.print("lost: scored less than with the full cache. explained: undoing evictions brings it back, of those")
    console.print("searched; one span, two, more, step 0: of those; tokens, evictions, trials: their medians.")


def _counts(run: Run, made: list[FoundCause | str], lost: int) -> list[str]:
    done = [found for found in made if not isinstance(found, str) and found.cause.undone is not None]
    spans = [len(found.cause.spans) for found in done]
    undone = [found.cause.undone for found in done if found.cause.undone is not None]
    sizes = [
        len(evidence(read_table(run, found.example, EVICTIONS), found.cause.undone))
        for found in done
        if found.cause.undone is not None
    ]
    middle = [
        f"{median(values):g}" if values else "-"
        for values in ([len(each.positions) for each in undone], sizes, [found.cause.trials for found in done])
    ]
    return [
        str(lost),
        f"{len(done)} of {len(made)}",
        str(spans.count(1)),
        str(spans.count(2)),
        str(sum(count > 2 for count in spans)),
        *middle[:2],
        str(sum(each.last == 0 for each in undone)),
        middle[2],
    ]
