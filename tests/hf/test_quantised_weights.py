"""Checkpoints of quantised weights: run as transformers loads them, named, refused where they cannot be."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_conf import composed
from tiny import stock
from transformers import AutoModelForCausalLM

from kvexp.core import Budget
from kvexp.generate import GenerationParams, generate
from kvexp.hf import load_model, pack_linear
from kvexp.hf.load import byte_tokenizer
from kvexp.hf.quantised_weights import check_scheme, scheme_of
from kvexp.methods import H2O, Full
from kvexp.run.settings import settings_of
from kvexp.util.errors import ConfigError

TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2}}}
SCHEMES = {
    "torchao Int8WeightOnly": TORCHAO,
    "torchao int4_weight_only": {"quant_method": "torchao", "quant_type": "int4_weight_only"},
    "gptq 4 bits": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq 4 bits": {"quant_method": "awq", "bits": 4},
    "bitsandbytes nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "compressed-tensors pack-quantized": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "fp8": {"quant_method": "fp8"},
    None: None,
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_has_a_name(scheme):
    assert scheme_of(SimpleNamespace(quantization_config=SCHEMES[scheme])) == scheme


def test_what_is_missing_is_said_before_weights_are_read(tmp_path, monkeypatch):
    stock("llama", vocab_size=259).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("torchao", "gptqmodel") else find(name)
    )
    for given, words in ((TORCHAO, "pip install torchao;"), (SCHEMES["gptq 4 bits"], r"needs .*gptqmodel: run")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": given}))
        with pytest.raises(ConfigError, match=words):
            settings_of(*composed("task=sample", "model=local", f"model.path={tmp_path}"))
    with pytest.raises(ConfigError, match="LoRA adapter of quantised weights"):
        check_scheme(SimpleNamespace(quantization_config={"quant_method": "fp8"}), "there", adapter=True)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """Folder of a small model whose linear layers torchao holds in int8."""
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    folder = tmp_path_factory.mktemp("models")
    stock("llama", vocab_size=259).save_pretrained(folder / "plain")
    how = TorchAoConfig(Int8WeightOnlyConfig())
    made = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32, quantization_config=how)
    made.save_pretrained(folder / "int8")
    byte_tokenizer().save_pretrained(folder / "int8")
    return folder / "int8"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
class TestTorchao:
    """Not run where torchao is not installed."""

    def test_it_runs_as_transformers_loads_it(self, quantised):
        model = load_model(str(quantised))
        weight = model.model.layers[0].mlp.up_proj.weight
        assert type(weight).__name__ == "Int8Tensor" and weight.qdata.dtype == torch.int8
        own = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32, attn_implementation="eager").eval()
        ids = torch.arange(1, 40)[None]
        with torch.no_grad():
            wanted = own(ids).logits
            assert torch.allclose(model(ids).logits, wanted, atol=1e-5)
            plain = AutoModelForCausalLM.from_pretrained(quantised.parent / "plain").eval()(ids).logits
            assert 1e-4 < (plain - wanted).abs().max() < 1  # it is quantised
            assert torch.allclose(pack_linear(model)(ids).logits, wanted, atol=1e-5)
        few = GenerationParams(max_new_tokens=6)
        tokens = own.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, ids.shape[1] :].tolist()
        (full,) = generate(model, [ids[0].tolist()], Full(), decoding=few).tokens
        assert list(full) == tokens[: len(full)]
        (evicted,) = generate(model, [ids[0].tolist()], H2O(), Budget(kv_ratio=0.3), decoding=few).tokens
        assert len(evicted) == len(full)

    def test_its_scheme_is_in_tables_and_in_what_identifies_a_run(self, quantised):
        def settings(folder, *words):
            return settings_of(*composed("task=sample", "model=local", f"model.path={folder}", *words))

        byte_tokenizer().save_pretrained(quantised.parent / "plain")
        made, plain = settings(quantised), settings(quantised.parent / "plain")
        assert made.labels["weights"] == "torchao Int8WeightOnly" and "weights" not in plain.labels
        assert made.identity["model"]["path"] != plain.identity["model"]["path"]
        with pytest.raises(ConfigError, match=r"model\.weights=int8 would round weights that are quantised already"):
            settings(quantised, "model.weights=int8")

    def test_a_damaged_scale_is_noticed(self, quantised, tmp_path):
        for file in quantised.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        state = load_file(tmp_path / "model.safetensors")
        name = next(name for name in state if "up_proj" in name and name.endswith("scale"))
        state[name] = torch.full_like(state[name], float("nan"))
        with safe_open(quantised / "model.safetensors", "pt") as file:
            metadata = file.metadata()
        save_file(state, tmp_path / "model.safetensors", metadata=metadata)
        with pytest.raises(ConfigError, match=r"up_proj.*holds NaN or inf"):
            load_model(str(tmp_path))
