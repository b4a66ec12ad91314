"""Continue a story: the first part is the prompt, the rest is what really came next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvexp.errors import ConfigError
from kvexp.tasks.base import Example, RougeTask, Task, row_id
from kvexp.tasks.data import text
from kvexp.tasks.lengths import word_ends


@dataclass(frozen=True, kw_only=True)
class Stories(RougeTask):
    """Continue a text; rows {"text"}, as in TinyStories (Eldan and Li, arXiv:2305.07759).

    The first int(prompt_share * words) words, at least one, are the prompt, all of it body; the others, at most
    `continuation_words` of them, are the continuation, which begins with the white space before its first word. Of a
    text in a script without spaces (Chinese, Japanese, Thai), every character is a word. ROUGE
    compares the answer with the continuation; with `nll` the runner also measures the continuation's negative
    log-likelihood. A prompt cut at its end would not lead to the continuation: truncate must be skip. With `nll` a row
    is skipped too where the model cannot hold prompt and continuation: that of fewer words would be another number.
    """

    name: ClassVar[str] = "stories"

    hub_id: str = "roneneldan/TinyStories"
    revision: str | None = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
    text_field: str = "text"
    id_field: str = "id"
    prompt_share: float = 0.5
    continuation_words: int | None = None
    nll: bool = True
    truncate: str = "skip"

    @property
    def needs_nll(self) -> bool:  # type: ignore[override]
        return self.nll

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*Task.metrics, "nll") if self.nll else Task.metrics

    def example(self, row: dict[str, Any], where: str) -> Example:
        story = text(row, self.text_field, where, "text_field").strip()
        ends = word_ends(story)
        if len(ends) < 2:
            name = row_id(row, self.id_field, story)
            return Example(name, "", "", skipped="a story of one word has nothing to continue")
        words = min(max(1, int(self.prompt_share * len(ends))), len(ends) - 1)
        last = len(ends) if self.continuation_words is None else min(len(ends), words + self.continuation_words)
        prompt, continuation = story[: ends[words - 1]], story[ends[words - 1] : ends[last - 1]]
        name = row_id(row, self.id_field, prompt, continuation)
        return Example(name, prompt, continuation.strip(), continuation)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return self.rouge(output, reference)

    def check_options(self) -> None:
        super().check_options()
        if not 0 < self.prompt_share < 1:
            raise ConfigError(f"task.prompt_share must be between 0 and 1, both excluded, got {self.prompt_share}")
        if self.continuation_words is not None and self.continuation_words < 1:
            raise ConfigError(f"task.continuation_words must be at least 1, got {self.continuation_words}")
        if self.truncate != "skip":
            raise ConfigError(
                f"task.truncate must be skip for stories, got {self.truncate!r}: "
                "a story cut short does not lead to its continuation; lower task.prompt_share instead"
            )
