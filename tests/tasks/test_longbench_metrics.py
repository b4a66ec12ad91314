"""LongBench's metrics: by hand, and to the digit of the published scores of a model's stored predictions."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from conftest import SHARED

from kvexp.tasks.longbench import (
    SUBSETS,
    check_jieba,
    classification,
    code_similarity,
    count,
    qa_f1,
    qa_f1_zh,
    retrieval,
    rouge_l,
    rouge_l_zh,
    score,
)
from kvexp.tasks.metrics import contains, exact_match, normalise, word_recall
from kvexp.util import ConfigError

PUBLISHED = SHARED / "data" / "longbench_predictions" / "llama2-7b-chat"
ENGLISH = [
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
]


@pytest.mark.parametrize("name", ENGLISH)
def test_published_scores_come_out_exactly(name):
    if not PUBLISHED.is_dir():
        pytest.skip(f"no predictions at {PUBLISHED}")
    rows = [json.loads(line) for line in (PUBLISHED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    total = sum(score(SUBSETS[name], row["pred"], row) for row in rows)
    assert round(100 * total / len(rows), 2) == json.loads((PUBLISHED / "result.json").read_text())[name]


def test_words_of_answers():
    assert normalise("  The  U.S.A. -- an 'old' name! ") == "usa old name"
    assert qa_f1("The cat sat.", "a cat sat down") == pytest.approx(0.8)  # 2 of 2 and 2 of 3
    assert qa_f1("cat cat", "cat dog") == 0.5  # a bag, not a set: 1 of 2 and 1 of 2
    assert qa_f1("", "cat") == qa_f1("the", "cat") == qa_f1("cat", "") == 0
    assert exact_match("The Cat!", "cat") == 1 and exact_match("cats", "cat") == 0
    assert contains("It is a big red barn, he said", "the Big red") == 1
    assert contains("It is a bigger red barn", "big red") == contains("anything", "the") == 0
    # sandwich, sit, Dolores: 3 of eat sandwich sit dolores park sunny day
    assert (
        word_recall("sit in Dolores with a sandwich", "eat a sandwich and sit in Dolores Park on a sunny day") == 3 / 7
    )
    assert word_recall("to be", "to be or not") == 0 and word_recall("not", "to be or not") == 1
    assert word_recall("of it", "of it") == 1  # nothing but function words: then those count


def test_rouge_l_is_the_packages():
    # a c b against a b c: two words long, and its walk meets b before c; 1e-8 is the package's
    assert rouge_l("a b c", "a c b") == 2 * (4 / 9) / (4 / 3 + 1e-8)
    assert rouge_l("a a a", "a") == 2 / (2 + 1e-8)  # distinct words
    # the union over all pairs of sentences: {a b} with the first and {c} with the second, of 3 and 4 words
    assert rouge_l("a b c", "a b. c d") == 2 * (1 * 3 / 4) / (1 + 3 / 4 + 1e-8)
    # white space behind a full stop is a sentence of one empty word, which counts as one
    assert rouge_l("a. ", "a") == 2 * (1 / 2 * 1) / (3 / 2 + 1e-8)
    assert rouge_l("...", "a") == rouge_l("", "a") == rouge_l("a", ".") == 0


def test_classification_with_its_slip():
    classes = ["Food", "Date", "Other location"]
    assert classification("Date", "Date", classes) == 1
    assert classification("Food or Date", "Date", classes) == 0.5
    assert classification("food", "Food", classes) == 0
    # A goes, and the name behind it is passed over: AB stays, though it is a part of ABC too
    assert classification("ABC", "ABC", ["A", "AB", "ABC"]) == 0.5
    assert classification("AB C", "C", ["A", "AB", "C"]) == pytest.approx(1 / 3)


def test_numbers():
    assert count("There are 5 of 15, so 5.", "5") == pytest.approx(2 / 3)
    assert count("none", "5") == 0
    assert retrieval("Paragraph 3 or 4", "Paragraph 3") == 0.5
    assert retrieval("段落12", "段落12") == 1
    with pytest.raises(ConfigError, match="must name a paragraph"):
        retrieval("3", "third")


def test_code_similarity():
    assert code_similarity("\n\n# note\n// note\n`x`\nreturn x", "return y") == 0.88  # 14 of 16, rounded to even
    assert code_similarity("abcdexxx", "abcdeyyy") == 0.62  # 62.5, rounded to even
    assert code_similarity("", "x") == code_similarity("# all\n# notes", "x") == 0
    assert code_similarity("same\nother", "same") == 1


def test_chinese_words(monkeypatch):
    if importlib.util.find_spec("jieba") is None:
        pytest.skip("jieba is not installed; it comes with kvexp[chinese]")
    assert qa_f1_zh("我来到北京清华大学。", "北京清华大学") == pytest.approx(
        2 / 3
    )  # 我 来到 北京 清华大学: 2 of 4 and 2 of 2
    assert rouge_l_zh("我来到北京", "我来到北京") == 2 / (2 + 1e-8)


def test_without_jieba_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ConfigError, match=r"pip install jieba \(or kvexp\[chinese\]\)"):
        check_jieba()
