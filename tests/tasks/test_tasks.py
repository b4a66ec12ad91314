"""Tasks of rows: prompts to the letter, scores by hand and as rouge_score has them, bad files refused in time."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import composed
from conftest import SHARED
from rouge_score import rouge_scorer

from kvexp.run.batches import evaluate_run
from kvexp.run.model_spec import load
from kvexp.run.settings import settings_of
from kvexp.tasks import GSM8K, CNNDailyMail, Example, GovReport, Perplexity, Prompts, Soda, Stories, Task, XSum
from kvexp.tasks.metrics import TYPES, lines, rouge, sentences, unimported
from kvexp.tasks.qa import last_number
from kvexp.util.errors import ConfigError

FIXTURES = Path(__file__).parents[1] / "fixtures"
CNN = CNNDailyMail(data_files=str(FIXTURES / "cnn_dailymail.jsonl"))
XS = XSum(data_files=str(FIXTURES / "xsum.jsonl"))
TALES = Stories(data_files=str(FIXTURES / "stories.jsonl"))
REPORTS = GovReport(data_files=str(FIXTURES / "govreport.jsonl"))
TALK = Soda(data_files=str(FIXTURES / "soda.jsonl"))
SUMS = GSM8K(data_files=str(FIXTURES / "gsm8k.jsonl"))
TEXTS = Perplexity(data_files=str(FIXTURES / "perplexity.jsonl"), prefill_tokens=20, total_tokens=60, bucket_tokens=16)

ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n"
)


def rows_of(task: Task) -> list[dict[str, str]]:
    assert task.data_files is not None
    return [json.loads(line) for line in Path(task.data_files).read_text(encoding="utf-8").splitlines()]


def python(code: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process that knows kvexp and nothing of this one's modules."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(FIXTURES.parents[1])}
    return subprocess.run([sys.executable, "-B", "-c", code], cwd=home, env=env, capture_output=True, text=True)


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
    assert helm.prefix == "###\nArticle: " and helm.body == first.body
    assert helm.suffix == "\n\nSummarize the above article in 1 sentence.\n"
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


def test_a_story_is_judged_by_its_likelihood_unless_switched_off() -> None:
    assert Stories().needs_nll and Stories().metrics[-1] == "nll"
    assert not Stories(nll=False).needs_nll and "nll" not in Stories(nll=False).metrics


def test_example_parts_make_the_prompt() -> None:
    assert Example("a", "whole", "r").body == "whole"
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


def test_what_scores_need_is_imported_with_the_first_score(tmp_path: Path) -> None:
    """A check imports no scorer (it comes before the first token), a score neither scikit-learn nor scipy.stats; and
    both leave no file."""
    done = python(
        "import sys, kvexp.tasks as t\n"
        f"task = t.CNNDailyMail(data_files={CNN.data_files!r}, sample='shuffled', limit=3); task.check()\n"
        "heavy = {'torch', 'datasets', 'evaluate', 'nltk', 'rouge_score', 'sklearn', 'scipy', 'pandas'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert task.score('a ferry', 'A ferry.', next(task.examples()))['rouge1'] == 100\n"
        "late = {'sklearn', 'scipy.stats', 'pandas'} & set(sys.modules); assert not late, late\n"
        "import scipy.stats; assert 'rouge_score' in sys.modules and scipy.stats.norm.cdf(0) == 0.5\n",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_module_that_is_loaded_stays_while_others_are_hidden() -> None:
    sys.modules.pop("colorsys", None)
    with unimported("json", "colorsys"):
        assert importlib.import_module("json") is json
        with pytest.raises(ImportError):
            importlib.import_module("colorsys")
    assert importlib.import_module("colorsys").rgb_to_hls(0, 0, 0) == (0, 0, 0)


def test_a_missing_scorer_is_reported_before_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("rows.json", b'{"article": ', ["rows.json is not JSON"]),
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


def test_no_data_named() -> None:
    with pytest.raises(ConfigError, match=r"set task\.data_files=PATH or task\.hub_id"):
        CNNDailyMail(hub_id="").check()


# ---- H2O's own prompts, where they are


def test_helm_prompts_are_h2os() -> None:
    folder = SHARED / "data" / "xsum"
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}")
    task = XSum(data_files=str(folder / "xsum_helm_1000.jsonl"), template="helm", limit=50)
    original = (folder / "h2o_xsum_0shot.original.jsonl").read_text(encoding="utf-8").splitlines()
    assert [example.prompt for example in task.examples()] == [json.loads(line)["article"] for line in original]


# ---- GovReport


def test_govreport_prompt():
    REPORTS.check()
    first, second, _ = REPORTS.examples()
    assert first.prefix.endswith(
        "### Instruction:\nYou are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "### Input:\n"
    )
    assert first.suffix == "\n\n### Response:" and first.body.startswith("The Office of Harbors")
    assert first.reference.startswith("The office runs 41") and "{silos}" in second.prompt
    assert set(REPORTS.score(first.reference, first.reference, first).values()) == {100.0}


def test_longbenchs_rows_make_the_same_prompts(tmp_path):
    rows = [json.loads(line) for line in (FIXTURES / "govreport.jsonl").read_text().splitlines()]
    rows = [{"context": row["report"], "answers": [row["summary"], "another"], "_id": "a"} for row in rows]
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "gov_report.jsonl", *rows)
    fields = {"input_field": "context", "reference_field": "answers"}
    task = GovReport(data_files=str(tmp_path), **fields)  # a folder, as the unpacked data.zip
    task.check()
    assert [(e.prompt, e.reference) for e in task.examples()] == [(e.prompt, e.reference) for e in REPORTS.examples()]
    write(tmp_path / "gov_report.jsonl", *rows)
    with pytest.raises(ConfigError, match=r"2 times \(data/gov_report.jsonl, gov_report.jsonl\); name one of them"):
        GovReport(data_files=str(tmp_path), **fields).check()
    (tmp_path / "gov_report.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"'report'.*it has: context, answers"):
        GovReport(data_files=str(tmp_path)).check()
    with pytest.raises(ConfigError, match=r"cannot fetch zai-org/LongBench/data.zip"):
        GovReport(hub_id="zai-org/LongBench", hub_file="data.zip", **fields).check()


# ---- SODA


def test_soda_prompt():
    TALK.check()
    first, second, _ = TALK.examples()
    assert first.prompt == (
        "Ines mends a kite for her neighbour. <sep> Generate a dialogue between Ines and Neighbour given above "
        "narrative. <sep> The tail was torn."
    )
    assert (first.body, first.id) == ("Ines mends a kite for her neighbour.", "7001")
    assert first.reference == "Can it fly again?\nIt can.\nThen let us try it on the hill!"
    assert second.reference == "We found three.Which one is yours?"  # line ends inside a turn go, as in the release
    glued = next(replace(TALK, turn_separator="").examples())
    assert glued.reference == "Can it fly again?It can.Then let us try it on the hill!"


def test_soda_scores():
    first = next(TALK.examples())
    good = "<turn> Can it fly again? <end>\nIt can.<sep>\nThen let us try it on the hill!"
    assert set(TALK.score(good, first.reference, first).values()) == {100.0}
    # can it | can it fly again it can then let us try it on the hill: 2 of 2 and 2 of 14
    assert TALK.score("can it", first.reference, first)["rouge1"] == pytest.approx(25.0)
    swapped = "It can.\nCan it fly again?"
    assert TALK.score(swapped, "Can it fly again?\nIt can.", first)["rougeLsum"] == 100
    assert replace(TALK, join_lines=True).score("fly\nagain", "fly again", first)["rouge1"] == 0  # flyagain


# ---- GSM8K


def test_gsm8k_prompt():
    SUMS.check()
    first, _, third = SUMS.examples()
    assert first.prompt.startswith("Question: Angelo and Melanie want to plan how many hours")
    assert first.prompt.count("\n\nQuestion: ") == 8
    assert first.prompt.endswith("\n\nQuestion: A crate holds 6 jars. How many jars are in 4 crates?\n")
    assert first.prompt.count("Let's think step by step\n") == 8 and not first.prompt.endswith("step\n")
    assert third.reference.endswith("#### -3")
    later = next(replace(SUMS, question="after_eviction").examples())
    assert later.prompt + later.question == first.prompt
    assert later.question == "\n\nQuestion: A crate holds 6 jars. How many jars are in 4 crates?\n"
    none = next(replace(SUMS, shots=0).examples())
    assert none.prompt == "Question: A crate holds 6 jars. How many jars are in 4 crates?\n"


def test_pqcaches_prompt_is_its_file():
    file = SHARED / "data" / "gsm8k" / "cot_hub_prompt_hardest.txt"
    if not file.is_file():
        pytest.skip(f"no prompt at {file}")
    task = replace(SUMS, shots=10, separator="\n")
    question = "A crate holds 6 jars. How many jars are in 4 crates?"
    assert next(task.examples()).prompt == file.read_text(encoding="utf-8") + f"\nQuestion: {question}\n"


@pytest.mark.parametrize("tokenizer", ["default", "unicode"])
def test_a_summary_without_a_word_is_refused(tmp_path, tokenizer):
    rows = [{"document": "A text.", "summary": summary, "id": str(n)} for n, summary in enumerate(["Fine.", "..."])]
    task = XSum(data_files=write(tmp_path / "rows.jsonl", *rows), rouge_tokenizer=tokenizer)
    with pytest.raises(ConfigError, match=r"reference of 1, '\.\.\.', has no word for ROUGE"):
        task.check()
    replace(task, limit=1).check()


@pytest.mark.parametrize(
    ("text", "signed", "unsigned"),
    [
        ("so 1,234 in all.", 1234, 1234),
        ("5-3 = 2, or 5-3", 3, 3),  # no minus in front of a number
        ("it is -3.5 degrees", -3.5, 3.5),
        ("$-7", -7, 7),
        (".5 of it", 0.5, 0.5),
        ("18.", 18, 18),
        ("it is \u22123.5 degrees", -3.5, 3.5),  # a minus sign, and dashes in its place
        ("it is \u20137", -7, 7),
        ("$\u22127", -7, 7),
        ("5\u22123", 3, 3),
        ("a loss of \u2212$1,200", -1200, 1200),
        ("\uff0d\uff15\uff0c\uff10\uff10\uff10", -5000, 0),  # as wide as Chinese letters
        ("The answer is 18.00", 18, 18),
        ("none", None, None),
    ],
)
def test_the_last_number(text, signed, unsigned):
    assert last_number(text) == signed and last_number(text, signed=False) == unsigned


def test_gsm8k_scores():
    first, second, third = SUMS.examples()
    assert SUMS.score("6*4=24\nThe answer is 24\nQuestion: next? The answer is 5", first.reference, first) == {
        "accuracy": 100.0
    }
    assert SUMS.score("24 jars of 6", first.reference, first) == {"accuracy": 0.0}
    assert SUMS.score("1300.0", second.reference, second) == {"accuracy": 100.0}
    assert SUMS.score("The answer is 3", third.reference, third) == {"accuracy": 0.0}
    assert replace(SUMS, signed=False).score("The answer is 3", third.reference, third) == {"accuracy": 100.0}
    assert SUMS.score("", first.reference, first) == {"accuracy": 0.0}


def test_the_examples_are_part_of_the_data(tmp_path):
    other = tmp_path / "own.txt"
    other.write_text("Question: 1+1?\nThe answer is 2\n\nQuestion: 2+2?\nThe answer is 4\n")
    own = replace(SUMS, prompt_file=str(other), shots=2)
    assert next(own.examples()).prompt.startswith("Question: 1+1?\nThe answer is 2\n\nQuestion: 2+2?")
    assert len({own.fingerprint(), SUMS.fingerprint(), replace(SUMS, shots=2).fingerprint()}) == 3


# ---- perplexity


def test_a_text_is_parted_at_words_by_tokens():
    first = next(TEXTS.examples())
    made = TEXTS.fit(first, lambda text: len(text.split()), 1 << 40)
    words = first.prompt.split()
    assert made.prompt.split() == words[:20] and made.continuation.split() == words[20:60]
    assert made.continuation.startswith(" ") and first.prompt.startswith(made.prompt + made.continuation)
    assert made.info == {"prefilled": 20}
    by_three = TEXTS.fit(first, lambda text: (len(text) + 2) // 3, 1 << 40)
    assert by_three.prompt == first.prompt[: len(by_three.prompt)] and not first.prompt[len(by_three.prompt)].strip()
    assert 17 <= by_three.info["prefilled"] <= 20


def test_buckets_by_hand():
    made = replace(next(TEXTS.examples()), info={"prefilled": 20})
    logprobs = [-1.0] * 12 + [-2.0] * 16 + [-4.0] * 3  # positions 20-31, 32-47, 48-50
    metrics, info = TEXTS.score_nll(logprobs, made)
    assert metrics == {"nll": pytest.approx((12 + 32 + 12) / 31)}
    assert info["buckets"] == [
        {"from": 20, "to": 32, "nll": 1.0},
        {"from": 32, "to": 48, "nll": 2.0},
        {"from": 48, "to": 51, "nll": 4.0},
    ]
    small = TEXTS.score_nll([-1.0, -3.0], replace(made, info={"prefilled": 21}))[1]
    assert small["buckets"] == [{"from": 21, "to": 23, "nll": 2.0}]
    edge = TEXTS.score_nll([-1.0] * 16, replace(made, info={"prefilled": 16}))[1]
    assert edge["buckets"] == [{"from": 16, "to": 32, "nll": 1.0}]


def test_concatenated_texts():
    rows = [json.loads(line)["text"] for line in (FIXTURES / "perplexity.jsonl").read_text().splitlines()]
    (only,) = replace(TEXTS, concatenate=True).examples()
    assert only.prompt == "\n\n".join(rows)
    (two,) = replace(TEXTS, concatenate=True, limit=2).examples()
    assert two.prompt == "\n\n".join(rows[:2]) and two.id != only.id


def test_lengths_that_cannot_be():
    third = list(TEXTS.examples())[2]
    short = replace(TEXTS, prefill_tokens=21).fit(third, lambda text: len(text.split()), 1 << 40)
    assert short.skipped.startswith("too short to prefill task.prefill_tokens=21 and judge some tokens; lower it")
    with pytest.raises(ConfigError, match=r"task.total_tokens=60, but the model holds 59 positions"):
        TEXTS.fit(third, lambda text: len(text.split()), 59)


OWN = ["task=perplexity", "task.prefill_tokens=40", "task.total_tokens=150", "task.bucket_tokens=50", "limit=1"]


def settings(folder, *overrides):
    """A run of the first text on the tiny byte model."""
    return settings_of(*composed(*OWN, f"outputs_dir={folder}", f"task.data_files={TEXTS.data_files}", *overrides))


def perplexity(folder, *overrides):
    (row,) = evaluate_run(settings(folder, *overrides)).rows()
    return row


def test_full_attention_gives_the_models_own_likelihoods(tmp_path):
    """Token by token through the cache is one forward over the whole text, judged at every position."""
    one = settings(tmp_path, "method=full")
    (row,) = evaluate_run(one).rows()
    model, tokenizer = load(one.model)
    text = json.loads((FIXTURES / "perplexity.jsonl").read_text().splitlines()[0])["text"]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : row["prompt_tokens"] + row["info"]["nll_tokens"]]
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    nll = -logits.gather(1, ids[0, 1:, None])[row["prompt_tokens"] - 1 :, 0]
    assert row["metrics"]["nll"] == pytest.approx(nll.mean().item(), abs=1e-5)
    start = row["prompt_tokens"]
    for bucket in row["info"]["buckets"]:
        part = nll[bucket["from"] - start : bucket["to"] - start]
        assert bucket["nll"] == pytest.approx(part.mean().item(), abs=1e-5)
    assert [b["to"] for b in row["info"]["buckets"][:-1]] == [50, 100]
    assert 36 < row["prompt_tokens"] == row["info"]["prefilled"] <= 40
    assert row["output"] == "" and row["receipt"]["slots"] == ids.shape[1] - 1
    assert row["new_tokens"] == row["info"]["nll_tokens"] == len(nll)


def test_eviction_goes_on_while_the_text_is_fed(tmp_path):
    evicted = perplexity(tmp_path, "budget=tokens", "budget.tokens=16", "method=window")
    assert evicted["receipt"]["slots"] == 15
    full = perplexity(tmp_path, "method=full")
    assert evicted["metrics"]["nll"] != pytest.approx(full["metrics"]["nll"], abs=1e-3)
    roomy = perplexity(tmp_path, "budget=tokens", "budget.tokens=200", "method=window")
    assert roomy["metrics"]["nll"] == pytest.approx(full["metrics"]["nll"], abs=1e-6)


def test_beyond_the_models_own_context(tmp_path):
    small = "model.config.max_position_embeddings=64"
    with pytest.raises(ConfigError, match=r"task.total_tokens=150, but the model holds 64 positions"):
        perplexity(tmp_path, small)
    row = perplexity(tmp_path, small, "cache.beyond_context=true", "budget=tokens", "budget.tokens=32")
    assert row["info"]["buckets"][-1]["to"] > 140 and math.isfinite(row["metrics"]["nll"])


# ---- prompts of one's own


def test_prompts_are_asked_as_they_are(tmp_path: Path) -> None:
    """A row may have an id, else it is named by a digest of its texts; all have an answer for ROUGE, or none."""
    asked, answered = {"prompt": " Why is {input} blue?\n"}, {"prompt": "Say yes.", "answer": "Yes.", "id": 7}

    def read(*rows: dict[str, object]) -> tuple[Prompts, list[Example]]:
        task = Prompts(data_files=write(tmp_path / "p.jsonl", *rows))
        task.check()
        return task, list(task.examples())

    _, (first,) = read(asked)
    assert (first.prompt, first.body, first.reference) == (" Why is {input} blue?\n", first.prompt, "")
    task, (second,) = read(answered)
    assert (second.id, second.reference) == ("7", "Yes.")
    assert task.score("Yes.", second.reference, second)["rouge1"] == 100
    with pytest.raises(ConfigError, match="1 of 2 prompts have an answer, and ROUGE takes one: give all of them"):
        read(asked, answered)
    with pytest.raises(ConfigError, match=r"row 1 of .*bad.jsonl has no field 'prompt'"):
        list(Prompts(data_files=write(tmp_path / "bad.jsonl", {"text": "a"})).examples())
