"""XSum: a BBC article in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvexp.tasks.summarization import Summarization


@dataclass(frozen=True, kw_only=True)
class XSum(Summarization):
    """Summarize a news article in one sentence; rows {"document", "summary", "id"}, 11,332 in the validation split.

    Defaults are Keyformer's protocol (arXiv:2403.09054), with the switches of CNNDailyMail. H2O's summarization
    script (arXiv:2306.14048) is template=helm, stop='###', max_new_tokens=64, limit=100 on its own 1000 rows, with
    sampling at temperature 0.3; it scores with the package `rouge` (no stemmer), here as everywhere rouge_score.
    """

    name: ClassVar[str] = "xsum"

    hub_id: str = "EdinburghNLP/xsum"
    revision: str | None = "7d4d486c2f8ef850b1a11aead99b894ff3dd7da9"
    instruction: str = "Provide one sentence summary of the following news article:"
    instruction_after: str = "Provide one sentence summary of the news article above."
    input_field: str = "document"
    reference_field: str = "summary"
    max_prompt_tokens: int | None = 1920
