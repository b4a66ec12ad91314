"""The day that chat templates read, the arguments that they are given, and answers scored without their thinking."""

from __future__ import annotations

import datetime
import hashlib
import json
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf_files import CHATML
from test_conf import composed

from kvexp.generate import GenerationParams, generate
from kvexp.generate import loop as decode_loop
from kvexp.hf import chat_template, random_model
from kvexp.hf.chat_template import (
    Thinking,
    check_arguments,
    end_of_turn,
    render,
    thinking_of,
    variables_of,
    with_arguments,
)
from kvexp.hf.load import byte_tokenizer
from kvexp.methods import Full
from kvexp.run.batches import evaluate_run
from kvexp.run.prompts import check_template, in_template, tokenize, with_stop_tokens
from kvexp.run.settings import settings_of
from kvexp.util.errors import ConfigError

USER = [{"role": "user", "content": "Hi"}]
BODY = "{%- for m in messages %}{{- '<' + m.role + '>' + m.content + '\n' }}{%- endfor %}"
PLAIN = BODY + "{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"
# As Qwen3's: thinks unless told not to, and then writes an empty thought itself.
QWEN = (
    "{%- for m in messages %}{%- set content = m.content %}{%- if m.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<' + m.role + '>' + content + '\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<assistant>' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
# As DeepSeek-R1's: the prompt opens the thinking, so that an answer holds its end alone.
R1 = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content.split('</think>')[-1] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant><think>\n' }}{% endif %}"
)
# As SmolLM3's: a date and a switch.
SMOL = (
    "{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}"
    "{{ 'Today Date: ' + strftime_now('%d %B %Y') + '\n' }}" + BODY + "{%- if add_generation_prompt %}"
    "{{- '<assistant>' if enable_thinking else '<assistant><think>\n\n</think>\n' }}{%- endif %}"
)
HARMONY = (  # as gpt-oss's: channels
    "{{ '<system>' + strftime_now('%Y-%m-%d') + reasoning_effort|default('medium') }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if thoughts %}{{ '<|channel|>analysis<|message|>' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
ODD = (  # tags of nobody's, known by where a thought is written
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.reasoning_content is defined %}"
    "{{ '@@' + m.reasoning_content + '%%' }}{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


SMALL = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
}


def tokenizer_with(template, **arguments):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return with_arguments(tokenizer, arguments)


def folder_with(place, template):
    """A model folder: random weights, a tokenizer of bytes, and this chat template."""
    config = {"vocab_size": 259, "max_position_embeddings": 4096, "bos_token_id": 256, "eos_token_id": 257}
    random_model("llama", seed=0, **SMALL, **config).save_pretrained(place)
    tokenizer_with(template).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Template -> a folder with it."""
    made = {}

    def folder(template):
        if template not in made:
            made[template] = folder_with(tmp_path_factory.mktemp("model"), template)
        return made[template]

    return folder


def settings(folder, *overrides):
    words = [f"model.path={folder}", *overrides]
    words += [] if any(word.startswith("task=") for word in words) else ["task=context_qa"]
    return settings_of(*composed("model=local", *words))


# ---- the clock


@pytest.fixture
def days(monkeypatch):
    """days(year): from now on the clock that transformers reads shows that year."""

    def go_to(year):
        class Day(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(year, 5, 3, 11, 22, 33)

        monkeypatch.setattr(chat_template.chat_template_utils, "datetime", Day)

    return go_to


@pytest.mark.parametrize("form", ["%d %b %Y", "%Y-%m-%d %H:%M:%S", "%A %d %B %Y", "%j %Z", "%c %x"])
def test_a_template_reads_one_day_whatever_the_clock_says(form, days):
    tokenizer, texts = tokenizer_with("{{ strftime_now('" + form + "') }}" + PLAIN), set()
    for year in (2001, 2030):
        days(year)
        texts.add(render(tokenizer, USER, add_generation_prompt=True))
    (text,) = texts
    assert text.startswith(datetime.datetime(2024, 7, 26).strftime(form))


def test_the_clock_goes_on_where_no_template_is_rendered():
    before = vars(chat_template.chat_template_utils)["datetime"]
    render(tokenizer_with(SMOL), USER)
    assert vars(chat_template.chat_template_utils)["datetime"] is before is datetime.datetime


def test_months_have_their_english_names_whatever_the_locale(monkeypatch):
    asked = []
    known = chat_template.locale.setlocale
    monkeypatch.setattr(chat_template.locale, "setlocale", lambda *words: asked.append(words[1:]) or known(*words))
    render(tokenizer_with(SMOL), USER)
    assert asked[1] == ("C",) and len(asked) == 3


@pytest.mark.parametrize("words", ["02 Jan 2025", "02 January 2025", "2025-01-02"])
def test_a_date_that_is_set_is_what_the_clock_shows(words):
    assert "Today Date: 02 January 2025" in render(tokenizer_with(SMOL, date_string=words), USER)


def test_a_template_that_takes_a_date_gets_the_one_that_is_set():
    dated = "{% if not date_string is defined %}{% set date_string = '10 Dec 2023' %}{% endif %}{{ date_string }}"
    assert render(tokenizer_with(dated), USER) == "26 Jul 2024"
    assert render(tokenizer_with(dated, date_string="the ides of March"), USER) == "the ides of March"


def test_chance_in_a_template_is_the_same_every_time():
    tokenizer = tokenizer_with("{{ range(99999)|random }}" + PLAIN)
    assert render(tokenizer, USER) == render(tokenizer, USER)


def test_a_system_turn_that_a_template_drops_is_said():
    """Its words would be missing from every prompt of a task with a system prompt."""
    from kvexp.run.lm_eval_model import KvexpLM

    dropping = tokenizer_with("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}")
    assert in_template(dropping, "Hi") == "Hi"
    with pytest.raises(ConfigError, match=r"leaves out the system turn 'Be brief\.': set model\.chat=false"):
        in_template(dropping, "Hi", "Be brief.")
    model = KvexpLM.__new__(KvexpLM)
    model.tokenizer, model.think_end = dropping, "</think>"
    assert model.apply_chat_template(USER) == USER[0]["content"]
    with pytest.raises(ConfigError, match="leave out --system_instruction"):
        model.apply_chat_template([{"role": "system", "content": "Be brief."}, *USER])
    for other in (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ messages | map(attribute='content') | join | upper }}",
    ):
        assert "be brief." in in_template(tokenizer_with(other), "Hi", "Be brief.").lower()


class Unlike(type(byte_tokenizer())):
    """A tokenizer whose prompts are never the same."""

    def apply_chat_template(self, turns, **_):
        return f"{uuid.uuid4()} {turns[-1]['content']}"


def test_prompts_that_are_never_the_same_are_refused(folders):
    made = settings(folders(PLAIN))
    tokenizer = tokenizer_with(PLAIN)
    check_template(made, tokenizer)
    tokenizer.__class__ = Unlike
    with pytest.raises(ConfigError, match="writes another text every time"):
        check_template(made, tokenizer)


def test_every_way_of_rendering_reads_the_same_day(days):
    from kvexp.hf.second_pass import end_of_user_turn
    from kvexp.run.lm_eval_model import KvexpLM
    from kvexp.run.prompts import TokenizedExample, turn_ids
    from kvexp.tasks import Example

    template = "{% for m in messages %}{{ m.content + strftime_now(' %Y ') }}{% endfor %}{{ strftime_now('%Y') }}"
    tokenizer = tokenizer_with(template)
    model = KvexpLM.__new__(KvexpLM)
    model.tokenizer, model.think_end = tokenizer, "</think>"
    prompt = TokenizedExample(Example("", "a", "b"), "a", [1])
    days(2031)
    told = [
        in_template(tokenizer, "Hi"),
        end_of_user_turn(tokenizer),
        tokenizer.decode(turn_ids(prompt, tokenizer, "more", chat=True)),
        model.apply_chat_template(USER),
    ]
    assert all("2024" in text and "2031" not in text for text in told)
    assert end_of_turn(tokenizer) == []


# ---- arguments of a template


@pytest.mark.parametrize(
    ("template", "known"),
    [
        (PLAIN, set()),
        (QWEN, {"enable_thinking"}),
        (SMOL, {"enable_thinking", "date_string"}),
        (HARMONY, {"reasoning_effort", "thoughts", "date_string"}),
        ("{% set style = style or 'plain' %}{{ style }}", {"style"}),
        ("{% set style = 'plain' %}{{ style }}", set()),
        ("{% generation %}{{ x }}{% endgeneration %}{% for a in b %}{% break %}{% endfor %}", {"x", "b"}),
    ],
)
def test_what_a_template_may_be_told(template, known):
    assert variables_of(tokenizer_with(template)) == known


def test_arguments_reach_the_prompt_and_the_identity(folders):
    folder = folders(QWEN)
    told = settings(folder, "model.template_args={enable_thinking: false}")
    assert told.identity["model"]["template_args"] == {"enable_thinking": False}
    assert told.identity != settings(folder).identity
    from kvexp.run.model_spec import tokenizer_of

    assert render(tokenizer_of(told.model), USER, add_generation_prompt=True).endswith("<think>\n\n</think>\n\n")
    assert "think" not in render(tokenizer_of(settings(folder).model), USER, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("template", "words", "why"),
    [
        (QWEN, ["model.template_args={enable_thinkin: false}"], "never mentions enable_thinkin; it mentions enable_th"),
        (PLAIN, ["model.template_args={enable_thinking: false}"], "it mentions nothing that can be set"),
        (QWEN, ["model.template_args={messages: x}"], "never mentions messages"),
        (QWEN, ["model.template_args={content: x}"], "never mentions content"),
        (QWEN, ["model.template_args={enable_thinking: false}", "model.chat=false"], "set model.chat=true"),
        (QWEN, ["model.template_args=enable_thinking"], "model.template_args must be a group"),
        (SMOL, ["model.template_args={date_string: someday}"], "date_string must be a date such as 26 Jul 2024"),
        (PLAIN, ["model.strip_thinking=true"], "has no tags of thinking"),
        (QWEN, ["model.strip_thinking=maybe"], "model.strip_thinking must be "),
    ],
)
def test_what_a_template_does_not_know_is_told_before_the_model_loads(template, words, why, folders):
    with pytest.raises(ConfigError, match=why):
        settings(folders(template), *words)


def test_arguments_that_no_template_takes():
    with pytest.raises(ConfigError, match="has no chat template"):
        check_arguments(byte_tokenizer(), {"enable_thinking": False})
    tokenizer = tokenizer_with("{% if enable_thinking is false %}no{% endif %}{{ messages[0].content }}")
    check_arguments(tokenizer, {"enable_thinking": False})
    with pytest.raises(ConfigError, match="enable_thinking is the text 'false'; write enable_thinking: false without"):
        check_arguments(tokenizer, {"enable_thinking": "false"})


# ---- thinking


@pytest.mark.parametrize(
    ("template", "arguments", "found"),
    [
        (PLAIN, {}, None),
        (PLAIN + "{# <think></think> #}", {}, None),
        (QWEN, {}, Thinking("<think>", "</think>")),
        (QWEN, {"enable_thinking": False}, Thinking("<think>", "</think>")),
        (R1, {}, Thinking("<think>", "</think>", opened=True)),
        (SMOL, {}, Thinking("<think>", "</think>")),
        (HARMONY, {}, Thinking("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")),
        (PLAIN + "{% if x %}[THINK]{{ x }}[/THINK]{% endif %}", {}, Thinking("[THINK]", "[/THINK]")),
        (PLAIN + "{% if x %}<seed:think></seed:think>{% endif %}", {}, Thinking("<seed:think>", "</seed:think>")),
        (ODD, {}, Thinking("@@", "%%")),
        ("{% if %}", {}, None),
    ],
)
def test_tags_are_the_templates_own(template, arguments, found):
    assert thinking_of(tokenizer_with(template, **arguments)) == found


@pytest.mark.parametrize(
    ("written", "opened", "answer", "thought", "cut"),
    [
        ("<think>\nHm.\n</think>\n\nParis", False, "Paris", 20, False),
        ("Hm.\n</think>\n\nParis", True, "Paris", 12, False),
        ("Paris", False, "Paris", 0, False),
        ("Paris", True, "", 5, True),
        ("<think>\nHm. Paris", False, "", 17, True),
        ("<think>a</think>x<think>b</think>Paris", False, "Paris", 33, False),
        ("<think>a</think> Paris <think>b", False, "Paris", 31, True),
        ("<think>a</think>", False, "", 16, False),
        ("", True, "", 0, True),
    ],
)
def test_an_answer_is_what_stands_behind_its_thinking(written, opened, answer, thought, cut):
    tokenizer = byte_tokenizer()
    ids = tokenizer(written, add_special_tokens=False).input_ids
    part = Thinking("<think>", "</think>", opened).part(ids, tokenizer)
    assert (part.text, part.thinking_tokens, part.cut) == (answer, thought, cut)


def test_tags_may_be_special_tokens():
    """Mistral's and gpt-oss's are, and a text without special tokens does not show them."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["[THINK]", "[/THINK]"], special_tokens=True)
    ids = tokenizer("[THINK]Hm.[/THINK]Paris</s>", add_special_tokens=False).input_ids
    part = Thinking("[THINK]", "[/THINK]").part(ids, tokenizer)
    assert (part.text, part.thinking_tokens) == ("Paris", 5)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hm.Paris"


def test_lm_evals_own_way_is_the_same():
    """Equal where thinking ends; where it does not, lm-eval scores the thinking, and here is nothing to score."""
    from lm_eval.models.utils import postprocess_generated_text

    tokenizer, tags = byte_tokenizer(), Thinking("<think>", "</think>")
    for text in ("<think>a\n\nb</think>\n\nParis", "Paris", "x</think> Paris </think>Rome", "<think></think>"):
        part = tags.part(tokenizer(text, add_special_tokens=False).input_ids, tokenizer)
        assert part.text == postprocess_generated_text(text, [], "</think>")


@pytest.fixture
def scripted(monkeypatch):
    """scripted(text): every generated answer is this text, and then the end token."""

    def script(text):
        ids = [*byte_tokenizer()(text, add_special_tokens=False).input_ids, *[257] * 4096]

        def processors(decoding, seeds, columns, *_):
            def choose(read, logits):
                chosen = torch.full_like(logits, -1.0)
                chosen[:, ids[read.shape[1] - columns]] = 1.0
                return chosen

            return choose

        monkeypatch.setattr(decode_loop, "logits_processors", processors)

    return script


def run_with(folder, place, *overrides, questions=2):
    """A run over questions about a text."""
    data = place / "data.jsonl"
    asked = [{"question": f"Which city {number}?", "answers": "Paris"} for number in range(questions)]
    data.write_text(json.dumps({"context": "Paris is a city. " * 9, "questions": asked}) + "\n", encoding="utf-8")
    return evaluate_run(settings(folder, f"task.data_files={data}", f"outputs_dir={place / 'out'}", *overrides))


def answered(folder, place, *overrides):
    """The rows of a run with the full cache over one question."""
    return run_with(folder, place, "method=full", *overrides, questions=1).rows()


HALF = "kv_ratio=0.5"
THOUGHT = "<think>\nThe text names a city, and it is Paris, in it.\n</think>\n\nParis"
PLACES = ("task.question=in_prompt", "task.question=after_eviction")


@pytest.mark.parametrize("place", PLACES)
def test_thinking_is_not_scored_with_the_answer(place, folders, scripted, tmp_path):
    scripted(THOUGHT)
    (row,) = answered(folders(QWEN), tmp_path, place, "task.max_new_tokens=200")
    assert row["metrics"]["f1"] == 100.0 and row["answer"] == "Paris" and row["output"] == THOUGHT
    assert row["thinking_tokens"] == len(THOUGHT) - len("\n\nParis") and row["thinking_cut"] is False
    assert row["new_tokens"] == len(THOUGHT) + 1
    (row,) = answered(folders(QWEN), tmp_path, place, "task.max_new_tokens=200", "model.strip_thinking=false")
    assert row["metrics"]["f1"] < 20 and "answer" not in row and row["output"] == THOUGHT


@pytest.mark.parametrize(
    ("template", "written"), [(QWEN, "<think>\nIt is Paris"), (R1, "It is Paris"), (SMOL, "<think>Paris")]
)
def test_an_answer_cut_inside_its_thinking_scores_nothing(template, written, folders, scripted, tmp_path):
    scripted(written + " and on and on")
    (row,) = answered(folders(template), tmp_path, f"task.max_new_tokens={len(written)}")
    assert row["thinking_cut"] is True and row["thinking_tokens"] == len(written)
    assert row["metrics"] == {"f1": 0.0, "exact": 0.0} and row["answer"] == "" and row["output"] == written
    from kvexp.results.table import table

    (shown,) = table(tmp_path / "out").to_dict("records")
    assert shown["thinking_cut"] == 1 and shown["n"] == 1


@pytest.mark.parametrize("place", PLACES)
def test_a_stop_text_inside_the_thinking_ends_nothing(place, folders, scripted, tmp_path):
    written = "<think>\na ## b\n</think>\n\nParis ## Rome"
    scripted(written)
    (row,) = answered(folders(QWEN), tmp_path, place, "task.max_new_tokens=200", "+generation.stop_strings=['##']")
    assert row["output"] == written.removesuffix(" Rome") and row["answer"] == "Paris ##"
    assert (row["finish_reason"], row["stop_reason"]) == ("stop", "##")


@pytest.mark.parametrize("beams", [1, 2])
def test_stop_texts_count_behind_the_thinking_alone(beams):
    """Beams go through transformers' own loop."""
    model = random_model("llama", seed=3, vocab_size=259, max_position_embeddings=512, **SMALL)
    tokenizer, prompt = byte_tokenizer(), [[1, 2, 3]]
    few = GenerationParams(16, eos=None, num_beams=beams)
    free = generate(model, prompt, Full(), decoding=few, tokenizer=tokenizer)
    text = tokenizer.decode(free.tokens[0], errors="replace")
    stop = tokenizer.decode(free.tokens[0][4:5])
    assert stop in text

    def tokens(thinking):
        asked = replace(few, stop_strings=(stop,), thinking=thinking)
        return generate(model, prompt, Full(), decoding=asked, tokenizer=tokenizer).tokens[0]

    assert len(tokens(None)) < 16
    assert len(tokens(Thinking("<think>", "</think>", opened=True))) == 16


def test_every_turn_of_a_conversation_is_scored_without_its_thinking(folders, scripted, tmp_path):
    scripted("<think>\nWhat was said?\n</think>\n\nHello.")
    words = ["task=dialogue", "limit=2", "task.max_new_tokens=64", f"outputs_dir={tmp_path}", "method=full"]
    rows = evaluate_run(settings(folders(QWEN), *words)).rows()
    assert [row["answer"] for row in rows] == ["Hello."] * 2
    assert [row["thinking_tokens"] for row in rows] == [len("<think>\nWhat was said?\n</think>")] * 2


def lm_eval_answer(folder, monkeypatch, **arguments):
    """What KvexpLM returns for a chat that it was asked with its template."""
    from lm_eval.api.instance import Instance

    from kvexp.run.lm_eval_model import KvexpLM

    model = KvexpLM(str(folder), **arguments)
    text = model.apply_chat_template(USER)
    asked = {"until": ["\n\n"], "max_gen_toks": 80}
    return model.generate_until([Instance("generate_until", {}, (text, asked), 0, ("task", 0, 1))])[0]


def test_lm_eval_is_answered_without_the_thinking(folders, scripted, monkeypatch):
    scripted("<think>\na\n\nb\n</think>\n\nParis\n\nRome")
    assert lm_eval_answer(folders(QWEN), monkeypatch) == "Paris"
    assert lm_eval_answer(folders(PLAIN), monkeypatch) == "<think>\na"  # no tags, no thinking
    assert lm_eval_answer(folders(PLAIN), monkeypatch, think_end_token="</think>") == "Paris"
    scripted("a\n\nb</think>\n\nParis\n\nRome")
    assert lm_eval_answer(folders(R1), monkeypatch) == "Paris"


def test_lm_eval_gives_a_template_its_arguments(folders):
    from kvexp.run.lm_eval_model import KvexpLM
    from kvexp.run.lm_eval_model import check_arguments as check_model_args

    model = KvexpLM(str(folders(QWEN)), enable_thinking=False)
    assert model.apply_chat_template(USER).endswith("<think>\n\n</think>\n\n")
    check_model_args({"pretrained": str(folders(QWEN)), "enable_thinking": False, "think_end_token": "</think>"})
    with pytest.raises(
        ConfigError, match="chat_template_args: the model's chat template never mentions enable_thinking"
    ):
        KvexpLM(str(folders(PLAIN)), enable_thinking=True)


# ---- pairing, and going on


def test_a_run_does_not_go_on_with_other_prompts(folders, scripted, tmp_path):
    scripted("Paris")
    for method, whose in (("full", 0), ("window", 1), ("window", 0)):
        place = tmp_path / f"{method}{whose}"
        place.mkdir()
        runs = [
            run_with(folders(PLAIN), place, "method=full", HALF),
            run_with(folders(PLAIN), place, "method=window", HALF),
        ]
        change(runs[whose], lambda row: row.update(prompt_digest="0" * 16))
        lost = runs[method == "window"].path / "examples.jsonl"
        lines = lost.read_text(encoding="utf-8").splitlines(keepends=True)
        lost.write_text(lines[-1], encoding="utf-8")
        with pytest.raises(ConfigError, match="has rows of other prompts than this run would send: example"):
            run_with(folders(PLAIN), place, f"method={method}", HALF)
        assert lost.read_text(encoding="utf-8") == lines[-1]


def change(run, how):
    """Edit the last row of a run."""
    file = run.path / "examples.jsonl"
    *before, last = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if how:
        how(last)
    file.write_text("".join(json.dumps(row) + "\n" for row in (*before, last)), encoding="utf-8")


def test_what_is_fed_beside_the_prompt_has_a_digest_too(folders, tmp_path):
    def rows(task):
        words = [f"model.path={folders(PLAIN)}", f"task={task}", "limit=2", "method=full", f"outputs_dir={tmp_path}"]
        return evaluate_run(settings_of(*composed("model=local", *words))).rows()

    chosen, told = rows("testbed_choice"), rows("dialogue")
    assert len({row["continuation_digest"] for row in chosen}) == 2
    assert "continuation_digest" not in told[0] and len(told[1]["continuation_digest"]) == 16
    assert all("continuation_digest" not in row for row in rows("testbed_needle"))


def test_the_table_tells_of_cut_answers_that_do_not_count(folders, scripted, tmp_path):
    """Questions that count only where the full cache answers them: it may not, for want of tokens."""
    from kvexp.results.table import table

    scripted("and on and on")
    evaluate_run(settings(folders(R1), "task=news_qa", "limit=2", "method=full", f"outputs_dir={tmp_path}"))
    (shown,) = table(tmp_path).to_dict("records")
    assert (shown["n"], shown["questions"], shown["thinking_cut"]) == (0, 2, 2)


# What a base model and a chat model are asked, to the letter, and where a chat model's answer ends.


FIXTURES = Path(__file__).parents[1] / "fixtures"
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
FRAMES = ("###", "Article:", "TL;DR", "Answer:", "The pass key is", "Below is an instruction")


def chat_prompts_settings(task, *overrides):
    return settings_of(*composed(f"task={task}", *DATA[task], *overrides))


def chat_tokenizer(template=CHATML):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def asked(task, *overrides):
    """The text that a chat model reads of the first example, and the example."""
    made = chat_prompts_settings(task, "model.chat=true", *overrides).task
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
    for example in chat_prompts_settings(task).task.examples():
        total.update(f"{example.prompt}\x1f{example.question}\x1e".encode())
    assert total.hexdigest()[:16] == BASE[task]


INSTRUCTIONS = {
    "cnn_dailymail": ("Summarize the following news article:", "article"),
    "xsum": ("Provide one sentence summary of the following news article:", "document"),
    "govreport": (
        "You are given a report by a government agency. Write a one-page summary of the report.",
        "report",
    ),
}


@pytest.mark.parametrize("task", INSTRUCTIONS)
def test_a_chat_model_gets_the_instruction_as_its_users_turn(task):
    instruction, field = INSTRUCTIONS[task]
    row = json.loads((FIXTURES / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()[0])
    turn = f"{instruction}\n\n{row[field]}\n\n"
    assert asked(task)[0] == f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"


NEEDLE_ASKS = (
    "What is the best thing to do in San Francisco? "
    "Don't give information outside the document or repeat your findings."
)


@pytest.mark.parametrize(
    ("task", "end"),
    [
        ("needle", NEEDLE_ASKS),
        ("needle_multi", "What is the magic number of Ankara? Answer with the number alone."),
        ("passkey", "What is the pass key?"),
    ],
)
def test_a_chat_models_turn_ends_with_the_question(task, end):
    assert asked(task)[0].endswith(f"\n\n{end}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("task", ["cnn_dailymail", "xsum", "govreport", "needle", "needle_multi", "passkey"])
def test_no_frame_of_base_models_stands_in_a_chat_template(task):
    text, example = asked(task)
    assert not [mark for mark in FRAMES if mark in text.replace(example.body, "")]


def test_the_template_in_use_is_the_one_named_and_part_of_the_identity():
    assert "### Instruction:" in asked("xsum", "task.template=alpaca")[0]
    assert asked("xsum", "protocol=h2o")[0].startswith("<|im_start|>user\n###\nArticle: ")
    assert chat_prompts_settings("xsum").identity["task"]["template"] == "alpaca"
    assert chat_prompts_settings("xsum", "model.chat=true").identity["task"]["template"] == "plain"
    assert chat_prompts_settings("passkey", "model.chat=true").identity["task"]["answer_prefix"] == ""


# ---- the end of a turn


def test_the_end_of_a_turn_ends_an_answer():
    """Files of chat models often name the base model's end token alone."""
    tokenizer = chat_tokenizer()
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=257))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for words, eos in (
        (["xsum", "model.chat=true"], (257, end)),
        (["xsum"], "model"),  # a base model
        (["gsm8k_cot", "model.chat=true"], "model"),  # no template goes around its prompts
        (["xsum", "model.chat=true", "generation.eos=null"], None),
    ):
        assert with_stop_tokens(chat_prompts_settings(*words), model, tokenizer).decoding.eos == eos


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
    made = chat_prompts_settings("xsum", "model.chat=true", f"task.truncate={truncate}").task
    example = next(made.examples())
    tokenizer = chat_tokenizer()
    whole = tokenize(example, made, tokenizer, 1 << 20, chat=True)
    room = whole.size - 40
    cut = tokenize(example, made, tokenizer, room, chat=True)
    assert cut.truncated and cut.size <= room
    assert cut.text.startswith(f"<|im_start|>user\n{made.instruction}\n\n")
    assert cut.text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_without_a_template_the_end_is_cut_as_ever():
    made = chat_prompts_settings("xsum", "task.truncate=right").task
    example = next(made.examples())
    whole = tokenize(example, made, chat_tokenizer(), 1 << 20, chat=False)
    assert tokenize(example, made, chat_tokenizer(), 50, chat=False).ids == whole.ids[:50]
