"""Perplexity of a long text fed token by token under eviction, by position: StreamingLLM's experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvexp.tasks.base import Example, Task, longest_fit, row_id, word_ends
from kvexp.tasks.data import text
from kvexp.util import ConfigError


@dataclass(frozen=True, kw_only=True)
class Perplexity(Task):
    """Negative log-likelihood of a text; rows {"text"}, such as PG-19's test books (Rae et al., arXiv:1911.05507).

    The first `prefill_tokens` tokens (or a few less, up to the end of a word, or of a character
    in a script without spaces) are prefilled and evicted, all others up to
    `total_tokens` are fed one by one and judged, eviction going on (Xiao et al., arXiv:2309.17453, section 4.1). A
    ratio is one of the prefilled tokens; the paper's cache of fixed size is budget=tokens. Past what the model was
    built for it takes cache.beyond_context=true. `concatenate` makes one long text of all rows, an empty line between
    them. `nll` is the mean in nats per token, its exponential the perplexity; a row's info holds it per bucket of
    `bucket_tokens` positions, the first and the last of which may be shorter.
    """

    name: ClassVar[str] = "perplexity"
    metrics: ClassVar[tuple[str, ...]] = ("nll",)
    needs_nll: ClassVar[bool] = True
    only_nll: ClassVar[bool] = True
    uses_chat_template: ClassVar[bool] = False

    hub_id: str = "emozilla/pg19-test"
    split: str = "test"
    text_field: str = "text"
    prefill_tokens: int = 512
    total_tokens: int = 4096
    bucket_tokens: int = 512
    concatenate: bool = False
    truncate: str = "skip"
    max_new_tokens: int = 1

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self.concatenate:
            yield from super().rows()
            return
        whole = [text(row, self.text_field, where, "text_field") for where, row in super().rows()]
        if whole:
            yield f"the {len(whole)} texts of {self.source}", {self.text_field: "\n\n".join(whole)}

    def example(self, row: dict[str, Any], where: str) -> Example:
        words = text(row, self.text_field, where, "text_field")
        return Example(row_id({} if self.concatenate else row, "id", words), words, "", info={"from": where})

    def fit(self, example: Example, count: Callable[[str], int], room: int) -> Example:
        if self.total_tokens > room:
            raise ConfigError(
                f"task.total_tokens={self.total_tokens}, but the model holds {room} positions: lower it, or set "
                "cache.beyond_context=true to go on past them"
            )
        ends = [0, *word_ends(example.prompt)]
        words = example.prompt

        def tokens(n: int) -> int:
            return count(words[: ends[n]])

        first = longest_fit(tokens, self.prefill_tokens, len(ends) - 1)
        last = longest_fit(tokens, self.total_tokens, len(ends) - 1)
        if first < 1 or last <= first:
            why = f"too short to prefill task.prefill_tokens={self.prefill_tokens} and judge some tokens"
            return replace(example, skipped=f"{why}; lower it, or set task.concatenate=true")
        prompt, rest = words[: ends[first]], words[ends[first] : ends[last]]
        return replace(example, prompt=prompt, body=prompt, continuation=rest, info={"prefilled": tokens(first)})

    def score_nll(self, logprobs: list[float], example: Example) -> tuple[dict[str, float], dict[str, Any]]:
        """Overall, and per bucket [from, to) of positions, where prefilled tokens count as positions 0, 1, ..."""
        start, size = int(example.info["prefilled"]), self.bucket_tokens
        buckets = []
        for low in range(start // size * size, start + len(logprobs), size):
            inside = logprobs[max(low - start, 0) : max(low - start, 0) + min(low + size - start, size)]
            at = max(low, start)
            buckets.append({"from": at, "to": at + len(inside), "nll": -sum(inside) / len(inside)})
        return super().score_nll(logprobs, example)[0], {"buckets": buckets}

    def check_options(self) -> None:
        super().check_options()
        for option in ("prefill_tokens", "bucket_tokens"):
            if getattr(self, option) < 1:
                raise ConfigError(f"task.{option} must be at least 1, got {getattr(self, option)}")
        if self.total_tokens <= self.prefill_tokens:
            raise ConfigError(
                f"task.total_tokens={self.total_tokens} must be above task.prefill_tokens={self.prefill_tokens}"
            )
        if self.truncate != "skip":
            raise ConfigError(f"task.truncate must be skip for perplexity, got {self.truncate!r}: it sets its length")
