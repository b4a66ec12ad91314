"""lm-eval's tasks as tasks of the harness: its prompts, choices and metrics; rows, resuming and receipts are ours."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from kvexp.errors import ConfigError
from kvexp.tasks.base import Task
from kvexp.tasks.lm_eval import definition
from kvexp.tasks.lm_eval.items import Item, items, score
from kvexp.tasks.lm_eval.protocol import PROTOCOLS, Protocol, protocol_of
from kvexp.tasks.questions import QUESTIONS

# Options of every task that this one has no use for, and what they must stay at.
IDLE = {
    **{"data_files": None, "hub_id": "", "hub_config": None, "revision": None, "sample": "first", "seed": 12345},
    **{"max_new_tokens": 128, "min_new_tokens": 0, "max_prompt_tokens": None, "pad_to": None},
}
KEPT_ITEMS = 1000  # of a task are held for the runs to come; of more, each pass makes its own
SEVEN = ("piqa", "winogrande", "openbookqa", "copa", "mathqa", "arc_easy", "arc_challenge")  # the papers' tasks


@dataclass(frozen=True, kw_only=True)
class LMEval(Task):
    """Tasks of EleutherAI's lm-eval, by name (a task, group or tag, or the file NAME.yaml of one): a run for each.

    An item's row holds lm-eval's own metrics, shares of 1 in percent, as `kvexp lm-eval` computes them from
    the same numbers. `limit` counts items per task.

    Data: the hub's, or `data_dir`, a folder of NAME.SPLIT.jsonl files in the hub's schema. `num_fewshot` examples
    (null: the task's own number) come from the split lm-eval takes or `fewshot_split`, drawn with `fewshot_seed`, the
    same for all methods. question=after_eviction: the examples are the context; the item's own question arrives after
    the eviction.

    protocol: prefill_then_step, row_mask, or a paper's (a2sf, h2o, keyformer: row_mask as its scripts have it). The
    switches below it belong to `Protocol`; null takes the protocol's own. truncate=left: prompts too long for the model
    lose their first tokens, as in lm-eval; skip: they are not asked. Answers that are generated have lm-eval's own
    length and stop texts: generation.* does not touch them.
    """

    name: ClassVar[str] = "lm_eval"
    generated: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = ("acc",)
    # lm-eval is asked for a template by kvexp lm-eval --apply_chat_template.
    uses_chat_template: ClassVar[bool] = False
    truncations: ClassVar[tuple[str, ...]] = ("left", "skip")

    tasks: tuple[str, ...] = SEVEN
    num_fewshot: int | None = 0
    data_dir: str | None = None
    fewshot_seed: int = 1234
    question: str = "in_prompt"
    protocol: str = "prefill_then_step"
    fewshot_split: str | None = None
    fewshot_excludes_item: bool | None = None
    add_bos: bool | None = None
    per_token: bool | None = None
    mask: str | None = None
    budget_length: str | None = None
    padded_batch: int | None = None
    whole_text: bool | None = None
    score_dtype: str | None = None
    truncate: str = "left"

    @property
    def measured(self) -> Protocol:
        """The protocol with this task's switches."""
        switches = {field.name: getattr(self, field.name) for field in fields(Protocol) if field.name != "mode"}
        return protocol_of(self.protocol, **switches)

    def parts(self) -> Sequence[LMEval]:
        """One task per name, groups and tags taken apart."""
        names = [leaf for name in self.tasks for leaf in definition.names_of(name)]
        return [replace(self, tasks=(name,)) for name in dict.fromkeys(names)]

    def label(self, choice: str) -> str:
        """The name of lm-eval's task, where this is one."""
        return str(definition.config_of(self.tasks[0])["task"]) if len(self.tasks) == 1 else choice

    @functools.cached_property
    def definition(self) -> Any:
        """lm-eval's task object, with the answers' metrics."""
        if len(self.tasks) != 1:
            raise ConfigError(f"task.tasks holds {len(self.tasks)} tasks; one at a time is asked: LMEval.parts()")
        how, before = self.measured, self._pinned_stamps()
        made = definition.load_once(
            tuple(before),
            self.tasks[0],
            data_dir=self.data_dir,
            shots=self.num_fewshot,
            fewshot_split=how.fewshot_split,
            excludes_item=how.fewshot_excludes_item,
            seed=self.fewshot_seed,
        )
        self._check_unchanged(before)
        definition.check_rows(made)
        return made

    def examples(self) -> Iterator[Item]:
        """The items, the first `limit` of the task."""
        self.check_options()
        yield from self._items(self.limit)

    def everything(self) -> Iterator[Item]:
        """All items of the task, whatever the limit."""
        return self._items(None)

    def _items(self, limit: int | None) -> Iterator[Item]:
        task = self.definition
        if self.question == "after_eviction" and not task.config.num_fewshot:
            raise ConfigError(
                "task.question=after_eviction needs examples as the context to evict from: set task.num_fewshot"
            )
        if limit is not None and limit <= KEPT_ITEMS:
            return iter(_listed(task, self.fewshot_seed, limit, self.question == "after_eviction"))
        task.set_fewshot_seed(self.fewshot_seed)  # every pass draws the same examples
        return items(task, limit, self.question == "after_eviction")

    def check(self) -> None:
        """Options, names, data, prompts of all items used, and whether an item has metrics of its own."""
        self.check_options()
        for part in self.parts():
            if not part.metric_names():
                raise ConfigError(
                    f"task.tasks: all metrics of lm-eval's task {part.tasks[0]} are of the whole corpus, an item has "
                    "none: use kvexp lm-eval"
                )

    def metric_names(self) -> tuple[str, ...]:
        """The metrics of an item of one task, as a made-up answer to its first item has them; reads all items."""
        first = None
        for item in self.examples():
            first = first or item
        if first is None:
            raise ConfigError(f"task.tasks: lm-eval's task {self.tasks[0]} has no rows")
        answer = {"generate_until": "", "loglikelihood_rolling": -1.0}.get(first.kind, (-1.0, False))
        return tuple(self.score_item(first, [answer] * len(first.instances)))

    def fingerprint(self) -> str:
        """Changes with the definitions, and with the bytes of local files or the data set on the hub."""
        return "; ".join(definition.digest(name, self.data_dir) for part in self.parts() for name in part.tasks)

    def places(self) -> list[Path]:
        return [path for part in self.parts() for name in part.tasks for path in definition.places(name, self.data_dir)]

    def score_item(self, item: Item, results: Sequence[Any]) -> dict[str, float]:
        """lm-eval's metrics of one item; results as its models return them: (log-probability, greedy), or a text."""
        return score(self.definition, item, results)

    def check_options(self) -> None:
        super().check_options()
        self.choice("question", QUESTIONS)
        self.choice("protocol", PROTOCOLS)
        if not self.tasks:
            raise ConfigError(f"task.tasks is empty: name lm-eval's tasks, as in task.tasks=[{','.join(SEVEN)}]")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ConfigError(f"task.num_fewshot must be at least 0, got {self.num_fewshot}")
        try:
            how = self.measured
        except ConfigError as error:
            raise ConfigError(f"task.{error}") from error
        if self.question == "after_eviction":
            self._check_question(how)
        for option, value in IDLE.items():
            if getattr(self, option) != value:
                raise ConfigError(
                    f"task.{option} must be left at {'null' if value is None else value}: which rows lm-eval's tasks "
                    "ask, and how long the answers are, they say themselves"
                )

    def _check_question(self, how: Protocol) -> None:
        if how.mode == "row_mask":
            raise ConfigError(
                f"task.question=after_eviction needs a real eviction, and task.protocol={self.protocol} masks one "
                "forward over the whole text: set task.protocol=prefill_then_step"
            )
        if self.num_fewshot == 0:
            raise ConfigError(
                "task.question=after_eviction at task.num_fewshot=0: without examples there is no context to evict "
                "before the question; set task.num_fewshot to 1 or more"
            )


@functools.lru_cache(maxsize=32)
def _listed(task: Any, seed: int, limit: int, after_eviction: bool) -> tuple[Item, ...]:
    """The items of an lm-eval task object, which is one for all runs that ask the same (`definition.load_once`)."""
    task.set_fewshot_seed(seed)
    return tuple(items(task, limit, after_eviction))
