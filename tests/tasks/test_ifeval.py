"""IFEval: lm-eval's checkers on answers judged by hand, rows, what is missing, and articles in front."""

from __future__ import annotations

import json
import random
import re
import string
import sys
from pathlib import Path

import pytest
from commands import composed

from kvexp.run.settings import settings_of
from kvexp.tasks import IFEval, IFEvalArticles, ifeval
from kvexp.util.errors import ConfigError

pytest.importorskip("langdetect", reason="IFEval's checkers need kvexp[benchmarks]")
pytest.importorskip("lm_eval", reason="lm-eval is not installed; it comes with kvexp[eval]")

# What an answer must follow, as the data set says it, and answers with (strict, loose) for each instruction by hand.
ROWS = [
    {
        "key": 1000,
        "prompt": "Write two sentences about rivers. Use no commas and end with the words: That is all.",
        "instruction_id_list": ["punctuation:no_comma", "startend:end_checker"],
        "kwargs": [{"end_phrase": None}, {"end_phrase": "That is all."}],
    },
    {
        "key": 1001,
        "prompt": "List three rivers in bullet points, all in lower case.",
        "instruction_id_list": ["detectable_format:number_bullet_lists", "keywords:existence"],
        "kwargs": [{"num_bullets": 3}, {"keywords": ["rhine", "elbe"]}],
    },
]
GRADED = [
    (0, "Rivers are long. They flow to the sea. That is all.", [True, True], [True, True]),
    (0, "Rivers are long, and wide. That is all.", [False, True], [False, True]),
    (0, "Rivers are long. They flow.", [True, False], [True, False]),
    (
        0,
        "Sure, here it is:\nRivers are long. That is all.",
        [False, True],
        [True, True],
    ),  # loose: without its first line
    (0, "Rivers are long. **That is all.**", [True, False], [True, True]),  # loose: without asterisks
    (0, "", [False, False], [False, False]),
    (1, "* the rhine\n* the elbe\n* the oder", [True, True], [True, True]),
    (1, "* the rhine\n* the oder", [False, False], [False, False]),
    (1, "- the rhine\n- the elbe\n- the oder\n- the main", [False, True], [True, True]),  # loose: without its last line
]


@pytest.fixture(autouse=True)
def sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untrained punkt, four empty files, is enough for what is checked here."""
    import nltk

    folder = tmp_path / "nltk" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (folder / name).touch()
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk")])


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "ifeval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.mark.parametrize(("row", "answer", "strict", "loose"), GRADED)
def test_answers_judged_by_hand(rows, row, answer, strict, loose):
    task = IFEval(data_files=rows)
    example = list(task.examples())[row]
    assert task.of_answer(answer, example.reference) == {"strict": strict, "loose": loose}
    assert task.score(answer, example.reference, example) == {
        "prompt_strict": 100.0 * all(strict),
        "instruction_strict": 50.0 * sum(strict),
        "prompt_loose": 100.0 * all(loose),
        "instruction_loose": 50.0 * sum(loose),
    }


# As rows 1122 and 1129 of google/IFEval: the character to count is no letter, and the official checker draws one.
DRAWN = [
    {
        "key": key,
        "prompt": "Write about rivers.",
        "instruction_id_list": ["keywords:letter_frequency"],
        "kwargs": [{"letter": letter, "let_relation": "at least", "let_frequency": 4}],
    }
    for key, letter in ((1122, "#"), (1129, "!"))
]


def test_a_drawn_letter_is_the_rows_own_and_the_same_in_every_grade(tmp_path):
    path = tmp_path / "drawn.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in DRAWN))
    task = IFEval(data_files=str(path))
    state = random.getstate()
    for example in task.examples():
        answers = [4 * letter for letter in string.ascii_lowercase]
        grades = [task.of_answer(answer, example.reference) for answer in answers]
        assert sum(grade["strict"][0] for grade in grades) == 1  # one letter, whatever was drawn before
        for answer, grade in zip(answers, grades, strict=True):
            assert grade["strict"] == grade["loose"]
            random.seed(answer)
            assert task.score(answer, example.reference, example)["prompt_strict"] == 100.0 * grade["strict"][0]
    random.setstate(state)
    assert task.corrected() == ("letter_draws",)


def test_only_rows_with_a_drawn_letter_are_touched(rows):
    assert IFEval(data_files=rows).corrected() == ()
    assert IFEval().corrected() == ("letter_draws",)  # the hub's rows


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("keywords:letter_frequency", {"letter": "#"}, "letter, let_frequency, let_relation"),
        ("keywords:letter_frequency", {}, "drawn|draw the rest"),
        ("keywords:letter_frequency", {"letter": "ab", "let_relation": "at least", "let_frequency": 4}, "letter"),
        ("keywords:existence", {"keywords": []}, r"\(keywords\)"),
        ("keywords:frequency", {"keyword": "rhine", "relation": "at least"}, "keyword, frequency, relation"),
        ("keywords:frequency", {"keyword": "rhine", "relation": "at least", "frequency": 0}, "none of them 0"),
        ("length_constraints:number_words", {"num_words": 20}, "num_words, relation"),
        ("length_constraints:number_words", {"num_words": "20", "relation": "at least"}, "cannot take"),
        ("length_constraints:number_words", {"num_words": 20, "relation": "about"}, "about"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 5, "first_word": "x"},
            "nth_paragraph",
        ),
        ("startend:end_checker", {"end_phrase": None}, "end_phrase"),
        ("language:response_language", {"language": "klingon"}, "cannot take"),
        ("punctuation:no_comma", {"commas": 3}, "cannot take"),
        ("combination:repeat_prompt", {}, "cannot take"),
        ("keywords:existence", {"keywords": "rhine"}, "a list of words"),
        ("keywords:existence", {"keywords": [7]}, "cannot take"),
        ("keywords:existence", {"keywords": [""]}, "none of them empty"),
        ("keywords:existence", {"keywords": ["c++ (x"]}, "cannot take"),
        ("keywords:forbidden_words", {"forbidden_words": "rhine"}, "a list of words"),
    ],
)
def test_an_instruction_without_its_options_is_refused(tmp_path, kind, options, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({**ROWS[0], "instruction_id_list": [kind], "kwargs": [options]}))
    with pytest.raises(ConfigError, match=rf"^row 1 of .*{kind}") as error:
        IFEval(data_files=str(path)).check()
    assert re.search(words, str(error.value))


def test_the_prompt_is_the_rows_and_stands_behind_articles(rows):
    (first, _), (plain, other) = (list(kind(data_files=rows).examples()) for kind in (IFEvalArticles, IFEval))
    assert (plain.id, plain.prompt) == ("1000", ROWS[0]["prompt"])
    assert first.question == f"\n\n{plain.prompt}"
    assert first.reference == plain.reference
    assert len(first.prompt.split()) > 900
    assert other.prompt == ROWS[1]["prompt"]
    seen = next(iter(IFEvalArticles(data_files=rows, question="in_prompt", articles=1).examples()))
    assert seen.prompt.endswith(plain.prompt)
    assert len(seen.prompt) < len(first.prompt)
    assert IFEvalArticles(data_files=rows).fingerprint() != IFEval(data_files=rows).fingerprint()


@pytest.mark.parametrize("option", ["ifeval", "ifeval_articles"])
def test_both_are_options(rows, option):
    config, choices = composed(f"task={option}", f"task.data_files={rows}")
    settings_of(config, choices).task.check()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"instruction_id_list": []}, "instruction_id_list' must be a list of names"),
        ({"kwargs": [{}]}, "kwargs' must be a list of objects, one for each"),
        ({"kwargs": ["", ["end_phrase"]]}, "kwargs' must be a list of objects, one for each"),
        ({"instruction_id_list": ["a:b", "c:d"]}, "lm-eval has no checker of a:b, c:d; it has "),
        ({"prompt": None}, "has no field 'prompt'"),
    ],
)
def test_a_bad_row_is_refused(tmp_path, changes, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(ROWS[0] | changes))
    with pytest.raises(ConfigError, match=words):
        IFEval(data_files=str(path)).check()


def test_what_is_missing_is_named(rows, monkeypatch, tmp_path):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    ifeval.checkers.cache_clear()
    with pytest.raises(ConfigError, match=r"once, with a network: python -m nltk\.downloader punkt_tab"):
        IFEval(data_files=rows).check()
    monkeypatch.undo()


def test_a_missing_package_is_named(rows, monkeypatch):
    ifeval.checkers.cache_clear()
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ConfigError, match=r"pip install kvexp\[benchmarks\]"):
        IFEval(data_files=rows).check()
    ifeval.checkers.cache_clear()
