"""kvexp calibrate model=NAME [data=FILE]: keep statistics of a model's queries, for methods and budgets that need them.

The model reads texts once, at full attention. Settings are those of `kvexp run` for a model, and:
  data=FILE      texts to read: FILE.jsonl has one in the field `text` of each line, any other file is one text;
                 without it, the articles that come with kvexp
  tokens=2048    tokens of a sequence: the texts are joined and cut into sequences (fewer where the model holds fewer)
  sequences=20   how many of them at most
The result is two small files in the cache folder, known by the digest of the model: statistics of queries, and scores
of heads (budget.heads=duo; not of models without RoPE). They replace older ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from kvexp.errors import CacheError, ConfigError
from kvexp.sweep.signals import INTERRUPTED
from kvexp.terminal import say

OWN = {"data": "", "tokens": "2048", "sequences": "20"}


def main(argv: Sequence[str] | None = None) -> int:
    """0, 2 for what cannot be done, which is told, or 130 if it was interrupted."""
    from kvexp.config.compose_errors import told

    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["kvzap"]:
        from kvexp.calibrate.kvzap_command import main as train_kvzap

        return train_kvzap(argv[1:])
    _, words = parser().parse_known_args(argv)

    def calibrate() -> None:
        model_words, own = parted(words)
        with told(model_words):
            from kvexp.calibrate.model_calibration import calibrate_model

            calibrate_model(model_words, own["data"], number("tokens", own), number("sequences", own))

    return exit_code(calibrate, "calibration")


def parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="kvexp calibrate",
        usage="%(prog)s model=NAME [model.SETTING=VALUE] [data=FILE] [tokens=N] [sequences=N]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def exit_code(command: Callable[[], None], made: str) -> int:
    """Carry out a command that keeps a file in the cache folder; returns what `main` does. made: what, in a word."""
    try:
        command()
    except (ConfigError, CacheError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        say(f"\ninterrupted: nothing was kept of this {made}, an older one stays as it was", file=sys.stderr)
        return INTERRUPTED
    return 0


def parted(
    words: Sequence[str], defaults: Mapping[str, str] = OWN, command: str = "kvexp calibrate"
) -> tuple[list[str], dict[str, str]]:
    """The words that choose a model, and the values of the command's own settings; ConfigError for any other word."""
    own, model_words = dict(defaults), []
    for word in words:
        key, equals, value = word.partition("=")
        if key in defaults and equals:
            own[key] = value
        elif key.lstrip("+").partition(".")[0] == "model" and equals:
            model_words.append(word)
        else:
            raise ConfigError(f"{word}: {command} takes model=NAME, model.SETTING=…, {', '.join(defaults)}")
    return model_words, own


def number(key: str, own: dict[str, str]) -> int:
    """A setting that is a whole number of at least 1; ConfigError for anything else."""
    if not own[key].isdecimal() or int(own[key]) < 1:
        raise ConfigError(f"{key} must be a whole number of at least 1, got {own[key]!r}")
    return int(own[key])
