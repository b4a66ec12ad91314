"""Which evictions are behind a run's divergence: its token of largest KL, forced again with evictions undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.console import Console
from kvexp.diagnose.case import Case
from kvexp.diagnose.causal.search_order import search_order
from kvexp.diagnose.explain import Options
from kvexp.diagnose.folders import Row, rows_of, short_title
from kvexp.diagnose.refusals import nothing_to_log
from kvexp.diagnose.replay import phrase_of, spans_of_texts
from kvexp.diagnose.runs import cases, settings_at
from kvexp.diagnose.search import Cause, cause
from kvexp.diagnose.undo import Replay, UndoneEvictions, undo_in
from kvexp.errors import CacheError, ConfigError
from kvexp.generate import PrefilledContext
from kvexp.generate.divergence import compare, read_questions
from kvexp.generate.prefilled_context import decode_step
from kvexp.record import Run
from kvexp.record.divergence_lines import OWN, Line, read

CLOSE = 0.05  # of the recorded KL, and nats: more is no rounding of another batch and mode
BEFORE = 12  # tokens of the text that are shown before the one in question


@dataclass(frozen=True)
class Worst:
    """The token of largest KL of one example: its place in the text, from 0, and the KL there, in nats."""

    line: Line
    place: int
    kl: float


def worst_tokens(run: Run, text: str = OWN) -> list[Worst]:
    """Of every measured example, the largest first; a token that the prefill predicts is none."""
    found = []
    for (_, kind), line in read(run).items():
        skip = int(line["first_by_prefill"])
        if kind == text and len(line["kl"]) > skip:
            place = max(range(skip, len(line["kl"])), key=line["kl"].__getitem__)
            found.append(Worst(line, place, line["kl"][place]))
    return sorted(found, key=lambda worst: -worst.kl)


class ForcedReplay(Replay):
    """Trials that are fed one text and judged at its next token: an answer is [1] where KL there is within epsilon.

    text: token ids before that token; kl: of each trial of the latest call, in nats.
    """

    def __init__(
        self, case: Case, text: Sequence[int], epsilon: float, progress: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(case, progress=progress)
        self.text, self.epsilon = list(text), epsilon
        self.full = self._forced(case.full().prefill_prompt())
        self.kl: list[float] = []

    def _answers(self, trials: Sequence[UndoneEvictions]) -> list[list[int]]:
        context: PrefilledContext = self.context.fork([0] * len(trials))
        undo_in(context, trials, len(self.case.prompt) + self.case.max_tokens_to_come)
        token = self.full.argmax(-1)
        self.kl = compare(self.full, self._forced(context), token)[0].tolist()
        return [[int(kl <= self.epsilon)] for kl in self.kl]

    @torch.no_grad()
    def _forced(self, context: PrefilledContext) -> Tensor:
        """[B, V]: the logits behind the text, the same text for every row."""
        rows = len(context.ids)
        if self.case.question:
            read_questions(self.case.model, [context], [self.case.question] * rows)
        positions, logits = context.mask.sum(1, keepdim=True) - 1, context.logits
        for token in self.text:
            positions = positions + 1
            fed = torch.full((rows, 1), token, device=context.ids.device)
            logits = decode_step(self.case.model, fed, positions, context.cache)
        return logits.float()


def explain_worst(run: Run, options: Options, first: int | None, console: Console) -> None:
    """Say of the tokens of largest KL (the first so many examples', one by default) which evictions are behind them."""
    settings = settings_at(run)
    if (why := nothing_to_log(settings)) is not None:
        raise ConfigError(f"{short_title(run)} evicted nothing to undo: {why}")
    rows = rows_of(run)
    worst = [each for each in worst_tokens(run) if each.line["example"] in rows][: first or 1]
    if not worst:
        raise ConfigError(f"{run.path} has no divergence of its rows: kvexp divergence {run.path.parent}")
    by_name = {each.line["example"]: each for each in worst}
    epsilon = float(((run.command or {}).get("config") or {}).get("epsilon_kl") or 0.05)
    for row, case, _ in cases(settings, [rows[name] for name in by_name]):
        _tell(run, row, case, by_name[row["example"]], epsilon, options, console)


def _tell(run: Run, row: Row, case: Case, worst: Worst, epsilon: float, options: Options, console: Console) -> None:
    tokens = worst.line["tokens"]
    replay = ForcedReplay(case, tokens[: worst.place], epsilon)
    replay.answers([UndoneEvictions((), (), 0, 0)])
    again = replay.kl[0]
    if abs(again - worst.kl) > CLOSE + CLOSE * worst.kl:
        raise CacheError(
            f"example {row['example']}: KL at token {worst.place + 1} is {again:.3f} here and {worst.kl:.3f} in its "
            "line: sums round otherwise in another batch or mode, and nothing can be concluded"
        )

    def said(ids: Sequence[int]) -> str:
        return str(case.tokenizer.decode(list(ids)))

    texts = [said([token]) for token in [*case.prompt, *case.question, *tokens]]
    order = search_order(run, row["example"], replay.everything.positions)
    found: Cause = cause(replay, lambda answer: answer == [1], options.trials, order)
    console.print(f"{short_title(run)}: {row['example']}: token {worst.place + 1} of {len(tokens)}", highlight=False)
    before = said(tokens[max(0, worst.place - BEFORE) : worst.place])
    line = f"{before!r} then {said([tokens[worst.place]])!r}: KL {worst.kl:.3f} nats"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    if found.undone is None:
        console.print(f"not even with every eviction undone is KL there within {epsilon:g}", highlight=False)
        return
    replay.answers([found.undone])
    places = replay.everything.places
    heads = [sum(place[0] == layer for place in places) for layer in range(1 + max(layer for layer, _ in places))]
    words = phrase_of(found.undone, spans_of_texts(texts, found.spans), heads, what="is behind it")
    few = "" if found.whole else "; the trials ran out, there may be less in it"
    count = len(found.undone.positions)
    undone = f"with {count} token{'s' * (count != 1)} undone"
    line = f"{words}: {undone} KL is {replay.kl[0]:.3f} ({found.trials} trials{few})"
    console.print(line, highlight=False, markup=False, soft_wrap=True, style="bold")
