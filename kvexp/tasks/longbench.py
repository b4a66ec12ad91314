"""LongBench (arXiv:2308.14508): its data sets with their prompts, its metrics, and the task.

The metrics equal its eval.py to the digit. Fractions, 0 to 1; each takes (answer, reference, classes). Of the
packages that eval.py uses only jieba is still needed, and only for Chinese: `rouge` 1.0.1 and fuzzywuzzy 0.18 are
computed here, with the peculiarities that move their numbers.
"""

from __future__ import annotations

import importlib.util
import re
import string
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Annotated, Any, ClassVar, Literal

from kvexp.tasks.base import Example, Rules, SharedContextTask, SubsetTask, Truncation, kinds_of, once, row_id
from kvexp.tasks.data import Members, text, texts
from kvexp.tasks.infinitebench import check_right
from kvexp.tasks.metrics import CHINESE_PUNCTUATION, f1
from kvexp.tasks.metrics import qa_f1 as english_f1
from kvexp.util.errors import ConfigError
from kvexp.util.fields import AtLeast

_PUNCTUATION = str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION)


def qa_f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """SQuAD's F1 of words."""
    return english_f1(answer, reference)


def qa_f1_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of jieba's words, lower case, without punctuation."""
    return f1(_words_zh(answer), _words_zh(reference))


def rouge_l(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L F of the `rouge` package: distinct words on any longest common subsequence of two sentences.

    A full stop ends a sentence, wherever it stands. The subsequence is the one its table walk finds; white space
    between two full stops is a sentence of one empty word. 0 for a text without anything but full stops.
    """
    ours, theirs = _sentences(answer), _sentences(reference)
    if not ours or not theirs:
        return 0.0
    shared: set[str] = set()
    for sentence in theirs:
        shared |= _common(sentence, ours)
    precision = len(shared) / len({word for sentence in ours for word in sentence})
    recall = len(shared) / len({word for sentence in theirs for word in sentence})
    return 2 * (precision * recall) / (precision + recall + 1e-8)


def rouge_l_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L of jieba's words."""
    return rouge_l(" ".join(segment(answer)), " ".join(segment(reference)))


def classification(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """1 / (how many class names the answer holds) if the right one is among them, not counting parts of its name.

    eval.py removes such parts from the list that it is walking along, and so skips the name after each one removed.
    """
    named = [name for name in classes if name in answer]
    for name in named:  # removing from it while walking along it is what is meant to happen
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def count(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are the right one."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def retrieval(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """`count` of the paragraph's number; the reference is "Paragraph 7" or "段落7"."""
    match = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    if match is None:
        raise ConfigError(f"the answer of a passage_retrieval row must name a paragraph, got {reference!r}")
    return count(answer, match.group(1))


def code_similarity(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Similarity, in whole percent, of the reference to the answer's first line that looks like code.

    fuzzywuzzy's ratio as it is without python-Levenshtein: difflib's, rounded; 0 if either text is empty.
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == reference:
        return 1.0
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100 if line and reference else 0.0


def segment(text: str) -> list[str]:
    """Chinese words, by jieba."""
    check_jieba()
    with warnings.catch_warnings():  # its import uses pkg_resources, its patterns escapes that Python frowns upon
        warnings.simplefilter("ignore")
        import jieba

        jieba.setLogLevel("WARNING")
        return list(jieba.cut(text, cut_all=False))


def check_jieba() -> None:
    """ConfigError if the package is missing, so that it shows before the first answer."""
    if importlib.util.find_spec("jieba") is None:
        raise ConfigError("this Chinese task is scored in jieba's words: pip install jieba (or kvexp[chinese])")


def _words_zh(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_PUNCTUATION).split()) for word in segment(text))
    return list(filter(None, words))


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _common(reference: list[str], answers: list[list[str]]) -> set[str]:
    """Words on the longest common subsequence of the reference sentence with each answer sentence.

    The table of all answer sentences is filled at once, row by row: they stand side by side, each with a column of
    zeros in front of it. Adding a larger number to each later sentence keeps the running maximum from crossing over.
    """
    import numpy as np  # late, as in `random_state`

    numbers = {word: number for number, word in enumerate(reference)}
    flat = np.array([n for sentence in answers for n in (-1, *(numbers.get(word, -1) for word in sentence))])
    starts = np.cumsum([0] + [len(sentence) + 1 for sentence in answers])
    apart = np.repeat(np.arange(len(answers)), np.diff(starts)) * (len(reference) + 1)
    table = np.zeros((len(reference) + 1, len(flat)), dtype=np.int64)
    for i, word in enumerate(reference, start=1):
        row = table[i - 1].copy()
        match = np.flatnonzero(flat == numbers[word])
        row[match] = table[i - 1, match - 1] + 1
        table[i] = np.maximum.accumulate(row + apart) - apart
    shared: set[str] = set()
    for start, sentence in zip(starts.tolist(), answers, strict=False):
        shared |= _walk(table[:, start : start + len(sentence) + 1].tolist(), reference, sentence)
    return shared


def _walk(table: list[list[int]], reference: list[str], answer: list[str]) -> set[str]:
    """The words met on the way back through a table of common lengths; left where both ways are as long."""
    i, j = len(reference), len(answer)
    words: set[str] = set()
    while i and j:
        if reference[i - 1] == answer[j - 1]:
            words.add(reference[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


Metric = Callable[[str, str, Sequence[str]], float]


@dataclass(frozen=True)
class Subset:
    """One data set. chat: whether a chat model's template goes around its prompts; first_line: whether only the first
    line of an answer counts; extended: whether it has a LongBench-E version.
    """

    prompt: str
    metric: Metric
    new_tokens: int
    chat: bool = True
    first_line: bool = False
    extended: bool = True


# The prompts of config/dataset2prompt.json in github.com/THUDM/LongBench (MIT), to the letter: "asconcisely",
# the spaces at line ends and the missing newline before "Next line of code" are theirs.
METRICS: tuple[Metric, ...] = (qa_f1, qa_f1_zh, rouge_l, rouge_l_zh, classification, count, retrieval, code_similarity)
SUBSETS = kinds_of("longbench", Subset, *METRICS)
CHINESE_WORDS = (qa_f1_zh, rouge_l_zh)
# Compare whole lines: some official lines of code have a comment, for which nothing is right, not even the line itself.
LINES = (rouge_l, rouge_l_zh, code_similarity)


@dataclass(frozen=True, kw_only=True)
class LongBench(SubsetTask, SharedContextTask):
    """One of the 21 data sets of LongBench (Bai et al., arXiv:2308.14508) or, `extended`, its LongBench-E version.

    Rows {"input", "context", "answers", "length", "dataset", "language", "all_classes", "_id"}. `data_files`: the
    official data.zip, a folder with {subset}.jsonl somewhere in it, or a file of the subset; without it the data.zip
    on the hub is fetched whole (114 MB). A reformatted copy on the hub: task.hub_id=OWNER/NAME task.hub_file=null,
    with `context_field`, `input_field` and `answers_field` for what it calls them.

    The official protocol: its prompts and answer lengths (null: the subset's), a prompt too long loses its middle
    (`truncate=halves`, before the template goes around it), a chat model's template goes around the prompts of QA,
    summaries and synthetic tasks but not around few-shot lessons and code (`chat_wrap`), a line end also ends an
    answer of samsum, which is not to be empty; of trec, triviaqa, samsum and lsht the first line is scored. How many
    prompt tokens the models get is theirs: 3500 for Llama-2's 4096, set by conf/pairs.yaml. `chat_frame`: a text with
    {prompt} in place of the tokenizer's chat template, such as the script's "[INST]{prompt}[/INST]".

    `score` is the best over all references of the subset's metric; the published number is its mean over the rows,
    rounded to 2 digits. A row's info is a line of the official prediction files, without "pred".
    """

    name: ClassVar[str] = "longbench"
    metrics: ClassVar[tuple[str, ...]] = ("score",)
    subsets: ClassVar[Mapping[str, Subset]] = SUBSETS
    rules: ClassVar[Rules] = (
        (
            lambda c: c.extended and not c.of.extended,
            "LongBench-E has no {c.subset}; with task.extended=true the subset is one of "
            f"{', '.join(name for name, subset in SUBSETS.items() if subset.extended)}",
        ),
        once("chat_frame", "prompt"),
    )

    hub_id: str = "zai-org/LongBench"
    hub_file: str | None = "data.zip"
    revision: str | None = "7956e94fb272285d5ed77fe3ba9843ed250ce6f4"
    split: str = "test"
    subset: str = "narrativeqa"
    extended: bool = False
    context_field: str = "context"
    input_field: str = "input"
    answers_field: str = "answers"
    chat_wrap: Literal["official", "always", "never"] = "official"
    chat_frame: str | None = None
    truncate: Truncation = "halves"
    min_new_tokens: Annotated[int, AtLeast(0)] | None = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
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
        plain = {**vars(super().source), "hub_config": self.hub_config or self.member}
        return Members(**plain, member=self.member, hub_file=self.hub_file)

    def label(self, choice: str) -> str:
        return f"{choice}/{self.member}"

    def example(self, row: dict[str, Any], where: str) -> Example:
        dataset = row.get("dataset")
        if dataset is not None and dataset not in (self.subset, self.member):
            extended = str(str(dataset).endswith("_e")).lower()
            raise ConfigError(
                f"{where} is of {dataset!r}, but task.subset={self.subset} task.extended={str(self.extended).lower()}: "
                f"name a file of {self.member} or set task.subset={str(dataset).removesuffix('_e')} "
                f"task.extended={extended}"
            )
        context = text(row, self.context_field, where, "context_field")
        question = text(row, self.input_field, where, "input_field", empty=True) if "{input}" in self.of.prompt else ""
        answers = texts(row, self.answers_field, where)
        classes = texts(row, "all_classes", where) if row.get("all_classes") is not None else None
        if self.of.metric is classification and classes is None:
            raise ConfigError(
                f"{where}: field 'all_classes' must list the class names, {self.subset} is scored by them"
            )
        info = {"answers": answers, "all_classes": classes, "length": row.get("length")}
        if self.of.metric not in LINES:
            try:
                check_right(lambda said, _: score(self.of, said, info), answers, where, self.answers_field)
            except ConfigError as error:
                raise ConfigError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error
        before, _, after = self.of.prompt.partition("{context}")
        name = row_id(row, "_id", context, question, *answers)
        example = self.ask(name, (before, context, ""), after.replace("{input}", question), answers[0])
        return replace(example, info=info)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        """The subset's metric in percent, the best over the references."""
        return {"score": 100 * score(self.of, output, example.info)}

    def check_options(self) -> None:
        super().check_options()
        if self.of.metric in CHINESE_WORDS:
            check_jieba()


def score(subset: Subset, output: str, info: Mapping[str, Any]) -> float:
    """Score of an answer, 0 to 1, by {"answers": [...], "all_classes": [...] or None}: eval.py for one line."""
    if subset.first_line:
        output = output.lstrip("\n").split("\n")[0]
    return max(subset.metric(output, answer, info["all_classes"] or ()) for answer in info["answers"])
