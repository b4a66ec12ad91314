"""Mathematics with a final answer in a box, and the one grader of such answers.

`grade` reads the last box behind the thinking, if it is closed. Texts without one are of three kinds: the model
stopped, was cut off, or went round in a circle until it was cut off. Whole numbers are compared as such, expressions
after a plain normalisation and then by math-verify, which is given the last box alone. `same_value` reads the same box
as a careful person does.
"""

from __future__ import annotations

import functools
import logging
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from kvexp.tasks.base import Example, Positive, Rules, SampledTask, Truncation, once, row_id
from kvexp.tasks.data import misshapen, text
from kvexp.tasks.metrics import COPIES, LONGEST, first_loop, with_plain_minus
from kvexp.util.errors import ConfigError

Answer = Literal["integer", "expression", "number"]
RIGHT, WRONG, NO_BOX, TRUNCATED, LOOPING = "right", "wrong", "no box", "truncated", "looping"
CLASSES = (RIGHT, WRONG, NO_BOX, TRUNCATED, LOOPING)

# --- the box

_ENDS_OF_THINKING = re.compile(r"</[\w:|-]*(?:think|thought|reason)[\w:|-]*>|\[/\w*think\w*\]|◁/think▷", re.IGNORECASE)
_BEGINS_THINKING = re.compile(r"<(?:[\w:|-]*(?:think|thought|reason)[\w:|-]*)>|\[\w*think\w*\]|◁think▷", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_CUT_BOX = re.compile(r"\\(?:boxe?|fbo)$")
_UNBRACED = re.compile(r"[^\s${}\\,;]+(?<!\.)")


def without_thinking(text: str) -> str:
    """The text behind the last end of thinking; in front of a beginning that has no end."""
    ends = list(_ENDS_OF_THINKING.finditer(text))
    if ends:
        text = text[ends[-1].end() :]
    return _BEGINS_THINKING.split(text, maxsplit=1)[0]


def last_box(text: str) -> str | None:
    r"""The content of the last \boxed or \fbox of a text that is not empty; None where the text ends inside its last.

    Of a box inside a box, the inner one. A box without braces (`\boxed 5`) is what stands up to the next white space.
    """
    if _CUT_BOX.search(text):
        return None
    boxes = list(_BOX.finditer(text))
    for box in reversed(boxes):
        if text[box.end() : box.end() + 1] == "{":
            inside = _braced(text, box.end())
        else:
            bare = _UNBRACED.match(text, box.end())
            inside = bare.group() if bare else None
        if inside is None and box is boxes[-1] and text[box.end() : box.end() + 1] in ("{", ""):
            return None
        if inside is not None and inside.strip(" \n\t{}$"):
            return inside.strip()
    return None


def _braced(text: str, start: int) -> str | None:
    """What stands between the brace at `start` and its partner; None where it has none."""
    depth, place = 0, start
    while place < len(text):
        letter = text[place]
        if letter == "\\":  # \{ and \} are letters of the formula
            place += 1
        elif letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            if not depth:
                return text[start + 1 : place]
        place += 1
    return None


_TAIL = (COPIES + 1) * LONGEST  # words, or letters, that a loop at the end is looked for in


def ends_in_loop(text: str) -> bool:
    """Whether the end of a text is a passage that comes COPIES times in a row, of words or of letters.

    The last word may be cut off.
    """
    words, letters = text.split()[-_TAIL:], list(text.strip()[-_TAIL:])
    for tail in (words, letters):
        loop = first_loop(tail[::-1])
        if loop is not None and loop[0] <= 1:
            return True
    return False


# --- right or wrong

_WRAPS = re.compile(r"\\(?:text|mathrm|mathbf|textbf|textit|mathit|mbox|operatorname|rm|bf)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[,;:! ]|~|\\quad|\\qquad|\\hspace\{[^}]*\}|\\displaystyle|\\dots\b|\s+")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?")
_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degree\b|°")
_TRAILING_UNIT = re.compile(r"(?<=[\d}])\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$")


def normalised(answer: str) -> str:
    r"""An answer without what changes no value: white space, dollars, sizes of brackets, units behind a number,
    degrees, percent signs, commas of thousands, missing braces; \dfrac is \frac, \frac12 is \frac{1}{2}.
    """
    cleaned = answer.strip().rstrip(".").strip()
    for sign, plain in (("\\left", ""), ("\\right", ""), ("\\$", ""), ("$", ""), ("\\%", ""), ("%", "")):
        cleaned = cleaned.replace(sign, plain)
    cleaned = re.sub(r"\\[dt]frac", r"\\frac", cleaned)
    cleaned = _DEGREES.sub("", cleaned)
    while (shorter := _TRAILING_UNIT.sub("", cleaned.strip())) != cleaned.strip():
        cleaned = shorter
    cleaned = _WRAPS.sub(r"\1", cleaned)
    cleaned = _SPACES.sub("", cleaned)
    cleaned = _braced_arguments(cleaned)
    if _THOUSANDS.fullmatch(cleaned):
        cleaned = cleaned.replace("{,}", "").replace(",", "")
    if re.fullmatch(r"-?\.\d+", cleaned):
        cleaned = cleaned.replace(".", "0.")
    if re.fullmatch(r"-?\d+\.0*", cleaned):
        cleaned = cleaned.partition(".")[0]
    cleaned = re.sub(r"^(-?)0+(?=\d)", r"\1", cleaned)
    if letter := re.fullmatch(r"\(([A-Za-z])\)", cleaned):  # of a multiple choice
        cleaned = letter[1]
    return cleaned.lower() if cleaned.isalpha() else cleaned


def _braced_arguments(words: str) -> str:
    r"""Arguments of one letter in braces: \frac12 is \frac{1}{2}, \sqrt2 is \sqrt{2}, x^2 is x^{2}."""
    words = re.sub(r"(\\(?:frac|sqrt)|[\^_])([A-Za-z0-9])", r"\1{\2}", words)
    return re.sub(r"(\\frac\{[^{}]*\})([A-Za-z0-9])", r"\1{\2}", words)


def as_integer(answer: str) -> int | None:
    """The whole number that an answer is, digits alone, behind an equals sign if there is one; None if it is none."""
    right_side = normalised(answer).rpartition("=")[2]
    return int(right_side) if re.fullmatch(r"-?\d+", right_side) else None


def as_number(answer: str) -> float | None:
    """The number that an answer is, with a unit or not; None if it holds none or several."""
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", with_plain_minus(answer).replace("{,}", ","))
    numbers = re.findall(r"-?\d+(?:\.\d+)?|-?\.\d+", plain)
    return float(numbers[0]) if len(numbers) == 1 else None


_BASE = re.compile(r"\w+_\{(?:\\text)?\{?(\w+)\}?\}")  # 4210_{5}: a number and what it is to the base of
LONGEST_BOX = 300  # letters of an expression that math-verify is asked about: nobody's answer is longer
SECONDS = 5.0  # for one comparison
# What sympy would compute without end: towers of powers, powers and factorials of large numbers.
_TOO_LARGE = re.compile(r"\^\{?[^{}]*\^|\^\s*\{?\s*\d{4,}|\d{4,}\s*!|!\s*!")


def same_expression(answer: str, reference: str, relations: bool = False) -> bool:
    """Whether two LaTeX expressions have one value, by math-verify, each boxed by itself.

    relations=True: an inequality equals the interval of its solutions.
    A comparison that takes longer than SECONDS, and one of expressions too large to compute, finds no equality.
    """
    if max(len(answer), len(reference)) > LONGEST_BOX or any(map(_TOO_LARGE.search, (answer, reference))):
        return False
    import math_verify

    logger = logging.getLogger("math_verify")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that its own clock is off: it would put out the one of `timeout_s`
    try:
        with _at_most(SECONDS):
            sides = [math_verify.parse(f"\\boxed{{{side}}}", parsing_timeout=0) for side in (reference, answer)]
            how = {"timeout_seconds": 0, "allow_set_relation_comp": relations}
            return bool(all(sides) and math_verify.verify(*sides, **how))
    except _TookTooLong:
        return False
    finally:
        logger.setLevel(level)


class _TookTooLong(BaseException):
    """The time of a comparison is up. No `Exception`: math-verify goes on after any of those."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise _TookTooLong in the block after so many seconds; without a limit where there are no alarms.

    An alarm that was set before goes on afterwards, with the time it had left.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: Any) -> None:
        raise _TookTooLong

    handler, start = signal.signal(signal.SIGALRM, ring), time.monotonic()
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - start), 1e-3), again)


def check_math_verify_installed() -> None:
    """ConfigError where expressions cannot be compared: without math-verify the same answers would score otherwise."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"expressions are compared by the package math-verify ({error}); install it with: "
            "pip install kvexp[benchmarks]"
        ) from error


def is_right(box: str, reference: str, answer: Answer) -> bool:
    """Whether the content of a box is the reference."""
    if answer == "integer":
        whole = as_integer(box)
        return whole is not None and whole == int(reference)
    if answer == "number":
        number = as_number(normalised(box).rpartition("=")[2])
        return number is not None and number == float(reference)
    plain = normalised(box), normalised(reference)
    if plain[0] == plain[1]:
        return True
    bases = {base[1] for base in map(_BASE.fullmatch, plain) if base}  # math-verify drops them
    return len(bases) < 2 and same_expression(box, reference)


# --- as a careful person reads it

_PLAIN_SIGNS = {
    **{"\u2264": r"\le ", "\u2265": r"\ge ", "<=": r"\le ", ">=": r"\ge ", "\u2208": r"\in ", "\u222a": r"\cup "},
    **{"\u221e": r"\infty ", "\u03c0": r"\pi ", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00b1": r"\pm "},
    **{"\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}"},
    **{"\u2205": r"\emptyset ", r"\varnothing": r"\emptyset ", r"\text{ percent}": r"\%", " percent": r"\%"},
    **{
        "\u2212": "-",
        "\u2044": "/",
        "\u00f7": "/",
        "{,}": ",",
        r"\(": "",
        r"\)": "",
        r"\[": "",
        r"\]": "",
        r"\left": "",
    },
    **{r"\right": "", r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\leqslant": r"\le ", r"\geqslant": r"\ge "},
}
_RAISED = dict(
    zip(map(ord, "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b"), "0123456789-", strict=True)
)
_POWER = re.compile(f"[{''.join(map(chr, _RAISED))}]+")
_PI = re.compile(r"(?<![A-Za-z\\])pi\b")
_ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|(\\w+))")
_NARROW = re.compile(r"(?<!\\)\\[,;: ]|~|\\quad|\s+")
_GROUPS = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?!\d| \d)")
_MIXED = re.compile(r"(?<![\d.}])(\d+) ?\\frac\{(\d+)\}\{(\d+)\}|(?<![\d.}])(\d+) (\d+)/(\d+)(?!\d)")
_APART = re.compile(r"\d \.?\d|^\d{1,3}(?:, \d{3})+$")
_NUMERAL = re.compile(r"\(?(\w+)\)?_\{(?:\\text)?\{?(\w+)\}?\}")
_NAME = re.compile(r"\\?[A-Za-z][\w{}]*(?:\([^()=]*\))?=")
_FRACTION = re.compile(r"(-?)(?:\\frac\{(-?\d+)\}\{(\d+)\}|(\d+)/(\d+)|(\d*\.?\d+(?:[eE][-+]?\d\d?)?))")
_SCIENTIFIC = re.compile(r"(-?)(?:([\d.]+)\\(?:times|cdot))?10\^\{?(-?\d{1,2})\}?")  # 1.5\times10^{3}
_SET, _TUPLE = re.compile(r"\\\{[^\\:|<>]*\\\}"), re.compile(r"[(\[].*,.*[)\]]")
_SCALE = re.compile("hundred|thousand|million|billion|trillion|dozen")
_WORDS = re.compile(r"(?<=\d)(?: [A-Za-z]{3,})+$")
_OR = re.compile(r"\\text\{ *or *\}|\bor\b|\\cup|\\lor|\\vee")


def _improper(mixed: re.Match[str]) -> str:
    """A mixed number as a fraction: 3 1/2 is \\frac{7}{2}; what stands there, where it is none (2 4/2, 2 1/0)."""
    whole, over, under = map(int, filter(None, mixed.groups()))
    return f"\\frac{{{whole * under + over}}}{{{under}}}" if over < under else mixed.group()


def plainly_written(answer: str) -> str:
    r"""An answer in LaTeX that math-verify knows: \le for a sign of Unicode, \frac{7}{2} for 3 1/2, 10000 for 10 000.

    Marks around it are left out. A space between two digits that parts no thousands stays: 4 2 is no number, and
    neither is 32, 349.
    """
    text = re.sub(r"\\!\s*", "", answer)
    for sign, plain in _PLAIN_SIGNS.items():
        text = text.replace(sign, plain)
    text = _POWER.sub(lambda power: f"^{{{power.group().translate(_RAISED)}}}", _PI.sub(r"\\pi ", text))
    text = _ROOT.sub(lambda root: f"\\sqrt{{{root[1] or root[2]}}}", with_plain_minus(text))
    text = _NARROW.sub(" ", text).lstrip(" $*").rstrip(" .,;:$*")
    text = re.sub(r" +(?=\\(?:text|mathrm|mbox)\{)", "", text)  # in front of a unit
    text = _GROUPS.sub(lambda number: number.group().replace(" ", ""), text)
    return _MIXED.sub(_improper, _braced_arguments(text))


def fraction_of(answer: str) -> Fraction | None:
    """The value of a number or fraction, named (x=) or not, percent signs and units left out; None of anything else."""
    plain = re.sub(r"^[({]([^(){}]*)[)}]$", r"\1", _NAME.sub("", normalised(answer))).removeprefix("+")
    if scientific := _SCIENTIFIC.fullmatch(plain):
        plain = f"{scientific[1]}{scientific[2] or 1}e{scientific[3]}"
    number = _FRACTION.fullmatch(plain)
    if number is None or "0" in (number[3], number[5]):
        return None
    sign, over, under, before, behind, decimal = number.groups()
    value = Fraction(decimal) if decimal else Fraction(int(over or before), int(under or behind))
    return -value if sign else value


def same_value(box: str, reference: str, answer: Answer) -> bool:
    r"""Whether the content of a box has the reference's value, read as a careful person reads it.

    Beyond `is_right`: 2\le x\le 3 is [2,3], 3 1/2 is \frac72, 10\% is 0.1 and 42, is 42; 4210 is not 4210_5, and 4 2 is
    not 42.
    """
    said, wanted = plainly_written(box), plainly_written(reference)
    if _APART.search(said) or _APART.search(wanted):
        return said == wanted
    numerals = [numeral and numeral.groups() for numeral in (_NUMERAL.fullmatch(normalised(s)) for s in (said, wanted))]
    if any(numerals):  # 4210_5: digits to a base
        return numerals[0] == numerals[1]
    if any(_SET.fullmatch(left) and _TUPLE.fullmatch(right) for left, right in ((said, wanted), (wanted, said))):
        return False
    if answer != "expression":  # the sum that an exam asks for may be spelt out: m+n=42
        said = said.rpartition("=")[2].strip()
    if _SCALE.findall(said) != _SCALE.findall(wanted):  # 5 million is not 5
        return False
    if answer == "integer":
        said = _WORDS.sub("", said)
    value, right = fraction_of(said), fraction_of(wanted)
    if value is not None and right is not None:
        shares = value / (100 if said.endswith("%") else 1), right / (100 if wanted.endswith("%") else 1)
        if value == right or shares[0] == shares[1]:
            return True
    if answer == "integer":
        return False
    if answer == "number":
        return is_right(said, reference, answer)
    if normalised(said) == normalised(wanted) or same_expression(said, wanted, relations=True):
        return True
    first, second = (_OR.split(side) for side in (said, wanted))  # x<0 or x>1: math-verify compares one at a time
    same = [[same_expression(left, right, relations=True) for right in second] for left in first if len(second) > 1]
    return len(first) == len(second) > 1 and all(map(any, same)) and all(map(any, zip(*same, strict=True)))


@functools.lru_cache(maxsize=1024)  # a row asks for its score and for its class
def grade(output: str, reference: str, answer: Answer, cut: bool) -> tuple[str, str | None]:
    """(one of CLASSES, what stands in the box) of an answer. cut: whether its number of tokens ended it."""
    after = without_thinking(output)
    box = last_box(after)
    if box is not None:
        return RIGHT if is_right(box, reference, answer) else WRONG, box
    if not cut:
        return NO_BOX, None
    return LOOPING if ends_in_loop(output) else TRUNCATED, None


# --- the task


@dataclass(frozen=True, kw_only=True)
class Mathematics(SampledTask):
    r"""Solve a problem whose final answer is put into \boxed{}; rows {problem, answer}, and perhaps an id and a year.

    answer: what is compared, `integer` (AIME: digits alone, 0 to 999), `expression` (MATH: LaTeX, by math-verify) or
    `number` (GSM8K: the number behind #### of a solution). Names of columns are matched whatever their case, since the
    copies of a data set differ in it. The prompt is one user turn, `template` with the problem in it; `answer_prefix`
    begins a base model's answer and is left out for a chat model. `accuracy` is 100 where the last box is right by the
    benchmark's rule (`grade`), `accuracy_by_value` where it has the right value as a careful person reads it
    (`same_value`); a row's info has its class (`graded`), what the box holds (`boxed`), and of which item and sample it
    is.

    Prompt and rule for AIME are MathArena's (arXiv:2505.23281): no system prompt, no answer from outside a box. A
    prompt has 50 to 300 tokens, so what is evicted is the model's own chain: take budget=tokens. `keep=prompt` spares
    the problem.
    """

    name: ClassVar[str] = "mathematics"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "accuracy_by_value")
    uncut: ClassVar[str] = "a problem cut short is another problem"
    rules: ClassVar[Rules] = (once("template", "problem"),)

    split: str = "test"
    answer: Answer = "expression"
    problem_field: str = "problem"
    answer_field: str = "answer"
    id_field: str = "id"
    year: int | None = None  # of an exam
    template: str = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    answer_prefix: str = "\n\nSolution:"
    max_new_tokens: Positive = 32768
    truncate: Truncation = "skip"

    def example(self, row: dict[str, Any], where: str) -> Example:
        columns = {name.lower(): name for name in row}
        problem_field, answer_field, id_field = (
            columns.get(name.lower(), name) for name in (self.problem_field, self.answer_field, self.id_field)
        )
        problem = text(row, problem_field, where, "problem_field").strip()
        reference = self.reference_of(row, answer_field, where)
        before, _, after = self.template.partition("{problem}")
        prompt = before + problem + after + self.answer_prefix
        info = {} if self.year is None else {"year": self.year}
        name = row_id(row, id_field, problem)
        return Example(name, prompt, reference, info=info)

    def reference_of(self, row: dict[str, Any], field: str, where: str) -> str:
        """The right answer of a row, as text; ConfigError for one that no answer could equal."""
        reference = row.get(field)
        if isinstance(reference, int | float) and not isinstance(reference, bool):
            reference = f"{reference:g}" if isinstance(reference, float) else str(reference)
        if not isinstance(reference, str) or not reference.strip():
            wanted = "a text or a number (task.answer_field names its column)"
            raise misshapen(row, field, where, wanted)
        if self.answer == "number":
            number = as_number(reference.rpartition("####")[2])
            if number is None:
                raise ConfigError(f"{where}: field {field!r} has no single number behind ####, got {reference[-60:]!r}")
            return f"{number:g}" if abs(number) < 1e6 else str(number)
        if self.answer == "integer":
            whole = as_integer(reference)
            if whole is None or not 0 <= whole <= 999:
                raise ConfigError(
                    f"{where}: field {field!r} must be a whole number from 0 to 999 with task.answer=integer, got "
                    f"{reference[:60]!r}"
                )
            return str(whole)
        reference = last_box(reference) or reference.strip()
        if not normalised(reference):
            raise ConfigError(f"{where}: field {field!r} has {reference!r}, of which nothing is left to compare with")
        return reference

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        graded, box = grade(output, reference, self.answer, False)
        by_value = box is not None and same_value(box, reference, self.answer)
        return {"accuracy": 100.0 * (graded == RIGHT), "accuracy_by_value": 100.0 * by_value}

    def corrected(self) -> tuple[str, ...]:
        """The open box, in front of which an earlier box was graded; `accuracy_by_value`, which was new; the minus
        signs of numbers other than the hyphen, which were none.
        """
        return ("open_box", "by_value", *(("minus",) if self.answer == "number" else ()))

    def of_answer(self, output: str, reference: str, finish_reason: str | None = None) -> dict[str, Any]:
        graded, box = grade(output, reference, self.answer, finish_reason == "length")
        return {"graded": graded} | ({} if box is None else {"boxed": box})

    def check_options(self) -> None:
        super().check_options()
        if self.answer == "expression":
            check_math_verify_installed()
