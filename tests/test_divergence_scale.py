"""Known changes of a model, which say what a divergence is worth."""

import copy

import pytest
import torch
from tiny import stock, tokens

from kvexp.divergence.scale import forced_logits, line_of, rounded, scale_table, with_rounded_weights


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rounding_is_to_the_nearest_level_of_each_row(bits):
    torch.manual_seed(0)
    weight = torch.randn(5, 40) * torch.tensor([1.0, 10, 0.1, 3, 0])[:, None]
    made, most = rounded(weight, bits), 2 ** (bits - 1) - 1
    step = weight.abs().amax(1) / most
    assert ((made - weight).abs().amax(1) <= step / 2 + 1e-7).all()
    levels = [len(row.unique()) for row in made]
    assert max(levels) <= 2 * most + 1 and made[4].eq(0).all()
    assert torch.equal(made.abs().amax(1), weight.abs().amax(1)), "the largest of a row stays"


def test_a_copy_is_changed_and_the_model_is_not():
    model = stock("llama")
    before = copy.deepcopy(model.state_dict())
    changed = with_rounded_weights(model, 4)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not torch.equal(
        changed.state_dict()["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"]
    )
    assert torch.equal(changed.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_fewer_bits_diverge_more_and_none_not_at_all():
    model, prompt, text = stock("llama"), tokens(1, 30).tolist(), tokens(2, 6).tolist()
    full = forced_logits(model, prompt, text)
    whole = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
    assert torch.allclose(full, whole, atol=1e-5), "the logits that predict each token"
    found = {
        str(bits): [line_of(full, forced_logits(with_rounded_weights(model, bits), prompt, text), text, "e", 0)]
        for bits in (16, 8, 4)
    }
    frame = scale_table(found).set_index("change")
    assert frame.loc["16", "kl"] < 1e-5 < frame.loc["8", "kl"] < frame.loc["4", "kl"]
    assert frame.loc["16", "top1"] == 1
