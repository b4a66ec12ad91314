"""GGUF files: logits and tokens as from safetensors, converted once; wrong files are refused before weights load."""

from __future__ import annotations

import json
import mmap
import os
import threading
import time

import numpy as np
import pytest
import torch
import transformers
from filelock import FileLock
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize
from gguf_files import SIZES, bpe_tokenizer, small_model, tensors_of, write
from packaging.version import Version
from test_conf import composed
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from kvexp.hf import fetch as converted
from kvexp.hf import gguf as gguf_weights
from kvexp.hf import load_model, load_tokenizer
from kvexp.hf.fetch import located
from kvexp.hf.gguf import FAMILIES_OF_GGUF, GgufTensor, read_header, read_tensor
from kvexp.run.settings import settings_of
from kvexp.util.errors import ConfigError
from kvexp.util.files import file_digest

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


@pytest.fixture(scope="module")
def model(tokenizer):
    return small_model("llama", tokenizer)


@pytest.fixture
def gguf(tmp_path, model, tokenizer):
    """gguf(…) -> path of a GGUF file of `model`; options as of `gguf_files.write`."""
    return lambda name="m.gguf", **options: write(tmp_path / name, model, tokenizer, **options)


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
    folder, kind = located(str(path))[0], FAMILIES_OF_GGUF[family]
    made, wanted = (AutoModelForCausalLM.from_pretrained(each) for each in (folder, tmp_path / "folder"))
    assert made.config.model_type == kind
    assert torch.equal(logits(made), logits(wanted))
    assert torch.equal(logits(load_model(str(path))), logits(load_model(str(tmp_path / "folder"))))
    assert ("output.weight" in read_header(path).tensors) is not tied
    files = list(converted.converted(path).folder.glob("*.safetensors"))
    held = sum(file.stat().st_size for file in files)
    assert held < sum(weight.numel() * 4 for weight in model.parameters()) + 20_000  # a tied head is not stored twice


def test_a_window_makes_it_mistrals(gguf, model):
    made = load_model(str(gguf(fields={"llama.attention.sliding_window": 16})))
    assert made.config.model_type == "mistral" and made.config.sliding_window == 16
    assert torch.equal(logits(made, 16), logits(model, 16)) and not torch.equal(logits(made), logits(model))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0", "Q5_0", "Q5_1"])
def test_quantised_weights_are_what_llama_cpp_makes_of_them(kind, gguf, model):
    path = gguf(kind=kind)
    assert located(str(path))[1].quantisation == kind
    made, of = load_model(str(path)).state_dict(), GGMLQuantizationType[kind]
    for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"):
        rounded = dequantize(quantize(model.state_dict()[name].numpy(), of), of)
        assert torch.equal(made[name], torch.from_numpy(np.array(rounded)))
    name = "model.layers.2.input_layernorm.weight"  # vectors stay as they are
    assert torch.equal(made[name], model.state_dict()[name])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_blocks_stand_for_the_numbers_that_transformers_reads(kind, tmp_path):
    """Blocks of random bytes with small scales; transformers has a reader of its own since 5.23."""
    theirs = pytest.importorskip("transformers.integrations.gguf.dequant", reason="transformers before 5.23")
    of = GGMLQuantizationType[kind]
    numbers, size = GGML_QUANT_SIZES[of]
    raw = torch.randint(0, 256, (6, size), generator=torch.Generator().manual_seed(7), dtype=torch.uint8)
    for start in SCALES.get(kind, (0,)):
        raw[:, start : start + 2] = torch.tensor([0.01, -0.02, 0.03]).half().view(torch.uint8).view(3, 2).repeat(2, 1)
    made = read_blocks(tmp_path, raw, (3, 2 * numbers), kind)
    wanted = theirs.dequantize(raw.view(3, 2 * size), int(of))
    assert made.std() > 0 and torch.equal(made, wanted.view(made.shape))


def read_blocks(folder, raw, shape, kind):
    (folder / "blocks").write_bytes(raw.numpy().tobytes())
    with (folder / "blocks").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return read_tensor(data, GgufTensor("t", shape, kind, 0, raw.numel()))


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_blocks_of_five_bits_by_hand(kind, tmp_path):
    """A scale (Q5_1: and a minimum), the fifth bits of 32 numbers, then pairs of numbers 16 apart."""
    head = 2 if kind == "Q5_0" else 4
    raw = torch.randint(0, 256, (4, head + 20), generator=torch.Generator().manual_seed(8), dtype=torch.uint8)
    raw[:, :head] = torch.tensor([[0.25, -1.5]] * 4).half().view(torch.uint8)[:, :head]
    made = read_blocks(tmp_path, raw, (4, 32), kind)
    for block, numbers in zip(raw.tolist(), made.tolist(), strict=True):
        fifth, codes = int.from_bytes(block[head : head + 4], "little"), block[head + 4 :]
        for place, number in enumerate(numbers):
            low = codes[place % 16] >> 4 if place >= 16 else codes[place % 16] & 15
            code = low | (fifth >> place & 1) << 4
            assert number == (0.25 * (code - 16) if kind == "Q5_0" else 0.25 * code - 1.5)


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
    fields = {"llama.attention.key_length": 64, "llama.attention.value_length": 64}
    made = load_model(str(write(tmp_path / "m.gguf", model, tokenizer, tensors=tensors, fields=fields)))
    assert made.config.rope_parameters["factor"] == factor
    assert torch.equal(logits(made), logits(model))
    tensors["rope_freqs.weight"] = factors.astype(np.float32) + 1
    with pytest.raises(ConfigError, match="neither Llama 3"):
        located(str(write(tmp_path / "other.gguf", model, tokenizer, tensors=tensors, fields=fields)))


# Where a block has its half-precision scales, if not at its beginning.
SCALES = {**{"Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
SCALINGS = {
    "no kind": ({"scaling.factor": 2.0}, LINEAR, 2),
    "the old key": ({"scale_linear": 2.0}, LINEAR, 2),
    "the new key counts": ({"scale_linear": 3.0, "scaling.factor": 2.0}, LINEAR, 2),
    "a kind": ({"scaling.type": "linear", "scaling.factor": 2.0}, LINEAR, 1),
    "the old key and a kind": ({"scaling.type": "linear", "scale_linear": 2.0}, LINEAR, 1),
    "a kind alone": ({"scaling.type": "linear"}, None, 1),
    "none": ({"scaling.type": "none", "scaling.factor": 2.0}, None, 1),
    "0 is none": ({"scaling.factor": 0.0}, None, 1),
    "1": ({"scale_linear": 1.0, "scaling.original_context_length": 128}, None, 1),
}


@pytest.mark.parametrize("case", SCALINGS)
def test_a_factor_is_linear_unless_the_file_says_otherwise(case, tmp_path, tokenizer):
    """llama.cpp's reading: a missing kind is linear, a factor of 0 none. Files once read otherwise are other models."""
    keys, scaling, version = SCALINGS[case]
    model = small_model("llama", tokenizer, **({"rope_parameters": scaling} if scaling else {}))
    fields = {f"llama.rope.{key}": value for key, value in keys.items()}
    path = write(tmp_path / "m.gguf", model, tokenizer, fields=fields)
    assert torch.equal(logits(load_model(str(path))), logits(model))
    folder, made = located(str(path))
    assert f"/gguf{version}-" in folder and made.digest == f"gguf{version}-{file_digest(path)[:16]}"


def test_large_weights_are_written_in_parts(gguf, model, monkeypatch):
    path = gguf()
    monkeypatch.setattr(gguf_weights, "PART", 40_000)
    index = json.loads((converted.converted(path).folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict()) and len(set(index["weight_map"].values())) > 2
    assert torch.equal(logits(load_model(str(path))), logits(model))


# ---- tokens


def test_the_tokens_are_the_tokenizers_own(gguf, tokenizer):
    path = gguf()
    made = load_tokenizer(str(path))
    for text in TEXTS:
        assert made(text).input_ids == tokenizer.encode(text).ids, text
        assert made.decode(made(text).input_ids) == text
    assert (made.bos_token, made.eos_token, made.padding_side) == ("<|im_start|>", "<|im_end|>", "left")
    assert made.chat_template.startswith("{% for message in messages %}")
    ends = load_model(str(path)).generation_config
    assert (ends.bos_token_id, ends.eos_token_id) == (1, 2)


def test_a_start_token_comes_first_where_the_file_says_so(gguf):
    path = gguf(pre="llama-bpe")
    assert load_tokenizer(str(path))("x").input_ids[0] != 1
    data = path.read_bytes()
    at = data.index(b"tokenizer.ggml.add_bos_token") + len(b"tokenizer.ggml.add_bos_token") + 4
    path.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    made = load_tokenizer(str(path))
    assert made("x").input_ids[0] == 1 and made("x", add_special_tokens=False).input_ids[0] != 1


def test_gemmas_texts_begin_without_a_space(tmp_path, tokenizer):
    pytest.importorskip(
        "transformers.integrations.gguf.dequant", reason="transformers before 5.23 has no exact reading"
    )
    words = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\n", "▁", "t", "h", "e", "th", "the", "▁the"]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [0.0] * 261 + [-float(i) for i in range(len(words) - 261)],
        "tokenizer.ggml.token_type": [3] * 4 + [6] * 256 + [4] + [1] * (len(words) - 261),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
    }
    model = small_model("gemma3", tokenizer)
    space = "tokenizer.ggml.add_space_prefix"
    for name, added in (("none", {}), ("a space", {space: True})):
        path = write(tmp_path / f"{name}.gguf", model, tokenizer, vocabulary={**fields, **added})
        with pytest.raises(ConfigError, match=space):
            load_tokenizer(str(path))
    made = load_tokenizer(str(write(tmp_path / "m.gguf", model, tokenizer, vocabulary={**fields, space: False})))
    assert made("the the\n").input_ids == [2, *(words.index(word) for word in ("the", "▁the", "\n"))]


def test_a_sentencepiece_vocabulary(tmp_path, tokenizer):
    pytest.importorskip(
        "transformers.integrations.gguf.dequant", reason="transformers before 5.23 has no exact reading"
    )
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "t", "h", "e", "th", "the", "▁the"]
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


def list_with(index, value):
    return lambda values: [*values[:index], value, *values[index + 1 :]]


VOCABULARIES = {
    "a merge of no token": ("merges", list_with(3, "q zz"), "merges are not pairs"),
    "a merge that makes no token": ("merges", list_with(3, "q q"), "merges are not pairs"),
    "a merge of three": ("merges", list_with(3, "t h e"), "merges are not pairs"),
    "a merge of one": ("merges", list_with(3, "th"), "merges are not pairs"),
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
    "another way to split": ("pre", "jais", "it splits text as 'jais'"),
    "an unknown token elsewhere": ("unknown_token_id", 400, "unknown_token_id=400 is none of its 306 tokens"),
}


@pytest.mark.parametrize("case", VOCABULARIES)
def test_a_vocabulary_that_cannot_be_used_is_one_line_and_another_tokenizer_will_do(case, gguf, model, tmp_path):
    name, change, words = VOCABULARIES[case]
    whole = gguf("whole.gguf")
    load_tokenizer(str(whole)).save_pretrained(tmp_path / "own")
    model.config.save_pretrained(tmp_path / "own")
    keys = {key: value for key, value in read_header(whole).fields.items() if key.startswith("tokenizer.ggml.")}
    key = f"tokenizer.ggml.{name}"
    keys[key] = change(keys[key]) if callable(change) else change
    path = gguf(vocabulary={k: v for k, v in keys.items() if v is not None})
    with pytest.raises(ConfigError, match=r"m\.gguf is of a kind that cannot be read.*model\.tokenizer=FOLDER") as e:
        load_tokenizer(str(path))
    assert words in str(e.value) and str(e.value).count("\n") == 0
    assert torch.equal(logits(load_model(str(path))), logits(model))
    assert settings(path, f"model.tokenizer={tmp_path / 'own'}").model.tokenizer == str(tmp_path / "own")


def test_a_tokenizer_that_was_made_before_it_was_known_to_be_wrong_is_not_used(gguf, monkeypatch):
    path = str(gguf())
    load_tokenizer(path)
    monkeypatch.setattr("kvexp.hf.gguf.SPLITS", {})
    with pytest.raises(ConfigError, match="it splits text as 'smollm'"):
        load_tokenizer(path)


def test_every_end_that_the_file_names_ends_an_answer(gguf):
    eot, eom = "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"
    for fields, ends, version in (({}, 2, 1), ({eot: 2}, 2, 1), ({eot: 7, eom: 2}, [2, 7], 2)):
        path = gguf(fields=fields)
        assert load_model(str(path)).generation_config.eos_token_id == ends
        assert located(str(path))[1].version == version


def test_a_penalty_of_the_models_own_is_kept(gguf):
    path = gguf(fields={"general.sampling.penalty_repeat": 1.5, "general.sampling.temp": 0.6})
    assert load_model(str(path)).generation_config.repetition_penalty == 1.5 and located(str(path))[1].version == 2


# ---- once, and never half


def test_a_file_is_converted_once_and_known_by_its_bytes(gguf, tmp_path, tokenizer, monkeypatch):
    path = gguf()
    first, moved = located(str(path)), tmp_path / "elsewhere.bin"
    moved.write_bytes(path.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(converted, "convert", lambda *_: pytest.fail("converted again"))
        assert located(str(path)) == located(str(moved)) == first
    other = write(path, small_model("llama", tokenizer, rms_norm_eps=1e-3), tokenizer)
    assert located(str(other))[0] != first[0]


DAMAGE = {
    "weights": lambda folder: os.truncate(folder / "model.safetensors", 1000),
    "config": lambda folder: (folder / "config.json").write_text("{}"),
    "manifest": lambda folder: (folder / "manifest.json").unlink(),
    "more": lambda folder: (folder / "added_tokens.json").write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_conversion_is_made_anew(damage, gguf, model):
    path = gguf()
    folder = converted.converted(path).folder
    names = {file.name for file in folder.iterdir()}
    DAMAGE[damage](folder)
    assert torch.equal(logits(load_model(str(path))), logits(model))
    assert {file.name for file in folder.iterdir()} == names
    assert [file for file in folder.parent.iterdir() if file.name.startswith(".")] == []


def test_a_conversion_that_breaks_off_leaves_nothing(gguf, cache, monkeypatch):
    path = gguf()
    for error, said in (
        (KeyboardInterrupt("key"), "key"),
        (OSError(28, "No space left"), "No space left.*KVEXP_CACHE"),
    ):

        def broken(*_, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(converted, "write_weights", broken)
            with pytest.raises((KeyboardInterrupt, ConfigError), match=said):
                located(str(path))
        assert [file.suffix for file in cache.iterdir()] == [".lock"]
    killed = cache / f".{converted.folder_of_gguf(file_digest(path)).name}-xyz"
    killed.mkdir()
    located(str(path))
    assert not killed.exists()


def test_a_second_process_waits(gguf, cache, capfd, monkeypatch):
    path = gguf()
    monkeypatch.setattr(converted, "LOCK_S", 0.05)
    cache.mkdir(parents=True)
    folder = converted.folder_of_gguf(file_digest(path))
    done = []
    with FileLock(cache / f"{folder.name}.lock"):  # as the process that converts it does
        waiting = threading.Thread(target=lambda: done.append(located(str(path))))
        waiting.start()
        time.sleep(0.4)
        assert not done and not folder.exists()
    waiting.join(60)
    assert done and done[0][0] == str(folder)
    assert "another process is converting m.gguf; waiting for it" in capfd.readouterr().err


def test_a_full_disk_is_noticed_before(gguf, monkeypatch):
    monkeypatch.setattr(converted.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(ConfigError, match=r"needs [\d.]+ MiB and 10 B are free.*KVEXP_CACHE"):
        located(str(gguf()))


# ---- what is wrong


def refused(path, words):
    with pytest.raises(ConfigError, match=words) as error:
        load_model(str(path))
    assert str(error.value).count("\n") == 0
    return str(error.value)


def test_files_that_are_none(tmp_path, gguf):
    data = gguf().read_bytes()
    for name, found, words in (
        ("text.gguf", b"hello, this is no model", "does not begin with GGUF"),
        ("empty.gguf", b"", "no whole GGUF file"),
        ("head.gguf", data[:3000], "ends within its header"),
        ("short.gguf", data[:-1], f"has {len(data) - 1} of {len(data)} bytes"),
        ("old.gguf", data[:4] + b"\x01" + data[5:], "GGUF version 1"),
        ("count.gguf", data[:8] + b"\xff" * 8 + data[16:], "no whole GGUF file"),
    ):
        (tmp_path / name).write_bytes(found)
        assert name in refused(tmp_path / name, words)
    refused(tmp_path / "missing.gguf", "there is no such file")


REFUSED = {  # keys of the header -> what is said
    "experts": ({"llama.expert_count": 8}, "expert_count=8"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "scales its positions by 'yarn'"),
    "part of a head": ({"llama.rope.dimension_count": 8}, "rope.dimension_count=8 and heads of 16"),
    "an end elsewhere": ({"tokenizer.ggml.eot_token_id": 400}, "eot_token_id=400 is no token"),
    "a penalty that forgets": (
        {"general.sampling.penalty_repeat": 1.5, "general.sampling.penalty_last_n": 64},
        "penalty_last_n=64",
    ),
    "an adapter": ({"general.type": "adapter"}, "is a LoRA adapter and no model: merge it"),
    "a projector": ({"general.type": "mmproj"}, "general.type='mmproj'"),
    "a part": ({"split.count": 2}, "is one of 2 parts of a model.*llama-gguf-split --merge"),
    "an older format": ({"general.quantization_version": 1}, "general.quantization_version=1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_header_that_kvexp_cannot_follow_is_refused_before_anything_is_written(case, gguf, cache):
    fields, words = REFUSED[case]
    refused(gguf(kind="Q8_0", fields=fields), words)
    assert not cache.exists()


def test_other_families_and_keys_twice_are_refused(gguf, cache):
    path = gguf(fields={"general.aaaa": 1, "general.bbbb": 1})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"general.bbbb", b"general.aaaa"))
    refused(path, "sets general.aaaa twice")
    path.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gemma", 1))
    refused(path, "architecture 'gemma'; GGUF files of llama, qwen2, qwen3, gemma3")
    assert not cache.exists()


KEYS = {  # key -> a value that changes numbers, one that does not (None: there is none)
    "llama.rope.scaling.attn_factor": (0.5, 1.0),
    "llama.rope.scaling.yarn_log_multiplier": (0.1, None),
    "llama.rope.scaling.yarn_ext_factor": (1.0, None),
    "llama.rope.scaling.alpha": (1000.0, None),
    "llama.rope.dimension_sections": ([4, 2, 2, 0], None),
    "llama.rope.freq_base_swa": (10000.0, None),
    "llama.attention.causal": (False, True),
    "llama.attention.scale": (0.5, 0.25),
    "llama.attention.clamp_kqv": (8.0, 0.0),
    "llama.attention.sliding_window_pattern": (2, None),
    "llama.attention.layer_norm_epsilon": (0.5, None),
    "llama.attention.shared_kv_layers": (1, None),
    "llama.logit_scale": (0.5, 1.0),
    "llama.embedding_scale": (12.0, 1.0),
    "llama.residual_scale": (0.2, 0.0),
    "llama.attn_logit_softcapping": (50.0, 0.0),
    "llama.final_logit_softcapping": (30.0, 0.0),
    "llama.expert_used_count": (2, 0),
    "llama.expert_weights_scale": (1.0, None),
    "llama.pooling_type": (1, 0),
    "llama.nextn_predict_layers": (1, 0),
    "llama.tensor_data_layout": ("another", "Meta AI original pth"),
    "llama.a_key_from_tomorrow": ("x" * 200, None),
    "qwen2.rope.freq_base": (1e6, None),
    "tomorrow.key": (1, None),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_followed_or_refused_by_name(key, gguf, model, cache):
    value, neutral = KEYS[key]
    message = refused(gguf(fields={key: value}), f"m.gguf sets {key}=")
    assert str(value)[:20] in message and len(message) < 400 and not cache.exists()
    if neutral is not None:
        path = gguf(fields={key: neutral})
        assert torch.equal(logits(load_model(str(path))), logits(model)) and located(str(path))[1].version == 1


def test_keys_of_where_a_file_comes_from_change_nothing(gguf):
    fields = {
        **{"general.type": "model", "general.base_model.0.name": "x", "general.quantization_version": 2},
        **{"general.file_type": 3, "quantize.imatrix.entries_count": 224, "split.count": 1},
        **{"llama.rope.scaling.finetuned": True, "llama.vocab_size": 306, "tokenizer.ggml.fim_pre_token_id": 9},
    }
    path, plain = str(gguf(kind="Q8_0", fields=fields)), str(gguf("plain.gguf", kind="Q8_0"))
    assert torch.equal(logits(load_model(path)), logits(load_model(plain)))
    assert load_tokenizer(path)("x y").input_ids == load_tokenizer(plain)("x y").input_ids


def test_factors_of_positions_are_not_applied_twice_or_to_others(gguf, tmp_path, model, tokenizer):
    factors = {"rope_freqs.weight": np.ones(8, np.float32) * 2}
    fields = {"llama.rope.scaling.factor": 2.0}
    refused(gguf(tensors={**tensors_of(model), **factors}, fields=fields), "scales its positions twice")
    other = small_model("qwen2", tokenizer)
    path = write(tmp_path / "m.gguf", other, tokenizer, tensors={**tensors_of(other), **factors})
    refused(path, "rope_freqs.*no qwen2 has")
    longrope = {f"rope_factors_{kind}.weight": factors["rope_freqs.weight"] for kind in ("short", "long")}
    refused(gguf(tensors={**tensors_of(model), **longrope}), "unknown: rope_factors_")


def test_tensors_that_are_not_the_headers(gguf, model):
    own = tensors_of(model)
    for name, numbers, words in (
        ("blk.1.ffn_up.weight", None, "missing: model.layers.1.mlp.up_proj.weight"),
        ("blk.1.ffn_gate_inp.weight", np.zeros((2, 64), np.float32), "unknown: blk.1.ffn_gate_inp.weight"),
        ("blk.1.ffn_up.weight", np.zeros((98, 64), np.float32), "of another shape: model.layers.1.mlp.up_proj.weight"),
        ("blk.1.ffn_norm.weight", np.zeros(64, np.int32), "blk.1.ffn_norm.weight is of I32.*Q4_1"),
        ("token_embd.weight", None, "has no token_embd.weight"),
    ):
        tensors = {**own, name: numbers}
        refused(gguf(tensors={key: value for key, value in tensors.items() if value is not None}), words)


# ---- on the command line


def settings(path, *words):
    return settings_of(*composed("task=sample", "model=local", f"model.path={path}", *words))


def test_a_run_is_known_by_the_file(gguf, tmp_path):
    path, moved = gguf(), tmp_path / "again.gguf"
    made, digest = settings(path), file_digest(path)
    moved.write_bytes(path.read_bytes())
    assert settings(moved).identity == made.identity
    assert made.identity["model"]["path"] == f"gguf{converted.CONVERSION}-{digest[:16]}"
    assert made.model.gguf == (digest, "F32") and made.labels["weights"] == "F32"
    assert "revision" not in made.labels


def test_a_chat_template_is_used_where_there_is_one(gguf):
    path, bare = gguf(), gguf("bare.gguf", template=None)
    assert settings(path).model.chat is True and settings(path).labels["chat"] is True
    assert settings(path, "model.chat=false").model.chat is False
    assert settings(bare).model.chat is False and "chat" not in settings(bare).labels


def test_transformers_own_reader_agrees(gguf):
    """Byte for byte the same tokens, where it knows how the file splits text."""
    if Version(transformers.__version__) < Version("5.23"):
        pytest.skip("transformers 5.4 puts a first token in front of every text of such a file")
    path = gguf()
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    ours = load_tokenizer(str(path))
    assert ours.get_vocab().items() <= theirs.get_vocab().items()  # transformers before 5.23 adds Code Llama's
    assert ours(TEXTS[0]).input_ids == theirs(TEXTS[0]).input_ids
