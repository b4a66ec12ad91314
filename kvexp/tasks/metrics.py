"""Metrics of answers: words of any script, F1 and recall of short answers, ROUGE, rules of form, repetition."""

from __future__ import annotations

import importlib.util
import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

from kvexp.util.errors import ConfigError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
FUNCTION_WORDS = frozenset(
    "and or but if in on at to of by for from with as is are was were be it its that this".split()  # noqa: SIM905
)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# What the official graders of LongBench and InfiniteBench leave out of Chinese answers besides string.punctuation.
CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿"  # noqa: RUF001
    "–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)
_INSIDE = re.compile("[\u2018\u2019\u02bc\uff07\u2010\u2011\uff0d]")  # apostrophes and hyphens: no word ends there
# Scripts that put no space between words: Chinese, Japanese, Yi, Thai, Lao, Burmese, Khmer and their neighbours.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1b7f\u2e80-\u2fdf\u3005-\u3007\u3031-\u3035\u3040-\u30ff"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf\ua980-\ua9ff\uaa60-\uaadf\uf900-\ufaff\U00020000-\U0003ffff]"
)
_HANGUL = re.compile("[\uac00-\ud7a3]")
_SENTENCE_MARKS = (  # Unicode's Sentence_Terminal of the scripts in use today, without . ! ?
    "\u0589\u061d-\u061f\u06d4\u0700-\u0702\u07f9\u0964\u0965\u104a\u104b\u1362\u1367\u1368\u166e\u1735\u1736\u17d4\u17d5"
    "\u1803\u1809\u1944\u1945\u1aa8-\u1aab\u1b5a\u1b5b\u1c3b\u1c3c\u1c7e\u1c7f\u203c\u203d\u2047-\u2049\u3002\ua4ff\ua60e\ua60f"
    "\ua876\ua877\ua8ce\ua8cf\ua92f\ua9c8\ua9c9\uaa5d-\uaa5f\uaaf0\uaaf1\uabeb\ufe12\ufe15\ufe16\ufe52\ufe56\ufe57\uff01\uff0e\uff1f"
    "\uff61\U00011141\U00011142\U0001144b\U0001144c"
    "\u0f0d\u0f0e"  # Tibetan's shads, which Unicode does not count
)
_CLOSING = "\"')\\]\u201d\u2019\u00bb\u300d\u300f\u3009\u300b\u3011\u3015\uff02\uff07\uff09\uff3d\uff63"
# These end a sentence without white space; so do . ! ? between Chinese or Japanese letters.
OTHER_ENDS = re.compile(
    rf"[{_SENTENCE_MARKS}][{_SENTENCE_MARKS}.!?{_CLOSING}]*\s*|[.!?][{_CLOSING}]*(?=[\u3040-\u30ff\u3400-\u9fff])"
)


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
    """Whether most letters of a text are of scripts that put no space between words."""
    unspaced = unspaced_letters(text)
    return unspaced > 0 and 2 * unspaced > sum(map(str.isalpha, text))


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


_DASHES = re.compile(r"[\u2010-\u2015\u2212]")
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # ASCII as wide as Chinese letters
# A minus of any shape in front of a number or an amount; the minus of 5-3 is none of a number.
_MINUS = re.compile(r"(?<![\w.)])[-\u2010-\u2015\u2212\ufe58\ufe63](?:\\?[$\u20ac\u00a3])?(?=\.?\d)")
_THAN = {"<": "less", ">": "more", "=": "equal"}
# Marks that tell names and numbers apart, and the words that stand for them: C# and C++, AB-, 3.5, 1/2 and 12, <5.
_SPELLED = (
    (re.compile(r"(?<![\w.])\.(?=\d)"), "0."),
    (_MINUS, "minus"),
    (re.compile(r"\b(?:minus|negative) (?=\d)", re.IGNORECASE), "minus"),
    (re.compile(r"(?<=[^\W_])#(?!\w)"), "sharp"),
    (re.compile(r"(?<=[^\W_])\++(?!\w)"), lambda plus: "plus" * len(plus.group())),
    (re.compile(r"(?<=\b[A-Za-z])[-\u2010-\u2013\u2212](?![\w-])"), "minus"),
    (re.compile(r"(?<=\b[A-Z][A-Za-z])[-\u2010-\u2013\u2212](?![\w-])"), "minus"),
    (re.compile(r"[<>]=?(?=\s*(?:minus)?\d)"), lambda sign: "".join(_THAN[letter] for letter in sign.group())),
    (re.compile(r"(?<=\d)[-\u2010-\u2015\u2212](?=\d)"), "to"),
    (re.compile(r"(?<=\d):(?=\d)"), "colon"),
    (re.compile(r"(?<=\d)\.(?=\d)"), "point"),
    (re.compile(r"(?<=\d)/(?=\d)"), "over"),
)
# With a mark it is another one: C# and C, -5 and 5, 1/2 cup and 12 cup.
_NAME_OR_NUMBER = re.compile(r"[A-Za-z]|[^\w\s]*\d[\d,]*(?:[^\w,].*)?", re.DOTALL)
_LABEL = re.compile(r"\w A\W*$")  # Vitamin A: at the end it is no article
_LABELLED = re.compile(r"(?<=\w )(?:A\b|a\b(?!\s*\w))")


def with_plain_minus(text: str) -> str:
    """The text with a hyphen for every minus sign or dash in front of a number, also of an amount (-$5 is -5)."""
    return _MINUS.sub("-", text.translate(_FULL_WIDTH))


def _spelled(text: str) -> str:
    """The text with words for marks that SQuAD's normalisation drops though they tell names and numbers apart."""
    text = text.translate(_FULL_WIDTH)
    for mark, word in _SPELLED:
        text = mark.sub(word, text)
    return text


def needs_marks(reference: str, unicode: bool = False) -> bool:
    """Whether SQuAD's normalisation leaves nothing of a reference, or takes it for another one (C# for C, -5 for 5)."""
    if _spelled(reference) != reference or _NAME_OR_NUMBER.fullmatch(reference.strip()) or _LABEL.search(reference):
        return True
    return not normalise(reference, unicode)


def compared(answer: str, reference: str, unicode: bool = False, marks: bool = False) -> tuple[str, str]:
    """Both texts as they are compared: SQuAD's normalisation (`normalise`).

    marks=True, for references of one's own: where they need their marks (`needs_marks`), these count as words. Of a
    reference that would have nothing left, articles and punctuation stay: "A" is then one of the answer's words as
    written, "-" one of its signs.
    """
    if marks and needs_marks(reference, unicode):
        if _LABEL.search(reference):
            answer, reference = (_LABELLED.sub("lettera", text) for text in (answer, reference))
        answer, reference = _spelled(answer), _spelled(reference)
        if not normalise(reference, unicode):
            return _as_written(answer, reference)
    return normalise(answer, unicode), normalise(reference, unicode)


def _as_written(answer: str, reference: str) -> tuple[str, str]:
    """Both texts as words and signs. A capital article matches capitals alone, unless it is all that is said."""

    def bare(text: str) -> str:
        text = _DASHES.sub("-", text)
        return " ".join(word.strip(".,;:!?\"'`*_()[]{}") or word for word in text.split())

    said, wanted = bare(answer), bare(reference)
    if not wanted.isupper() or said.lower() == wanted.lower():
        said, wanted = said.lower(), wanted.lower()
    return said, wanted


def f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of two bags of words; 0 where they share none."""
    shared = sum((Counter(answer) & Counter(reference)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(answer), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def qa_f1(answer: str, reference: str, unicode: bool = False, marks: bool = False) -> float:
    """F1 of the normalised words of an answer and one reference, as SQuAD and LongBench measure it; see `compared`."""
    said, wanted = compared(answer, reference, unicode, marks)
    return f1(said.split(), wanted.split())


def exact_match(answer: str, reference: str) -> float:
    """1 if both are the same text after normalisation."""
    return float(normalise(answer) == normalise(reference))


def contains(answer: str, reference: str, unicode: bool = False, marks: bool = False) -> float:
    """1 if the normalised reference stands in the normalised answer, word for word (`compared`); the empty one stands
    in none.
    """
    said, wanted = compared(answer, reference, unicode, marks)
    return float(bool(wanted) and f" {wanted} " in f" {said} ")


def word_recall(answer: str, reference: str, unicode: bool = False, marks: bool = False) -> float:
    """Share of the reference's distinct normalised words that the answer holds, in whatever order; see `compared`.

    Function words, which any English answer holds, do not count, unless the reference has no other.
    """
    said, reference = compared(answer, reference, unicode, marks)
    wanted = set(reference.split())
    wanted = wanted - FUNCTION_WORDS or wanted
    return len(wanted & set(said.split())) / len(wanted) if wanted else 0.0


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
    hurt = list(filter(dropped_letters, words))
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


TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")

# A full stop after one of these, or after a single letter, ends no sentence (unless the line ends there too).
ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof rev hon st sen rep gov gen col capt lt sgt cmdr maj supt insp jr sr "  # noqa: SIM905
    "vs approx dept e.g i.e cf inc ltd co corp u.s u.k u.n e.u d.c".split()
)
# The same in front of a number only: "No. 10", but "He said no. They left."
NUMBERED = frozenset("no nos vol fig p pp jan feb mar apr jun jul aug sep sept oct nov dec".split())  # noqa: SIM905
_OPENING, _QUOTES = "\"'(\\[\u201c\u2018", "\"')\\]\u201d\u2019"
# The end of a sentence: . ! ? or …, closing quotes or brackets, white space, then what can begin one.
_END = re.compile(rf"(?<=[.!?\u2026])([{_QUOTES}]*)\s+(?=[{_OPENING}]*[A-Z0-9\u00c0-\u00d6\u00d8-\u00de])")
_END_ANY = re.compile(rf"(?<=[.!?\u2026])([{_QUOTES}]*)\s+(?=[{_OPENING}]*([^\W_]))")


@cache
def scorer(tokenizer: str = "default") -> Any:
    """rouge_score's scorer of all TYPES, with stemmer. tokenizer: default, which is rouge_score's own, or unicode.

    unicode: words of any script (`words_of`), ASCII ones stemmed as rouge_score does: of ASCII texts they are
    the same words. As XL-Sum scores its languages (arXiv:2106.13822): letters and their marks stay, punctuation goes.
    Departures from its release: one stemmer, and a character is a word in scripts without spaces, where the release
    segments (Chinese, Japanese, Thai, Burmese).
    """
    with unimported("sklearn", "scipy.stats"):
        from nltk.stem.porter import PorterStemmer
        from rouge_score import rouge_scorer, tokenize, tokenizers

    class Words(tokenizers.Tokenizer):  # type: ignore[misc]
        """Tokenizer that keeps the stem of each word: stemming is most of the time a score takes."""

        stem = staticmethod(lru_cache(1 << 16)(PorterStemmer().stem))

        def tokenize(self, text: str) -> list[str]:
            if tokenizer == "unicode":
                return [self.stem(word) if len(word) > 3 and word.isascii() else word for word in words_of(text)]
            words: list[str] = tokenize.tokenize(text, self)
            return words

    return rouge_scorer.RougeScorer(list(TYPES), tokenizer=Words())


def rouge(output: str, reference: str, tokenizer: str = "default") -> dict[str, float]:
    """ROUGE-1, -2, -L and -Lsum F1 of one pair, 0 to 100. Both texts are taken as they are: see `lines`."""
    scores = scorer(tokenizer).score(reference, output)
    return {kind: 100 * float(scores[kind].fmeasure) for kind in TYPES}


def sentences(text: str, tokenizer: str = "default") -> list[str]:
    """Sentences of an English text: every newline ends one, and . ! ? … where a new one can begin.

    Stands in for nltk's punkt, which has to be downloaded. It matters for rougeLsum only, whose other scores see words.
    An abbreviation at the end of a sentence, and a sentence that begins in lower case, stay joined to their neighbour.
    """
    pieces = []
    anywhere = tokenizer == "unicode"  # in front of a letter of any script, and at the marks of other scripts
    if anywhere:
        text = OTHER_ENDS.sub(lambda end: f"{end.group().rstrip()}\n", text)
    for line in text.splitlines():
        start = 0
        for end in (_END_ANY if anywhere else _END).finditer(line):
            if anywhere and end.group(2).islower():
                continue
            if not end.group(1) and _abbreviated(line[: end.start()], line[end.end()]):
                continue
            pieces.append(line[start : end.end()].strip())
            start = end.end()
        pieces.append(line[start:].strip())
    return [sentence for sentence in pieces if sentence]


def _abbreviated(before: str, follows: str) -> bool:
    """Whether the full stop that ends `before` belongs to its last word; `follows` is what comes next."""
    word = before.rsplit(None, 1)[-1].lstrip(_OPENING).removesuffix(".").lower()
    if word in NUMBERED and follows.isdigit():
        return True
    return word in ABBREVIATIONS or (len(word) == 1 and word.isalpha() and word != "i")


def lines(text: str, join_first: bool = False, tokenizer: str = "default") -> str:
    """The text with one sentence per line, as rougeLsum wants it; join_first makes its newlines spaces before."""
    return "\n".join(sentences(text.replace("\n", " ") if join_first else text, tokenizer))


LIST_MARK = re.compile(r"^\s*(?:\d+[.)]|[-*•])\s*", re.MULTILINE)  # "1. ", "2) ", "- " at the beginning of a line


def mentions(text: str, accepted: Sequence[str]) -> bool:
    """Whether one of these phrases (lower case) stands in the text, whole, whatever its case.

    The numbers and dashes that its lines begin with do not count.
    """
    plain = LIST_MARK.sub("", text).lower()
    return any(re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", plain) for phrase in accepted)


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
    return 0 < len(re.findall(r"\w+", text)) <= most


COPIES = 3  # of a passage, one directly behind the other, are a loop
LEAST_WORDS = 12  # that the copies of a loop have together: "no, no, no" is none
LONGEST = 128  # words of a passage that are looked at


def repeated_share(words: Sequence[str], n: int = 4) -> float:
    """Share of a text's n-grams that stood in it before, 0 to 1; 0 for a text of fewer than n words."""
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def first_loop(words: Sequence[str]) -> tuple[int, int] | None:
    """(first word, words) of the passage that comes COPIES times in a row and more, or None.

    The one that begins first, of several that begin there the shortest.
    """
    loops: list[tuple[int, int]] = []
    for period in range(1, min(LONGEST, len(words) // COPIES) + 1):
        needed = max((COPIES - 1) * period, LEAST_WORDS - period)
        run = 0  # neighbouring words that are the same one period later
        for place in range(len(words) - period):
            run = run + 1 if words[place] == words[place + period] else 0
            if run >= needed:
                loops.append((place - run + 1, period))
                break
    return min(loops, default=None)
