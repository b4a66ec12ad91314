"""Models whose cache holds latents (MLA): what is kept and attended to, from the formulas; bytes; what is refused.

The formulas are those of DeepSeek-V2 (arXiv:2405.04434, section 2.1) in their absorbed form, which transformers
does not compute: q . k = (q_nope W_UK) . c + q_rope . k_rope and output = (sum p c) W_UV, in float64, RoPE as complex
numbers.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from twins import ids_of, twin

from kvexp.core import Budget, CacheConfig, EngineQuantization, Method, Needs, Quantization
from kvexp.core.selection import SlotSelection
from kvexp.generate import GenerationParams, generate
from kvexp.generate.inputs import receipt_of
from kvexp.generate.prefill import prefill
from kvexp.hf import EvictionCache, calibrate_queries, patch_model
from kvexp.hf.cache import check_layers
from kvexp.hf.patch import forward_columns, forward_logits
from kvexp.hf.self_check import measure
from kvexp.hf.traits import query_shape, traits_of
from kvexp.methods import H2O, TOVA, Full, KNorm, KVzip, KVzipPlus, SnapKV, StreamingLLM, TriAttention
from kvexp.retrieval import Quest
from kvexp.util.errors import CacheError, ConfigError

NAME, PROMPT, NEW = "deepseek_v3", 40, 9
SLOT = 8 + 24  # numbers of a rotary key and of a latent


def patched(name=NAME):
    return patch_model(copy.deepcopy(twin(name)), check="never")


# -- the first layer, whose input no eviction changes ------------------------------------------------------------------


class Formulas:
    """The first layer's attention of a text of N tokens, from its weights alone."""

    def __init__(self, ids):
        model = twin(NAME)
        layer, config = model.model.layers[0], model.config
        weights = {name: weight.detach().double() for name, weight in layer.self_attn.named_parameters()}
        hidden = layer.input_layernorm(model.model.embed_tokens(ids))[0].detach().double()
        self.heads, self.nope, self.rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        rank, theta = config.kv_lora_rank, config.rope_parameters["rope_theta"]

        def normed(x, weight):
            return (
                x
                / (x.square().mean(-1, keepdim=True) + layer.self_attn.kv_a_layernorm.variance_epsilon).sqrt()
                * weight
            )

        queries = normed(hidden @ weights["q_a_proj.weight"].T, weights["q_a_layernorm.weight"])
        queries = (queries @ weights["q_b_proj.weight"].T).unflatten(-1, (self.heads, -1))  # [N, heads, nope + rope]
        compressed = hidden @ weights["kv_a_proj_with_mqa.weight"].T
        self.latents = normed(compressed[:, :rank], weights["kv_a_layernorm.weight"])  # [N, r]
        up = weights["kv_b_proj.weight"].view(self.heads, -1, rank)
        self.values_up, self.out = up[:, self.nope :], weights["o_proj.weight"]
        self.absorbed = torch.einsum("nhd,hdr->hnr", queries[..., : self.nope], up[:, : self.nope])
        self.turns = theta ** -(torch.arange(0, self.rope, 2).double() / self.rope)
        self.query_pairs = torch.view_as_complex(queries[..., self.nope :].unflatten(-1, (-1, 2)).contiguous())
        self.key_pairs = torch.view_as_complex(compressed[:, rank:].unflatten(-1, (-1, 2)).contiguous())

    def attention(self, query, held, *, renumbered=False):
        """Probabilities [heads, len(held)] of the query at position `query`, and the layer's output [width]."""
        places = torch.arange(len(held)) if renumbered else torch.tensor(held)
        own = places[held.index(query)]
        rotary_keys = self.key_pairs[held] * torch.polar(torch.ones(1).double(), places[:, None] * self.turns)
        rotary = self.query_pairs[query] * torch.polar(torch.ones(1).double(), own * self.turns)
        logits = self.absorbed[:, query] @ self.latents[held].T + (rotary.conj() @ rotary_keys.T).real
        probabilities = (logits * (self.nope + self.rope) ** -0.5).softmax(-1)
        value = torch.einsum("hs,sr,hdr->hd", probabilities, self.latents[held], self.values_up)
        return probabilities, self.out @ value.flatten()


def kept_by_the_rule(method, sums, held, count, recent):
    """Positions that stay of `held`: the newest `recent`, and the best of the others by the method's rule."""
    newest = held[len(held) - recent :] if recent else []
    if isinstance(method, StreamingLLM):
        value = {p: (p < method.n_sinks, p) for p in held}
    elif isinstance(method, SnapKV):  # the largest of five neighbours, of those that do not observe
        alone = [0.0, 0.0, *(0.0 if p in newest else sums[p] for p in held), 0.0, 0.0]
        value = {p: (max(alone[p : p + 5]), p) for p in held}
    else:
        value = {p: (sums[p], p) for p in held}
    rest = sorted((p for p in held if p not in newest), key=value.get, reverse=True)
    return sorted([*newest, *rest[: count - len(newest)]])


@pytest.mark.parametrize(
    ("method", "positions"),
    [
        (H2O(), "original"),
        (TOVA(), "original"),
        (SnapKV(window=6), "original"),
        (StreamingLLM(), "original"),
        (StreamingLLM(), "renumbered"),
        (H2O(), "renumbered"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
@torch.no_grad()
def test_kept_latents_and_outputs_are_those_of_the_formulas(method, positions):
    """Scores are sums over query heads; renumbering turns the rotary keys alone; the budget is of one set per layer."""
    ids, budget = ids_of(3, 1, PROMPT + NEW), 15
    model, formulas, outputs = patched(), Formulas(ids), []
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(lambda module, args, out: outputs.append(out[0][0, -1]))
    sizes = {"prompt_tokens": PROMPT, "max_new_tokens": NEW}
    cache = EvictionCache(model, method, Budget(tokens=budget), positions=positions, **sizes)
    forward_logits(model, ids[:, :PROMPT], torch.ones(1, PROMPT, dtype=torch.long), cache, 1)
    first = PROMPT - method.window if isinstance(method, SnapKV) else PROMPT - 1 if isinstance(method, TOVA) else 0
    sums = dict.fromkeys(range(PROMPT + NEW), 0.0)
    for query in range(first, PROMPT):
        seen = list(range(query + 1))
        for p, share in zip(seen, formulas.attention(query, seen)[0].sum(0).tolist(), strict=True):
            sums[p] += share
    torch.testing.assert_close(outputs[-1].double(), formulas.attention(PROMPT - 1, seen)[1], atol=1e-5, rtol=0)
    held = list(range(PROMPT))
    for step in range(PROMPT, PROMPT + NEW):
        (kept,) = cache.kept_positions(0)[0]
        assert len(kept) <= budget or not method.evicts_while_decoding
        recent = method.recent(budget) - (budget - len(kept)) * (not isinstance(method, SnapKV))
        if method.evicts_while_decoding or step == PROMPT:
            held = kept_by_the_rule(method, sums, held, len(kept), recent)
        assert kept == held, step
        token = ids[:, step : step + 1]
        forward_columns(model, token, token.new_ones(1, 0), torch.tensor([[step]]), cache, 1)
        held = [*held, step]
        shares, wanted = formulas.attention(step, held, renumbered=positions == "renumbered")
        torch.testing.assert_close(outputs[-1].double(), wanted, atol=1e-5, rtol=0)
        if isinstance(method, TOVA):
            sums = dict.fromkeys(sums, 0.0)
        for p, share in zip(held, shares.sum(0).tolist(), strict=True):
            sums[p] += share
    assert held != list(range(PROMPT + NEW - len(held), PROMPT + NEW))


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "numbers"), [(NAME, SLOT), ("kimi_linear", SLOT), ("deepseek_v32", SLOT + 16)])
def test_bytes_are_those_of_latents_and_rotary_keys_and_of_the_indexs_keys(name, numbers):
    model = patched(name)
    context = prefill(model, ids_of(1, 1, 44).tolist(), H2O(), Budget(tokens=12), max_new_tokens=4)
    receipt, layers = receipt_of(context.cache, 0), len(traits_of(model.config).held)
    assert receipt.ledger["latent"][0] == 12 * layers * numbers * 4
    assert receipt.ledger["latent"][1] >= 44 * numbers * 4, "of one layer at least, when its prompt ends"
    assert receipt.ledger["held"] == [0, 0] and (receipt.ledger["state"][0] > 0) is (name == "kimi_linear")
    assert receipt.kv_bytes == sum(now for now, _ in (receipt.ledger[line] for line in ("latent", "state")))


def test_latents_are_quantised_where_groups_divide_them():
    """Eight bits are near the full cache; groups go along rotary keys of 8 and latents of 24 numbers."""
    model, prompts = patched(), [ids_of(1, 1, 44)[0].tolist()]
    how = {"decoding": GenerationParams(NEW, eos=None), "keep_logits": True}
    full = generate(model, prompts, Full(), **how)
    coarse, fine = (
        generate(model, prompts, CacheConfig(Full(), quantization=Quantization(bits, bits, group=8, residual=4)), **how)
        for bits in (2, 8)
    )
    apart = [float((made.logits[1] - full.logits[1]).abs().max()) for made in (coarse, fine)]
    assert 0 < apart[1] < 0.2 < apart[0]
    with pytest.raises(ConfigError, match="group=16 does not divide the 24 channels of a value head"):
        generate(model, prompts, CacheConfig(Full(), quantization=Quantization(4, 4, group=16)), **how)


# -- what is refused ---------------------------------------------------------------------------------------------------


class ReadsKeys(Method):
    """A user's method that does not say that it reads keys."""

    def priority(self, ctx):
        return ctx.slots.keys.norm(dim=-1)


class ReadsNothing(Method):
    """One that goes by attention."""

    @property
    def needs(self):
        return Needs(newest_attention=True)

    def priority(self, ctx):
        return ctx.newest_attention.sum(2)


HALF = Budget(kv_ratio=0.5)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ((KNorm(), HALF), "method knorm looks at keys or values of heads: take a method of attention or of positions"),
        ((KVzipPlus(), HALF), "method kvzip_plus looks at keys or values of heads"),
        ((Quest(), HALF), "method quest looks at keys or values of heads"),
        ((H2O(), Budget(kv_ratio=0.5, heads="global")), "budget.heads=global is of heads .* set budget.heads=uniform"),
        ((H2O(), HALF, {"select": SlotSelection(values="critical")}), "leave select.values at none"),
        ((H2O(), HALF, {"quantization": EngineQuantization("q8_0")}), "set cache.key_bits and cache.value_bits"),
    ],
    ids=str,
)
def test_what_looks_at_heads_is_refused_by_the_configuration_alone(config, why):
    method, budget, options = (*config, {})[:3]
    traits = traits_of(twin(NAME).config)
    with pytest.raises(
        ConfigError, match=f"in deepseek_v3 a slot is a latent that all heads of a layer expand, .*{why}"
    ):
        check_layers(traits, CacheConfig(method, budget, **options))


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        (H2O(), {"positions": "renumbered"}, "set cache.positions=original"),
        (SnapKV(decoding=True), {}, "take a method that adds attention up, such as h2o"),
        (KVzip(), {}, "or would for a repeated prompt, is not kept"),
    ],
)
def test_what_an_index_does_not_choose_for_is_refused(method, options, why):
    with pytest.raises(ConfigError, match=f"in deepseek_v32 an index chooses among slots, and .*{why}"):
        check_layers(traits_of(twin("deepseek_v32").config), CacheConfig(method, HALF, **options))


def test_without_a_cache_an_index_has_nothing_to_choose_among():
    with pytest.raises(CacheError, match="this forward has none: give it an EvictionCache"):
        patched("deepseek_v32")(ids_of(1, 1, 12), use_cache=False)


def test_statistics_of_heads_are_refused():
    with pytest.raises(ConfigError, match="no use for statistics of keys and queries of heads"):
        query_shape(twin(NAME).config)
    assert TriAttention().needs.calibration
    with pytest.raises(ConfigError, match="no use for statistics of keys and queries of heads"):
        calibrate_queries(patched(), [[5, 6, 7]])


def test_a_users_method_may_look_at_attention_and_not_at_keys():
    model, ids = patched(), ids_of(1, 1, 44).tolist()
    cache = prefill(model, ids, ReadsNothing(), HALF, max_new_tokens=4).cache
    assert len(cache.kept_positions(0)[0][0]) <= 22
    with pytest.raises(ConfigError, match="a method reads keys or values of slots, and this model's slots are latents"):
        prefill(model, ids, ReadsKeys(), HALF, max_new_tokens=4)


class TwoPaths(DeepseekV3Attention):
    """A module that makes other keys of latents in its forward than `expand_kv` does."""

    def forward(self, *given, **more):
        self.inside = True
        return super().forward(*given, **more)

    def expand_kv(self, *latents):
        keys, values = super().expand_kv(*latents)
        self.inside, first = False, self.inside
        return (1.3 * keys if first else keys), values


def test_a_module_whose_two_ways_to_attend_disagree_is_refused_with_both():
    model = copy.deepcopy(twin(NAME))
    model.model.layers[2].self_attn.__class__ = TwoPaths
    with pytest.raises(ConfigError, match=r"layer 2, .*: what Deepseek.*forward attends to is not what its expand_kv"):
        patch_model(model, check="always")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    measure(patch_model(copy.deepcopy(twin(NAME)).to(dtype), check="never"))
