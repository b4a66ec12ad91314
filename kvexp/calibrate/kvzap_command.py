"""kvexp calibrate kvzap model=NAME [data=FILE]: train KVzap's scores of a model, for method=kvzap.

The model reads each text, and once more to repeat it; what KVzip+ scores then is predicted, layer by layer and kv head
by kv head, from what the attention layers got the first time. Settings are those of `kvexp run` for a model, and:
  data=FILE      texts to read: FILE.jsonl has one in the field `text` of each line, any other file is one text;
                 without it, the last twelve articles that come with kvexp, about which method=kvzap is then not asked
  tokens=1250    tokens of a prompt at most (fewer where the model holds fewer)
  prompts=400    how many of them at most; each fourth is held out, and R2 is of those
The result is a small file in the cache folder, known by the digest of the model; it replaces an older one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvexp.calibrate.__main__ import exit_code, number, parted

OWN = {"data": "", "tokens": "1250", "prompts": "400"}
NAME = "kvexp calibrate kvzap"


def main(argv: Sequence[str]) -> int:
    """0, 2 for what cannot be done, which is told, or 130 if it was interrupted."""
    from kvexp.config.compose_errors import told

    _, words = parser().parse_known_args(argv)

    def train() -> None:
        model_words, own = parted(words, OWN, NAME)
        with told(model_words):
            from kvexp.calibrate.kvzap_training import train_kvzap

            train_kvzap(model_words, own["data"], number("tokens", own), number("prompts", own))

    return exit_code(train, "training")


def parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=NAME,
        usage="%(prog)s model=NAME [model.SETTING=VALUE] [data=FILE] [tokens=N] [prompts=N]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
