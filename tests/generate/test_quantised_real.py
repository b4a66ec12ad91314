"""Quantised slots of a real language model, where `kvexp fetch` has put it: few bits beside the full cache."""

from __future__ import annotations

import pytest

from kvexp.core import Budget, CacheConfig, Quantization
from kvexp.generate import divergence_from_full, prefill_together
from kvexp.hf import load_model, load_tokenizer
from kvexp.methods import H2O, Full
from kvexp.run.prompts import in_template
from kvexp.tasks.articles import articles

pytestmark = [pytest.mark.real, pytest.mark.slow]
NEW = 12


def test_fewer_bits_diverge_more_and_eight_hardly(smollm2):
    """One article's first words; eight bits are nearer to the full cache than half of its tokens are."""
    model, tokenizer = load_model(smollm2), load_tokenizer(smollm2)
    words = in_template(tokenizer, f"Summarize the following news article:\n\n{articles()[0].text[:2000]}\n\n")
    ids = tokenizer(words, add_special_tokens=False).input_ids
    variants = {bits: CacheConfig(Full(), quantization=Quantization(bits, bits)) for bits in (8, 4, 2)}
    variants["h2o"] = CacheConfig(H2O(), Budget(kv_ratio=0.5))
    contexts = prefill_together(model, [ids], [CacheConfig(Full()), *variants.values()], max_new_tokens=NEW)
    full = contexts[0].cache.memory_tracker.bytes
    held = {name: each.cache.memory_tracker.bytes / full for name, each in zip(variants, contexts[1:], strict=True)}
    found = divergence_from_full(model, contexts[0], contexts[1:], max_new_tokens=NEW)
    kl = {name: sum(text.kl[1:]) / len(text.kl[1:]) for name, (text,) in zip(variants, found, strict=True)}
    assert 0 < kl[8] < kl[4] < kl[2] and kl[8] < 0.001 and kl[8] < kl["h2o"]
    assert held[2] < held[4] < held[8] < 0.6  # of float32, with the window in full precision
