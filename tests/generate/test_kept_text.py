"""cache.show(): the prompt's tokens by how many heads hold them, in a notebook and in a terminal."""

from __future__ import annotations

import re
from html import unescape

import pytest
import torch
from tiny import prompts_of, tiny

from kvexp.core import Budget
from kvexp.generate import CacheConfig, GenerationParams, decode, generate, prefill, prefill_together
from kvexp.hf import EvictionCache, random_model
from kvexp.hf.cache import KeptText
from kvexp.hf.load import byte_tokenizer
from kvexp.methods import H2O, Full, Window
from kvexp.util import ConfigError

EVIL = "<script>alert(1)</script>\n<img src=x onerror='alert(2)'> &lt;b&gt; \" style=\"x"
SPAN = re.compile(
    r'<span class="(\w+)"(?: style="background:rgba\(0,158,115,([\d.]+)\)")? title="([^"]*)">([^<]*)</span>'
)
FIVE = Budget(tokens=5)


class Numbers:
    """Every token is its number."""

    def decode(self, ids, **_):
        return "".join(f"{token} " for token in ids)


def kept_by(html):
    return [int(re.search(r"kept by (\d+) of", title)[1]) for _, _, title, _ in SPAN.findall(html)]


def test_by_hand():
    shown = KeptText(["a", " <b>", "\n", "\u65e5"], [[2, 1], [1, 0], [0, 0], [0, 1]], [2, 1])
    assert repr(shown).splitlines() == ["a <b>\u21b5\u65e5", "#3333.33", "# all 3 heads, 9-1 tenths of them, . none"]
    spans = SPAN.findall(shown._repr_html_())
    assert [(kind, shade, unescape(text)) for kind, shade, _, text in spans] == [
        ("all", "0.55", "a"),
        ("some", "0.18", " <b>"),
        ("none", "", "\n"),
        ("some", "0.18", "\u65e5"),
    ]
    assert spans[1][2] == "position 1: kept by 1 of 3 heads\nlayer 0: 1 of 2\nlayer 1: 0 of 1"


def test_hostile_text_is_text_and_nothing_runs():
    tokenizer = byte_tokenizer()
    config = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    model = random_model("llama", **config, num_attention_heads=4, num_key_value_heads=2)
    ids = tokenizer(EVIL).input_ids
    shown = generate(model, [ids], H2O(), Budget(kv_ratio=0.5), decoding=GenerationParams(3, eos=None)).cache.show(
        tokenizer
    )
    html = shown._repr_html_()
    assert "".join(unescape(text) for *_, text in SPAN.findall(html)) == "<s>" + EVIL
    assert set(re.findall(r"<(\w+)", html)) == {"style", "div", "span", "p", "small"}
    assert "onerror=" not in re.sub(r">[^<]*<", "><", html)
    assert all(line.isprintable() for line in repr(shown).splitlines())


def test_each_row_shows_its_own_prompt_and_what_its_heads_hold():
    model, prompts = tiny("llama"), prompts_of(5, [17, 31, 23])
    result = generate(model, prompts, Window(), Budget(tokens=9), decoding=GenerationParams(4, eos=None))
    heads = 2 * 3  # layers, kv heads
    for sample, prompt in enumerate(prompts):
        shown = result.cache.show(Numbers(), sample)
        assert "".join(shown.texts).split() == [str(token) for token in prompt]
        # of 9 slots 8 are held between steps, 3 of them by the new tokens that were fed
        assert kept_by(shown._repr_html_()) == [0] * (len(prompt) - 5) + [heads] * 5
    h2o = generate(model, prompts, H2O(), Budget(tokens=9), decoding=GenerationParams(4, eos=None)).cache
    counts = kept_by(h2o.show(Numbers(), 1)._repr_html_())
    held = [h2o.kept_positions(layer)[1] for layer in range(2)]
    assert counts == [sum(place in head for layer in held for head in layer) for place in range(31)]
    assert len(set(counts)) > 2, "heads choose for themselves, or the sums show nothing"


def test_whoever_feeds_the_prompt():
    model, prompts = tiny("llama"), prompts_of(5, [17, 23])
    beams = generate(model, prompts, Window(), FIVE, decoding=GenerationParams(4, num_beams=3, eos=None)).cache
    assert len(beams.show(Numbers(), 1).texts) == 23
    context = prefill(model, prompts, Full(), max_new_tokens=4)
    assert len(context.fork([1, 1, 0]).cache.show(Numbers(), 2).texts) == 17
    assert len(context.cache.show(Numbers(), 1).texts) == 23
    both = prefill_together(model, prompts, [CacheConfig(Full()), CacheConfig(Window(), FIVE)], max_new_tokens=4)
    made = decode(model, both, GenerationParams(4, eos=None), [0, 0], None, start=0.0)
    assert kept_by(made[1].cache.show(Numbers())._repr_html_()) == [0] * 16 + [6]
    assert kept_by(made[0].cache.show(Numbers())._repr_html_()) == [6] * 17


def test_under_the_models_own_generate_the_words_are_given():
    model, (prompt,) = tiny("llama"), prompts_of(5, [17])
    cache = EvictionCache(model, Window(), FIVE, max_new_tokens=3)
    ids = torch.tensor([prompt])
    model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=3, do_sample=False)
    with pytest.raises(ConfigError, match=r"give the prompt's token ids, without padding, as in cache\.show"):
        cache.show(Numbers())
    assert kept_by(cache.show(Numbers(), prompt=prompt)._repr_html_()) == [0] * 15 + [6] * 2
