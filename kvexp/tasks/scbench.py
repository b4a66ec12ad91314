"""SCBench (Li et al., arXiv:2412.10319): several questions about one long text, each of a copy of the evicted cache
(multi-request) or as the turns of one conversation (multi-turn); from its files, or generated in its form.

Prompts and graders are of github.com/microsoft/MInference, folder scbench (MIT), at commit fb56c91, to the letter, but
for the blank line before a question of the multi-request mode, where the script has nothing.
"""

from __future__ import annotations

import json
import random
import re
import string
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Annotated, Any, ClassVar

from kvexp.tasks.base import (
    CountedTask,
    Example,
    Positive,
    Rules,
    SharedContextTask,
    SubsetTask,
    Truncation,
    Turn,
    When,
    among,
    depths_of,
    filled,
    kinds_of,
    most_units,
    quarter,
    row_id,
    seed_of,
)
from kvexp.tasks.data import DataSource, Members, misshapen, text
from kvexp.tasks.dialogues import DialogueTask
from kvexp.tasks.infinitebench import (
    GRADERS,
    LETTERS,
    Grader,
    answers_of,
    check_words,
    first_integer,
    rouge_lsum,
)
from kvexp.tasks.metrics import check_rouge_installed
from kvexp.tasks.ruler import NOISE
from kvexp.util.errors import ConfigError
from kvexp.util.fields import Range


def stands_in(output: str, answers: Sequence[Any]) -> float:
    """Whether the answer stands in the output, letter for letter."""
    return float(str(answers[0]) in output)


def share_of(output: str, answers: Sequence[Any]) -> float:
    """The share of the answers that stand in the output, whatever their case, rounded to a hundredth."""
    said = output.lower()
    return round(sum(str(answer).lower() in said for answer in answers) / len(answers), 2)


@dataclass(frozen=True)
class Subset:
    """A task. before: in front of the context; question: with {input}, and {OPTION_A} to {OPTION_D} where there are
    options.
    """

    grader: Grader
    new_tokens: int
    before: str = ""
    question: str = "{input}"


SUBSETS: Mapping[str, Subset] = kinds_of("scbench", Subset, stands_in, share_of, *GRADERS)
# A row of a mixed task is graded as the task that its turn names.
MIXED: Mapping[str, Grader] = {"scbench_summary": rouge_lsum, "scbench_passkey": first_integer}
CODE = "the official grader parses code of five languages with tree-sitter: not covered here"
LEFT_OUT = {"scbench_repoqa": CODE, "scbench_repoqa_and_kv": CODE}


@dataclass(frozen=True)
class Asked:
    """A turn: what is asked, the right answers, and the name of its task in a mixed one."""

    message: str
    answers: Sequence[Any]
    task: str = ""


@dataclass(frozen=True)
class Session:
    """A text and the turns about it; places: where what they ask for begins, in characters of the text."""

    name: str
    context: str
    turns: Sequence[Asked]
    places: Sequence[int] = ()


def session_of(row: Mapping[str, Any], subset: str, conversation: bool, where: str) -> Session:
    """The session of a row. conversation: whether its questions are turns; one task words the first otherwise then."""
    kind = SUBSETS[subset]
    context = text(dict(row), "context", where, "data_files")
    given = row.get("multi_turns")
    if not isinstance(given, list | tuple) or not given or not all(isinstance(turn, Mapping) for turn in given):
        raise misshapen(row, "multi_turns", where, 'a list of objects {"input", "answer"}')
    turns, before = [], kind.before
    for number, turn in enumerate(given):
        here = f"turn {number} of {where}"
        question, answers = text(dict(turn), "input", here, "data_files"), answers_of(turn, here)
        words = kind.question
        if "{OPTION_A}" in words:
            options = turn.get("options")
            if not isinstance(options, list | tuple) or len(options) < 4:
                raise misshapen(turn, "options", here, "a list of 4 texts")
            for letter, option in zip(LETTERS, options, strict=False):
                words = words.replace(f"{{OPTION_{letter}}}", str(option))
            answers = [*answers, *(LETTERS[options.index(answer)] for answer in answers if answer in options)]
        if subset == "scbench_mf":
            target = re.search("The .+ is", question)
            if target is None:
                raise ConfigError(f"{here}: field 'input' names no number (no 'The ... is'), got {question!r:.80}")
            goal = f"What is {target.group().lower()[:-3]}?\n\n"
            before = before or (goal if conversation else f"{question}\n\n")
            question = question if conversation and not number else goal + question
        task = str(turn.get("task") or "")
        check_words(MIXED.get(task, kind.grader), answers, here)
        turns.append(Asked(words.replace("{input}", question), answers, task))
    name = row_id(dict(row), "id", context, *(turn.message for turn in turns))
    return Session(name, before + context, turns)


# Sessions made here, of the forms of three tasks.


def _letters(draws: random.Random, size: int) -> str:
    return "".join(draws.choices(string.ascii_lowercase, k=size))


def keys_and_values(draws: random.Random, units: int, turns: int) -> Session:
    """A JSON object of uuids (InfiniteBench's kv_retrieval): units more pairs than are asked for."""

    def drawn() -> str:
        return str(uuid.UUID(int=draws.getrandbits(128), version=4))

    wanted, shares = [(drawn(), drawn()) for _ in range(turns)], [draws.random() for _ in range(turns)]
    pairs = among(wanted, shares, [(drawn(), drawn()) for _ in range(units)])
    context = f"{SUBSETS['scbench_kv'].before}JSON data:\n{json.dumps(dict(pairs))}"
    questions = [
        Asked(f'Key: "{key}"\nThe value associated with the specified key is: ', [value]) for key, value in wanted
    ]
    return Session("", context, questions, [context.index(key) for key, _ in wanted])


def prefixes(draws: random.Random, units: int, turns: int) -> Session:
    """Strings of 20 letters, one a line: which has this beginning and this end? Others share one of both."""
    wanted, shares = [_letters(draws, 20) for _ in range(turns)], [draws.random() for _ in range(turns)]
    others = []
    for place in range(units):
        like, drawn = wanted[place % turns], _letters(draws, 20)
        others.append((like[:5] + drawn[5:], drawn[:15] + like[15:], drawn)[place // turns % 3])
    context = "Here is a list of strings. I will ask for some of them by how they begin and end.\n\n"
    context += "\n".join(among(wanted, shares, others))
    words = 'Which string begins with "{}" and ends with "{}"? The string is: '
    questions = [Asked(words.format(string[:5], string[15:]), [string]) for string in wanted]
    return Session("", context, questions, [context.index(string) for string in wanted])


def chains(draws: random.Random, units: int, turns: int) -> Session:
    """RULER's variable tracking with as many chains as turns, each of two hops, in lines of noise."""
    values = draws.sample(range(10000, 100000), turns)
    names: dict[str, None] = {}
    while len(names) < 3 * turns:
        names["".join(draws.choices(string.ascii_uppercase, k=5))] = None
    given, turns_asked = list(names), []
    lines: list[tuple[float, str]] = []
    for turn, value in enumerate(values):
        first, second, third = given[3 * turn : 3 * turn + 3]
        chain = (f"VAR {first} = {value}", f"VAR {second} = VAR {first}", f"VAR {third} = VAR {second}")
        lines += zip(sorted(draws.random() for _ in chain), chain, strict=True)
        message = f"Find all variables that are assigned the value {value} in the text above. They are: "
        turns_asked.append(Asked(message, [first, second, third]))
    lines_of_text = among([line for _, line in lines], [share for share, _ in lines], [NOISE] * units)
    context = "Memorize and track the chains of variable assignment hidden in the following text.\n\n"
    context += "\n".join(lines_of_text)
    return Session("", context, turns_asked, [context.index(f"= {value}") for value in values])


@dataclass(frozen=True)
class Made:
    """A kind of generated session."""

    make: Callable[[random.Random, int, int], Session]
    grader: Grader
    new_tokens: int


MADE: Mapping[str, Made] = {
    "kv": Made(keys_and_values, stands_in, 50),
    "prefix_suffix": Made(prefixes, stands_in, 32),
    "vt": Made(chains, share_of, 30),
}


@dataclass(frozen=True, kw_only=True)
class Sessions(SubsetTask):
    """Sessions as examples, one per question: of a task with turns a turn of their conversation, of any other a
    question about their text.
    """

    metrics: ClassVar[tuple[str, ...]] = ("score",)

    def asked(self, session: Session, number: int) -> Example:
        """The example of one question."""
        turn, name = session.turns[number], f"{session.name} turn {number}"
        info = {"turn": number, "distance": number, "answers": list(turn.answers)}
        info |= {"task": turn.task} if turn.task else {}
        reference = self._reference(turn)
        if isinstance(self, SharedContextTask):
            return replace(self.ask(name, ("", session.context, ""), f"\n\n{turn.message}", reference), info=info)
        turns = [Turn(turn.message, self._reference(turn), place) for place, turn in enumerate(session.turns)]
        first = f"{session.context}\n\n{turns[0].message}"
        turns[0] = replace(turns[0], message=first)
        return Example(name, first, reference, number=number, turns=tuple(turns), info=info)

    def _reference(self, turn: Asked) -> str:
        """The answer that stands for the right one: the first, or all where all are asked for."""
        return ", ".join(map(str, turn.answers if self.grader(turn.task) is share_of else turn.answers[:1]))

    def grader(self, task: str) -> Grader:
        """The grader of a turn; task: its own, in a mixed one."""
        raise NotImplementedError

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return {"score": 100 * self.grader(example.info.get("task", ""))(output, example.info["answers"])}


@dataclass(frozen=True, kw_only=True)
class FromFiles(Sessions):
    """Sessions of SCBench's files: id, context, multi_turns."""

    subsets: ClassVar[Mapping[str, Subset]] = SUBSETS

    hub_id: str = "microsoft/SCBench"
    split: str = "test"
    subset: str = "scbench_kv"
    max_turns: Positive | None = None

    def _other_subset(self) -> str:
        why = f"; {self.subset}: {LEFT_OUT[self.subset]}" if self.subset in LEFT_OUT else ""
        return super()._other_subset() + why

    @property
    def source(self) -> DataSource:
        if self.data_files is None and self.revision is None:
            raise ConfigError(
                f"{self.hub_id} is read at one commit: name it with task.revision=COMMIT, or give files with "
                f"task.data_files=PATH ({self.subset}.jsonl, or a folder that holds it)"
            )
        return Members(**vars(super().source), member=self.subset, hub_file=f"data/{self.subset}.jsonl")

    def split_row(self, row: dict[str, Any], where: str) -> Iterable[tuple[str, dict[str, Any]]]:
        session = session_of(row, self.subset, self.has_turns, where)
        session = replace(session, turns=session.turns[: self.max_turns])
        for number in range(len(session.turns)):
            yield f"turn {number} of {where}", {"session": session, "number": number}

    def example(self, row: dict[str, Any], where: str) -> Example:
        return self.asked(row["session"], row["number"])

    def grader(self, task: str) -> Grader:
        return MIXED.get(task, SUBSETS[self.subset].grader)

    def check_options(self) -> None:
        super().check_options()
        if SUBSETS[self.subset].grader is rouge_lsum:
            check_rouge_installed()


@dataclass(frozen=True, kw_only=True)
class SCBench(FromFiles, SharedContextTask):
    """A task of SCBench (arXiv:2412.10319) in its multi-request mode: the text is prefilled and evicted, and each
    question is asked of a copy of that cache (with questions=all; else of a prefill of its own, which is the same).

    `subset`: one of ten; `data_files`: {subset}.jsonl or a folder that holds it. `score` by the official rules, in
    percent, with two exceptions: the official scripts compare answers of scbench_many_shot and scbench_qa_chn with
    single characters of the reference, here they are compared with the reference. A text too long loses its middle.
    """

    name: ClassVar[str] = "scbench"

    question: When = "after_eviction"
    truncate: Truncation = "halves"


@dataclass(frozen=True, kw_only=True)
class SCBenchTurns(FromFiles, DialogueTask):
    """A task of SCBench in its multi-turn mode: the first question stands behind the text, further ones behind the
    answers before them.

    `history`: own, the answers that the run gave; reference, the official protocol, where the true ones stand there
    whatever was answered. A row's `distance` is the number of its turn: everything is in the first message.
    """

    name: ClassVar[str] = "scbench_turns"

    truncate: Truncation = "skip"


@dataclass(frozen=True, kw_only=True)
class Generated(Sessions, CountedTask):
    """Sessions made here in the form of three tasks of SCBench, `size` of each of `lengths`, with `turns` questions
    each; nothing to download.

    `subset`: kv, a JSON object of uuids; prefix_suffix, strings found by beginning and end; vt, RULER's variable
    tracking with a chain for each turn. A length is the tokens that a cache comes to hold: of questions asked apart,
    text, longest question and answer; of a conversation all its messages and answers, as long as these may be. A row's
    info: `length_measured`, `depth_measured` of what is asked for in percent of the tokens, and its quarter, `depth`.
    """

    generated: ClassVar[bool] = True
    ordered: ClassVar[str] = "rows"
    uncut: ClassVar[str] = "a shortened text may have lost what is asked for; lower task.lengths instead"
    rules: ClassVar[Rules] = (filled("lengths"),)
    subsets: ClassVar[Mapping[str, Made]] = MADE

    subset: str = "kv"
    lengths: tuple[Positive, ...] = (4096,)
    size: Positive = 20
    turns: Annotated[int, Range(1, 20)] = 5
    truncate: Truncation = "skip"

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, length, turn in islice(product(range(self.size), self.lengths, range(self.turns)), self.limit):
            row = {"length": length, "session": number, "turn": turn}
            yield f"turn {turn} of session {number} of length {length}", row

    def example(self, row: dict[str, Any], where: str) -> Example:
        return self._made(row, 8)[0]

    def _made(self, row: Mapping[str, Any], units: int) -> tuple[Example, Session]:
        """The row with so many units of filler, and its session."""
        seed = f"{self.seed} {self.subset} {row['length']} {row['session']} {self.turns}"
        session = MADE[self.subset].make(random.Random(seed_of(seed)), units, self.turns)
        session = replace(session, name=f"{self.subset} length {row['length']} session {row['session']}")
        example = self.asked(session, row["turn"])
        return replace(example, info={"length": row["length"], "session": row["session"], **example.info}), session

    def held(self, made: Example, session: Session, count: Callable[..., int]) -> int:
        """Tokens that a cache comes to hold."""
        if isinstance(self, DialogueTask):
            return self.tokens(made.turns, count)
        new = self.max_new_tokens or 0
        return max(count(f"{session.context}\n\n{turn.message}") for turn in session.turns) + new

    def fit(self, example: Example, count: Callable[..., int], room: int) -> Example:
        length = example.info["length"]
        if length > room:
            return replace(example, skipped="too long")
        units = most_units(lambda units: self.held(*self._made(example.info, units), count), length)
        if units < 0:
            least = self.held(*self._made(example.info, 0), count)
            raise ConfigError(
                f"a length of {length} tokens does not hold {self.turns} turns of {self.subset}, which have {least}: "
                "raise task.lengths, or lower task.turns"
            )
        fitted, session = self._made(example.info, units)
        (depth,) = depths_of(fitted.prompt, [session.places[example.info["turn"]]], count)
        more = {"length_measured": self.held(fitted, session, count), **quarter(depth)}
        return replace(fitted, id=example.id, info={**fitted.info, **more})

    def grader(self, task: str) -> Grader:
        return MADE[self.subset].grader

    def fingerprint(self) -> str:
        return "generated"


@dataclass(frozen=True, kw_only=True)
class Retrieval(Generated, SharedContextTask):
    """Several questions about one generated text, each asked of a copy of the evicted cache with questions=all: values
    of keys, strings, variables. `score`: the share of the right answers in the output, in percent.
    """

    name: ClassVar[str] = "retrieval"

    question: When = "after_eviction"


@dataclass(frozen=True, kw_only=True)
class RetrievalTurns(Generated, DialogueTask):
    """The questions of `retrieval` as the turns of one conversation, in the cache that the turns before left."""

    name: ClassVar[str] = "retrieval_turns"
