"""One example of a run and of its baseline, to be diagnosed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from kvexp.core import CacheConfig
from kvexp.core.sequence import Span
from kvexp.generate import (
    Generation,
    GenerationParams,
    PrefilledContext,
    decode,
    generate_from_context,
    prefill,
)
from kvexp.generate.kl import read_questions
from kvexp.hf import EvictionCache
from kvexp.methods import Full
from kvexp.results.read import chosen as labelled
from kvexp.results.read import folders, question_of, titled
from kvexp.results.stats import lower_is_better
from kvexp.run.answers import noise_seed, turns_fed
from kvexp.run.batches import Row, examples_of, settings_at
from kvexp.run.compose import option
from kvexp.run.model_spec import config_of_spec, load, tokenizer_of
from kvexp.run.prompts import Weightless, later_turns, prompt_of, with_stop_tokens
from kvexp.run.settings import Settings, batch_cache, settings_of
from kvexp.run.store import Run, run_name
from kvexp.tasks import Example, LMEval
from kvexp.util.errors import ConfigError

# Run folders and their rows, as the commands take them. Nothing here loads a model.

OWN_OPTIONS = ("method", "cache.mode", "cache.positions")  # options that are another method's


def opened(words: str, example: str) -> tuple[Run, Row]:
    """The run that `run_at` finds, and its row that `chosen` finds."""
    run = run_at(words)
    return run, chosen(rows_of(run), example)


def run_at(words: str) -> Run:
    """The run that OUTPUTS/HASH names, or OUTPUTS@LABEL=VALUE,...: the one run under OUTPUTS with these labels.

    ConfigError lists what there is where that is none, or several.
    """
    outputs, at, labels = words.rpartition("@")
    if not at:
        if not (Path(words) / "config.json").exists():
            raise ConfigError(f"{words} is no run: name its folder, outputs/HASH, or outputs@method=h2o,kv_ratio=0.3")
        return Run.load(words)
    pairs = [word.partition("=") for word in labels.split(",")]
    if not all(name and equals for name, equals, _ in pairs):
        raise ConfigError(f"{words}: labels are given as in outputs@method=h2o,kv_ratio=0.3")
    known = [folder for folder in folders(outputs) if not folder.refused]
    matching = labelled(known, {name: value for name, _, value in pairs})
    if len(matching) != 1:
        listing = "\n".join(f"  {folder.run.path}  {title_of(folder.run)}" for folder in (matching or known))
        raise ConfigError(f"{len(matching)} runs have the labels {labels}; give more labels, or a folder:\n{listing}")
    return matching[0].run


def baseline_of(run: Run) -> Run:
    """The full-attention run of the same model, task and examples as a run."""
    if run.baseline is None:
        raise ConfigError(f"{run.path} is a run of full attention: there is nothing to compare it with")
    return Run.load(run.path.parent / run.baseline)


def rows_of(run: Run) -> dict[str, Row]:
    """The rows that were answered, by example; ConfigError for one that lacks what a diagnosis needs."""
    answered = {row["example"]: row for row in run.rows() if not row.get("skipped")}
    for name, row in answered.items():
        for field in ("index", "metrics", "output", "receipt"):
            if row.get(field) is None:
                raise ConfigError(
                    f"{run.path}: the row of example {name} has no {field}; remove its line from examples.jsonl and "
                    "run the same command again, which makes that row anew"
                )
    return answered


def chosen(rows: Mapping[str, Row], name: str) -> Row:
    """The row of this example: its id, the beginning of one id alone, or its index in the task."""
    matching = [row for key, row in rows.items() if key == name]
    matching = matching or [row for row in rows.values() if str(row["index"]) == name]
    matching = matching or [row for key, row in rows.items() if key.startswith(name)]
    if len(matching) != 1:
        first_names = ", ".join(list(rows)[:5])
        number = "no example" if not matching else f"{len(matching)} examples"
        raise ConfigError(f"{number} of the run named {name!r}; it has {len(rows)}: {first_names}, ...")
    return matching[0]


def plain_table(*heads: str, caption: str | None = None) -> Table:
    """Empty table without lines: the first column is text, the others are numbers."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), caption=caption)
    for head in heads:
        table.add_column(head, justify="left" if head == heads[0] else "right", no_wrap=head != heads[0])
    return table


def headline(row: Row) -> float:
    """The row's first metric, negated where less is better."""
    name, value = next(iter(row["metrics"].items()))
    return -float(value) if lower_is_better(name) else float(value)


def short_title(run: Run) -> str:
    """Method, budget and task of a run for messages, as "h2o 0.3 testbed_needle"."""
    return run_name(run.asked[-1], "method", "kv_ratio", "task")


def title_of(run: Run) -> str:
    """The run's `short_title`, its model, what else was set by hand, and whether eviction has seen the question."""
    more = run_name(run.asked[-1], "model", "setting", between=", ")
    return titled(", ".join(filter(None, [short_title(run), more])), [question_of(run.config)])


def with_method(settings: Settings, name: str) -> Settings:
    """The run's settings with another method at its own defaults; ConfigError where they no longer compose."""
    command = settings.command
    cache = {**command["config"]["cache"], "mode": "auto", "positions": None}
    words = [word for word in command["overrides"] if not word.lstrip("+~").startswith(OWN_OPTIONS)]
    return settings_of(
        {**command["config"], "method": option("method", name), "cache": cache},
        {**command["choices"], "method": name},
        words,
    )


# One example of a run as it was generated.


@dataclass(frozen=True)
class Case:
    """One example of a run: enough to generate it again, watched, along with the full cache, or with evictions undone.

    prompt, question: token ids; the question is fed after the eviction (or empty). seed: of noise inside the method.
    `decoding` must be greedy. spans: of the prompt, what `keep` spares.
    ahead: of a turn of a conversation, the tokens that follow the first message in all turns. The question is then all
    that was fed behind the first message before this turn's answer, and the answer leaves it at that number.
    """

    model: Any
    prompt: list[int]
    question: list[int]
    cache: CacheConfig
    decoding: GenerationParams
    tokenizer: Any = None
    seed: int = 0
    spans: tuple[Span, ...] = ()
    ahead: int | None = None

    @property
    def max_tokens_to_come(self) -> int:
        """The largest number of tokens that follow the prompt: question and new tokens."""
        return self.ahead or len(self.question) + self.decoding.max_new_tokens

    def full(self) -> Case:
        """This example under full attention."""
        same = {name: getattr(self.cache, name) for name in ("beyond_context", "evict_sliding")}
        return dataclasses.replace(self, cache=CacheConfig(Full(), **same))

    def generate_again(self, prepare: Callable[[EvictionCache], object] | None = None) -> Generation:
        """The generation of the run, alone in its batch; prepare: is called with the cache before anything is fed."""
        return self.answer(self.prefill_prompt(prepare))

    def answer(self, context: PrefilledContext) -> Generation:
        """The answers from a context of the prompt, of one row or of copies of it; uses the context up."""
        rows = len(context.ids)
        seeds, questions = [self.seed] * rows, [self.question] * rows
        if self.question and self.ahead is None:
            options = {"decoding": self.decoding, "tokenizer": self.tokenizer}
            return generate_from_context(self.model, context, questions, seeds=seeds, **options)
        if self.question:
            read_questions(self.model, [context], questions)
        return decode(self.model, [context], self.decoding, seeds, self.tokenizer, start=0.0)[0]

    def prefill_prompt(
        self, prepare: Callable[[EvictionCache], object] | None = None, cache: CacheConfig | None = None
    ) -> PrefilledContext:
        """The prompt alone, prefilled and evicted.

        prepare: is called with the cache before anything is fed; cache: in place of the run's own configuration.
        """
        return prefill(
            self.model,
            [self.prompt],
            cache or self.cache,
            max_new_tokens=self.max_tokens_to_come,
            chunk=self.decoding.prefill_chunk,
            tokenizer=self.tokenizer,
            seeds=[self.seed],
            prepare=prepare,
            spans=[self.spans],
        )


# A run folder back to its settings, its examples and the model, of which a `Case` is made.


def cases(settings: Settings, rows: list[Row]) -> Iterator[tuple[Row, Case, Example]]:
    """The case of every row, in the order of the task; loads the model."""
    wanted = {row["example"]: row for row in rows}
    todo = examples_of(settings, rows)
    model, tokenizer = load(settings.model)
    settings = with_stop_tokens(settings, model, tokenizer)
    fed: dict[str, tuple[list[list[int]], int]] = {}  # of conversations, by their first message
    for example in todo:
        prompt = prompt_of(settings, model, tokenizer, example)
        question: list[int] = prompt.question_ids
        ahead: int | None = None
        if settings.task.has_turns:
            if example.prompt not in fed:
                last = max(other.number for other in todo if other.prompt == example.prompt)
                fed[example.prompt] = turns_fed(settings, model, tokenizer, prompt, last)
            questions, ahead = fed[example.prompt]
            question = questions[example.number]
        has_question = settings.task.has_turns or bool(prompt.question_ids)
        yield (
            wanted[example.id],
            Case(
                model=model,
                prompt=prompt.ids,
                question=question,
                cache=batch_cache(settings, [len(prompt.ids)]),
                decoding=settings.decoding,
                tokenizer=tokenizer,
                seed=noise_seed(settings, prompt.example, has_question=has_question),
                spans=tuple(prompt.spans),
                ahead=ahead,
            ),
            example,
        )


# The prompt of a row as it was fed to the model, made again from the run's data and tokenizer.


def fed_prompt(run: Run, row: Row) -> tuple[str, str]:
    """The text of all tokens fed before a row's answer, special ones included; their number and digest as a sentence.

    Of a turn of a conversation, the answers before it, which no row keeps as tokens, are left out and marked.
    ConfigError where data, chat template or tokenizer do not give the row's tokens any more.
    """
    if row.get("prompt_digest") is None:
        raise ConfigError(f"{run.path}: the row of {row['example']} has no digest of its prompt: run it again")
    settings = settings_at(run)
    (example,) = examples_of(settings, [row])
    tokenizer = tokenizer_of(settings.model)
    # Of the model a prompt needs how long it may be; lm-eval's items also need what ends an answer.
    model: Any = Weightless(config_of_spec(settings.model))
    if isinstance(settings.task, LMEval):
        model, tokenizer = load(settings.model)
    prompt = prompt_of(settings, model, tokenizer, example)
    if prompt.digest != row["prompt_digest"]:
        raise ConfigError(
            f"example {row['example']}: the prompt made today has the digest {prompt.digest}, the one that was sent "
            f"{row['prompt_digest']}: data, chat template or tokenizer have changed"
        )
    fed = [*prompt.ids, *prompt.question_ids]
    after = f", the last {len(prompt.question_ids)} after the eviction" if prompt.question_ids else ""
    turns = later_turns(prompt, tokenizer, example.number, chat=settings.model.chat)
    if turns:
        many, tokens = "s" * (len(turns) > 1), sum(map(len, turns))
        after = f", then {len(turns)} answer{many}, not printed, each before a message, of {tokens} tokens in all"
    parts = [
        tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) for ids in (fed, *turns)
    ]
    return "[answer]".join(parts), f"example {row['example']}: {len(fed)} tokens{after}; digest {prompt.digest}"
