"""All of `kvexp calibrate`: the model composed as `kvexp run` composes it, the pass over the texts, the file."""

from __future__ import annotations

import time
from collections.abc import Sequence

import kvexp
from kvexp.calibrate.calibration_texts import calibration_texts, sequences_of
from kvexp.config.calibration_of_model import model_digest
from kvexp.config.model_spec import load, max_positions, tokenizer_of
from kvexp.console import Progress
from kvexp.models.calibration_file import write_calibration, write_head_scores
from kvexp.models.calibration_pass import calibrate_queries_and_heads
from kvexp.sweep.composed_model import composed_model
from kvexp.terminal import say


def calibrate_model(words: Sequence[str], data: str, tokens: int, count: int) -> None:
    """Calibrate the model that the words of a command line choose, and say where the result is kept.

    data: a file of texts, empty for kvexp's articles; tokens: of a sequence; count: sequences at most. ConfigError for
    what cannot be read, loaded or written; everything but the weights is looked at before they load.
    """
    name, spec = composed_model(words)
    texts = calibration_texts(data)
    length = min(tokens, max_positions(spec))
    sequences = sequences_of(texts.texts, tokenizer_of(spec), length, count)
    start = time.monotonic()
    model, _ = load(spec)
    with Progress(f"calibrating {name}", len(sequences), 0, "sequences") as progress:
        made, heads = calibrate_queries_and_heads(model, sequences, progress.advance)
    read = sum(len(ids) for ids in sequences)
    about = {
        "data": texts.name,
        "data_digest": texts.digest,
        "sequences": len(sequences),
        "tokens": read,
        "dtype": spec.dtype,
        "device": spec.resolved_device().split(":")[0],
        "numerics": kvexp.NUMERICS,
    }
    file = write_calibration(made, model_digest(spec), about)
    if heads is not None:
        write_head_scores(heads, model_digest(spec), about)
    of_heads = ", none of heads, which have no RoPE" if heads is None else f", of heads {heads.digest}"
    say(
        f"{name} has read {read} tokens of {texts.name} in {time.monotonic() - start:.0f} s; digest {made.digest}"
        f"{of_heads}, kept in {file}"
    )
