"""What a task is: where its rows come from, how a row becomes a prompt, how an answer becomes numbers.

`Task` is any task; `RougeTask` one whose answers ROUGE compares; `QuestionTask` asks about a text before or after the
eviction, `SharedContextTask` several questions about one text, `FramedQuestions` with a prompt template.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from kvexp.tasks import data
from kvexp.tasks.metrics import check_references, check_rouge_installed, dropped_letters, is_unspaced, lines, rouge
from kvexp.util.errors import ConfigError, Rule, refuse
from kvexp.util.fields import AtLeast, Range, defaults_of, field_types, typed
from kvexp.util.files import Stamp, stamp

Item = TypeVar("Item")
Positive = Annotated[int, AtLeast(1)]
Rules = tuple[Rule[Any], ...]
Truncation = Literal["middle", "halves", "right", "skip"]
When = Literal["in_prompt", "after_eviction"]  # of a question
SET_BY_THE_RUN = ("limit", "shared_context", "samples")  # of a task: by limit=, questions=, samples=


_KNOWN: dict[tuple[str, str], bool] = {}  # what `Task.any_row` found: the runs of a sweep ask for it over and over


def once(option: str, part: str) -> Rule[Any]:
    """The rule that a text holds {part} once; null passes."""
    return (
        lambda c: (text := getattr(c, option)) is not None and text.count(f"{{{part}}}") != 1,
        f"task.{option} must hold {{{{{part}}}}} once, got {{c.{option}!r}}",
    )


def filled(option: str) -> Rule[Any]:
    """The rule that a list is not empty."""
    return lambda c: not getattr(c, option), f"task.{option} is empty: name at least one"


@dataclass(frozen=True)
class Turn:
    """A user's message, its right answer, and how many turns earlier the conversation stated the fact asked for."""

    message: str
    reference: str
    distance: int = 0


@dataclass(frozen=True)
class Example:
    """One thing to ask: `prompt` and the `reference` its answer is compared with. All text, nothing tokenised.

    prompt == prefix + body + suffix, always: the body is the part a runner may shorten, prefix and suffix hold the
    instruction and the place where the answer starts. Given a prompt alone, all of it is body. `continuation` is the
    text a teacher-forced task feeds after the prompt (it starts with its own white space); empty if there is none.

    `question`: text fed token by token after the prompt was prefilled and evicted; the prompt is then the context
    alone, and an answer follows prompt + question. `choices`: texts whose log-probabilities after prompt + question
    are compared instead of generating (Task.score_choices); like a continuation, each brings the white space it
    starts with, and so does a question, or the same characters become other tokens than they are inside one text.

    `questions`: all that are asked of copies of one evicted cache of this prompt, `question` at the place `number`;
    none where each question has a prefill of its own, or may have.

    `system`: the beginning of the prompt that a chat model reads as its system turn, and any other as it stands.

    `opening`: the beginning of the answer, fed before the rest is generated: behind prompt and question, and behind
    the head that a chat template puts in front of an answer. `begun`: an end of the prompt, or of its question, that
    begins the answer; a chat template gets it as its opening (`for_chat_template`).

    `marks`: texts of the prompt, in their order, that `keep=span` and `keep=fair` spare; none: its prefix and suffix.

    `turns`: all of a conversation, of which this example is the turn `number`; the prompt is the first message.

    `skipped`: why it cannot be asked ("" where it can), such as a text too short for the task; its row says so.

    `info`: plain values of this example for its row ("info"), such as a length and a depth to draw it by.

    Tokenise the whole prompt while it fits. Only a prompt that does not fit is to be cut, and then the body's text:
    three parts tokenised apart are not always the tokens of the whole.
    """

    id: str
    prompt: str
    reference: str
    continuation: str = ""
    prefix: str = ""
    body: str = ""
    suffix: str = ""
    question: str = ""
    choices: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    number: int = 0
    turns: tuple[Turn, ...] = ()
    system: str = ""
    opening: str = ""
    begun: str = ""
    marks: tuple[str, ...] = ()
    skipped: str = ""
    info: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not (self.prefix or self.body or self.suffix):
            object.__setattr__(self, "body", self.prompt)
        if self.prompt != self.prefix + self.body + self.suffix:
            raise ValueError(f"example {self.id}: prompt is not prefix + body + suffix")
        if not self.prompt.startswith(self.system):
            raise ValueError(f"example {self.id}: prompt does not begin with its system turn")
        if self.question and not self.question.strip():
            raise ValueError(f"example {self.id}: the question is white space alone")
        if self.questions and self.questions[self.number] != self.question:
            raise ValueError(f"example {self.id}: question {self.number} of its context is another one")
        if not all(self.choices):
            raise ValueError(f"example {self.id}: choice {self.choices.index('')} is empty")
        if self.choices and self.continuation:
            raise ValueError(f"example {self.id}: has choices and a continuation, give one of them")
        if not (self.question or self.suffix).endswith(self.begun):
            raise ValueError(f"example {self.id}: the prompt does not end with the beginning of its answer")

    def for_chat_template(self) -> Example:
        """The example as a chat template takes it: `begun` is its opening, and no longer part of the user's turn."""
        if not self.begun:
            return self
        question, *questions = (text.removesuffix(self.begun) for text in (self.question, *self.questions))
        suffix = self.suffix if self.question else self.suffix.removesuffix(self.begun)
        prompt, opening = self.prefix + self.body + suffix, self.begun.lstrip()
        return replace(
            self, prompt=prompt, suffix=suffix, question=question, questions=tuple(questions), opening=opening, begun=""
        )


@dataclass(frozen=True, kw_only=True)
class Task:
    """Rows of a data set, asked one by one. Fields are its options; nothing is read until `check()`.

    Data: `data_files` (a .json, .jsonl or .parquet file or a glob, in the hub's schema) or, without it, `hub_id` at
    the pinned `revision`. `streaming` reads no more of the hub than `limit` asks for and leaves no copy; false
    downloads once into the Hugging Face cache. `sample`: `first` takes the first `limit` rows, `shuffled` draws
    `limit` distinct rows with `seed`, `with_replacement` draws as `np.random.seed(seed); randint(rows, size=limit)`
    does, so that a row may come twice; its second id ends in `#2`.

    `max_prompt_tokens` (null: what the model holds) bounds prompt and question together. The runner shortens a longer
    prompt, for tasks know no tokenizer, as `truncate` says: `middle` shortens the body at its end and keeps prefix and
    suffix whole; `halves` keeps the first and the last half of the whole prompt's tokens (LongBench's way); `right`
    cuts the whole prompt at its right end, so that the suffix is lost; `skip` asks nothing and keeps a row with
    skipped="too long". `pad_to` (null: as they are) counts shorter prompts as padded to that many tokens, as the
    Keyformer release pads them, with budget.of=padded: a runner without it must refuse it, never ignore it.

    `max_new_tokens` and `min_new_tokens` never look at a reference.
    """

    name: ClassVar[str]
    generated: ClassVar[bool] = False  # rows are made here, by an own `rows` and `fingerprint`, and read from nowhere
    metrics: ClassVar[tuple[str, ...]] = ("rouge1", "rouge2", "rougeL", "rougeLsum")  # the first is the headline
    needs_nll: ClassVar[bool] = False  # whether the runner adds "nll", nats per token of `continuation`
    only_nll: ClassVar[bool] = False  # nothing is generated, the continuation's log-probabilities are all
    uses_chat_template: ClassVar[bool] = True  # whether a chat model's prompts go through its chat template
    frame: ClassVar[str | None] = None  # a text with {prompt} in place of that template, tokenised like any text
    has_turns: ClassVar[bool] = False  # examples are the turns of conversations, each in the cache that the others left
    only_answered: ClassVar[bool] = False  # examples count only where the full cache's answer is right: `answered`
    # Texts whose last token ends an answer, besides the model's end token.
    extra_end_texts: ClassVar[tuple[str, ...]] = ()
    ordered: ClassVar[str] = ""  # what of the task has an order, such as its articles: sample must then be first
    uncut: ClassVar[str] = ""  # why no prompt may be shortened: truncate must then be skip
    # Settings that exclude each other, besides the rules of the base classes; fields hold their own ranges.
    rules: ClassVar[Rules] = (
        (
            lambda c: c.min_new_tokens > c.max_new_tokens,
            "task.min_new_tokens={c.min_new_tokens} is above task.max_new_tokens={c.max_new_tokens}",
        ),
        (
            lambda c: c.ordered and c.sample != "first",
            "task.sample must be first for {c.name}, got {c.sample!r}: its {c.ordered} have an order",
        ),
        (
            lambda c: c.uncut and c.truncate != "skip",
            "task.truncate must be skip for {c.name}, got {c.truncate!r}: {c.uncut}",
        ),
        (
            lambda c: c.sample != "first" and c.limit is None,
            "task.sample={c.sample} needs the number of draws: set task.limit",
        ),
        (
            lambda c: c.pad_to and c.max_prompt_tokens and c.pad_to > c.max_prompt_tokens,
            "task.pad_to={c.pad_to} is above task.max_prompt_tokens={c.max_prompt_tokens}; lower it",
        ),
    )
    # Options that came after runs of the task had been kept; at their defaults it is what it was before it had them.
    later_options: ClassVar[tuple[str, ...]] = ()

    data_files: str | None = None
    hub_id: str = ""
    hub_config: str | None = None
    revision: str | None = None
    split: str = "validation"
    streaming: bool = True
    limit: Positive | None = None
    sample: Literal["first", "shuffled", "with_replacement"] = "first"
    seed: Annotated[int, Range(0, 2**32 - 1)] = 12345
    max_new_tokens: Positive = 128
    min_new_tokens: Annotated[int, AtLeast(0)] = 0
    max_prompt_tokens: Positive | None = None
    truncate: Truncation = "middle"
    pad_to: Positive | None = None

    def __init_subclass__(cls, **named: Any) -> None:
        """Name the subclass after its class unless it says a `name`."""
        super().__init_subclass__(**named)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @classmethod
    def check_class(cls) -> None:
        """ConfigError for a class that leaves out what is asked of every task: examples, scores, their names."""
        scored = cls.only_nll or cls.score_choices is not Task.score_choices
        for name, arguments in {"example": "row, where", "score": "output, reference, example"}.items():
            if getattr(cls, name) is getattr(Task, name) and not (scored and name == "score"):
                raise ConfigError(
                    f"{cls.__qualname__} has no {name}: write def {name}(self, {arguments}), as in docs/new_method.md"
                )
        names: Any = cls.metrics
        if not names or isinstance(names, str) or (names is Task.metrics and not issubclass(cls, RougeTask)):
            raise ConfigError(
                f'{cls.__qualname__} says no metrics: write metrics = ("accuracy",), the names that its scores have, '
                "the first of which tables show"
            )

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Option -> default, of what a command line may set of the task.

        Without what the run says (`SET_BY_THE_RUN`), and without where rows come from of a task that makes them.
        """
        plain = defaults_of(Task)
        defaults = {name: value for name, value in defaults_of(cls).items() if name not in SET_BY_THE_RUN}
        rows = [option.name for option in fields(data.DataSource) if cls.generated]
        return {name: value for name, value in defaults.items() if name not in rows or value != plain[name]}

    @property
    def source(self) -> data.DataSource:
        """The source of the rows."""
        return data.DataSource(**{option.name: getattr(self, option.name) for option in fields(data.DataSource)})

    def example(self, row: dict[str, Any], where: str) -> Example:
        """The example of one row; `where` ("row 3 of rows.jsonl") is for the error a bad row deserves."""
        raise NotImplementedError

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        """Metric name -> percent, 0 to 100, of one answer. Without "nll": that one is the runner's to measure."""
        raise NotImplementedError

    def answered(self, output: str, example: Example) -> bool:
        """Whether an answer is right, of tasks with `only_answered`: a rule on texts, fixed before any method is run.

        Its result stands in every row; tables count the examples where it holds of the full cache's row, and no others.
        """
        raise NotImplementedError

    def score_choices(self, logprobs: list[float], tokens: list[int], example: Example) -> dict[str, float]:
        """Metric name -> percent of one answer by choosing; of tasks whose examples have `choices`.

        logprobs: natural log-probability of each choice, summed over its tokens; tokens: how many those are.
        """
        raise NotImplementedError

    def score_nll(self, logprobs: list[float], example: Example) -> tuple[dict[str, float], dict[str, Any]]:
        """(metrics, values for the row's info) of a continuation's log-probabilities, one per token, in nats."""
        return {"nll": -sum(logprobs) / len(logprobs)}, {}

    def metric_names(self) -> tuple[str, ...]:
        """The metrics a row of this task holds, the headline first."""
        return (*self.metrics, "nll") if self.needs_nll and "nll" not in self.metrics else self.metrics

    def for_model(self, *, chat: bool) -> Task:
        """The task as it asks a base model or a chat model: options left open, such as a template, get that kind's.

        A chat model's prompts are the user's turn of its chat template, and the end of that turn is where its answer
        begins: frames and beginnings of answers that tell a base model so are left out.
        """
        task: Any = self
        return replace(task, answer_prefix="") if chat and hasattr(task, "answer_prefix") else self

    def not_identifying(self) -> tuple[str, ...]:
        """Options that a run's identity leaves out, so that older runs keep their hash: all later ones, or none."""
        before = {option.name: option.default for option in fields(self)}
        same = all(getattr(self, name) == before[name] for name in self.later_options)
        return self.later_options if same else ()

    def corrected(self) -> tuple[str, ...]:
        """Names of corrections of this NUMERICS that can move a score of this task's rows: part of a run's identity."""
        return ()

    def any_row(self, holds: Callable[[dict[str, Any]], bool]) -> bool:
        """Whether `holds` is true of a row of the task's files, whatever the limit; true where only the hub has them.

        False where a row cannot be read: `check` says what is wrong.
        """
        if self.data_files is None:
            return True
        whole = replace(self, limit=None, sample="first")
        key = (repr(whole), self.pinned)
        if key not in _KNOWN:
            try:
                _KNOWN[key] = any(holds(row) for _, row in whole.rows())
            except (ConfigError, KeyError, TypeError, AttributeError):
                return False
        return _KNOWN[key]

    def label(self, choice: str) -> str:
        """The task's name in tables; choice: its name in the configuration."""
        return choice

    def fit(self, example: Example, count: Callable[..., int], room: int) -> Example:
        """The example at its length in tokens, for tasks that set one, or skipped; called once, before the model loads.

        count: tokens of a prompt of these words (and, given a second text, of an `opening`) in this model's tokenizer,
        chat template included; room: how many positions the model has for prompt and answer.
        """
        return example

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """("row 3 of rows.jsonl", row) for the rows the task uses, in its order; at most `limit`."""
        # Of rows in their order no more are read than make `limit` examples.
        chosen = self.source.choose(None if self.sample == "first" else self.limit, self.sample, self.seed)
        return islice((named_row for where, row in chosen for named_row in self.split_row(row, where)), self.limit)

    def split_row(self, row: dict[str, Any], where: str) -> Iterable[tuple[str, dict[str, Any]]]:
        """("question 1 of row 3 of rows.jsonl", row of one example) of a row that makes several examples."""
        return [(where, row)]

    def examples(self) -> Iterator[Example]:
        """The examples of the task in their order, ids unique and the same in every run on the same data.

        Ends in a ConfigError where the data are no longer what `pinned` names: take all of them before using one.
        """
        self.check_options()
        seen, given = Counter[str](), set[str]()
        with self.unchanged():
            for where, row in self.rows():
                example: object = self.example(row, where)
                if not isinstance(example, Example):
                    raise ConfigError(f"{type(self).__qualname__}.example must return an Example, got {example!r}")
                name, again = example.id, seen[example.id]
                while name in given:  # a row drawn again, or another row of the same id
                    again += 1
                    name = f"{example.id}#{again}" if again > 1 else example.id
                seen[example.id] = max(again, 1)
                given.add(name)
                yield replace(example, id=name)

    def articles_read(self) -> set[str]:
        """Ids of kvexp's own articles that the examples are made of; nothing for other texts."""
        return set()

    def check(self) -> None:
        """Raise ConfigError for all that could go wrong later: options, files, rows, metrics. Call before weights load.

        Of local files, and of rows that are made, every one that will be used is read; of the hub the first one: its
        schema is pinned.
        """
        self.check_options()
        if any(metric.startswith("rouge") for metric in self.metrics):
            check_rouge_installed()
        examples = list(self.examples() if self.generated or self.data_files is not None else self._first())
        self.check_examples(examples)
        if not examples:
            where = f"task.name={self.name}" if self.generated else str(self.source)
            raise ConfigError(f"{where}: found no rows; name a file or split that has some")
        if type(self).__module__.partition(".")[0] != "kvexp":
            self._rehearse(examples)

    def _rehearse(self, examples: Sequence[Example]) -> None:
        """ConfigError where a user's class makes examples of other than texts, or scores by other names or no numbers.

        The first example's reference is scored as if it were an answer.
        """
        name, hints = type(self).__qualname__, field_types(Example)
        for example, option in itertools.product(examples, fields(Example)):
            typed(getattr(example, option.name), hints[option.name], f"{name}.example: {option.name}")
        first = examples[0]
        if self.only_nll or first.choices:
            return
        scores: Any = self.score(first.reference, first.reference, first)
        if not isinstance(scores, dict) or not set(scores) <= set(self.metrics):
            raise ConfigError(
                f"{name}.score must return {{metric: percent}} of {', '.join(self.metrics)}, got {scores!r}"
            )
        for metric, value in scores.items():
            typed(value, float, f"{name}.score: {metric}")

    def check_examples(self, examples: Sequence[Example]) -> None:
        """ConfigError where these texts cannot be scored as the task is set; called with all of them before any run."""

    def of_answer(self, output: str, reference: str, finish_reason: str | None = None) -> dict[str, Any]:
        """Values of an answer for its row's info, besides its scores. finish_reason: "length" where it was cut off."""
        return {}

    def fingerprint(self) -> str:
        """Name of the data, another one whenever the rows may be others: see `DataSource.fingerprint`."""
        return self.source.fingerprint()

    @functools.cached_property
    def pinned(self) -> str:
        """The fingerprint when this object was first asked for it: its examples come from those data or from none."""
        return self.fingerprint()

    def places(self) -> list[Path]:
        """The local files that rows are read from."""
        return self.source.places()

    @contextmanager
    def unchanged(self) -> Iterator[list[Stamp]]:
        """Block that reads the files, given their stamps; ConfigError if one changed meanwhile or since `pinned`."""
        self.pinned  # noqa: B018  # before anything is read
        before = self._stamps()
        yield before
        if self._stamps() != before or self.fingerprint() != self.pinned:
            raise ConfigError(
                f"{', '.join(map(str, self.places()))}: changed after this run was set up, and rows are kept under "
                "what the files held then; start it again when nothing writes to them"
            )

    def _stamps(self) -> list[Stamp]:
        try:
            return [stamp(path) for path in self.places()]
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error

    def _first(self) -> Iterator[Example]:
        for where, row in replace(self, limit=1, sample="first").rows():
            yield self.example(row, where)

    def check_options(self) -> None:
        """Types and ranges as annotated, then `rules`; reads no data. Messages use the words of the command line."""
        cls: Any = type(self)
        hints = field_types(cls)
        for option in fields(self):
            typed(getattr(self, option.name), hints[option.name], f"task.{option.name}")
        for base in reversed(cls.__mro__):
            refuse(self, vars(base).get("rules", ()))


@dataclass(frozen=True, kw_only=True)
class RougeTask(Task):
    """A task whose answers ROUGE compares with texts of any language.

    `rouge_tokenizer`: default, rouge_score's own, which knows a-z and 0-9 alone, or unicode, the words of any script
    (`kvexp.tasks.metrics.words_of`). With default, references of which it would leave out more than the accents of
    some names are refused, and a row's info counts the letters it left out of answer and reference (`dropped_letters`).
    """

    rouge_tokenizer: Literal["default", "unicode"] = "default"

    def rouge(self, output: str, reference: str, join_lines: bool = False) -> dict[str, float]:
        """ROUGE F1 with stemmer in percent, one sentence per line in both texts for rougeLsum."""
        answer, wanted = (lines(text, join_lines, self.rouge_tokenizer) for text in (output, reference))
        return rouge(answer, wanted, self.rouge_tokenizer)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        return self.rouge(output, reference)

    def check_examples(self, examples: Sequence[Example]) -> None:
        super().check_examples(examples)
        for example in examples:
            if example.reference and not example.skipped and not any(map(str.isalnum, example.reference)):
                raise ConfigError(
                    f"the reference of {example.id}, {example.reference[:60]!r}, has no word for ROUGE to compare: any "
                    "answer would get 0; correct the row, or leave it out"
                )
        if self.rouge_tokenizer == "default":
            check_references(example.reference for example in examples if not example.skipped)

    def of_answer(self, output: str, reference: str, finish_reason: str | None = None) -> dict[str, Any]:
        dropped = dropped_letters(output) + dropped_letters(reference) if self.rouge_tokenizer == "default" else 0
        return super().of_answer(output, reference, finish_reason) | ({"dropped_letters": dropped} if dropped else {})

    def not_identifying(self) -> tuple[str, ...]:
        """Options left out as in every task, and the tokenizer at its default, whatever the later options are."""
        return (*super().not_identifying(), *(("rouge_tokenizer",) if self.rouge_tokenizer == "default" else ()))


@dataclass(frozen=True, kw_only=True)
class CountedTask(Task):
    """A task of which all examples count or, with counted=answered, those whose answer of the full cache has the whole
    score.
    """

    counted: Literal["all", "answered"] = "all"

    @property
    def only_answered(self) -> bool:  # type: ignore[override]
        return self.counted == "answered"

    def answered(self, output: str, example: Example) -> bool:
        return self.score(output, example.reference, example)[self.metrics[0]] == 100


class Subset(Protocol):
    """What a `SubsetTask` knows of one of its subsets."""

    @property
    def new_tokens(self) -> int:
        """Tokens of an answer at most, where `max_new_tokens` says nothing else."""


Kind = TypeVar("Kind")


def kinds_of(benchmark: str, kind: Callable[..., Kind], *graders: Callable[..., float]) -> dict[str, Kind]:
    """Subset -> its `kind`, made of the fields that prompts/BENCHMARK.json has: its prompt, to the letter, and so on.

    graders: those that the file names.
    """
    values: dict[Any, Any] = {grader.__name__: grader for grader in graders}
    rows = json.loads(resources.files("kvexp.tasks").joinpath("prompts", f"{benchmark}.json").read_bytes())
    return {
        name: kind(**{key: values.get(str(value), value) for key, value in row.items()}) for name, row in rows.items()
    }


@dataclass(frozen=True, kw_only=True)
class SubsetTask(Task):
    """A task of several subsets, of which a run takes one; max_new_tokens null: the subset's own."""

    subsets: ClassVar[Mapping[str, Subset]]

    subset: str = ""
    max_new_tokens: Positive | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.subset not in self.subsets:  # here, for the length of its answers is asked for before any check
            raise ConfigError(self._other_subset())
        if self.max_new_tokens is None:
            object.__setattr__(self, "max_new_tokens", self.subsets[self.subset].new_tokens)

    def _other_subset(self) -> str:
        return f"task.subset must be one of {', '.join(self.subsets)}, got {self.subset!r}"

    def label(self, choice: str) -> str:
        return f"{choice}/{self.subset}"


@dataclass(frozen=True, kw_only=True)
class SampledTask(Task):
    """A task each of whose items may be answered several times, each time with draws of its own.

    samples (samples=N on the command line): answers to an item. They stand together, each an example whose id ends in
    "sample 2", by which its draws go: a method and the full cache draw the same. A row's info says which `item` and
    which `sample` it is, and tables take an item, not an answer, as the unit of their intervals. `limit` counts
    answers.
    """

    later_options: ClassVar[tuple[str, ...]] = ("samples",)
    rules: ClassVar[Rules] = (
        (
            lambda c: c.limit is not None and c.limit % c.samples,
            "limit={c.limit} counts answers, and samples={c.samples} of them belong to an item: take a multiple, such "
            "as limit=N*{c.samples} for N items",
        ),
    )

    samples: Positive = 1

    def examples(self) -> Iterator[Example]:
        if self.samples == 1:
            yield from super().examples()
            return
        self.check_options()
        items = None if self.limit is None else self.limit // self.samples
        with self.unchanged():
            for example in replace(self, samples=1, limit=items).examples():
                for number in range(1, self.samples + 1):
                    info = {**example.info, "item": example.id, "sample": number}
                    yield replace(example, id=f"{example.id} sample {number}", info=info)


def with_samples(task: Task, name: str, samples: int) -> Task:
    """The task as samples=N asks it; ConfigError where it asks an item once. name: as it was chosen."""
    if not isinstance(task, SampledTask):
        raise ConfigError(
            f"samples={samples} is for tasks whose items are answered several times, and task={name} asks each once: "
            "take aime24, aime25, aime26, math500, gsm8k or gsm8k_cot; or leave samples out"
        )
    return replace(task, samples=samples)


def row_id(row: dict[str, Any], field: str, *texts: str) -> str:
    """The row's own id where it has one, else a digest of its texts: the same row has the same id in any file."""
    if row.get(field) is not None:
        return str(row[field])
    return hashlib.sha256("\x1f".join(texts).encode()).hexdigest()[:16]


IN_PROMPT, AFTER_EVICTION = "in_prompt", "after_eviction"


@dataclass(frozen=True, kw_only=True)
class QuestionTask(Task):
    """A task whose examples are a context and a question about it, or an instruction what to do with it.

    question=in_prompt: both are prefilled, so the last query rows that a method scores by are the question's, and
    eviction knows what will be asked (the setting of LongBench and of most papers). question=after_eviction: the
    context is prefilled and evicted, then the question is fed token by token, as a question asked of a cache that is
    kept. The characters, context then question, are the same in both.
    """

    question: When = "in_prompt"

    def ask(
        self,
        name: str,
        context: tuple[str, str, str],
        question: str,
        reference: str,
        *,
        continuation: str = "",
        choices: tuple[str, ...] = (),
    ) -> Example:
        """The example that asks `question` about `context` = (prefix, body, suffix); only the body may be shortened.

        question: everything behind the context up to where the answer starts. It begins with the white space that
        parts it from the context, else its first token may not be the one it is inside the whole text.
        """
        prefix, body, suffix = context
        if self.question == IN_PROMPT:
            suffix, question = suffix + question, ""
        return Example(
            name,
            prefix + body + suffix,
            reference,
            continuation,
            prefix,
            body,
            suffix,
            question=question,
            choices=choices,
        )


@dataclass(frozen=True, kw_only=True)
class SharedContextTask(QuestionTask):
    """A task that may have several questions about one context.

    shared_context (questions=all on the command line): every context is prefilled and evicted once and each of its
    questions is asked of a copy of that cache. The examples of a context then stand together, in the order of its
    first question, each with all `questions` of its context: a context too long is cut so that the longest of them
    fits, and is the same text for all, whatever `limit` leaves out.
    """

    later_options: ClassVar[tuple[str, ...]] = ("shared_context",)
    rules: ClassVar[Rules] = (
        (
            lambda c: c.shared_context and c.question != AFTER_EVICTION,
            "questions=all asks all questions of a context that was evicted once, so that none of them can be in "
            "the prompt, got task.question={c.question}: set task.question=after_eviction, or questions=each",
        ),
    )

    shared_context: bool = False

    def examples(self) -> Iterator[Example]:
        if not self.shared_context:
            yield from super().examples()
            return
        whole = replace(self, limit=None) if self.sample == "first" else self
        contexts: dict[tuple[str, str], list[Example]] = {}
        with self.unchanged():
            for example in Task.examples(whole):
                key = ("asked", example.prompt) if example.question else ("skipped", example.id)
                contexts.setdefault(key, []).append(example)
        examples = (
            replace(example, questions=tuple(other.question for other in group), number=number)
            for group in contexts.values()
            for number, example in enumerate(group)
        )
        yield from islice(examples, self.limit)


def with_shared_context(task: Task, name: str) -> Task:
    """The task as questions=all asks it; ConfigError where it has one question per context. name: as it was chosen."""
    if not isinstance(task, SharedContextTask):
        raise ConfigError(
            f"questions=all is for tasks with several questions per context, and task={name} has one: take news_qa, "
            "memory, news_needle, needle_multi, retrieval, longbench, scbench, infinitebench, testbed_qa, or "
            "context_qa for a file of your own; or set questions=each"
        )
    return replace(task, shared_context=True)


@dataclass(frozen=True, kw_only=True)
class FramedQuestions(SharedContextTask):
    """A task whose prompt template is `before`, the context, `after` (with {question} once) and `answer_prefix`.

    The last begins the answer of a base model; a chat model, whose answer begins with its turn, does not get it.
    """

    rules: ClassVar[Rules] = (once("after", "question"),)

    before: str = ""
    after: str = "\n\n{question}"
    answer_prefix: str = ""

    def about(self, name: str, context: str, question: str, answer: str) -> Example:
        """The example that asks `question` about `context`."""
        after = self.after.replace("{question}", question) + self.answer_prefix
        return self.ask(name, (self.before, context, ""), after, answer)


def among(hidden: Sequence[Item], shares: Sequence[float], others: Sequence[Item]) -> list[Item]:
    """The others, with each of those that are hidden behind its share of them."""
    places = sorted(zip((int(share * (len(others) + 1)) for share in shares), range(len(hidden)), strict=True))
    mixed, last = list[Item](), 0
    for place, number in places:
        mixed += [*others[last:place], hidden[number]]
        last = place
    return [*mixed, *others[last:]]


def seed_of(words: str) -> int:
    """A seed of 64 bits that stands for these words."""
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8])


_WORD, _CHARACTER = re.compile(r"\S+"), re.compile(r"\S")


def word_ends(text: str) -> list[int]:
    """End of each word of a text; of each character, where it is written without spaces between words."""
    return [word.end() for word in (_CHARACTER if is_unspaced(text) else _WORD).finditer(text)]


def most_units(tokens: Callable[[int], int], limit: int) -> int:
    """The most units of filler with which a prompt has at most `limit` tokens; -1 if not even none fits.

    tokens: counts the prompt with so many units.
    """
    few, more = tokens(0), tokens(32)
    return longest_fit(tokens, limit, 64 + 64 * max(limit - few, 0) // max(more - few, 1))  # twice as many as would do


def depths_of(text: str, sources: Iterable[int], count: Callable[..., int]) -> list[float]:
    """Percent of a prompt's tokens in front of each place (character) that an answer comes from.

    count: as of `Task.fit`; a chat template's tokens are left out.
    """
    nothing = count("")
    size = max(count(text) - nothing, 1)
    return [round(100 * max(count(text[:place]) - nothing, 0) / size, 1) for place in sources]


def quarter(depth: float) -> dict[str, float]:
    """Values of a row's info that a heat-map is drawn by: `depth`, the quarter where it begins, and where it is."""
    return {"depth": 25 * min(int(depth // 25), 3), "depth_measured": depth}


def longest_fit(count: Callable[[int], int], limit: int, size: int) -> int:
    """The largest n in 0..size with count(n) <= limit, or one that makes exactly `limit`; -1 if not even 0 fits.

    count grows with n, about evenly, and is dear: the place is interpolated, and every third guess halves what is
    left. Where count is not quite monotone, as tokens of a growing text are not, what is returned was counted.
    """
    low, at_low, high, at_high = 0, count(0), size + 1, 0
    if at_low > limit:
        return -1
    rounds = 0
    while at_low < limit and high - low > 1:
        rounds += 1
        if high > size:
            guess = 4 * limit if low == 0 else low + (limit - at_low) * low // max(at_low, 1) + 1
        elif rounds % 3 == 0:
            guess = (low + high) // 2
        else:
            guess = low + (limit - at_low) * (high - low) // (at_high - at_low)
        guess = min(max(guess, low + 1), high - 1)
        tokens = count(guess)
        if tokens <= limit:
            low, at_low = guess, tokens
        else:
            high, at_high = guess, tokens
    return low
