"""A model over two devices: every layer's slots stay with it, and the tokens are those of one device."""

import copy

import pytest
import torch
from pretend import Placed, move, pretended
from tiny import CONFIGS, tiny

from kvexp.core import Budget
from kvexp.errors import ConfigError
from kvexp.generate import CacheConfig, GenerationParams, decode, generate, prefill_together
from kvexp.methods import A2SF, H2O, Full, Keyformer, SnapKV, SpAtten, StreamingLLM
from kvexp.retrieval import Oracle, Quest, SparQ

PROMPTS = [list(range(3, 20)), list(range(30, 41))]
METHODS = [Full(), H2O(), Keyformer(), A2SF(), SnapKV(window=3), SpAtten(), StreamingLLM(n_sinks=2)]


def over_two(family):
    """The tiny model with its first layer, and what comes before it, on one device and the rest on another."""
    model = copy.deepcopy(tiny(family))
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1)
    half = len(layers) // 2
    for number, layer in enumerate(layers):
        move(layer, "ipu:0" if number < half else "ipu:1")
    for name, module in model.named_modules():
        own = [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
        if own and not any(isinstance(x, Placed) for x in own):
            last = name.endswith(("lm_head", "embed_out", "norm", "ln_f", "norm_f", "final_layer_norm"))
            move(module, "ipu:1" if last else "ipu:0")
    return model


def test_pretended_devices_refuse_to_meet():
    with pretended():
        one, other = torch.ones(3, device="ipu:0"), torch.ones(3, device="ipu:1")
        with pytest.raises(RuntimeError, match="on ipu:0, ipu:1"):
            one + other
        assert (one + other.to("ipu:0")).tolist() == [2.0, 2.0, 2.0] and (one * 2).device == torch.device("ipu:0")


CASES = [("llama", method) for method in METHODS] + [(family, Keyformer()) for family in CONFIGS if family != "llama"]
QUICK = ("full", "h2o", "spatten", "mistral", "gpt2", "mpt")  # RoPE, learned positions and ALiBi; a score of all layers


@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=[] if {family, method.name} & {*QUICK} else pytest.mark.slow)
        for family, method in CASES
    ],
    ids=lambda case: getattr(case, "name", case),
)
def test_slots_stay_with_their_layer(family, method):
    budget = None if isinstance(method, Full) else Budget(kv_ratio=0.6)
    options = {"decoding": GenerationParams(6), "seeds": [1, 2]}
    alone = generate(tiny(family), PROMPTS, method, budget, **options)
    with pretended():
        done = generate(over_two(family), PROMPTS, method, budget, **options)
    assert done.tokens == alone.tokens
    devices = [str(state.slots.keys.device) for state in done.cache.layer_states]
    assert set(devices) == {"ipu:0", "ipu:1"} and devices == sorted(devices)
    assert [state.kept_positions() for state in done.cache.layer_states] == [
        state.kept_positions() for state in alone.cache.layer_states
    ]


@pytest.mark.parametrize("method", [Oracle(), Quest(), SparQ()], ids=lambda method: method.name)
def test_retrieval_stays_with_its_layer(method):
    """Without pqcache: its clusters are made in a thread, to which the pretence does not reach."""
    alone = generate(tiny("llama"), PROMPTS, method, Budget(kv_ratio=0.6), decoding=GenerationParams(4))
    with pretended():
        done = generate(over_two("llama"), PROMPTS, method, Budget(kv_ratio=0.6), decoding=GenerationParams(4))
    assert done.tokens == alone.tokens


def test_runs_that_share_prefills_do_so_over_two_devices():
    def answers(model):
        variants = [CacheConfig(H2O(), Budget(kv_ratio=0.6)), CacheConfig(Keyformer(), Budget(tokens=9))]
        each = prefill_together(model, PROMPTS, variants, max_new_tokens=5, seeds=[1, 2])
        return [result.tokens for result in decode(model, each, GenerationParams(5), [1, 2], None, start=0.0)]

    alone = answers(tiny("llama"))
    with pretended():
        assert answers(over_two("llama")) == alone


@pytest.mark.parametrize("word", ["foo", "disk", "cuda:9", ""])
def test_a_device_map_that_cannot_be_is_said_before_anything_loads(word, tmp_path):
    from kvexp.config.model_spec import ModelSpec

    node = {"kind": "pretrained", "path": "someone/model", "device_map": word}
    with pytest.raises(ConfigError, match=r"device_map.*(auto, balanced|no CUDA device)"):
        ModelSpec.of(node)
    with pytest.raises(ConfigError, match="not both"):
        ModelSpec.of({**node, "device_map": "auto", "device": "cpu"})


@pytest.mark.parametrize("family", ["llama", "gptj", "mpt"])
def test_accelerates_hooks_move_no_number(family):
    """The hooks that a spread model has, here with one device: they hand our cache on as it is."""
    accelerate = pytest.importorskip("accelerate")
    from tiny import stock

    from kvexp.models import patch_model

    hooked = patch_model(accelerate.dispatch_model(copy.deepcopy(stock(family)), {"": "cpu"}, force_hooks=True))
    assert any(hasattr(module, "_hf_hook") for module in hooked.modules())
    options = {"decoding": GenerationParams(6), "seeds": [1, 2]}
    one, other = (
        generate(model, PROMPTS, Keyformer(), Budget(kv_ratio=0.6), **options).tokens
        for model in (hooked, tiny(family))
    )
    assert one == other


def test_device_map_auto_loads_where_there_is_one_device(tmp_path):
    pytest.importorskip("accelerate")
    from tiny import stock

    from kvexp.models import load_model

    stock("llama").save_pretrained(tmp_path)
    spread = load_model(str(tmp_path), device_map="auto")
    ours = generate(spread, PROMPTS, H2O(), Budget(kv_ratio=0.6), decoding=GenerationParams(6)).tokens
    assert ours == generate(tiny("llama"), PROMPTS, H2O(), Budget(kv_ratio=0.6), decoding=GenerationParams(6)).tokens


def test_a_model_that_does_not_fit_is_refused_instead_of_offloaded(tmp_path):
    pytest.importorskip("accelerate")
    from tiny import stock

    from kvexp.models import load_model

    stock("llama").save_pretrained(tmp_path)
    half = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    with pytest.raises(ConfigError, match="does not fit on the devices that device_map may use"):
        load_model(str(tmp_path), device_map={**half, "lm_head": "cpu", "model.layers.1": "disk"})
