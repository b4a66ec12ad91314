"""NaN or inf out of the model: that run stops and names the layer, everything else of the sweep is there."""

import pytest
import torch

from faults.sweeps import folder_of, rows_of, sweep
from kvexp.core import Budget
from kvexp.generate import GenerationParams, continuation_logprobs, generate
from kvexp.hf import random_model
from kvexp.hf.load import first_not_finite
from kvexp.methods import H2O, Full, Window
from kvexp.util import NotFinite

# Layer 2's MLP overflows, once a cache has been evicted by H2O or at the second example of any.
OVERFLOW = """
import kvexp.hf.load as load
patch = load.patch_model
def patch_model(model, **options):
    model = patch(model, **options)
    seen = {}
    def look(module, args, kwargs):
        caches = getattr(kwargs["past_key_values"], "caches", [kwargs["past_key_values"]])
        seen["bad"] = any(cache.config.method.name == "h2o" and cache.get_seq_length() for cache in caches)
    def break_it(module, args, output):
        return output * VALUE if seen["bad"] else output
    model.register_forward_pre_hook(look, with_kwargs=True)
    model.transformer.h[2].mlp.register_forward_hook(break_it)
    return model
load.patch_model = patch_model
"""


@pytest.mark.parametrize(
    ("value", "launcher"),
    [
        *(("float('nan')", "shared_prefill"), ("float('inf')", "basic")),
        pytest.param("float('nan')", "basic", marks=pytest.mark.slow),
        pytest.param("float('inf')", "shared_prefill", marks=pytest.mark.slow),
    ],
)
def test_that_run_stops_and_the_others_do_not(stage, tmp_path, value, launcher):
    out, before = tmp_path / "out", OVERFLOW.replace("VALUE", value)
    code, said = stage.run(sweep(out, launcher=launcher), tmp_path / "log", before)
    assert code == 1 and "1 run(s) failed" in said and "Traceback" not in said
    assert "the logits of this run hold NaN or inf" in said
    assert "(first in layer 2, module transformer.h.2.mlp; examples test-0)" in " ".join(said.split())
    rows = rows_of(out)
    assert {method: len(found) for method, found in rows.items()} == {"full": 3, "keyformer": 3, "h2o": 0}
    assert "NotFinite" in (folder_of(out, "h2o") / "failure.json").read_text()
    code, said = stage.run(sweep(out, launcher=launcher), tmp_path / "log2")
    assert code == 0, said
    assert len(rows_of(out)["h2o"]) == 3 and rows_of(out)["keyformer"] == rows["keyformer"]


def broken(step):
    """A model whose second layer puts out NaN in its forward number `step`, and only then."""
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = random_model("llama", num_hidden_layers=2, vocab_size=61, **sizes)
    forwards = [0]

    def count(module, args):
        forwards[0] += 1

    def spoil(module, args, output):
        return output * float("nan") if forwards[0] == step else output

    model.register_forward_pre_hook(count)
    model.model.layers[1].mlp.register_forward_hook(spoil)
    return model


PROMPT = [[3, 5, 7, 11, 13, 17, 19, 23]]


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_single_bad_forward_is_noticed(step, beams):
    """Even where what it left in the cache is evicted again before the end."""
    decoding = GenerationParams(max_new_tokens=6, num_beams=beams, eos=None)
    with pytest.raises(NotFinite, match="logits of this run hold NaN or inf"):
        generate(broken(step), PROMPT, Window(), Budget(tokens=2), decoding=decoding)
    generate(broken(99), PROMPT, Window(), Budget(tokens=2), decoding=decoding)


@pytest.mark.parametrize("step", [1, 3])
def test_log_probabilities_too(step):
    with pytest.raises(NotFinite):
        continuation_logprobs(broken(step), PROMPT, [[2, 3, 4, 5]], H2O(), Budget(tokens=4))
    continuation_logprobs(broken(99), PROMPT, [[2, 3, 4, 5]], H2O(), Budget(tokens=4))


def test_the_innermost_module_is_named_and_padding_is_not():
    model = broken(1)
    with first_not_finite(model) as found:
        model(torch.tensor(PROMPT))
    assert found == ["model.layers.1.mlp"]
    with first_not_finite(model) as found:  # its second forward is a sound one, and so are its rows of unequal length
        generate(model, [PROMPT[0], PROMPT[0][:3]], Full(), decoding=GenerationParams(max_new_tokens=3, eos=None))
    assert found == []
