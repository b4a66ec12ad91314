"""The prompt of a row as it was fed to the model, made again from the run's data and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvexp.config.model_spec import config_of_spec, load, tokenizer_of
from kvexp.diagnose.folders import Row
from kvexp.diagnose.runs import examples_of, settings_at
from kvexp.errors import ConfigError
from kvexp.evaluate.example_prompts import Weightless, prompt_of
from kvexp.record import Run
from kvexp.tasks import LMEval


@dataclass(frozen=True)
class FedPrompt:
    """A prompt as it was fed.

    text: of all tokens fed before the answer, special ones included; told: their number and digest, as a sentence.
    """

    text: str
    told: str


def fed_prompt(run: Run, row: Row) -> FedPrompt:
    """The prompt of a row; ConfigError where data, chat template or tokenizer do not give the row's tokens any more."""
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
    text = tokenizer.decode(fed, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return FedPrompt(text, f"example {row['example']}: {len(fed)} tokens{after}; digest {prompt.digest}")
