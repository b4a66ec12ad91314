"""Undo evictions, and see which one cost the answer.

Undoing an eviction means exactly this: from the step on at which the method evicted it, the token stays visible to
attention in that head, in addition to the budget, and the method neither chooses nor evicts it again. All other choices
remain the method's own, made anew with the token in sight: it takes its share of the attention, so scores may move.
With every eviction undone each query sees all there is, which is full attention.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeVar

import pandas as pd
import torch
from rich.markup import escape
from torch import Tensor

from kvexp.core import CacheConfig, EvictionLayer, SequenceState
from kvexp.core.backends import Mask, held_slots
from kvexp.core.budget_resolution import LayerSlots
from kvexp.core.ranking import RankedSlots
from kvexp.core.slots import Slots
from kvexp.diagnose.case import Case, baseline_of, cases, headline, plain_table, rows_of, short_title, title_of
from kvexp.diagnose.options import ensure_diagnosed
from kvexp.generate import PrefilledContext
from kvexp.hf import EvictionCache
from kvexp.run.batches import Row, settings_at
from kvexp.run.evictions import file_of, has_log, read_evictions, require_example_log, write_file
from kvexp.run.store import Run, check_same_prompts
from kvexp.tasks import Example, Task
from kvexp.util.errors import CacheError, ConfigError
from kvexp.util.output import Console
from kvexp.util.progress import Progress

Place = tuple[int, int]  # layer, kv head


@dataclass(frozen=True)
class UndoneEvictions:
    """The evictions of these positions, in these places (layer, kv head), at steps first to last, both included."""

    positions: tuple[int, ...]
    places: tuple[Place, ...]
    first: int
    last: int


NOTHING_UNDONE = UndoneEvictions((), (), 0, 0)


def check_undoing(cache: CacheConfig) -> None:
    """ConfigError for a cache in which no eviction can be undone."""
    if cache.quantization is not None:
        raise ConfigError(
            "undoing an eviction keeps every token in sight, and quantised slots drop what is evicted: explain a run "
            "of the same method with cache.bits=16 (its log is there with any cache.bits)"
        )
    if cache.chooses_slots or cache.rewritten:
        does = "puts other numbers into kept slots" if cache.rewritten else "counts in blocks of neighbouring slots"
        raise ConfigError(
            f"undoing an eviction keeps every token in sight, and method={cache.method.name} {does}: take kvexp "
            "diagnose show or gap, which ask what it kept and lost"
        )


class UndoMask(Mask):
    """Mode mask with some evictions undone, row by row; none until `undo` is called.

    wanted [B, H, N] bool by position; first, last [B, 1, 1]: steps.
    """

    def __init__(self, layer: int, sequence: SequenceState) -> None:
        self.layer, self.sequence = layer, sequence
        self.wanted: Tensor | None = None
        self.first = self.last = torch.zeros(0)

    def undo(self, slots: Slots, trials: Sequence[UndoneEvictions], columns: int) -> None:
        """Let row i undo trials[i] from now on; what it names and is evicted already, at step 0, is visible again."""
        heads, device = slots.keys.shape[1], slots.keys.device
        wanted = torch.zeros(len(trials), heads, columns, dtype=torch.bool)
        for row, trial in enumerate(trials):
            mine = [head for layer, head in trial.places if layer == self.layer]
            if mine and trial.positions:
                wanted[row, torch.tensor(mine)[:, None], torch.tensor(trial.positions)] = True
        self.wanted = wanted.to(device)
        self.first, self.last = (
            torch.tensor([getattr(trial, name) for trial in trials], device=device)[:, None, None]
            for name in ("first", "last")
        )
        self._bring_back(slots, slots.valid() & ~held_slots(slots))

    def evict(self, slots: Slots, ranked: RankedSlots, allowed: LayerSlots) -> None:
        held = held_slots(slots)
        assert slots.visible is not None
        back = slots.visible[:, :, : slots.length] & ~held  # brought back before
        super().evict(slots, ranked, allowed)
        slots.visible[:, :, : slots.length] |= back
        self._bring_back(slots, held & ~held_slots(slots))

    def _bring_back(self, slots: Slots, gone: Tensor) -> None:
        """gone [B, H, S]: evicted at this very step."""
        if self.wanted is None:
            return
        assert slots.visible is not None
        step = self.sequence.seq_len - (self.sequence.prompt_columns or 0)
        named = self.wanted.gather(-1, slots.positions[:, :, : slots.length].clamp(min=0))
        slots.visible[:, :, : slots.length] |= gone & named & (self.first <= step) & (step <= self.last)

    def select_rows(self, rows: Tensor) -> None:
        assert self.wanted is None, "rows are chosen before evictions are undone"


class Replay:
    """Answers of one case with evictions undone; the prompt is prefilled once.

    size: trials at a time, rows of one batch, each with a copy of the whole prompt's keys and values. progress: is
    called with the number of trials made since its last call.
    """

    def __init__(self, case: Case, size: int = 8, progress: Callable[[int], None] | None = None) -> None:
        self.case, self.size, self.progress = case, size, progress
        self.trials = 0
        check_undoing(case.cache)
        masked = dataclasses.replace(case.cache, mode="mask")
        self.context = case.prefill_prompt(prepare=_make_undoable, cache=masked)

    @property
    def everything(self) -> UndoneEvictions:
        """The undoing of every possible eviction, which is full attention."""
        states = self.context.cache.layer_states
        heads = [state.require_slots().keys.shape[1] for state in states if isinstance(state, EvictionLayer)]
        places = tuple((layer, head) for layer, count in enumerate(heads) for head in range(count))
        new = self.case.max_tokens_to_come
        return UndoneEvictions(tuple(range(len(self.case.prompt) + new)), places, 0, new)

    def answers(self, trials: Sequence[UndoneEvictions]) -> list[list[int]]:
        """New tokens of each trial."""
        tokens: list[list[int]] = []
        for start in range(0, len(trials), self.size):
            tokens += self.case.answer(self.fork(trials[start : start + self.size])).tokens
            if self.progress is not None:
                self.progress(len(trials[start : start + self.size]))
        self.trials += len(trials)
        return tokens

    def fork(self, trials: Sequence[UndoneEvictions]) -> PrefilledContext:
        """A copy of the prompt's context of one row per trial, in which row i undoes trials[i] from now on."""
        context: PrefilledContext = self.context.fork([0] * len(trials))
        for state in context.cache.layer_states:
            assert isinstance(state, EvictionLayer) and isinstance(state.backend, UndoMask)
            state.backend.undo(state.require_slots(), trials, len(self.case.prompt) + self.case.max_tokens_to_come)
        return context


def _make_undoable(cache: EvictionCache) -> None:
    """Give every layer of a new cache an `UndoMask`."""
    for layer, state in enumerate(cache.layer_states):
        assert isinstance(state, EvictionLayer)
        state.backend = UndoMask(layer, cache.sequence)


# The smallest set of evictions whose undoing brings an answer back: spans, then layers, heads and steps.


T = TypeVar("T")
Works = Callable[[list[list[T]]], list[bool]]
TOGETHER = 3  # needed tokens at most this far apart are of one span: "code ... 4711" is one thing lost


@dataclass(frozen=True)
class Cause:
    """The smallest set of evictions found whose undoing brings an answer back.

    undone: None where not even all evictions undone do; trials: answers that the search generated; whole: False where
    the trials ran out, so that `undone` may hold more than is needed.
    """

    undone: UndoneEvictions | None
    trials: int
    whole: bool

    @property
    def cost(self) -> str:
        """The number of trials, and whether they were enough, for messages."""
        return f"({self.trials} trials{'' if self.whole else '; the trials ran out, there may be less in it'})"

    @property
    def spans(self) -> list[list[int]]:
        """The positions of the cause, in groups of neighbours (at most TOGETHER apart)."""
        return neighbours(self.undone.positions if self.undone else (), TOGETHER)


def neighbours(numbers: Iterable[int], apart: int) -> list[list[int]]:
    """Ascending numbers in groups, within which each is at most `apart` from the one before."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number - groups[-1][-1] <= apart:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def cause(replay: Replay, right: Callable[[list[int]], bool], trials: int = 1000) -> Cause:
    """Smallest set of evictions to undo for new tokens that are `right`. About log(tokens) trials per span lost.

    With nothing undone they must not be right.

    First the interval of positions: the shortest beginning of the prompt that is enough, of it the shortest end. In it
    the tokens that are needed (delta debugging: Zeller and Hildebrandt 2002, in chunks of halves, quarters, ...), then
    likewise layers, heads within them, and the window of steps; at last positions once more. What is found works, and
    of its tokens, then of its layers and heads, none can be left out alone; a smaller set may exist elsewhere. The log
    has no part in it: with some evictions undone a method may make others.
    """
    best = replay.everything
    start = replay.trials

    def spent() -> bool:
        return replay.trials - start >= trials

    def works(make: Callable[[list[T]], UndoneEvictions]) -> Works[T]:
        def tested(candidates: list[list[T]]) -> list[bool]:
            if spent():
                return [False] * len(candidates)
            return [right(tokens) for tokens in replay.answers([make(candidate) for candidate in candidates])]

        return tested

    def of_positions(positions: Sequence[int]) -> UndoneEvictions:
        return dataclasses.replace(best, positions=tuple(positions))

    def of_places(places: Sequence[Place]) -> UndoneEvictions:
        return dataclasses.replace(best, places=tuple(places))

    def of_layers(layers: Sequence[int]) -> UndoneEvictions:
        return of_places([place for place in best.places if place[0] in layers])

    def of_steps(steps: Sequence[int]) -> UndoneEvictions:
        return dataclasses.replace(best, first=min(steps), last=max(steps))

    if not works(of_positions)([list(best.positions)])[0]:
        return Cause(None, replay.trials - start, True)
    best = of_positions(interval(list(best.positions), works(of_positions), replay.size))
    best = of_positions(smallest(list(best.positions), works(of_positions)))
    best = of_layers(smallest(sorted({layer for layer, _ in best.places}), works(of_layers)))
    best = of_places(smallest(list(best.places), works(of_places)))
    best = of_steps(interval(list(range(best.first, best.last + 1)), works(of_steps), replay.size))
    best = of_positions(smallest(list(best.positions), works(of_positions)))
    return Cause(best, replay.trials - start, not spent())


def interval(items: list[T], works: Works[T], ways: int) -> list[T]:
    """The shortest beginning of items that works, of it the shortest end; all of them do. `ways` trials at a time."""
    begin = items[: _cut(len(items), lambda counts: works([items[:count] for count in counts]), ways)]
    return begin[len(begin) - _cut(len(begin), lambda n: works([begin[len(begin) - count :] for count in n]), ways) :]


def _cut(count: int, works: Callable[[list[int]], list[bool]], ways: int) -> int:
    """The least number from 1 to `count` (which works) that works, if from there on all do."""
    fails, good = 0, count
    while good - fails > 1:
        between = sorted({fails + (good - fails) * way // (ways + 1) for way in range(1, ways + 1)} - {fails, good})
        for number, fine in zip(between, works(between), strict=True):
            if fine:
                good = number
                break
            fails = number
    return good


def smallest(items: list[T], works: Works[T]) -> list[T]:
    """A part of items, which work together, that works and does not without any single one of them."""
    parts = 2
    while len(items) > 1:
        chunks = [items[len(items) * i // parts : len(items) * (i + 1) // parts] for i in range(parts)]
        alone = [chunk for chunk, fine in zip(chunks, works(chunks), strict=True) if fine]
        if alone:
            items, parts = min(alone, key=len), 2
            continue
        rests = [[item for chunk in (*chunks[:i], *chunks[i + 1 :]) for item in chunk] for i in range(parts)]
        fine = works(rests) if parts > 2 else [False]
        if any(fine):
            items, parts = rests[fine.index(True)], max(parts - 1, 2)
        elif parts == len(items):
            break
        else:
            parts = min(2 * parts, len(items))
    return items


SHOWN = 3  # spans that are named one by one


@dataclass(frozen=True)
class Options:
    """The options of a search.

    until: output or score; trials: at most so many per example; again: search even where a result is saved.
    """

    until: str = "output"
    trials: int = 1000
    again: bool = False


@dataclass(frozen=True)
class FoundCause:
    """The cause of a lost example, as a search found it; saved as JSON.

    until: what had to come back, the full cache's output or its score. answer, full, back: outputs of the method, of
    the full cache, and with the evictions of `cause` undone. spans: texts of its spans; phrase: a sentence on the
    cause.
    """

    example: str
    until: str
    answer: str
    full: str
    back: str
    cause: Cause
    spans: list[str]
    phrase: str


def replayed(run: Run, row: Row, replay: Replay, example: Example, task: Task, options: Options) -> FoundCause:
    """Search for the evictions that changed one row's answer; replay: of its case.

    CacheError where the rows' answers do not come again, so that nothing could be concluded.
    """
    log = require_example_log(run, row["example"])
    case = replay.case
    answer, full = replay.answers([NOTHING_UNDONE])[0], case.full().generate_again().tokens[0]

    def output(tokens: list[int]) -> str:
        return str(case.tokenizer.decode(tokens, skip_special_tokens=True))

    def score(tokens: list[int]) -> float:
        thinking = case.decoding.thinking
        words = output(tokens) if thinking is None else thinking.part(tokens, case.tokenizer).text
        return task.score(words, example.reference, example)[task.metrics[0]]

    if output(answer) != row["output"]:
        raise CacheError(
            f"example {row['example']} is answered otherwise here ({output(answer)!r}) than in its row "
            f"({row['output']!r}): sums round otherwise in another batch or mode, and nothing can be concluded"
        )

    def right(tokens: list[int]) -> bool:
        return output(tokens) == output(full) if options.until == "output" else score(tokens) >= score(full)

    culprit = Cause(None, 0, True) if output(answer) == output(full) else cause(replay, right, options.trials)
    back, spans, phrase = list[int](), list[str](), ""
    if culprit.undone is not None:
        (back,) = replay.answers([culprit.undone])
        if not right(back):
            raise CacheError(
                f"example {row['example']}: what brought the answer back among other trials does not alone, because "
                "sums round otherwise in another batch: nothing can be concluded"
            )
        spans = [span_text(log.texts, span) for span in culprit.spans]
        phrase = phrase_of(culprit.undone, spans, log.heads)
    return FoundCause(row["example"], options.until, output(answer), output(full), output(back), culprit, spans, phrase)


def span_text(texts: Sequence[str], positions: Sequence[int]) -> str:
    """The tokens of a span, with dots for those between that are not of it; texts: of all tokens."""
    words, last = "", positions[0] - 1
    for position in positions:
        words += (" \u2026" if position > last + 1 else "") + texts[position]
        last = position
    return words.strip() or repr(words)


def phrase_of(undone: UndoneEvictions, spans: list[str], heads: list[int]) -> str:
    """The undone evictions as a phrase: "losing 'code ... 4711' in layers 1-2 at step 0 flipped the answer"."""
    lost = " and ".join(repr(span) for span in spans)
    if len(spans) > SHOWN:
        count = len(undone.positions)
        lost = f"{count} tokens in {len(spans)} spans ({', '.join(repr(span) for span in spans[:SHOWN])}, ...)"
    steps = "step " + str(undone.first) if undone.first == undone.last else f"steps {undone.first}-{undone.last}"
    return f"losing {lost} in {text_of_places(undone.places, heads)} at {steps} flipped the answer"


def text_of_places(places: Iterable[Place], heads: list[int]) -> str:
    """Layers and heads as text: "layers 1-2" where all heads are meant, else "layer 1 head 0, layer 3 heads 1, 2"."""
    by_layer: dict[int, list[int]] = defaultdict(list)
    for layer, head in sorted(places):
        by_layer[layer].append(head)
    words, whole = [], [layer for layer, heads_lost in by_layer.items() if len(heads_lost) == heads[layer]]
    if whole:
        words.append(("layers " if len(whole) > 1 else "layer ") + _ranges(whole))
    for layer, heads_lost in by_layer.items():
        if layer not in whole:
            words.append(f"layer {layer} head{'s' if len(heads_lost) > 1 else ''} {_ranges(heads_lost)}")
    return ", ".join(words)


def _ranges(numbers: list[int]) -> str:
    groups = neighbours(numbers, 1)
    return ", ".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)


def evidence(run: Run, example: str, undone: UndoneEvictions) -> pd.DataFrame:
    """Rows of the example's log that were undone: how the method scored those tokens, and what it would have taken."""
    evictions = read_evictions(run, example)
    places = pd.MultiIndex.from_frame(evictions[["layer", "head"]]).isin(undone.places)
    rows = evictions[places & evictions["position"].isin(undone.positions)]
    return rows[rows["step"].between(undone.first, undone.last)]


def save(run: Run, result: FoundCause) -> None:
    """Write the cause into the run's folder."""
    write_file(run, result.example, f"replay-{result.until}.json", json.dumps(asdict(result)).encode())


def saved(run: Run, example: str, until: str) -> FoundCause | None:
    """The cause that an earlier search of this example has written; None without one."""
    file = file_of(run, example, f"replay-{until}.json")
    if not file.exists():
        return None
    known: Mapping[str, Any] = json.loads(file.read_bytes())
    of, undone = known["cause"], known["cause"]["undone"]
    if undone is not None:
        places = tuple((layer, head) for layer, head in undone["places"])
        undone = UndoneEvictions(tuple(undone["positions"]), places, undone["first"], undone["last"])
    return dataclasses.replace(FoundCause(**known), cause=Cause(undone, of["trials"], of["whole"]))


def lost(run: Run) -> list[Row]:
    """The rows that score less than the full cache's of the same example, in the order of the task."""
    full, rows = rows_of(baseline_of(run)), rows_of(run)
    check_same_prompts(run.path, rows, baseline_of(run).path, full)
    worse = [row for name, row in rows.items() if name in full and headline(row) < headline(full[name])]
    return sorted(worse, key=lambda row: row["index"])


def find_causes(run: Run, rows: list[Row], options: Options) -> Iterator[FoundCause | str]:
    """The cause of every row, or why there is none; each is saved once found.

    A saved cause is taken unless more trials may find a smaller one than the earlier search, which ran out of them.
    """
    known = {row["example"]: None if options.again else saved(run, row["example"], options.until) for row in rows}
    for name, result in known.items():
        if result is not None and not result.cause.whole and result.cause.trials < options.trials:
            known[name] = None
    new_causes = _search(run, [row for row in rows if known[row["example"]] is None], options)
    for row in rows:
        yield known[row["example"]] or next(new_causes)


def _search(run: Run, rows: list[Row], options: Options) -> Iterator[FoundCause | str]:
    settings = settings_at(run)
    alone = len(rows) == 1
    total, unit = (options.trials, "trials at most") if alone else (len(rows), "examples")
    with Progress(f"replay {short_title(run)}", total, 0, unit) as progress:
        for row, case, example in cases(settings, rows):
            replay = Replay(case, settings.batch_size, progress.advance if alone else None)
            try:
                result = replayed(run, row, replay, example, settings.task, options)
            except CacheError as error:
                yield str(error)
            else:
                save(run, result)
                yield result
            if not alone:
                progress.advance()


def _say(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True, style=style)


def show_cause(run: Run, row: Row, options: Options, console: Console) -> None:
    """Print the cause of one example, and how the method scored what it lost."""
    (result,) = find_causes(run, [row], options)
    _say(console, f"{title_of(run)}: {row['example']}")
    if isinstance(result, str):
        _say(console, result)
        return
    for name, output in (("full cache", result.full), ("method", result.answer)):
        _say(console, f"{name + ':':12}{output.strip()}")
    undone = result.cause.undone
    if undone is None:
        same = result.answer == result.full
        why = "nothing to find" if same else "not even with every eviction undone does it come back"
        _say(console, f"{why} {result.cause.cost}")
        return
    _say(console, f"\n{result.phrase}.", "bold")
    rows = evidence(run, row["example"], undone)
    line = f"With {len(rows)} evictions of {len(undone.positions)} tokens undone it answers: {result.back.strip()} "
    console.print(f"{line}{result.cause.cost}\n", highlight=False, markup=False)
    heads = ("token", "position", "layer", "head", "step", "score", "least score kept", "rank")
    table = plain_table(*heads, caption="rank: place among the slots there, 1 is kept longest")
    for eviction in list(rows.itertuples())[:40]:
        numbers = (str(value) for value in (eviction.position, eviction.layer, eviction.head, eviction.step))
        scores = f"{eviction.score:.3g}", f"{eviction.threshold:.3g}", f"{eviction.rank} of {eviction.of}"
        table.add_row(escape(repr(eviction.text)), *numbers, *scores)
    if len(rows) > 40:
        table.add_row(f"... and {len(rows) - 40} more")
    console.print(table)


def explain(runs: list[Run], options: Options, first: int | None, console: Console) -> None:
    """Print per run how often one span explains a loss, and the cause of every lost example."""
    heads = ("run", "lost", "explained", "one span", "two", "more", "tokens", "evictions", "step 0", "trials")
    table = plain_table(*heads)
    for run in runs:
        rows = lost(run)
        logged = [row for row in rows if has_log(run, row["example"])]
        if not logged:
            logged = rows[:first]
            ensure_diagnosed(run, logged)
        searched, name = logged[:first], short_title(run)
        causes = list(find_causes(run, searched, options))
        table.add_row(escape(name), str(len(rows)), *_counts(run, causes))
        for row, result in zip(searched, causes, strict=True):
            if not isinstance(result, str):
                why = result.phrase or "not even with every eviction undone does the full cache's answer come back"
                result = f"{why} {result.cause.cost}"
            _say(console, f"{name}: {row['example']}: {result}")
        if len(logged) < len(rows):
            _say(console, f"{name}: {len(rows) - len(logged)} lost examples have no log")
    console.print(table)
    console.print("lost: scored less than with the full cache. explained: undoing evictions brings it back, of those")
    console.print("searched; one span, two, more, step 0: of those; tokens, evictions, trials: their medians.")


def _counts(run: Run, causes: list[FoundCause | str]) -> list[str]:
    """Cells of the table of `explain`, from "explained" on."""
    done = [(why, why.cause.undone) for why in causes if not isinstance(why, str) and why.cause.undone is not None]
    spans = [len(why.cause.spans) for why, _ in done]
    tokens = [len(undone.positions) for _, undone in done]
    evictions = [len(evidence(run, why.example, undone)) for why, undone in done]
    trials = [why.cause.trials for why, _ in done]
    middle = [f"{median(values):g}" if values else "-" for values in (tokens, evictions, trials)]
    how_many = [str(count) for count in (spans.count(1), spans.count(2), sum(count > 2 for count in spans))]
    at_prompt = sum(undone.last == 0 for _, undone in done)
    return [f"{len(done)} of {len(causes)}", *how_many, *middle[:2], str(at_prompt), middle[2]]
