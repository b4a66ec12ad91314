"""What must hold for every method, size and order of things. Hypothesis draws the examples, the same every time."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import CASES
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from tiny import Fed, Seen, Streams, distinct, feed, later, prompts_of, run_core, stock, tiny, tokens
from torch import Tensor
from transformers import DynamicCache
from turns import in_turn

from kvexp.core import Budget, CacheConfig, Cadence, KeepsEverything, QueryCalibration
from kvexp.generate import Generation, generate, pad_left
from kvexp.generate.inputs import GenerationParams
from kvexp.hf import EvictionCache, calibrate_queries
from kvexp.methods import H2O, TOVA, Full, KeyAttention, KNorm, Window
from kvexp.util.errors import CacheError

METHODS = {name: case.method for name, case in CASES.items() if case.properties}
PREFILL_ONLY = [name for name, method in METHODS.items() if not method.evicts_while_decoding]
SOME = (
    "h2o",
    "h2o_damping",
    "keyformer",
    "keyformer_a2sf_shared",
    "a2sf",
    "tova",
    "snapkv",
    "knorm",
    "keydiff",
    "caote",
    "rkv",
    "streaming_llm",
)
MODES = ("overwrite", "compact", "mask")
modes = st.sampled_from(MODES)
budgets = st.integers(5, 23)  # 5: two sinks, or snapkv's window, and something besides
seeds = st.integers(0, 10_000)
lengths = st.lists(st.integers(1, 19), min_size=3, max_size=3)  # of prompts, one token included


def drawn(examples: int) -> settings:
    """A number of examples, always the same. Shrinking a failure takes minutes: add Phase.shrink to look into one."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def num_layers(name: str) -> int:
    spec = METHODS[name].score_spec
    return 2 if spec is not None and spec.across_layers else 1


def core(
    name: str, streams: Streams, widths: Sequence[int], budget: Budget, *, mode: str = "overwrite",
    missing: Sequence[int] | None = None, row_seeds: int | Sequence[int] = 0, **plan: Any,
) -> Seen:  # fmt: skip
    mask = None if missing is None else streams.padded(missing)[1]
    if METHODS[name].needs.calibration:
        plan["calibration"] = CALIBRATION
    made = CacheConfig(METHODS[name], budget, Cadence(), mode, **plan)  # type: ignore[arg-type]
    return run_core(made, streams, widths, mask=mask, max_new_tokens=31, seeds=row_seeds)


def drawn_calibration() -> QueryCalibration:
    """Draw a calibration of two layers of the streams' shape, whose queries have no direction of their own."""
    dice = torch.Generator().manual_seed(29)
    mean = torch.randn(2, 2, 3, 7, generator=dice)
    return QueryCalibration.of(torch.nn.functional.normalize(mean, dim=-1), mean, torch.zeros(2, 2, 3, 0))


CALIBRATION = drawn_calibration()


@functools.cache
def calibrated(family: str) -> QueryCalibration:
    return calibrate_queries(tiny(family), tokens(41, 2, 23).tolist())


def needed(name: str, family: str) -> dict[str, QueryCalibration]:
    """What a cache of this method has to be given for this model."""
    return {"calibration": calibrated(family)} if METHODS[name].needs.calibration else {}


def draw_streams(name: str, seed: int, count: int, batch: int = 2) -> Streams:
    return Streams.random(seed, count, layers=num_layers(name), batch=batch, heads=2, group=3, dtype=torch.float32)


@pytest.mark.parametrize("name", METHODS)
@drawn(3)
@given(st.one_of(budgets, st.sampled_from([0.51, 0.8, 1.0])), modes, lengths, seeds)
def test_a_padded_row_is_the_row_alone(name: str, k: int | float, mode: str, prompts: list[int], seed: int) -> None:
    """Ragged budgets (kv_ratio), and absolute ones larger than the prompts of some rows."""
    budget = Budget(kv_ratio=k) if isinstance(k, float) else Budget(tokens=k)
    assume(isinstance(k, int) or min(prompts) * k >= 5)
    prompt = max(prompts)
    streams = draw_streams(name, seed, prompt + 11, 3)
    batch = core(
        name, streams, [prompt, *[1] * 11], budget, mode=mode, missing=[prompt - n for n in prompts],
        row_seeds=[2, 3, 5],
    )  # fmt: skip
    for row, n in enumerate(prompts):
        part = Streams(*(t[:, row : row + 1, :, prompt - n :] for t in (streams.q, streams.k, streams.v)))
        alone = core(name, part, [n, *[1] * 11], budget, mode=mode, row_seeds=[(2, 3, 5)[row]])
        for step, (kept, outs, scores) in enumerate(zip(batch.kept, batch.out, batch.score, strict=True)):
            for layer, own in enumerate(alone.out[step]):
                where = f"row {row}, forward {step}, layer {layer}"
                assert kept[layer][row] == alone.kept[step][layer][0], where
                torch.testing.assert_close(outs[layer][row][:, -own.shape[2] :], own[0], rtol=1e-4, atol=1e-5)
                for one, other in zip(scores[layer][row], alone.score[step][layer][0], strict=True):
                    assert one == pytest.approx(other, rel=1e-4, abs=1e-5), where


def kept_of(run: Generation) -> list[list[list[list[int]]]]:
    """[row][layer][head] positions."""
    layers = [run.cache.kept_positions(i) for i in range(len(run.cache.layers))]
    return [[layer[row] for layer in layers] for row in range(len(layers[0]))]


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
def test_ragged_budgets_are_floors_of_real_prompt_tokens(ratio: float) -> None:
    prompts = prompts_of(5, (37, 11, 23))
    run = generate(
        tiny("llama"), prompts, H2O(), Budget(kv_ratio=ratio), decoding=GenerationParams(max_new_tokens=5, eos=None)
    )
    for prompt, layers in zip(prompts, kept_of(run), strict=True):
        # 0.3 * 11 = 3.3 …: exact in tenths
        assert {len(head) for layer in layers for head in layer} == {int(ratio * 10) * len(prompt) // 10 - 1}


@torch.inference_mode()
def plain(family: str, prompt: Tensor, new: Tensor, mask: Tensor, **changes: Any) -> list[Tensor]:
    """Logits of the stock model with its own cache."""
    model, cache, logits = stock(family, **changes), DynamicCache(config=stock(family, **changes).config), []
    mask = torch.cat([mask, torch.ones_like(new)], 1)
    ids, total = torch.cat([prompt, new], 1), prompt.shape[1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for start, stop in [(0, total), *((i, i + 1) for i in range(total, ids.shape[1]))]:
        options = {} if family == "mpt" else {"position_ids": positions[:, start:stop]}
        output = model(
            ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True, **options
        )
        logits.append(output.logits[:, -1])
    return logits


def close(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
@pytest.mark.parametrize("window", [5, 13])
def test_sliding_window_of_mistral(window: int, mode: str) -> None:
    """A budget of as many slots as the window loses nothing, whatever the method; and neither does method=full."""
    model = tiny("mistral", sliding_window=window)
    prompt, mask = pad_left(prompts_of(7, (19, 11)), 0, "cpu")
    new = tokens(8, 2, 11)
    want = plain("mistral", prompt, new, mask, sliding_window=window)
    assert not torch.allclose(want[-1], plain("mistral", prompt, new, mask)[-1], atol=1e-2)  # the window matters
    for method in (Full(), Window(), KeyAttention(), H2O(), KNorm(), TOVA()):
        budget = Budget(tokens=window) if method.evicts else None
        cache = EvictionCache(model, method, budget, mode=mode)  # type: ignore[arg-type]
        close(feed(cache, model, prompt, new, mask=mask).logits, want)


def test_sliding_window_evicts_what_the_model_cannot_see_first() -> None:
    model = tiny("mistral", sliding_window=7)
    fed = feed(EvictionCache(model, KeyAttention(), Budget(tokens=7)), model, tokens(9, 1, 19), tokens(10, 1, 5))
    for step, layers in enumerate(fed.kept):
        assert all(head == list(range(13 + step, 19 + step)) for layer in layers for head in layer[0])


def test_several_tokens_must_be_asked_for() -> None:
    cache = EvictionCache(tiny("llama"), H2O(), Budget(tokens=7))
    with pytest.raises(CacheError, match="11 columns and got 3 more at once"):
        feed(cache, tiny("llama"), tokens(1, 1, 11), tokens(2, 1, 3), width=3)


@pytest.mark.parametrize("method", [Full(), H2O(), TOVA()], ids=lambda method: method.name)
@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("mpt", {}), ("mistral", {"sliding_window": 5})])
def test_padding_after_the_prompt_is_never_attended_to(family: str, changes: dict[str, Any], method: Any) -> None:
    model, prompt, new = tiny(family, **changes), tokens(1, 2, 11), tokens(2, 2, 6)
    real = torch.tensor([[1, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 1]])

    def cache() -> EvictionCache:
        budget = None if isinstance(method, KeepsEverything) else Budget(tokens=8)
        return EvictionCache(model, method, budget, max_new_tokens=6)

    both = feed(cache(), model, prompt, new, later=real).logits[1:]
    for row, own in enumerate(real.bool()):
        alone = feed(cache(), model, prompt[row : row + 1], new[row : row + 1, own]).logits[1:]
        close(torch.stack(both)[own, row], torch.cat(alone))


# -- rows that are selected, repeated, reordered -----------------------------------------------------------------------


def start(
    name: str, prompt: Tensor, mask: Tensor, mode: str, row_seeds: Sequence[int], **options: Any
) -> EvictionCache:
    return EvictionCache(
        tiny("llama"), METHODS[name], Budget(kv_ratio=0.5), mode=mode, seeds=list(row_seeds), max_new_tokens=13,  # type: ignore[arg-type]
        prompt_tokens=prompt.shape[1], **needed(name, "llama"), **options,
    )  # fmt: skip


def more(cache: EvictionCache, mask: Tensor, new: Tensor) -> Fed:
    """Go on from a cache that has seen the columns of `mask`."""
    model, logits, kept = tiny("llama"), [], []
    with torch.inference_mode():
        for j in range(new.shape[1]):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            output = model(
                new[:, j : j + 1], attention_mask=mask, past_key_values=cache, use_cache=True,
                position_ids=mask.sum(1, keepdim=True) - 1,
            )  # fmt: skip
            logits.append(output.logits[:, -1])
            kept.append([cache.kept_positions(i) for i in range(2)])
    return Fed(logits, kept, cache)


@drawn(5)
@given(
    st.sampled_from(SOME),
    modes,
    st.sampled_from([[2, 0, 2, 1, 1], [1], [0, 2, 1], [2, 1]]),
    st.sampled_from([1, 3]),
    seeds,
)
def test_selected_rows_go_on_as_if_they_had_been_alone(
    name: str, mode: str, rows: list[int], every: int, seed: int
) -> None:
    """Keys, values, positions, scores, budgets, seeds and the model-wide score all follow."""
    prompt, mask = pad_left(prompts_of(seed, (17, 11, 23)), 0, "cpu")
    row_seeds, first, then = [2, 3, 5], later(seed + 1, 3, 5), later(seed + 2, len(rows), 7, 1)
    cadence = Cadence(every=1 if name in PREFILL_ONLY else every)
    cache = start(name, prompt, mask, mode, row_seeds, cadence=cadence)
    feed(cache, tiny("llama"), prompt, first, mask=mask)
    with torch.inference_mode():
        cache.batch_select_indices(torch.tensor(rows))
    seen = torch.cat([mask, torch.ones_like(first)], 1)
    got = more(cache, seen[rows], then)
    for i, row in enumerate(rows):
        ids = prompt[row : row + 1, mask[row] == 1]
        alone = start(name, ids, mask, mode, row_seeds[row : row + 1], cadence=cadence)
        feed(alone, tiny("llama"), ids, first[row : row + 1])
        want = more(alone, torch.ones(1, ids.shape[1] + 5, dtype=torch.int64), then[i : i + 1])
        for step in range(7):
            assert [layer[i] for layer in got.kept[step]] == [layer[0] for layer in want.kept[step]]
        close([x[i : i + 1] for x in got.logits], want.logits)


@pytest.mark.parametrize(("name", "mode"), in_turn(SOME, MODES, of=3))
def test_repeated_rows_part_ways(name: str, mode: str) -> None:
    """One prefill, every row three times, different continuations: as if each had been alone from the start."""
    prompt, mask = pad_left(prompts_of(3, (17, 11)), 0, "cpu")
    then = later(4, 6, 7)
    cache = start(name, prompt, mask, mode, [2, 3])
    feed(cache, tiny("llama"), prompt, tokens(0, 2, 0), mask=mask)
    with torch.inference_mode():
        cache.batch_repeat_interleave(3)
    got = more(cache, mask.repeat_interleave(3, 0), then)
    for i in range(6):
        row = i // 3
        ids = prompt[row : row + 1, mask[row] == 1]
        want = feed(start(name, ids, mask, mode, [(2, 3)[row]]), tiny("llama"), ids, then[i : i + 1])
        assert [layer[i] for layer in got.kept[-1]] == [layer[0] for layer in want.kept[-1]]
        close([x[i : i + 1] for x in got.logits], want.logits[1:])


@pytest.mark.parametrize(
    ("name", "mode"), in_turn(["h2o", "h2o_damping", "a2sf", "tova", "knorm", "rkv", "streaming_llm"], MODES, of=3)
)
def test_reordered_beams_keep_their_history(name: str, mode: str) -> None:
    """Two samples of 3 beams; beams are exchanged and doubled after steps that set them apart."""
    prompt, mask = pad_left(prompts_of(5, (17, 11)), 0, "cpu")
    prompt, mask = prompt.repeat_interleave(3, 0), mask.repeat_interleave(3, 0)
    first, then, order = later(6, 6, 5), later(7, 6, 7, 1), torch.tensor([2, 0, 2, 4, 5, 3])
    cache = start(name, prompt, mask, mode, [2, 3], num_beams=3)
    fed = feed(cache, tiny("llama"), prompt, first, mask=mask)
    last = fed.kept[-1][1]
    assert name not in ("a2sf", "tova") or not last[0] == last[1] == last[2]  # the beams did part
    with torch.inference_mode():
        cache.reorder_cache(order)
    got = more(cache, torch.cat([mask, torch.ones_like(first)], 1), then)
    for i, row in enumerate(order.tolist()):
        ids = prompt[row : row + 1, mask[row] == 1]
        alone = start(name, ids, mask, mode, [(2, 3)[row // 3]])
        want = feed(alone, tiny("llama"), ids, torch.cat([first[row], then[i]])[None])
        assert [layer[i] for layer in got.kept[-1]] == [layer[0] for layer in want.kept[-1]]
        close([x[i : i + 1] for x in got.logits], want.logits[-7:])


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
@pytest.mark.parametrize("name", ["keyformer", "keyformer_shared", "keyformer_a2sf"])
def test_beams_that_share_a_score_stay_together(name: str, mode: str) -> None:
    """Equal beams of a sample have the kept sets of one row; reordering equal beams changes nothing; samples differ."""
    prompt, mask = pad_left(prompts_of(5, (17, 11)), 0, "cpu")
    new = later(6, 2, 5).repeat_interleave(3, 0)
    cache = start(name, prompt, mask, mode, [2, 3], num_beams=3)
    beams = feed(cache, tiny("llama"), prompt.repeat_interleave(3, 0), new, mask=mask.repeat_interleave(3, 0))
    alone = feed(start(name, prompt, mask, mode, [2, 3]), tiny("llama"), prompt, new[::3], mask=mask)
    for step in range(6):
        for layer in range(2):
            assert beams.kept[step][layer] == [alone.kept[step][layer][i // 3] for i in range(6)]
    with torch.inference_mode():
        cache.reorder_cache(torch.tensor([1, 2, 0, 3, 3, 4]))
    assert [cache.kept_positions(layer) for layer in range(2)] == beams.kept[-1]


# -- symmetries --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["overwrite", "compact", "mask"])
def test_equal_scores_go_by_position_the_newer_stays(mode: str) -> None:
    """All keys equal: every key norm is the same; slots are overwritten out of order, ties are not."""
    streams = draw_streams("knorm", 1, 29)
    same_keys = Streams(streams.q, torch.ones_like(streams.k), streams.v)
    seen = core("knorm", same_keys, [11, *[1] * 18], Budget(tokens=7), mode=mode)
    for step, layers in enumerate(seen.kept):
        assert all(head == list(range(5 + step, 11 + step)) for row in layers[0] for head in row)


@pytest.mark.parametrize("family", ["llama", "gptj", "mpt"])
def test_repeated_tokens_tie_in_key_norm(family: str) -> None:
    """RoPE turns keys and leaves their norms: a repeated token has one norm, whatever its rotations round to."""
    prompt = torch.full((2, 17), 5)
    prompt[1, :6] = torch.arange(6, 12)
    fed = feed(EvictionCache(tiny(family), KNorm(), Budget(tokens=6)), tiny(family), prompt, torch.full((2, 3), 5))
    for step, layers in enumerate(fed.kept):
        assert all(head == list(range(12 + step, 17 + step)) for head in layers[0][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_are_float32(dtype: torch.dtype) -> None:
    """300 + 1 is 300 in bfloat16: sums of 331 rows must still tell neighbours apart."""
    streams = Streams.random(3, 331, batch=1, heads=1, group=2, dtype=dtype)
    for observe in ("naive", "blocked"):
        seen = core("h2o", streams, [313, *[1] * 18], Budget(tokens=101), observe=observe)
        slots = seen.states[0].slots
        assert slots is not None
        assert slots.score.dtype == torch.float32
        assert seen.out[-1][0].dtype == dtype
        values = list(seen.score[0][0][0][0].values())
        assert len(set(values)) == len(values)
        # every prompt row spreads a mass of 1 per query head, and all survivors' shares are less than that in all
        assert 0 < sum(values) < 2 * 313


# -- the same again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_two_runs_are_identical_and_a_reset_cache_is_a_new_one(name: str) -> None:
    prompt, mask = pad_left(prompts_of(3, (17, 11)), 0, "cpu")
    new = tokens(4, 2, 7)
    cache = start(name, prompt, mask, "overwrite", [2, 3])
    runs = [feed(cache, tiny("llama"), prompt, new, mask=mask)]
    cache.reset()
    feed(cache, tiny("llama"), prompt.flip(0), new, mask=torch.ones_like(mask))  # something else in between
    cache.reset()
    runs.append(feed(cache, tiny("llama"), prompt, new, mask=mask))
    runs.append(feed(start(name, prompt, mask, "overwrite", [2, 3]), tiny("llama"), prompt, new, mask=mask))
    for other in runs[1:]:
        assert other.kept == runs[0].kept
        assert all(torch.equal(a, b) for a, b in zip(runs[0].logits, other.logits, strict=True))


def test_noise_follows_the_seed_not_the_row() -> None:
    prompt = distinct(3, 1, 29).repeat(3, 1)
    fed = feed(
        start("keyformer", prompt, prompt, "overwrite", [2, 3, 2]), tiny("llama"), prompt, tokens(4, 1, 7).repeat(3, 1)
    )
    for layer in fed.kept[-1]:
        assert layer[0] == layer[2] != layer[1]


def live_tensor_bytes() -> tuple[int, int]:
    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    return len(found), sum(t.nbytes for t in found)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["overwrite", "compact"])
@pytest.mark.parametrize("name", ["h2o", "keyformer", "a2sf", "tova", "knorm", "keydiff", "streaming_llm"])
def test_two_thousand_steps_hold_no_more_memory_than_fifty(name: str, mode: str) -> None:
    model = tiny("llama", max_position_embeddings=2203)
    more = needed(name, "llama")
    cache = EvictionCache(model, METHODS[name], Budget(tokens=13), mode=mode, max_new_tokens=2003, **more)  # type: ignore[arg-type]
    ids, marks, buffers = tokens(3, 2, 37), [], set()
    with torch.inference_mode():
        for step in range(2003):
            last = model(ids, past_key_values=cache, use_cache=True).logits[:, -1]
            ids = last.argmax(-1, keepdim=True)
            if step in (53, 1009, 2002):
                marks.append(live_tensor_bytes())
                buffers.add(tuple(tuple(t.shape) for s in cache.layer_states for t in s.slots.tensors.values()))  # type: ignore[union-attr]
    # As many tensors; the table of coming temperatures ends with the schedule, so that they may become smaller.
    assert marks[0][0] == marks[1][0] == marks[2][0] and marks[0][1] >= marks[1][1] >= marks[2][1]
    assert len(buffers) == 1
    assert cache.get_seq_length() == 37 + 2002
    assert all(len(head) == 12 for head in cache.kept_positions(1)[0])
