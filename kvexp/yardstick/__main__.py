"""kvexp yardstick model=NAME: the full cache under a published protocol, against the published numbers.

Settings are those of `kvexp run`, as far as they change no number but the model: limit=N compares the first N items of
each benchmark, task.data_dir=FOLDER reads local rows (NAME.SPLIT.jsonl, in the hub's schema), batch_size=N.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvexp.errors import CacheError, ConfigError
from kvexp.terminal import say

SETTINGS = ("model", "limit", "batch_size", "outputs_dir", "timeout_s", "retry", "shard", "task.data_dir")
SLICE = 25


def main(argv: Sequence[str] | None = None) -> int:
    """0 where every number is inside two standard errors, 1 where one is not (or lm-eval disagrees), 2 for errors."""
    from kvexp.config.compose_errors import told

    args, words = parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    try:
        check_words(words)
        with told(words):
            from kvexp.yardstick.published_comparison import compare_with

            return compare_with(words, args.numbers, args.check_lm_eval)
    except (ConfigError, CacheError) as error:
        say(f"error: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="kvexp yardstick",
        usage="%(prog)s model=NAME [limit=N] [task.data_dir=FOLDER] [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument("--numbers", metavar="NAME", help="whose numbers to compare with (default: the model's name)")
    result.add_argument(
        "--check-lm-eval",
        nargs="?",
        type=int,
        const=SLICE,
        metavar="N",
        help=f"also put the first N items of each (default {SLICE}) through lm-eval's own Hugging Face model",
    )
    return result


def check_words(words: Sequence[str]) -> None:
    """ConfigError for a setting that would make it another protocol."""
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        if key not in SETTINGS and not key.startswith("model."):
            raise ConfigError(
                f"{word}: the yardstick sets task, method and protocol itself; it takes {', '.join(SETTINGS)} and "
                "model.NAME"
            )
