"""Chat templates: rendered on one day whatever the clock says, with the arguments that were asked for.

And facts read off a template: the variables it reads, whether it asks the clock, and its tags of thinking.
"""

from __future__ import annotations

import contextlib
import locale
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from transformers.utils import chat_template_utils

from kvexp.util.errors import ConfigError

TODAY = "26 Jul 2024"  # Llama 3.1's own default; 3.2's template would take the clock's, and prompts change every day
DATES = ("%d %b %Y", "%d %B %Y", "%Y-%m-%d")  # as which a date_string sets the clock
_ARGUMENTS = "_kvexp_template_args"  # of a tokenizer: what `with_arguments` gave it
_OF_KVEXP = {"messages", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"}
_ASKS = ("defined", "undefined", "none", "default", "d")  # tests and filters of a variable that may not be there
_RENDERING = threading.RLock()  # clock, locale and random numbers belong to the process
_WORDS, _THOUGHT = "Some words of a user.", "Something that was thought."

# Tags that do not look like <think> and </think> or [THINK] and [/THINK]; gpt-oss, Cohere, Apertus, Kimi.
_OTHER_TAGS = (
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("◁think▷", "◁/think▷"),
)
_CLOSING = re.compile(r"<(/[\w:|-]*(?:think|thought|reason)[\w:|-]*)>|\[(/\w*(?:think|thought|reason)\w*)\]", re.I)


@dataclass(frozen=True)
class Thinking:
    """The tags between which a chat template has a model think, begin "" where it is not known.

    opened: whether the prompt ends inside of them.
    """

    begin: str
    end: str
    opened: bool = False

    @classmethod
    def ending(cls, tag: str) -> Thinking:
        """The tags of which this is the closing one."""
        return cls(tag.replace("/", "", 1) if _CLOSING.fullmatch(tag) else "", tag)

    def part(self, tokens: Sequence[int], tokenizer: Any) -> ThoughtfulAnswer:
        """A generated text, token ids, parted behind its last closing tag, as lm-eval parts it."""

        def text(ids: Sequence[int], special: bool) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=not special))

        count = text(tokens, True).count(self.end)
        if not count and not self.opened and not self._begins(text(tokens, True)):
            return ThoughtfulAnswer(text(tokens, False), text(tokens, True), 0, False)
        low, high = 0, len(tokens)  # the fewest tokens in which all closing tags are written
        while count and low < high:
            half = (low + high) // 2
            low, high = (low, half) if text(tokens[:half], True).count(self.end) == count else (half + 1, high)
        begun = text(tokens[:low], True).rpartition(self.end)[2]  # a token may hold more than the end of the tag
        raw, words = (begun + text(tokens[low:], special) for special in (True, False))
        if (self.opened and not count) or self._begins(raw):
            before = "" if self.opened and not count else raw.partition(self.begin)[0].strip()
            return ThoughtfulAnswer(before, before, len(tokens), True)
        return ThoughtfulAnswer(words.lstrip(), raw.lstrip(), low, False)

    def _begins(self, text: str) -> bool:
        """Whether thinking begins in a text; what begins it may not be known (lm-eval's think_end_token)."""
        return bool(self.begin) and self.begin in text


@dataclass(frozen=True)
class ThoughtfulAnswer:
    """text: the answer behind the thinking; raw: the same with special tokens.

    thinking_tokens: of all before the answer, tags included; cut: whether the whole ended inside the thinking.
    """

    text: str
    raw: str
    thinking_tokens: int
    cut: bool


def with_arguments(tokenizer: Any, arguments: Mapping[str, Any]) -> Any:
    """The tokenizer, whose chat template `render` gives these arguments from now on."""
    setattr(tokenizer, _ARGUMENTS, dict(arguments))
    return tokenizer


def render(tokenizer: Any, turns: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The text of the tokenizer's chat template around these turns, at the date of TODAY or of its date_string.

    options: of apply_chat_template. Errors are jinja's, and whatever a template does with its values.
    """
    given = {"date_string": TODAY, **getattr(tokenizer, _ARGUMENTS, {})}
    with _stopped(_moment(tokenizer)):
        return str(tokenizer.apply_chat_template([dict(turn) for turn in turns], tokenize=False, **given, **options))


def answer_begins(tokenizer: Any, turns: Sequence[Mapping[str, Any]]) -> str:
    """The text of a chat up to where the model's words begin: a new answer, or the rest of a last assistant's turn.

    As transformers' pipeline has it. ConfigError where the template cannot be used or leaves a turn out.
    """
    required = ({"role", "content"}, {"role", "tool_calls"})
    if not turns or not all(
        isinstance(turn, Mapping) and any(keys <= set(turn) for keys in required) for turn in turns
    ):
        raise ConfigError(f'a chat is a list of messages {{"role": ..., "content": ...}}, got {turns!r:.80}')
    continues = turns[-1]["role"] == "assistant"
    options = {"continue_final_message": True} if continues else {"add_generation_prompt": True}
    try:
        text = render(tokenizer, turns, **options)
        check_heard(tokenizer, turns, "put its words into a user's turn", **options)
        for turn in turns:
            calls = [call.get("function", call)["name"] for call in turn.get("tool_calls") or ()]
            if wrong := [name for name in calls if name not in text]:
                raise ConfigError(f"the tokenizer's chat template leaves out the call of {wrong[0]}: write it as text")
            content = turn.get("content")
            if not isinstance(content, str | None) and str(content) in text:
                raise ConfigError(f"content of a message must be a text for this model, got {content!r:.80}")
    except ConfigError:
        raise
    except Exception as error:  # jinja's, and whatever a template does with its values: no common base
        raise unusable(error, "give the prompt as a text") from error
    return text


def unusable(error: Exception, way_out: str) -> ConfigError:
    """The error of a chat template that fails on some turns. way_out: what to do but correct it."""
    return ConfigError(
        f"the tokenizer's chat template cannot be used ({type(error).__name__}: {' '.join(str(error).split())}): "
        f"correct chat_template in the model's folder, or {way_out}"
    )


def check_heard(tokenizer: Any, turns: Sequence[Mapping[str, Any]], way_out: str, **options: Any) -> None:
    """ConfigError where the template leaves out the words of a turn, such as a system turn that it does not know.

    way_out: what to do but correct the template. options: of `render`, whose errors come through.
    """
    words = [f"These are the words of turn {number}." for number, _ in enumerate(turns)]
    said = [number for number, turn in enumerate(turns) if isinstance(turn.get("content"), str)]
    marked = [{**turn, "content": words[n]} if n in said else turn for n, turn in enumerate(turns)]
    text = render(tokenizer, marked, **options).lower()  # some templates write in capitals
    for number in said:
        if words[number].lower() not in text:
            turn = turns[number]
            raise ConfigError(
                f"the tokenizer's chat template leaves out the {turn.get('role')} turn {turn['content'][:60]!r}: "
                f"{way_out}, or correct chat_template in the model's folder"
            )


def end_of_turn(tokenizer: Any) -> list[int]:
    """The token that the chat template puts behind an assistant's words; empty where that is no token of its own."""
    words = "An answer."
    turns = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": words}]
    _, answer, after = render(tokenizer, turns).rpartition(words)
    ids = tokenizer(after, add_special_tokens=False).input_ids if answer else []
    first = [token for token in ids if tokenizer.decode([token]).strip()][:1]
    return [token for token in first if token in tokenizer.added_tokens_decoder]


def _moment(tokenizer: Any) -> datetime:
    """The date that the clock shows: of date_string among the arguments where that is one."""
    return _date(str(getattr(tokenizer, _ARGUMENTS, {}).get("date_string", TODAY))) or datetime(2024, 7, 26)


def _date(text: str) -> datetime | None:
    """The date that a text writes in one of DATES."""
    for form in DATES:
        with contextlib.suppress(ValueError):
            return datetime.strptime(text, form)
    return None


@contextlib.contextmanager
def _stopped(now: datetime) -> Iterator[None]:
    """A clock that stands at `now` for `strftime_now`, English names of months and days, and the same random numbers.

    Code that a tokenizer brings of its own reads the computer's clock; the digest of a row's prompt tells of that.
    """
    with _RENDERING, contextlib.ExitStack() as until:
        names = vars(chat_template_utils)
        until.callback(names.update, datetime=names["datetime"])
        names["datetime"] = SimpleNamespace(now=lambda: now)
        until.callback(random.setstate, random.getstate())
        random.seed(0)
        until.callback(locale.setlocale, locale.LC_TIME, locale.setlocale(locale.LC_TIME))
        locale.setlocale(locale.LC_TIME, "C")  # names of months and days
        yield


def template_of(tokenizer: Any) -> str | None:
    """The chat template's source that is used without tools; None where there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        return str(tokenizer.get_chat_template())
    except (ValueError, AttributeError):
        return None


def _tree(source: str) -> tuple[Any, Any]:
    """jinja2's environment and tree of a template; ConfigError where it cannot be read."""
    try:
        environment = chat_template_utils._compile_jinja_template(source).environment
        return environment, environment.parse(source)
    except Exception as error:  # jinja's errors of syntax, and others
        raise ConfigError(
            f"the tokenizer's chat template cannot be read ({type(error).__name__}: {error}): correct chat_template in "
            "the model's folder, or set model.chat=false"
        ) from error


def variables_of(tokenizer: Any) -> set[str]:
    """Variables that the template reads and somebody may set: not the messages, nor what is kvexp's or jinja's own."""
    from jinja2 import meta, nodes

    source = template_of(tokenizer)
    if source is None:
        return set()
    environment, tree = _tree(source)
    names = set(meta.find_undeclared_variables(tree)) - set(environment.globals) - _OF_KVEXP
    # jinja counts variables that a branch sets; of these, whoever may set one from outside is asked whether it did.
    stored = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    questions = [node for node in tree.find_all((nodes.Test, nodes.Filter)) if node.name in _ASKS]
    questions += [node for node in tree.find_all(nodes.Assign) if _reads_itself(node)]
    open_ = {name.name for node in questions for name in node.find_all(nodes.Name)}
    return (names - (stored - open_)) | ({"date_string"} if "strftime_now" in source else set())


def _reads_itself(node: Any) -> bool:
    """Whether an assignment, {% set x = x or 1 %}, reads the variable that it sets."""
    from jinja2 import nodes

    read = [*node.node.find_all(nodes.Name), node.node]
    return any(getattr(name, "name", None) == getattr(node.target, "name", "") for name in read)


def check_arguments(tokenizer: Any, arguments: Mapping[str, Any], option: str = "model.template_args") -> None:
    """ConfigError for arguments that the template never mentions, and for a date that is none."""
    if template_of(tokenizer) is None:
        raise ConfigError(f"{option} is given, but this tokenizer has no chat template: leave it out")
    known = variables_of(tokenizer)
    if unknown := sorted(set(arguments) - known):
        raise ConfigError(
            f"{option}: the model's chat template never mentions {', '.join(unknown)}; it mentions "
            f"{', '.join(sorted(known)) or 'nothing that can be set'}"
        )
    for name, value in arguments.items():
        # A template that asks `is false` would not see the text.
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise ConfigError(f"{option}: {name} is the text {value!r}; write {name}: {value.lower()} without quotes")
    if "date_string" in arguments and "date_string" not in (template_of(tokenizer) or ""):
        date = str(arguments["date_string"])
        if _date(date) is None:
            raise ConfigError(f"{option}: date_string must be a date such as {TODAY} or 2024-07-26, got {date!r}")


def thinking_of(tokenizer: Any) -> Thinking | None:
    """The tags of thinking in the tokenizer's chat template; None where it has none, or is broken."""
    source = template_of(tokenizer)
    if source is None:
        return None
    with contextlib.suppress(ConfigError):
        return _thinking(tokenizer, source)
    return None


def _tried(tokenizer: Any, turns: Sequence[Mapping[str, str]]) -> str | None:
    """The text up to where an answer begins; None where the template does not take such turns."""
    with contextlib.suppress(Exception):  # no common base, as in `render`
        return render(tokenizer, turns, add_generation_prompt=True)
    return None


def _thinking(tokenizer: Any, source: str) -> Thinking | None:
    """The template's tags, and whether it opens them itself where an answer begins."""
    tags = _tags_written(source) or _tags_rendered(tokenizer)
    if tags is None:
        return None
    thinking = Thinking(*tags)
    prompt = _tried(tokenizer, [{"role": "user", "content": _WORDS}]) or ""
    behind = prompt.rpartition(_WORDS)[2]
    return replace(thinking, opened=behind.rfind(thinking.begin) > behind.rfind(thinking.end))


def _tags_written(source: str) -> tuple[str, str] | None:
    """Tags among the texts of a template, its comments left out."""
    from jinja2 import nodes

    _, tree = _tree(source)
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    for begin, end in _OTHER_TAGS:
        if any(end in text for text in texts):
            return begin, end
    for text in texts:
        if match := _CLOSING.search(text):
            tags = Thinking.ending(match[0])
            return tags.begin, tags.end
    return None


def _tags_rendered(tokenizer: Any) -> tuple[str, str] | None:
    """What the template writes around the reasoning of an assistant's turn."""
    user, answer = {"role": "user", "content": _WORDS}, "An answer."
    said = {"role": "assistant", "content": answer, "reasoning_content": _THOUGHT}
    prompt = _tried(tokenizer, [user])
    with contextlib.suppress(Exception):  # as in `_tried`
        text = render(tokenizer, [user, said])
        before, thought, after = text.partition(_THOUGHT)
        begin = before.removeprefix(prompt or "").strip() if before.startswith(prompt or "") else ""
        end = after.partition(answer)[0].strip()
        return (begin, end) if thought and begin and end else None
    return None
