"""What eviction knows of a question: is it in the prompt, or does it come after the eviction?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

IN_PROMPT, AFTER_EVICTION = "in_prompt", "after_eviction"
WORDS = {IN_PROMPT: "question in prompt", AFTER_EVICTION: "question after eviction"}
KEY = "task.question="
# Tasks that had an instruction before they had the option; their identities leave it out at in_prompt.
INSTRUCTED = ("cnn_dailymail", "govreport", "news", "soda", "testbed_dialogue", "testbed_summary", "xsum")


def question_of(identity: Mapping[str, Any]) -> str | None:
    """in_prompt or after_eviction, by the identity of a run; None for a task that asks nothing."""
    task = identity.get("task")
    if not isinstance(task, Mapping):
        return None
    if task.get("question") in WORDS:
        return str(task["question"])
    return IN_PROMPT if task.get("name") in INSTRUCTED else None


def question_words(values: Iterable[Any]) -> str:
    """What a title says of these runs: "question in prompt", "question in prompt and after eviction", or nothing."""
    found = {value for value in values if isinstance(value, str)}
    words = [WORDS[value] for value in WORDS if value in found]
    return " and ".join([*words[:1], *(word.removeprefix("question ") for word in words[1:])])


def titled(title: str, values: Iterable[Any]) -> str:
    """The title of a table or figure, with what is said of the question behind it."""
    return ", ".join(filter(None, [title, question_words(values)]))
