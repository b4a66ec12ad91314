"""`kvexp testbed sample`: print a document of the synthetic language, what is asked of it and the answers."""

from __future__ import annotations

import argparse
from random import Random

from kvexp.testbed.document import LONGEST, SPLITS, DocumentShape, document
from kvexp.testbed.forms import SUMMARY, ask, dialogue, opening, summary
from kvexp.testbed.needle_document import needle_document
from kvexp.testbed.words import vocabulary

FACTS = range(4, 31)  # as many as there are questions below, and the numbers up to the tenth, which models know


def main(arguments: list[str] | None = None) -> int:
    """`kvexp testbed sample`."""
    parser = argparse.ArgumentParser(prog="kvexp testbed", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sample = commands.add_parser("sample", help="print a document, its tasks and answers")
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument("--split", choices=SPLITS, default="test")
    sample.add_argument("--tokens", type=int, default=160, help="length of the document")
    sample.add_argument("--facts", type=int, default=9, help="stated in it, a third of them numbered; 4 to 30")
    asked = parser.parse_args(arguments)
    if asked.facts not in FACTS:
        parser.error(f"--facts must be between {FACTS[0]} and {FACTS[-1]}, got {asked.facts}")
    least = LONGEST * (asked.facts + 1)
    if asked.tokens < least:
        parser.error(f"--tokens must be at least {least} to hold --facts {asked.facts}, got {asked.tokens}")
    show(asked.seed, asked.split, asked.tokens, asked.facts)
    return 0


def show(seed: int, split: str, tokens: int, facts: int) -> None:
    """Print one document and what every testbed task asks of such a text."""
    rng = Random(f"sample {split} {seed}")
    doc = document(rng, split, DocumentShape(tokens, facts, marked=facts // 3, updated=1))
    print(f"The language has {len(vocabulary())} words. A document, split {split}, seed {seed}:\n")
    print(_wrapped(opening(doc.text)))
    print(f"\ntestbed_summary: the prompt ends in {SUMMARY!r}\n  -> {summary(doc.marked)}")
    print("\ntestbed_qa, testbed_choice: questions and answers (an update counts, not what it replaced)")
    for fact in rng.sample(doc.current(), 4):
        print(f"  {ask(fact).strip()}  ->  {fact.value}")
    text, needle = needle_document(rng, split, tokens, 0.5)
    print("\ntestbed_needle: a code in the middle of a text\n")
    print(_wrapped(opening(text.text)))
    print(f"\n  {ask(needle).strip()}  ->  {needle.value}")
    pieces = dialogue(rng, split, DocumentShape(tokens, facts, 0, 1), recalls=2)
    print("\ntestbed_dialogue: the last turn is to be said\n")
    print("".join(pieces[:-1]).replace(" ann :", "\nann :").replace(" ben :", "\nben :"))
    print(f"  -> {pieces[-1].strip().removesuffix(' ;')}")


def _wrapped(text: str) -> str:
    import textwrap

    return textwrap.fill(text, 118)
