"""The second pass over a prompt: what is fed, what is observed of it, that nothing of it stays, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from test_layer_budgets import LENGTHS, PROMPTS, kept
from tiny import LETTERS, Streams, feed, prompts_of, run_core, stock, tiny
from torch import Tensor

from kvexp.core import Budget, CacheConfig, EvictionContext, Method, Needs, SecondPass, second_pass
from kvexp.core.attention import LocalChunks
from kvexp.generate import continuation_logprobs, generate, pad_left, prefill, prefill_together
from kvexp.generate.inputs import GenerationParams
from kvexp.hf import EvictionCache, patch_model
from kvexp.hf.load import byte_tokenizer
from kvexp.hf.second_pass import RepeatedPrompt, end_of_user_turn
from kvexp.methods import H2O, Compactor, Full, KVzip, KVzipPlus
from kvexp.methods.compactor import leverages, sketch_matrix, standardised
from kvexp.util.errors import CacheError, ConfigError

# The second pass over a prompt: what is fed, what is observed of it, that nothing of it stays, and what is refused.


HALF = Budget(kv_ratio=0.5)
FOUR = GenerationParams(4, eos=None)


@dataclass(frozen=True)
class Watcher(Method):
    """Keeps the newest, and writes down what the second pass saw, layer by layer."""

    evicts_while_decoding = False
    how: SecondPass = field(default_factory=SecondPass)
    seen: tuple[list[Tensor], ...] = ()

    @property
    def needs(self) -> Needs:
        return Needs(second_pass=self.how)

    def priority(self, ctx: EvictionContext) -> Tensor:
        assert ctx.second_pass_attention is not None
        self.seen[0].append(ctx.second_pass_attention)
        return ctx.positions.float()


# -- what is fed -------------------------------------------------------------------------------------------------------


def test_chunks_are_fed_behind_the_instruction_and_the_tokens_before_them() -> None:
    """Two sinks, chunks of four, an overlap of three; rows of nine, five and two tokens."""
    how = SecondPass(start=2, chunk=4, overlap=3, instruction="ab", next_instruction="c")
    repeated = RepeatedPrompt.of(how, LETTERS, "kvzip")
    first, later, turn = [36, 37], [38], [10]
    assert (repeated.first, repeated.later, repeated.turn) == (first, later, turn)
    rows = torch.tensor([[*range(20, 29)], [0, 0, 0, 0, *range(30, 35)], [0] * 7 + [40, 41]])
    repeated.fed += [rows[:, :4], rows[:, 4:]]
    (ids, one), (more, two) = repeated.chunks([9, 5, 2], pad=59)
    assert ids.tolist() == [[*first, *turn, 22, 23, 24, 25], [59, *first, *turn, 32, 33, 34]]
    assert one.rows.tolist() == [0, 1]
    assert one.positions.tolist() == [[9, 10, 11, 12, 13, 14, 15], [-1, 5, 6, 7, 8, 9, 10]]
    assert one.before.tolist() == [[0, 1], [4, 5]]
    assert one.repeated.tolist() == [[2, 3, 4, 5], [6, 7, 8, -1]]
    assert more.tolist() == [[*later, 23, 24, 25, *turn, 26, 27, 28]]
    assert (two.rows.tolist(), two.before.tolist(), two.repeated.tolist()) == ([0], [[0, 1]], [[6, 7, 8]])
    assert [repeated.most_tokens(length) for length in (9, 5, 2)] == [max(7, 9), 6, 0]


def test_the_end_of_a_users_turn_is_the_chat_templates() -> None:
    tokenizer = byte_tokenizer()
    assert end_of_user_turn(tokenizer) == "\n"
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
    assert end_of_user_turn(tokenizer) == "</><assistant>"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper | trim('#') }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"its end of a turn is not known: set method\.end_turn=false"):
        RepeatedPrompt.of(SecondPass(instruction="a"), tokenizer, "kvzip")
    assert RepeatedPrompt.of(SecondPass(instruction="a", end_turn=False), tokenizer, "kvzip").turn == [198]  # the byte


# -- what is observed --------------------------------------------------------------------------------------------------


def rows_of(model: Any, ids: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """By layer, of a stock model: attention [heads, N, N], and the norms [N] of what the attention layer gets."""
    norms: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, kwargs: norms.append(kwargs["hidden_states"][0].double().norm(dim=-1)), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    with torch.inference_mode():
        attentions = [each[0].double() for each in model(torch.tensor([ids]), output_attentions=True).attentions]
    for hook in hooks:
        hook.remove()
    return attentions, norms


@pytest.fixture(scope="module")
def uneven() -> tuple[Any, Any]:
    """A Llama, stock and patched, whose norms stretch dimensions unevenly: inputs of attention differ in size."""
    model = copy.deepcopy(stock("llama"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.copy_(torch.linspace(0.01, 3.0, 30))
    return model, patch_model(copy.deepcopy(model))


@pytest.mark.parametrize("block", [1 << 24, 1])
@pytest.mark.parametrize("over_input", [False, True])
def test_the_largest_share_of_the_chunk_the_sinks_and_what_is_fed(
    uneven: tuple[Any, Any], over_input: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against attention of a stock model, renormalised here; a padded batch and a chunked prefill."""
    monkeypatch.setattr(second_pass, "BLOCK_ELEMENTS", block)
    plain, patched = uneven
    how = SecondPass(2, 6, 3, "ab", "c", end_turn=True, over_input=over_input)
    notes: list[Tensor] = []
    prompts = prompts_of(3, (17, 11))
    prefill(patched, prompts, Watcher(how, (notes,)), HALF, max_new_tokens=3, chunk=5, tokenizer=LETTERS)
    assert len(notes) == 2 and all(note.shape == (2, 3, 5, 17) for note in notes)
    for row, prompt in enumerate(prompts):
        n = len(prompt)
        want = torch.zeros(2, 15, n, dtype=torch.float64)
        for start in range(2, n, 6):
            ahead = [36, 37] if start == 2 else [38, *prompt[start - 3 : start]]
            attentions, norms = rows_of(plain, [*prompt, *ahead, 10, *prompt[start : start + 6]])
            for layer, (attention, norm) in enumerate(zip(attentions, norms, strict=True)):
                chunk = list(range(start, min(start + 6, n)))
                near = [0, 1, *chunk, *range(n, attention.shape[-1])]
                fed = attention[:, n:] / attention[:, n:, near].sum(-1, keepdim=True)
                if over_input:
                    fed = fed / norm[n:, None]
                want[layer][:, chunk] = fed[..., chunk].amax(1)
        for layer, note in enumerate(notes):
            got = note[row].flatten(0, 1)
            torch.testing.assert_close(got[:, 17 - n :].double(), want[layer], rtol=2e-4, atol=1e-6)
            assert not got[:, : 17 - n].any()


def test_norms_of_inputs_decide_what_kvzip_plus_keeps(uneven: tuple[Any, Any]) -> None:
    prompts = prompts_of(4, (40,))
    both = [CacheConfig(method(n_sinks=1, instruct=False), HALF) for method in (KVzip, KVzipPlus)]
    plus, plain = (context.cache for context in prefill_together(uneven[1], prompts, both[::-1], max_new_tokens=2))
    assert plus.kept_positions(1) != plain.kept_positions(1)


# -- what is left ------------------------------------------------------------------------------------------------------


@pytest.fixture
def llama() -> tuple[Any, list[int]]:
    """A patched Llama, and the widths of the forwards that it is asked for."""
    model = patch_model(copy.deepcopy(stock("llama")))
    widths: list[int] = []
    model.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    return model, widths


def test_nothing_that_is_fed_stays_in_the_cache(llama: tuple[Any, list[int]]) -> None:
    model, widths = llama
    prompts = prompts_of(5, (12, 9))
    context = prefill(model, prompts, KVzip(n_sinks=1, chunk=5, instruct=False), HALF, max_new_tokens=3)
    assert widths == [12, 5, 5 + 5, 5 + 1]
    full = prefill(model, prompts, Full(), max_new_tokens=3)
    assert torch.equal(context.logits, full.logits)
    for layer, state in enumerate(context.cache.layer_states):
        everything, slots = full.cache.layer_states[layer].slots, state.slots
        assert slots is not None and everything is not None and state.seq_len == 12
        for row, head in product(range(2), range(3)):
            for slot, position in enumerate(slots.positions[row, head].tolist()):
                if position >= 0:
                    column = position + (0, 3)[row]
                    assert torch.equal(slots.keys[row, head, slot], everything.keys[row, head, column])
                    assert torch.equal(slots.values[row, head, slot], everything.values[row, head, column])


def test_a_prompt_within_its_budget_is_not_repeated(llama: tuple[Any, list[int]]) -> None:
    model, widths = llama
    prompts = prompts_of(5, (150,))  # repeated it would be more than the model holds
    everything = Budget(kv_ratio=1.0, counts_self=False)
    run = generate(model, prompts, KVzip(instruct=False), everything, decoding=FOUR)
    assert widths == [150, 1, 1, 1]
    assert run.tokens == generate(model, prompts, Full(), decoding=FOUR).tokens


def test_caches_of_one_prefill_share_a_second_pass(llama: tuple[Any, list[int]]) -> None:
    """One for all budgets of KVzip, one for those of KVzip+; each is what it is alone."""
    model, widths = llama
    prompts = prompts_of(6, (20, 14))
    variants = [
        CacheConfig(method(n_sinks=2, instruct=False), Budget(kv_ratio=ratio))
        for method in (KVzip, KVzipPlus)
        for ratio in (0.3, 0.5, 0.9)
    ]
    contexts = prefill_together(
        model, prompts, [CacheConfig(Full()), *variants, CacheConfig(H2O(), HALF)], max_new_tokens=3
    )
    assert widths == [20, 18, 18]
    for variant, context in zip(variants, contexts[1:-1], strict=True):
        alone = prefill(model, prompts, variant, max_new_tokens=3)
        for layer in range(2):
            assert context.cache.kept_positions(layer) == alone.cache.kept_positions(layer)
        assert context.cache.memory_tracker.peak_bytes == alone.cache.memory_tracker.peak_bytes


def test_the_peak_of_bytes_has_the_copies_of_the_second_pass() -> None:
    prompts = prompts_of(6, (20,))
    cache = prefill(tiny("llama"), prompts, KVzip(n_sinks=2, instruct=False), HALF, max_new_tokens=3).cache
    token = 2 * 3 * 14 * 4  # bytes in one layer: keys and values of 3 heads of 14
    assert cache.memory_tracker.peak_bytes == 2 * 20 * token + (20 + 18) * token


def test_a_cache_that_is_reset_repeats_the_next_prompt() -> None:
    model, (first, second) = tiny("llama"), prompts_of(7, (15, 15))
    cache = EvictionCache(model, KVzip(n_sinks=1, instruct=False), HALF)
    kept = []
    with torch.inference_mode():
        for prompt in (first, second):
            cache.reset()
            model(torch.tensor([prompt]), past_key_values=cache)
            kept.append(cache.kept_positions(1))
        other = EvictionCache(model, KVzip(n_sinks=1, instruct=False), HALF)
        model(torch.tensor([second]), past_key_values=other)
    assert kept[1] == other.kept_positions(1) != kept[0]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_hugging_faces_generate_repeats_the_prompt_too(num_beams: int) -> None:
    """Each beam's row holds of the prompt what it holds alone."""
    model, prompts = tiny("llama"), prompts_of(8, (15, 11))
    method = KVzip(n_sinks=1, chunk=6)
    beams = GenerationParams(4, eos=None, num_beams=num_beams)
    run = generate(model, prompts, method, HALF, decoding=beams, tokenizer=LETTERS)
    for row, prompt in enumerate(prompts):
        alone = prefill(model, [prompt], method, HALF, max_new_tokens=4, tokenizer=LETTERS).cache
        for layer in range(2):
            for beam in range(num_beams):
                held = run.cache.kept_positions(layer)[row * num_beams + beam]
                of_prompt = [[place for place in head if place < len(prompt)] for head in held]
                assert of_prompt == alone.kept_positions(layer)[0]
    if num_beams == 1:
        cache = EvictionCache(model, method, HALF, tokenizer=LETTERS)
        ids = torch.tensor(prompts[:1])
        made = model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert made[0, 15:].tolist() == run.tokens[0]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_words_take_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match=r"kvzip .* takes the model's tokenizer: pass tokenizer=, or set method"):
        generate(tiny("llama"), prompts_of(1, (9,)), KVzip(), HALF)
    with pytest.raises(ConfigError, match="takes the model's tokenizer"):
        continuation_logprobs(tiny("llama"), prompts_of(1, (9,)), [[1]], KVzip(n_sinks=1), HALF)
    (logprobs,) = continuation_logprobs(
        tiny("llama"), prompts_of(1, (9,)), [[1]], KVzip(n_sinks=1), HALF, tokenizer=LETTERS
    )
    assert len(logprobs) == 1


def test_a_second_pass_that_the_model_has_no_room_for_is_refused_before_it_runs(llama: tuple[Any, list[int]]) -> None:
    model, widths = llama
    prompts = prompts_of(1, (150,))
    why = r"feeds up to 146 tokens behind the prompt of 150 to repeat it, the model holds 211: lower method\.chunk"
    with pytest.raises(ConfigError, match=why):
        generate(model, prompts, KVzip(instruct=False), HALF, decoding=FOUR)
    assert not widths
    generate(model, prompts, KVzip(instruct=False, chunk=50), HALF, decoding=FOUR)
    assert widths[:4] == [150, 50, 58, 54]


def test_a_method_that_evicts_while_decoding_cannot_need_it() -> None:
    class Always(Watcher):
        evicts_while_decoding = True

    with pytest.raises(ConfigError, match=r"Always needs a second pass .* let .*evicts_while_decoding be False"):
        CacheConfig(Always(), HALF)


def test_a_cache_whose_prompt_was_never_repeated_takes_no_more_tokens() -> None:
    why = "evicts after a second pass over the prompt, and there was none"
    with pytest.raises(CacheError, match=why):
        run_core(CacheConfig(KVzip(n_sinks=1, instruct=False), Budget(tokens=5)), Streams.random(3, 10), (9, 1))
    model = tiny("llama")
    cache = EvictionCache(model, KVzip(n_sinks=1, instruct=False), HALF)
    states = model.get_input_embeddings()(torch.tensor(prompts_of(1, (9,))))
    with torch.inference_mode():
        model(inputs_embeds=states, past_key_values=cache)
        with pytest.raises(CacheError, match=why):
            model(torch.tensor([[1]]), past_key_values=cache)


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"n_sinks": -1}, "n_sinks must be at least 0, got -1"), ({"chunk": 0}, "chunk must be at least 1, got 0")],
)
def test_settings_that_cannot_be(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        KVzip(**settings)


# Attention inside chunks of a prompt does not depend on the pieces, the padding or the batch the prompt comes in.


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
    feed(cache, model, ids, ids[:, :0], mask=mask, chunk=piece)
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
    with pytest.raises(ConfigError, match="size must be at least 1"):
        LocalChunks(0)
