"""Gemma 3 270M, where `kvexp fetch gemma3_270m --accept-terms` has put it: what transformers makes of its folder."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvexp.core import Budget
from kvexp.hf import load_tokenizer
from kvexp.hf.fetch import located

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def model(gemma3):
    return AutoModelForCausalLM.from_pretrained(located(gemma3)[0], attn_implementation="eager")


@pytest.fixture(scope="module")
def tokenizer(gemma3):
    return load_tokenizer(gemma3)


def test_it_is_the_model_of_its_card(model, gemma3):
    config = model.config
    assert sum(weight.numel() for weight in model.parameters()) == 268_098_176  # the head is the embedding's own
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (18, 4, 1)
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert (config.sliding_window, config.head_dim, config.max_position_embeddings) == (512, 256, 32768)
    assert "Gemma Terms of Use" in (located(gemma3)[1].folder / "GEMMA_TERMS.html").read_text()


def test_it_reads_spaces_lines_and_bytes(tokenizer):
    ids = tokenizer("a  b\n\n 1987 naïve\x07").input_ids
    pieces = ["<bos>", "a", "▁▁", "b", "\n\n", "▁", "1", "9", "8", "7", "▁naïve", "<0x07>"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.chat_template is None


def test_it_knows_a_river(model, tokenizer):
    ids = tokenizer("Question: Which river flows through London?\nAnswer:", return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(made[0, ids.input_ids.shape[1] :]).strip() == "Thames"


def test_it_predicts_text_far_beyond_its_window(model, tokenizer):
    """English prose of kvexp's own, 900 tokens: a wrong norm, window or RoPE would cost nats."""
    from kvexp.tasks.articles import articles

    ids = tokenizer(articles()[0].text, return_tensors="pt").input_ids[:, :900]
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert loss[:450].mean() < 4 and loss[600:].mean() < 3.5  # measured: 3.70 and 3.35 nats


def test_with_nothing_evicted_its_tokens_are_hugging_faces(model, tokenizer, gemma3):
    """A prompt of 700 tokens, beyond the window, and a short one, in one batch and through the self-check at load."""
    from kvexp.generate import GenerationParams, generate
    from kvexp.hf import load_model
    from kvexp.methods import H2O, Full
    from kvexp.tasks.articles import articles

    ours, few = load_model(gemma3), GenerationParams(max_new_tokens=6)
    prompts = [tokenizer(articles()[0].text).input_ids[:700], tokenizer("The largest planet is").input_ids]
    made = generate(ours, prompts, Full(), decoding=few)
    for prompt, tokens in zip(prompts, made.tokens, strict=True):
        ids = torch.tensor([prompt])
        own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert list(tokens) == own[0, len(prompt) :].tolist()
    evicted = generate(ours, prompts[:1], H2O(), Budget(kv_ratio=0.25), decoding=few)
    assert len(evicted.tokens[0]) == len(made.tokens[0])
