"""Whole models with a softcap (Gemma 2) or attention sinks (gpt-oss) against transformers' own."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from tiny import feed
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvexp.core import Budget, CacheConfig, EvictionContext, Method, Needs, SecondPass
from kvexp.diagnose.case import Case
from kvexp.diagnose.replay import NOTHING_UNDONE, Replay
from kvexp.diagnose.twin import twin
from kvexp.generate import continuation_logprobs, generate, pad_left, prefill_together
from kvexp.generate.inputs import GenerationParams
from kvexp.hf import EvictionCache, patch_model
from kvexp.hf.cache import RowMaskCache
from kvexp.hf.traits import SINK_TYPES
from kvexp.methods import A2SF, H2O, Full, Keyformer, SnapKV, Window
from kvexp.retrieval import Oracle
from kvexp.util.errors import CacheError, ConfigError

LAYERS, HEADS, KV_HEADS, WINDOW, LONG, NEW = 2, 6, 2, 9, 31, 8
SIZES = {
    **{"vocab_size": 61, "hidden_size": 30, "intermediate_size": 26, "num_hidden_layers": LAYERS, "head_dim": 14},
    **{"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 211},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "sliding_window": WINDOW},
    **{"tie_word_embeddings": False},
}
OF = {
    "gemma2": {"attn_logit_softcapping": 2.5, "query_pre_attn_scalar": 10},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 32, "intermediate_size": 32},
}
FULL = ("full_attention",) * LAYERS  # so that kvexp holds every layer; by default every second one slides
IDS = torch.randint(1, 61, (2, LONG + NEW), generator=torch.Generator().manual_seed(3))


@functools.cache
def stock(family: str, kinds: tuple[str, ...] | None = FULL) -> PreTrainedModel:
    """A model with eager attention, and weights large enough for attention to be uneven."""
    more: dict[str, Any] = {} if kinds is None else {"layer_types": list(kinds)}
    config = AutoConfig.for_model(family, **{**SIZES, **OF[family], **more})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.copy_(torch.linspace(3, -2, HEADS))
            elif weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.35)
    return model.eval()


@functools.cache
def tiny(family: str, kinds: tuple[str, ...] | None = FULL) -> PreTrainedModel:
    return patch_model(copy.deepcopy(stock(family, kinds)), check="never")


@torch.inference_mode()
def theirs(family: str, ids: Tensor, kinds: tuple[str, ...] | None = FULL) -> Tensor:
    """Logits [1, N, V] of one row in one forward, without a cache."""
    logits: Tensor = stock(family, kinds)(ids).logits
    return logits


# -- everything is kept ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("kinds", [FULL, None], ids=["full", "mixed"])
@pytest.mark.parametrize("family", OF)
def test_the_full_cache_is_transformers_own_model(
    family: str, kinds: tuple[str, ...] | None, chunk: int | None
) -> None:
    """Prompts beyond the window; the second row is padded; then steps of one token."""
    rows = [IDS[0, :LONG].tolist(), IDS[1, : LONG - 5].tolist()]
    ids, mask = pad_left(rows, 0, "cpu")
    model = tiny(family, kinds)
    fed = feed(EvictionCache(model, Full(), prompt_tokens=LONG), model, ids, IDS[:, LONG:], mask=mask, chunk=chunk)
    for row, prompt in enumerate(rows):
        whole = torch.tensor([[*prompt, *IDS[row, LONG:].tolist()]])
        want = theirs(family, whole, kinds)[0, len(prompt) - 1 :]
        torch.testing.assert_close(torch.stack([x[row] for x in fed.logits]), want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kinds", [FULL, None], ids=["full", "mixed"])
@pytest.mark.parametrize("family", OF)
def test_beams_are_transformers_own(family: str, kinds: tuple[str, ...] | None) -> None:
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
    want = stock(family, kinds).generate(IDS[:1, :LONG], **options)
    model = tiny(family, kinds)
    cache = EvictionCache(model, Full(), num_beams=3)
    assert torch.equal(model.generate(IDS[:1, :LONG], past_key_values=cache, **options), want)
    made = generate(model, IDS[:1, :LONG].tolist(), Full(), decoding=GenerationParams(NEW, num_beams=3, eos=None))
    assert made.tokens[0] == want[0, LONG:].tolist()


@pytest.mark.parametrize("family", OF)
def test_attention_differs_without_what_the_model_has(family: str) -> None:
    """Or the tests above would pass without it."""
    model = copy.deepcopy(stock(family))
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            if family == "gemma2":
                module.attn_logit_softcapping = None
            else:
                torch.nn.init.constant_(module.sinks, -30.0)
    with torch.inference_mode():
        assert float((model(IDS[:1]).logits - theirs(family, IDS[:1])).abs().max()) > 0.05


# -- under eviction ----------------------------------------------------------------------------------------------------


@contextmanager
def masks_by_hand(model: PreTrainedModel, visible: Tensor, seen: list[Tensor]) -> Iterator[None]:
    """visible [L, query heads, N, N] bool replaces every mask; attention probabilities [heads, N, N] go to `seen`."""
    hooks = []
    for module, mask in zip((m for n, m in model.named_modules() if n.endswith("self_attn")), visible, strict=True):
        hidden = torch.zeros(mask.shape)[None].masked_fill(~mask[None], -1e30)
        hooks += [
            module.register_forward_pre_hook(
                lambda _, args, given, hidden=hidden: (args, given | {"attention_mask": hidden}), with_kwargs=True
            ),
            module.register_forward_hook(lambda _, args, out: seen.append(out[1][0].double())),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def visible_of(kept: list[list[list[list[list[int]]]]], row: int = 0) -> Tensor:
    """[L, query heads, N, N]: prompt rows see all before them, the others what was kept and themselves."""
    count = LONG + len(kept) - 1
    visible = torch.ones(LAYERS, HEADS, count, count).tril().bool()
    for step, layers in enumerate(kept[:-1]):
        for layer, rows in enumerate(layers):
            for head in range(HEADS):
                mine = torch.zeros(count, dtype=torch.bool)
                mine[[*rows[row][head // (HEADS // KV_HEADS)], LONG + step]] = True
                visible[layer, head, LONG + step] = mine
    return visible


def h2o(rows: Tensor, held: list[int], end: int, keep: int, recent: int, alpha: float = 1.0) -> list[list[int]]:
    """The kept positions of each head after query end - 1, from the attention of all queries so far."""
    weights = alpha ** torch.arange(end - 1, -1, -1, dtype=torch.float64)
    score = (rows[:, :end] * weights[:, None]).sum(1).unflatten(0, (KV_HEADS, -1)).sum(1)
    newest = sorted(held)[len(held) - recent :] if recent else []
    order = [sorted(held, key=lambda p: (p in newest, float(score[h, p]), p), reverse=True) for h in range(KV_HEADS)]
    return [sorted(each[:keep]) for each in order]


BUDGET = 14
METHODS: dict[str, Method] = {
    "h2o": H2O(), "a2sf": A2SF(alpha=0.9), "snapkv": SnapKV(window=4), "window": Window(), "keyformer": Keyformer(),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", OF)
def test_logits_under_eviction_are_stocks_over_what_was_kept(family: str, name: str) -> None:
    """Kept sets are those of the rule over stock's own probabilities, head by head, step by step."""
    if (family, name) == ("gpt_oss", "keyformer"):
        return  # refused, below
    model, method = tiny(family), METHODS[name]
    cache = EvictionCache(model, method, Budget(tokens=BUDGET), prompt_tokens=LONG, max_new_tokens=NEW)
    fed = feed(cache, model, IDS[:1, :LONG], IDS[:1, LONG:])
    seen: list[Tensor] = []
    with torch.inference_mode(), masks_by_hand(stock(family), visible_of(fed.kept), seen):
        want = stock(family)(IDS[:1]).logits[0, LONG - 1 :]
    torch.testing.assert_close(torch.stack([x[0] for x in fed.logits]), want, rtol=2e-4, atol=2e-4)
    for layer, rows in enumerate(seen):
        for step, layers in enumerate(fed.kept):
            end = LONG + step
            found = layers[layer][0]
            held = [range(LONG)] * KV_HEADS if not step else [[*h, end - 1] for h in fed.kept[step - 1][layer][0]]
            for head, kept in enumerate(found):
                if name == "window":
                    assert kept == list(range(end - BUDGET + 1, end))
                elif name in ("h2o", "a2sf"):
                    recent, alpha = (BUDGET // 2 - 1, 1.0) if name == "h2o" else (0, 0.9)
                    assert kept == h2o(rows, list(held[head]), end, BUDGET - 1, recent, alpha)[head]
                else:
                    assert len(kept) == (BUDGET - 1 if step == 0 or name == "keyformer" else BUDGET - 1 + step)


@pytest.mark.parametrize("family", OF)
def test_a_chosen_selection_attends_with_softcap_and_sinks(family: str) -> None:
    """Oracle with a budget for everything is the full cache; with less it differs."""
    model = tiny(family)
    want = theirs(family, IDS[:1])[0, LONG - 1 :]
    for tokens, same in ((LONG + NEW + 1, True), (9, False)):
        cache = EvictionCache(model, Oracle(n_sinks=1), Budget(tokens=tokens), max_new_tokens=NEW)
        fed = feed(cache, model, IDS[:1, :LONG], IDS[:1, LONG:])
        apart = float((torch.stack([x[0] for x in fed.logits]) - want).abs().max())
        assert (apart < 2e-4) == same


@pytest.mark.parametrize("family", OF)
def test_kl_and_log_likelihoods_of_the_full_cache_are_stocks(family: str) -> None:
    text, tail = IDS[0, :LONG].tolist(), IDS[0, LONG:].tolist()
    found = continuation_logprobs(tiny(family), [text], [tail], Full())
    rows = theirs(family, IDS[:1])[0, LONG - 1 : -1].log_softmax(-1)
    want = rows.gather(1, IDS[0, LONG:, None])[:, 0]
    torch.testing.assert_close(torch.as_tensor(found[0]), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", OF)
def test_undone_evictions_and_twins_know_them(family: str) -> None:
    """Undoing every eviction gives the full cache's answer; of layer 0 a twin explains the whole error."""
    model, prompt = tiny(family), IDS[0, :LONG].tolist()
    case = Case(model, prompt, (), CacheConfig(H2O(), Budget(tokens=8)), GenerationParams(NEW, eos=None))
    replay = Replay(case, 2)
    own, full = replay.answers([NOTHING_UNDONE, replay.everything])
    want = stock(family).generate(IDS[:1, :LONG], max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert full == want[0, LONG:].tolist() != own
    losses, _ = twin(case, own)
    frame = pd.DataFrame(losses.table())
    first = frame[frame["layer"] == 0]
    assert first["error"].to_numpy() == pytest.approx(first["error_here"].to_numpy(), rel=1e-3)
    assert float(first["error"].min()) > 1e-3 and float(first["lost"].max()) < 1


# -- what is refused, and which models they are ------------------------------------------------------------------------


def test_what_has_no_meaning_with_sinks_is_refused_before_a_forward() -> None:
    model = tiny("gpt_oss")
    with pytest.raises(ConfigError, match=r"attention sinks, .* set score\.sink=renormalised .* such as h2o"):
        EvictionCache(model, Keyformer(), Budget(tokens=9), max_new_tokens=4)
    EvictionCache(model, Keyformer(), Budget(tokens=9), max_new_tokens=4, score_sink="renormalised")
    EvictionCache(tiny("gemma2"), Keyformer(), Budget(tokens=9), max_new_tokens=4)
    with pytest.raises(CacheError, match=r"row masks .* task\.protocol=prefill_then_step"):
        model(IDS[:1], past_key_values=RowMaskCache(model, lambda x, layer: x > 0))


class Watching(Method):
    """Keeps the newest, and writes down what the second pass saw, layer by layer."""

    evicts_while_decoding = False

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    @property
    def needs(self) -> Needs:
        return Needs(second_pass=SecondPass(chunk=12))

    def priority(self, ctx: EvictionContext) -> Tensor:
        assert ctx.second_pass_attention is not None
        self.seen.append(ctx.second_pass_attention)
        return ctx.positions.float()


def test_a_second_pass_counts_sinks_as_each_cache_asks() -> None:
    """Two caches of one prefill see what each sees alone."""
    model, alone, together = tiny("gpt_oss"), [], []
    for sink in ("applied", "renormalised"):
        config = CacheConfig(Watching(), Budget(tokens=12), score_sink=sink)  # type: ignore[arg-type]
        feed(EvictionCache(model, config, prompt_tokens=LONG), model, IDS[:1, :LONG], IDS[:1, :0])
        alone.append(torch.stack(config.method.seen))  # type: ignore[attr-defined]
        together.append(CacheConfig(Watching(), Budget(tokens=12), score_sink=sink))  # type: ignore[arg-type]
    prefill_together(model, IDS[:1, :LONG].tolist(), together, max_new_tokens=1)
    for config, own in zip(together, alone, strict=True):
        torch.testing.assert_close(torch.stack(config.method.seen), own)  # type: ignore[attr-defined]
    applied, renormalised = alone
    assert bool((applied < renormalised).any()) and not bool((applied > renormalised).any())


def test_every_type_that_hands_sinks_to_attention_is_known() -> None:
    """Others: kvexp does not evict from them, or their sinks are in layers with a window, which the model attends."""
    others, found = {"deepseek_v4", "hy_v4", "mimo_v2_flash", "openai_privacy_filter"}, set()
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        if re.search(r"\bs_aux=", file.read_text()):
            found.add(file.stem.removeprefix("modeling_"))
    assert found == SINK_TYPES | others
