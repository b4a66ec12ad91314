"""Whole models with a softcap or attention sinks: diagnosed and refused. Their numbers: test_twins.py."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvexp.core import Budget, CacheConfig
from kvexp.diagnose.case import Case
from kvexp.diagnose.replay import NOTHING_UNDONE, Replay
from kvexp.generate.inputs import GenerationParams
from kvexp.hf import EvictionCache, patch_model
from kvexp.hf.cache import RowMaskCache
from kvexp.hf.traits import SINK_TYPES
from kvexp.methods import H2O, Keyformer
from kvexp.util.errors import CacheError, ConfigError

LAYERS, HEADS, KV_HEADS, WINDOW, LONG, NEW = 2, 6, 2, 9, 31, 8
SIZES = {
    **{"vocab_size": 61, "hidden_size": 30, "intermediate_size": 26, "num_hidden_layers": LAYERS, "head_dim": 14},
    **{"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 211},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "sliding_window": WINDOW},
    # All attention is full, so that kvexp holds every layer; by default every second one slides.
    **{"tie_word_embeddings": False, "layer_types": ["full_attention"] * LAYERS},
}
OF = {
    "gemma2": {"attn_logit_softcapping": 2.5, "query_pre_attn_scalar": 10},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 32, "intermediate_size": 32},
}
IDS = torch.randint(1, 61, (2, LONG + NEW), generator=torch.Generator().manual_seed(3))


@functools.cache
def stock(family: str) -> PreTrainedModel:
    """A model with eager attention, and weights large enough for attention to be uneven."""
    config = AutoConfig.for_model(family, **{**SIZES, **OF[family]})
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
def tiny(family: str) -> PreTrainedModel:
    return patch_model(copy.deepcopy(stock(family)), check="never")


@pytest.mark.parametrize("family", OF)
def test_undone_evictions_know_them(family: str) -> None:
    """Undoing every eviction gives the full cache's answer."""
    model, prompt = tiny(family), IDS[0, :LONG].tolist()
    case = Case(model, prompt, (), CacheConfig(H2O(), Budget(tokens=8)), GenerationParams(NEW, eos=None))
    replay = Replay(case, 2)
    own, full = replay.answers([NOTHING_UNDONE, replay.everything])
    want = stock(family).generate(IDS[:1, :LONG], max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert full == want[0, LONG:].tolist() != own


def test_what_has_no_meaning_with_sinks_is_refused_before_a_forward() -> None:
    model = tiny("gpt_oss")
    with pytest.raises(ConfigError, match=r"attention sinks, .* set score\.sink=renormalised .* such as h2o"):
        EvictionCache(model, Keyformer(), Budget(tokens=9), max_new_tokens=4)
    EvictionCache(model, Keyformer(), Budget(tokens=9), max_new_tokens=4, score_sink="renormalised")
    EvictionCache(tiny("gemma2"), Keyformer(), Budget(tokens=9), max_new_tokens=4)
    with pytest.raises(CacheError, match=r"row masks .* task\.protocol=prefill_then_step"):
        model(IDS[:1], past_key_values=RowMaskCache(model, lambda x, layer: x > 0))


def test_every_type_that_hands_sinks_to_attention_is_known() -> None:
    """Others: kvexp does not evict from them, or their sinks are in layers with a window, which the model attends."""
    others, found = {"deepseek_v4", "hy_v4", "mimo_v2_flash", "openai_privacy_filter"}, set()
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        if re.search(r"\bs_aux=", file.read_text()):
            found.add(file.stem.removeprefix("modeling_"))
    assert found == SINK_TYPES | others
