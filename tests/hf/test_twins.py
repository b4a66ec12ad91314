"""Tiny twins of every causal type of transformers: with nothing evicted and under eviction kvexp's numbers are theirs.

With the full cache the truth is the type's own model with its own attention and cache; under eviction it is that model,
fed the whole text at once, whose layers are told by a mask which tokens each head still has (`Truth`).
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AttentionInterface, AutoConfig, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES
from twins import NOT_BUILT, ids_of, twin

from kvexp.core import Budget, CacheConfig
from kvexp.generate import GenerationParams, generate
from kvexp.generate.loop import decode
from kvexp.generate.prefill import prefill, prefill_together
from kvexp.hf import EvictionCache, patch_model
from kvexp.hf.patch import forward_columns, forward_logits
from kvexp.hf.probe import layer_ropes
from kvexp.hf.self_check import ATOL, RTOL, measure
from kvexp.hf.traits import REFUSED, VERIFIED, check_type, traits_of
from kvexp.methods import H2O, Full, KNorm, StreamingLLM
from kvexp.util import ConfigError

NEW = 10
# One type of each kind, in every run of the tests: what is special about it.
KINDS = {
    "smollm3": "full attention, with and without RoPE",
    "mistral": "one window in all layers",
    "phimoe": "a window that the mask alone has",
    "gemma3_text": "windows and full attention, a RoPE of each",
    "llama4_text": "chunks and full attention",
    "gemma2": "softcap",
    "gpt_oss": "sinks",
    "mimo_v2_flash": "values narrower than keys, heads by kind of layer",
    "qwen3_next": "linear attention and full attention",
    "lfm2": "convolution and full attention",
    "falcon_h1": "full attention and a state in each layer",
    "gemma3n_text": "layers that share keys",
    "gpt2": "learned positions",
    "mpt": "ALiBi",
}
# Of the largest logit: their own eager and SDPA, or whole and in parts, differ by as much.
ROUNDING = {"hrm_text": 1e-3, "granitemoe": 1e-4, "granitemoeshared": 1e-4, "granitemoe_swa": 1e-4, "zamba2": 1e-4}


def quick(names):
    return [pytest.param(name, marks=[] if name in KINDS else pytest.mark.slow) for name in sorted(names)]


def kvexps(name, dtype=torch.float32):
    return patch_model(copy.deepcopy(twin(name)).to(dtype), check="never")


def close(got, wanted, name):
    largest = float(wanted.abs().max())
    torch.testing.assert_close(got, wanted, atol=max(ATOL, ROUNDING.get(name, RTOL) * largest), rtol=0)


@torch.no_grad()
def own_logits(model, prompts, tokens):
    """Logits [B, 1 + steps, V] of transformers alone: prompts padded on the left, then tokens [B, steps] one by one."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache = DynamicCache(config=model.config)
    logits = [forward_logits(model, ids, mask, cache, keep=1)[:, -1]]
    for step in tokens.split(1, dim=1):
        mask = torch.cat([mask, torch.ones_like(step)], dim=1)
        logits.append(forward_logits(model, step, mask, cache, keep=1)[:, -1])
    return torch.stack(logits, dim=1)


GREEDY = GenerationParams(NEW, eos=None)


def answers(made):
    return torch.tensor(made.tokens), torch.stack(made.logits, dim=1)


@pytest.mark.parametrize("name", quick(VERIFIED))
def test_the_full_cache_is_transformers_own(name):
    """Greedy and logits: padded, in chunks, forked, and beside methods that evict; and four beams."""
    model, stock = kvexps(name), twin(name)
    prompts = [ids_of(1, 1, 44)[0].tolist(), ids_of(2, 1, 31)[0].tolist()]
    tokens, logits = answers(generate(model, prompts, Full(), decoding=GREEDY, keep_logits=True))
    wanted = own_logits(stock, prompts, tokens[:, :-1])
    close(logits, wanted, name)
    own = wanted.argmax(-1)
    clear = wanted.topk(2).values.diff(dim=-1).abs()[..., 0] > 1e-2
    assert bool((own == tokens)[clear].all()) and clear.float().mean() > 0.5

    def same(contexts, seeds=2):
        for made in decode(model, contexts, GREEDY, [0] * seeds, None, start=0.0, keep_logits=True):
            found, by_step = answers(made)
            assert bool((found == tokens)[clear].all())
            close(by_step, wanted, name)

    if traits_of(model.config).whole_prompts:
        with pytest.raises(ConfigError, match="leave prefill_chunk at null"):
            prefill(model, prompts, Full(), max_new_tokens=NEW, chunk=13)
    else:
        same([prefill(model, prompts, Full(), max_new_tokens=NEW, chunk=13)])
    context = prefill(model, prompts, Full(), max_new_tokens=NEW)
    fork = context.fork([1, 0])
    same([context])
    tokens, wanted, clear = (each.flip(0) for each in (tokens, wanted, clear))
    same([fork])
    tokens, wanted, clear = (each.flip(0) for each in (tokens, wanted, clear))
    evicting = CacheConfig(H2O(), Budget(kv_ratio=0.4))
    alone = generate(model, prompts, evicting, decoding=GREEDY, keep_logits=True)
    together = prefill_together(model, prompts, [CacheConfig(Full()), evicting], max_new_tokens=NEW)
    full, cut = decode(model, together, GREEDY, [0, 0], None, start=0.0, keep_logits=True)
    close(answers(full)[1], wanted, name)
    close(answers(cut)[1], answers(alone)[1], name)


@pytest.mark.parametrize("name", quick(VERIFIED))
def test_four_beams_are_transformers_own(name):
    prompts = [ids_of(1, 1, 28)[0].tolist(), ids_of(2, 1, 21)[0].tolist()]
    made = generate(kvexps(name), prompts, Full(), decoding=GenerationParams(6, num_beams=4, eos=None))
    stock = copy.deepcopy(twin(name))
    stock.config.use_cache = True
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"num_beams": 4, "do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    stock.generation_config.eos_token_id = None
    wanted = stock.generate(ids, attention_mask=mask, use_cache=True, **options)
    assert made.tokens == wanted[:, width:].tolist()


# -- under eviction ----------------------------------------------------------------------------------------------------


class Truth:
    """The type's own model over the whole text, with the attention of layers that kvexp holds masked as told.

    seen: of each such layer bool [B, H, N, N], what each query sees of what came before; probabilities and keys are
    noted. Masks, softcaps, sinks and windows are the model's own.
    """

    def __init__(self, name):
        self.model = copy.deepcopy(twin(name))
        traits, kinds = traits_of(self.model.config), getattr(self.model.config, "layer_types", None)
        self.held = traits.held
        self.window = next((layer.size for layer in traits.layers if self.held and layer.kind == "window"), None)
        self.window = self.window if traits.layers[self.held[0]].kind == "window" else None
        # Layers that share keys see what the layer sees whose keys they are.
        self.source = {layer: layer for layer in self.held}
        for reader, layer in enumerate(traits.layers):
            if layer.kind == "shared" and kinds[reader] == "full_attention":
                self.source[reader] = next(each for each in traits.shared if kinds[each] == "full_attention")
        self.seen, self.probabilities, self.keys = {}, {}, {}

    def attention(self, module, query, key, value, mask, **more):
        layer, own = module.layer_idx, self.eager(module)
        if layer in self.source:
            group = query.shape[1] // key.shape[1]
            if mask is None:
                mask = torch.zeros(1, 1, query.shape[2], key.shape[2])
            hidden = ~self.seen[self.source[layer]].repeat_interleave(group, dim=1)
            mask = mask.masked_fill(hidden, torch.finfo(query.dtype).min)
        out, weights = own(module, query, key, value, mask, **more)
        if layer in self.held and layer not in self.probabilities:
            self.probabilities[layer] = weights.unflatten(1, (key.shape[1], -1)).sum(2)
            self.keys[layer] = key
        return out, weights

    @staticmethod
    def eager(module):
        return sys.modules[type(module).__module__].eager_attention_forward

    @torch.no_grad()
    def logits(self, ids):
        AttentionInterface.register("truth", self.attention)
        AttentionMaskInterface.register("truth", eager_mask)
        self.model.set_attn_implementation("truth")
        self.probabilities, self.keys = {}, {}
        return self.model(ids, use_cache=False).logits


def kept_after(method, probabilities, keys, held, count, recent, window):
    """The positions that the papers' rules keep of `held`: count of them, the newest `recent` in any case.

    probabilities [rows so far, N]: attention of one kv head; keys [N, D]; window: what is older goes first.
    """
    newest = sorted(held)[len(held) - recent :] if recent else []
    if isinstance(method, StreamingLLM):
        ranked = sorted(held, key=lambda p: (p < method.n_sinks, p), reverse=True)
        return set(ranked[:count])
    if isinstance(method, KNorm):
        value = {p: -float(f"{float(keys[p].norm()):.4e}") for p in held}  # as near as 16 bits tell
    else:
        value = {p: float(probabilities[:, p].sum()) for p in held}
    last = max(held) + 1 - window if window else -1  # the newest position that the next query does not see
    rest = sorted((p for p in held if p not in newest), key=lambda p: (p > last, value[p], p), reverse=True)
    return {*newest, *rest[: count - len(newest)]}


METHODS = (StreamingLLM(), KNorm(), H2O())
RULED = [name for name in KINDS if name not in ("mpt",)]  # whose own attention is no function that can be replaced


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("name", RULED)
@torch.no_grad()
def test_under_eviction_kept_sets_are_the_rules_and_logits_are_those_of_a_mask(name, method):
    """Every kept set follows from the truth's own attention and keys; every logit is what that mask gives."""
    model, truth = kvexps(name), Truth(name)
    prompt, following, budget = 40, 9, 15
    ids = ids_of(3, 1, prompt + following)
    sizes = {"prompt_tokens": prompt, "max_new_tokens": following}
    cache = EvictionCache(model, method, Budget(tokens=budget), positions="original", **sizes)
    got, kept = [forward_logits(model, ids[:, :prompt], torch.ones(1, prompt, dtype=torch.long), cache, 1)[0, -1]], []
    for step in range(prompt, prompt + following):
        kept.append([state.kept_positions()[0] for state in cache.layer_states])
        token = ids[:, step : step + 1]
        got.append(forward_columns(model, token, token.new_ones(1, 0), torch.tensor([[step]]), cache, 1)[0, -1])
    total = prompt + following
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    for number, layer in enumerate(truth.held):
        heads = len(kept[0][number])
        seen = causal.expand(1, heads, total, total).clone()
        for step, each in enumerate(kept):
            for head in range(heads):
                seen[0, head, prompt + step] = False
                seen[0, head, prompt + step, [*each[number][head], prompt + step]] = True
        truth.seen[layer] = seen
    wanted = truth.logits(ids)[0, prompt - 1 :]
    close(torch.stack(got), wanted, name)
    differs = False
    for number, layer in enumerate(truth.held):
        for head in range(len(kept[0][number])):
            rows, keys = truth.probabilities[layer][0, head], truth.keys[layer][0, head]
            held = set(range(prompt))
            for step, each in enumerate(kept):
                count = len(each[number][head])
                assert count <= budget
                recent = method.recent(budget) - (budget - count)
                held = kept_after(method, rows[: prompt + step], keys, held, count, recent, truth.window)
                assert set(each[number][head]) == held, (layer, head, step)
                differs |= held != set(range(prompt + step - count, prompt + step))
                held = held | {prompt + step}
    assert differs


# -- other number formats ----------------------------------------------------------------------------------------------

HALVES = ("llama", "qwen3", "gemma3_text", "gemma2", "gpt_oss", "llama4_text", "olmo3", "lfm2", "phi3", "cohere2")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", HALVES)
def test_half_precision(name, dtype):
    """As near to the type's own logits as three times its own rounding."""
    measure(kvexps(name, dtype))


# -- the census --------------------------------------------------------------------------------------------------------


def test_every_type_of_transformers_is_verified_or_refused():
    """A new transformers brings new types: build a twin, or say why kvexp cannot serve it (kvexp/hf/traits.py)."""

    def classed(name):
        if name in REFUSED or name in VERIFIED or name in NOT_BUILT:
            return True
        try:
            config = AutoConfig.for_model(name)
            return config.get_text_config(decoder=True).model_type in VERIFIED or check_type(config) is not None
        except ConfigError:
            return True

    unknown = [name for name in TYPES if not classed(name)]
    assert not unknown
    assert len(VERIFIED) >= 100 and not set(REFUSED) & VERIFIED


def arguments_of_attention(name):
    """Names of the arguments that a type's own modules hand to the attention function, by their source."""
    module = importlib.import_module(getattr(transformers, TYPES[name]).__module__)
    calls = (node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call))
    attend = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "attention_interface")
    return {keyword.arg for call in attend for keyword in call.keywords if keyword.arg}


def test_every_argument_of_attention_is_known():
    known = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "attention_mask"}
    known |= {
        "output_attentions",
        "block_indices",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    }  # of towers
    new = {name: more for name in VERIFIED if (more := arguments_of_attention(name) - known)}
    assert not new, "class these in kvexp_attention (kvexp/hf/patch.py)"


# -- how keys are turned -----------------------------------------------------------------------------------------------


def test_each_layers_rope_is_found():
    """Which layers turn their keys is in each type's own field, which the probe does not read."""
    smollm, phi = kvexps("smollm3"), kvexps("phi")
    assert [rope is not None for rope in layer_ropes(smollm)] == [bool(x) for x in smollm.config.no_rope_layers]
    assert layer_ropes(kvexps("cohere2")) == [None, None], "its layers of full attention have no RoPE"
    assert layer_ropes(kvexps("llama4_text")) == [None, None]
    assert all(2 * len(rope.inv_freq) < phi.config.hidden_size // 4 for rope in layer_ropes(phi)), "a part of a head"
    gemma = kvexps("gemma3_text")
    rotary = gemma.model.rotary_emb
    for rope in layer_ropes(gemma):
        assert torch.equal(rope.inv_freq, rotary.full_attention_inv_freq) and not rope.interleaved
    assert all(rope.interleaved for rope in layer_ropes(kvexps("cohere")))


TABLE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "model_types.py"))


def test_the_table_of_the_documentation_is_of_the_types():
    assert TABLE["table"]() in TABLE["PAGE"].read_text(), "run: python docs/model_types.py"
