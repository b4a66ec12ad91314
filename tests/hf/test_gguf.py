"""GGUF files: the same logits and tokens as from safetensors, converted once, and what is wrong told before weights."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
import torch
import transformers
from filelock import FileLock
from gguf import GGMLQuantizationType, dequantize, quantize
from gguf_files import SIZES, bpe_tokenizer, small_model, tensors_of, write
from packaging.version import Version
from test_conf import composed
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvexp.hf import fetch as converted
from kvexp.hf import gguf as gguf_weights
from kvexp.hf import load_model, load_tokenizer
from kvexp.hf.fetch import located
from kvexp.hf.gguf import read_header
from kvexp.run.settings import settings_of
from kvexp.util import ConfigError

TEXTS = (
    "The old lamp stood past the stove in 1987.",
    "  2023  and\n\n 12 don't",
    "<|im_start|>user\nnaïve café<|im_end|>\n",
    "日本 ½ x²",
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def tokenizer():
    return bpe_tokenizer()


@pytest.fixture
def llama(tmp_path, tokenizer):
    """(path of a GGUF file, the model whose weights it holds)"""
    model = small_model("llama", tokenizer)
    return write(tmp_path / "llama.gguf", model, tokenizer), model


def logits(model, length=37):
    ids = torch.arange(1, length + 1)[None] * 7 % model.config.vocab_size
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", SIZES)
def test_the_logits_are_those_of_the_safetensors(family, tied, tmp_path, tokenizer):
    model = small_model(family, tokenizer, tie_word_embeddings=tied)
    if family == "qwen2":
        for layer in model.model.layers:  # made as zeros, which would hide a lost bias
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                torch.nn.init.normal_(projection.bias)
    model.save_pretrained(tmp_path / "folder")
    path = write(tmp_path / "model.gguf", model, tokenizer)
    made = load_model(str(path))
    assert made.config.model_type == family
    assert torch.equal(logits(made), logits(load_model(str(tmp_path / "folder"))))
    assert ("output.weight" in read_header(path).tensors) is not tied
    files = list(converted.converted(path).folder.glob("*.safetensors"))
    held = sum(file.stat().st_size for file in files)
    assert held < sum(weight.numel() * 4 for weight in model.parameters()) + 20_000  # a tied head is not stored twice


def test_a_window_makes_it_mistrals(tmp_path, tokenizer):
    model = small_model("llama", tokenizer)
    fields = {"llama.attention.sliding_window": ("add_uint32", 16)}
    made = load_model(str(write(tmp_path / "m.gguf", model, tokenizer, fields=fields)))
    assert made.config.model_type == "mistral" and made.config.sliding_window == 16
    assert torch.equal(logits(made, 16), logits(model, 16)) and not torch.equal(logits(made), logits(model))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0", "Q5_1"])
def test_quantised_weights_are_what_llama_cpp_makes_of_them(kind, tmp_path, tokenizer):
    model = small_model("llama", tokenizer)
    path = write(tmp_path / "q.gguf", model, tokenizer, kind=kind)
    assert located(str(path))[1].quantisation == kind
    made, of = load_model(str(path)).state_dict(), GGMLQuantizationType[kind]
    for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"):
        rounded = dequantize(quantize(model.state_dict()[name].numpy(), of), of)
        assert torch.equal(made[name], torch.from_numpy(np.array(rounded)))
    name = "model.layers.2.input_layernorm.weight"  # vectors stay as they are
    assert torch.equal(made[name], model.state_dict()[name])


def test_positions_are_scaled_as_the_file_says(tmp_path, tokenizer):
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    model = small_model("llama", tokenizer, rope_parameters=scaling)
    fields = {
        "llama.rope.scaling.type": ("add_string", "linear"),
        "llama.rope.scaling.factor": ("add_float32", 2.0),
    }
    made = load_model(str(write(tmp_path / "m.gguf", model, tokenizer, fields=fields)))
    assert torch.equal(logits(made), logits(model))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_factors_are_recognised(factor, tmp_path, tokenizer):
    scaling = {
        **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    }
    model = small_model("llama", tokenizer, rope_parameters=scaling, head_dim=64)
    own = 1.0 / 500000.0 ** (np.arange(0, 64, 2, dtype=np.float32) / 64)
    factors = own / model.model.rotary_emb.inv_freq.numpy()
    assert len(set(factors.round(3))) > 3  # some wavelengths are kept, some stretched, some between
    tensors = {**tensors_of(model), "rope_freqs.weight": factors.astype(np.float32)}
    fields = {"llama.attention.key_length": ("add_uint32", 64), "llama.attention.value_length": ("add_uint32", 64)}
    made = load_model(str(write(tmp_path / "m.gguf", model, tokenizer, tensors=tensors, fields=fields)))
    assert made.config.rope_parameters["factor"] == factor
    assert torch.equal(logits(made), logits(model))
    tensors["rope_freqs.weight"] = factors.astype(np.float32) + 1
    with pytest.raises(ConfigError, match="not those of Llama 3"):
        located(str(write(tmp_path / "other.gguf", model, tokenizer, tensors=tensors, fields=fields)))


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
SCALINGS = {
    "no kind": ({"scaling.factor": 2.0}, LINEAR, 2),
    "the old key": ({"scale_linear": 2.0}, LINEAR, 2),
    "the new key counts": ({"scale_linear": 3.0, "scaling.factor": 2.0}, LINEAR, 2),
    "the old key and a kind": ({"scaling.type": "linear", "scale_linear": 2.0}, LINEAR, 1),
    "a kind alone": ({"scaling.type": "linear"}, None, 1),
    "none": ({"scaling.type": "none", "scaling.factor": 2.0}, None, 1),
    "0 is none": ({"scaling.factor": 0.0}, None, 1),
    "1": ({"scale_linear": 1.0, "scaling.original_context_length": 128}, None, 1),
}


@pytest.mark.parametrize("case", SCALINGS)
def test_a_factor_is_linear_unless_the_file_says_otherwise(case, tmp_path, tokenizer):
    """As llama.cpp reads it: a kind that is missing is linear, a factor of 0 none. What was read otherwise before is
    another model now."""
    keys, scaling, version = SCALINGS[case]
    model = small_model("llama", tokenizer, **({"rope_parameters": scaling} if scaling else {}))
    add = {str: "add_string", float: "add_float32", int: "add_uint32"}
    fields = {f"llama.rope.{key}": (add[type(value)], value) for key, value in keys.items()}
    path = write(tmp_path / "m.gguf", model, tokenizer, fields=fields)
    assert torch.equal(logits(load_model(str(path))), logits(model))
    folder, made = located(str(path))
    assert f"/gguf{version}-" in folder and made.digest == f"gguf{version}-{read_digest(path)[:16]}"


def test_large_weights_are_written_in_parts(llama, monkeypatch):
    path, model = llama
    monkeypatch.setattr(gguf_weights, "PART", 40_000)
    index = json.loads((converted.converted(path).folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict()) and len(set(index["weight_map"].values())) > 2
    assert torch.equal(logits(load_model(str(path))), logits(model))


# ---- tokens


def test_the_tokens_are_the_tokenizers_own(llama, tokenizer):
    made = load_tokenizer(str(llama[0]))
    for text in TEXTS:
        assert made(text).input_ids == tokenizer.encode(text).ids, text
        assert made.decode(made(text).input_ids) == text
    assert (made.bos_token, made.eos_token, made.padding_side) == ("<|im_start|>", "<|im_end|>", "left")
    assert made.chat_template.startswith("{% for message in messages %}")
    ends = load_model(str(llama[0])).generation_config
    assert (ends.bos_token_id, ends.eos_token_id) == (1, 2)


def test_a_start_token_comes_first_where_the_file_says_so(tmp_path, tokenizer):
    model = small_model("llama", tokenizer)
    path = write(tmp_path / "m.gguf", model, tokenizer, pre="llama-bpe", fields={})
    assert load_tokenizer(str(path))("x").input_ids[0] != 1
    data = path.read_bytes()
    at = data.index(b"tokenizer.ggml.add_bos_token") + len(b"tokenizer.ggml.add_bos_token") + 4
    path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    made = load_tokenizer(str(path))
    assert made("x").input_ids[0] == 1 and made("x", add_special_tokens=False).input_ids[0] != 1


def test_a_sentencepiece_vocabulary(tmp_path, tokenizer):
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "t",
        "h",
        "e",
        "th",
        "the",
        "▁the",
    ]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(words) - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(words) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    model = small_model("llama", PreTrainedTokenizerFast(tokenizer_object=tokenizer).backend_tokenizer)
    path = write(tmp_path / "m.gguf", model, tokenizer, vocabulary=fields)
    made = load_tokenizer(str(path))
    assert made("the the").input_ids == [1, words.index("▁the"), words.index("▁the")]


def test_a_split_that_is_not_known_needs_a_tokenizer_of_its_own(tmp_path, tokenizer):
    model = small_model("llama", tokenizer)
    path = write(tmp_path / "m.gguf", model, tokenizer, pre="jais")
    with pytest.raises(ConfigError, match=r"m\.gguf is of a kind that cannot be read exactly.*model\.tokenizer=FOLDER"):
        load_tokenizer(str(path))
    assert torch.equal(logits(load_model(str(path))), logits(model))


def list_with(index, value):
    return lambda values: [*values[:index], value, *values[index + 1 :]]


VOCABULARIES = {
    "a merge of no token": ("merges", list_with(3, "q zz"), "its merge 'q zz' is not of two tokens"),
    "a merge that makes no token": ("merges", list_with(3, "q q"), "its merge 'q q' is not of two tokens that make"),
    "a merge of three": ("merges", list_with(3, "t h e"), "its merge 't h e' is not"),
    "a merge of one": ("merges", list_with(3, "th"), "its merge 'th' is not"),
    "no merges": ("merges", None, "has no merges"),
    "a token twice": ("tokens", list_with(5, "<|im_end|>"), "has a token twice"),
    "too many tokens": ("tokens", lambda tokens: [*tokens, "more"], "307 tokens and its embedding 306"),
    "too few types": ("token_type", lambda types: types[:-1], "token_type is not one number for each of its 306"),
    "an unknown type": ("token_type", list_with(7, 9), "tokens of type 9"),
    "another space": ("add_space_prefix", True, "sets tokenizer.ggml.add_space_prefix=True"),
    "an end behind a prompt": ("add_eos_token", True, "sets tokenizer.ggml.add_eos_token=True"),
    "a key from tomorrow": ("digit_groups", 3, "sets tokenizer.ggml.digit_groups=3"),
    "no kind": ("model", "none", "its vocabulary is of kind 'none'"),
    "no way to split": ("pre", None, "it splits text as None"),
    "an unknown token elsewhere": ("unknown_token_id", 400, "unknown_token_id=400 is none of its 306 tokens"),
}


@pytest.mark.parametrize("case", VOCABULARIES)
def test_a_vocabulary_that_cannot_be_used_is_one_line_and_another_tokenizer_will_do(case, tmp_path, tokenizer):
    name, change, words = VOCABULARIES[case]
    model = small_model("llama", tokenizer)
    whole = write(tmp_path / "whole.gguf", model, tokenizer)
    located(str(whole))
    load_tokenizer(str(whole)).save_pretrained(tmp_path / "own")
    model.config.save_pretrained(tmp_path / "own")
    keys = {key: value for key, value in read_header(whole).fields.items() if key.startswith("tokenizer.ggml.")}
    key = f"tokenizer.ggml.{name}"
    keys[key] = change(keys[key]) if callable(change) else change
    path = write(tmp_path / "m.gguf", model, tokenizer, vocabulary={k: v for k, v in keys.items() if v is not None})
    with pytest.raises(
        ConfigError, match=r"m\.gguf is of a kind that cannot be read exactly.*model\.tokenizer=FOLDER"
    ) as e:
        load_tokenizer(str(path))
    assert words in str(e.value) and str(e.value).count("\n") == 0
    assert torch.equal(logits(load_model(str(path))), logits(model))
    assert settings(path, f"model.tokenizer={tmp_path / 'own'}").model.tokenizer == str(tmp_path / "own")


def test_a_tokenizer_that_was_made_before_it_was_known_to_be_wrong_is_not_used(llama, monkeypatch):
    load_tokenizer(str(llama[0]))
    monkeypatch.setattr("kvexp.hf.gguf.SPLITS", {})
    with pytest.raises(ConfigError, match="it splits text as 'smollm'"):
        load_tokenizer(str(llama[0]))


def test_every_end_that_the_file_names_ends_an_answer(tmp_path, tokenizer):
    model = small_model("llama", tokenizer)
    same = {"tokenizer.ggml.eot_token_id": ("add_uint32", 2)}
    more = {"tokenizer.ggml.eot_token_id": ("add_uint32", 7), "tokenizer.ggml.eom_token_id": ("add_uint32", 2)}
    for fields, ends, version in (({}, 2, 1), (same, 2, 1), (more, [2, 7], 2)):
        path = write(tmp_path / "m.gguf", model, tokenizer, fields=fields)
        assert load_model(str(path)).generation_config.eos_token_id == ends
        assert located(str(path))[1].version == version
    fields = {"tokenizer.ggml.eot_token_id": ("add_uint32", 400)}
    refused(write(tmp_path / "m.gguf", model, tokenizer, fields=fields), "eot_token_id=400 is no token")


def test_a_penalty_of_the_models_own_is_kept(tmp_path, tokenizer):
    model = small_model("llama", tokenizer)
    fields = {"general.sampling.penalty_repeat": ("add_float32", 1.5), "general.sampling.temp": ("add_float32", 0.6)}
    path = write(tmp_path / "m.gguf", model, tokenizer, fields=fields)
    assert load_model(str(path)).generation_config.repetition_penalty == 1.5 and located(str(path))[1].version == 2
    fields["general.sampling.penalty_last_n"] = ("add_int32", 64)
    refused(write(tmp_path / "m.gguf", model, tokenizer, fields=fields), "penalty_last_n=64")


# ---- once, and never half


def test_a_file_is_converted_once_and_known_by_its_bytes(llama, tmp_path, tokenizer, monkeypatch):
    first = located(str(llama[0]))
    moved = tmp_path / "elsewhere.bin"
    moved.write_bytes(llama[0].read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(converted, "convert", lambda *_: pytest.fail("converted again"))
        assert located(str(llama[0])) == located(str(moved)) == first
    other = write(tmp_path / "llama.gguf", small_model("llama", tokenizer, rms_norm_eps=1e-3), tokenizer)
    assert located(str(other))[0] != first[0]


@pytest.mark.parametrize("damage", ["weights", "config", "manifest", "more"])
def test_a_damaged_conversion_is_made_anew(damage, llama):
    folder = converted.converted(llama[0]).folder
    names = {path.name for path in folder.iterdir()}
    if damage == "weights":
        with open(folder / "model.safetensors", "r+b") as file:
            file.truncate(1000)
    elif damage == "config":
        (folder / "config.json").write_text((folder / "config.json").read_text().replace("96", "97"))
    elif damage == "manifest":
        (folder / "manifest.json").unlink()
    else:
        (folder / "added_tokens.json").write_text("{}")
    assert torch.equal(logits(load_model(str(llama[0]))), logits(llama[1]))
    assert {path.name for path in folder.iterdir()} == names
    assert [path for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_a_conversion_that_breaks_off_leaves_nothing(llama, cache, monkeypatch):
    def broken(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(converted, "write_weights", broken)
        with pytest.raises(KeyboardInterrupt):
            located(str(llama[0]))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    killed = cache / f".{converted.folder_of_gguf(read_digest(llama[0])).name}-xyz"
    killed.mkdir()
    located(str(llama[0]))
    assert not killed.exists()


def read_digest(path):
    return converted.file_digest(path)


def test_a_second_process_waits(llama, cache, capfd, monkeypatch):
    monkeypatch.setattr(converted, "LOCK_S", 0.05)
    cache.mkdir(parents=True)
    folder = converted.folder_of_gguf(read_digest(llama[0]))
    done = []
    with FileLock(cache / f"{folder.name}.lock"):  # as the process that converts it does
        waiting = threading.Thread(target=lambda: done.append(located(str(llama[0]))))
        waiting.start()
        time.sleep(0.4)
        assert not done and not folder.exists()
    waiting.join(60)
    assert done and done[0][0] == str(folder)
    assert "another process is converting llama.gguf; waiting for it" in capfd.readouterr().err


def test_a_full_disk_is_told_before(llama, monkeypatch):
    monkeypatch.setattr(converted.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(ConfigError, match=r"needs 0\.1 GB and 0\.0 are free.*KVEXP_CACHE"):
        located(str(llama[0]))


def test_what_cannot_be_written_is_one_line(llama, cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(converted, "write_weights", full)
    with pytest.raises(ConfigError, match=r"cannot write .*No space left on device\): make room.*KVEXP_CACHE"):
        located(str(llama[0]))
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


# ---- what is wrong


def refused(path, words):
    with pytest.raises(ConfigError, match=words) as error:
        load_model(str(path))
    assert str(error.value).count("\n") == 0
    return str(error.value)


def test_files_that_are_none(tmp_path, llama):
    data = llama[0].read_bytes()
    for name, found, words in (
        ("text.gguf", b"hello, this is no model", "does not begin with GGUF"),
        ("empty.gguf", b"", "is empty"),
        ("head.gguf", data[:3000], "ends within its header"),
        ("short.gguf", data[:-1], f"has {len(data) - 1} of {len(data)} bytes"),
        ("old.gguf", data[:4] + b"\x01" + data[5:], "GGUF version 1"),
        ("count.gguf", data[:8] + b"\xff" * 8 + data[16:], "no whole GGUF file"),
    ):
        (tmp_path / name).write_bytes(found)
        assert name in refused(tmp_path / name, words)
    refused(tmp_path / "missing.gguf", "there is no such file")


def test_models_that_kvexp_does_not_have(tmp_path, tokenizer, cache):
    model = small_model("llama", tokenizer)
    path = write(tmp_path / "m.gguf", model, tokenizer)
    path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gemma", 1))
    refused(path, "architecture 'gemma'; GGUF files of llama, qwen2, qwen3, gpt2")
    for key, value, words in (
        ("llama.expert_count", ("add_uint32", 8), "expert_count=8"),
        ("llama.rope.scaling.type", ("add_string", "yarn"), "scales its positions by 'yarn'"),
        ("llama.rope.dimension_count", ("add_uint32", 8), "rope.dimension_count=8 and heads of 16"),
    ):
        refused(write(tmp_path / "m.gguf", model, tokenizer, fields={key: value}), words)
    assert not cache.exists()  # told before anything is written


KEYS = {  # key, how it is written, a value that changes numbers, one that does not (None: there is none)
    "llama.rope.scaling.attn_factor": ("add_float32", 0.5, 1.0),
    "llama.rope.scaling.yarn_log_multiplier": ("add_float32", 0.1, None),
    "llama.rope.scaling.yarn_ext_factor": ("add_float32", 1.0, None),
    "llama.rope.scaling.alpha": ("add_float32", 1000.0, None),
    "llama.rope.dimension_sections": ("add_array", [4, 2, 2, 0], None),
    "llama.rope.freq_base_swa": ("add_float32", 10000.0, None),
    "llama.attention.causal": ("add_bool", False, True),
    "llama.attention.scale": ("add_float32", 0.5, 0.25),
    "llama.attention.clamp_kqv": ("add_float32", 8.0, 0.0),
    "llama.attention.sliding_window_pattern": ("add_uint32", 2, None),
    "llama.attention.layer_norm_epsilon": ("add_float32", 0.5, None),
    "llama.attention.shared_kv_layers": ("add_uint32", 1, None),
    "llama.logit_scale": ("add_float32", 0.5, 1.0),
    "llama.embedding_scale": ("add_float32", 12.0, 1.0),
    "llama.residual_scale": ("add_float32", 0.2, 0.0),
    "llama.attn_logit_softcapping": ("add_float32", 50.0, 0.0),
    "llama.final_logit_softcapping": ("add_float32", 30.0, 0.0),
    "llama.expert_used_count": ("add_uint32", 2, 0),
    "llama.expert_weights_scale": ("add_float32", 1.0, None),
    "llama.pooling_type": ("add_uint32", 1, 0),
    "llama.nextn_predict_layers": ("add_uint32", 1, 0),
    "llama.tensor_data_layout": ("add_string", "another", "Meta AI original pth"),
    "llama.a_key_from_tomorrow": ("add_string", "x" * 200, None),
    "qwen2.rope.freq_base": ("add_float32", 1e6, None),
    "tomorrow.key": ("add_uint32", 1, None),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_followed_or_refused_by_name(key, tmp_path, tokenizer, cache):
    how, value, neutral = KEYS[key]
    model = small_model("llama", tokenizer)
    path = write(tmp_path / "m.gguf", model, tokenizer, fields={key: (how, value)})
    message = refused(path, f"m.gguf sets {key}=")
    assert str(value)[:20] in message and len(message) < 400 and not cache.exists()
    if neutral is not None:
        path = write(tmp_path / "m.gguf", model, tokenizer, fields={key: (how, neutral)})
        assert torch.equal(logits(load_model(str(path))), logits(model)) and located(str(path))[1].version == 1


def test_keys_of_where_a_file_comes_from_change_nothing(tmp_path, tokenizer):
    model = small_model("llama", tokenizer)
    fields = {
        "general.type": ("add_string", "model"),
        "general.base_model.0.name": ("add_string", "x"),
        "general.quantization_version": ("add_uint32", 2),
        "general.file_type": ("add_uint32", 3),
        "quantize.imatrix.entries_count": ("add_int32", 224),
        "split.count": ("add_uint16", 1),
        "llama.rope.scaling.finetuned": ("add_bool", True),
        "llama.vocab_size": ("add_uint32", 306),
        "tokenizer.ggml.fim_pre_token_id": ("add_uint32", 9),
    }
    path = write(tmp_path / "m.gguf", model, tokenizer, kind="Q8_0", fields=fields)
    plain = write(tmp_path / "plain.gguf", model, tokenizer, kind="Q8_0")
    assert torch.equal(logits(load_model(str(path))), logits(load_model(str(plain))))
    assert load_tokenizer(str(path))("x y").input_ids == load_tokenizer(str(plain))("x y").input_ids


def test_files_that_are_no_whole_model(tmp_path, tokenizer, cache):
    model = small_model("llama", tokenizer)
    for key, value, words in (
        ("general.type", ("add_string", "adapter"), "is a LoRA adapter and no model: merge it"),
        ("general.type", ("add_string", "mmproj"), "general.type='mmproj'"),
        ("split.count", ("add_uint16", 2), "is one of 2 parts of a model.*llama-gguf-split --merge"),
        ("general.quantization_version", ("add_uint32", 1), "general.quantization_version=1"),
    ):
        refused(write(tmp_path / "m.gguf", model, tokenizer, kind="Q8_0", fields={key: value}), words)
    fields = {name: ("add_uint32", 1) for name in ("general.aaaa", "general.bbbb")}
    path = write(tmp_path / "m.gguf", model, tokenizer, fields=fields)
    path.write_bytes(path.read_bytes().replace(b"general.bbbb", b"general.aaaa"))
    refused(path, "sets general.aaaa twice")
    assert not cache.exists()


def test_factors_of_positions_are_not_applied_twice_or_to_others(tmp_path, tokenizer):
    factors = {"rope_freqs.weight": np.ones(8, np.float32) * 2}
    fields = {"llama.rope.scaling.factor": ("add_float32", 2.0)}
    model = small_model("llama", tokenizer)
    tensors = {**tensors_of(model), **factors}
    refused(write(tmp_path / "m.gguf", model, tokenizer, tensors=tensors, fields=fields), "scales its positions twice")
    for family in ("qwen2", "gpt2"):
        model = small_model(family, tokenizer)
        path = write(tmp_path / "m.gguf", model, tokenizer, tensors={**tensors_of(model), **factors})
        refused(path, f"rope_freqs.weight.*no {family} has")


def test_tensors_that_are_not_the_headers(tmp_path, tokenizer):
    model = small_model("llama", tokenizer)
    own = tensors_of(model)
    less = {name: numbers for name, numbers in own.items() if name != "blk.1.ffn_up.weight"}
    more = {**own, "blk.1.ffn_gate_inp.weight": np.zeros((2, 64), np.float32)}
    wide = {**own, "blk.1.ffn_up.weight": np.zeros((98, 64), np.float32)}
    whole = {**own, "blk.1.ffn_norm.weight": np.zeros(64, np.int32)}
    for tensors, words in (
        (less, "missing: model.layers.1.mlp.up_proj.weight"),
        (more, "unknown: blk.1.ffn_gate_inp.weight"),
        (wide, "of another shape: model.layers.1.mlp.up_proj.weight"),
        (whole, "blk.1.ffn_norm.weight is of I32.*Q4_1"),
    ):
        refused(write(tmp_path / "m.gguf", model, tokenizer, tensors=tensors), words)


# ---- on the command line


def settings(path, *words):
    return settings_of(*composed("task=sample", "model=local", f"model.path={path}", *words))


def test_a_run_is_known_by_the_file(llama, tmp_path):
    made = settings(llama[0])
    moved = tmp_path / "again.gguf"
    moved.write_bytes(llama[0].read_bytes())
    assert settings(moved).identity == made.identity
    assert made.identity["model"]["path"] == f"gguf{converted.CONVERSION}-{read_digest(llama[0])[:16]}"
    assert made.model.gguf == (read_digest(llama[0]), "F32") and made.labels["weights"] == "F32"
    assert "revision" not in made.labels


def test_a_chat_template_is_used_where_there_is_one(llama, tmp_path, tokenizer):
    assert settings(llama[0]).model.chat is True and settings(llama[0]).labels["chat"] is True
    assert settings(llama[0], "model.chat=false").model.chat is False
    bare = write(tmp_path / "bare.gguf", llama[1], tokenizer, template=None)
    assert settings(bare).model.chat is False and "chat" not in settings(bare).labels
    with pytest.raises(ConfigError, match=r"model\.chat must be .*, got 'yes, please'"):
        settings(llama[0], "model.chat='yes, please'")


def test_transformers_own_reader_agrees(llama):
    """Byte for byte the same tokens, where it knows how the file splits text."""
    if Version(transformers.__version__) < Version("5.23"):
        pytest.skip("transformers 5.4 puts a first token in front of every text of such a file")
    theirs = AutoTokenizer.from_pretrained(str(llama[0].parent), gguf_file=llama[0].name)
    ours = load_tokenizer(str(llama[0]))
    assert ours.get_vocab().items() <= theirs.get_vocab().items()  # transformers before 5.23 adds Code Llama's
    assert ours(TEXTS[0]).input_ids == theirs(TEXTS[0]).input_ids
