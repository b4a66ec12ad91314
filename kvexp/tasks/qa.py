"""Tasks with a right answer: questions about texts of one's own and about kvexp's articles, school mathematics."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar

from kvexp.tasks.articles import articles, articles_digest
from kvexp.tasks.base import (
    AFTER_EVICTION,
    Example,
    FramedQuestions,
    Positive,
    QuestionTask,
    Rules,
    SampledTask,
    Truncation,
    When,
    row_id,
)
from kvexp.tasks.data import misshapen, text
from kvexp.tasks.metrics import beyond_ascii, contains, needs_marks, qa_f1, with_plain_minus
from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast
from kvexp.util.files import path_of


@dataclass(frozen=True, kw_only=True)
class ContextQA(FramedQuestions):
    """Answer questions about texts of `data_files`; rows {"context", "questions": [{"question", "answers"}, ...]}, or
    {"context", "question", "answers"} as in SQuAD, and perhaps an id. `answers`: a text, or a list of texts that are
    all right. An example per question, `limit` counts questions.

    Scores in percent, the best over the answers: `f1` of the words of both (SQuAD's), `exact`, whether an answer stands
    in the model's word for word. Signs that tell names and numbers apart count (C# and C, -5 and 5), and so does an
    article or sign that is all of an answer (`kvexp.tasks.metrics.compared`). Where a question or an answer has letters
    beyond ASCII, words of any script count (`kvexp.tasks.metrics.words_of`), and the row's info says so (`words`:
    unicode). All questions count, also where the full cache does not answer.
    """

    name: ClassVar[str] = "context_qa"
    ordered: ClassVar[str] = "questions"
    metrics: ClassVar[tuple[str, ...]] = ("f1", "exact")

    question: When = "after_eviction"
    context_field: str = "context"
    questions_field: str = "questions"
    id_field: str = "id"
    max_new_tokens: Positive = 64

    def split_row(self, row: dict[str, Any], where: str) -> Iterable[tuple[str, dict[str, Any]]]:
        for number, entry in enumerate(entries(row, self.questions_field, where)):
            yield f"question {number} of {where}", {"row": row, "asked": entry, "number": number}

    def example(self, row: dict[str, Any], where: str) -> Example:
        context = text(row["row"], self.context_field, where, "context_field")
        question, answers = text(row["asked"], "question", where, "questions_field"), answers_of(row["asked"], where)
        alone = context if self.questions_field in row["row"] else f"{context}\n{question}"
        name = f"{row_id(row['row'], self.id_field, alone)} question {row['number']}"
        example = self.about(name, context, question, answers[0])
        words = {"words": "unicode"} if beyond_ascii("".join((question, *answers))) else {}
        return replace(example, info={"answers": answers, "question": row["number"], **words})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        answers = example.info["answers"]
        unicode = "words" in example.info
        best = max(qa_f1(output, answer, unicode, marks=True) for answer in answers)
        exact = max(contains(output, answer, unicode, marks=True) for answer in answers)
        return {"f1": 100 * best, "exact": 100 * exact}

    def corrected(self) -> tuple[str, ...]:
        """The marks of answers that need them (`needs_marks`), without which they were compared."""

        def needs(row: dict[str, Any]) -> bool:
            info = self.example(row, "").info
            return any(needs_marks(answer, "words" in info) for answer in info["answers"])

        return ("marks",) if self.any_row(needs) else ()


def entries(row: Mapping[str, Any], field: str, where: str) -> list[Mapping[str, Any]]:
    """The questions of a row: a list of objects, at least one; the row itself, where it holds one question."""
    if field not in row and "question" in row:
        return [row]
    given = row.get(field)
    if not isinstance(given, list | tuple) or not given or not all(isinstance(entry, Mapping) for entry in given):
        wrong = misshapen(row, field, where, 'a list of objects {"question", "answers"}')
        raise ConfigError(f"{wrong}; correct the row, or name the field that holds them with task.questions_field")
    return list(given)


def answers_of(asked: Mapping[str, Any], where: str) -> list[str]:
    """The right answers to a question: field `answers` or `answer`, a text or a list of texts, none of them empty.

    SQuAD has the list in the field `text` of `answers`.
    """
    given = asked.get("answers", asked.get("answer"))
    given = given.get("text") if isinstance(given, Mapping) else given
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(t, str) and t.strip() for t in texts):
        shown = f"got {given!r:.80}" if given is not None else f"it has: {', '.join(asked)}"
        raise ConfigError(f"{where}: field 'answers' must be a text or a list of texts, none of them empty, {shown}")
    return list(texts)


@dataclass(frozen=True, kw_only=True)
class NewsQuestions(FramedQuestions):
    """Questions with one short answer each, that stands in the context letter for letter.

    A question counts only where the full cache answers it (`only_answered`): the reference stands in the answer word
    for word, both without case, punctuation and articles. What a model cannot do with all of its cache says nothing
    about what it loses with less.
    """

    generated: ClassVar[bool] = True
    only_answered: ClassVar[bool] = True
    ordered: ClassVar[str] = "questions"

    def answered(self, output: str, example: Example) -> bool:
        return bool(contains(output, example.reference))


@dataclass(frozen=True, kw_only=True)
class NewsQA(NewsQuestions):
    """Answer four questions about each of 36 fictional articles, one to each quarter of its words; an example each.

    With question=after_eviction, the default here, an article is prefilled and evicted once for all of its questions,
    and nobody knows them before. `limit` counts questions.

    Scores in percent: `exact`, whether the reference stands in the answer word for word, as in the task needle; `f1`
    of the words of both (SQuAD's), which a whole sentence as an answer lowers for every method alike.
    """

    name: ClassVar[str] = "news_qa"
    metrics: ClassVar[tuple[str, ...]] = ("exact", "f1")

    question: When = "after_eviction"
    max_new_tokens: Positive = 32

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        cells = ((article, number) for article in articles() for number in range(len(article.questions)))
        for article, number in islice(cells, self.limit):
            yield f"article {article.id}, question {number}", {"article": article, "number": number}

    def example(self, row: dict[str, Any], where: str) -> Example:
        article, number = row["article"], row["number"]
        question = article.questions[number]
        example = self.about(f"{article.id} question {number}", article.text, question.question, question.answer)
        return replace(example, info={"article": article.id, "question": number, "paragraph": question.paragraph})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return {"exact": 100 * contains(output, reference), "f1": 100 * qa_f1(output, reference)}

    def articles_read(self) -> set[str]:
        return {row["article"].id for _, row in self.rows()}

    def fingerprint(self) -> str:
        return f"articles:{articles_digest()}"


ROOT = Path(__file__).resolve().parents[2]
_UNSIGNED = re.compile(r"\d*\.?\d+")
_SIGNED = re.compile(r"(?:(?<![\w.)])-)?\d*\.?\d+")  # the minus of 5-3 is none of a number


@dataclass(frozen=True, kw_only=True)
class GSM8K(SampledTask, QuestionTask):
    """Solve a word problem after worked examples; rows {"question", "answer"}, 1,319 in the test split
    (Cobbe et al., arXiv:2110.14168).

    The examples are the hardest of chain-of-thought-hub (github.com/FranxYao/chain-of-thought-hub, MIT; Fu et al.,
    arXiv:2210.00720): a text of "Question: ..." blocks parted by empty lines, of which the first `shots` are used. The
    file here has the 8 of nine reasoning steps and the 2 shorter ones that PQCache (arXiv:2407.12820) adds, which
    makes prompts of 3.7k Llama tokens. An answer counts up to the next "Question:"; its last number, without commas,
    must equal the last one of the solution. No instruction, no chat template (`chat_wrap`).

    What PQCache's script does besides, switches that are off here: separator="\\n" (no empty line in front of the
    question), signed=false (-10 and 10 are the same; two solutions are negative).
    """

    name: ClassVar[str] = "gsm8k_cot"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy",)
    rules: ClassVar[Rules] = (
        (
            lambda c: c.shots == 0 and c.question == AFTER_EVICTION,
            "task.question=after_eviction needs a context to evict from: set task.shots to 1 or more",
        ),
    )

    hub_id: str = "openai/gsm8k"
    hub_config: str | None = "main"
    split: str = "test"
    prompt_file: str = "kvexp/conf/task/gsm8k_cot.txt"
    shots: Annotated[int, AtLeast(0)] = 8
    separator: str = "\n\n"
    signed: bool = True
    chat_wrap: bool = False
    max_new_tokens: Positive = 256
    truncate: Truncation = "skip"

    @property
    def uses_chat_template(self) -> bool:  # type: ignore[override]
        return self.chat_wrap

    @cached_property
    def lesson(self) -> str:
        """The worked examples in front of every question; read once, as the fingerprint has them."""
        path = path_of(self.prompt_file, "task.prompt_file")
        path = path if path.exists() else ROOT / path
        try:
            blocks = [
                block.strip("\n") for block in re.split(r"\n{2,}", path.read_text(encoding="utf-8")) if block.strip()
            ]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"task.prompt_file={self.prompt_file}: cannot read it: {error}") from error
        if len(blocks) < self.shots:
            raise ConfigError(f"task.shots={self.shots}, but task.prompt_file={self.prompt_file} has {len(blocks)}")
        return "\n\n".join(blocks[: self.shots])

    def example(self, row: dict[str, Any], where: str) -> Example:
        question = text(row, "question", where, "data_files")
        solution = text(row, "answer", where, "data_files")
        if last_number(solution, self.signed) is None:
            raise ConfigError(f"{where}: field 'answer' has no number to compare with")
        question_line = f"{self.separator}Question: {question}\n" if self.shots else f"Question: {question}\n"
        return self.ask(row_id(row, "id", question), ("", self.lesson, ""), question_line, solution)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        """100 if the last number of the answer is the solution's."""
        number = last_number(output.partition("\nQuestion:")[0], self.signed)
        return {"accuracy": 100.0 * (number == last_number(reference, self.signed))}

    def corrected(self) -> tuple[str, ...]:
        """The minus signs other than the hyphen, which were no signs."""
        return ("minus",) if self.signed else ()

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {hashlib.sha256(self.lesson.encode()).hexdigest()[:16]}"

    def check_options(self) -> None:
        super().check_options()
        self.lesson  # noqa: B018  # a file that cannot be read shows here


def last_number(words: str, signed: bool = True) -> float | None:
    """The last number of a text, commas left out, a minus of any shape its sign; None if there is none."""
    words = with_plain_minus(words) if signed else words
    numbers = (_SIGNED if signed else _UNSIGNED).findall(words.replace(",", ""))
    return float(numbers[-1]) if numbers else None
