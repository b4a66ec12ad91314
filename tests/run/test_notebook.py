"""`kvexp.load` and `kvexp.generate`: a guess from transformers works or is answered in a sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import kvexp
from kvexp.core import Budget
from kvexp.generate import generate as generate_ids
from kvexp.methods import H2O
from kvexp.run.compose import with_model_places
from kvexp.run.notebook import load
from kvexp.util import ConfigError

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
    assert len(repr(named).splitlines()) == 3 and "window" in repr(named)
    assert (
        kvexp.generate(TEXT, "testbed_rope", max_new_tokens=1).cache.config
        == kvexp.generate(TEXT, "testbed_rope", H2O, Budget(kv_ratio=0.5), max_new_tokens=1).cache.config
    )
    model, tokenizer = kvexp.load("testbed_rope")
    full = kvexp.generate(model, [ids], "full", tokenizer=tokenizer, max_new_tokens=2)  # in transformers' order too
    assert full.text == generate_ids(model, TEXT, H2O(), kv_ratio=1.0, tokenizer=tokenizer, max_new_tokens=2).text
    assert kvexp.load("testbed_rope")[0] is model  # kept


def test_a_chat_goes_through_the_template(model_and_tokenizer, monkeypatch):
    model, tokenizer = model_and_tokenizer
    chat = [{"role": "user", "content": TEXT}]
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        kvexp.generate(chat, model, tokenizer=tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    answer = kvexp.generate(chat, model, tokenizer=tokenizer, max_new_tokens=3)
    assert answer.tokens == kvexp.generate(TEXT, model, tokenizer=tokenizer, max_new_tokens=3).tokens
    assert kvexp.generate([chat, chat], model, tokenizer=tokenizer, max_new_tokens=3).tokens == answer.tokens * 2


WRONG = {
    "method='h20'": "did you mean h2o",
    "method=3": "name or a method object",
    "model='testbed_rop'": "did you mean testbed_rope",
    "model='local'": "folder or hub id of your own",
    "kv_ratio=2": "kv_ratio must be",
    "kv_ratio=0.5, tokens=3": "exactly one of kv_ratio",
    "kv_ratio=0.5, budget=Budget(tokens=3)": "give budget, or kv_ratio or tokens",
    "max_new_token=2": "did you mean max_new_tokens",
    "tokenizer=None, model=model": "give tokenizer=",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_guess_gets_a_sentence(words, model_and_tokenizer):
    given = eval(f"dict({words})", {"Budget": Budget, "model": model_and_tokenizer[0]})
    with pytest.raises(ConfigError, match=WRONG[words]):
        kvexp.generate(TEXT, given.pop("model", "testbed_rope"), **given)


def test_what_stands_elsewhere_is_said():
    with pytest.raises(AttributeError, match=r"from kvexp\.methods import H2O"):
        kvexp.H2O  # noqa: B018
    with pytest.raises(AttributeError, match=r"from kvexp\.hf import load_model"):
        kvexp.load_model  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kvexp.nonsense  # noqa: B018
    with pytest.raises(ConfigError, match="give tokenizer="):
        _ = kvexp.generate([3, 4, 5], load("testbed_rope")[0], max_new_tokens=1).text


def test_importing_kvexp_imports_no_torch():
    code = "import sys, kvexp; hasattr(kvexp, 'nonsense'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_a_models_place_may_stand_for_its_name(tmp_path):
    folder = "kvexp/tasks/testbed_models/testbed_rope"
    assert with_model_places(["-m", f"model={folder},org/name", "limit=1"]) == [
        "-m",
        "model=local",
        f"model.path={folder},org/name",
        "limit=1",
    ]
    assert with_model_places(["model=tiny,testbed_rope", "task.x=a/b"]) == ["model=tiny,testbed_rope", "task.x=a/b"]
    with pytest.raises(ConfigError, match="names models and places"):
        with_model_places([f"model=tiny,{folder}"])
