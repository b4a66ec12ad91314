"""What a method declares to need is computed, and nothing else is."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from tiny import CONFIGS, Streams, run_core, stock, tiny
from torch import Tensor

from kvexp.core import Budget, CacheConfig, EvictionContext, Method, Needs, RoPE, eviction
from kvexp.core import statistics as query_statistics
from kvexp.core.method import output_norms
from kvexp.core.statistics import QueryStatistics
from kvexp.hf import EvictionCache, patch_model
from kvexp.hf.patch import NAMES, output_factors
from kvexp.hf.traits import num_kv_heads
from kvexp.methods import CAOTE, H2O, RKV, ExpectedAttention, KeyDiff, KNorm
from kvexp.util.errors import ConfigError


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
def test_an_undeclared_need_is_not_computed(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("computed")

    monkeypatch.setattr(eviction, "newest_attention", refuse)
    monkeypatch.setattr(eviction, "QueryStatistics", refuse)
    monkeypatch.setattr(eviction, "LastQueries", refuse)
    run_core(CacheConfig(method, Budget(tokens=6)), Streams.random(3, 12), (9, 1, 1, 1))


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


@dataclass(frozen=True)
class QueryWatcher(Method):
    """Keeps the newest, and writes down the statistics of the prompt's queries."""

    seen: tuple[list[QueryStatistics | None], ...] = ()

    @property
    def needs(self) -> Needs:
        return Needs(queries_after=2)

    def priority(self, ctx: EvictionContext) -> Tensor:
        self.seen[0].append(ctx.query_statistics)
        return ctx.positions.float()


@pytest.mark.parametrize("widths", [(11, 1), (1, 4, 6, 1), (3,) + (1,) * 9])
def test_query_statistics_do_not_depend_on_chunks_or_padding(
    widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean and covariance of a row's own queries, from its third token to the prompt's end, whatever came together."""
    monkeypatch.setattr(query_statistics, "BLOCK", 4)
    notes: list[QueryStatistics | None] = []
    streams, mask = Streams.random(5, 12).padded([3, 0])
    run_core(CacheConfig(QueryWatcher(seen=(notes,)), Budget(tokens=5)), streams, widths, mask=mask, prompt=11)
    assert len(notes) == 2 and notes[0] is notes[1]  # evicts while decoding: they stay, and no decoded query is in them
    made = notes[0]
    assert made is not None and made.count.tolist() == [6, 9]
    mean, covariance = made.at(torch.tensor([8, 11]), 3)
    for row, first in enumerate((5, 2)):
        queries = streams.q[0, row, :, first:11].unflatten(0, (3, 5))  # [H, G, n, D]
        torch.testing.assert_close(mean[row].double(), queries.mean(2), rtol=1e-5, atol=1e-5)
        apart = queries - queries.mean(2, keepdim=True)
        want = apart.transpose(-1, -2) @ apart / apart.shape[2]
        torch.testing.assert_close(covariance[row].double(), want, rtol=1e-5, atol=1e-5)
    made.select_rows(torch.tensor([1, 1]))
    assert made.count.tolist() == [9, 9]


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_mean_rotation_is_the_mean_of_ropes_rotations(interleaved: bool) -> None:
    rope = RoPE(torch.tensor([1.0, 0.1, 0.01]), interleaved)
    positions, vectors = torch.tensor([[4, 5, 9]]), torch.randn(1, 2, 1, 7, generator=torch.Generator().manual_seed(1))
    turned = [rope.rotate_by(vectors, torch.full((1, 1, 1), place)) for place in (4, 5, 9)]
    rotation = query_statistics.mean_rotation(rope, positions, 7)[:, None]
    torch.testing.assert_close(vectors @ rotation.transpose(-1, -2), torch.stack(turned).mean(0))


def test_rope_that_changes_with_length_is_refused_for_query_statistics() -> None:
    model = patch_model(copy.deepcopy(stock("llama")))
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match="method expected_attention, which turns queries back, cannot work with rope"):
        EvictionCache(model, ExpectedAttention(), Budget(tokens=9))


@dataclass(frozen=True)
class LogitsWatcher(Method):
    """Keeps the newest, and writes down (position or -1, logits of the last four queries) at every eviction."""

    seen: tuple[list[tuple[Tensor, Tensor]], ...] = ()

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=4)

    def priority(self, ctx: EvictionContext) -> Tensor:
        assert ctx.last_logits is not None
        self.seen[0].append((ctx.positions.masked_fill(~ctx.held(), -1), ctx.last_logits))
        return ctx.positions.float()


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
def test_the_last_queries_see_what_is_held_and_not_younger(mode: str) -> None:
    """By position, against products written here: a row of three tokens, a chunked prompt, steps after evictions."""
    notes: list[tuple[Tensor, Tensor]] = []
    streams, mask = Streams.random(5, 15).padded([8, 0])
    method = LogitsWatcher(seen=(notes,))
    run_core(CacheConfig(method, Budget(tokens=5), mode=mode), streams, (4, 6, 1, 1, 1, 2), mask=mask, prompt=11)  # type: ignore[arg-type]
    assert len(notes) == 4
    for (positions, logits), end in zip(notes, (11, 12, 13, 15), strict=True):
        assert logits.shape[:4] == (2, 3, 5, 4)
        for row, head, back in product(range(2), range(3), range(1, 5)):
            query, first = end - back, (8, 0)[row]
            places, got = positions[row, head], logits[row, head, :, -back]
            sees = (places >= 0) & (places <= query - first)
            assert torch.equal(got.isfinite(), sees.expand(5, -1)), (row, back)
            keys = streams.k[0, row, head, places[sees] + first]
            want = streams.q[0, row, head * 5 : head * 5 + 5, query] @ keys.T * streams.q.shape[-1] ** -0.5
            torch.testing.assert_close(got[:, sees].double(), want)


def test_last_queries_and_renumbered_positions_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"method rkv compares earlier queries .* set cache\.positions=original"):
        CacheConfig(RKV(), Budget(tokens=20), positions="renumbered")


def test_needs_that_are_no_declaration_are_refused() -> None:
    class Undeclared(Method):
        needs = "values"  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"Undeclared\.needs must be a property .* that gives a Needs, got values"):
        CacheConfig(Undeclared(), Budget(tokens=4))


@pytest.mark.parametrize("family", CONFIGS)
def test_the_factors_keep_the_size_of_a_projected_value_in_every_family(family: str) -> None:
    """A value put into one query head's place, through the module itself less what it makes of nothing."""
    model = tiny(family)
    kv_heads = num_kv_heads(model.config)
    attentions = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    for attention, factors in zip(attentions, output_factors(model), strict=True):
        projection = next(getattr(attention, name) for name in NAMES if hasattr(attention, name))
        group, width = factors.shape[1], factors.shape[-1]
        values = torch.randn(1, kv_heads, 4, width, generator=torch.Generator().manual_seed(2))
        got = output_norms(values, factors)  # [1, H, G, 4]
        for h, g in product(range(kv_heads), range(group)):
            heads = torch.zeros(4, kv_heads * group, width)
            heads[:, h * group + g] = values[0, h]
            with torch.no_grad():
                out = projection(heads.flatten(1)) - projection(torch.zeros(1, kv_heads * group * width))
            torch.testing.assert_close(got[0, h, g], out.norm(dim=-1), rtol=1e-4, atol=1e-5)


def test_factors_are_made_once_shared_by_forks_and_follow_the_weights() -> None:
    model = patch_model(copy.deepcopy(stock("llama")))
    method = ExpectedAttention(n_sinks=1, weight="output")
    cache = EvictionCache(model, method, Budget(tokens=5))
    with torch.no_grad():
        model(torch.arange(9)[None], past_key_values=cache)
    first = output_factors(model)
    assert all(mine is theirs for mine, theirs in zip(first, output_factors(model), strict=True))
    assert all(
        state.output_factors is factor for state, factor in zip(cache.fork([0]).layer_states, first, strict=True)
    )
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(2)
    torch.testing.assert_close(output_factors(model)[0].abs(), 2 * first[0].abs())
    plain = EvictionCache(model, ExpectedAttention(n_sinks=1), Budget(tokens=5))
    assert all(state.output_factors is None for state in plain.layer_states)


def test_a_projection_that_is_no_matrix_of_numbers_is_refused() -> None:
    model = patch_model(copy.deepcopy(stock("llama")))
    model.model.layers[1].self_attn.o_proj = torch.nn.Identity()
    with pytest.raises(ConfigError, match=r"projection of this llama model is a Identity whose weight is no"):
        EvictionCache(model, ExpectedAttention(weight="output"), Budget(tokens=9))


def test_the_size_of_projected_values_needs_a_model() -> None:
    with pytest.raises(ConfigError, match=r"make the cache with kvexp\.hf\.EvictionCache"):
        run_core(
            CacheConfig(ExpectedAttention(n_sinks=1, weight="output"), Budget(tokens=6)), Streams.random(3, 9), (9,)
        )
