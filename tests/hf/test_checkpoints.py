"""Model folders: known by every byte of them, refused where they are damaged or do not fit their configuration."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import struct
import time
import warnings
from pathlib import Path

import pytest
import torch
from commands import run_py
from safetensors.torch import load_file, save_file
from tiny import CONFIGS, stock
from transformers import AutoModelForCausalLM

from kvexp.hf import load as checkpoint
from kvexp.hf import load_model
from kvexp.hf.load import byte_tokenizer
from kvexp.run.labels import model_label
from kvexp.run.model_spec import ModelSpec, load, model_digest
from kvexp.run.store import runs
from kvexp.util import files as digests
from kvexp.util.errors import ConfigError

FEW = ("model=local", "task=sample", "limit=1", "task.max_new_tokens=2", "task.nll=false", "method=full")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model folder with a tokenizer, made once."""
    folder = tmp_path_factory.mktemp("made")
    for part in (stock("llama", vocab_size=259, max_position_embeddings=997), byte_tokenizer()):
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "model"))


@pytest.fixture
def command(folder, tmp_path, monkeypatch, capsys):
    words = (*FEW, f"model.path={folder}", f"outputs_dir={tmp_path / 'out'}")
    return lambda *more: run_py(monkeypatch, capsys, *words, *more)


def weights(folder):
    return folder / "model.safetensors"


def tensor_in_the_middle(folder):
    """(offset, size) in the file of layer 1's q_proj."""
    data = weights(folder).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    start, end = json.loads(data[8 : 8 + size])["model.layers.1.self_attn.q_proj.weight"]["data_offsets"]
    return 8 + size + start, end - start


def zeroed(folder):
    """As many bytes as before, and the time of the last change as it was."""
    before = weights(folder).stat()
    offset, size = tensor_in_the_middle(folder)
    with weights(folder).open("r+b") as file:
        file.seek(offset)
        file.write(bytes(size))
    os.utime(weights(folder), ns=(before.st_atime_ns, before.st_mtime_ns))
    after = weights(folder).stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


# -- known by their bytes ----------------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path):
    """A safetensors file of 24 MB, of which blocks of 4 KiB at 256 places would miss most."""
    folder = tmp_path / "large"
    stock("llama").save_pretrained(folder)
    tensors = {f"x{number}": torch.ones(1 << 16) for number in range(96)}
    save_file(tensors, weights(folder))
    return folder


def test_every_byte_counts(large):
    size = weights(large).stat().st_size
    seen = {ModelSpec.of(node(large)).identity()["path"]}
    for offset in (size // 3 + 7001, size // 2 + 5003, size - 1):
        with weights(large).open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))
        seen.add(ModelSpec.of(node(large)).identity()["path"])
    assert len(seen) == 4


def node(folder, **more):
    return {"kind": "pretrained", "path": str(folder), "device": "cpu", **more}


def test_a_tensor_zeroed_in_place_is_another_run_with_a_baseline_of_its_own(command, folder, tmp_path):
    stock("llama", vocab_size=259, max_position_embeddings=997, intermediate_size=40009).save_pretrained(folder)
    assert weights(folder).stat().st_size > 28e6
    assert command("method=h2o", "kv_ratio=0.5")[0] == 0
    first = {run.hash for run in runs(tmp_path / "out")}
    zeroed(folder)
    code, out, err = command("method=h2o", "kv_ratio=0.5")
    assert code == 0, err + out
    both = {run.hash: run for run in runs(tmp_path / "out")}
    assert len(first) == 2 and len(both) == 4
    for run in both.values():
        assert all(row["metrics"] for row in run.rows())
        assert run.baseline is None or (run.baseline in first) == (run.hash in first)


def test_a_digest_is_remembered_until_the_file_changes(large, monkeypatch):
    reads = []
    real = digests.hashlib.sha256

    def counted(*data):
        reads.extend(["whole"] * (not data))
        return real(*data)

    monkeypatch.setattr(digests.hashlib, "sha256", counted)
    before = digests.file_digest(weights(large))
    assert digests.file_digest(weights(large)) == before
    assert len(reads) == 2, "a file as young as this may change within the clock's tick"
    monkeypatch.setattr(digests, "SETTLED_NS", 0)
    time.sleep(0.01)
    assert digests.file_digest(weights(large)) == before and len(reads) == 3
    assert digests.file_digest(weights(large)) == before and len(reads) == 3
    time.sleep(0.01)
    offset, times = weights(large).stat().st_size // 2, weights(large).stat()
    with weights(large).open("r+b") as file:
        file.seek(offset)
        file.write(b"other")
    os.utime(weights(large), ns=(times.st_atime_ns, times.st_mtime_ns))
    time.sleep(0.01)
    assert digests.file_digest(weights(large)) != before and len(reads) == 4


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"stamp": [1], "sha256": 3}', b"\xff", None])
def test_what_is_remembered_may_be_lost_or_damaged(large, monkeypatch, damage):
    monkeypatch.setattr(digests, "SETTLED_NS", 0)
    time.sleep(0.01)
    before, place = digests.file_digest(weights(large)), digests._place(weights(large))
    assert place.exists()
    place.unlink() if damage is None else place.write_bytes(damage)
    assert digests.file_digest(weights(large)) == before


def test_a_place_that_cannot_be_written_is_done_without(large, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(digests, "SETTLED_NS", 0)
    time.sleep(0.01)
    assert digests.file_digest(weights(large)) == digests.file_digest(weights(large))


def test_code_counts_where_it_runs(folder):
    def identity(**more):
        return ModelSpec.of(node(folder, **more)).identity()["path"]

    plain, trusted = identity(), identity(trust_remote_code=True)
    (folder / "modeling.py").write_text("a = 1\n")
    assert identity() == plain
    assert identity(trust_remote_code=True) != trusted


def test_weights_in_parts_count_wherever_they_lie(folder):
    tensors = load_file(weights(folder))
    weights(folder).unlink()
    (folder / "parts").mkdir()
    names = sorted(tensors)
    for part, chosen in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in chosen}, folder / "parts" / f"{part}.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: f"parts/{place % 2}.safetensors" for place, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load_model(str(folder)).lm_head.weight, tensors["lm_head.weight"])
    before = ModelSpec.of(node(folder)).identity()
    tensors[names[1]] += 1
    save_file({name: tensors[name] for name in names[1::2]}, folder / "parts" / "1.safetensors", {"format": "pt"})
    assert ModelSpec.of(node(folder)).identity() != before


def test_a_folder_that_changes_before_it_is_loaded_is_refused(folder):
    spec = ModelSpec.of(node(folder))
    zeroed(folder)
    with pytest.raises(ConfigError, match="changed after this run was set up"):
        load(spec)


def test_a_file_written_to_does_not_change_the_model_under_way(folder):
    model = load_model(str(folder))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    zeroed(folder)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


# -- whole, and what the configuration asks for ------------------------------------------------------------------------


def changed(folder, change):
    tensors = load_file(weights(folder))
    change(tensors)
    save_file(tensors, weights(folder), {"format": "pt"})


def configured(folder, name="config.json", **changes):
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def without(name):
    return lambda folder: changed(folder, lambda tensors: tensors.pop(name))


def with_layer_2(tensors):
    tensors |= {name.replace("layers.1", "layers.2"): t.clone() for name, t in tensors.items() if "layers.1" in name}


Q = "model.layers.1.self_attn.q_proj.weight"
UNFIT = {
    "a weight is missing": (without(Q), f"missing: {Q}\\)"),
    "fewer layers in the file": (
        lambda folder: configured(folder, num_hidden_layers=3),
        r"missing: model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight, .* and 5 more\)",
    ),
    "more layers in the file": (
        lambda folder: changed(folder, with_layer_2),
        r"unexpected: model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight, .* and 5 more\)",
    ),
    "a name nobody knows": (
        lambda folder: changed(folder, lambda tensors: tensors.update(extra=torch.ones(3))),
        r"unexpected: extra\)",
    ),
    "another shape": (
        lambda folder: changed(folder, lambda tensors: tensors.update({Q: torch.ones(7, 30)})),
        r"of another shape: .*q_proj.weight \[7, 30\] instead of \[210, 30\]",
    ),
    "another vocabulary": (
        lambda folder: configured(folder, vocab_size=260),
        r"of another shape: lm_head.weight \[259, 30\] instead of \[260, 30\], model.embed_tokens",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_weights_that_are_not_the_models_are_named_and_leave_no_rows(command, folder, tmp_path, case):
    change, message = UNFIT[case]
    change(folder)
    code, out, err = command("method=h2o", "kv_ratio=0.5")
    assert code == 1
    assert_one_line(out, err, f"error: the weights in {folder} do not fit its config.json", message)
    assert not any(run.rows() for run in runs(tmp_path / "out"))


def assert_one_line(out, err, *messages):
    assert "Traceback" not in out + err, err
    (line,) = [line for line in err.splitlines() if line and not line.startswith("Loading weights:")]
    for message in messages:
        assert re.search(message, line), line


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_family_loads_with_and_without_a_head_of_its_own(tmp_path, family, tied):
    model = stock(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    found = dict(load_model(str(tmp_path)).named_parameters())
    wanted = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


OLD_TABLES = {
    "gpt2": {"transformer.h.0.attn.bias": (1, 1, 211, 211), "transformer.h.0.attn.masked_bias": ()},
    "gptj": {"transformer.h.1.attn.bias": (1, 1, 211, 211), "transformer.h.1.attn.masked_bias": ()},
    "gpt_neox": {
        "gpt_neox.layers.0.attention.bias": (1, 1, 211, 211),
        "gpt_neox.layers.0.attention.masked_bias": (),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": (7,),
    },
    "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": (7,)},
}


@pytest.mark.parametrize("family", OLD_TABLES)
def test_tables_that_older_checkpoints_hold_are_no_weights(tmp_path, family):
    stock(family).save_pretrained(tmp_path)
    changed(tmp_path, lambda t: t.update({name: torch.ones(shape) for name, shape in OLD_TABLES[family].items()}))
    load_model(str(tmp_path))


def test_names_of_the_bare_model_are_known(tmp_path):
    """GPT-2 on the hub was saved without its head: h.0.attn..., not transformer.h.0.attn..."""
    stock("gpt2", tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in load_file(weights(tmp_path)).items()}  # the file is overwritten
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(renamed, weights(tmp_path), {"format": "pt"})
    model = load_model(str(tmp_path))
    assert torch.equal(model.transformer.h[1].attn.c_attn.weight, tensors["transformer.h.1.attn.c_attn.weight"])


# -- damaged -----------------------------------------------------------------------------------------------------------


def cut(share):
    def change(folder):
        data = weights(folder).read_bytes()
        weights(folder).write_bytes(data[: int(share * len(data))])

    return change


def text(name, words):
    def change(folder):
        (folder / name).write_text(words) if isinstance(words, str) else (folder / name).write_bytes(words)

    return change


def config(**changes):
    return lambda folder: configured(folder, **changes)


def in_parts(index):
    """The weights as a part of a checkpoint with this index."""

    def change(folder):
        weights(folder).rename(folder / "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


@pytest.mark.parametrize(
    "error",
    [OSError(12, "Cannot allocate memory"), RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)")],
)
def test_a_file_that_the_system_does_not_give_is_not_called_damaged(error, tmp_path, monkeypatch):
    """No memory to map it, or no right to read it: to fetch it again would not help."""

    def no_memory(file, framework):
        raise error

    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(checkpoint, "safe_open", no_memory)
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read: .*Cannot allocate memory"):
        checkpoint.check_headers(tmp_path, 1)


LOST = {"metadata": {}, "weight_map": {Q: "model-00002-of-00002.safetensors"}}
SPIRAL = {"rope_type": "spiral", "rope_theta": 1e4}
DAMAGED = {
    "cut in half": (cut(0.5), "model.safetensors is damaged .*: fetch or copy it again"),
    "a byte short": (cut(0.99999), "model.safetensors is damaged"),
    "empty": (cut(0), "model.safetensors is damaged"),
    "garbage": (text("model.safetensors", bytes(range(256)) * 40), "model.safetensors is damaged"),
    "an index without its parts": (in_parts(LOST), "cannot load the model in .*model-00002-of-00002.safetensors"),
    "an index of garbage": (in_parts([1]), "cannot load the model in "),
    "config of garbage": (text("config.json", "{"), "cannot load the configuration in .*not a valid JSON"),
    "config binary": (text("config.json", b"\xff\xfe\x00"), "cannot load the configuration in "),
    "config a list": (text("config.json", "[]"), "cannot load the configuration in "),
    "config deep": (text("config.json", "[" * 100000), "cannot load the configuration in "),
    "no family": (config(model_type=3), "cannot load the configuration in "),
    "layers in words": (config(num_hidden_layers="two"), "configuration in .*num_hidden_layers.* expected int"),
    "layers null": (config(num_hidden_layers=None), "num_hidden_layers"),
    "layers -1": (config(num_hidden_layers=-1), "num_hidden_layers must be a whole number of at least 1, got -1"),
    "layers without end": (config(num_hidden_layers=10**8), "asks for 100000000 layers, and its files hold 21 weights"),
    "heads that do not divide": (config(num_attention_heads=7, head_dim=None), "hidden size|multiple of"),
    "groups that do not divide": (config(num_key_value_heads=4), "15 heads in 4 groups"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads|division|modulo"),
    "unknown rotation": (config(rope_parameters=SPIRAL), "rope_type must be one of default, .*yarn, got 'spiral'"),
    "rotation a list": (config(rope_parameters=[1]), "cannot load the|rope"),
    "rotation of a factor in words": (
        config(rope_parameters={"rope_type": "linear", "factor": "two", "rope_theta": 1e4}),
        "cannot load the|rope",
    ),
    "positions null": (config(max_position_embeddings=None), "max_position_embeddings"),
    "activation": (config(hidden_act="zip"), "cannot load the model in .*zip"),
    "quantised in an unknown way": (
        config(quantization_config={"quant_method": "someones_own", "bits": 4}),
        "config.json of .*quant_method='someones_own'; .* transformers knows ",
    ),
    "tokenizer of garbage": (text("tokenizer.json", "{"), "cannot load the tokenizer in "),
    "tokenizer of no model": (
        lambda folder: configured(folder, "tokenizer.json", model=None),
        "cannot load the tokenizer in ",
    ),
    "tokenizer's settings a list": (text("tokenizer_config.json", "[]"), "cannot load the tokenizer in "),
    "no tokenizer": (
        lambda folder: [file.unlink() for file in folder.glob("tokenizer*")],
        "cannot load the tokenizer in |no tokenizer",
    ),
    "generation settings of garbage": (text("generation_config.json", "{"), "cannot load the generation settings in "),
    "template does not parse": (text("chat_template.jinja", "{% for %}"), "cannot be used .TemplateSyntaxError"),
    "template of an unknown filter": (
        text("chat_template.jinja", "{{ messages[0]['content'] | shout }}"),
        "chat template cannot be used .Template",
    ),
    "template refuses": (text("chat_template.jinja", "{{ raise_exception('no') }}"), "cannot be used .*no"),
    "template forbidden": (
        text("chat_template.jinja", "{{ ''.__class__.__mro__ }}{{ messages[0]['content'] }}"),
        "chat template cannot be used .Security",
    ),
    "template forgets the words": (text("chat_template.jinja", "[INST] [/INST]"), "leaves out what the user says"),
    "template of nothing": (text("chat_template.jinja", ""), "this tokenizer has no chat template: set model.chat=fal"),
}


PLANNED = ("layers without end", "activation", "rotation of a factor in words", "unknown rotation", "cut in half")


@pytest.mark.parametrize("case", PLANNED)
def test_a_dry_run_says_it_too(command, folder, case):
    DAMAGED[case][0](folder)
    code, out, err = command("--dry-run")
    assert code == 1
    assert_one_line(out, err, "error: ")


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_folders_are_one_line(command, folder, tmp_path, case):
    change, message = DAMAGED[case]
    change(folder)
    code, out, err = command(*(["model.chat=true"] if "template" in case else []))
    assert code == 1, out + err
    assert_one_line(out, err, "error: ", message)
    assert not any(run.rows() for run in runs(tmp_path / "out"))


# -- adapters ----------------------------------------------------------------------------------------------------------

RANK, ALPHA = 3, 12
ADAPTED = ("self_attn.q_proj", "mlp.down_proj")


def adapt(folder, model_folder=None, rename=lambda name: name, **changes):
    """Put a LoRA adapter into a folder, as peft writes it; returns {weight of the model: what is added to it}."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    config |= {"target_modules": [name.split(".")[1] for name in ADAPTED], "base_model_name_or_path": model_folder}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    generator, added, tensors = torch.Generator().manual_seed(1), {}, {}
    for name, weight in load_file(weights(folder if model_folder is None else Path(model_folder))).items():
        module = name.removesuffix(".weight")
        if module.endswith(ADAPTED):
            down = torch.randn(RANK, weight.shape[1], generator=generator) * 0.3
            up = torch.randn(weight.shape[0], RANK, generator=generator) * 0.3
            tensors[rename(f"base_model.model.{module}.lora_A.weight")] = down
            tensors[rename(f"base_model.model.{module}.lora_B.weight")] = up
            added[name] = ALPHA / RANK * up @ down
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return added


def pretend_peft(monkeypatch, installed):
    real = importlib.util.find_spec
    found = lambda name, *more: installed or None if name == "peft" else real(name, *more)  # noqa: E731
    monkeypatch.setattr("kvexp.hf.adapters.importlib.util.find_spec", found)


@pytest.mark.parametrize("beside", [True, False])
def test_an_adapter_without_peft_is_refused_before_anything_loads(beside, folder, tmp_path, monkeypatch, capsys):
    place = folder if beside else tmp_path / "adapter"
    adapt(place, None if beside else str(folder))
    pretend_peft(monkeypatch, None)
    monkeypatch.setattr("kvexp.hf.load_model", lambda *_, **__: pytest.fail("weights are loaded"))
    words = (*FEW, f"model.path={place}", f"outputs_dir={tmp_path / 'out'}")
    code, out, err = run_py(monkeypatch, capsys, *words)
    assert code == 1
    assert_one_line(out, err, f"error: {place} holds a LoRA adapter .adapter_config.json.* run: pip install peft")


def half(name):
    return lambda folder: (folder / name).unlink()


def pickled(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


ADAPTERS = {
    "no configuration": (half("adapter_config.json"), "holds adapter_model.safetensors of a LoRA adapter without"),
    "no weights": (half("adapter_model.safetensors"), "adapter_config.json of a LoRA adapter without"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json cannot be read"),
    "another kind": (
        lambda f: configured(f, "adapter_config.json", peft_type="PREFIX_TUNING"),
        "adapter of kind 'PREFIX_TUNING': only LORA",
    ),
    "pickled": (pickled, "adapter as pickled weights .adapter_model.bin"),
    "repeated layers": (
        lambda f: configured(f, "adapter_config.json", layer_replication=[[0, 2], [1, 2]]),
        "layer_replication.* cannot be merged",
    ),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_half_an_adapter_is_one_line(case, command, folder, monkeypatch):
    change, message = ADAPTERS[case]
    pretend_peft(monkeypatch, True)
    adapt(folder)
    change(folder)
    code, out, err = command()
    assert code == 1
    assert_one_line(out, err, "error: ", message)


def test_an_adapter_alone_needs_a_model_and_one_alone(folder, tmp_path, monkeypatch):
    pretend_peft(monkeypatch, True)
    alone = tmp_path / "adapter"
    adapt(alone, str(folder), base_model_name_or_path=None)
    with pytest.raises(ConfigError, match=r"names no model .base_model_name_or_path"):
        load_model(str(alone))
    adapt(folder)
    adapt(alone, str(folder))
    with pytest.raises(ConfigError, match="has an adapter of its own"):
        load_model(str(alone))


@pytest.mark.parametrize("beside", [True, False])
def test_an_adapter_is_added_to_the_weights(beside, folder, tmp_path):
    """W + alpha / r * B A, and nothing of peft is left in the model; the model under it is part of the identity."""
    pytest.importorskip("peft")
    bare, plain = ModelSpec.of(node(folder)).identity()["path"], load_file(weights(folder))
    place = folder if beside else tmp_path / "adapter"
    added = adapt(place, None if beside else str(folder))
    spec = ModelSpec.of(node(place))
    model, tokenizer = load(spec)
    assert len(added) == 4 and tokenizer("ab").input_ids and not any("lora" in name for name in model.state_dict())
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, plain[name] + added.get(name, 0), rtol=1e-5, atol=1e-6)
    assert spec.identity()["path"] != bare
    zeroed(folder)
    assert ModelSpec.of(node(place)).identity()["path"] != spec.identity()["path"]


def test_an_adapter_of_another_model_is_named(folder):
    pytest.importorskip("peft")
    adapt(folder, rename=lambda name: name.replace("layers.1", "layers.7"))
    with pytest.raises(ConfigError, match=r"is not one of this model \(missing: .*layers\.1.*unexpected: .*layers\.7"):
        load_model(str(folder))


def tied_adapter(folder, tokens=None, **config):
    """(folder of an adapter that peft saves, its model's unmerged logits, token ids); embeddings are tied.

    tokens: what the vocabulary is resized to before.
    """
    peft = pytest.importorskip("peft")
    base, place, ids = folder / "tied", folder / "adapter", torch.arange(3, 20)[None]
    stock("llama", vocab_size=259, tie_word_embeddings=True).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    if tokens is not None:
        model.resize_token_embeddings(tokens)
    config = {"r": RANK, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM", **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights, and of names that peft calls
        unmerged = peft.get_peft_model(model, peft.LoraConfig(**config))
        generator = torch.Generator().manual_seed(1)
        for weight in (weight for weight in unmerged.parameters() if weight.requires_grad):
            weight.data.copy_(
                torch.randn(weight.shape, generator=generator) * 0.3
            )  # in place: some are views of others
        unmerged.save_pretrained(place)
    configured(place, "adapter_config.json", base_model_name_or_path=str(base))
    with torch.no_grad():
        return place, unmerged.eval()(ids).logits, ids


TIED = {
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "both tied": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "parameter": {"target_modules": [], "target_parameters": ["lm_head.weight"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved tied": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "others": {"target_modules": ["q_proj"]},
}


@pytest.mark.parametrize("case", TIED)
def test_an_adapter_of_tied_embeddings_is_merged_as_it_runs_unmerged(case, tmp_path):
    """Merged logits are peft's unmerged ones; only what had other numbers before has another identity."""
    place, wanted, ids = tied_adapter(tmp_path, **TIED[case])
    spec = ModelSpec.of(node(place))
    model, _ = load(spec)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    untied = case not in ("others", "saved", "saved tied")  # whose numbers were right before
    assert model.config.tie_word_embeddings is (case in ("others", "saved tied"))
    assert ("untied" in spec.identity()) is untied and ("untied" in model_digest(spec)) is untied


def test_a_merge_that_is_not_the_adapter_is_refused(tmp_path, monkeypatch):
    place, _, _ = tied_adapter(tmp_path, **TIED["head"])
    monkeypatch.setattr("kvexp.hf.adapters.untie_changed", lambda wrapped: False)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ConfigError, match="merged, its logits differ from the unmerged ones"):
            load_model(str(place), dtype=dtype)


RESIZED = {
    **{name: TIED[name] for name in ("head", "embeddings", "saved", "others")},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [260, 261]},
}


@pytest.mark.parametrize("case", RESIZED)
def test_an_adapter_of_a_resized_vocabulary_says_so_before_weights_load(case, tmp_path, monkeypatch, capsys):
    place, _, _ = tied_adapter(tmp_path, tokens=264, **RESIZED[case])
    monkeypatch.setattr("kvexp.hf.load_model", lambda *_, **__: pytest.fail("weights are loaded"))
    code, out, err = run_py(monkeypatch, capsys, *FEW, f"model.path={place}", f"outputs_dir={tmp_path / 'out'}")
    assert code == 1
    assert_one_line(out, err, "error: .*resized to 264 tokens, and its model has 259: call resize_token_embeddings")


@pytest.mark.parametrize("changes", [{"r": RANK + 1}, {"hidden_size": 60}])
def test_an_adapter_of_other_sizes_says_what_does_not_fit(changes, tmp_path):
    place, _, _ = tied_adapter(tmp_path, target_modules=["q_proj"])
    configured(
        place if "r" in changes else tmp_path / "tied",
        "adapter_config.json" if "r" in changes else "config.json",
        **changes,
    )
    with pytest.raises(
        ConfigError, match=r"other sizes than r and its model ask for \(.*q_proj.*; give it the model and"
    ):
        ModelSpec.of(node(place))


def test_an_adapter_on_the_hub_is_asked_for_as_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvexp.hf.adapters.find_adapter_config_file", lambda *_, **__: "adapter_config.json")
    with pytest.raises(ConfigError, match=r"someone/adapter holds a LoRA adapter.*hf download.*model=local"):
        load_model("someone/adapter")


LONG = "x" * 300
NAMES = {
    "model.path": ("model=local", "task=sample"),
    "task.data_files": ("model=tiny", "task=stories"),
    "task.haystack": ("model=tiny", "task=needle"),
    "task.data_dir": ("model=tiny", "task=lm_eval", "task.tasks=[piqa]"),
    "outputs_dir": ("model=tiny", "task=sample"),
}


@pytest.mark.parametrize(
    ("option", "name"),
    [
        *((option, LONG) for option in NAMES),
        *(("model.path", name) for name in ("~nobody-of-this-name/x", f"folder/{LONG}", "é" * 200, "a/" * 2500)),
        ("task.data_files", f"{LONG}/*.jsonl"),
    ],
)
def test_names_that_no_file_can_have_are_one_line(folder, tmp_path, monkeypatch, capsys, option, name):
    monkeypatch.chdir(tmp_path)
    words = {"outputs_dir": str(tmp_path / "out"), option: f"'{name}'"}
    given = [f"{key}={value}" for key, value in words.items()]
    code, out, err = run_py(monkeypatch, capsys, "limit=1", "method=full", *NAMES[option], *given)
    assert code == 1
    assert_one_line(out, "\n".join(line for line in err.splitlines() if "could not be recorded" not in line), "error: ")
    assert option == "outputs_dir" or f"{option}={name[:20]}" in err


def test_a_folder_is_shown_by_its_own_name_under_whatever_option(folder, tmp_path, monkeypatch, capsys):
    """What is in it says nothing of the option's model: the default's and a hub model's too."""
    for option in ("model=local", "model=smollm2_135m", "model=llama_7b"):
        words = (*FEW[1:], f"model.path={folder}", "model.chat=false", "model.dtype=float32", option)
        code, said, wrong = run_py(monkeypatch, capsys, *words, f"outputs_dir={tmp_path / 'out'}")
        assert code == 0, wrong
        assert f"{folder.name} / sample" in said and "smollm2_135m" not in said and "llama_7b" not in said
    shown = {labels["model"] for run in runs(tmp_path / "out") for labels in run.asked}
    assert shown == {folder.name}


def test_no_class_stands_in_for_another_under_its_name(monkeypatch, capsys, tmp_path):
    words = ("method=knorm", "method._target_=kvexp.methods.Random", f"outputs_dir={tmp_path / 'out'}")
    code, _, wrong = run_py(monkeypatch, capsys, "model=tiny", "limit=1", *words)
    assert code == 1 and "makes it another method than method=knorm" in wrong


def test_a_folder_named_by_a_dot_has_its_own_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_label("local", ".") == tmp_path.name and model_label("local", "..") == tmp_path.parent.name
