"""KVzip: what the model looks at while it repeats the prompt is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from kvexp.core import EvictionContext, Method, Needs, SecondPass
from kvexp.util.fields import AtLeast

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"


@dataclass(frozen=True)
class KVzip(Method):
    """s[j] = max over queries q and query heads of softmax(x_q)[j], q of a second pass that repeats the prompt;
    keep = sinks U top of s. Chosen once.

    The prompt from the sinks on is fed again to the full cache, `chunk` tokens at a time behind an instruction to
    repeat it (later chunks also behind the eight tokens before them). The softmax is over sinks, the chunk's slots
    and what is fed. Source: Kim et al., arXiv:2505.23416, algorithm 1, and the authors' code. The instruction is
    kvpress's (`instruct=false`: none); `end_turn` puts the chat template's end of the user's turn behind it, or a
    newline. Departures: each kv head has the same budget (the paper's default: `budget.heads=global`); `n_sinks`
    tokens inside the budget are kept (the authors: the whole system prompt, outside it); a question in the prompt
    is repeated with it.
    """

    name: ClassVar[str] = "kvzip"
    evicts_while_decoding: ClassVar[bool] = False
    n_sinks: Annotated[int, AtLeast(0)] = 4
    chunk: Annotated[int, AtLeast(1)] = 2000  # tokens repeated in one forward
    instruct: bool = True  # false: no words ahead of a chunk
    end_turn: bool = True  # of the chat template, behind the instruction

    @property
    def needs(self) -> Needs:
        return Needs(second_pass=self._second_pass())

    def _second_pass(self, *, over_input: bool = False) -> SecondPass:
        first, later = (FIRST, LATER) if self.instruct else ("", "")
        return SecondPass(
            start=self.n_sinks,
            chunk=self.chunk,
            instruction=first,
            next_instruction=later,
            end_turn=self.end_turn,
            over_input=over_input,
        )

    @property
    def priority_kind(self) -> Literal["share"]:
        return "share"

    def priority(self, ctx: EvictionContext) -> Tensor:
        assert ctx.second_pass_attention is not None
        return ctx.second_pass_attention.amax(2)
