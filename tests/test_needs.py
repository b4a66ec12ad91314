"""What a method declares to need is computed, and nothing else is."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from tiny import Streams, run_core
from torch import Tensor

from kvexp.core import Budget, CacheConfig, EvictionContext, Method, Needs
from kvexp.core import eviction_layer as layer_module
from kvexp.errors import ConfigError
from kvexp.methods import CAOTE, H2O, KeyDiff, KNorm


@dataclass(frozen=True)
class Watcher(Method):
    """Keeps the newest, and writes down (position or -1, attention) of all slots at every eviction."""

    seen: tuple[list[tuple[Tensor, Tensor]], ...] = ()

    @property
    def needs(self) -> Needs:
        return Needs(newest_attention=True)

    def priority(self, ctx: EvictionContext) -> Tensor:
        assert ctx.newest_attention is not None
        self.seen[0].append((ctx.positions.masked_fill(~ctx.held(), -1), ctx.newest_attention))
        return ctx.positions.float()


@pytest.mark.parametrize("method", [H2O(), KNorm(), KeyDiff(), CAOTE(alpha="accumulated")], ids=lambda m: m.name)
def test_an_undeclared_need_is_not_computed_and_leaves_the_fast_step(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("computed")

    monkeypatch.setattr(layer_module, "newest_attention", refuse)
    seen = run_core(CacheConfig(method, Budget(tokens=6)), Streams.random(3, 12), (9, 1, 1, 1))
    assert seen.states[0].fast_path_allowed == (method.name != "knorm")  # its score comes with the key


def test_a_declared_need_takes_the_ordinary_step() -> None:
    seen = run_core(CacheConfig(CAOTE(), Budget(tokens=6)), Streams.random(3, 12), (9, 1, 1, 1))
    assert not seen.states[0].fast_path_allowed


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
def test_the_newest_attention_is_each_query_heads_own(mode: str) -> None:
    """By position, against a softmax written here: padded rows, a chunked prompt, and steps after evictions."""
    notes: list[tuple[Tensor, Tensor]] = []
    streams, mask = Streams.random(5, 15).padded([3, 0])
    method = Watcher(seen=(notes,))
    run_core(CacheConfig(method, Budget(tokens=5), mode=mode), streams, (4, 7, 1, 1, 2), mask=mask, prompt=11)  # type: ignore[arg-type]
    assert len(notes) == 4  # the prompt's end and three forwards after it
    for (positions, attention), end in zip(notes, (11, 12, 13, 15), strict=True):
        assert attention.shape[:3] == (2, 3, 5)
        for row, head in product(range(2), range(3)):
            slots = (positions[row, head] >= 0).nonzero().flatten()
            columns = positions[row, head, slots] + (3, 0)[row]
            x = streams.q[0, row, head * 5 : head * 5 + 5, end - 1] @ streams.k[0, row, head, columns].T
            want = torch.softmax(x * streams.q.shape[-1] ** -0.5, dim=-1)
            torch.testing.assert_close(attention[row, head][:, slots].double(), want)
            torch.testing.assert_close(attention[row, head].sum(-1).double(), torch.ones(5).double())


def test_needs_that_are_no_declaration_are_refused() -> None:
    class Undeclared(Method):
        needs = "values"  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"Undeclared\.needs must be a property .* that gives a Needs, got 'values'"):
        CacheConfig(Undeclared(), Budget(tokens=4))
