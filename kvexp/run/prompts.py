"""Examples as prompts and tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvexp.core import Budget
from kvexp.core.budget_resolution import check_budget, check_spans, may_evict
from kvexp.hf.chat_template import check_heard, end_of_turn, render, unusable
from kvexp.hf.moving_rope import MovingRope
from kvexp.hf.second_pass import check_second_pass
from kvexp.hf.traits import check_positions, prompt_sizes
from kvexp.hf.traits import max_positions as positions_of
from kvexp.run.model_spec import config_of_spec, max_positions, tokenizer_of
from kvexp.run.settings import Settings, batch_budget
from kvexp.tasks import Example, LMEval, Task
from kvexp.tasks.lm_eval import Item
from kvexp.util.errors import ConfigError

if TYPE_CHECKING:
    from kvexp.hf.load import Model, Tokenizer
    from kvexp.lm_eval import Scorer


# Examples to token ids: chat template, cutting to what the model holds, or the reason for not running one.


SLACK = 4  # tokens


@dataclass(frozen=True)
class TokenizedExample:
    """An example's prompt as text and token ids; where it is not run, `skipped` says why and ids are empty.

    question_text, question_ids: what is fed after the eviction; an answer follows text + question_text. truncated:
    whether something was left out; tokens: the count before that, question included. choices: ids of the example's
    choices where they stand; following: of its continuation, where the task measures that. chat_templated: the text
    came out of a chat template, start token and all. spans: of the marked texts, as of `token_spans`.
    """

    example: Example
    text: str
    ids: list[int]
    truncated: bool = False
    skipped: str | None = None
    tokens: int = 0  # before cutting, question included
    question_text: str = ""
    question_ids: list[int] = field(default_factory=list)
    choices: list[list[int]] = field(default_factory=list)
    following: list[int] = field(default_factory=list)
    chat_templated: bool = True  # read where the model is a chat model; a task may want no template around its prompts
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def digest(self) -> str | None:
        """16 hex digits of the token ids that are fed before an answer; None for an example that is skipped.

        By it a prompt made again is known to be the same.
        """
        fed = json.dumps([list(self.ids), list(self.question_ids)]).encode()
        return hashlib.sha256(fed).hexdigest()[:16] if self.ids else None

    @property
    def context_digest(self) -> str:
        """16 hex digits of the prompt's token ids, without the question: equal for questions about one context."""
        return hashlib.sha256(json.dumps(list(self.ids)).encode()).hexdigest()[:16]

    @property
    def size(self) -> int:
        """Tokens to be fed before an answer."""
        return len(self.ids) + len(self.question_ids)


def tokenize(example: Example, task: Task, tokenizer: Tokenizer, room: int, *, chat: bool) -> TokenizedExample:
    """The example's prompt and question in at most `room` tokens (and the task's own maximum), cut as the task says.

    task.truncate: "middle" shortens the body's text until the whole, tokenised as one, fits; "halves" keeps both ends
    of the tokens (`_truncate_middle`); "right" cuts the end of the prompt's tokens, and where a template goes around
    the prompt, whose end must stay, does what "middle" does; "skip" keeps a skipped row. A question is never cut.
    Of an example with `questions` the longest of them counts, so that a context that is cut is the same for all.
    With `chat`, and unless the task says otherwise, prompt and question go through the tokenizer's chat template (or
    the task's frame) as one message, which is then parted where the question starts.
    """
    if room < 1:
        raise ConfigError("max_new_tokens leaves no room for a prompt in this model: lower generation.max_new_tokens")
    limit = min(room, task.max_prompt_tokens or room)

    wrapped = chat and task.uses_chat_template
    templated = wrapped and task.frame is None
    example = example.for_chat_template() if templated else example

    def of(words: str) -> TokenizedExample:
        text, question_text = _apply_template(example, words, tokenizer, task.frame if wrapped else "{prompt}")
        # A chat template brings its own start token.
        ids = tokenizer(text, add_special_tokens=not templated, verbose=False).input_ids
        question = _after(text, ids, question_text, tokenizer, templated)
        return TokenizedExample(
            example, text, ids, question_text=question_text, question_ids=question, chat_templated=templated
        )

    def made(kept: int) -> TokenizedExample:
        return of(example.prefix + example.body[:kept] + example.suffix)

    whole = made(len(example.body))
    count, more = whole.size, 0
    if example.questions:
        frame = task.frame if wrapped else "{prompt}"
        more = max(0, _longest_question(example, tokenizer, frame) - len(whole.question_ids))
    if task.truncate == "halves":
        return replace(_truncate_middle(whole, of, task.max_prompt_tokens, room - more, tokenizer), tokens=count)
    limit -= more
    if count <= limit:
        return replace(whole, tokens=count)
    if task.truncate == "right" and not wrapped and limit > len(whole.question_ids):
        return replace(whole, ids=whole.ids[: limit - len(whole.question_ids)], truncated=True, tokens=count)
    if task.truncate in ("middle", "right"):
        fits, over = -1, len(example.body)
        while over - fits > 1:
            half = (fits + over) // 2
            fits, over = (half, over) if made(half).size <= limit else (fits, half)
        if fits > 0:
            return replace(made(fits), truncated=True, tokens=count)
    return TokenizedExample(example, "", [], skipped="too long", tokens=count)


def _truncate_middle(
    whole: TokenizedExample, of: Callable[[str], TokenizedExample], most: int | None, room: int, tokenizer: Tokenizer
) -> TokenizedExample:
    """The first and last `most` // 2 tokens of the words, each half decoded, put together and tokenised again.

    LongBench's pred.py, to the letter: `most` counts the start token and no chat template, which goes around what is
    left. Where that is not within `room`, or without `most`, as much more of the middle goes as has to.
    """
    words = whole.example.prompt
    ids = tokenizer(words, verbose=False).input_ids
    keep = min(len(ids), most or len(ids))
    cut = whole
    while keep >= 2:
        if keep < len(ids):
            ends = (ids[: keep // 2], ids[-(keep // 2) :])
            cut = replace(of("".join(tokenizer.decode(end, skip_special_tokens=True) for end in ends)), truncated=True)
        if cut.size <= room:
            return cut
        keep -= cut.size - room
    return TokenizedExample(whole.example, "", [], skipped="too long")


def _longest_question(example: Example, tokenizer: Tokenizer, frame: str | None) -> int:
    """Tokens that the longest of an example's `questions` may have, what follows it in the template included."""
    variants = [replace(example, question=text, questions=(), number=0) for text in dict.fromkeys(example.questions)]
    questions = [_apply_template(other, "A text.", tokenizer, frame)[1] for other in variants]
    # Behind a context a question may have other tokens than alone: one or two more, at its beginning.
    return SLACK + max(len(token_ids(words, tokenizer)) for words in questions)


def turn_ids(prompt: TokenizedExample, tokenizer: Tokenizer, message: str, *, chat: bool) -> list[int]:
    """Token ids of a further message of the user, from the end of the answer before it to the beginning of the next.

    Of a chat model the template's, which end the answer's turn first; of any other the message in a paragraph.
    """
    words = f"\n\n{message}\n"
    if chat and prompt.chat_templated:
        answer = "Thank you."
        turns = [{"role": role, "content": said} for role, said in (("user", "Hello."), ("assistant", answer))]
        turns.append({"role": "user", "content": message})
        try:
            text = render(tokenizer, turns, add_generation_prompt=True)
        except Exception as error:  # as in `in_template`
            raise ConfigError(
                f"the tokenizer's chat template knows no second turn: set model.chat=false ({error})"
            ) from error
        _, _, words = text.partition(answer)
    return token_ids(words, tokenizer)


def later_turns(prompt: TokenizedExample, tokenizer: Tokenizer, last: int, *, chat: bool) -> list[list[int]]:
    """`turn_ids` of the messages behind the first one, up to turn `last`; empty where there is no conversation."""
    return [turn_ids(prompt, tokenizer, turn.message, chat=chat) for turn in prompt.example.turns[1 : last + 1]]


def token_ids(words: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of words alone: no start token, no template, no end."""
    ids: list[int] = tokenizer(words, add_special_tokens=False, verbose=False).input_ids
    return ids


def continuation(prompt: TokenizedExample, tokenizer: Tokenizer, *, chat: bool, words: str | None = None) -> list[int]:
    """Token ids of `words` (None: the example's continuation) where they follow the prompt and its question."""
    words = prompt.example.continuation if words is None else words
    templated = chat and prompt.chat_templated
    return _after(prompt.text + prompt.question_text, prompt.ids + prompt.question_ids, words, tokenizer, templated)


def _after(text: str, ids: list[int], words: str, tokenizer: Tokenizer, templated: bool) -> list[int]:
    """Token ids of `words` behind the text; on their own where the whole's tokens do not begin with the text's."""
    if not words:
        return []
    whole: list[int] = tokenizer(text + words, add_special_tokens=not templated, verbose=False).input_ids
    if whole[: len(ids)] == ids and len(whole) > len(ids):
        return whole[len(ids) :]
    return token_ids(words, tokenizer)


def _apply_template(example: Example, words: str, tokenizer: Tokenizer, frame: str | None) -> tuple[str, str]:
    """The text to prefill and the text to feed after the eviction: together what the model reads, template and all.

    frame: the text around {prompt}; None: the tokenizer's chat template. The answer's opening is behind all of it.
    """
    text, question = _without_opening(example, words, tokenizer, frame)
    return (text, question + example.opening) if example.question else (text + example.opening, question)


def _without_opening(example: Example, words: str, tokenizer: Tokenizer, frame: str | None) -> tuple[str, str]:
    question = example.question
    if frame is not None:
        before, _, after = frame.partition("{prompt}")
        return (before + words, question + after) if question else (before + words + after, "")
    system = example.system if words.startswith(example.system) else ""
    text = in_template(tokenizer, words[len(system) :].lstrip() + question if system else words + question, system)
    if not question:
        return text, ""
    # A template may strip what it is given; the white space before the question then stays with the context.
    at = text.rfind(question)
    at = text.rfind(question.strip()) if at < 0 else at
    if at < 0:
        raise ConfigError(
            f"example {example.id}: the tokenizer's chat template changes the words of the question, so it cannot "
            "be parted before it: set task.question=in_prompt or model.chat=false"
        )
    return text[:at], text[at:]


def in_template(tokenizer: Tokenizer, words: str, system: str = "") -> str:
    """The words as the user's turn of the tokenizer's chat template, up to where the answer begins.

    system: of the turn before it; without it the template's own stands there, if it has one.
    """
    turns = [*([{"role": "system", "content": system.strip()}] if system else []), {"role": "user", "content": words}]
    try:
        if system:
            check_heard(tokenizer, turns, "set model.chat=false", add_generation_prompt=True)
        return render(tokenizer, turns, add_generation_prompt=True)
    except ConfigError:
        raise
    except Exception as error:  # jinja's, and whatever a template does with its values: no common base
        raise unusable(error, "set model.chat=false") from error


def tokens_to_come(settings: Settings, prompt: TokenizedExample) -> int:
    """Tokens to come after the prefill: the question's, and the longest choice's or the answer's."""
    return len(prompt.question_ids) + max(map(len, prompt.choices), default=settings.decoding.max_new_tokens)


# What tokenizer and configuration can tell before weights load: templates, room for answers, budgets too small.


_TRIAL = "Hello there"


def check_template(settings: Settings, tokenizer: Tokenizer) -> None:
    """ConfigError where prompts of this task go through a chat template that is not there or does not hold them."""
    if not settings.templated:
        return
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("model.chat=true, but this tokenizer has no chat template: set model.chat=false")
    if _TRIAL not in in_template(tokenizer, _TRIAL):
        raise ConfigError(
            "the tokenizer's chat template leaves out what the user says: correct chat_template in the model's folder, "
            "or set model.chat=false"
        )
    if in_template(tokenizer, _TRIAL) != in_template(tokenizer, _TRIAL):
        raise ConfigError(
            "the tokenizer's chat template writes another text every time, so no two runs would have the same prompts: "
            "correct chat_template in the model's folder, or set model.chat=false"
        )


def check_max_new_tokens(settings: Settings, todo: list[tuple[int, Example]]) -> None:
    """ConfigError where the answers to be generated leave no position for a prompt, or the model cannot be."""
    room, longest = max_positions(settings.model), settings.decoding.max_new_tokens
    generates = not settings.task.only_nll and not isinstance(settings.task, LMEval)
    if settings.cache.beyond_context or not generates or all(example.choices for _, example in todo):
        return
    if longest > room:
        raise no_room(settings, longest, room)


def no_room(settings: Settings, longest: int, room: int) -> ConfigError:
    """The error of answers that take all `room` positions of a model."""
    return ConfigError(
        f"max_new_tokens={longest} leaves no room for a prompt, the model holds {room} positions for both: lower "
        f"task.max_new_tokens (or generation.max_new_tokens){_beyond(settings)}"
    )


def _beyond(settings: Settings) -> str:
    """What else a run can do whose prompts do not fit; an engine cannot."""
    beyond = ", or go beyond them with cache.beyond_context=true (not for learned positions)"
    return beyond if settings.engine is None else ""


def fit_examples(
    settings: Settings, tokenizer: Tokenizer, todo: list[tuple[int, Example]]
) -> list[tuple[int, Example]]:
    """The examples at the lengths their task sets in tokens (`Task.fit`)."""
    task, chat = settings.task, settings.model.chat
    if type(task).fit is Task.fit:
        return todo
    whole = dataclasses.replace(task, truncate="skip", max_prompt_tokens=None, pad_to=None)

    def count(words: str, opening: str = "") -> int:
        return tokenize(Example("", words, "", opening=opening), whole, tokenizer, 1 << 40, chat=chat).size

    room = 1 << 40 if settings.cache.beyond_context else max_positions(settings.model)

    def fitted(example: Example) -> Example:
        fit = task.fit(example, count, room)
        return dataclasses.replace(fit, questions=example.questions, number=example.number)

    return [(index, fitted(example)) for index, example in todo]


def with_stop_tokens(settings: Settings, model: Model, tokenizer: Tokenizer) -> Settings:
    """The settings with what task and chat template add to the model's: end tokens, and the tags of thinking.

    A text of no token adds none.
    Files of a chat model often name the base model's end token alone, and what ends a turn stands in its template.
    """
    from kvexp.generate.inputs import eos_ids

    task = settings.task
    endings = [tokenizer(text, add_special_tokens=False).input_ids for text in task.extra_end_texts]
    more = [ids[-1] for ids in endings if ids]
    if settings.templated and settings.decoding.eos == "model":
        more += end_of_turn(tokenizer)
    decoding = dataclasses.replace(settings.decoding, thinking=settings.thinking)
    if more:
        decoding = dataclasses.replace(decoding, eos=tuple(dict.fromkeys([*eos_ids(model, decoding.eos), *more])))
    return settings if decoding == settings.decoding else dataclasses.replace(settings, decoding=decoding)


def budget_obstacle(settings: Settings, config: Any, tokenizer: Tokenizer, prompt: TokenizedExample) -> str | None:
    """Why some layer's budget cannot hold what the method protects, and what to change; None where all can.

    Also why a second pass over the prompt does not fit the model.
    """
    if settings.budget is None or isinstance(settings.task, LMEval):
        return None  # lm-eval's items are looked at as they are made (Scorer.obstacle)
    try:
        size, fed = len(prompt.ids), [] if settings.task.only_nll else [tokens_to_come(settings, prompt)]
        if settings.task.needs_nll:
            fed.append(len(prompt.question_ids) + len(prompt.following))
        check_length(settings, settings.budget, config, size, fed)
        cache = dataclasses.replace(settings.cache, budget=batch_budget(settings, [size]) or settings.budget)
        chunk, moving = cache.bounded_chunk or settings.decoding.prefill_chunk, MovingRope.of(config)
        if chunk is not None and moving is not None:
            moving.check_prompts([size], 0, chunk=chunk)
        coming = [prompt_sizes(config, cache, size, new) for new in fed]
        for sizes in coming:
            check_spans(cache, sizes, [prompt.spans] if prompt.spans else None)
        if not cache.beyond_context and any(may_evict(cache, sizes) for sizes in coming):
            check_second_pass(cache, tokenizer, size, positions_of(config), moving)
    except ConfigError as error:
        return str(error)
    return None


def check_length(settings: Settings, budget: Budget, config: Any, size: int, fed: Sequence[int]) -> None:
    """ConfigError where some layer's budget cannot hold a prompt of so many tokens.

    fed: tokens to come, after each of its prefills.
    """
    budget = batch_budget(settings, [size]) or budget
    cache = dataclasses.replace(settings.cache, budget=budget)
    for new in fed:
        check_budget(cache, prompt_sizes(config, cache, size, new))


@dataclass(frozen=True)
class ItemPrompt(TokenizedExample):
    """asks: the log-likelihoods to measure (kvexp.lm_eval.Ask); ids are the first one's context."""

    asks: tuple[Any, ...] = ()


def scorer_of(settings: Settings, model: Model, tokenizer: Tokenizer) -> Scorer:
    from kvexp.lm_eval import Scorer

    assert isinstance(settings.task, LMEval)
    return Scorer(model, tokenizer, settings.cache, settings.task.measured, settings.batch_size, settings.thinking)


def item_prompt(settings: Settings, model: Model, tokenizer: Tokenizer, item: Item) -> TokenizedExample:
    """The item in tokens, or why it is skipped."""
    from kvexp.lm_eval import NothingToJudge

    scorer = scorer_of(settings, model, tokenizer)
    if item.kind == "generate_until":
        return _generation_prompt(settings, scorer, item)
    seed = settings.seed + item.number
    if item.kind == "loglikelihood_rolling":
        asks = scorer.windows(item.requests[0].continuation, seed=seed)
    else:
        how = {"group": item.number, "seed": seed}
        try:
            all_asks = [scorer.ask(r.context, r.question, r.continuation, **how) for r in item.requests]
        except NothingToJudge as error:
            return TokenizedExample(item, "", [], skipped=str(error))
        asks = [ask for ask in all_asks if ask is not None]
        if len(asks) < len(all_asks):
            return TokenizedExample(item, "", [], skipped="too long")
    if not asks:
        return TokenizedExample(item, "", [], skipped="there is nothing to judge in a text without tokens")
    assert isinstance(settings.task, LMEval)
    if scorer.protocol.budget_length == "padded":
        bases = _bases(settings.task, settings.task.pinned, tokenizer, scorer.holds)
        asks = [dataclasses.replace(ask, base=bases[item.number, place]) for place, ask in enumerate(asks)]
    cut = max(ask.cut for ask in asks)
    tokens = len(asks[0].context) + len(asks[0].question) + asks[0].cut
    if cut and settings.task.truncate == "skip":
        return TokenizedExample(item, "", [], skipped="too long", tokens=tokens)
    if obstacle := scorer.obstacle(asks):
        return TokenizedExample(item, "", [], skipped=obstacle, tokens=tokens)
    ids, question = list(asks[0].context), list(asks[0].question)
    return ItemPrompt(item, item.prompt, ids, bool(cut), tokens=tokens, question_ids=question, asks=tuple(asks))


def _generation_prompt(settings: Settings, scorer: Scorer, item: Item) -> TokenizedExample:
    from kvexp.lm_eval import Ask

    ids, question, cut = scorer.prompt(item.prompt, item.question, item.generation)
    count = len(ids) + len(question) + cut
    if not ids or (cut and settings.task.truncate == "skip"):
        return TokenizedExample(item, "", [], skipped="too long", tokens=count)
    if obstacle := scorer.obstacle([Ask(tuple(ids), tuple(question) or (0,))]):
        return TokenizedExample(item, "", [], skipped=obstacle, tokens=count)
    return ItemPrompt(item, item.prompt, ids, bool(cut), tokens=count, question_ids=question)


@functools.lru_cache(maxsize=1)
def _bases(task: LMEval, data: str, tokenizer: Tokenizer, holds: int) -> dict[tuple[int, int], int]:
    """(item, request) -> the tokens its budget counts, from the batches of the whole task, whatever the limit.

    data: the task's fingerprint, for equal tasks whose files have changed.
    """
    from kvexp.lm_eval import Encoder, NothingToJudge, padded

    how, keys, asks = task.measured, [], []
    encoder = Encoder(tokenizer, how.add_bos)
    for item in task.everything():
        for place, request in enumerate(item.requests):
            ask = None
            with contextlib.suppress(NothingToJudge):  # reported when the item is answered
                ask = encoder.ask(request.context, "", request.continuation, holds)
            if ask is not None:
                keys.append((item.number, place))
                asks.append(ask)
    return {key: ask.base for key, ask in zip(keys, padded(asks, how.padded_batch, how.whole_text), strict=True)}


# Marked texts of a prompt as tokens: what `keep=span` and `keep=fair` spare.


def token_spans(
    example: Example, text: str, count: int, tokenizer: Tokenizer, *, templated: bool
) -> list[tuple[int, int]]:
    """(first token, one behind the last) of each marked text in a prompt's `text`; empty where one is not there whole.

    Marked are the example's own `marks`, else what stands around its document.
    count: tokens that are left of the text; templated: it brings its own start token. What a template puts in front of
    a prompt that begins with a marked text belongs to that mark. Tokens that a mark shares with its neighbour text are
    the mark's.
    """
    marks = [mark.strip() for mark in example.marks or (example.prefix, example.suffix) if mark.strip()]
    if not marks:
        return []
    try:
        offsets = tokenizer(
            text, add_special_tokens=not templated, return_offsets_mapping=True, verbose=False
        ).offset_mapping
    except NotImplementedError:  # a tokenizer in Python knows no offsets
        return []
    spans, at, last = [], 0, 0
    for place, mark in enumerate(marks):
        at = text.rfind(mark) if place and mark is marks[-1] else text.find(mark, at)
        if at < 0:
            return []
        inside = [i for i, (start, end) in enumerate(offsets) if start < at + len(mark) and end > at and end > start]
        if not inside or inside[-1] >= count:
            return []
        begins = place == 0 and example.prompt.lstrip().startswith(mark)
        first = 0 if begins else max(inside[0], last)
        if inside[-1] < first:
            return []
        last = inside[-1] + 1
        spans.append((first, last))
        at += len(mark)
    return spans


# Examples as batches of prompts, or the reason why one is skipped; and whether any of them can be run at all.


# Questions about one context that are answered from one prefill before their rows are written.
MAX_QUESTIONS_PER_CONTEXT = 8

Batch = list[tuple[int, Example]]
Items = Sequence[tuple[int, TokenizedExample]]  # index in the task, prompt


def batches(todo: Sequence[tuple[int, Example]], size: int, shared: int) -> Iterator[Batch]:
    """Batches of `size` examples, or up to `shared` where more questions about the last one's context follow.

    Examples that are to share a context (`questions`), and the turns of a conversation, are never parted.
    """
    batch: Batch = []
    for item in todo:
        same = bool(batch) and bool(item[1].question) and item[1].prompt == batch[-1][1].prompt
        together = same and bool(item[1].questions) and item[1].number > 0
        if item[1].turns and batch and item[1].prompt == batch[-1][1].prompt:
            together = True
        if not together and len(batch) >= (max(size, shared) if same else size):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


@dataclass(frozen=True)
class Weightless:
    """What of a model its prompts depend on."""

    config: Any

    @property
    def generation_config(self) -> Any:
        """Read for the end tokens of texts whose length alone counts here."""
        return SimpleNamespace(eos_token_id=getattr(self.config, "eos_token_id", None))


class Prompts:
    """Examples of a task, and their prompts: the same for all methods and budgets, each made when it is asked for.

    settings: of any run that sees them; of lm-eval's items, which say themselves what a cache cannot hold, the run's
    own (`seen_by`). The latest prompts are remembered, KNOWN or two batches of them, so that what
    is checked before a run and computed in it is tokenised once.
    """

    KNOWN = 64

    def __init__(self, settings: Settings, examples: Sequence[Example]) -> None:
        self.settings, self.examples = settings, examples
        self._model: Model | Weightless | None = None
        self._tokenizer: Tokenizer | None = None
        self._known: dict[int, TokenizedExample] = {}

    def seen_by(self, settings: Settings) -> Prompts:
        """The prompts for another run of the same task."""
        return Prompts(settings, self.examples) if isinstance(settings.task, LMEval) else self

    def use(self, model: Model, tokenizer: Tokenizer) -> None:
        """Make prompts for the loaded model from now on; prompts of lm-eval's items depend on it."""
        if isinstance(self.settings.task, LMEval) and model is not self._model:
            self._known.clear()
        self._model, self._tokenizer = model, tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of(self.settings.model)
        return self._tokenizer

    @property
    def model(self) -> Model | Weightless:
        """The loaded model, or what of it is known without weights."""
        if self._model is None:
            self._model = Weightless(config_of_spec(self.settings.model))
        return self._model

    def __getitem__(self, index: int) -> TokenizedExample:
        if index not in self._known:
            ((_, example),) = fit_examples(self.settings, self.tokenizer, [(index, self.examples[index])])
            while len(self._known) >= max(self.KNOWN, 2 * self.settings.batch_size):
                del self._known[next(iter(self._known))]
            self._known[index] = prompt_of(self.settings, self.model, self.tokenizer, example)
        return self._known[index]

    def for_run(self, settings: Settings, batch: Batch) -> tuple[Items, Items]:
        """The batch's prompts that a run of these settings can answer, and those that are skipped, with the reason."""
        answerable, skipped = list[tuple[int, TokenizedExample]](), list[tuple[int, TokenizedExample]]()
        for index, _ in batch:
            prompt = self[index]
            why = None if prompt.skipped else budget_obstacle(settings, self.model.config, self.tokenizer, prompt)
            if why is not None:
                why, count = why.partition(";")[0], len(prompt.ids)
                prompt = TokenizedExample(prompt.example, "", [], skipped=why, tokens=count)
            (answerable if prompt.skipped is None else skipped).append((index, prompt))
        return answerable, skipped


def check_beforehand(settings: Settings, prompts: Prompts) -> None:
    """ConfigError for a run that cannot be, which its configuration and its prompts' tokens tell; no weights needed."""
    settings.task.check_examples(prompts.examples)
    check_positions(prompts.model.config, settings.cache)
    check_max_new_tokens(settings, list(enumerate(prompts.examples)))
    check_template(settings, prompts.tokenizer)
    _check_runnable(settings, prompts)


def _check_runnable(settings: Settings, prompts: Prompts) -> None:
    """ConfigError where not one of the examples can be run; looks at none behind the first that can."""
    longest, why = -1, ""
    for index, example in enumerate(prompts.examples):
        prompt = prompts[index]
        reason = example.skipped or prompt.skipped
        reason = reason or budget_obstacle(settings, prompts.model.config, prompts.tokenizer, prompt)
        if reason is None:
            return
        if prompt.size > longest:  # what even the longest prompt lacks says most
            longest, why = prompt.size, reason
    if why.startswith("too long"):
        holds, limit = max_positions(settings.model), settings.task.max_prompt_tokens
        why += (
            f"; task.max_prompt_tokens={limit} allows no more: raise it, or see task.truncate"
            if limit is not None and limit < holds
            else f"; the model holds {holds} positions: see task.truncate and task.max_prompt_tokens{_beyond(settings)}"
        )
    total = len(prompts.examples)
    raise ConfigError(why if total == 1 else f"none of the {total} examples can be run: {why}")


def prompt_of(
    settings: Settings, model: Model | Weightless, tokenizer: Tokenizer, example: Example
) -> TokenizedExample:
    """The example's tokens, which leave room for its answer: what is generated, the longest choice, a continuation.

    model: its configuration is all that is looked at.
    """
    if example.skipped:
        return TokenizedExample(example, "", [], skipped=example.skipped.partition(";")[0])
    if isinstance(example, Item):
        return item_prompt(settings, model, tokenizer, example)
    most = 1 << 40 if settings.cache.beyond_context else positions_of(model.config)
    alone = [len(token_ids(words, tokenizer)) for words in example.choices]
    new = 1 if settings.task.only_nll else settings.decoding.max_new_tokens
    room = most - max(alone, default=new) + 1
    prompt = tokenize(example, settings.task, tokenizer, room, chat=settings.model.chat)
    if prompt.skipped:
        return prompt
    if not prompt.ids:
        return TokenizedExample(example, "", [], skipped="its prompt has no tokens")
    spans = token_spans(example, prompt.text, len(prompt.ids), tokenizer, templated=settings.templated)
    prompt = dataclasses.replace(prompt, spans=spans)
    chat, needs_nll = settings.model.chat, settings.task.needs_nll
    following = continuation(prompt, tokenizer, chat=chat) if needs_nll else []
    choices = [continuation(prompt, tokenizer, chat=chat, words=words) for words in example.choices]
    after = choices or ([following] if needs_nll else [])
    if not after:
        return prompt
    if not all(after):
        why = "a choice has no tokens" if example.choices else "its continuation has no tokens"
        return TokenizedExample(example, "", [], skipped=why, tokens=prompt.tokens)
    if prompt.size + max(map(len, after)) > most + 1:  # a choice may have more tokens where it stands than alone
        why = "too long" if example.choices else "too long with its continuation"
        return TokenizedExample(example, "", [], skipped=why, tokens=prompt.tokens)
    return dataclasses.replace(prompt, choices=choices, following=following)
