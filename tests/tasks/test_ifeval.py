"""IFEval: lm-eval's checkers on answers judged by hand, rows, what is missing, and articles in front."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from commands import composed

from kvexp.run.settings import settings_of
from kvexp.tasks import IFEval, IFEvalArticles, ifeval
from kvexp.util import ConfigError

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
