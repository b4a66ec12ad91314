"""The effect of removals on a full cache's own answer: one forward of the whole forced answer for each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvexp.diagnose.case import Case
from kvexp.errors import ConfigError
from kvexp.generate.divergence import compare
from kvexp.models.known_layers import KnownLayers
from kvexp.models.output_projection import output_factors
from kvexp.models.removal import RemovalCache, Trial

ROWS = 8  # removals per forward
# What the answer's own queries tell of a prompt token, in the order of `RemovalLayer.answer_scores`: attention; it
# times the size of the value; and the distance by which each head's output moves without the token.
ANSWER_SCORES = ("answer_attention", "answer_attention_value", "answer_output_change")


@dataclass(frozen=True)
class Effect:
    """What a removal did to the answer.

    kl: KL(full || without) in nats, mean over the judged tokens; kl_max: the largest of a token; logprob: by how much
    the mean log-probability of the answer's tokens fell, in nats; flips: judged tokens whose likeliest token changed.
    """

    kl: float
    kl_max: float
    logprob: float
    flips: int


def first_layer(trial: Trial) -> int:
    """The first layer from which a trial removes something; 0 where it removes nothing."""
    if any(removal.places is None for removal in trial):
        return 0
    return min((layer for removal in trial for layer, _ in removal.places or ()), default=0)


class ForcedAnswer:
    """A case's own answer under the full cache, forced again without some of the prompt's tokens.

    The answer is fed in one forward per removal, `rows` removals at a time; a question that follows the eviction is fed
    ahead of it. A forward begins at the first layer from which something is removed: below, all is as with the full
    cache. The first token of an answer is predicted by the prompt's last token before anything is removed: it is
    judged only where a question stands between. answer: token ids; judged: how many of them are.
    """

    def __init__(self, case: Case, max_new_tokens: int, rows: int = ROWS) -> None:
        count = min(max_new_tokens, case.decoding.max_new_tokens)
        short = dataclasses.replace(
            case.decoding, max_new_tokens=count, min_new_tokens=min(case.decoding.min_new_tokens, count)
        )
        self.case, self.rows = dataclasses.replace(case, decoding=short).full(), rows
        self.answer: list[int] = self.case.generate_again().tokens[0]
        fed = [*case.question, *self.answer[:-1]]
        self.judged = len(self.answer) - (not case.question)
        if self.judged < 1:
            raise ConfigError("an answer of one token is predicted by the prompt itself: nothing can be removed before")
        context = self.case.prefill_prompt()
        self.cache = RemovalCache(case.model, context.cache, output_factors(case.model))
        device = context.ids.device
        self.fed = torch.tensor(fed, device=device)
        self.targets = torch.tensor(self.answer[-self.judged :], device=device)
        for state in self.cache.states:
            state.watched = True
        self.layers = KnownLayers(case.model)
        with self.layers.noted():
            self.full = self._logits([()])[0]
        for state in self.cache.states:
            state.watched = False

    @property
    def heads(self) -> list[int]:
        """kv heads of each layer."""
        return self.cache.heads

    def answer_scores(self) -> dict[str, Tensor]:
        """Name of `ANSWER_SCORES` -> [L, H, S] float32: sums over query heads and the tokens fed after the prompt."""
        found = [state.answer_scores for state in self.cache.states]
        whole = torch.stack([each for each in found if each is not None]).cpu()  # [L, n, H, S]
        return dict(zip(ANSWER_SCORES, whole.unbind(1), strict=True))

    def effects(self, trials: Sequence[Trial]) -> Iterator[Effect]:
        """The effect of each trial, in order; made `rows` at a time, those of one layer together."""
        found: dict[int, Effect] = {}
        order = sorted(range(len(trials)), key=lambda place: first_layer(trials[place]))
        for start in range(0, len(order), self.rows):
            some = order[start : start + self.rows]
            found |= zip(some, self._effects([trials[place] for place in some]), strict=True)
        for place in range(len(trials)):
            yield found[place]

    def _effects(self, trials: Sequence[Trial]) -> list[Effect]:
        with self.layers.beginning_at(min(map(first_layer, trials)), len(trials)):
            logits = self._logits(trials)
        kl, full, own, same = compare(self.full, logits.flatten(0, 1), self.targets).view(4, len(trials), -1).cpu()
        return [
            Effect(
                float(kl[row].mean()),
                float(kl[row].max()),
                float((full[row] - own[row]).mean()),
                int((same[row] < 0.5).sum()),
            )
            for row in range(len(trials))
        ]

    @torch.no_grad()
    def _logits(self, trials: Sequence[Trial]) -> Tensor:
        """[R, judged, V] float32: of the judged tokens, without what each trial removes."""
        model, rows = self.case.model, len(trials)
        self.cache.hide(trials)
        first = len(self.case.prompt)
        positions = torch.arange(first, first + len(self.fed), device=self.fed.device).expand(rows, -1)
        options = {} if model.config.model_type == "mpt" else {"position_ids": positions}
        output = model(
            self.fed.expand(rows, -1),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=self.judged,
            attention_mask=self.fed.new_ones(rows, 0),
            **options,
        )
        logits: Tensor = output.logits
        return logits.float()
