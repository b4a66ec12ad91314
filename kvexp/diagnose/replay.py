"""Which eviction changed an answer: `search` on an example of a run, and what to say of what it found."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvexp.diagnose.case import Case
from kvexp.diagnose.causal.search_order import search_order
from kvexp.diagnose.folders import Row
from kvexp.diagnose.search import Cause, cause
from kvexp.diagnose.undo import Place, Replay, UndoneEvictions
from kvexp.errors import CacheError
from kvexp.evictions.eviction_files import ExampleLog, require_example_log, stem
from kvexp.record import Run
from kvexp.record.files import explained, replace
from kvexp.tasks import Example, Task

SHOWN = 3  # spans that are named one by one


@dataclass(frozen=True)
class FoundCause:
    """The cause of a lost example, as a search found it; saved as JSON.

    until: what had to come back, the full cache's output or its score. answer, full, back: outputs of the method, of
    the full cache, and with the evictions of `cause` undone. spans: texts of its spans; phrase: the cause in words.
    """

    example: str
    until: str
    answer: str
    full: str
    back: str
    cause: Cause
    spans: list[str]
    phrase: str


def replayed(run: Run, row: Row, replay: Replay, example: Example, task: Task, until: str, trials: int) -> FoundCause:
    """Search for the evictions that changed one row's answer; replay: of its case; trials: at most so many.

    Where the example's causal measurement is there, tokens of large effect are tried first.

    CacheError where the rows' answers do not come again, so that nothing could be concluded.
    """
    told = require_example_log(run, row["example"])
    case = replay.case
    answer, full = replay.answers([UndoneEvictions((), (), 0, 0)])[0], case.full().generate_again().tokens[0]

    def output(tokens: list[int]) -> str:
        return str(case.tokenizer.decode(tokens, skip_special_tokens=True))

    if output(answer) != row["output"]:
        raise CacheError(
            f"example {row['example']} is answered otherwise here ({output(answer)!r}) than in its row "
            f"({row['output']!r}): sums round otherwise in another batch or mode, and nothing can be concluded"
        )
    right = _right(case, output, full, task, example, until)
    order = search_order(run, row["example"], replay.everything.positions)
    found = Cause(None, 0, True) if output(answer) == output(full) else cause(replay, right, trials, order)
    back = [] if found.undone is None else replay.answers([found.undone])[0]
    if found.undone is not None and not right(back):
        raise CacheError(
            f"example {row['example']}: what brought the answer back among other trials does not alone, because sums "
            "round otherwise in another batch: nothing can be concluded"
        )
    spans = [span_text(told, span) for span in found.spans]
    phrase = "" if found.undone is None else phrase_of(found.undone, spans, told.heads)
    return FoundCause(row["example"], until, output(answer), output(full), output(back), found, spans, phrase)


def _right(
    case: Case, output: Callable[[list[int]], str], full: list[int], task: Task, example: Example, until: str
) -> Callable[[list[int]], bool]:
    """A function that tells whether new tokens are the full cache's output, or score as much (`until`)."""
    if until == "output":
        return lambda tokens: output(tokens) == output(full)

    def score(tokens: list[int]) -> float:
        thinking = case.decoding.thinking
        words = output(tokens) if thinking is None else thinking.part(tokens, case.tokenizer).text
        return task.score(words, example.reference, example)[task.metrics[0]]

    wanted = score(full)
    return lambda tokens: score(tokens) >= wanted


def spans_of_texts(texts: Sequence[str], spans: Sequence[list[int]]) -> list[str]:
    """`span_text` of each, from the texts of all tokens."""
    return [_span(texts, span) for span in spans]


def span_text(told: ExampleLog, positions: list[int]) -> str:
    """The tokens of a span, with dots for those between that are not of it."""
    return _span(told.texts, positions)


def _span(texts: Sequence[str], positions: list[int]) -> str:
    words, last = "", positions[0] - 1
    for position in positions:
        words += (" \u2026" if position > last + 1 else "") + texts[position]
        last = position
    return words.strip() or repr(words)


def phrase_of(undone: UndoneEvictions, spans: list[str], heads: list[int], what: str = "flipped the answer") -> str:
    """The undone evictions in words, as "losing 'code ... 4711' in layers 1-2 at step 0 flipped the answer".

    what: what losing them did.
    """
    lost = " and ".join(repr(span) for span in spans)
    if len(spans) > SHOWN:
        count = len(undone.positions)
        lost = f"{count} tokens in {len(spans)} spans ({', '.join(repr(span) for span in spans[:SHOWN])}, ...)"
    steps = "step " + str(undone.first) if undone.first == undone.last else f"steps {undone.first}-{undone.last}"
    return f"losing {lost} in {text_of_places(undone.places, heads)} at {steps} {what}"


def text_of_places(places: Iterable[Place], heads: list[int]) -> str:
    """Layers and heads in words: "layers 1-2" where all heads are meant, else "layer 1 head 0, layer 3 heads 1, 2"."""
    by_layer: dict[int, list[int]] = defaultdict(list)
    for layer, head in sorted(places):
        by_layer[layer].append(head)
    words, whole = [], [layer for layer, some in by_layer.items() if len(some) == heads[layer]]
    if whole:
        words.append(("layers " if len(whole) > 1 else "layer ") + _ranges(whole))
    for layer, some in by_layer.items():
        if layer not in whole:
            words.append(f"layer {layer} head{'s' if len(some) > 1 else ''} {_ranges(some)}")
    return ", ".join(words)


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def evidence(evictions: pd.DataFrame, undone: UndoneEvictions) -> pd.DataFrame:
    """The rows of the log that were undone: how the method scored those tokens, and what it would have taken."""
    places = set(undone.places)
    mine = [place in places for place in zip(evictions["layer"], evictions["head"], strict=True)]
    rows = evictions[pd.Series(mine, index=evictions.index) & evictions["position"].isin(undone.positions)]
    return rows[rows["step"].between(undone.first, undone.last)]


def save(run: Run, found: FoundCause) -> None:
    """Write the cause into the run's folder."""
    file = _file(run, found.example, found.until)
    with explained(file):
        replace(file, json.dumps(asdict(found)).encode())


def saved(run: Run, example: str, until: str) -> FoundCause | None:
    """The cause that an earlier search of this example has written; None without one."""
    file = _file(run, example, until)
    if not file.exists():
        return None
    known: Mapping[str, Any] = json.loads(file.read_bytes())
    of, undone = known["cause"], known["cause"]["undone"]
    if undone is not None:
        places = tuple((layer, head) for layer, head in undone["places"])
        undone = UndoneEvictions(tuple(undone["positions"]), places, undone["first"], undone["last"])
    return dataclasses.replace(FoundCause(**known), cause=Cause(undone, of["trials"], of["whole"]))


def _file(run: Run, example: str, until: str) -> Path:
    start = stem(run, example)
    return start.with_name(f"{start.name}.replay-{until}.json")
