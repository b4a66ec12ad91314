"""Tasks of one text in and one out: summaries, dialogues and stories to go on with, the perplexity of a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

from kvexp.tasks.articles import articles, articles_digest
from kvexp.tasks.base import (
    AFTER_EVICTION,
    Example,
    Positive,
    QuestionTask,
    RougeTask,
    Rules,
    Task,
    Truncation,
    longest_fit,
    row_id,
    word_ends,
)
from kvexp.tasks.data import Members, text, texts
from kvexp.util.errors import ConfigError

# name -> the text around {instruction}, or {instruction_after}, and {input}; task.template may also be such a text.
TEMPLATES = {
    # Stanford Alpaca's, which MLPerf's GPT-J and Keyformer's summarization scripts use
    "alpaca": (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
    ),
    # HELM's for XSum, which H2O's summarization script uses (with task.stop='###')
    "helm": "###\nArticle: {input}\n\nSummarize the above article in 1 sentence.\n",
    "plain": "{instruction}\n\n{input}\n\n",
    # The same two with the document first, so that an instruction may come once it was evicted: no paper's words.
    "alpaca_last": (
        "Below is an input that provides context, followed by an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Input:\n{input}\n\n### Instruction:\n{instruction_after}\n\n### Response:"
    ),
    "plain_last": "{input}\n\n{instruction_after}\n\n",
}
_INSTRUCTIONS = re.compile(r"\{instruction(?:_after)?\}")


@dataclass(frozen=True, kw_only=True)
class SummaryTask(QuestionTask, RougeTask):
    """Summarize a document, wherever it comes from: prefix = instruction, body = document, suffix = where the summary
    starts.

    `template` is a name in TEMPLATES or a text with {input} once (and {instruction} or {instruction_after} at most
    once); None: alpaca for a base model, plain for a chat model, with question=after_eviction alpaca_last and
    plain_last. `instruction_after`: the instruction in the words of one that follows the document.

    question=in_prompt: instruction and document are prefilled, in the template's order. question=after_eviction: the
    document is prefilled and evicted, then the instruction and all else that stands behind it is fed token by token;
    the template must not have the instruction in front. With template=alpaca_last or plain_last the text is the same
    in both.

    `stop`: an answer is scored up to the first occurrence of this text. `join_lines`: newlines of answer and reference
    become spaces before sentences are split for rougeLsum, as in the Keyformer release; false keeps a newline as a
    sentence's end.
    """

    later_options: ClassVar[tuple[str, ...]] = ("question", "instruction_after")
    rules: ClassVar[Rules] = (
        (
            lambda c: c.frame_text.count("{input}") != 1 or len(_INSTRUCTIONS.findall(c.frame_text)) > 1,
            f"task.template must be null, one of {', '.join(TEMPLATES)} or a text with {{{{input}}}} once and "
            "{{instruction}} or {{instruction_after}} at most once, got {c.template!r}",
        ),
        (
            lambda c: c.question == AFTER_EVICTION and ("{instruction" in c.halves[0] or not c.halves[1].strip()),
            "task.question=after_eviction needs a task.template with the instruction behind {{input}}, got "
            "{c.template!r}: set it to null, alpaca_last, plain_last or a text with {{input}} and {{instruction}} "
            "behind it",
        ),
        (lambda c: c.stop == "", "task.stop must be null or a text that is not empty, got ''"),
    )

    instruction: str = ""
    instruction_after: str = "Summarize the text above."
    template: str | None = None
    stop: str | None = None
    join_lines: bool = False

    @property
    def frame_text(self) -> str:
        """The template's text, a base model's where the option is null."""
        template = self.template or self._default_template(chat=False)
        return TEMPLATES.get(template, template)

    def _default_template(self, *, chat: bool) -> str:
        return ("plain" if chat else "alpaca") + ("_last" if self.question == AFTER_EVICTION else "")

    def for_model(self, *, chat: bool) -> SummaryTask:
        return replace(self, template=self.template or self._default_template(chat=chat))

    @property
    def halves(self) -> tuple[str, str]:
        """The template in front of the document and behind it."""
        before, _, after = self.frame_text.partition("{input}")
        return before, after

    def around(self) -> tuple[str, str]:
        """(text in front of every document, text behind it)."""
        before, after = map(self._instructed, self.halves)
        return before, after

    def _instructed(self, half: str) -> str:
        """This half of the template, which holds one of the two instructions at most."""
        name = "instruction_after" if "{instruction_after}" in half else "instruction"
        return half.replace(f"{{{name}}}", str(getattr(self, name)))

    def summary_of(self, name: str, body: str, reference: str) -> Example:
        """The example that asks for a summary of `body`."""
        prefix, suffix = self.around()
        return self.ask(name, (prefix, body, ""), suffix, reference)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        if self.stop is not None:
            output = output.partition(self.stop)[0]
        return self.rouge(output, reference, self.join_lines)


@dataclass(frozen=True, kw_only=True)
class Summarization(SummaryTask):
    """Summarize the documents of a data set: rows with a document (`input_field`), a summary (`reference_field`) and
    perhaps an id (`id_field`).
    """

    input_field: str = ""
    reference_field: str = ""
    id_field: str = "id"

    def example(self, row: dict[str, Any], where: str) -> Example:
        body = text(row, self.input_field, where, "input_field", empty=True)
        reference = text(row, self.reference_field, where, "reference_field")
        return self.summary_of(row_id(row, self.id_field, body, reference), body, reference)


@dataclass(frozen=True, kw_only=True)
class CNNDailyMail(Summarization):
    """Summarize a news article; rows {"article", "highlights", "id"}, 13,368 in the validation split.

    The protocol of Keyformer (Adnan et al., arXiv:2403.09054) and of MLPerf's GPT-J: Alpaca prompt, at most 1920
    prompt and 128 new tokens (beams and dtype belong to generation and model). What the Keyformer release does
    besides, each a switch that is off here: sample=with_replacement with limit=1000 (957 distinct rows),
    truncate=right (long articles lose "### Response:"), pad_to=1920 (pads count towards the budget), join_lines=true.
    Its min_length=30 counts the prompt and so does nothing: min_new_tokens is 0.
    """

    name: ClassVar[str] = "cnn_dailymail"

    hub_id: str = "abisee/cnn_dailymail"
    hub_config: str | None = "3.0.0"
    revision: str | None = "96df5e686bee6baa90b8bee7c28b81fa3fa6223d"
    instruction: str = "Summarize the following news article:"
    instruction_after: str = "Summarize the news article above."
    input_field: str = "article"
    reference_field: str = "highlights"
    max_prompt_tokens: Positive | None = 1920


@dataclass(frozen=True, kw_only=True)
class XSum(Summarization):
    """Summarize a news article in one sentence; rows {"document", "summary", "id"}, 11,332 in the validation split.

    Defaults are Keyformer's protocol (arXiv:2403.09054), with the switches of CNNDailyMail. H2O's summarization
    script (arXiv:2306.14048) is template=helm, stop='###', max_new_tokens=64, limit=100 on its own 1000 rows, with
    sampling at temperature 0.3; it scores with the package `rouge` (no stemmer), here as everywhere rouge_score.
    """

    name: ClassVar[str] = "xsum"

    hub_id: str = "EdinburghNLP/xsum"
    revision: str | None = "7d4d486c2f8ef850b1a11aead99b894ff3dd7da9"
    instruction: str = "Provide one sentence summary of the following news article:"
    instruction_after: str = "Provide one sentence summary of the news article above."
    input_field: str = "document"
    reference_field: str = "summary"
    max_prompt_tokens: Positive | None = 1920


@dataclass(frozen=True, kw_only=True)
class GovReport(Summarization):
    """Summarize a report; rows {"report", "summary"}, 973 in the test split (Huang et al., arXiv:2104.02112).

    The long-context task of Keyformer (arXiv:2403.09054, Fig. 8: MPT-7B-storywriter, prompts of 8k tokens) with its
    Alpaca prompt. Its script reads the 200 rows of LongBench's gov_report instead: protocol=keyformer, which sets
    input_field=context, reference_field=answers (the first of which is the reference) and, in the hub repository,
    hub_file=data.zip; data_files may be that file, a folder with gov_report.jsonl in it, or such a file. With
    LongBench's own prompt and metric it is task=longbench task.subset=gov_report.
    """

    name: ClassVar[str] = "govreport"

    hub_id: str = "ccdv/govreport-summarization"
    hub_config: str | None = "document"
    hub_file: str | None = None
    split: str = "test"
    instruction: str = "You are given a report by a government agency. Write a one-page summary of the report."
    instruction_after: str = "Above is a report by a government agency. Write a one-page summary of the report."
    input_field: str = "report"
    reference_field: str = "summary"
    max_new_tokens: Positive = 512
    max_prompt_tokens: Positive | None = 8192

    @property
    def source(self) -> Members:
        return Members(**vars(super().source), member="gov_report", hub_file=self.hub_file)

    def example(self, row: Mapping[str, Any], where: str) -> Example:
        references = row.get(self.reference_field)
        if isinstance(references, list | tuple) and references:
            row = {**row, self.reference_field: references[0]}
        return super().example(dict(row), where)


@dataclass(frozen=True, kw_only=True)
class News(SummaryTask):
    """Summarize a fictional news article of kvexp.tasks.articles, which no model has read: 36 of 450 to 900 words.

    The body is the article without its title, which would be a summary already; the reference its three highlights, one
    a line, as in CNN/DailyMail. Two things are not: the instruction says how long a summary is wanted, and an answer
    has as many tokens as the references, since ROUGE F1 falls with every sentence that the reference does not have.
    """

    name: ClassVar[str] = "news"
    generated: ClassVar[bool] = True
    ordered: ClassVar[str] = "articles"

    instruction: str = "Summarize the following news article in three sentences:"
    instruction_after: str = "Summarize the news article above in three sentences."
    max_new_tokens: Positive = 85

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for article in islice(articles(), self.limit):
            yield f"article {article.id}", {"article": article}

    def example(self, row: dict[str, Any], where: str) -> Example:
        article = row["article"]
        return self.summary_of(article.id, article.text, "\n".join(article.highlights))

    def articles_read(self) -> set[str]:
        return {row["article"].id for _, row in self.rows()}

    def fingerprint(self) -> str:
        return f"articles:{articles_digest()}"


_MARKS = re.compile("<sep>|<turn>|<end>")  # of SODA's prompt


@dataclass(frozen=True, kw_only=True)
class Soda(QuestionTask, RougeTask):
    """Write the rest of a dialogue after its first turn; rows {"narrative", "speakers", "dialogue", ...} of SODA
    (Kim et al., arXiv:2212.10465), 146,346 in the validation split.

    The conversation task of Keyformer (arXiv:2403.09054): its prompt, one answer of at most 128 tokens for all further
    turns, ROUGE to those turns. `turn_separator` stands between the turns of the reference, a line end so that
    rougeLsum sees them as sentences; the release puts nothing there, which glues the last word of a turn to the first
    of the next. `join_lines`: line ends of the answer are removed likewise, as in the release; false keeps them. The
    marks <sep>, <turn> and <end> are taken out of answers. The release draws rows as its summarization script does.
    With question=after_eviction the narrative is evicted first; the instruction and the first turn come then.
    """

    name: ClassVar[str] = "soda"
    later_options: ClassVar[tuple[str, ...]] = ("question",)

    hub_id: str = "allenai/soda"
    revision: str | None = "d80f16879432016b62fa3d32d0fc4eeea4af78aa"
    turn_separator: str = "\n"
    join_lines: bool = False
    max_prompt_tokens: Positive | None = 1920

    def example(self, row: dict[str, Any], where: str) -> Example:
        narrative = text(row, "narrative", where, "data_files")
        speakers, turns = texts(row, "speakers", where, 2), texts(row, "dialogue", where, 2)
        between = f" <sep> Generate a dialogue between {speakers[0]} and {speakers[1]} given above narrative. <sep> "
        rest = self.turn_separator.join("".join(turn.splitlines()) for turn in turns[1:])
        name = row_id(row, "original_index", narrative, *turns)
        return self.ask(name, ("", narrative, ""), between + turns[0], rest)

    def score(self, output: str, reference: str, example: Example) -> dict[str, float]:
        output = _MARKS.sub("", output)
        if self.join_lines:
            output = "".join(output.splitlines())
        return self.rouge(output, reference)


@dataclass(frozen=True, kw_only=True)
class Stories(RougeTask):
    """Continue a text; rows {"text"}, as in TinyStories (Eldan and Li, arXiv:2305.07759).

    The first int(prompt_share * words) words, at least one, are the prompt, all of it body; the others, at most
    `continuation_words` of them, are the continuation, which begins with the white space before its first word. Of a
    text in a script without spaces (Chinese, Japanese, Thai), every character is a word. ROUGE
    compares the answer with the continuation; with `nll` the runner also measures the continuation's negative
    log-likelihood. A prompt cut at its end would not lead to the continuation: truncate must be skip. With `nll` a row
    is skipped too where the model cannot hold prompt and continuation: that of fewer words would be another number.
    """

    name: ClassVar[str] = "stories"
    uncut: ClassVar[str] = "a story cut short does not lead to its continuation; lower task.prompt_share instead"
    rules: ClassVar[Rules] = (
        (
            lambda c: not 0 < c.prompt_share < 1,
            "task.prompt_share must be between 0 and 1, both excluded, got {c.prompt_share}",
        ),
    )

    hub_id: str = "roneneldan/TinyStories"
    revision: str | None = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
    text_field: str = "text"
    id_field: str = "id"
    prompt_share: float = 0.5
    continuation_words: Positive | None = None
    nll: bool = True
    truncate: Truncation = "skip"

    @property
    def needs_nll(self) -> bool:  # type: ignore[override]
        return self.nll

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*Task.metrics, "nll") if self.nll else Task.metrics

    def example(self, row: dict[str, Any], where: str) -> Example:
        story = text(row, self.text_field, where, "text_field").strip()
        ends = word_ends(story)
        if len(ends) < 2:
            name = row_id(row, self.id_field, story)
            return Example(name, "", "", skipped="a story of one word has nothing to continue")
        words = min(max(1, int(self.prompt_share * len(ends))), len(ends) - 1)
        last = len(ends) if self.continuation_words is None else min(len(ends), words + self.continuation_words)
        prompt, continuation = story[: ends[words - 1]], story[ends[words - 1] : ends[last - 1]]
        name = row_id(row, self.id_field, prompt, continuation)
        return Example(name, prompt, continuation.strip(), continuation)


@dataclass(frozen=True, kw_only=True)
class Prompts(RougeTask):
    """Answer prompts as they are; rows {"prompt"}, and perhaps {"answer"} and {"id"}.

    Without answers there is no ROUGE, and a table says how far a run is from the full cache; either all rows have one
    or none. All of a prompt is body. One that is too long is skipped, since its end may be what it asks.
    """

    name: ClassVar[str] = "prompts"

    max_new_tokens: Positive = 64
    truncate: Truncation = "skip"

    def example(self, row: dict[str, Any], where: str) -> Example:
        prompt = text(row, "prompt", where, "data_files")
        answer = text(row, "answer", where, "data_files", empty=True) if row.get("answer") is not None else ""
        return Example(row_id(row, "id", prompt, answer), prompt, answer)

    def check_examples(self, examples: Sequence[Example]) -> None:
        super().check_examples(examples)
        with_answer = sum(bool(example.reference) for example in examples)
        if 0 < with_answer < len(examples):
            raise ConfigError(
                f"{with_answer} of {len(examples)} prompts have an answer, and ROUGE takes one: give all of them "
                '"answer", or none'
            )


@dataclass(frozen=True, kw_only=True)
class Perplexity(Task):
    """Negative log-likelihood of a text; rows {"text"}, such as PG-19's test books (Rae et al., arXiv:1911.05507).

    The first `prefill_tokens` tokens (or a few less, up to the end of a word, or of a character
    in a script without spaces) are prefilled and evicted, all others up to
    `total_tokens` are fed one by one and judged, eviction going on (Xiao et al., arXiv:2309.17453, section 4.1). A
    ratio is one of the prefilled tokens; the paper's cache of fixed size is budget=tokens. Past what the model was
    built for it takes cache.beyond_context=true. `concatenate` makes one long text of all rows, an empty line between
    them. `nll` is the mean in nats per token, its exponential the perplexity; a row's info holds it per bucket of
    `bucket_tokens` positions, the first and the last of which may be shorter.
    """

    name: ClassVar[str] = "perplexity"
    metrics: ClassVar[tuple[str, ...]] = ("nll",)
    needs_nll: ClassVar[bool] = True
    only_nll: ClassVar[bool] = True
    uses_chat_template: ClassVar[bool] = False
    uncut: ClassVar[str] = "it sets its length"
    rules: ClassVar[Rules] = (
        (
            lambda c: c.total_tokens <= c.prefill_tokens,
            "task.total_tokens={c.total_tokens} must be above task.prefill_tokens={c.prefill_tokens}",
        ),
    )

    hub_id: str = "emozilla/pg19-test"
    split: str = "test"
    text_field: str = "text"
    prefill_tokens: Positive = 512
    total_tokens: int = 4096
    bucket_tokens: Positive = 512
    concatenate: bool = False
    truncate: Truncation = "skip"
    max_new_tokens: Positive = 1

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self.concatenate:
            yield from super().rows()
            return
        whole = [text(row, self.text_field, where, "text_field") for where, row in super().rows()]
        if whole:
            yield f"the {len(whole)} texts of {self.source}", {self.text_field: "\n\n".join(whole)}

    def example(self, row: dict[str, Any], where: str) -> Example:
        words = text(row, self.text_field, where, "text_field")
        return Example(row_id({} if self.concatenate else row, "id", words), words, "", info={"from": where})

    def fit(self, example: Example, count: Callable[[str], int], room: int) -> Example:
        if self.total_tokens > room:
            raise ConfigError(
                f"task.total_tokens={self.total_tokens}, but the model holds {room} positions: lower it, or set "
                "cache.beyond_context=true to go on past them"
            )
        ends = [0, *word_ends(example.prompt)]
        words = example.prompt

        def tokens(n: int) -> int:
            return count(words[: ends[n]])

        first = longest_fit(tokens, self.prefill_tokens, len(ends) - 1)
        last = longest_fit(tokens, self.total_tokens, len(ends) - 1)
        if first < 1 or last <= first:
            why = f"too short to prefill task.prefill_tokens={self.prefill_tokens} and judge some tokens"
            return replace(example, skipped=f"{why}; lower it, or set task.concatenate=true")
        prompt, rest = words[: ends[first]], words[ends[first] : ends[last]]
        return replace(example, prompt=prompt, body=prompt, continuation=rest, info={"prefilled": tokens(first)})

    def score_nll(self, logprobs: list[float], example: Example) -> tuple[dict[str, float], dict[str, Any]]:
        """Mean overall, and per bucket [from, to) of positions, where prefilled tokens count as positions 0, 1, ..."""
        start, size = int(example.info["prefilled"]), self.bucket_tokens
        buckets = []
        for low in range(start // size * size, start + len(logprobs), size):
            inside = logprobs[max(low - start, 0) : max(low - start, 0) + min(low + size - start, size)]
            at = max(low, start)
            buckets.append({"from": at, "to": at + len(inside), "nll": -sum(inside) / len(inside)})
        return super().score_nll(logprobs, example)[0], {"buckets": buckets}
