"""Hit rate of PQCache's block cache, LRU and LFU, over the blocks noted per step (arXiv:2407.12820, Fig. 10d).

    python -m experiments.cache_hits                                  # testbed_gqa on documents of its language
    python -m experiments.cache_hits --model FOLDER --text FILE.jsonl --tokens 8192 --block 128 --capacity 4096

The paper: blocks of 128, 4096 tokens, 8k-token documents; both policies near 0.5, up to 0.6, rising and then falling.
The rate is that of (kv head, token) pairs chosen, over all steps, layers and documents.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Literal

from experiments.lib.long_texts import add_options, read
from kvexp.core import Budget
from kvexp.generate import GenerationParams, generate, receipts
from kvexp.retrieval import PQCache
from kvexp.util import watch_pipes

POLICIES: tuple[Literal["lru", "lfu"], ...] = ("lru", "lfu")


def rates(
    model: Any,
    texts: list[list[int]],
    per_step: list[int],
    block: int,
    capacity: int,
    kv_ratio: float,
    new: int,
    m: int,
) -> dict[tuple[str, int], float]:
    """(policy, blocks per step) -> hit rate, mean over documents."""
    found = {}
    for policy in POLICIES:
        for count in per_step:
            method = PQCache(
                m=m, b=4, cache_tokens=capacity, cache_block=block, cache_policy=policy, cache_blocks_per_step=count
            )
            seen = []
            for text in texts:
                made = generate(
                    model, [text], method, Budget(kv_ratio=kv_ratio), decoding=GenerationParams(new, eos=None)
                )
                account = receipts(made.cache)[0].retrieval
                assert account is not None
                seen.append(account["cache_hit_rate"])
            found[policy, count] = sum(seen) / len(seen)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.cache_hits", description=__doc__)
    add_options(parser, tokens=1024, documents=2)
    parser.add_argument("--new", type=int, default=48, help="tokens decoded after each")
    parser.add_argument("--kv-ratio", type=float, default=0.1)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--capacity", type=int, default=256, help="tokens per kv head")
    parser.add_argument("--per-step", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--m", type=int, default=2)
    options = parser.parse_args(arguments)
    model, texts = read(options)
    found = rates(
        *(model, texts, options.per_step, options.block, options.capacity),
        *(options.kv_ratio, options.new, options.m),
    )
    print(
        f"hit rate, {options.model}, blocks of {options.block}, {options.capacity} tokens, "
        f"kv_ratio={options.kv_ratio:g}, {options.documents} documents of {options.tokens} tokens"
    )
    print(f"| blocks per step | {' | '.join(map(str, options.per_step))} |")
    print("|---" * (len(options.per_step) + 1) + "|")
    for policy in POLICIES:
        print(f"| {policy} | {' | '.join(f'{found[policy, n]:.3f}' for n in options.per_step)} |")
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
