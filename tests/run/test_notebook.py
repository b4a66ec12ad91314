"""`kvexp.load` and `kvexp.generate`: a guess from transformers works or is answered in a sentence."""

from __future__ import annotations

import inspect
import json
import math
import pydoc
import re
import rlcompleter
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import pipeline

import kvexp
from kvexp.core import Budget
from kvexp.generate import generate as generate_ids
from kvexp.hf import EvictionCache, patched, random_model, unpatch_model
from kvexp.hf.load import byte_tokenizer
from kvexp.methods import H2O
from kvexp.results.curves import compare
from kvexp.run.compose import check_groups, options, with_places
from kvexp.run.notebook import generate, load
from kvexp.util.errors import ConfigError

TEXT = "text : food milo rice . the old lamp stood past the stove . city nora ford . ask food milo"


@pytest.fixture(scope="module")
def model_and_tokenizer():
    return load("testbed_rope")


@pytest.fixture(scope="module")
def ids(model_and_tokenizer):
    return model_and_tokenizer[1](TEXT).input_ids


def prompts(tokenizer, ids):
    """One prompt in every form that is taken."""
    batch = tokenizer([TEXT], padding=True)
    return {
        "text": TEXT,
        "texts": [TEXT],
        "ids": ids,
        "batch of ids": [ids],
        "row": torch.tensor(ids),
        "rows": torch.tensor([ids]),
        "tokenizer's output": batch,
        "of one text": tokenizer(TEXT),
        "tensors": tokenizer([TEXT], return_tensors="pt"),
    }


def test_every_form_of_a_prompt_gives_the_same_answer(model_and_tokenizer, ids):
    model, tokenizer = model_and_tokenizer
    given = {"method": "h2o", "kv_ratio": 0.5, "max_new_tokens": 3}
    answers = {
        form: kvexp.generate(prompt, model, tokenizer=tokenizer, **given).tokens
        for form, prompt in prompts(tokenizer, ids).items()
    }
    right = generate_ids(model, [ids], H2O(), Budget(kv_ratio=0.5), max_new_tokens=3)
    assert answers == dict.fromkeys(answers, right.tokens)


def test_a_models_name_and_a_methods_name_are_enough(ids):
    named = kvexp.generate([TEXT, TEXT + " milo"], "testbed_rope", "window", tokens=6, max_new_tokens=2)
    assert len(named.texts) == 2 and named.text == named.texts[0]
    assert named.cache.config.budget == Budget(tokens=6)
    assert len(repr(named).splitlines()) == 3 and "window, tokens=6, KV peak " in repr(named)
    assert (
        kvexp.generate(TEXT, "testbed_rope", max_new_tokens=1).cache.config
        == kvexp.generate(TEXT, "testbed_rope", H2O, Budget(kv_ratio=0.5), max_new_tokens=1).cache.config
    )
    model, tokenizer = kvexp.load("testbed_rope")
    full = kvexp.generate(model, [ids], "full", tokenizer=tokenizer, max_new_tokens=2)  # in transformers' order too
    assert full.text == generate_ids(model, TEXT, H2O(), kv_ratio=1.0, tokenizer=tokenizer, max_new_tokens=2).text
    assert kvexp.load("testbed_rope")[0] is model  # kept


def test_what_was_not_named_stands_in_the_printed_result(ids):
    """Method, ratio and small caches are shown, and a time per token only where there is one."""
    single = kvexp.generate(TEXT, "testbed_rope", max_new_tokens=1)
    first, cost, times = repr(single).splitlines()
    assert first == f"Generation: {single.text!r}"
    assert cost.startswith("  h2o, kv_ratio=0.5, KV peak ") and cost.endswith(" KiB")
    assert math.isnan(single.timing.tpot_s) and "nan" not in times and "ms each" not in times
    assert "ms each" in repr(kvexp.generate(TEXT, "testbed_rope", "full", max_new_tokens=2))


def digest(model):
    return float(sum(weight.detach().double().abs().sum() for weight in model.parameters()))


def test_a_model_is_the_one_that_lies_at_its_path_now(tmp_path, monkeypatch):
    """Weights that were replaced, and the same relative path in another folder."""
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    for name, seed in (("one", 1), ("two", 2)):
        model = random_model("llama", seed=seed, num_hidden_layers=1, num_key_value_heads=2, **sizes)
        for part in (unpatch_model(model), byte_tokenizer()):
            part.save_pretrained(tmp_path / name / "model")
    monkeypatch.chdir(tmp_path / "one")
    first = digest(load("./model")[0])
    assert load("./model")[0] is load("./model")[0]
    monkeypatch.chdir(tmp_path / "two")
    second = digest(load("./model")[0])
    assert first != second
    shutil.copy(tmp_path / "one" / "model" / "model.safetensors", tmp_path / "two" / "model")
    assert digest(load("./model")[0]) == first
    kvexp.generate(TEXT, "./model", max_new_tokens=1)


def test_a_model_that_was_changed_is_not_the_one_of_its_name():
    """In place, in its dtype or in its attention; nor is a tokenizer with another template."""
    before = digest(load("testbed_rope")[0])
    for change in (
        lambda model: model.lm_head.weight.detach().mul_(2),
        lambda model: model.half(),
        unpatch_model,
        lambda model: setattr(model.generation_config, "eos_token_id", 3),
    ):
        model, tokenizer = load("testbed_rope")
        assert load("testbed_rope")[0] is model
        change(model)
        tokenizer.chat_template = "another"
        again, fresh = load("testbed_rope")
        assert again is not model and digest(again) == before and fresh.chat_template is None


def test_a_hub_id_is_what_the_cache_holds_now(tmp_path, monkeypatch):
    """Its main branch may move, and files of a snapshot may be replaced."""
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    digests, place = [], tmp_path / "models--org--name"
    (place / "refs").mkdir(parents=True)
    for seed in (1, 2):
        model = random_model("llama", seed=seed, num_hidden_layers=1, num_key_value_heads=2, **sizes)
        for part in (unpatch_model(model), byte_tokenizer()):
            part.save_pretrained(place / "snapshots" / (str(seed) * 40))
        (place / "refs" / "main").write_text(str(seed) * 40)
        digests.append(digest(load("org/name")[0]))
    weights = [place / "snapshots" / (commit * 40) / "model.safetensors" for commit in "12"]
    shutil.copy(*weights)
    assert digests[0] != digests[1] and digest(load("org/name")[0]) == digests[0]


def test_values_of_numpy_torch_and_pathlib_are_taken():
    folder = Path("kvexp/tasks/testbed_models/testbed_rope").resolve()
    model, tokenizer = load(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert model.dtype == torch.bfloat16
    given = {"tokenizer": tokenizer, "max_new_tokens": np.int64(2)}
    for tokens in (np.int64(6), torch.tensor(6)):
        assert kvexp.generate(TEXT, model, tokens=tokens, **given).cache.config.budget == Budget(tokens=6)
    assert kvexp.generate(TEXT, folder, kv_ratio=np.float32(0.5), max_new_tokens=1).cache.config.budget.kv_ratio == 0.5


def test_a_chat_goes_through_the_template(model_and_tokenizer, monkeypatch):
    model, tokenizer = model_and_tokenizer
    chat = [{"role": "user", "content": TEXT}]
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        kvexp.generate(chat, model, tokenizer=tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    answer = kvexp.generate(chat, model, tokenizer=tokenizer, max_new_tokens=3)
    assert answer.tokens == kvexp.generate(TEXT, model, tokenizer=tokenizer, max_new_tokens=3).tokens
    assert kvexp.generate([chat, chat], model, tokenizer=tokenizer, max_new_tokens=3).tokens == answer.tokens * 2


SYSTEM = {"role": "system", "content": "Say it loudly."}
USER = {"role": "user", "content": TEXT}
BEGUN = {"role": "assistant", "content": "the"}
TURN = "{{ m['content'] }}{% if m['role'] == 'assistant' %} ;{% endif %} "
TURNS = "{% for m in messages %}" + TURN + "{% endfor %}"
WITHOUT_SYSTEM = TURNS.replace(TURN, "{% if m['role'] != 'system' %}" + TURN + "{% endif %}")


def test_a_last_turn_of_the_assistant_is_gone_on_with(model_and_tokenizer, monkeypatch):
    """As transformers' pipeline does it: the turn is left open, and no new one begins."""
    model, tokenizer = model_and_tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", TURNS)
    given = {"tokenizer": tokenizer, "max_new_tokens": 3}
    begun = kvexp.generate([USER, BEGUN], model, "full", **given)
    assert begun.tokens == kvexp.generate(f"{TEXT} the", model, "full", **given).tokens
    with patched(model):
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        (theirs,) = pipe([USER, BEGUN], max_new_tokens=3, do_sample=False)
    assert theirs["generated_text"][-1]["content"].removeprefix("the").strip() == begun.text.strip()


def test_the_end_of_a_turn_ends_a_chat_as_it_does_in_run(model_and_tokenizer, monkeypatch):
    """Files of chat models often name the base model's end token alone; what ends a turn stands in the template."""
    model, tokenizer = model_and_tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", TURNS)
    for config in (model.config, model.generation_config):
        monkeypatch.setattr(config, "eos_token_id", None)
    given = {"model": model, "method": "full", "tokenizer": tokenizer, "max_new_tokens": 12}
    (ended,) = kvexp.generate([USER], **given).endings
    assert (ended.reason, tokenizer.decode([ended.token])) == ("stop", ";")
    assert kvexp.generate(TEXT, **given).endings[0].reason == "length"  # no chat: nothing ends it
    assert kvexp.generate([USER], eos_token_id=None, **given).endings[0].reason == "length"


WRONG_CHATS = {
    "no content": ([{"role": "user"}], "a chat is a list of messages"),
    "no role": ([{"content": TEXT}], "a chat is a list of messages"),
    "empty in a batch": ([[USER], []], "a chat is a list of messages"),
    "beside a text": ([[USER], TEXT], "a chat is a list of messages"),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": TEXT}]}], "must be a text for this model"),
    "tools": (
        [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]}, USER],
        "leaves out the call of look",
    ),
}


@pytest.mark.parametrize("case", WRONG_CHATS)
def test_a_wrong_chat_gets_a_sentence(case, model_and_tokenizer, monkeypatch):
    model, tokenizer = model_and_tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", TURNS)
    chat, said = WRONG_CHATS[case]
    with pytest.raises(ConfigError, match=said):
        kvexp.generate(chat, model, tokenizer=tokenizer, max_new_tokens=1)


def test_a_turn_that_a_template_drops_is_said(model_and_tokenizer, monkeypatch):
    model, tokenizer = model_and_tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", WITHOUT_SYSTEM)
    given = {"model": model, "tokenizer": tokenizer, "max_new_tokens": 1}
    kvexp.generate([USER], **given)
    with pytest.raises(ConfigError, match=r"leaves out the system turn 'Say it loudly\.': put its words into a user's"):
        kvexp.generate([SYSTEM, USER], **given)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system here') }}")
    with pytest.raises(ConfigError, match=r"cannot be used \(TemplateError: no system here\).*prompt as a text"):
        kvexp.generate([SYSTEM, USER], **given)


WRONG = {
    "method='h20'": "did you mean h2o",
    "method='H2O'": "did you mean h2o",
    "method='SnapKVPress'": "did you mean snapkv",
    "model='Testbed-RoPE'": "did you mean testbed_rope",
    "ratio=0.5": "did you mean kv_ratio",
    "compression_ratio=0.3": "did you mean kv_ratio.*stays: 1 - compression_ratio",
    "budget=0.5": r"got 0.5: write Budget\(kv_ratio=0.5\) .* give kvexp.generate kv_ratio=",
    "press='h2o'": "did you mean method",
    "max_tokens=3": "did you mean max_new_tokens",
    "seed=3": "did you mean seeds",
    "method=3": "name or a method object",
    "model='testbed_rop'": "did you mean testbed_rope",
    "model='local'": "folder or hub id of your own",
    "kv_ratio=2": "kv_ratio must be",
    "model=None": "model must be a model's name or what kvexp.load returns first, got None",
    "model='H:/x'": "is no folder, file or hub id",
    "prompt={'role': 'user', 'content': 'a'}": "a chat is a list of messages",
    "prompt=[3.5, 4.0]": "token ids must be whole numbers",
    "kv_ratio=0.5, tokens=3": "exactly one of kv_ratio",
    "kv_ratio=0.5, budget=Budget(tokens=3)": "give budget, or kv_ratio or tokens",
    "max_new_token=2": "did you mean max_new_tokens",
    "tokenizer=None, model=model": "give tokenizer=",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_guess_gets_a_sentence(words, model_and_tokenizer):
    given = eval(f"dict({words})", {"Budget": Budget, "model": model_and_tokenizer[0]})
    with pytest.raises(ConfigError, match=WRONG[words]):
        kvexp.generate(given.pop("prompt", TEXT), given.pop("model", "testbed_rope"), **given)


@pytest.mark.parametrize(("given", "said"), [({"kv_ratio": 0.5}, "Budget(kv_ratio=0.5)"), ({"budget": 0.5}, "got 0.5")])
def test_a_cache_says_how_its_budget_is_given(model_and_tokenizer, given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        EvictionCache(model_and_tokenizer[0], H2O(), **given)


def test_an_error_has_pythons_words_and_few_frames(monkeypatch):
    """No frames of the way to it, no word of the command line."""
    calls = {
        "there is no model 'x'; kvexp.list_models() lists them": lambda: kvexp.load("x"),
        "device='cuda', but no CUDA device is available: leave device at None": lambda: kvexp.load(device="cuda"),
        "there is no setting task__nonsense;": lambda: kvexp.compare(["h2o"], task__nonsense=1),
        "write kv_ratio=0.5 for a share of the prompt, budget=tokens budget__tokens=N": lambda: kvexp.compare(
            ["h2o"], budget=0.5
        ),
        "kv_ratio must be a number or None, got '0.5'": lambda: kvexp.generate(TEXT, "testbed_rope", kv_ratio="0.5"),
        "a prompt must be a text, a list of messages": lambda: kvexp.generate(None, "testbed_rope"),
    }
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for words, call in calls.items():
        with pytest.raises(ConfigError) as caught:
            call()
        assert words in str(caught.value)
        assert len(traceback.extract_tb(caught.tb)) <= 4 and caught.value.__suppress_context__
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigError) as caught:
        kvexp.generate(None, "testbed_rope")
    assert len(traceback.extract_tb(caught.tb)) > 5


def test_what_stands_elsewhere_is_said():
    with pytest.raises(AttributeError, match=r"from kvexp\.methods import H2O"):
        kvexp.H2O  # noqa: B018
    with pytest.raises(AttributeError, match=r"from kvexp\.hf import load_model"):
        kvexp.load_model  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nonsense'; it has compare, generate"):
        kvexp.nonsense  # noqa: B018
    with pytest.raises(ConfigError, match="give tokenizer="):
        _ = kvexp.generate([3, 4, 5], load("testbed_rope")[0], max_new_tokens=1).text


def test_importing_kvexp_imports_no_torch():
    """Nor do its names, signatures, docstrings and lists: what a prompt with Tab and help() looks at."""
    code = "import inspect, sys, kvexp; hasattr(kvexp, 'nonsense'); dir(kvexp); kvexp.list_methods(); "
    code += (
        "[(inspect.signature(one), one.__doc__) for one in (kvexp.load, kvexp.compare)]; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_names_signatures_and_docstrings_can_be_looked_at():
    public = ["compare", "generate", "list_methods", "list_models", "list_tasks", "load"]
    assert set(public) <= set(dir(kvexp)) and "importlib" not in dir(kvexp)
    completer = rlcompleter.Completer({"kvexp": kvexp})
    offered = {completer.complete("kvexp.", state) for state in range(40)}
    assert {f"kvexp.{name}" for name in public} <= {str(each).rstrip("()") for each in offered}
    for outer, inner in ((kvexp.load, load), (kvexp.compare, compare), (kvexp.generate, generate)):
        assert inspect.signature(outer) == inspect.signature(inner)
    for name in public:
        assert inspect.getdoc(getattr(kvexp, name)), name
    shown = pydoc.render_doc(kvexp.generate, renderer=pydoc.plaintext)
    assert all(words in shown for words in ("kvexp.generate(prompt", "kv_ratio or tokens:", "method: a method object"))
    assert kvexp.methods.H2O is H2O


def test_lists_hold_every_option():
    for group, names in (
        ("method", kvexp.list_methods()),
        ("model", kvexp.list_models()),
        ("task", kvexp.list_tasks()),
    ):
        assert sorted(names) == options(group) and all(names.values())


def test_a_models_place_may_stand_for_its_name(tmp_path):
    folder = "kvexp/tasks/testbed_models/testbed_rope"
    assert with_places(["-m", f"model={folder},org/name", "limit=1"]) == [
        "-m",
        "model=local",
        f"model.path={folder},org/name",
        "limit=1",
    ]
    assert with_places(["model=tiny,testbed_rope", "task.x=a/b"]) == ["model=tiny,testbed_rope", "task.x=a/b"]
    with pytest.raises(ConfigError, match="names models and places"):
        with_places([f"model=tiny,{folder}"])


def test_a_file_of_rows_may_stand_for_a_task(tmp_path):
    files = {}
    for field in ("prompt", "article", "document", "questions", "query"):
        files[field] = tmp_path / f"{field}.jsonl"
        files[field].write_text(json.dumps({"context": "A text.", field: "A text."}) + "\n")
    for field, task in (("prompt", "prompts"), ("article", "cnn_dailymail"), ("questions", "context_qa")):
        assert with_places([f"task={files[field]}"]) == [f"task={task}", f"task.data_files='{files[field]}'"]
    both = f"{files['prompt']},{files['prompt']}"
    assert with_places(["-m", f"task={both}"])[1:] == [
        "task=prompts",
        "task.data_files=" + ",".join([f"'{files['prompt']}'"] * 2),
    ]
    assert with_places(["task=news,xsum"]) == ["task=news,xsum"]
    for words, said in {
        f"task={files['query']}": "its rows have context, query; kvexp knows rows with prompt, article, document",
        f"task={tmp_path}/none.jsonl": "there is no such file",
        f"task=news,{files['prompt']}": "names tasks and places",
        f"task={files['prompt']},{files['document']}": "files of prompts and xsum",
    }.items():
        with pytest.raises(ConfigError, match=said):
            with_places([words])
    with pytest.raises(ConfigError, match=r"no budget=0\.5: write kv_ratio=0\.5"):
        check_groups(["budget=0.5"])
