"""What every task is: where its rows come from, how a row becomes a prompt, how an answer becomes numbers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from kvexp.errors import ConfigError

from . import data

TRUNCATIONS = ("middle", "right", "skip")
SAMPLES = data.SAMPLES


@dataclass(frozen=True)
class Example:
    """One thing to ask: `prompt` and the `reference` its answer is compared with. All text, nothing tokenised.

    prompt == prefix + body + suffix, always: the body is the part a runner may shorten, prefix and suffix hold the
    instruction and the place where the answer starts. Given a prompt alone, all of it is body. `continuation` is the
    text a teacher-forced task feeds after the prompt (it starts with its own white space); empty if there is none.

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

    def __post_init__(self) -> None:
        if not (self.prefix or self.body or self.suffix):
            object.__setattr__(self, "body", self.prompt)
        if self.prompt != "".join(self.prompt_parts):
            raise ValueError(f"example {self.id}: prompt is not prefix + body + suffix")

    @property
    def prompt_parts(self) -> tuple[str, str, str]:
        """(prefix, body, suffix)."""
        return self.prefix, self.body, self.suffix


@dataclass(frozen=True, kw_only=True)
class Task:
    """Rows of a data set, asked one by one. Fields are the options of `conf/task`; nothing is read until `check()`.

    Data: `data_files` (a .json, .jsonl or .parquet file or a glob, in the hub's schema) or, without it, `hub_id` at
    the pinned `revision`. `streaming` reads no more of the hub than `limit` asks for and leaves no copy; false
    downloads once into the Hugging Face cache. `sample`: `first` takes the first `limit` rows, `shuffled` draws
    `limit` distinct rows with `seed`, `with_replacement` draws as `np.random.seed(seed); randint(rows, size=limit)`
    does, so that a row may come twice; its second id ends in `#2`.

    Prompts longer than `max_prompt_tokens` (null: no limit but the model's) are the runner's to handle, for tasks know
    no tokenizer. `truncate` says how: `middle` shortens the body at its end and keeps prefix and suffix whole;
    `right` cuts the whole prompt at its right end, so that the suffix is lost; `skip` asks nothing and keeps a row
    with skipped="too long". `pad_to` (null: no padding) left-pads shorter prompts to that many tokens, pads counting
    towards the budget, as the Keyformer release does: a runner without it must refuse it, never ignore it.

    `max_new_tokens` and `min_new_tokens` never look at a reference.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]] = ("rouge1", "rouge2", "rougeL", "rougeLsum")  # the first is the headline
    needs_nll: ClassVar[bool] = False  # whether the runner adds "nll", nats per token of `continuation`

    data_files: str | None = None
    hub_id: str = ""
    hub_config: str | None = None
    revision: str | None = None
    split: str = "validation"
    streaming: bool = True
    limit: int | None = None
    sample: str = "first"
    seed: int = 12345
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    max_prompt_tokens: int | None = None
    truncate: str = "middle"
    pad_to: int | None = None

    @property
    def source(self) -> data.Source:
        return data.Source(
            data_files=self.data_files,
            hub_id=self.hub_id,
            hub_config=self.hub_config,
            revision=self.revision,
            split=self.split,
            streaming=self.streaming,
        )

    def example(self, row: dict[str, Any], where: str) -> Example:
        """The example of one row; `where` ("row 3 of rows.jsonl") is for the error a bad row deserves."""
        raise NotImplementedError

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        """Metric name -> percent, 0 to 100, of one answer. Without "nll": that one is the runner's to measure."""
        raise NotImplementedError

    def examples(self) -> Iterator[Example]:
        """The examples of the task in their order, ids unique and the same in every run on the same data."""
        self.check_options()
        seen: Counter[str] = Counter()
        given: set[str] = set()
        for where, row in self.source.choose(self.limit, self.sample, self.seed):
            made = self.example(row, where)
            name, again = made.id, seen[made.id]
            while name in given:  # a row drawn again, or another row of the same id
                again += 1
                name = f"{made.id}#{again}" if again > 1 else made.id
            seen[made.id] = max(again, 1)
            given.add(name)
            yield Example(name, made.prompt, made.reference, made.continuation, *made.prompt_parts)

    def check(self) -> None:
        """Raise ConfigError for all that could go wrong later: options, files, rows, metrics. Call before weights load.

        Of local files every row that will be used is read, of the hub the first one: its schema is pinned.
        """
        self.check_options()
        from . import rouge  # noqa: F401  # a missing package shows here, not after the first answer

        examples = self.examples() if self.data_files is not None else self._first()
        if not sum(1 for _ in examples):
            raise ConfigError(f"{self.source}: found no rows; name a file or split that has some")

    def fingerprint(self) -> str:
        """Changes whenever the rows may have: digest of the local files' bytes, or hub id, config, revision, split."""
        return self.source.fingerprint()

    def _first(self) -> Iterator[Example]:
        for where, row in self.source.choose(1, "first", self.seed):
            yield self.example(row, where)

    def check_options(self) -> None:
        """Types as annotated, ranges, choices; reads no data. Messages use the words of the command line."""
        for field in fields(self):
            _check_type(field.name, str(field.type), getattr(self, field.name))
        for option in ("limit", "max_new_tokens", "max_prompt_tokens", "pad_to"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigError(f"task.{option} must be at least 1, got {value}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ConfigError(
                f"task.min_new_tokens must be between 0 and task.max_new_tokens={self.max_new_tokens}, "
                f"got {self.min_new_tokens}"
            )
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"task.seed must be between 0 and 2**32 - 1, got {self.seed}")
        self.choice("truncate", TRUNCATIONS)
        self.choice("sample", SAMPLES)
        if self.sample != "first" and self.limit is None:
            raise ConfigError(f"task.sample={self.sample} needs the number of draws: set task.limit")
        if self.pad_to and self.max_prompt_tokens and self.pad_to > self.max_prompt_tokens:
            raise ConfigError(
                f"task.pad_to={self.pad_to} is above task.max_prompt_tokens={self.max_prompt_tokens}; lower it"
            )

    def choice(self, option: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, option) not in allowed:
            raise ConfigError(f"task.{option} must be one of {', '.join(allowed)}, got {getattr(self, option)!r}")


def row_id(row: dict[str, Any], field: str, *texts: str) -> str:
    """The row's own id where it has one, else a digest of its texts: the same row has the same id in any file."""
    if row.get(field) is not None:
        return str(row[field])
    return hashlib.sha256("\x1f".join(texts).encode()).hexdigest()[:16]


def _check_type(option: str, annotation: str, value: object) -> None:
    words = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false", "None": "null"}
    allowed = annotation.split(" | ")
    found = "None" if value is None else type(value).__name__
    if found not in allowed and not (found == "int" and "float" in allowed):
        raise ConfigError(f"task.{option} must be {' or '.join(words[a] for a in allowed)}, got {value!r}")
