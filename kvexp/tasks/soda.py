"""SODA: go on with a conversation between two people whose situation is told."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from kvexp.errors import ConfigError
from kvexp.tasks.base import Example, RougeTask, row_id
from kvexp.tasks.data import text
from kvexp.tasks.questions import QuestionTask

_MARKS = re.compile("<sep>|<turn>|<end>")


@dataclass(frozen=True, kw_only=True)
class Soda(QuestionTask, RougeTask):
    """Write the rest of a dialogue after its first turn; rows {"narrative", "speakers", "dialogue", ...} of SODA
    (Kim et al., arXiv:2212.10465), 146,346 in the validation split.

    The conversation task of Keyformer (arXiv:2403.09054): its prompt, one answer of at most 128 tokens for all further
    turns, ROUGE to those turns. `turn_separator` stands between the turns of the reference, a line end so that
    rougeLsum sees them as sentences; the release puts nothing there, which glues the last word of a turn to the first
    of the next. `join_lines`: line ends of the answer are removed likewise, as in the release; false keeps them. The
    marks <sep>, <turn> and <end> are taken out of answers. The release draws rows as its summarization script does.
    With question=after_eviction the narrative is evicted first; the instruction and the first turn come then.
    """

    name: ClassVar[str] = "soda"
    later_options: ClassVar[tuple[str, ...]] = ("question",)

    hub_id: str = "allenai/soda"
    revision: str | None = "d80f16879432016b62fa3d32d0fc4eeea4af78aa"
    turn_separator: str = "\n"
    join_lines: bool = False
    max_prompt_tokens: int | None = 1920

    def example(self, row: dict[str, Any], where: str) -> Example:
        narrative = text(row, "narrative", where, "data_files")
        speakers, turns = list_of(row, "speakers", where), list_of(row, "dialogue", where)
        between = f" <sep> Generate a dialogue between {speakers[0]} and {speakers[1]} given above narrative. <sep> "
        rest = self.turn_separator.join("".join(turn.splitlines()) for turn in turns[1:])
        name = row_id(row, "original_index", narrative, *turns)
        return self.ask(name, ("", narrative, ""), between + turns[0], rest)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        output = _MARKS.sub("", output)
        if self.join_lines:
            output = "".join(output.splitlines())
        return self.rouge(output, reference)


def list_of(row: dict[str, Any], field: str, where: str) -> list[str]:
    """The turns or their speakers: at least two texts."""
    found = row.get(field)
    if not isinstance(found, list | tuple) or len(found) < 2 or not all(isinstance(each, str) for each in found):
        shown = f"got {found!r:.80}" if field in row else f"it has: {', '.join(row)}"
        raise ConfigError(f"{where}: field {field!r} must be a list of at least 2 texts, {shown}")
    return list(found)
