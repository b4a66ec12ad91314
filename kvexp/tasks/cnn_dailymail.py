"""CNN/DailyMail 3.0.0: highlights of a news article."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvexp.tasks.summarization import Summarization


@dataclass(frozen=True, kw_only=True)
class CNNDailyMail(Summarization):
    """Summarize a news article; rows {"article", "highlights", "id"}, 13,368 in the validation split.

    The protocol of Keyformer (Adnan et al., arXiv:2403.09054) and of MLPerf's GPT-J: Alpaca prompt, at most 1920
    prompt and 128 new tokens (beams and dtype belong to generation and model). What the Keyformer release does
    besides, each a switch that is off here: sample=with_replacement with limit=1000 (957 distinct rows),
    truncate=right (long articles lose "### Response:"), pad_to=1920 (pads count towards the budget), join_lines=true.
    Its min_length=30 counts the prompt and so does nothing: min_new_tokens is 0.
    """

    name: ClassVar[str] = "cnn_dailymail"

    hub_id: str = "abisee/cnn_dailymail"
    hub_config: str | None = "3.0.0"
    revision: str | None = "96df5e686bee6baa90b8bee7c28b81fa3fa6223d"
    instruction: str = "Summarize the following news article:"
    instruction_after: str = "Summarize the news article above."
    input_field: str = "article"
    reference_field: str = "highlights"
    max_prompt_tokens: int | None = 1920
