"""Measures of a short answer that several tasks share: token F1, exact match, recall of words. Fractions, 0 to 1."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

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
