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
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from tiny import LETTERS
from transformers import AttentionInterface, AutoConfig, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES
from twins import NOT_BUILT, ids_of, twin

from kvexp.core import Budget, CacheConfig, Method, Needs, SecondPass
from kvexp.generate import GenerationParams, generate
from kvexp.generate.inputs import receipt_of
from kvexp.generate.loop import decode
from kvexp.generate.prefill import prefill, prefill_together
from kvexp.hf import EvictionCache, patch_model
from kvexp.hf.patch import SHIMS, forward_columns, forward_logits
from kvexp.hf.probe import layer_ropes
from kvexp.hf.self_check import ATOL, RTOL, measure
from kvexp.hf.traits import REFUSED, VERIFIED, check_type, traits_of
from kvexp.methods import H2O, TOVA, Full, KNorm, KVzip, StreamingLLM
from kvexp.util.errors import ConfigError

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
    "gemma4_text": "layers that share keys, for the newest queries alone",
    "gpt_neo": "attention of its own, whole and in windows, and learned positions",
    "deepseek_v3": "latents",
    "deepseek_v32": "latents among which an index chooses",
    "kimi_linear": "latents without RoPE, and linear attention",
    "mpt": "ALiBi",
    "falcon": "kv heads that its own cache repeats",
}
# Of the largest logit: their own eager and SDPA, or whole and in parts, differ by as much.
# On an AMD EPYC: qwen3_next, whole and in parts, up to 1.2e-4 in 40 texts; granitemoe, whole and token by token, up to
# 1.1e-4 in 40; granite_swa, a prompt alone and in a batch, up to 0.9e-4 in 12.
ROUNDING = {
    **{"hrm_text": 1e-3, "granitemoe": 1.5e-4, "granitemoeshared": 1e-4, "granitemoe_swa": 1e-4, "zamba2": 1e-4},
    **{"qwen3_next": 1e-4, "granite_swa": 1e-4},
}


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

    def __init__(self, name, sliding="auto"):
        self.model = copy.deepcopy(twin(name))
        traits, kinds = traits_of(self.model.config, sliding), getattr(self.model.config, "layer_types", None)
        self.held = traits.held
        self.windows = [traits.layers[layer].size for layer in self.held]
        # Layers that share keys see what the layer sees whose keys they are.
        self.source = {layer: layer for layer in self.held}
        for reader, layer in enumerate(traits.layers):
            if layer.kind == "shared" and (sliding is True or kinds[reader] == "full_attention"):
                self.source[reader] = next(each for each in traits.shared if kinds[each] == kinds[reader])
        self.seen, self.probabilities, self.keys = {}, {}, {}

    def attention(self, module, query, key, value, mask, **more):
        layer, own = module.layer_idx, self.eager(module)
        if mask is None:
            mask = torch.zeros(1, 1, query.shape[2], key.shape[2])
        chosen = more.pop("indices", None)
        mask = self.hide(layer, mask, query.shape[1])
        if chosen is not None and layer in self.source:
            seen = self.seen[self.source[layer]]
            hidden = torch.ones_like(seen).scatter(-1, chosen.long()[:, None], False)
            mask = mask.masked_fill(hidden, torch.finfo(query.dtype).min)
        out, weights = own(module, query, key, value, mask, **more)
        self.note(layer, weights, key)
        return out, weights

    def hide(self, layer, mask, heads):
        """The model's mask without what its heads have lost; MPT's is True for what is hidden."""
        if layer not in self.source:
            return mask
        seen = self.seen[self.source[layer]]
        hidden = ~seen.repeat_interleave(heads // seen.shape[1], dim=1)
        return mask | hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)

    def note(self, layer, weights, key):
        if layer in self.held and layer not in self.probabilities:
            self.probabilities[layer] = weights.unflatten(1, (self.seen[self.source[layer]].shape[1], -1)).sum(2)
            self.keys[layer] = key

    def choose(self, index, args):
        """Forward pre-hook of an index: it is to choose among what its layer still has."""
        hidden, queries, places, mask, *more = args
        unseen = ~self.seen[index.layer_idx][:, 0]
        return hidden, queries, places, mask.masked_fill(unseen, torch.finfo(mask.dtype).min), *more

    @staticmethod
    def eager(module):
        return sys.modules[type(module).__module__].eager_attention_forward

    @torch.no_grad()
    def logits(self, ids):
        self.probabilities, self.keys = {}, {}
        if traits_of(self.model.config).type in SHIMS:
            return self.own_logits(ids)
        AttentionInterface.register("truth", self.attention)
        AttentionMaskInterface.register("truth", eager_mask)
        self.model.set_attn_implementation("truth")
        for module in self.model.modules():
            if hasattr(module, "indexer"):
                module.indexer.register_forward_pre_hook(self.choose)
        return self.model(ids, use_cache=False).logits

    def own_logits(self, ids):
        """Logits of a model whose attention is no function; its modules get other masks, and tell their weights."""
        cache, weights = DynamicCache(), {}
        config = self.model.config
        stock = SHIMS[config.model_type].__mro__[1]
        for layer, module in enumerate(each for each in self.model.modules() if isinstance(each, stock)):

            def put(module, args, given, layer=layer):
                mask = self.hide(layer, given["attention_mask"], config.num_attention_heads)
                return args, given | {"attention_mask": mask}

            def take(module, args, output, layer=layer):
                weights[layer] = output[1]

            module.register_forward_pre_hook(put, with_kwargs=True)
            module.register_forward_hook(take)
        logits = self.model(ids, past_key_values=cache, use_cache=True).logits
        for layer in self.held:
            key, heads = cache.layers[layer].keys, self.seen[layer].shape[1]
            self.note(layer, weights[layer], key[:, :: key.shape[1] // heads])  # Falcon's cache repeats them
        return logits


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
        rows = probabilities[-1:] if isinstance(method, TOVA) else probabilities
        value = {p: float(rows[:, p].sum()) for p in held}
    last = max(held) + 1 - window if window else -1  # the newest position that the next query does not see
    rest = sorted((p for p in held if p not in newest), key=lambda p: (p > last, value[p], p), reverse=True)
    return {*newest, *rest[: count - len(newest)]}


METHODS = (StreamingLLM(), KNorm(), H2O())
LATENTS = (
    "deepseek_v3",
    "deepseek_v32",
    "kimi_linear",
)  # which have no keys to measure; TOVA keeps one set for all heads


def methods_for(name):
    return (StreamingLLM(), TOVA(), H2O()) if name in LATENTS else METHODS


@pytest.mark.parametrize("method", range(3))
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_under_eviction_kept_sets_are_the_rules_and_logits_are_those_of_a_mask(name, method):
    """Every kept set follows from the truth's own attention and keys; every logit is what that mask gives."""
    follows_the_rules(name, methods_for(name)[method], Budget(tokens=15), "auto", lambda window: 15)


# Layers with a sliding window that are evicted from, beside layers that keep every token.
SLIDING = ("gemma3_text", "gemma2", "gpt_oss", "gemma3n_text")
ENDS = ("", "_text", "_unified", "_unified_text", "_unified_assistant")
OTHER_HEADS = ("mimo_v2_flash", *(f"gemma4{end}" for end in ENDS))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("name", SLIDING)
@torch.no_grad()
def test_windows_are_evicted_from_where_it_is_asked(name, method):
    """A window's budget is of what it holds: of 40 tokens half of 20, and no more than 20."""
    follows_the_rules(name, method, Budget(kv_ratio=0.5), True, lambda window: 10 if window else 20)


def follows_the_rules(name, method, given, sliding, budget_of):
    """Compare a prompt of 40 tokens and 9 more; budget_of: slots of a layer of this window, None without."""
    model, truth = kvexps(name), Truth(name, sliding)
    prompt, following = 40, 9
    ids = ids_of(3, 1, prompt + following)
    sizes = {"prompt_tokens": prompt, "max_new_tokens": following}
    cache = EvictionCache(model, method, given, positions="original", evict_sliding=sliding, **sizes)
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
        budget = budget_of(truth.windows[number])
        for head in range(len(kept[0][number])):
            rows, keys = truth.probabilities[layer][0, head], truth.keys[layer][0, head]  # keys: of latents' first head
            held = set(range(prompt))
            for step, each in enumerate(kept):
                count = len(each[number][head])
                assert count <= budget
                recent = method.recent(budget) - (budget - count)
                held = kept_after(method, rows[: prompt + step], keys, held, count, recent, truth.windows[number])
                assert set(each[number][head]) == held, (layer, head, step)
                differs |= held != set(range(prompt + step - count, prompt + step))
                held = held | {prompt + step}
    assert differs


@pytest.mark.parametrize("name", quick(VERIFIED))
@torch.no_grad()
def test_windows_that_are_evicted_from_lose_nothing_with_room_for_all(name):
    """Logits are transformers' own: padded rows, one prefill with caches that keep their windows, steps together."""
    model, stock = kvexps(name), twin(name)
    traits = traits_of(model.config, True)
    if not traits.evicts_in_windows:
        pytest.skip("no windows beside other layers")
    windows = CacheConfig(H2O(), Budget(tokens=64), evict_sliding=True)
    prompts = [ids_of(1, 1, 44)[0].tolist(), ids_of(2, 1, 31)[0].tolist()]
    if name in OTHER_HEADS:
        with pytest.raises(ConfigError, match="have other heads than its other layers have"):
            generate(model, prompts, windows, decoding=GREEDY)
        return
    tokens, logits = answers(generate(model, prompts, windows, decoding=GREEDY, keep_logits=True))
    wanted = own_logits(stock, prompts, tokens[:, :-1])
    close(logits, wanted, name)
    caches = [CacheConfig(Full()), windows, CacheConfig(H2O(), Budget(kv_ratio=0.4))]
    alone = generate(model, prompts, caches[2], decoding=GREEDY, keep_logits=True)
    together = prefill_together(model, prompts, caches, max_new_tokens=NEW)
    made = [answers(each)[1] for each in decode(model, together, GREEDY, [0, 0], None, start=0.0, keep_logits=True)]
    for got, own in zip(made, (wanted, wanted, answers(alone)[1]), strict=True):
        close(got, own, name)
    slots = [state.slots.length for state in together[1].cache.layer_states]
    assert all(count == window for count, window in zip(slots, traits.windows, strict=True) if window)


# -- other number formats ----------------------------------------------------------------------------------------------

HALVES = ("llama", "qwen3", "gpt_oss", "llama4_text", "olmo3", "lfm2", "phi3", "cohere2")
HALVES += ("gemma2", "gemma3_text", "gemma4_text", "bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", HALVES)
def test_half_precision(name, dtype):
    """As near to the type's own logits as one and a half times its own rounding, in the root mean square."""
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
        "indices",  # of an index, which is asked again
        "block_indices",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    }  # of towers
    new = {name: more for name in VERIFIED if (more := arguments_of_attention(name) - known)}
    assert not new, "class these in kvexp_attention (kvexp/hf/patch.py)"


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "llama4_text", "falcon_h1", "llama"])
@torch.no_grad()
def test_bytes_are_those_of_all_layers(name):
    """Windows and states count as transformers' own cache holds them; a model without has bytes of slots alone."""
    model, ids = kvexps(name), ids_of(1, 1, 44)
    context = prefill(model, ids.tolist(), H2O(), Budget(kv_ratio=0.4), max_new_tokens=NEW)
    stock = DynamicCache(config=model.config)
    twin(name)(ids, past_key_values=stock, use_cache=True)
    other = 0
    for layer, kind in zip(stock.layers, traits_of(model.config).layers, strict=True):
        held = [] if kind.kind in ("full", "hybrid") else [layer.keys, layer.values] if kind.size else []
        held += [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
        other += sum(each.numel() * each.element_size() for each in held if each is not None)
    cache = context.cache
    assert receipt_of(cache, 0).kv_bytes == cache.memory_tracker.bytes + other
    assert (other > 0) is (name != "llama")


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


# -- prompts that are read a second time -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watcher(Method):
    """Keeps the newest, and writes down what the second pass saw, layer by layer."""

    evicts_while_decoding = False
    how: SecondPass = field(default_factory=SecondPass)
    seen: tuple[list[torch.Tensor], ...] = ()

    @property
    def needs(self):
        return Needs(second_pass=self.how)

    def priority(self, ctx):
        self.seen[0].append(ctx.second_pass_attention)
        return ctx.positions.float()


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "llama4_text", "deepseek_v3"])
@torch.no_grad()
def test_a_second_pass_sees_windows_and_chunks_as_they_are_behind_the_prompt(name):
    """Attention is the type's own model's over prompt and repetition in one forward; windows stay as they were."""
    stock = twin(name, 0.1)  # attention even enough for a part of it to be held against the whole
    model, held = patch_model(copy.deepcopy(stock), check="never"), traits_of(stock.config).held
    prompts, notes = [ids_of(1, 1, 44)[0].tolist(), ids_of(2, 1, 31)[0].tolist()], []
    how = SecondPass(2, 13, 3, "ab", "c", end_turn=True)
    context = prefill(
        model, prompts, Watcher(how, (notes,)), Budget(kv_ratio=0.5), max_new_tokens=NEW, chunk=17, tokenizer=LETTERS
    )
    assert len(notes) == len(held)
    for row, prompt in enumerate(prompts):
        n = len(prompt)
        want = [torch.zeros(*notes[0].shape[1:3], n) for _ in held]
        for start in range(2, n, 13):
            ahead = [36, 37] if start == 2 else [38, *prompt[start - 3 : start]]
            text = torch.tensor([[*prompt, *ahead, 10, *prompt[start : start + 13]]])
            attentions = stock(text, output_attentions=True, use_cache=False).attentions
            chunk = list(range(start, min(start + 13, n)))
            near = [0, 1, *chunk, *range(n, text.shape[1])]
            for number, layer in enumerate(held):
                weights = attentions[layer][0, :, n:, : text.shape[1]]
                sink = 1 - weights.sum(-1, keepdim=True)
                share = weights / (weights[..., near].sum(-1, keepdim=True) + sink)
                want[number][..., chunk] = share[..., chunk].amax(1).unflatten(0, want[number].shape[:2])
        for number, note in enumerate(notes):
            torch.testing.assert_close(note[row][..., 44 - n :], want[number], rtol=2e-4, atol=2e-6)
    same = prefill(model, prompts, StreamingLLM(), Budget(kv_ratio=0.5), max_new_tokens=NEW, chunk=17)
    for mine, other in zip(context.cache.windows, same.cache.windows, strict=True):
        assert torch.equal(mine.window.keys, other.window.keys) and torch.equal(mine.positions, other.positions)


def test_a_second_pass_is_refused_where_states_have_gone_on():
    for name in ("qwen3_next", "falcon_h1", "lfm2", "gemma3n_text"):
        with pytest.raises(ConfigError, match="some keep a state that has gone on by then, or attend to keys that are"):
            EvictionCache(kvexps(name), KVzip(instruct=False), Budget(tokens=9))
