"""Attention inside chunks of a prompt does not depend on the pieces, the padding or the batch the prompt comes in."""

from __future__ import annotations

import pytest
import torch
from test_layer_budgets import LENGTHS, PROMPTS, kept
from tiny import tiny
from torch import Tensor

from kvexp.core import Budget, EvictionContext, Needs
from kvexp.core.local_attention import LocalChunks
from kvexp.errors import ConfigError
from kvexp.generate import pad_left
from kvexp.methods import Compactor
from kvexp.methods.compactor import leverages, sketch_matrix, standardised
from kvexp.models import EvictionCache


class Noting(Compactor):
    """Compactor, which puts down the sums it is given."""

    seen: list[Tensor] = []  # noqa: RUF012  (of all layers)

    @property
    def needs(self) -> Needs:
        return Needs(local_chunks=LocalChunks(7, 3, 2), rope=True)

    def priority(self, ctx: EvictionContext) -> Tensor:
        assert ctx.local_attention is not None
        self.seen.append(ctx.local_attention)
        return super().priority(ctx)


def sums(rows: list[int], piece: int | None = None) -> Tensor:
    """[L, B, H, S] of these prompts, padded on the left and fed in pieces."""
    Noting.seen.clear()
    model, (ids, mask) = tiny("llama"), pad_left([PROMPTS[row] for row in rows], 0, "cpu")
    cache = EvictionCache(model, Noting(), Budget(tokens=20), prompt_tokens=ids.shape[1])
    with torch.inference_mode():
        for start in range(0, ids.shape[1], piece or ids.shape[1]):
            end = min(start + (piece or ids.shape[1]), ids.shape[1])
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, start:end]
            model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
            )
    return torch.stack(Noting.seen)


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("piece", [None, 1, 5, 40])
def test_pieces_padding_and_batch(row: int, piece: int | None) -> None:
    together, alone = sums([0, 1, 2], piece), sums([row])
    torch.testing.assert_close(together[:, row, :, -LENGTHS[row] :], alone[:, 0], rtol=1e-4, atol=1e-5)


def test_every_chunk_gives_away_as_much_as_it_has_queries() -> None:
    """Chunks of 7 from the fourth token on, the last one of fewer; the first 3 and the last 2 tokens are in none."""
    made = sums([2])[:, 0]  # [L, H, 47]
    assert torch.equal(made[..., :3], torch.zeros_like(made[..., :3])) and not made[..., -2:].any()
    inside = made[..., 3:-2]
    for chunk in inside.split(7, dim=-1):
        torch.testing.assert_close(chunk.sum(-1), torch.full(chunk.shape[:2], float(chunk.shape[-1])))


def test_a_chunk_looks_ahead() -> None:
    """The first token of a chunk gets more from those behind it than a causal mask would let it give."""
    model, tokens = tiny("llama"), 14
    cache = EvictionCache(model, Noting(), Budget(tokens=tokens - 1, counts_self=False))
    Noting.seen.clear()
    with torch.inference_mode():
        model(torch.tensor([PROMPTS[0][:tokens]]), past_key_values=cache, use_cache=True)
    last = Noting.seen[0][0, :, 9]  # of the chunk 3 … 9, causally seen by its own query alone
    assert (last > 1).any() or (Noting.seen[0][0, :, 3:10].argmax(-1) == 6).any()


def test_leverage_of_an_outlier_is_near_1_and_sums_to_the_rank() -> None:
    keys = torch.randn(2, 40, 6, generator=torch.Generator().manual_seed(3))
    keys[:, 11] *= 100
    made = leverages(keys, sketch_matrix(torch.tensor([3, 3]), 0, 2, 6, 6)[0])
    assert (made[:, 11] > 0.9).all() and made.argmax(-1).tolist() == [11, 11]
    assert torch.allclose(made.sum(-1), torch.full((2,), 6.0).double(), atol=0.1)
    plain = standardised(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert plain.mean().abs() < 1e-6 and plain.std() == pytest.approx(1.0)


def test_draws_go_by_seed_and_layer_and_are_standard_normal() -> None:
    draws = sketch_matrix(torch.tensor([1, 2]), 0, 3, 50, 40) * 40**0.5
    assert draws.mean().abs() < 0.02 and draws.std() == pytest.approx(1.0, abs=0.02)
    assert torch.equal(sketch_matrix(torch.tensor([2]), 0, 3, 50, 40)[0] * 40**0.5, draws[1])
    assert not torch.equal(sketch_matrix(torch.tensor([2]), 1, 3, 50, 40)[0] * 40**0.5, draws[1])


def test_a_prompt_that_is_all_ends_keeps_them() -> None:
    cache = EvictionCache(tiny("llama"), Compactor(), Budget(tokens=13))
    with torch.inference_mode():
        tiny("llama")(torch.tensor([PROMPTS[0][:14]]), past_key_values=cache, use_cache=True)
    for heads in kept(cache, 0):
        for head in heads:
            assert {*range(8), 11, 12, 13} <= set(head) and len(head) == 12


def test_what_cannot_be_is_refused() -> None:
    for wrong in ({"chunk": 0}, {"sketch": 0}, {"n_sinks": -1}, {"n_recent": -1}, {"blending": -0.5}):
        with pytest.raises(ConfigError, match="must be at least"):
            Compactor(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1 token"):
        LocalChunks(0)
