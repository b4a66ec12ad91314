"""Are the testbed's models good enough to measure with? Runs what decides it and prints it (docs/testbed.md has it).

    python -m experiments.testbed                     all models (about 10 minutes on two cores)
    python -m experiments.testbed testbed_rope

Asked on unseen test documents, as part of the plan of the testbed: full attention finds needles (exact match >= 95),
chooses (accuracy >= 90), summarizes (ROUGE-2 >= 80) and answers questions (F1 >= 85) on prompts of at least 256 tokens;
half the window loses at least 25 ROUGE-2 points, so the context is needed; the ideal choice of 30 % of the tokens keeps
at least 95 % of full while a random choice loses at least 15 points, so it matters which tokens are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from experiments.lib.tables import markdown as markdown_table
from experiments.studies.testbed import NAMES as MODELS
from kvexp.results.table import table
from kvexp.util.output import watch_pipes

FOLDER = Path(__file__).resolve().parents[1] / "kvexp" / "tasks" / "testbed_models"
SIZE = 120


@dataclass(frozen=True)
class Claim:
    """words: what is claimed; value: the number from the table of one model; at_least: the mark it must reach."""

    words: str
    value: Callable[[pd.DataFrame], float]
    at_least: float


def _score(task: str, metric: str, method: str = "full", ratio: float | None = None) -> Callable[[pd.DataFrame], float]:
    def value(frame: pd.DataFrame) -> float:
        rows = frame[(frame["task"] == task) & (frame["method"] == method)]
        rows = rows if ratio is None else rows[rows["kv_ratio"] == ratio]
        return float(rows[metric].iloc[0]) if len(rows) else float("nan")

    return value


_SUMMARY = _score("testbed_summary", "rouge2")


def _lost(method: str, ratio: float) -> Callable[[pd.DataFrame], float]:
    return lambda frame: _SUMMARY(frame) - _score("testbed_summary", "rouge2", method, ratio)(frame)


def _kept(method: str, ratio: float) -> Callable[[pd.DataFrame], float]:
    return lambda frame: 100 * _score("testbed_summary", "rouge2", method, ratio)(frame) / _SUMMARY(frame)


CLAIMS = (
    Claim("needle, exact match, 256 tokens and more", _score("testbed_needle", "exact"), 95),
    Claim("choice, accuracy", _score("testbed_choice", "acc"), 90),
    Claim("summary, ROUGE-2", _SUMMARY, 80),
    Claim("questions, F1", _score("testbed_qa", "f1"), 85),
    Claim("dialogue, ROUGE-2 (no mark was set)", _score("testbed_dialogue", "rouge2"), 0),
    Claim("ROUGE-2 points that window loses at kv_ratio 0.5", _lost("window", 0.5), 25),
    Claim("% of full's ROUGE-2 that ideal keeps at 0.3", _kept("ideal", 0.3), 95),
    Claim("ROUGE-2 points that random loses at 0.3", _lost("random", 0.3), 15),
)


def sweeps(model: str) -> list[list[str]]:
    """The overrides of every sweep that the claims about one model need."""
    tasks = "task=testbed_choice,testbed_qa,testbed_dialogue"
    return [
        [f"model={model}", "task=testbed_summary", "method=window", "kv_ratio=0.5"],
        [f"model={model}", "task=testbed_summary", "method=ideal,random", "kv_ratio=0.3"],
        [f"model={model}", tasks, "method=full"],
        [f"model={model}", "task=testbed_needle", "task.lengths=[256,320,384]", "method=full"],
    ]


def measure(model: str, outputs: Path, size: int) -> pd.DataFrame:
    """Run the sweeps (resuming what exists) and return the table of this model's runs.

    Weights that were trained again, and other sizes, have a folder of their own: their labels would be the same.
    """
    weights = hashlib.sha256((FOLDER / model / "model.safetensors").read_bytes()).hexdigest()
    outputs = outputs / f"{model}-{weights[:8]}-{size}"
    for overrides in sweeps(model):
        words = [f"task.size={size}", f"outputs_dir={outputs}", "batch_size=8"]
        line = [sys.executable, "run.py", "-m", *overrides, *words]
        subprocess.run(line, cwd=Path(__file__).resolve().parents[1], check=True, stdout=subprocess.DEVNULL)
    return table(outputs, {"model": [model]})


def markdown(frame: pd.DataFrame, size: int) -> str:
    """The claims about one model as a table: what was found and what was asked."""
    rows = [
        (claim.words, f"{claim.value(frame):.1f}", f">= {claim.at_least}" if claim.at_least else "-")
        for claim in CLAIMS
    ]
    title = f"Scores on {size} examples of the test split each (`python -m experiments.testbed`):"
    return f"{title}\n\n{markdown_table(('', 'found', 'asked for'), *rows)}"


def main() -> int:
    """0 if every model reaches every mark, else 1."""
    parser = argparse.ArgumentParser(prog="python -m experiments.testbed", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--outputs", type=Path, default=Path("outputs/testbed"))
    parser.add_argument("--size", type=int, default=SIZE, help="examples per task")
    args = parser.parse_args()
    for model in args.models:
        if not (FOLDER / model / "training.json").exists():
            parser.error(f"{model} is none of {', '.join(MODELS)}, or was not trained yet (make testbed)")
    models = list(dict.fromkeys(args.models)) or list(MODELS)
    short = 0
    for model in models:
        frame = measure(model, args.outputs.resolve(), args.size)
        print(f"\n{model}\n{markdown(frame, args.size)}")
        short += sum(not claim.value(frame) >= claim.at_least for claim in CLAIMS)
    print(f"\n{short} of {len(CLAIMS) * len(models)} marks were missed")
    return 1 if short else 0


if __name__ == "__main__":
    watch_pipes()
    sys.exit(main())
