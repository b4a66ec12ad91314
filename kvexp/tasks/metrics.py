"""Metrics of answers."""

from __future__ import annotations

import importlib.util
import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvexp.util import ConfigError

# Measures of a short answer that several tasks share: token F1, exact match, recall of words. Fractions, 0 to 1.


_ARTICLES = re.compile(r"\b(a|an|the)\b")
FUNCTION_WORDS = frozenset(
    "and or but if in on at to of by for from with as is are was were be it its that this".split()  # noqa: SIM905
)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_INSIDE = re.compile("[\u2018\u2019\u02bc\uff07\u2010\u2011\uff0d]")  # apostrophes and hyphens: no word ends there
# Scripts that put no space between words: Chinese, Japanese, Yi, Thai, Lao, Burmese, Khmer and their neighbours.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1b7f\u2e80-\u2fdf\u3005-\u3007\u3031-\u3035\u3040-\u30ff"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf\ua980-\ua9ff\uaa60-\uaadf\uf900-\ufaff\U00020000-\U0003ffff]"
)
_HANGUL = re.compile("[\uac00-\ud7a3]")


def folded(text: str) -> str:
    """The text however its letters were written: composed or not, of any width, upper or lower case, in any digits.

    Unicode's NFKC and case folding. The dotless i is an i, as nobody can tell Turkish capitals from others; invisible
    marks (soft hyphens, joiners, directions) are left out.
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    text = text.replace("i\u0307", "i").replace("\u0131", "i").replace("\u200b", " ")
    plain = (str(unicodedata.decimal(c)) if c > "9" and c.isdecimal() else c for c in text)
    return "".join(c for c in plain if c < "\x7f" or unicodedata.category(c) != "Cf")


def words_of(text: str, *, syllables: bool = False) -> list[str]:
    """Words of a text in any script, folded: letters, their marks and digits, whatever stands between.

    Scripts without spaces give a word per character, with its marks; syllables=True: Korean does, too, as its particles
    are written onto words (KorQuAD counts characters).
    """
    words: list[str] = []
    going = False  # whether the next letter belongs to the last word
    behind_letter = False  # marks of what is no letter, such as an emoji, belong to no word
    for c in folded(text):
        category = unicodedata.category(c)
        kind = category[0]
        if kind == "M":
            if behind_letter and category != "Me" and not "\ufe00" <= c <= "\ufe0f":
                words[-1] += c
            continue
        behind_letter = kind in "LN"
        if not behind_letter:
            going = False
        elif _UNSPACED.match(c) or (syllables and _HANGUL.match(c)):
            words.append(c)
            going = False
        elif going:
            words[-1] += c
        else:
            words.append(c)
            going = True
    return words


def unspaced_letters(text: str) -> int:
    """How many characters of a text are of scripts that put no space between words."""
    return 0 if text.isascii() else len(_UNSPACED.findall(text))


def is_unspaced(text: str) -> bool:
    """Whether those are most of the text's letters."""
    found = unspaced_letters(text)
    return found > 0 and 2 * found > sum(map(str.isalpha, text))


def beyond_ascii(text: str) -> bool:
    """Whether a text has letters, marks or digits that are not ASCII: SQuAD's normalisation knows nothing of them."""
    return not text.isascii() and any(c > "\x7f" and unicodedata.category(c)[0] in "LMN" for c in text)


def normalise(text: str, unicode: bool = False) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces: SQuAD's normalisation (arXiv:1606.05250).

    unicode=True: the same of texts in any script (`words_of`), whose punctuation goes too.
    """
    if unicode:
        text = " ".join(words_of(_INSIDE.sub("", text.translate(_NO_PUNCTUATION)), syllables=True))
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of two bags of words; 0 where they share none."""
    shared = sum((Counter(answer) & Counter(reference)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(answer), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def qa_f1(answer: str, reference: str, unicode: bool = False) -> float:
    """F1 of the normalised words of an answer and one reference, as SQuAD and LongBench measure it."""
    return f1(normalise(answer, unicode).split(), normalise(reference, unicode).split())


def exact_match(answer: str, reference: str) -> float:
    """1 if both are the same text after normalisation."""
    return float(normalise(answer) == normalise(reference))


def contains(answer: str, reference: str, unicode: bool = False) -> float:
    """1 if the normalised reference stands in the normalised answer, word for word; the empty one stands in none."""
    wanted = normalise(reference, unicode)
    return float(bool(wanted) and f" {wanted} " in f" {normalise(answer, unicode)} ")


def word_recall(answer: str, reference: str, unicode: bool = False) -> float:
    """Share of the reference's distinct normalised words that the answer holds, in whatever order.

    Function words, which any English answer holds, do not count, unless the reference has no other.
    """
    wanted = set(normalise(reference, unicode).split())
    wanted = wanted - FUNCTION_WORDS or wanted
    return len(wanted & set(normalise(answer, unicode).split())) / len(wanted) if wanted else 0.0


# What stands before ROUGE: are its packages installed, can rouge_score read the references, how are they imported.


TOKENIZERS = ("default", "unicode")
# Of all references' letters, of their words, and so many different words: more is no English text with some names.
LETTERS, WORDS, DIFFERENT = 0.10, 0.05, 10
MOST = 0.5  # of a single reference's letters: next to nothing of it would be compared
PACKAGES = {"rouge_score": "rouge-score", "nltk": "nltk"}  # module: what pip calls it


def check_rouge_installed() -> None:
    """ConfigError for a package that scores would miss after the first answer. Importing them takes time: not here."""
    for module, package in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"ROUGE needs {package}, which is not installed; run: pip install {package}")


def dropped_letters(text: str) -> int:
    """How many letters, marks and digits of a text rouge_score's own tokenizer leaves out: all but a-z and 0-9."""
    if text.isascii():
        return 0
    return sum(c > "\x7f" and unicodedata.category(c)[0] in "LMN" for c in text.lower())


def check_references(references: Iterable[str]) -> None:
    """ConfigError where rouge_score's own tokenizer would leave out more of the references than some names' accents."""
    dropped = letters = 0
    words: list[str] = []
    unread = False
    for reference in references:
        here, of = dropped_letters(reference), sum(unicodedata.category(c)[0] in "LMN" for c in reference)
        dropped, letters, unread = dropped + here, letters + of, unread or here > MOST * of
        words += re.findall(r"\S+", reference)
    hurt = [word for word in words if dropped_letters(word)]
    many = len(hurt) > WORDS * len(words) and len({word.lower() for word in hurt}) >= DIFFERENT
    if not (many or unread or dropped > LETTERS * letters):
        return
    raise ConfigError(
        f"rouge_score's own tokenizer knows a-z and 0-9 alone and would leave out {dropped} of the {letters} letters "
        f"of the references, as in {', '.join(map(repr, list(dict.fromkeys(hurt))[:3]))}: equal texts would get less "
        "than 100, and others score by the digits they share; set task.rouge_tokenizer=unicode (or correct the rows)"
    )


@contextmanager
def unimported(*names: str) -> Iterator[None]:
    """In the block, modules of these names that are not loaded yet cannot be imported; afterwards they can.

    nltk imports scikit-learn (and with it pandas) and scipy.stats for classifiers and collocations, or does without
    where they are missing: three quarters of the processor time of importing its stemmer. Of nltk only the stemmer is
    used here; a program that wants the rest imports nltk first.
    """
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: Python's own mark for "cannot be imported"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


# Rules that an answer follows or not, as code: each a function of the answer's text alone.


LIST_MARK = re.compile(r"^\s*(?:\d+[.)]|[-*•])\s*", re.MULTILINE)  # "1. ", "2) ", "- " at the beginning of a line
RULE_CHECKS_LETTERS = re.compile(r"\w+")


def without_list_marks(text: str) -> str:
    """The text without the numbers and dashes that its lines begin with: they are no part of what is said."""
    return LIST_MARK.sub("", text)


def mentions(text: str, accepted: Sequence[str]) -> bool:
    """Whether one of these words or phrases (lower case) stands in the text, whole, whatever its case."""
    plain = without_list_marks(text).lower()
    return any(re.search(rf"(?<!\w){re.escape(words)}(?!\w)", plain) for words in accepted)


def starts_with(text: str, words: str) -> bool:
    """Whether the first words are these, whatever their case and the marks before them."""
    return text.lstrip(" \n\t\"'*").lower().startswith(words.lower())


def ends_with(text: str, words: str) -> bool:
    """Whether the last words are these, whatever their case and the marks behind them."""
    return text.rstrip(" \n\t\"'*.!").lower().endswith(words.lower())


def is_list(text: str, items: int) -> bool:
    """Whether at least so many lines begin with a number or a dash."""
    return len(LIST_MARK.findall(text)) >= items


def at_most_words(text: str, most: int) -> bool:
    """Whether the text has some words, and no more than so many."""
    return 0 < len(RULE_CHECKS_LETTERS.findall(text)) <= most


# Repetition in a text: the share of n-grams that were there before, and where it begins to go in circles.


COPIES = 3  # of a passage, one directly behind the other, are a loop
LEAST_WORDS = 12  # that the copies of a loop have together: "no, no, no" is none
LONGEST = 128  # words of a passage that are looked at


@dataclass(frozen=True)
class Loop:
    """A passage of `period` words that begins at word `start` and comes at least COPIES times in a row."""

    start: int
    period: int


def repeated_share(words: Sequence[str], n: int = 4) -> float:
    """Share of a text's n-grams that stood in it before, 0 to 1; 0 for a text of fewer than n words."""
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def first_loop(words: Sequence[str]) -> Loop | None:
    """The loop that begins first, of several that begin there the shortest; None where there is none."""
    found: list[tuple[int, int]] = []
    for period in range(1, min(LONGEST, len(words) // COPIES) + 1):
        needed = max((COPIES - 1) * period, LEAST_WORDS - period)
        run = 0  # neighbouring words that are the same one period later
        for place in range(len(words) - period):
            run = run + 1 if words[place] == words[place + period] else 0
            if run >= needed:
                found.append((place - run + 1, period))
                break
    return Loop(*min(found)) if found else None
