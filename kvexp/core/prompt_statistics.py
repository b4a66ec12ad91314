"""What methods need of queries, gathered forward by forward until the evictions that go by it."""

from __future__ import annotations

from torch import Tensor

from kvexp.core.attention import AttentionInputs
from kvexp.core.last_queries import LastQueries
from kvexp.core.local_attention import LocalAttention
from kvexp.core.needs import Needs
from kvexp.core.query_statistics import QueryStatistics
from kvexp.core.sequence import SequenceState


class PromptStatistics:
    """Statistics of one layer's queries, each None until the first forward that adds to it, and where none needs it.

    queries: moments over the prompt's queries; local: attention within chunks of the prompt; last: the newest queries.
    """

    def __init__(self) -> None:
        self.queries: QueryStatistics | None = None
        self.local: LocalAttention | None = None
        self.last: LastQueries | None = None

    def add(self, inputs: AttentionInputs, needs: Needs, window: int, sequence: SequenceState) -> None:
        """Add the queries of one forward, as the method needs them; window: newest queries that others need."""
        if needs.queries_after is not None and sequence.in_prompt:
            if self.queries is None:
                self.queries = QueryStatistics(needs.queries_after, inputs)
            self.queries.add(inputs)
        if needs.local_chunks is not None and sequence.in_prompt:
            if self.local is None:
                self.local = LocalAttention(needs.local_chunks, inputs)
            self.local.add(inputs, complete=sequence.prompt_complete)
        number = max(needs.last_queries, window)
        if number:
            if self.last is None:
                self.last = LastQueries(number, inputs)
            self.last.add(inputs)

    def forget_prompt(self) -> None:
        """Drop what was gathered of the prompt alone."""
        self.queries = self.local = None

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        for gathered in (self.queries, self.last, self.local):
            if gathered is not None:
                gathered.select_rows(rows)
