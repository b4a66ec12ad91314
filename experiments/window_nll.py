"""Negative log-likelihood of the last quarter of fixed windows of text, per eviction method and number of slots.

    python -m experiments.window_nll --model FOLDER --text FILE.jsonl --slots 16 32 64 128

Each window's first three quarters are prefilled in full, evicted to the budget, and the last quarter is fed token by
token: its mean negative log-likelihood (nats per token) is what eviction costs in prediction. The first of those
tokens is judged by the full prefill and left out. The interval is a paired bootstrap over windows of the difference to
full attention.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from experiments.lib.long_texts import windows
from experiments.lib.tables import markdown
from kvexp.core import Budget, Method
from kvexp.generate.loglikelihood import continuation_logprobs
from kvexp.hf import load_model, load_tokenizer, pack_linear
from kvexp.hf.traits import max_positions
from kvexp.methods import A2SF, H2O, TOVA, Full, Ideal, Keyformer, KNorm, Random, StreamingLLM, Window
from kvexp.results.plots import DASHES, color_of, marker_of
from kvexp.util import ConfigError, tells_errors, watch_pipes

# label -> method, and where its paper's positions need saying, how the cache is set up
METHODS: dict[str, tuple[Method, dict[str, Any]]] = {
    "window": (Window(), {}),
    "streaming_llm": (StreamingLLM(), {}),
    "h2o": (H2O(), {}),
    "keyformer": (Keyformer(), {}),
    "a2sf alpha=0.1": (A2SF(alpha=0.1), {}),
    "a2sf alpha=0.9": (A2SF(alpha=0.9), {}),
    "tova": (TOVA(), {}),
    "knorm": (KNorm(), {}),
    "random": (Random(), {}),
    "ideal": (Ideal(), {"mode": "mask"}),
}


def nll(model: Any, texts: list[list[int]], method: Method, slots: int | None, batch: int, **plan: Any) -> torch.Tensor:
    """Mean nats per token of the last quarter, one number per window."""
    split = len(texts[0]) * 3 // 4
    budget = None if slots is None else Budget(tokens=slots)
    results = []
    for start in range(0, len(texts), batch):
        part = texts[start : start + batch]
        prompts, continuations = [t[:split] for t in part], [t[split:] for t in part]
        logprobs = continuation_logprobs(model, prompts, continuations, method, budget, seeds=0, **plan)
        results += [-sum(row[1:]) / (len(row) - 1) for row in logprobs]
    return torch.tensor(results, dtype=torch.float64)


def interval(differences: torch.Tensor, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean difference."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(len(differences), (2000, len(differences)), generator=generator)
    low, high = differences[index].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def table(
    model: Any, texts: list[list[int]], slots: list[int], batch: int, names: list[str] | None = None
) -> dict[tuple[str, int], tuple[float, float, float]]:
    """(method, slots) -> NLL and the interval of its difference to full; ("full", 0) holds the baseline."""
    full = nll(model, texts, Full(), None, batch)
    result = {("full", 0): (full.mean().item(), 0.0, 0.0)}
    for name in names or list(METHODS):
        method, plan = METHODS[name]
        for count in slots:
            ours = nll(model, texts, method, count, batch, **plan)
            result[name, count] = (ours.mean().item(), *interval(ours - full))
            print(f"  {name} at {count} slots: {result[name, count][0]:.3f}", flush=True)
    return result


def draw(result: dict[tuple[str, int], tuple[float, float, float]], slots: list[int], path: Path) -> None:
    """NLL against slots, one line per method with its interval, full attention as the black line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    full = result["full", 0][0]
    names = list(dict.fromkeys(name for name, _ in result if name not in ("full", "knorm", "random")))
    figure, axes = pyplot.subplots(figsize=(5.2, 3.4), layout="constrained")
    axes.axhline(full, color="black", linewidth=1.2, label="full attention")
    for name in names:
        cells = [result[name, s] for s in slots]
        errors = [[value - full - low for value, low, _ in cells], [high - (value - full) for value, _, high in cells]]
        method = name.partition(" ")[0]
        settings = [other for other in names if other.partition(" ")[0] == method]
        axes.errorbar(
            slots,
            [c[0] for c in cells],
            yerr=errors,
            label=name,
            color=color_of(method),
            marker=marker_of(method),
            linestyle=DASHES[settings.index(name)],
            markersize=4,
            capsize=2,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(slots, [str(s) for s in slots])
    axes.set_xlabel("slots per kv head")
    axes.set_ylabel("nats per token, last quarter of 512")
    axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


@tells_errors(ConfigError, OSError)
def main() -> int:
    """Exit code 0, or 2 after printing an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--methods", nargs="+", choices=METHODS)
    parser.add_argument("--figure", type=Path, help="draw the table: a file ending in .png, .svg or .pdf")
    options = parser.parse_args()
    for name, least in (("windows", 2), ("batch", 1), ("length", 8)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} must be at least {least}, got {getattr(options, name)}")
    model = pack_linear(load_model(options.model))
    if options.length > max_positions(model.config):
        raise ConfigError(f"--length {options.length} is more than the model holds ({max_positions(model.config)})")
    texts = windows(load_tokenizer(options.model), options.text, options.length, options.windows)
    result = table(model, texts, options.slots, options.batch, options.methods)
    print(f"\nfull attention: {result['full', 0][0]:.3f} nats per token, {options.windows} windows")
    names = dict.fromkeys(name for name, _ in result if name != "full")
    cells = {at: f"{value:.3f} ({low:+.3f} … {high:+.3f})" for at, (value, low, high) in result.items()}
    rows = ([name, *(cells[name, count] for count in options.slots)] for name in names)
    print(markdown(["method", *(f"{count} slots" for count in options.slots)], *rows))
    if options.figure:
        draw(result, options.slots, options.figure)
    return 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
