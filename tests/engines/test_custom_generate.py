"""The folder for `generate(custom_generate=...)`: made of kvexp's modules, and it answers as kvexp does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers.dynamic_module_utils as dynamic
from tiny import prompts_of, stock, tiny
from transformers import LlamaConfig, LlamaForCausalLM, pipeline

from kvexp.core import Budget
from kvexp.engines.custom_generate import OWN_NAMES, flattened, main, relative, write_folder
from kvexp.engines.custom_generate_entry import METHODS
from kvexp.generate import GenerationParams, generate
from kvexp.hf.load import byte_tokenizer
from kvexp.util import ConfigError

NEW = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("made") / "kvexp_eviction"
    write_folder(made)
    return made


@pytest.fixture(autouse=True, scope="module")
def own_modules(tmp_path_factory):
    """transformers copies the folder's files: not into the user's cache."""
    before, path = set(sys.modules), list(sys.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


def answer(folder, family, prompts, **options):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    given = {"max_new_tokens": NEW, "do_sample": False, "trust_remote_code": True, "pad_token_id": 0} | options
    made = stock(family).generate(ids, attention_mask=mask, custom_generate=str(folder), **given)
    return made[:, width:].tolist()


def slow(*cases):
    """Cases of slow tests; each has a quicker one next to it."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("method", "beams"),
    [("h2o", 1), ("keyformer", 1), ("a2sf", 3), *slow(("tova", 1), ("snapkv", 1), ("streaming_llm", 1))],
)
def test_tokens_are_those_of_kvexps_own_rows(folder, method, beams):
    prompts = prompts_of(3, [29, 23])
    decoding = GenerationParams(max_new_tokens=NEW, eos=None, num_beams=beams)
    fields = {"snapkv": {"window": 4}, "a2sf": {"alpha": 0.3}}.get(method, {})
    wanted = generate(tiny("llama"), prompts, METHODS[method](**fields), Budget(kv_ratio=0.4), decoding=decoding)
    options = {"method": method, "method_options": fields, "kv_ratio": 0.4}
    if beams > 1:
        options |= {"num_beams": beams, "early_stopping": True}
    assert answer(folder, "llama", prompts, **options) == wanted.tokens


def test_a_pipeline_evicts_as_generate_does(folder):
    """transformers' own pipeline hands the arguments on."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=259, initializer_range=0.3, **sizes)).eval()
    tokenizer, text = byte_tokenizer(), "What is kept of a prompt, and what is lost of it?"
    write = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 258}
    evicting = {"custom_generate": str(folder), "trust_remote_code": True, "method": "h2o", "kv_ratio": 0.3}
    (made,) = write(text, return_tensors=True, add_special_tokens=True, **given, **evicting)
    ids = torch.tensor([tokenizer(text).input_ids])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **given, **evicting)[0].tolist()
    assert made["generated_token_ids"] == expected
    (full,) = write(text, return_tensors=True, add_special_tokens=True, **given)
    assert full["generated_token_ids"] != expected


@pytest.mark.parametrize("family", ["mpt", *slow("gpt2", "gptj", "opt")])
def test_tokens_are_the_same_in_other_families_and_the_model_is_left_as_it_was(folder, family):
    prompts = prompts_of(4, [26])
    model = stock(family)
    ids = torch.tensor(prompts)
    before = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, attention_mask=ids * 0 + 1)
    decoding = GenerationParams(max_new_tokens=NEW, eos=None)
    wanted = generate(tiny(family), prompts, METHODS["h2o"](), Budget(tokens=12), decoding=decoding)
    assert answer(folder, family, prompts, budget_tokens=12) == wanted.tokens
    after = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, attention_mask=ids * 0 + 1)
    assert torch.equal(before, after) and model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"method": "h3o", "kv_ratio": 0.5}, "method must be one of a2sf"),
        ({"kv_ratio": 0.5, "budget_tokens": 9}, "and not both"),
        ({}, "give kv_ratio"),
        ({"kv_ratio": 0.5, "method_options": {"beta": 1}}, "method_options of h2o"),
        ({"method": "streaming_llm", "budget_tokens": 2}, "cannot hold"),
    ],
)
def test_mistakes_are_said_before_the_model_runs(folder, options, told):
    with pytest.raises(Exception, match=told) as raised:
        answer(folder, "llama", prompts_of(3, [20]), **options)
    assert type(raised.value).__name__ == "ConfigError"


def test_the_folder_is_kvexps_own_modules_and_nothing_of_them_is_lost():
    made = flattened()
    assert {"generate.py", "core_slots.py", "core_eviction.py", "methods_keyformer.py", "hf_cache.py"} <= set(made)
    assert not any(
        "kvexp." in line and line.lstrip().startswith(("from kvexp", "import kvexp"))
        for text in made.values()
        for line in text.splitlines()
    )
    for old, new in OWN_NAMES.items():
        assert sum(new in text for text in made.values()) == 1 and not any(old in text for text in made.values())
    assert not any("import triton" in text for text in made.values())
    for name, text in made.items():
        compile(text, name, "exec")


@pytest.mark.slow
def test_the_folder_works_where_kvexp_is_not_installed(folder):
    """In a process without kvexp every module of the folder imports."""
    code = (
        "import sys, importlib; sys.modules['kvexp'] = None; sys.modules['triton'] = None\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
        "made = importlib.import_module('custom_generate.generate')\n"
        "print(len(made.METHODS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": "/usr/bin"})
    assert done.returncode == 0 and int(done.stdout) == len(METHODS), done.stderr


def test_an_import_that_could_not_be_copied_is_an_error():
    with pytest.raises(ConfigError, match="which can be made relative"):
        relative("kvexp.somewhere", "import kvexp.core.slots\n")
    text = "def f():\n    from kvexp.core import (\n        noise,\n        Budget as B,\n    )\n    return B\n"
    made, modules = relative("kvexp.core.x", text)
    assert set(modules) == {"kvexp.core", "kvexp.core.noise"}
    assert made.splitlines() == [
        "def f():",
        "    from .core import Budget as B",
        "    from .core_noise import __name__ as _",
        "    from . import core_noise as noise",
        "    return B",
    ]


def test_the_command_writes_the_folder_and_removes_what_is_old(tmp_path, capsys):
    (tmp_path / "out" / "custom_generate").mkdir(parents=True)
    old = tmp_path / "out" / "custom_generate" / "core_gone.py"
    old.write_text("")
    assert main([str(tmp_path / "out")]) == 0 and not old.exists()
    assert "files)" in capsys.readouterr().out
    told = (tmp_path / "out" / "README.md").read_text()
    assert 'method="keyformer"' in told and "`snapkv`" in told
    assert (tmp_path / "out" / "custom_generate" / "requirements.txt").read_text().startswith("torch")
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file" / "x")]) == 2 and "error" in capsys.readouterr().err
