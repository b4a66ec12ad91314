"""GSM8K with chain-of-thought examples: school mathematics whose last number is the answer."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from kvexp.tasks.base import Example, QuestionTask, row_id
from kvexp.tasks.data import text
from kvexp.util import ConfigError, path_of

ROOT = Path(__file__).resolve().parents[2]
_UNSIGNED = re.compile(r"\d*\.?\d+")
_SIGNED = re.compile(r"(?:(?<![\w.)])-)?\d*\.?\d+")  # the minus of 5-3 is none of a number


@dataclass(frozen=True, kw_only=True)
class GSM8K(QuestionTask):
    """Solve a word problem after worked examples; rows {"question", "answer"}, 1,319 in the test split
    (Cobbe et al., arXiv:2110.14168).

    The examples are the hardest of chain-of-thought-hub (github.com/FranxYao/chain-of-thought-hub, MIT; Fu et al.,
    arXiv:2210.00720): a text of "Question: ..." blocks parted by empty lines, of which the first `shots` are used. The
    file here has the 8 of nine reasoning steps and the 2 shorter ones that PQCache (arXiv:2407.12820) adds, which
    makes prompts of 3.7k Llama tokens. An answer counts up to the next "Question:"; its last number, without commas,
    must equal the last one of the solution. No instruction, no chat template (`chat_wrap`).

    What PQCache's script does besides, switches that are off here: separator="\\n" (no empty line in front of the
    question), signed=false (-10 and 10 are the same; two solutions are negative).
    """

    name: ClassVar[str] = "gsm8k_cot"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)

    hub_id: str = "openai/gsm8k"
    hub_config: str | None = "main"
    split: str = "test"
    prompt_file: str = "kvexp/conf/task/gsm8k_cot.txt"
    shots: int = 8
    separator: str = "\n\n"
    signed: bool = True
    chat_wrap: bool = False
    max_new_tokens: int = 256
    truncate: str = "skip"

    @property
    def uses_chat_template(self) -> bool:  # type: ignore[override]
        return self.chat_wrap

    @cached_property
    def lesson(self) -> str:
        """The worked examples in front of every question; read once, so that they are those of the fingerprint."""
        path = path_of(self.prompt_file, "task.prompt_file")
        path = path if path.exists() else ROOT / path
        try:
            blocks = [
                block.strip("\n") for block in re.split(r"\n{2,}", path.read_text(encoding="utf-8")) if block.strip()
            ]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"task.prompt_file={self.prompt_file}: cannot read it: {error}") from error
        if len(blocks) < self.shots:
            raise ConfigError(f"task.shots={self.shots}, but task.prompt_file={self.prompt_file} has {len(blocks)}")
        return "\n\n".join(blocks[: self.shots])

    def example(self, row: dict[str, Any], where: str) -> Example:
        question = text(row, "question", where, "data_files")
        solution = text(row, "answer", where, "data_files")
        if last_number(solution, self.signed) is None:
            raise ConfigError(f"{where}: field 'answer' has no number to compare with")
        asked = f"{self.separator}Question: {question}\n" if self.shots else f"Question: {question}\n"
        return self.ask(row_id(row, "id", question), ("", self.lesson, ""), asked, solution)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        """100 if the last number of the answer is the solution's."""
        found = last_number(output.partition("\nQuestion:")[0], self.signed)
        return {"accuracy": 100.0 * (found == last_number(reference, self.signed))}

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {hashlib.sha256(self.lesson.encode()).hexdigest()[:16]}"

    def check_options(self) -> None:
        super().check_options()
        if self.shots < 0:
            raise ConfigError(f"task.shots must be at least 0, got {self.shots}")
        if self.shots == 0 and self.question == "after_eviction":
            raise ConfigError("task.question=after_eviction needs a context to evict from: set task.shots to 1 or more")
        self.lesson  # noqa: B018  # a file that cannot be read shows here


def last_number(words: str, signed: bool = True) -> float | None:
    """The last number of a text, commas left out; None if there is none."""
    found = (_SIGNED if signed else _UNSIGNED).findall(words.replace(",", ""))
    return float(found[-1]) if found else None
