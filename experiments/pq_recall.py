"""Recall@k of PQCache's choices against the exact ones, over sub-vectors m and bits b.

    python -m experiments.pq_recall                                   # testbed_gqa on documents of its language
    python -m experiments.pq_recall --model FOLDER --text FILE.jsonl --tokens 4096 --kv-ratio 0.1

Oracle decodes; at every new token, in every layer and head, each m x b says what it would have chosen from the same
queries and keys. Recall is the share of the exact choice that it found, mean over tokens, layers, heads and documents;
random choice finds k / candidates of it.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experiments.lib.long_texts import add_options, read
from experiments.lib.tables import markdown
from kvexp.core import Budget
from kvexp.generate import GenerationParams, generate
from kvexp.hf.traits import head_dim
from kvexp.retrieval import Oracle, PQCache
from kvexp.retrieval.index import KVIndex
from kvexp.retrieval.method import PrefillKV, RetrievalQuery, Selection, reduce_group
from kvexp.retrieval.pqcache import dots
from kvexp.util.output import watch_pipes


@dataclass(frozen=True)
class Watching(Oracle):
    """Oracle that also asks others. found: name -> [hits, asked]; "random" counts what chance would find."""

    rivals: dict[str, PQCache] = field(default_factory=dict, compare=False, hash=False)
    indices: dict[tuple[int, str], KVIndex] = field(default_factory=dict, compare=False, hash=False)
    found: dict[str, list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0, 0.0]), compare=False, hash=False
    )

    def build(self, index: KVIndex, prompt: PrefillKV) -> None:
        for name, rival in self.rivals.items():
            self.indices[id(index), name] = KVIndex()
            rival.build(self.indices[id(index), name], prompt)

    def extend(self, index: KVIndex, key: Tensor, value: Tensor, at: list[int]) -> None:
        for name, rival in self.rivals.items():
            rival.extend(self.indices[id(index), name], key, value, at)

    def select(self, query: RetrievalQuery) -> Selection:
        exact = query.topk(reduce_group(query.exact_logits(), "softmax_sum"))
        truth = torch.zeros(*exact.shape[:2], query.memory.length, dtype=torch.bool).scatter_(-1, exact, True)
        pairs = truth.sum().item()
        for name, rival in self.rivals.items():
            index = self.indices[id(query.index), name]
            x = dots(query.query, index["centroids"], index["codes"][:, :, : query.memory.length])
            chosen = query.topk(reduce_group(query.logits(x), rival.combine))
            self.found[name][0] += truth.gather(-1, chosen).sum().item()
            self.found[name][1] += pairs
        self.found["random"][0] += pairs * exact.shape[-1] / int(query.candidates.sum())
        self.found["random"][1] += pairs
        return Selection(exact)


def recall(
    model: Any, texts: list[list[int]], ms: list[int], bs: list[int], kv_ratio: float, new: int
) -> dict[str, float]:
    """Name ("2x6", "random") -> recall, over documents of token ids decoded one by one."""
    rivals = {f"{m}x{b}": PQCache(m=m, b=b) for m in ms for b in bs}
    for rival in rivals.values():
        rival.check_heads(head_dim(model.config))
    method = Watching(rivals=rivals)
    for text in texts:
        method.indices.clear()
        generate(model, [text], method, Budget(kv_ratio=kv_ratio), decoding=GenerationParams(new, eos=None))
    return {name: hits / pairs for name, (hits, pairs) in method.found.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.pq_recall", description=__doc__)
    add_options(parser, tokens=512, documents=4)
    parser.add_argument("--new", type=int, default=32, help="tokens decoded after each")
    parser.add_argument("--kv-ratio", type=float, default=0.2)
    parser.add_argument("--m", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--b", type=int, nargs="+", default=[2, 4, 6])
    options = parser.parse_args(arguments)
    model, texts = read(options)
    recalls = recall(model, texts, options.m, options.b, options.kv_ratio, options.new)
    length = f"{options.documents} documents of {options.tokens} tokens"
    print(f"recall@k, {options.model}, kv_ratio={options.kv_ratio:g}, {length}")
    rows = [[f"{m}", *(f"{recalls[f'{m}x{b}']:.3f}" for b in options.b)] for m in options.m]
    print(markdown(["m \\ b", *map(str, options.b)], *rows))
    print(f"chance: {recalls['random']:.3f}")
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
