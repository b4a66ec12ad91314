"""The command `kvexp calibrate`: what methods need of a model beforehand, kept in the cache folder."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import kvexp
from kvexp.hf.calibrate import (
    HEADS,
    QUERIES,
    SURROGATES,
    calibrate_queries_and_heads,
    train_surrogate,
)
from kvexp.hf.traits import TABLE_ROPE, query_shape, traits_of
from kvexp.hf.triattention_file import read_triattention
from kvexp.methods import KVzipPlus
from kvexp.run.compose import hydra_errors_shown, split_model_words
from kvexp.run.jobs import INTERRUPTED, composed_model
from kvexp.run.model_spec import ModelSpec, config_of_spec, load, max_positions, model_digest, tokenizer_of
from kvexp.tasks.articles import articles, articles_digest, training_articles
from kvexp.util.errors import CacheError, ConfigError
from kvexp.util.files import path_of
from kvexp.util.output import say, tells_errors
from kvexp.util.progress import Progress

CALIBRATE_DOC = """kvexp calibrate model=NAME [data=FILE]: keep statistics of a model's queries,
for methods and budgets that need them.

The model reads texts once, at full attention. Settings: as `kvexp run` has for
a model, and
  data=FILE      texts to read: FILE.jsonl has one in the field `text` of each
                 line, any other file is one text; without it, the articles
                 that come with kvexp
  tokens=2048    tokens of a sequence: the texts are joined and cut into
                 sequences (fewer where the model holds fewer)
  sequences=20   how many of them at most
The result is two small files in the cache folder, known by the digest of the
model: statistics of queries, and scores of heads (budget.heads=duo; not of
models without RoPE). They replace older ones.
  --from FILE    read no texts: take the statistics out of a file of
                 TriAttention's, for method=triattention
"""
KVZAP_DOC = """kvexp calibrate kvzap model=NAME [data=FILE]: train KVzap's scores of a
model, for method=kvzap.

The model reads each text, and once more to repeat it; what KVzip+ scores then
is predicted, layer by layer and kv head by kv head, from what the attention
layers got the first time. Settings: as `kvexp run` has for a model, and
  data=FILE      texts to read: FILE.jsonl has one in the field `text` of each
                 line, any other file is one text; without it, the last twelve
                 articles that come with kvexp, about which method=kvzap is then
                 not asked
  tokens=1250    tokens of a prompt at most (fewer where the model holds fewer)
  prompts=400    how many of them at most; each fourth is held out, and R2 is of
                 those
The result is a small file in the cache folder, known by the digest of the
model; it replaces an older one.
"""
SINKS = 4  # KVzip+'s, whose scores are not learned
EVERY = 4  # the last of so many prompts is held out


def calibrate_main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, 2 for what cannot be done, which is printed, or 130 if it was interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["kvzap"]:
        return _command(
            "kvexp calibrate kvzap", KVZAP_DOC, words[1:], train_kvzap, "training", tokens=1250, prompts=400
        )
    return _calibrate(words)


@tells_errors(ConfigError, CacheError)
def _calibrate(words: list[str]) -> int:
    """The command without a word behind it, which also reads TriAttention's file."""
    exchange = argparse.ArgumentParser(add_help=False, allow_abbrev=False, prog="kvexp calibrate")
    exchange.add_argument("--from", dest="taken")
    given, words = exchange.parse_known_args(words)

    def make(words: Sequence[str], data: str, tokens: int, count: int) -> None:
        if given.taken is not None:
            if data:
                raise ConfigError(f"--from {given.taken} reads no texts: leave out data={data}")
            take_triattention(words, given.taken)
        else:
            calibrate_model(words, data, tokens, count)

    return _command("kvexp calibrate", CALIBRATE_DOC, words, make, "calibration", tokens=2048, sequences=20)


def take_triattention(words: Sequence[str], taken: str) -> None:
    """Keep what TriAttention's file `taken` says of the queries of the model that the words choose.

    ConfigError for a file that cannot be read or is of a model of another shape; no weights are loaded.
    """
    name, spec = composed_model(words)
    config = config_of_spec(spec)
    shape = query_shape(config)
    if (traits := traits_of(config)).position != "rope" or traits.type in TABLE_ROPE:
        raise ConfigError(
            f"TriAttention's file pairs dimensions f and f + D / 2 of RoPE, which {traits.title} does not"
        )
    queries = read_triattention(path_of(taken, "--from"), shape[1])
    queries.check_shape(*shape)
    about = {"data": f"TriAttention's file {Path(taken).name}", "numerics": kvexp.NUMERICS}
    file = QUERIES.write(queries, model_digest(spec), about)
    say(f"statistics of {name}'s queries were taken from {taken}; digest {queries.digest}, kept in {file}")


@tells_errors(ConfigError, CacheError)
def _command(
    name: str,
    doc: str,
    words: list[str],
    make: Callable[[Sequence[str], str, int, int], None],
    product: str,
    **sizes: int,
) -> int:
    """Carry out one of the commands: `make` takes the words that choose a model, data, and the two sizes.

    product: what is made, in a word; sizes: the settings that are whole numbers, with their defaults.
    """
    parser = argparse.ArgumentParser(
        prog=name,
        usage=f"%(prog)s model=NAME [SETTING=VALUE] [data=FILE]\n    {' '.join(f'[{size}=N]' for size in sizes)}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _, words = parser.parse_known_args(words)
    defaults = {"data": "", **{size: str(default) for size, default in sizes.items()}}
    try:
        model_words, values = split_model_words(words, defaults, f"{name} takes")
        for size in sizes:
            if not values[size].isdecimal() or int(values[size]) < 1:
                raise ConfigError(f"{size} must be a whole number of at least 1, got {values[size]!r}")
        with hydra_errors_shown(model_words):
            tokens, count = (int(values[size]) for size in sizes)
            make(model_words, values["data"], tokens, count)
    except KeyboardInterrupt:
        say(f"\ninterrupted: nothing was kept of this {product}, an older one stays as it was", file=sys.stderr)
        return INTERRUPTED
    return 0


@dataclass(frozen=True)
class CalibrationTexts:
    """Texts with what to call them and 16 hex digits of what they were read from."""

    name: str
    digest: str
    texts: tuple[str, ...]


def calibration_texts(data: str, purpose: str = "calibration") -> CalibrationTexts:
    """The texts of a file, else of kvexp's articles kept for this purpose; ConfigError for a file without texts."""
    if not data:
        chosen = training_articles() if purpose == "training" else articles()
        name = f"{len(chosen)} of kvexp's articles" if purpose == "training" else f"kvexp's {len(chosen)} articles"
        return CalibrationTexts(name, articles_digest(), tuple(f"{a.title}\n\n{a.text}" for a in chosen))
    file = path_of(data, "data")
    try:
        content = file.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"data={data}: cannot read it: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"data={data} is not UTF-8 text ({error}); save it in that encoding") from error
    texts = _rows(data, text) if file.suffix == ".jsonl" else [text]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ConfigError(f"data={data} has no text in it")
    return CalibrationTexts(Path(file).name, hashlib.sha256(content).hexdigest()[:16], tuple(texts))


def _rows(data: str, content: str) -> list[str]:
    """The field `text` of each line that is not empty."""
    texts = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"line {number} of data={data} is no JSON object with a field text") from error
        if not isinstance(text, str):
            raise ConfigError(f"line {number} of data={data}: text must be a text, got {text!r:.60}")
        texts.append(text)
    return texts


def sequences_of(texts: Sequence[str], tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """At most `count` sequences of `length` token ids: the texts one behind the other, cut; a rest is left out.

    Texts of fewer tokens in all are one shorter sequence. Each begins with the tokenizer's begin token where it puts
    one in front of a text.
    """
    joined = tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False).input_ids
    begin = tokenizer.bos_token_id
    first = [begin] if begin is not None and tokenizer(texts[0][:64]).input_ids[:1] == [begin] else []
    room = length - len(first)
    if room < 1 or not joined:
        raise ConfigError(f"tokens must be at least {1 + len(first)}, got {length}, and the texts must have a token")
    whole = max(1, min(count, len(joined) // room))
    return [[*first, *joined[at * room : (at + 1) * room]] for at in range(whole)]


def train_kvzap(words: Sequence[str], data: str, tokens: int, count: int) -> None:
    """Train the surrogate of the model that the words of a command line choose, and say where it is kept.

    data: a file of texts, empty for kvexp's training articles; tokens: of a prompt at most; count: prompts at most.
    ConfigError for what cannot be read, loaded or written; everything but the weights is looked at before they load.
    """
    name, spec = composed_model(words)
    query_shape(config_of_spec(spec))
    texts = calibration_texts(data, "training")
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
        result = train_surrogate(model, method, fitted, held_out, tokenizer, progress.advance)
    about = {
        **_about(texts, spec),
        "articles": [] if data else [article.id for article in training_articles()],
        "prompts": len(fitted),
        "tokens": result.fitted_tokens,
        "held_out_tokens": result.held_out_tokens,
        "r2": result.r2,
    }
    file = SURROGATES.write(result.surrogate, model_digest(spec), about)
    quality = f"nothing was held out ({EVERY} prompts are needed)"
    if result.r2 is not None:
        quality = (
            f"R2 on {result.held_out_tokens} held-out tokens {fmean(result.r2):.3f} (mean of {len(result.r2)} layers, "
            f"{min(result.r2):.3f} to {max(result.r2):.3f})"
        )
    say(
        f"{name} was trained on {result.fitted_tokens} tokens of {texts.name} in {time.monotonic() - start:.0f} s; "
        f"{quality}; digest {result.surrogate.digest}, kept in {file}"
    )


def _about(texts: CalibrationTexts, spec: ModelSpec) -> dict[str, Any]:
    """Facts that a file keeps of the texts and the machine that it was made with."""
    machine = {"dtype": spec.dtype, "device": spec.resolved_device().split(":")[0], "numerics": kvexp.NUMERICS}
    return {"data": texts.name, "data_digest": texts.digest, **machine}


def prompts_of(texts: CalibrationTexts, tokenizer: object, length: int, count: int) -> list[list[int]]:
    """At most `count` prompts of at most `length` token ids, each one text's from its beginning.

    ConfigError where no text has more tokens than the sinks and two.
    """
    token_ids = [tokenizer(text, verbose=False).input_ids[:length] for text in texts.texts]  # type: ignore[operator]
    prompts = [ids for ids in token_ids if len(ids) > SINKS + 2][:count]
    if not prompts:
        raise ConfigError(
            f"no text of {texts.name} has more than {SINKS + 2} tokens: give longer texts, or raise tokens"
        )
    return prompts


def calibrate_model(words: Sequence[str], data: str, tokens: int, count: int) -> None:
    """Calibrate the model that the words of a command line choose, and say where the result is kept.

    data: a file of texts, empty for kvexp's articles; tokens: of a sequence; count: sequences at most.
    ConfigError for what cannot be read, loaded or written; everything but the weights is looked at before they load.
    """
    name, spec = composed_model(words)
    config = config_of_spec(spec)
    query_shape(config)
    texts = calibration_texts(data)
    length = min(tokens, max_positions(spec))
    sequences = sequences_of(texts.texts, tokenizer_of(spec), length, count)
    start = time.monotonic()
    model, _ = load(spec)
    with Progress(f"calibrating {name}", len(sequences), 0, "sequences") as progress:
        queries, heads = calibrate_queries_and_heads(model, sequences, progress.advance)
    read = sum(len(ids) for ids in sequences)
    about = {**_about(texts, spec), "sequences": len(sequences), "tokens": read}
    file = QUERIES.write(queries, model_digest(spec), about)
    if heads is not None:
        HEADS.write(heads, model_digest(spec), about)
    of_heads = ", none of heads, which have no RoPE" if heads is None else f", of heads {heads.digest}"
    say(
        f"{name} has read {read} tokens of {texts.name} in {time.monotonic() - start:.0f} s; digest {queries.digest}"
        f"{of_heads}, kept in {file}"
    )
