"""Long texts as token ids, of a file or of the testbed's language, and the options that name them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

import kvexp.tasks.testbed
from kvexp.hf import load_model, load_tokenizer, pack_linear
from kvexp.tasks.testbed import LONGEST, DocumentShape, document, opening
from kvexp.util.errors import ConfigError

MODELS = Path(kvexp.tasks.testbed.__file__).parent / "testbed_models"
SPREAD = 3  # a testbed document has a fact for every so many sentences of the longest kind,
FACTS = 40  # up to so many
SLACK = 32  # tokens: its last sentence need not fit


def add_options(parser: argparse.ArgumentParser, tokens: int, documents: int) -> None:
    parser.add_argument("--model", default="testbed_gqa", help="a testbed model's name, or a folder")
    parser.add_argument("--text", help="jsonl with a field text; by default documents of the testbed's language")
    parser.add_argument("--tokens", type=int, default=tokens, help="prompt tokens of a document")
    parser.add_argument("--documents", type=int, default=documents)


def read(options: argparse.Namespace) -> tuple[Any, list[list[int]]]:
    """The model and the token ids of the texts, all of options.tokens tokens."""
    path = str(MODELS / options.model) if (MODELS / options.model).is_dir() else options.model
    tokenizer = load_tokenizer(path)
    if options.text is not None:
        texts = windows(tokenizer, Path(options.text), options.tokens, options.documents)
    else:
        texts = [long_text(tokenizer, options.tokens, number) for number in range(options.documents)]
    return pack_linear(load_model(path)), texts


def long_text(tokenizer: Any, tokens: int, number: int) -> list[int]:
    """Document `number`, facts of the test split among filler, cut to so many tokens."""
    facts = min(FACTS, max(1, tokens // (SPREAD * LONGEST)))
    text = document(Random(f"long {number}"), "test", DocumentShape(tokens + SLACK, facts, 0, 0)).text
    ids: list[int] = tokenizer(opening(text)).input_ids
    return ids[:tokens]


def windows(tokenizer: Any, path: Path, length: int, count: int) -> list[list[int]]:
    """`count` windows of `length` tokens from the texts of a jsonl file laid end to end, each after a start token."""
    stream: list[int] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            row = json.loads(line)
            if "text" not in row:
                raise ConfigError(f"{path}, line {number} has no field 'text' (fields: {', '.join(row)})")
            ids = tokenizer(row["text"]).input_ids
            if tokenizer.bos_token_id is not None and ids[:1] != [tokenizer.bos_token_id]:
                ids = [tokenizer.bos_token_id, *ids]
            stream += ids
            if len(stream) >= length * count:
                break
    if len(stream) < length * count:
        raise ConfigError(f"{path} holds {len(stream) // length} windows of {length} tokens, {count} were asked for")
    return [stream[i : i + length] for i in range(0, length * count, length)]
