"""The second pass over a prompt, for methods that need one: a forward hook makes it when the prompt has ended.

Fed is the instruction to repeat the prompt, then the prompt's own tokens in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvexp.core import CacheConfig, EvictionLayer
from kvexp.core.method import SecondPass
from kvexp.core.second_pass import RepeatedChunk, SecondPassLayer
from kvexp.hf.chat_template import render
from kvexp.hf.moving_rope import MovingRope
from kvexp.hf.patch import attention_modules, forward_logits
from kvexp.hf.traits import cache_among
from kvexp.util.errors import ConfigError

if TYPE_CHECKING:
    from kvexp.hf.cache import EvictionCache

_USER, _MARK = "A context.", "\n##########"  # a user's turn, and what its end is found by


@dataclass
class RepeatedPrompt:
    """A second pass over one batch of prompts: its declaration, and token ids.

    first, later: fed ahead of the first chunk and of later ones; turn: between that and the chunk. fed: the prompt's
    token ids [B, columns], forward by forward, until the pass is over.
    """

    how: SecondPass
    first: list[int]
    later: list[int]
    turn: list[int]
    fed: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, how: SecondPass, tokenizer: Any, method: str) -> RepeatedPrompt:
        """The declaration with its texts as token ids; ConfigError where that takes a tokenizer and there is none."""
        if not how.instruction:
            return cls(how, [], [], [])
        if tokenizer is None:
            raise ConfigError(
                f"method {method} repeats the prompt behind an instruction, which takes the model's tokenizer: pass "
                "tokenizer=, or set method.instruct=false"
            )
        texts = (how.instruction, how.next_instruction, end_of_user_turn(tokenizer) if how.end_turn else "\n")
        first, later, turn = (list(tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
        return cls(how, first, later, turn)

    @property
    def same_pass(self) -> tuple[Any, ...]:
        """Equal for caches of the same prompts that one second pass serves."""
        return self.how, tuple(self.first), tuple(self.later), tuple(self.turn)

    def most_tokens(self, prompt: int) -> int:
        """Tokens of the longest forward for a prompt of so many tokens; 0 where nothing of it is repeated."""
        left = prompt - self.how.start
        if left <= 0:
            return 0
        chunk = min(left, self.how.chunk)
        behind = len(self.later) + min(self.how.overlap, self.how.chunk) if left > chunk else 0
        return max(len(self.first), behind) + len(self.turn) + chunk

    def check_room(self, prompt: int, holds: int, method: str, moving: MovingRope | None = None) -> None:
        """ConfigError where a prompt of so many tokens and its longest forward are more than the model `holds`.

        Also where the prompt and what is fed behind it are on two sides of the limit of a moving RoPE.
        """
        most = self.most_tokens(prompt)
        if prompt + most > holds:
            raise ConfigError(
                f"method {method} feeds up to {most} tokens behind the prompt of {prompt} to repeat it, the model "
                f"holds {holds}: lower method.chunk (now {self.how.chunk}), or shorten the prompt"
            )
        if most and moving is not None and not moving.same([prompt, prompt + most]):
            raise ConfigError(
                f"{moving.why}, and method {method} feeds up to {most} tokens behind the prompt of {prompt} to repeat "
                f"it: lower method.chunk (now {self.how.chunk}), or shorten the prompt"
            )

    def chunks(self, lengths: Sequence[int], pad: int) -> list[tuple[Tensor, RepeatedChunk]]:
        """The forwards of the pass: token ids [n, Q], padded with `pad` on the left, and how the layers read them.

        lengths: real tokens of every row.
        """
        ids = torch.cat([chunk.cpu() for chunk in self.fed], dim=1)
        columns = ids.shape[1]
        rows = [row[columns - length :] for row, length in zip(ids.tolist(), lengths, strict=True)]
        starts = range(self.how.start, max(lengths), self.how.chunk)
        return [self._chunk(start, rows, columns, pad) for start in starts]

    def _chunk(self, start: int, rows: Sequence[list[int]], columns: int, pad: int) -> tuple[Tensor, RepeatedChunk]:
        """The forward that repeats what begins at position `start`; rows: of real tokens; else as of `chunks`."""
        how = self.how
        members = [row for row, ids in enumerate(rows) if len(ids) > start]
        ahead, overlap = (self.first, 0) if start == how.start else (self.later, min(how.overlap, how.chunk))
        texts = [
            [*ahead, *rows[row][start - overlap : start], *self.turn, *rows[row][start : start + how.chunk]]
            for row in members
        ]
        width, lengths = max(map(len, texts)), torch.tensor([[len(rows[row])] for row in members])
        place = torch.arange(width) - torch.tensor([[width - len(text)] for text in texts])

        def columns_of(first: int, end: int) -> Tensor:
            positions = torch.arange(first, end).expand(len(members), -1)
            return torch.where(positions < lengths, positions + columns - lengths, -1)

        return torch.tensor([[pad] * (width - len(text)) + text for text in texts]), RepeatedChunk(
            rows=torch.tensor(members),
            positions=torch.where(place >= 0, lengths + place, -1),
            before=columns_of(0, how.start),
            repeated=columns_of(start, min(start + how.chunk, int(lengths.max()))),
        )


def check_second_pass(
    cache: CacheConfig, tokenizer: Any, prompt: int, holds: int, moving: MovingRope | None = None
) -> None:
    """ConfigError where the method cannot make a second pass over a prompt of so many tokens.

    holds, moving: as of `RepeatedPrompt.check_room`.
    """
    how = cache.method.needs.second_pass
    if how is not None:
        RepeatedPrompt.of(how, tokenizer, cache.method.name).check_room(prompt, holds, cache.method.name, moving)


def end_of_user_turn(tokenizer: Any) -> str:
    """What the tokenizer's chat template puts between a user's words and the answer; a newline without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return "\n"
    turn = [{"role": "user", "content": _USER + _MARK}]
    text = render(tokenizer, turn, add_generation_prompt=True)
    _, mark, after = text.rpartition(_MARK)
    if not mark:
        raise ConfigError(
            "the tokenizer's chat template changes what the user says, so its end of a turn is not known: set "
            "method.end_turn=false"
        )
    return str(after)


class SecondPassCache(Cache):  # type: ignore[misc]
    """The prompt of one or several caches as a model sees it during a second pass.

    caches: filled from one prefill, with equal slots, and not evicted yet.
    """

    def __init__(self, caches: Sequence[EvictionCache]) -> None:
        from kvexp.hf.layers import EvictionCacheLayer, RepeatedWindow  # late: it imports this module

        self.passes: list[SecondPassLayer] = []
        self.windows: list[RepeatedWindow] = []
        layers: list[Any] = []
        group, held, prompt = caches[0].traits.group, caches[0].held, caches[0].repeated_prompt
        queries = 0 if prompt is None else prompt.how.queries
        for number, layer in enumerate(caches[0].layers):
            if number not in held:
                if hasattr(layer, "state"):
                    self.windows.append(RepeatedWindow(layer.state))
                    layer = EvictionCacheLayer(
                        self.windows[-1], None, layer.model_config, None, layer.kind, latent=layer.latent
                    )
                layers.append(layer)
                continue
            states = [cache.layers[number].state for cache in caches]
            first = states[0]
            assert isinstance(first, EvictionLayer)
            observes = any(isinstance(state, EvictionLayer) and state.due_eviction is not None for state in states)
            self.passes.append(
                SecondPassLayer(
                    first.require_slots(), group, observes=observes, sink=caches[0].config.score_sink, queries=queries
                )
            )
            layers.append(EvictionCacheLayer(self.passes[-1], layer.rope, layer.model_config, latent=layer.latent))
        super().__init__(layers=layers)


def second_pass_hook(model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook: remember the prompt's token ids; after its last forward make the passes that evictions wait for.

    Does nothing for caches whose methods need no second pass.
    """
    cache = cache_among(kwargs)
    every: list[Any] = list(getattr(cache, "caches", (cache,)))
    caches = [member for member in every if getattr(member, "repeated_prompt", None) is not None]
    ids = args[0] if args else kwargs.get("input_ids")
    if not caches or ids is None or not caches[0].sequence.in_prompt:
        return
    groups: dict[Any, list[EvictionCache]] = {}
    for member in caches:
        member.repeated_prompt.fed.append(ids)
        if any(isinstance(state, EvictionLayer) and state.due_eviction is not None for state in member.layer_states):
            groups.setdefault((member.repeated_prompt.same_pass, member.config.score_sink), []).append(member)
    for members in groups.values():
        repeat_prompts(model, members)
    if caches[0].sequence.prompt_complete:
        for member in caches:
            member.repeated_prompt.fed.clear()


@torch.no_grad()
def repeat_prompts(model: PreTrainedModel, caches: Sequence[EvictionCache]) -> None:
    """Make the second pass that serves all these caches of the same prompts, and evict from them.

    ConfigError where the model holds too few positions for it.
    """
    sequence, prompt = caches[0].sequence, caches[0].repeated_prompt
    assert prompt is not None and sequence.prompt_columns is not None
    caches[0].check_second_pass(sequence.prompt_lengths)
    columns, lengths = sequence.prompt_columns, torch.tensor(sequence.prompt_lengths)[:, None]
    real = (torch.arange(columns) >= columns - lengths).long()
    cache = SecondPassCache(caches)
    for ids, chunk in prompt.chunks(sequence.prompt_lengths, pad=0):
        seen: list[Any] = [*cache.passes, *cache.windows]
        for layer in seen:
            layer.chunk = chunk
        mask = torch.cat([real[chunk.rows], (chunk.positions >= 0).long()], dim=1)
        with input_norms(model, chunk, wanted=prompt.how.over_input):
            logits = forward_logits(model, ids, mask, cache, keep=1)[:, -1]
        for member in caches:
            member.logits_nan_flag = member.logits_nan_flag + 0 * logits.sum(dtype=torch.float32)
    for member in caches:
        for state, layer in zip(member.layer_states, cache.passes, strict=True):
            if isinstance(state, EvictionLayer) and state.due_eviction is not None:
                state.evict_due(layer.attention, layer.peak_bytes, layer.logits)


@contextmanager
def input_norms(model: PreTrainedModel, chunk: RepeatedChunk, *, wanted: bool) -> Iterator[None]:
    """A block in which each attention module first puts the 2-norm of its input, query by query, into the chunk.

    Does nothing where it is not wanted.
    """

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        chunk.input_norms = torch.linalg.vector_norm(hidden.float(), dim=-1)

    attentions = attention_modules(model) if wanted else []
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in attentions]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
