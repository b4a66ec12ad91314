"""Conversations: turns in one cache, each answer scored, and how far the cache has come from the full cache's."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvexp.config.group_checks import batch_cache
from kvexp.config.settings import Settings
from kvexp.errors import ConfigError
from kvexp.evaluate.model_output import ModelOutput
from kvexp.evaluate.outputs import noise_seed, outputs_of, sampling_seed
from kvexp.evaluate.tokenized_examples import TokenizedExample, reference_ids, turn_ids
from kvexp.tasks.turn_dialogues import DialogueTask

if TYPE_CHECKING:
    from kvexp.generate import PrefilledContext, TextDivergence
    from kvexp.models.types import Model, Tokenizer

Items = Sequence[tuple[int, TokenizedExample]]


def conversation_outputs(
    settings: Settings, model: Model, tokenizer: Tokenizer, batch: Items
) -> dict[int, ModelOutput]:
    """Index -> answer, of prompts that are turns of conversations: every conversation is held from its beginning.

    Its turns up to the last one in the batch are taken, one conversation after the other.
    """
    conversations = defaultdict(list)
    for index, prompt in batch:
        conversations[prompt.example.prompt].append((index, prompt))
    made: dict[int, ModelOutput] = {}
    for items in conversations.values():
        wanted = {prompt.example.number: index for index, prompt in items}
        answers = _Conversation.begin(settings, model, tokenizer, items[0][1], max(wanted)).hold()
        made |= {index: answers[number] for number, index in wanted.items()}
    return made


@dataclass
class _Conversation:
    """One conversation while it is held: the run's cache, and beside it the full cache, fed the same tokens.

    full: None of the full cache's own run. last: the number of the last turn; pending: the token of the answer before
    that no cache has seen yet.
    """

    settings: Settings
    model: Model
    tokenizer: Tokenizer
    prompt: TokenizedExample
    last: int
    own: PrefilledContext
    full: PrefilledContext | None
    pending: list[int] = dataclasses.field(default_factory=list)

    @classmethod
    def begin(
        cls, settings: Settings, model: Model, tokenizer: Tokenizer, prompt: TokenizedExample, last: int
    ) -> _Conversation:
        """Prefill the first message. ConfigError where all turns and answers are more than the model holds."""
        from kvexp.generate import prefill
        from kvexp.generate.inputs import check_length

        turns, new = prompt.example.turns[: last + 1], settings.decoding.max_new_tokens
        asked = [turn_ids(prompt, tokenizer, turn.message, chat=settings.model.chat) for turn in turns[1:]]
        given = [len(reference_ids(turn.reference, tokenizer)) for turn in turns]  # where these stay
        ahead = sum(map(len, asked)) + sum(max(new, count) + 1 for count in given)
        check_length(model, len(prompt.ids), ahead, settings.cache.beyond_context)
        seed = noise_seed(settings, prompt.example, asked=True)

        def context(each: Settings) -> PrefilledContext:
            return prefill(
                model,
                [prompt.ids],
                batch_cache(each, [len(prompt.ids)]),
                max_new_tokens=ahead,
                chunk=each.decoding.prefill_chunk,
                tokenizer=tokenizer,
                seeds=[seed],
                spans=[prompt.spans],
            )

        full = None if settings.is_baseline else context(settings.baseline())
        return cls(settings, model, tokenizer, prompt, last, context(settings), full)

    @property
    def both(self) -> list[PrefilledContext]:
        """The run's context, and the full cache's beside it."""
        return [self.own] if self.full is None else [self.own, self.full]

    def hold(self) -> list[ModelOutput]:
        """The answers of all turns, in order; `info` says of each how far it is from the full cache."""
        from kvexp.generate.divergence import read_questions

        answers = []
        for number, turn in enumerate(self.prompt.example.turns[: self.last + 1]):
            if number:
                asked = turn_ids(self.prompt, self.tokenizer, turn.message, chat=self.settings.model.chat)
                # An end token that was chosen is the one that the next turn begins with.
                ended = bool(self.pending) and self.pending[0] in self._ends()
                read_questions(self.model, self.both, [asked if ended else [*self.pending, *asked]])
            fed = self.own.ids.shape[1]
            answer = self._answer(self.own)
            text = self._stays(answer, turn.reference)
            found = self._feed(text, counts_first=number > 0 or self.settings.cache.bounded_chunk is not None)
            answers.append(dataclasses.replace(answer, info={"fed": fed, **found}))
        return answers

    def _answer(self, context: PrefilledContext) -> ModelOutput:
        """The answer to the turn that was read last; the context stays as it is."""
        from kvexp.generate import decode

        seeds = [sampling_seed(self.settings, self.prompt.example)]
        fork, start = context.fork([0]), time.perf_counter()
        made = decode(self.model, [fork], self.settings.decoding, seeds, self.tokenizer, start=start)[0]
        (answer,) = outputs_of(made, self.tokenizer)
        # The turn was read beside the full cache: when its first token came says nothing about the run alone.
        return dataclasses.replace(answer, seconds={**answer.seconds, "ttft": None, "tt2t": None})

    def _stays(self, answer: ModelOutput, reference: str) -> list[int]:
        """Token ids of the answer that stays in the conversation, as the task's `history` says."""
        task = self.settings.task
        assert isinstance(task, DialogueTask)
        if task.history == "reference":
            return reference_ids(reference, self.tokenizer)
        if task.history == "full" and self.full is not None:
            return self._answer(self.full).tokens
        return answer.tokens

    def _feed(self, text: list[int], *, counts_first: bool) -> dict[str, Any]:
        """Feed an answer but for its last token; how far the run's distributions are from the full cache's along it.

        counts_first: whether the first token was predicted after an eviction. Of the full cache's own run nothing.
        """
        from kvexp.generate import ForcedBatch, divergence_of_batches
        from kvexp.generate.divergence import read_questions

        if not text:
            raise ConfigError("an answer of a conversation has no tokens: task.history=reference needs references")
        before = [(context.ids, context.mask) for context in self.both]
        self.pending = text[-1:]
        if self.full is None:
            if text[:-1]:
                read_questions(self.model, [self.own], [text[:-1]])
            return {}
        (((found,),),) = divergence_of_batches(self.model, [ForcedBatch(self.full, [self.own], [text])])
        for context, (ids, mask) in zip(self.both, before, strict=True):
            more = ids.new_tensor([text[:-1]])
            context.ids, context.mask = _behind(ids, more), _behind(mask, more.new_ones(more.shape))
        return _summary(found, skip=0 if counts_first else 1)

    def _ends(self) -> list[int]:
        from kvexp.generate.inputs import eos_ids

        return eos_ids(self.model, self.settings.decoding.eos)


def turns_fed(
    settings: Settings, model: Model, tokenizer: Tokenizer, prompt: TokenizedExample, last: int
) -> tuple[list[list[int]], int]:
    """What is fed behind the first message before each turn's answer, up to turn `last`, and the tokens to come in all.

    The conversation is held again; prompt: of any of its turns. Errors as of `conversation_outputs`.
    """
    talk = _Conversation.begin(settings, model, tokenizer, prompt, len(prompt.example.turns) - 1)
    talk.last = last
    answers = talk.hold()
    ids, ahead = talk.own.ids[0].tolist(), talk.own.cache.sequence.max_new_tokens
    assert ahead is not None
    return [ids[len(prompt.ids) : answer.info["fed"]] for answer in answers], ahead


def _behind(first: Any, second: Any) -> Any:
    """Two tensors [1, n] and [1, m] as one [1, n + m]."""
    import torch

    return torch.cat([first, second], dim=1)


def _summary(found: TextDivergence, *, skip: int) -> dict[str, Any]:
    """Mean KL in nats per token and share of equal top tokens behind the first `skip` tokens; None without any."""
    kl, same = [max(0.0, each) for each in found.kl[skip:]], found.same_top1[skip:]
    if not kl:
        return {"kl": None, "top1": None, "kl_tokens": 0}
    return {"kl": sum(kl) / len(kl), "top1": sum(same) / len(same), "kl_tokens": len(kl)}
