"""LongBench: long questions, summaries, few-shot lessons, counting and code, in English and Chinese."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvexp.errors import ConfigError
from kvexp.tasks.base import Example, row_id
from kvexp.tasks.data import text
from kvexp.tasks.longbench_metrics import check_jieba, classification
from kvexp.tasks.longbench_subsets import CHINESE_WORDS, SUBSETS, Subset
from kvexp.tasks.members import Members
from kvexp.tasks.questions import SharedContextTask

WRAPS = ("official", "always", "never")


@dataclass(frozen=True, kw_only=True)
class LongBench(SharedContextTask):
    """One of the 21 data sets of LongBench (Bai et al., arXiv:2308.14508) or, `extended`, its LongBench-E version.

    Rows {"input", "context", "answers", "length", "dataset", "language", "all_classes", "_id"}. `data_files`: the
    official data.zip, a folder with {subset}.jsonl somewhere in it, or a file of the subset; without it the data.zip
    on the hub is fetched whole (114 MB). A reformatted copy on the hub: task.hub_id=OWNER/NAME task.hub_file=null,
    with `context_field`, `input_field` and `answers_field` for what it calls them.

    The official protocol: its prompts and answer lengths (null: the subset's), a prompt too long loses its middle
    (`truncate=halves`, before the template goes around it), a chat model's template goes around the prompts of QA,
    summaries and synthetic tasks but not around few-shot lessons and code (`chat_wrap`), a line end also ends an
    answer of samsum, which is not to be empty; of trec, triviaqa, samsum and lsht the first line is scored. How many
    prompt tokens the models get is theirs: 3500 for Llama-2's 4096, set by conf/model_task. `chat_frame`: a text with
    {prompt} in place of the tokenizer's chat template, such as the script's "[INST]{prompt}[/INST]".

    `score` is the best over all references of the subset's metric; the published number is its mean over the rows,
    rounded to 2 digits. A row's info is a line of the official prediction files, without "pred".
    """

    name: ClassVar[str] = "longbench"
    metrics: ClassVar[tuple[str, ...]] = ("score",)

    hub_id: str = "zai-org/LongBench"
    hub_file: str | None = "data.zip"
    revision: str | None = "7956e94fb272285d5ed77fe3ba9843ed250ce6f4"
    split: str = "test"
    subset: str = "narrativeqa"
    extended: bool = False
    context_field: str = "context"
    input_field: str = "input"
    answers_field: str = "answers"
    chat_wrap: str = "official"
    chat_frame: str | None = None
    truncate: str = "halves"
    max_new_tokens: int | None = None  # type: ignore[assignment]
    min_new_tokens: int | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.subset not in SUBSETS:  # here, for the lengths of its answers are asked for before any check
            raise ConfigError(f"task.subset must be one of {', '.join(SUBSETS)}, got {self.subset!r}")
        if self.max_new_tokens is None:
            object.__setattr__(self, "max_new_tokens", self.of.max_new_tokens)
        if self.min_new_tokens is None:
            object.__setattr__(self, "min_new_tokens", 1 if self.subset == "samsum" else 0)

    @property
    def of(self) -> Subset:
        return SUBSETS[self.subset]

    @property
    def member(self) -> str:
        return f"{self.subset}_e" if self.extended else self.subset

    @property
    def uses_chat_template(self) -> bool:  # type: ignore[override]
        return self.of.chat if self.chat_wrap == "official" else self.chat_wrap == "always"

    @property
    def frame(self) -> str | None:  # type: ignore[override]
        return self.chat_frame

    @property
    def extra_end_texts(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("\n",) if self.subset == "samsum" else ()

    @property
    def source(self) -> Members:
        return Members(
            data_files=self.data_files,
            hub_id=self.hub_id,
            hub_config=self.hub_config or self.member,
            revision=self.revision,
            split=self.split,
            streaming=self.streaming,
            member=self.member,
            hub_file=self.hub_file,
        )

    def label(self, choice: str) -> str:
        return f"{choice}/{self.member}"

    def example(self, row: dict[str, Any], where: str) -> Example:
        found = row.get("dataset")
        if found is not None and found not in (self.subset, self.member):
            extended = str(str(found).endswith("_e")).lower()
            raise ConfigError(
                f"{where} is of {found!r}, but task.subset={self.subset} task.extended={str(self.extended).lower()}: "
                f"name a file of {self.member} or set task.subset={str(found).removesuffix('_e')} "
                f"task.extended={extended}"
            )
        context = text(row, self.context_field, where, "context_field")
        asked = text(row, self.input_field, where, "input_field", empty=True) if "{input}" in self.of.prompt else ""
        answers = texts(row, self.answers_field, where)
        classes = texts(row, "all_classes", where) if row.get("all_classes") is not None else None
        if self.of.metric is classification and classes is None:
            raise ConfigError(
                f"{where}: field 'all_classes' must list the class names, {self.subset} is scored by them"
            )
        before, _, after = self.of.prompt.partition("{context}")
        name = row_id(row, "_id", context, asked, *answers)
        made = self.ask(name, (before, context, ""), after.replace("{input}", asked), answers[0])
        return replace(made, info={"answers": answers, "all_classes": classes, "length": row.get("length")})

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        """The subset's metric in percent, the best over the references."""
        return {"score": 100 * score(self.of, output, example.info)}

    def check_options(self) -> None:
        super().check_options()
        self.choice("chat_wrap", WRAPS)
        if self.extended and not self.of.extended:
            there = ", ".join(name for name, subset in SUBSETS.items() if subset.extended)
            raise ConfigError(f"LongBench-E has no {self.subset}; with task.extended=true the subset is one of {there}")
        if self.chat_frame is not None and self.chat_frame.count("{prompt}") != 1:
            raise ConfigError(f"task.chat_frame must be null or a text with {{prompt}} once, got {self.chat_frame!r}")
        if self.of.metric in CHINESE_WORDS:
            check_jieba()


def score(subset: Subset, output: str, info: Mapping[str, Any]) -> float:
    """0 to 1, of an answer and {"answers": [...], "all_classes": [...] or None}: LongBench's eval.py for one line."""
    if subset.first_line:
        output = output.lstrip("\n").split("\n")[0]
    return max(subset.metric(output, answer, info["all_classes"] or ()) for answer in info["answers"])


def texts(row: dict[str, Any], field: str, where: str) -> list[str]:
    """A field that holds a list of texts, at least one."""
    found = row.get(field)
    if not isinstance(found, list | tuple) or not found or not all(isinstance(item, str) for item in found):
        shown = f"got {found!r:.80}" if field in row else f"it has: {', '.join(row)}"
        raise ConfigError(f"{where}: field {field!r} must be a list of texts, {shown}")
    return list(found)
