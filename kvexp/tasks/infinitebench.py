"""InfiniteBench (Zhang et al., arXiv:2402.13718): twelve tasks of 44k to 2M tokens, from files; and its graders, which
SCBench took over in part.

Prompts and graders are of github.com/OpenBMB/InfiniteBench (MIT) at commit 88b3daa: the prompts that it gives open
models (yarn_mistral_templates), to the letter. The grader of longdialogue_qa_eng is the one of August 2024 (its issue
18): any of several labels counts, and names of several words do.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvexp.tasks.base import Example, SharedContextTask, SubsetTask, Truncation, kinds_of, row_id
from kvexp.tasks.data import Members, misshapen, text, texts
from kvexp.tasks.metrics import CHINESE_PUNCTUATION, check_rouge_installed, qa_f1, unimported
from kvexp.util.errors import ConfigError

Grader = Callable[[str, Sequence[Any]], float]  # (answer, the right ones) -> 0 to 1
LETTERS = "ABCD"


def _spaced(words: str, marks: str) -> str:
    """The text with a space for each of these marks."""
    return words.translate(str.maketrans(marks, " " * len(marks)))


def first_integer(output: str, answers: Sequence[Any]) -> float:
    """Whether the first digits are the answer."""
    digits = re.search("[0-9]+", output)
    return float(digits is not None and digits.group() == str(answers[0]))


def whole_word(output: str, answers: Sequence[Any]) -> float:
    """Whether the answer is one of the words; quotes, braces and most punctuation part words."""
    return float(str(answers[0]) in _spaced(output, "\n:\"'.,?!{}").split())


def any_stands_in(output: str, answers: Sequence[Any]) -> float:
    """Whether one of the answers stands in the output, whatever its case; also inside of a word."""
    said = output.strip().upper()
    return float(any(str(answer).upper() in said for answer in answers))


def last_integer(output: str, answers: Sequence[Any]) -> float:
    """Whether the last word is the integer."""
    words = _spaced(output, "\n.`'\":").split()
    try:
        return float(bool(words) and int(words[-1]) == int(answers[0]))
    except ValueError:
        return 0.0


def first_number(output: str, answers: Sequence[Any]) -> float:
    """Whether the first number, without its sign, is the answer."""
    number = re.search(r"\d+\.\d+|\d+", output)
    if number is None:
        return 0.0
    wanted = answers[0] if isinstance(answers[0], int | float) else float(answers[0])
    return float((int if isinstance(wanted, int) else float)(float(number.group())) == wanted)


def right_prefix(output: str, answers: Sequence[Any]) -> float:
    """The share of intermediate results before the first wrong one."""
    wanted = answers[0] if isinstance(answers[0], list | tuple) else answers
    right = 0
    for digits, value in zip(re.findall("[0-9]+", output), wanted, strict=False):
        if int(digits) != value:
            break
        right += 1
    return right / len(wanted)


def option(output: str, answers: Sequence[Any]) -> float:
    """Whether the letter chosen, or the option's text, is right: at the beginning, behind "answer is", or the first
    lone letter.
    """
    said = output.strip()
    if not said:
        return 0.0
    if said[0] in LETTERS:
        return float(said[0] in answers)
    if said in answers:
        return 1.0
    said = re.sub(" +", " ", _spaced(said, "\n\"'.,?!{}"))
    for words in ("answer is:", "answer:", "answer is", "option is"):
        if words in said:
            after = said.split(words, 1)[1][1:]
            return float(any(after.startswith(answer) for answer in answers))
    return next((float(word in answers) for word in said.split() if word in LETTERS), 0.0)


def option_of_code(output: str, answers: Sequence[Any]) -> float:
    """As `option`, of code_debug: the letter with its mark at the beginning, or letter or name behind "answer is"."""
    name, letter = answers
    said = output.strip()
    if said[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    said = _spaced(said, "\n`'\"-*")
    said = re.sub(" +", " ", said.replace("Option", " ").replace("option", " "))
    for words in ("answer is:", "is:", "answer:", "correct option is:"):
        if words in said:
            after = said.split(words, 1)[1][1:]
            return float(after.startswith((letter, name)))
    return 0.0


def f1(output: str, answers: Sequence[Any]) -> float:
    """F1 of the words, the best over the answers."""
    return max(qa_f1(output, str(answer)) for answer in answers)


def f1_of_characters(output: str, answers: Sequence[Any]) -> float:
    """F1 of the characters without punctuation and white space, the best over the answers."""

    def characters(words: str) -> Counter[str]:
        kept = "".join(c for c in words.lower() if c not in string.punctuation + CHINESE_PUNCTUATION)
        return Counter("".join(kept.split()))

    best, said = 0.0, characters(output)
    for answer in answers:
        wanted = characters(str(answer))
        if same := (said & wanted).total():
            best = max(best, 2 * same / (said.total() + wanted.total()))
    return best


def rouge_lsum(output: str, answers: Sequence[Any]) -> float:
    """rougeLsum as the package evaluate computes it: no stemmer, a line is a sentence; the best over the answers."""
    with unimported("sklearn", "scipy.stats"):
        from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeLsum"])
    return max(float(scorer.score(str(answer), output)["rougeLsum"].fmeasure) for answer in answers)


@dataclass(frozen=True)
class Subset:
    """A task. prompt: with {context} once, values of the row, and {answer} in front of words that are to be completed.

    grader: of an answer and the right ones, 0 to 1.
    """

    prompt: str
    grader: Grader
    new_tokens: int


GRADERS: tuple[Grader, ...] = (first_integer, whole_word, any_stands_in, last_integer, first_number, right_prefix)
GRADERS += (option, option_of_code, f1, f1_of_characters, rouge_lsum)
SUBSETS = kinds_of("infinitebench", Subset, *GRADERS)


@dataclass(frozen=True, kw_only=True)
class InfiniteBench(SubsetTask, SharedContextTask):
    """A task of InfiniteBench (arXiv:2402.13718), `subset`, in its columns: id, context, input, answer, options.

    `data_files`: {subset}.jsonl, or a folder that holds it; without it the file is fetched from the hub at the pinned
    `revision` (books of longbook_qa_eng were revised in 2024). The official prompt for open models. A chat model reads
    it as its turn (`chat_wrap`), and words that are to be completed, such as "The pass key is", as the beginning of its
    answer. A prompt too long loses its middle (`truncate=halves`), as there: with a model that holds less than a
    context, a needle may be what is lost.

    `score` in percent by the task's official rule.
    """

    name: ClassVar[str] = "infinitebench"
    metrics: ClassVar[tuple[str, ...]] = ("score",)
    subsets: ClassVar[Mapping[str, Subset]] = SUBSETS

    hub_id: str = "xinrongzhang2022/InfiniteBench"
    revision: str | None = "90f0394333616266d9fe85824ceaf505093cbaa5"
    split: str = "test"
    subset: str = "kv_retrieval"
    chat_wrap: bool = True
    truncate: Truncation = "halves"

    @property
    def uses_chat_template(self) -> bool:  # type: ignore[override]
        return self.chat_wrap

    @property
    def source(self) -> Members:
        return Members(**vars(super().source), member=self.subset, hub_file=f"{self.subset}.jsonl")

    def example(self, row: dict[str, Any], where: str) -> Example:
        context = text(row, "context", where, "data_files")
        question = text(row, "input", where, "data_files", empty=True)
        answers = answers_of(row, where)
        values = {"input": question, "question": question} | self._found(question, where)
        if "{OPTION_A}" in SUBSETS[self.subset].prompt:
            options = texts(row, "options", where, 4)
            values |= {f"OPTION_{letter}": option for letter, option in zip(LETTERS, options, strict=False)}
            answers = _with_letter(answers, options, where)
        before, _, after = SUBSETS[self.subset].prompt.partition("{context}")
        before, after, begun = (filled_in(piece, values) for piece in (before, *after.partition("{answer}")[::2]))
        example = self.ask(row_id(row, "id", context, question), (before, context, ""), after + begun, str(answers[0]))
        check_words(SUBSETS[self.subset].grader, answers, where)
        return replace(example, begun=begun, info={"answers": answers})

    def _found(self, question: str, where: str) -> dict[str, str]:
        """What the official scripts find in the input of two tasks."""
        pattern = {"code_run": r"func_[0-9]+\(\-?[0-9]+\)", "math_find": "The .+ of"}.get(self.subset)
        if pattern is None:
            return {}
        match = re.search(pattern, question)
        if match is None:
            raise ConfigError(
                f"{where}: field 'input' names no {self.subset} problem (no {pattern}), got {question!r:.80}"
            )
        if self.subset == "code_run":
            return {"func_call": match.group(), "func": match.group().split("(")[0]}
        return {"prefix": f"What is {match.group().lower()[:-3]} in the following list?"}

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return {"score": 100 * SUBSETS[self.subset].grader(output, example.info["answers"])}

    def corrected(self) -> tuple[str, ...]:
        """The grader of names (`any_stands_in`), which took the first name alone and none of several words."""
        return ("any_name",) if SUBSETS[self.subset].grader is any_stands_in else ()

    def check_options(self) -> None:
        super().check_options()
        if SUBSETS[self.subset].grader is rouge_lsum:
            check_rouge_installed()


def filled_in(part: str, values: Mapping[str, str]) -> str:
    """A part of a prompt with its {names} filled in; other braces stay, also in values."""
    return re.sub(r"\{(\w+)\}", lambda name: values.get(name.group(1), name.group()), part)


def answers_of(row: Mapping[str, Any], where: str, field: str = "answer") -> list[Any]:
    """The right answers of a row: texts, numbers or lists of numbers; at least one."""
    given = row.get(field)
    answers = list(given) if isinstance(given, list | tuple) else [given]
    if not answers or any(answer is None or (isinstance(answer, str) and not answer.strip()) for answer in answers):
        raise misshapen(row, field, where, "an answer, or a list of answers")
    return answers


def check_right(grader: Grader, answers: Sequence[Any], where: str, field: str = "answer") -> None:
    """ConfigError where the grader finds none of the right answers right: it drops all of their words."""
    if not any(grader(str(answer), answers) for answer in answers):
        raise ConfigError(
            f"{where}: field {field!r} has {answers!r:.80}, of which the official grader leaves nothing that an answer "
            "could equal; correct the row, or leave it out"
        )


def check_words(grader: Grader, answers: Sequence[Any], where: str) -> None:
    """As `check_right`, of graders that drop punctuation or articles."""
    if grader is rouge_lsum:  # a second for a long summary: its letters and digits are what it keeps
        check_right(lambda said, _: float(bool(re.search("[A-Za-z0-9]", said))), answers, where)
    elif grader in (f1, f1_of_characters):
        check_right(grader, answers, where)


def _with_letter(answers: list[Any], options: list[str], where: str) -> list[str]:
    """[text of the right option, its letter]."""
    if len(answers) == 2 and answers[1] in LETTERS:
        return answers
    if answers[0] not in options:
        raise ConfigError(f"{where}: the answer {answers[0]!r:.60} is none of the options")
    return [answers[0], LETTERS[options.index(answers[0])]]
