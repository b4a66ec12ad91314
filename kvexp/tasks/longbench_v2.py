"""LongBench v2 (Bai et al., arXiv:2412.15204): multiple choice about texts of 8k to 2M words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from kvexp.tasks.base import Example, Positive, QuestionTask, Truncation, row_id
from kvexp.tasks.data import Members, text
from kvexp.util.errors import ConfigError

# prompts/0shot.txt of github.com/THUDM/LongBench (MIT) at commit 2e00731, to the letter.
BEFORE = "Please read the following text and answer the question below.\n\n<text>\n"
AFTER = (
    "\n</text>\n\nWhat is the correct answer to this question: {question}\nChoices:\n(A) {A}\n(B) {B}\n(C) {C}\n(D) {D}"
    '\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
)
_SENTENCES = (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])")


def chosen(output: str) -> str | None:
    """The letter of the sentence that the prompt dictates, asterisks left out; None where it is not there."""
    said = output.replace("*", "")
    matches = (re.search(pattern, said) for pattern in _SENTENCES)
    return next((match.group(1) for match in matches if match), None)


def last_letter(output: str) -> str | None:
    """The last A, B, C or D that stands alone."""
    letters = re.findall(r"(?<![A-Za-z])[A-D](?![A-Za-z'\u2019])", output)
    return letters[-1] if letters else None


@dataclass(frozen=True, kw_only=True)
class LongBenchV2(QuestionTask):
    """Questions with four choices, in LongBench v2's columns, whose answers are generated; 503 rows.

    `data_files`: its data.json; without it that file is fetched from the hub at the pinned `revision` (465 MB). The
    official prompt without reasoning; a prompt too long loses its middle, to 120,000 tokens there
    (`max_prompt_tokens`), here to what the model holds. Rows of which more than half of the prompt would go are
    skipped with that reason, as what is asked for may be gone with it; cut=any asks them too.

    `accuracy` is the official rule: the letter in the sentence that the prompt dictates, none is wrong. `or_letter`
    takes the last lone letter where that sentence is not there. A row's info: difficulty, length_class, domain.

    Its letters are not compared by log-likelihood, as lm-eval's longbench2 does: one token follows the prefill, and its
    probability comes from the full cache, whatever was evicted.
    """

    name: ClassVar[str] = "longbench_v2"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "or_letter")

    hub_id: str = "zai-org/LongBench-v2"
    revision: str | None = "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9"
    split: str = "train"
    cut: Literal["half", "any"] = "half"
    truncate: Truncation = "halves"
    max_new_tokens: Positive = 128

    @property
    def source(self) -> Members:
        return Members(**vars(super().source), member="data", hub_file="data.json")

    def example(self, row: dict[str, Any], where: str) -> Example:
        context, question = (text(row, name, where, "data_files").strip() for name in ("context", "question"))
        choices = {letter: text(row, f"choice_{letter}", where, "data_files").strip() for letter in "ABCD"}
        answer = text(row, "answer", where, "data_files")
        if answer not in choices:
            raise ConfigError(f"{where}: field 'answer' must be A, B, C or D, got {answer!r:.60}")
        example = self.ask(
            row_id(row, "_id", context, question),
            (BEFORE, context, ""),
            AFTER.format(question=question, **choices),
            answer,
        )
        given = {"difficulty": row.get("difficulty"), "length_class": row.get("length"), "domain": row.get("domain")}
        return replace(example, info={name: value for name, value in given.items() if value is not None})

    def fit(self, example: Example, count: Callable[..., int], room: int) -> Example:
        most = min(room - self.max_new_tokens, self.max_prompt_tokens or room)
        tokens = count(example.prompt + example.question)
        if self.cut == "any" or tokens <= 2 * most:
            return example
        why = f"{tokens} tokens, of which {max(most, 0)} would be left: task.cut=any asks it all the same"
        return replace(example, skipped=why)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        said = output.strip()
        official = chosen(said)
        return {
            "accuracy": 100.0 * (official == example.reference),
            "or_letter": 100.0 * ((official or last_letter(said)) == example.reference),
        }
