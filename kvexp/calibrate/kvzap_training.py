"""All of `kvexp calibrate kvzap`: the model, the texts, KVzip+'s scores, the linear maps and their file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

import kvexp
from kvexp.articles import articles_digest, training_articles
from kvexp.calibrate.calibration_texts import CalibrationTexts, calibration_texts
from kvexp.config.calibration_of_model import model_digest
from kvexp.config.model_spec import load, max_positions, tokenizer_of
from kvexp.console import Progress
from kvexp.errors import ConfigError
from kvexp.methods import KVzipPlus
from kvexp.models.surrogate_file import write_surrogate
from kvexp.models.surrogate_pass import train_surrogate
from kvexp.sweep.composed_model import composed_model
from kvexp.terminal import say

SINKS = 4  # KVzip+'s, whose scores are not learned
EVERY = 4  # the last of so many prompts is held out


def train_kvzap(words: Sequence[str], data: str, tokens: int, count: int) -> None:
    """Train the surrogate of the model that the words of a command line choose, and say where it is kept.

    data: a file of texts, empty for kvexp's training articles; tokens: of a prompt at most; count: prompts at most.
    ConfigError for what cannot be read, loaded or written; everything but the weights is looked at before they load.
    """
    name, spec = composed_model(words)
    texts = calibration_texts(data) if data else own_texts()
    tokenizer = tokenizer_of(spec)
    # A prompt is fed again behind itself: half of the positions, less the instruction.
    length = min(tokens, (max_positions(spec) - 64) // 2)
    prompts = prompts_of(texts, tokenizer, length, count)
    held_out = prompts[EVERY - 1 :: EVERY]
    fitted = [ids for number, ids in enumerate(prompts) if number % EVERY != EVERY - 1]
    start = time.monotonic()
    model, _ = load(spec)
    method = KVzipPlus(n_sinks=SINKS, chunk=length)
    with Progress(f"training kvzap of {name}", len(prompts), 0, "prompts") as progress:
        made = train_surrogate(model, method, fitted, held_out, tokenizer, progress.advance)
    about = {
        "data": texts.name,
        "data_digest": texts.digest,
        "articles": [] if data else [one.id for one in training_articles()],
        "prompts": len(fitted),
        "tokens": made.fitted_tokens,
        "held_out_tokens": made.held_out_tokens,
        "r2": made.r2,
        "dtype": spec.dtype,
        "device": spec.resolved_device().split(":")[0],
        "numerics": kvexp.NUMERICS,
    }
    file = write_surrogate(made.surrogate, model_digest(spec), about)
    if made.r2 is None:
        told = f"nothing was held out ({EVERY} prompts are needed)"
    else:
        low, high = min(made.r2), max(made.r2)
        told = (
            f"R2 on {made.held_out_tokens} held-out tokens {fmean(made.r2):.3f} (mean of {len(made.r2)} layers, "
            f"{low:.3f} to {high:.3f})"
        )
    say(
        f"{name} was trained on {made.fitted_tokens} tokens of {texts.name} in {time.monotonic() - start:.0f} s; "
        f"{told}; digest {made.surrogate.digest}, kept in {file}"
    )


def own_texts() -> CalibrationTexts:
    """The articles that are kept for training."""
    found = training_articles()
    return CalibrationTexts(
        f"{len(found)} of kvexp's articles", articles_digest(), tuple(f"{one.title}\n\n{one.text}" for one in found)
    )


def prompts_of(texts: CalibrationTexts, tokenizer: object, length: int, count: int) -> list[list[int]]:
    """At most `count` prompts of at most `length` token ids, each one text's from its beginning.

    ConfigError where no text has more tokens than the sinks and two.
    """
    each = [tokenizer(text, verbose=False).input_ids[:length] for text in texts.texts]  # type: ignore[operator]
    prompts = [ids for ids in each if len(ids) > SINKS + 2][:count]
    if not prompts:
        raise ConfigError(
            f"no text of {texts.name} has more than {SINKS + 2} tokens: give longer texts, or raise tokens"
        )
    return prompts
