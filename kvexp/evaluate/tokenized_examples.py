"""Examples to token ids: chat template, cutting to what the model holds, or the reason for not running one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvexp.errors import ConfigError
from kvexp.models.chat_template import render
from kvexp.tasks import Example, Task

if TYPE_CHECKING:
    from kvexp.models.types import Tokenizer

SLACK = 4  # tokens


@dataclass(frozen=True)
class TokenizedExample:
    """An example's prompt as text and token ids; where it is not run, `skipped` says why and ids are empty.

    question_text, question_ids: what is fed after the eviction; an answer follows text + question_text. truncated:
    whether something was left out; tokens: the count before that, question included. choices: ids of the example's
    choices where they stand. chat_templated: the text came out of a chat template, start token and all. spans: of the
    marked texts, as of `token_spans`.
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

    def of(words: str) -> TokenizedExample:
        text, asked = _apply_template(example, words, tokenizer, task.frame if wrapped else "{prompt}")
        # A chat template brings its own start token.
        ids = tokenizer(text, add_special_tokens=not templated, verbose=False).input_ids
        question = _after(text, ids, asked, tokenizer, templated)
        return TokenizedExample(
            example, text, ids, question_text=asked, question_ids=question, chat_templated=templated
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
    made = whole
    while keep >= 2:
        if keep < len(ids):
            ends = (ids[: keep // 2], ids[-(keep // 2) :])
            made = replace(of("".join(tokenizer.decode(end, skip_special_tokens=True) for end in ends)), truncated=True)
        if made.size <= room:
            return made
        keep -= made.size - room
    return TokenizedExample(whole.example, "", [], skipped="too long")


def _longest_question(example: Example, tokenizer: Tokenizer, frame: str | None) -> int:
    """Tokens that the longest of an example's `questions` may have, what follows it in the template included."""
    each = [replace(example, question=asked, questions=(), number=0) for asked in dict.fromkeys(example.questions)]
    asked = [_apply_template(other, "A text.", tokenizer, frame)[1] for other in each]
    # Behind a context a question may have other tokens than alone: one or two more, at its beginning.
    return SLACK + max(len(tokenizer(words, add_special_tokens=False, verbose=False).input_ids) for words in asked)


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
    ids: list[int] = tokenizer(words, add_special_tokens=False, verbose=False).input_ids
    return ids


def reference_ids(words: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of an answer that is put into a conversation as it stands, without an end."""
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
    alone: list[int] = tokenizer(words, add_special_tokens=False).input_ids
    return alone


def _apply_template(example: Example, words: str, tokenizer: Tokenizer, frame: str | None) -> tuple[str, str]:
    """The text to prefill and the text to feed after the eviction: together what the model reads, template and all.

    frame: the text around {prompt}; None: the tokenizer's chat template.
    """
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
    turns = [{"role": "system", "content": system.strip()}] if system else []
    try:
        return render(tokenizer, [*turns, {"role": "user", "content": words}], add_generation_prompt=True)
    except Exception as error:  # jinja's, and whatever a template does with its values: no common base
        raise ConfigError(
            f"the tokenizer's chat template cannot be used ({type(error).__name__}: {' '.join(str(error).split())}): "
            "correct chat_template in the model's folder, or set model.chat=false"
        ) from error
