"""What a base model and a chat model are asked, to the letter, and where a chat model's answer ends."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_conf import composed

from kvexp.config.settings import settings_of
from kvexp.evaluate.preflight import end_of_turn, with_stop_tokens
from kvexp.evaluate.tokenized_examples import in_template, tokenize
from kvexp.models.byte_tokenizer import byte_tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
NEEDLE = [f"task.haystack={FIXTURES}/haystack", "task.lengths=[300]", "task.depths=[50]"]
DATA = {
    "cnn_dailymail": [f"task.data_files={FIXTURES}/cnn_dailymail.jsonl"],
    "xsum": [f"task.data_files={FIXTURES}/xsum.jsonl"],
    "govreport": [f"task.data_files={FIXTURES}/govreport.jsonl"],
    "soda": [f"task.data_files={FIXTURES}/soda.jsonl"],
    "gsm8k_cot": [f"task.data_files={FIXTURES}/gsm8k.jsonl"],
    "stories": [f"task.data_files={FIXTURES}/stories.jsonl"],
    "needle": NEEDLE,
    "needle_multi": NEEDLE,
    "passkey": NEEDLE[1:],
    "longbench": ["task.subset=qasper", f"task.data_files={FIXTURES}/longbench"],
}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FRAMES = ("###", "Article:", "TL;DR", "Answer:", "The pass key is", "Below is an instruction")


def settings(task, *overrides):
    return settings_of(*composed(f"task={task}", *DATA[task], *overrides))


def chat_tokenizer(template=CHATML):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def asked(task, *overrides):
    """The text that a chat model reads of the first example, and the example."""
    made = settings(task, "model.chat=true", *overrides).task
    example = next(made.examples())
    prompt = tokenize(example, made, chat_tokenizer(), 1 << 20, chat=True)
    return prompt.text + prompt.question_text, example


# Of all prompts and questions of the fixtures, as base models have been asked since these tasks came.
BASE = {
    "cnn_dailymail": "3a5956272963fcd7",
    "xsum": "3b9814a4783f8c52",
    "govreport": "a768aa2dcebb952b",
    "soda": "1cf364b3469d7ce5",
    "gsm8k_cot": "191db540ecfa08ae",
    "stories": "970fbde40d2d5ece",
    "needle": "ac5394b1640e6650",
    "needle_multi": "42361169730e0b1a",
    "passkey": "6e6ecaa4a16bde29",
    "longbench": "bd310a821b61856b",
}


@pytest.mark.parametrize("task", DATA)
def test_a_base_model_is_asked_what_it_always_was(task):
    total = hashlib.sha256()
    for example in settings(task).task.examples():
        total.update(f"{example.prompt}\x1f{example.question}\x1e".encode())
    assert total.hexdigest()[:16] == BASE[task]


@pytest.mark.parametrize(
    ("task", "instruction", "field"),
    [
        ("cnn_dailymail", "Summarize the following news article:", "article"),
        ("xsum", "Provide one sentence summary of the following news article:", "document"),
        (
            "govreport",
            "You are given a report by a government agency. Write a one-page summary of the report.",
            "report",
        ),
    ],
)
def test_a_chat_model_gets_the_instruction_as_its_users_turn(task, instruction, field):
    row = json.loads((FIXTURES / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()[0])
    text, _ = asked(task)
    turn = f"{instruction}\n\n{row[field]}\n\n"
    assert text == f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("task", "end"),
    [
        (
            "needle",
            "What is the best thing to do in San Francisco? Don't give information outside the document or repeat your "
            "findings.",
        ),
        ("needle_multi", "What is the magic number of Ankara? Answer with the number alone."),
        ("passkey", "What is the pass key?"),
    ],
)
def test_a_chat_models_turn_ends_with_the_question(task, end):
    assert asked(task)[0].endswith(f"\n\n{end}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("task", ["cnn_dailymail", "xsum", "govreport", "needle", "needle_multi", "passkey"])
def test_no_frame_of_base_models_stands_in_a_chat_template(task):
    text, example = asked(task)
    frame = text.replace(example.body, "")
    assert not [mark for mark in FRAMES if mark in frame]


def test_a_template_that_is_named_is_taken():
    assert "### Instruction:" in asked("xsum", "task.template=alpaca")[0]
    assert asked("xsum", "protocol=h2o")[0].startswith("<|im_start|>user\n###\nArticle: ")


def test_the_template_in_use_stands_in_the_runs_identity():
    assert settings("xsum").identity["task"]["template"] == "alpaca"
    assert settings("xsum", "model.chat=true").identity["task"]["template"] == "plain"
    assert settings("passkey", "model.chat=true").identity["task"]["answer_prefix"] == ""


# ---- the end of a turn


def test_the_end_of_a_turn_ends_an_answer():
    """Files of chat models often name the base model's end token alone."""
    tokenizer = chat_tokenizer()
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=257))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert with_stop_tokens(settings("xsum", "model.chat=true"), model, tokenizer).decoding.eos == (257, end)
    for other in (
        ["xsum"],  # a base model
        ["gsm8k_cot", "model.chat=true"],  # no template goes around its prompts
    ):
        assert with_stop_tokens(settings(*other), model, tokenizer).decoding.eos == "model"
    never = settings("xsum", "model.chat=true", "generation.eos=null")
    assert with_stop_tokens(never, model, tokenizer).decoding.eos is None


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' </s>' }}{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}", None),  # words alone
        ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\nEnd.\n' }}{% endfor %}", None),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", None),
    ],
)
def test_what_ends_a_turn_is_read_from_the_template(template, end):
    tokenizer = chat_tokenizer(template)
    assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == ([end] if end else [])


# ---- a prompt that is too long


@pytest.mark.parametrize("truncate", ["middle", "right", "halves"])
def test_a_prompt_cut_short_keeps_its_template_and_its_instruction(truncate):
    made = settings("xsum", "model.chat=true", f"task.truncate={truncate}").task
    example = next(made.examples())
    tokenizer = chat_tokenizer()
    whole = tokenize(example, made, tokenizer, 1 << 20, chat=True)
    room = whole.size - 40
    cut = tokenize(example, made, tokenizer, room, chat=True)
    assert cut.truncated and cut.size <= room
    assert cut.text.startswith(f"<|im_start|>user\n{made.instruction}\n\n")
    assert cut.text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_without_a_template_the_end_is_cut_as_ever():
    made = settings("xsum", "task.truncate=right").task
    example = next(made.examples())
    whole = tokenize(example, made, chat_tokenizer(), 1 << 20, chat=False)
    assert tokenize(example, made, chat_tokenizer(), 50, chat=False).ids == whole.ids[:50]


def test_a_template_does_not_ask_the_clock():
    """Llama 3.2's writes the date of the day into every prompt, unless it is given one."""
    dated = (
        "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
        "Today Date: {{ date_string }}\n{{ messages[0]['content'] }}"
    )
    assert in_template(chat_tokenizer(dated), "Hello") == "Today Date: 26 Jul 2024\nHello"
