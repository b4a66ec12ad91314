"""Prompts to the letter, scores equal to rouge_score's, and every mistake said before a model would load."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED
from rouge_score import rouge_scorer

from kvexp.tasks import CNNDailyMail, Example, Stories, Task, XSum
from kvexp.tasks.metrics import TYPES, lines, rouge, sentences, unimported
from kvexp.util import ConfigError

FIXTURES = Path(__file__).parents[1] / "fixtures"
CNN = CNNDailyMail(data_files=str(FIXTURES / "cnn_dailymail.jsonl"))
XS = XSum(data_files=str(FIXTURES / "xsum.jsonl"))
TALES = Stories(data_files=str(FIXTURES / "stories.jsonl"))

ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n"
)


def rows_of(task: Task) -> list[dict[str, str]]:
    assert task.data_files is not None
    return [json.loads(line) for line in Path(task.data_files).read_text(encoding="utf-8").splitlines()]


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# ---- prompts


def test_cnn_dailymail_prompt() -> None:
    first, second, third = CNN.examples()
    row = rows_of(CNN)[0]
    assert first.prefix == ALPACA + "Summarize the following news article:\n\n### Input:\n"
    assert first.suffix == "\n\n### Response:"
    assert (first.body, first.reference, first.id) == (row["article"], row["highlights"], row["id"])
    assert first.prompt == first.prefix + first.body + first.suffix
    assert first.continuation == ""
    assert "{old} tea" in second.prompt  # braces in an article are text
    assert third.id == rows_of(CNN)[2]["id"]


def test_xsum_prompts() -> None:
    first = next(XS.examples())
    assert first.prompt.startswith(
        ALPACA + "Provide one sentence summary of the following news article:\n\n### Input:\n"
    )
    assert first.prompt.endswith("\n\n### Response:")
    assert first.reference == rows_of(XS)[0]["summary"]
    helm = next(replace(XS, template="helm").examples())
    assert helm.prompt_parts == ("###\nArticle: ", first.body, "\n\nSummarize the above article in 1 sentence.\n")
    own = next(replace(XS, template="<s>{input}</s> {instruction}", instruction="TL;DR {x}").examples())
    assert own.prompt == f"<s>{first.body}</s> TL;DR {{x}}"


def test_story_is_split_at_a_word() -> None:
    row = rows_of(TALES)[2]["text"]
    third = list(replace(TALES, prompt_share=0.2).examples())[2]
    assert third.prompt == third.body == "A frog and a snail made a"  # int(0.2 * 36) = 7 words
    assert third.continuation.startswith(" race. The frog")
    assert third.prompt + third.continuation == row
    assert third.reference == third.continuation.strip()
    capped = list(replace(TALES, prompt_share=0.2, continuation_words=3).examples())[2]
    assert capped.continuation == " race. The frog"
    for share in (1e-9, 1 - 1e-9):
        for example in replace(TALES, prompt_share=share).examples():
            assert example.prompt and example.reference


def test_defaults_of_the_protocol() -> None:
    for task in (CNNDailyMail(), XSum()):
        assert (task.split, task.max_prompt_tokens, task.max_new_tokens, task.min_new_tokens) == (
            *("validation", 1920, 128, 0),
        )
        assert (task.truncate, task.sample, task.pad_to, task.join_lines) == ("middle", "first", None, False)
        assert task.revision is not None and len(task.revision) == 40
        assert task.metrics == ("rouge1", "rouge2", "rougeL", "rougeLsum") and not task.needs_nll
    assert Stories().needs_nll and Stories().metrics[-1] == "nll" and Stories().truncate == "skip"
    assert not Stories(nll=False).needs_nll and "nll" not in Stories(nll=False).metrics
    with pytest.raises(FrozenInstanceError):
        CNN.limit = 3  # type: ignore[misc]


def test_example_parts_make_the_prompt() -> None:
    assert Example("a", "whole", "r").prompt_parts == ("", "whole", "")
    assert Example("a", "x y z", "r", "", "x ", "y", " z").body == "y"
    with pytest.raises(ValueError, match="prefix \\+ body \\+ suffix"):
        Example("a", "x y z", "r", "", "x", "y", "z")


# ---- which rows


def test_limit_ids_and_repeats(tmp_path: Path) -> None:
    assert [example.id[:4] for example in replace(CNN, limit=2).examples()] == ["5d1f", "b7e2"]
    assert len(list(replace(CNN, limit=1000).examples())) == 3
    tales = [example.id for example in TALES.examples()]
    assert len(set(tales)) == 3 and tales == [example.id for example in TALES.examples()]
    row = {"text": "one two three"}
    twice = Stories(data_files=write(tmp_path / "twice.jsonl", row, {"text": "four five"}, row, row))
    first, _, again, third = (example.id for example in twice.examples())
    assert (again, third) == (f"{first}#2", f"{first}#3")


def test_sampling_with_replacement_draws_as_the_release(tmp_path: Path) -> None:
    # the published first draws of np.random.seed(12345); randint(13368, size=1000)
    rows = ({"document": "d", "summary": "s", "id": number} for number in range(13368))
    task = XSum(data_files=write(tmp_path / "many.jsonl", *rows), sample="with_replacement", limit=1000)
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    ids = [example.id for example in task.examples()]
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]
    assert ids[:10] == "4578 11749 2177 3492 11689 4094 4478 11621 546 7709".split()  # noqa: SIM905
    assert len(set(ids)) == 1000 and len({name.partition("#")[0] for name in ids}) == 957
    shuffled = [example.id for example in replace(task, sample="shuffled", limit=500).examples()]
    assert len({name.partition("#")[0] for name in shuffled}) == 500
    assert shuffled[:9] == [example.id for example in replace(task, sample="shuffled", limit=9).examples()]
    assert ids[:9] == [example.id for example in replace(task, limit=9).examples()]
    assert shuffled != [example.id for example in replace(task, sample="shuffled", limit=500, seed=7).examples()]


def test_json_jsonl_parquet_and_globs_give_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = rows_of(XS)
    odd = tmp_path / "odd [1]*.json"  # a name that reads like a pattern
    odd.write_text(json.dumps(rows), encoding="utf-8")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for number, row in enumerate(rows):
        write(tmp_path / f"part{number}.jsonl", row)
    expected = list(XS.examples())
    for name in (odd.name, "rows.parquet", "part*.jsonl"):
        task = XSum(data_files=str(tmp_path / name))
        task.check()
        assert list(task.examples()) == expected, name


def test_fingerprint_follows_the_bytes(tmp_path: Path) -> None:
    copy = tmp_path / "other_name.jsonl"
    copy.write_bytes((FIXTURES / "xsum.jsonl").read_bytes())
    assert XSum(data_files=str(copy)).fingerprint() == XS.fingerprint()
    copy.write_bytes(copy.read_bytes().replace(b"1934", b"1935"))
    assert XSum(data_files=str(copy)).fingerprint() != XS.fingerprint()
    assert XSum().fingerprint() != XSum(split="test").fingerprint() != XSum(revision="0" * 40).fingerprint()


def test_reading_sets_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; import kvexp.tasks as t\n"
        "heavy = {'torch', 'datasets', 'evaluate', 'rouge_score', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        f"task = t.CNNDailyMail(data_files={CNN.data_files!r}, sample='shuffled', limit=3); task.check()\n"
        "example = next(task.examples()); assert task.score('a ferry', 'A ferry.', example)['rouge1'] == 100\n"
    )
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(FIXTURES.parents[1]),
    }
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left == []


# ---- scores

PAIRS = [  # answer, reference
    ("the cat sat on the mat", "the cat was on the mat"),
    ("A ferry runs. The bridge is shut.", "The bridge is shut .\nA ferry runs ."),
    ("Repairs cost 3.2 million.", "Repairing it costs about $3.2 million."),
    ("", "something"),
    ("...", "something"),
    ("Über-große Fähre", "uber grosse fahre"),
]


def test_rouge_by_hand() -> None:
    # 6 words each, 5 shared; 5 pairs each, 3 shared; longest common subsequence 5
    got = rouge("the cat sat on the mat", "the cat was on the mat")
    assert got == pytest.approx({"rouge1": 500 / 6, "rouge2": 60.0, "rougeL": 500 / 6, "rougeLsum": 500 / 6})
    # precision 2/3, recall 2/4: F1 = 2 * (1/3) / (7/6)
    assert rouge("running dogs bark", "dog runs far away")["rouge1"] == pytest.approx(100 * 4 / 7)  # stemmed


def python(code: str) -> subprocess.CompletedProcess[str]:
    """A process of its own that knows kvexp and nothing of this one's modules."""
    env = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(FIXTURES.parents[1])}
    return subprocess.run([sys.executable, "-B", "-c", code], env=env, capture_output=True, text=True)


def test_what_scores_need_is_imported_with_the_first_score() -> None:
    """A check imports no scorer (it comes before the first token), a score neither scikit-learn nor scipy.stats."""
    done = python(
        "import sys, kvexp.tasks as t\n"
        f"task = t.CNNDailyMail(data_files={CNN.data_files!r}, limit=1); task.check()\n"
        "early = {'nltk', 'rouge_score', 'sklearn', 'scipy', 'pandas'} & set(sys.modules); assert not early, early\n"
        "task.score('a ferry', 'A ferry.', next(task.examples())); assert 'rouge_score' in sys.modules\n"
        "late = {'sklearn', 'scipy.stats', 'pandas'} & set(sys.modules); assert not late, late\n"
        "import scipy.stats; assert scipy.stats.norm.cdf(0) == 0.5\n"
    )
    assert done.returncode == 0, done.stderr


def test_a_module_that_is_loaded_stays_while_others_are_hidden() -> None:
    sys.modules.pop("colorsys", None)
    with unimported("json", "colorsys"):
        assert importlib.import_module("json") is json
        with pytest.raises(ImportError):
            importlib.import_module("colorsys")
    assert importlib.import_module("colorsys").rgb_to_hls(0, 0, 0) == (0, 0, 0)


def test_a_missing_scorer_is_told_before_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "nltk" else find(name, *rest))
    with pytest.raises(ConfigError, match="ROUGE needs nltk, which is not installed; run: pip install nltk"):
        CNN.check()


def test_rouge_equals_rouge_score() -> None:
    scorer = rouge_scorer.RougeScorer(list(TYPES), use_stemmer=True)
    for answer, wanted in PAIRS:
        for kind, score in scorer.score(wanted, answer).items():
            assert rouge(answer, wanted)[kind] == 100 * score.fmeasure


def test_lsum_sees_sentences() -> None:
    answer, wanted = PAIRS[1]
    example = next(CNN.examples())
    got = CNN.score(answer, wanted, example)
    assert got["rougeLsum"] == got["rouge1"] == 100.0  # the same sentences, in another order
    assert got["rougeL"] < 60
    assert rouge(answer, wanted.replace("\n", " "))["rougeLsum"] == got["rougeL"]  # unsplit there is but one sentence


def test_scores_of_the_tasks() -> None:
    for task in (CNN, XS, TALES):
        for example in task.examples():
            assert set(task.score(example.reference, example.reference, example).values()) == {100.0}
            assert set(task.score("", example.reference, example).values()) == {0.0}
            assert list(task.score("x", example.reference, example)) == list(TYPES)
    example = next(XS.examples())
    noisy = example.reference + "\n###\nArticle: and so on"
    assert XS.score(noisy, example.reference, example)["rouge1"] < 100
    assert replace(XS, stop="###").score(noisy, example.reference, example)["rouge1"] == 100


def test_join_lines_is_the_release() -> None:
    example = next(CNN.examples())
    broken, wanted = "The bridge\nA ferry", "A ferry\nThe bridge"
    assert CNN.score(broken, wanted, example)["rougeLsum"] == 100
    joined = replace(CNN, join_lines=True).score(broken, wanted, example)
    assert joined["rougeLsum"] == joined["rougeL"] == 50


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Dr. Quill met J. R. Mor in the U.S. They spoke.", ["Dr. Quill met J. R. Mor in the U.S. They spoke."]),
        ("It cost $3.2 million. He said no. They left.", ["It cost $3.2 million.", "He said no.", "They left."]),
        ("See No. 10 on Nov. 5. Then go.", ["See No. 10 on Nov. 5.", "Then go."]),
        ('"Go," he said. "Now!" She went.', ['"Go," he said.', '"Now!"', "She went."]),
        ("A highlight .\nAnother one .", ["A highlight .", "Another one ."]),
        ("Cracks . Repairs .", ["Cracks .", "Repairs ."]),
        ("no new sentence. because lower case", ["no new sentence. because lower case"]),
        ("It was you and I. Then (he) left.", ["It was you and I.", "Then (he) left."]),
        (". A", [".", "A"]),
        ("\n \n", []),
        ("", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected
    assert lines(text) == "\n".join(expected)


# ---- bad input

GOOD = {"article": "An article.", "highlights": "A highlight .", "id": "1"}
BAD_FILES = [
    ("gone.jsonl", None, ["there is no such file", "task.data_files"]),
    ("*.nothing", None, ["there is no such file"]),
    ("rows.txt", b"{}", ["must end in .json, .jsonl or .parquet"]),
    ("rows.jsonl", b"", ["is empty"]),
    ("rows.json", b"[]", ["no rows"]),
    ("rows.jsonl", b"\n\n", ["rows.jsonl"]),
    ("rows.jsonl", b'{"article": "x", "highlights": "y"}\n{"article":\n', ["line 2 of", "is not JSON"]),
    ("rows.jsonl", b"PK\x03\x04 no json", ["line 1 of", "is not JSON"]),
    ("rows.json", b'{"article": ', ["cannot read", "rows.json"]),
    ("rows.parquet", b"PAR1 but no table", ["cannot read", "rows.parquet"]),
    ("rows.jsonl", b'["a"]\n', ["rows.jsonl"]),
    (
        "rows.jsonl",
        [GOOD, {"article": "x", "id": "2"}],
        ["row 2 of", "'highlights'", "task.reference_field", "article"],
    ),
    ("rows.jsonl", [{"document": "x", "summary": "y"}], ["row 1 of", "'article'", "it has: document, summary"]),
    ("rows.jsonl", [GOOD, GOOD, {**GOOD, "article": None}], ["row 3 of", "'article'"]),
    ("rows.jsonl", [{**GOOD, "highlights": ["a", "b"]}], ["row 1 of", "'highlights' must be a text, got list"]),
    ("rows.jsonl", [GOOD, {**GOOD, "highlights": "  "}], ["row 2 of", "'highlights' is empty"]),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD_FILES)
def test_bad_files(tmp_path: Path, name: str, content: object, words: list[str]) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, list):
        write(path, *content)
    with pytest.raises(ConfigError) as caught:
        CNNDailyMail(data_files=str(path)).check()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; name its files"):
        CNNDailyMail(data_files=str(tmp_path)).check()


def test_a_bad_row_behind_the_limit_is_nobodys_business(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", GOOD, {"article": "no reference", "id": "2"})
    CNNDailyMail(data_files=path, limit=1).check()
    with pytest.raises(ConfigError, match="row 2 of"):
        CNNDailyMail(data_files=path, limit=2).check()


def test_an_empty_article_is_a_prompt_and_one_word_is_no_story(tmp_path: Path) -> None:
    empty = CNNDailyMail(data_files=write(tmp_path / "rows.jsonl", {**GOOD, "article": ""}))
    empty.check()
    assert next(empty.examples()).prompt.endswith("### Input:\n\n\n### Response:")
    first, second = Stories(data_files=write(tmp_path / "t.jsonl", {"text": "two words"}, {"text": "one"})).examples()
    assert not first.skipped and second.skipped == "a story of one word has nothing to continue" and second.prompt == ""


@pytest.mark.parametrize("streaming", [True, False])
def test_an_unreachable_hub_says_both_ways(streaming: bool) -> None:
    task = CNNDailyMail(hub_id="kvexp/is-not-there", streaming=streaming)
    with pytest.raises(ConfigError) as caught:
        task.check()
    for words in ("kvexp/is-not-there", "3.0.0", "validation", "make the hub reachable", "task.data_files=PATH"):
        assert words in str(caught.value)


def test_no_data_named() -> None:
    with pytest.raises(ConfigError, match=r"set task\.data_files=PATH or task\.hub_id"):
        CNNDailyMail(hub_id="").check()


# ---- real rows, where they are


@pytest.mark.parametrize(
    ("task", "file", "rows"),
    [
        (CNNDailyMail(), "cnn_dailymail/cnndm_train100.jsonl", 100),
        (XSum(), "xsum/xsum_helm_1000.jsonl", 1000),
        (XSum(), "xsum/xsum_transformers_fixture.jsonl", 10),
        (Stories(), "tinystories_text/tinystories_1000.jsonl", 1000),
    ],
)
def test_real_rows(task: Task, file: str, rows: int) -> None:
    path = SHARED / "data" / file
    if not path.is_file():
        pytest.skip(f"no data at {path}")
    real = replace(task, data_files=str(path))
    real.check()
    examples = list(real.examples())
    assert len(examples) == len({example.id for example in examples}) == rows
    for example in examples[:20]:
        assert set(real.score(example.reference, example.reference, example).values()) == {100.0}


def test_helm_prompts_are_h2os() -> None:
    folder = SHARED / "data" / "xsum"
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}")
    task = XSum(data_files=str(folder / "xsum_helm_1000.jsonl"), template="helm", limit=50)
    original = (folder / "h2o_xsum_0shot.original.jsonl").read_text(encoding="utf-8").splitlines()
    assert [example.prompt for example in task.examples()] == [json.loads(line)["article"] for line in original]
