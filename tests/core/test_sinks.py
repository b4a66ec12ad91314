"""Softcapped logits and attention sinks against transformers' own attention, wherever a probability is computed.

Eviction step by step: tests/methods/test_reference.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracles
import pytest
import torch
from tiny import Streams, run_core, scores_of
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss

from kvexp.core import (
    AttentionParams,
    AttentionScoreSpec,
    Budget,
    CacheConfig,
    EvictionContext,
    Method,
    Needs,
    Noise,
    SequenceState,
    triton_ops,
)
from kvexp.core.attention import AttentionInputs, compute_attention
from kvexp.core.budget_shares import CakeLayers
from kvexp.core.method import SinkScore
from kvexp.core.observe import ColumnSums, ObservedRows, column_sums_by
from kvexp.core.row_mask import MaskedLayer
from kvexp.core.second_pass import inputs_near, largest_attention
from kvexp.methods import CAKE, H2O, TOVA, Keyformer, Random, SnapKV
from kvexp.util.errors import CacheError, ConfigError

HEADS, GROUP, DIM = 3, 5, 7
SCALE, CAP = DIM**-0.5, 1.3
SINKS = torch.linspace(3, -2, HEADS * GROUP, dtype=torch.float64)
NEAR = {"gemma2": 1e-6, "gpt_oss": 1e-12}  # Gemma 2 takes its softmax in float32, whatever the dtype
FAMILIES = {"gemma2": {"softcap": CAP}, "gpt_oss": {"sinks": SINKS}}


def params_of(family: str, **more: Any) -> AttentionParams:
    return AttentionParams(SCALE, **FAMILIES[family], **more)


def theirs(family: str, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Output [B, H * G, Q, Dv] and probabilities [B, H * G, Q, S], of slots `seen` [B, 1, Q, S] bool."""
    module: Any = nn.Module()
    module.num_key_value_groups, module.sinks, module.head_dim = GROUP, SINKS.to(q.dtype), DIM
    mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf)
    function, more = (gemma2, {"softcap": CAP}) if family == "gemma2" else (gpt_oss, {})
    out, probabilities = function(module.eval(), q, k, v, mask, scaling=SCALE, dropout=0.0, **more)
    return out.transpose(1, 2), probabilities


def prompt_of(
    family: str, count: int, *, queries: int | None = None, dtype: torch.dtype = torch.float64, **more: Any
) -> tuple[AttentionInputs, tuple[Tensor, Tensor]]:
    """A batch of two prompts, the second padded by four columns, of which the last `queries` are asked; and theirs."""
    streams = Streams.random(97, count, heads=HEADS, group=GROUP, dim=DIM, dtype=dtype)
    q, k, v = (2 * streams.q[0])[:, :, -(queries or count) :], streams.k[0], streams.v[0]
    positions = torch.stack([torch.arange(count), torch.arange(count) - 4]).clamp_min(-1)
    params = params_of(family, **more)
    asked = positions[:, -q.shape[2] :]
    seen = (positions[:, None, None] >= 0) & (positions[:, None, None] <= asked[:, None, :, None])
    if params.sliding_window is not None:
        seen = seen & (positions[:, None, None] > asked[:, None, :, None] - params.sliding_window)
    inputs = AttentionInputs(
        q.unflatten(1, (HEADS, GROUP)), k, v, positions[:, None], asked, params, in_column_order=True
    )
    return inputs, theirs(family, q, k, v, seen | (asked < 0)[:, None, :, None])


def real(inputs: AttentionInputs, x: Tensor) -> Tensor:
    """x [B, .., Q, n] without the rows of padding queries."""
    return torch.cat([row[..., at >= 0, :].flatten() for row, at in zip(x, inputs.query_positions, strict=True)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("count", "queries", "window"), [(150, None, None), (150, 70, 20), (33, 1, None), (33, 1, 9)])
def test_outputs_are_transformers_own(family: str, count: int, queries: int | None, window: int | None) -> None:
    inputs, (out, _) = prompt_of(family, count, queries=queries, sliding_window=window)
    found = compute_attention(inputs).flatten(1, 2)
    torch.testing.assert_close(real(inputs, found), real(inputs, out), rtol=NEAR[family], atol=NEAR[family])
    plain = compute_attention(replace(inputs, params=AttentionParams(SCALE, window))).flatten(1, 2)
    assert float((real(inputs, plain) - real(inputs, out)).abs().max()) > 0.1  # without them it is another model


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_with_gradients_are_transformers_own(family: str) -> None:
    inputs, (out, _) = prompt_of(family, 40)
    query = inputs.query.clone().requires_grad_()
    found = compute_attention(replace(inputs, query=query))
    near = NEAR[family]
    torch.testing.assert_close(real(inputs, found.flatten(1, 2)), real(inputs, out), rtol=near, atol=near)
    found.square().sum().backward()
    step = torch.zeros_like(query)
    step[0, 1, 2, 30, 3] = 1e-6
    after, before = (compute_attention(replace(inputs, query=inputs.query + s)).square().sum() for s in (step, -step))
    assert query.grad is not None
    assert float((after - before) / 2e-6) == pytest.approx(float(query.grad[0, 1, 2, 30, 3]), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("queries", [None, 1])
def test_half_precision_is_as_near_as_theirs(family: str, dtype: torch.dtype, queries: int | None) -> None:
    inputs, (out, _) = prompt_of(family, 90, queries=queries, dtype=dtype)
    exact = replace(inputs, query=inputs.query.double(), keys=inputs.keys.double(), values=inputs.values.double())
    truth = real(inputs, compute_attention(exact).flatten(1, 2))
    ours, own = (real(inputs, x).double() for x in (compute_attention(inputs).flatten(1, 2), out))
    assert float((ours - truth).abs().max()) <= 1.2 * float((own - truth).abs().max())


def observed(spec: AttentionScoreSpec, inputs: AttentionInputs) -> ObservedRows:
    sequence = SequenceState(prompt_columns=inputs.keys.shape[2], max_new_tokens=5, seeds=(3, 4))
    sequence.advance(0, 2, inputs.keys.shape[2], None, torch.device("cpu"), 1)
    return ObservedRows.of(spec, inputs.query_positions, sequence, 0, 0)


@pytest.mark.parametrize("how", ["naive", "blocked", "tiles"])
@pytest.mark.parametrize(
    ("family", "sink"), [("gemma2", "applied"), ("gpt_oss", "applied"), ("gpt_oss", "renormalised")]
)
def test_column_sums_are_of_transformers_probabilities(family: str, sink: SinkScore, how: str) -> None:
    inputs, (_, probabilities) = prompt_of(family, 90)
    if sink == "renormalised":
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    spec = AttentionScoreSpec(last_rows=60, sink=sink)
    want = probabilities[:, :, -60:].sum(2).unflatten(1, (HEADS, GROUP)).sum(2)
    rows = observed(spec, inputs)
    if how == "tiles":
        sums = ColumnSums(inputs, rows)
        compute_attention(inputs, [sums])
        found = sums.sums
    else:
        found = column_sums_by(how, inputs, rows)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


def test_caches_that_share_a_prefill_do_not_share_sums_of_another_sink() -> None:
    inputs, (_, probabilities) = prompt_of("gpt_oss", 40)
    each = [ColumnSums(inputs, observed(AttentionScoreSpec(sink=sink), inputs)) for sink in ("applied", "renormalised")]  # type: ignore[arg-type]
    compute_attention(inputs, each)
    shares = probabilities.sum(-1, keepdim=True)
    for sums, rows in zip(each, (probabilities, probabilities / shares), strict=True):
        rows = rows * (inputs.query_positions >= 0)[:, None, :, None]
        want = rows.sum(2).unflatten(1, (HEADS, GROUP)).sum(2)
        torch.testing.assert_close(sums.sums.double(), want, rtol=1e-5, atol=1e-5)
    assert AttentionScoreSpec(sink="applied").sums_key != AttentionScoreSpec(sink="renormalised").sums_key


# -- what methods and budgets are told ---------------------------------------------------------------------------------


class Watching(Method):
    """Keeps the newest tokens, and writes down what it is told of the newest queries."""

    def __init__(self) -> None:
        self.told: list[tuple[EvictionContext, Tensor]] = []

    @property
    def needs(self) -> Needs:
        return Needs(newest_attention=True, last_queries=6)

    def priority(self, ctx: EvictionContext) -> Tensor:
        self.told.append((ctx, ctx.positions.clone()))
        return ctx.positions.float()


@pytest.mark.parametrize("sink", ["applied", "renormalised"])
@pytest.mark.parametrize("family", FAMILIES)
def test_methods_are_told_of_the_attention_as_the_sinks_are_counted(family: str, sink: SinkScore) -> None:
    """At the end of a prompt of 30, and at a step of one token over the 11 that stayed and itself."""
    streams, method = Streams.random(5, 31, batch=1, heads=HEADS, group=GROUP, dim=DIM), Watching()
    seen = run_core(CacheConfig(method, Budget(tokens=12), score_sink=sink), streams, (30, 1), params=params_of(family))
    for end, held, (ctx, positions) in zip((30, 31), (range(30), [*range(19, 31)]), method.told, strict=True):
        at = torch.tensor(held)
        q, k, v = streams.q[0][:, :, end - 1 : end], streams.k[0][:, :, at], streams.v[0][:, :, at]
        out, want = theirs(family, q, k, v, torch.ones(1, 1, 1, len(at), dtype=torch.bool))
        near = NEAR[family]
        torch.testing.assert_close(seen.out[end - 30][0][:, :, -1:], out, rtol=near, atol=near)
        if sink == "renormalised":
            want = want / want.sum(-1, keepdim=True)
        slots = positions[0].argsort(dim=-1)[:, None].expand(-1, GROUP, -1)
        assert ctx.newest_attention is not None and ctx.last_logits is not None
        told = ctx.newest_attention[0].gather(-1, slots).flatten(0, 1)
        torch.testing.assert_close(told.double(), want[0, :, 0].double(), rtol=1e-6, atol=1e-6)
        assert (ctx.sinks is None) == (family == "gemma2" or sink == "renormalised")
        newest = ctx.last_logits[0, :, :, -1].gather(-1, slots).flatten(0, 1)
        assert family == "gpt_oss" or float(newest.abs().max()) < CAP


def test_the_retained_attention_is_of_what_goes_to_tokens() -> None:
    """The newest twelve of thirty tokens stay, of which the next step's own slot is one."""
    streams = Streams.random(5, 31, batch=1, heads=HEADS, group=GROUP, dim=DIM)
    seen = run_core(CacheConfig(Watching(), Budget(tokens=12)), streams, (30, 1), params=params_of("gpt_oss"))
    every = torch.ones(1, 1, 1, 30, dtype=torch.bool)
    q, k, v = streams.q[0][:, :, 29:30], streams.k[0][:, :, :30], streams.v[0][:, :, :30]
    rows = theirs("gpt_oss", q, k, v, every)[1][0, :, 0]
    share = (rows[:, 19:].sum(-1) / rows.sum(-1)).mean()
    retained = seen.states[0].retained_attention
    assert retained is not None and float(retained) == pytest.approx(float(share), rel=1e-5)


@pytest.mark.parametrize("sink", ["applied", "renormalised"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cake_shares_layers_and_slots_by_the_models_attention(family: str, sink: SinkScore) -> None:
    prompt, window, budget = 160, 8, 90
    streams = Streams.random(8, prompt, layers=2, batch=1, heads=HEADS, group=GROUP, dim=DIM)
    streams.q[1] *= 3  # of which sinks take less
    causal = torch.ones(prompt, prompt, dtype=torch.bool).tril()[None, None]
    every, preferences = [], []
    for q, k, v in zip(streams.q, streams.k, streams.v, strict=True):
        rows = theirs(family, q, k, v, causal)[1][0]
        if sink == "renormalised":
            rows = rows / rows.sum(-1, keepdim=True)
        every.append(rows)
        last = [[dict(enumerate(query)) for query in head[-window:].tolist()] for head in rows]
        preferences.append(oracles.cake_preference(last, prompt))
    inputs = [AttentionInputs(
        q.unflatten(1, (HEADS, GROUP))[..., -window:, :], k, v, torch.arange(prompt)[None, None],
        torch.arange(prompt - window, prompt)[None], params_of(family),
    ) for q, k, v in zip(streams.q, streams.k, streams.v, strict=True)]  # fmt: skip
    sinks = None if sink == "renormalised" else inputs[0].params.sinks
    logits = [one.logits(slice(0, window), prompt) for one in inputs]
    found = [CakeLayers(observed=window).preference(x, [prompt], sinks)[0] for x in logits]
    assert found == pytest.approx(preferences, rel=100 * NEAR[family])
    shares = oracles.cake_budgets(budget, prompt, window, preferences)
    config = CacheConfig(CAKE(window=window), Budget(tokens=budget, counts_self=False), score_sink=sink)
    seen = run_core(config, streams, (prompt,), params=params_of(family))
    # One kv head's score from the formula, by hand: mean and variance over queries, pooled, mean over query heads.
    for layer, share in enumerate(shares):
        last = every[layer][:, -window:].unflatten(0, (HEADS, GROUP))
        score = last.mean(2) + CAKE(window=window).gamma * last.var(2)
        score[..., -window:] = 0
        kernel = CAKE(window=window).kernel
        pooled = nn.functional.avg_pool1d(score, kernel, stride=1, padding=kernel // 2).mean(1)
        for head in range(HEADS):
            best = pooled[head, :-window].topk(share - window).indices.tolist()
            want = sorted([*best, *range(prompt - window, prompt)])
            assert seen.kept[0][layer][0][head] == want


@pytest.mark.parametrize("sink", ["applied", "renormalised"])
@pytest.mark.parametrize("heads", ["uniform", "union", "adaptive", "global"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_attend_to_what_each_head_kept(family: str, heads: str, sink: SinkScore) -> None:
    """Merged steps of both layers, in place and copied: outputs of every step, from transformers, by the kept sets."""
    prompt, steps = 30, 9
    streams = Streams.random(13, prompt + steps, layers=2, heads=HEADS, group=GROUP, dim=DIM, dtype=torch.float32)
    budget, params = Budget(tokens=12, heads=heads), params_of(family)  # type: ignore[arg-type]
    runs = [
        run_core(CacheConfig(H2O(), budget, mode=mode, score_sink=sink), streams, (prompt, *[1] * steps), params=params)  # type: ignore[arg-type]
        for mode in ("overwrite", "compact")
    ]
    assert runs[0].kept == runs[1].kept
    for seen in runs:
        for step in range(1, steps + 1):
            t = prompt + step - 1
            for layer, row, head in ((0, 0, 0), (0, 1, 2), (1, 0, 1), (1, 1, 2)):
                at = torch.tensor([*seen.kept[step - 1][layer][row][head], t])
                group = slice(head * GROUP, (head + 1) * GROUP)
                k, v = (x[layer, row, head, at].expand(1, HEADS, -1, -1) for x in (streams.k, streams.v))
                visible = torch.ones(1, 1, 1, len(at), dtype=torch.bool)
                want = theirs(family, streams.q[layer, row : row + 1, :, t : t + 1], k, v, visible)[0][0, group]
                found = seen.out[step][layer][row, group]
                torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_rows_of_one_stack_may_count_sinks_differently() -> None:
    """Two caches that take their steps in common buffers keep what each keeps alone."""
    from kvexp.core.decode_stack import StackedLayer

    prompt, steps = 20, 6
    streams = Streams.random(13, prompt + steps, batch=1, heads=HEADS, group=GROUP, dim=DIM, dtype=torch.float32)
    configs = [CacheConfig(H2O(), Budget(tokens=9), score_sink=sink) for sink in ("applied", "renormalised")]  # type: ignore[arg-type]
    params, widths = params_of("gpt_oss"), (prompt, *[1] * steps)
    alone = [run_core(replace(config, mode="compact"), streams, widths, params=params) for config in configs]
    assert alone[0].kept != alone[1].kept
    begun = [run_core(config, streams, (prompt, 1), params=params, max_new_tokens=steps) for config in configs]
    states = [one.states[0] for one in begun]
    stack = StackedLayer(states)
    for t in range(prompt + 1, prompt + steps):
        q, k, v = (x[0][:, :, t : t + 1].expand(2, -1, -1, -1) for x in (streams.q, streams.k, streams.v))
        out = stack.forward(q, k, v, params)
        for state, seen, mine in zip(states, alone, out, strict=True):
            assert state.kept_positions() == seen.kept[t - prompt + 1][0]
            for scores, want in zip(scores_of(state)[0], seen.score[t - prompt + 1][0][0], strict=True):
                assert scores == pytest.approx(want, rel=1e-5)
            torch.testing.assert_close(mine, seen.out[t - prompt + 1][0][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_pass_sees_transformers_probabilities(family: str) -> None:
    """Over the columns 0, 1 (before), 5 to 12 (repeated) and the fed tokens, of which the first two are padding."""
    prompt, fed = 20, 9
    streams = Streams.random(4, prompt + fed, batch=1, heads=HEADS, group=GROUP, dim=DIM)
    q, k, v = streams.q[0][:, :, prompt:], streams.k[0], streams.v[0]
    asked = torch.tensor([[-1, -1, *range(prompt, prompt + fed - 2)]])
    inputs = AttentionInputs(
        q.unflatten(1, (HEADS, GROUP)), k, v, torch.cat([torch.arange(prompt)[None], asked], 1)[:, None], asked,
        params_of(family), in_column_order=True,
    )  # fmt: skip
    columns = torch.tensor([[0, 1, *range(5, 13)]])
    near = inputs_near(inputs, columns, k[:, :, prompt:])
    found = largest_attention(near, 2, 8, None)
    at = torch.cat([columns[0], torch.arange(prompt, prompt + fed)])
    visible = torch.cat([torch.ones(fed, 10), torch.ones(fed, fed).tril()], 1).bool()
    visible[:, 10:12] = False
    visible[:2] = True
    rows = theirs(family, q, k[:, :, at], v[:, :, at], visible[None, None])[1]
    want = rows[:, :, 2:, 2:10].amax(2).unflatten(1, (HEADS, GROUP))
    torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=1e-6)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_has_no_meaning_with_sinks_is_refused() -> None:
    inputs, _ = prompt_of("gpt_oss", 12)
    for spec in (AttentionScoreSpec(tau=(1.0, 2.0)), AttentionScoreSpec(noise=Noise("gumbel"))):
        for how in ("naive", "blocked"):
            with pytest.raises(ConfigError, match=r"attention sinks, and no paper .* score\.sink=renormalised"):
                column_sums_by(how, inputs, observed(spec, inputs))
        column_sums_by("naive", inputs, observed(replace(spec, sink="renormalised"), inputs))
    layer = MaskedLayer(lambda x, layer: x > 0, 0)
    with pytest.raises(CacheError, match=r"row masks .* attention sinks: set task\.protocol=prefill_then_step"):
        layer.forward(inputs.query.flatten(1, 2), inputs.keys, inputs.values, inputs.params, None)
    with pytest.raises(CacheError, match=r"one number for every query head, \[heads\], got \[2, 15, 1\]"):
        AttentionParams(SCALE, sinks=torch.zeros(2, 15, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_refuse_them(family: str) -> None:
    with pytest.raises(
        ConfigError, match=r"observe=triton know no model with (a softcap|attention sinks): set observe"
    ):
        triton_ops.check_logits(params_of(family))
    triton_ops.check_logits(AttentionParams(SCALE))


@pytest.mark.parametrize("method", [Random(), Keyformer(), SnapKV(), TOVA()], ids=lambda one: one.name)
def test_a_sink_left_out_is_for_methods_that_look_at_attention(method: Method) -> None:
    if method.name == "random":
        with pytest.raises(ConfigError, match=r"score\.sink=renormalised .* random evicts by none"):
            CacheConfig(method, Budget(tokens=9), score_sink="renormalised")
    else:
        CacheConfig(method, Budget(tokens=9), score_sink="renormalised")
    with pytest.raises(ConfigError, match="score_sink must be one of applied, renormalised"):
        CacheConfig(method, Budget(tokens=9), score_sink="none")  # type: ignore[arg-type]
