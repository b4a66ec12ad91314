"""LongBench's own metrics (arXiv:2308.14508), equal to those of its eval.py to the digit. Fractions, 0 to 1.

Every metric takes (answer, reference, classes). Of the packages eval.py uses, only jieba is still needed, and only for
Chinese: `rouge` 1.0.1 and fuzzywuzzy 0.18 are computed here, with the peculiarities that move their numbers.
"""

from __future__ import annotations

import importlib.util
import re
import string
import warnings
from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np

from kvexp.errors import ConfigError
from kvexp.tasks.metrics import f1
from kvexp.tasks.metrics import qa_f1 as english_f1

# eval.py removes these from Chinese tokens besides string.punctuation.
_CHINESE = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿"  # noqa: RUF001
    "–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)
_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE)


def qa_f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """SQuAD's F1 of words."""
    return english_f1(answer, reference)


def qa_f1_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of jieba's words, lower case, without punctuation."""
    return f1(_words_zh(answer), _words_zh(reference))


def rouge_l(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L F of the `rouge` package: distinct words on any longest common subsequence of two sentences.

    A full stop ends a sentence, wherever it stands. The subsequence is the one its table walk finds; white space
    between two full stops is a sentence of one empty word. 0 for a text without anything but full stops.
    """
    ours, theirs = _sentences(answer), _sentences(reference)
    if not ours or not theirs:
        return 0.0
    shared: set[str] = set()
    for sentence in theirs:
        shared |= _common(sentence, ours)
    precision = len(shared) / len({word for sentence in ours for word in sentence})
    recall = len(shared) / len({word for sentence in theirs for word in sentence})
    return 2 * (precision * recall) / (precision + recall + 1e-8)


def rouge_l_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L of jieba's words."""
    return rouge_l(" ".join(segment(answer)), " ".join(segment(reference)))


def classification(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """1 / (how many class names the answer holds) if the right one is among them, not counting parts of its name.

    eval.py removes such parts from the list that it is walking along, and so skips the name after each one removed.
    """
    named = [name for name in classes if name in answer]
    for name in named:  # removing from it while walking along it is what is meant to happen
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def count(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are the right one."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def retrieval(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """`count` of the paragraph's number; the reference is "Paragraph 7" or "段落7"."""
    found = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    if found is None:
        raise ConfigError(f"the answer of a passage_retrieval row must name a paragraph, got {reference!r}")
    return count(answer, found.group(1))


def code_similarity(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Similarity, in whole percent, of the reference to the answer's first line that looks like code.

    fuzzywuzzy's ratio as it is without python-Levenshtein: difflib's, rounded; 0 if either text is empty.
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == reference:
        return 1.0
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100 if line and reference else 0.0


def segment(text: str) -> list[str]:
    """Chinese words, by jieba."""
    check_jieba()
    with warnings.catch_warnings():  # its import uses pkg_resources, its patterns escapes that Python frowns upon
        warnings.simplefilter("ignore")
        import jieba

        jieba.setLogLevel("WARNING")
        return list(jieba.cut(text, cut_all=False))


def check_jieba() -> None:
    """ConfigError if the package is missing, so that it shows before the first answer."""
    if importlib.util.find_spec("jieba") is None:
        raise ConfigError("this Chinese task is scored in jieba's words: pip install jieba (or kvexp[chinese])")


def _words_zh(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_PUNCTUATION).split()) for word in segment(text))
    return [word for word in words if word]


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common(reference: list[str], answers: list[list[str]]) -> set[str]:
    """Words on the longest common subsequence of the reference sentence with each answer sentence.

    The table of all answer sentences is filled at once, row by row: they stand side by side, each with a column of
    zeros in front of it. Adding a larger number to each later sentence keeps the running maximum from crossing over.
    """
    numbers = {word: number for number, word in enumerate(reference)}
    flat = np.array([n for sentence in answers for n in (-1, *(numbers.get(word, -1) for word in sentence))])
    starts = np.cumsum([0] + [len(sentence) + 1 for sentence in answers])
    apart = np.repeat(np.arange(len(answers)), np.diff(starts)) * (len(reference) + 1)
    table = np.zeros((len(reference) + 1, len(flat)), dtype=np.int64)
    for i, word in enumerate(reference, start=1):
        row = table[i - 1].copy()
        match = np.flatnonzero(flat == numbers[word])
        row[match] = table[i - 1, match - 1] + 1
        table[i] = np.maximum.accumulate(row + apart) - apart
    shared: set[str] = set()
    for start, sentence in zip(starts.tolist(), answers, strict=False):
        shared |= _walk(table[:, start : start + len(sentence) + 1].tolist(), reference, sentence)
    return shared


def _walk(table: list[list[int]], reference: list[str], answer: list[str]) -> set[str]:
    """The words met on the way back through a table of common lengths; left where both ways are as long."""
    i, j = len(reference), len(answer)
    words: set[str] = set()
    while i and j:
        if reference[i - 1] == answer[j - 1]:
            words.add(reference[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words
