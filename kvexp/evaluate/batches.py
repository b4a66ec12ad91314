"""Which examples go through the model together: always the same ones, however often a run was stopped on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvexp.tasks import Example

SHARED = 8  # questions about one context that are answered from one prefill before their rows are written

Batch = list[tuple[int, Example]]


def due(examples: Sequence[Example], size: int, shared: int, lacks: Callable[[Example], bool]) -> list[Batch]:
    """The batches of the whole task in which an example is missing.

    Cut from all examples and not from the missing ones: the last digits of a float32 sum go by the rows of a batch, and
    a run that goes on is to write what it would have written undisturbed. Examples of such a batch that have their row
    are computed once more and not written again.
    """
    batches_ = batches(list(enumerate(examples)), size, shared)
    return [batch for batch in batches_ if any(lacks(example) for _, example in batch)]


def batches(todo: Sequence[tuple[int, Example]], size: int, shared: int) -> Iterator[Batch]:
    """Batches of `size` examples, or up to `shared` where more questions about the last one's context follow."""
    batch: Batch = []
    for item in todo:
        same = bool(batch) and bool(item[1].question) and item[1].prompt == batch[-1][1].prompt
        if len(batch) >= (max(size, shared) if same else size):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch
