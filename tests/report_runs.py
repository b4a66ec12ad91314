"""Run folders for the tests of the report: small, known by hand, and full of text that would like to be markup."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kvexp
from kvexp.run.evictions import ExampleLog, write_evictions, write_example_log
from kvexp.run.store import Run, refuse

EVIL = "<script>alert(1)</script>"
WORSE = "</script><img src=x onerror=alert(2)><b>&lt;"
EXAMPLES = 24


@contextlib.contextmanager
def numerics(value: int) -> Iterator[None]:
    """Runs opened inside are of these NUMERICS."""
    before, kvexp.NUMERICS = kvexp.NUMERICS, value
    try:
        yield
    finally:
        kvexp.NUMERICS = before


def plain_row(index: int, score: float | dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """A row of examples.jsonl; score None: skipped."""
    metrics = score if isinstance(score, dict) else {} if score is None else {"rouge1": score}
    receipt = {"slots": 50.0, "kv_bytes": 1000, "peak_kv_bytes": 2000, "first_eviction_step": 0}
    receipt |= changes.pop("receipt", {})
    found: dict[str, Any] = {"example": f"e{index}", "index": index, "metrics": metrics, "prompt_tokens": 100}
    found |= {"new_tokens": 11, "prompt_cut": False, "skipped": "too long" if score is None else None}
    found |= {"seconds": {"ttft": 0.5, "tt2t": 0.6, "tpot": 0.05}, "receipt": receipt, "output": "o", "reference": "r"}
    return found | changes


def write(
    outputs: Path,
    method: str,
    scores: Sequence[float | dict[str, Any] | None],
    baseline: str | None = None,
    done: bool = True,
    changes: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **labels: Any,
) -> Run:
    """A run of hand-made scores; changes: of every row; config: of its identity, with its labels."""
    named = {"model": "tiny", "task": "xsum", "method": method, "kv_ratio": 0.5} | labels
    run = Run.open(outputs, named | (config or {}), named, baseline=baseline)
    shared = {"receipt": {"first_eviction_step": None}} if method == "full" else {}
    for index, score in enumerate(scores):
        run.append(plain_row(index, score, **(shared | (changes or {}))))
    if done:
        run.finish(len(scores))
    return run


def row(index: int, score: float, said: str, *, evicts: bool, timed: bool, info: dict[str, Any]) -> dict[str, Any]:
    receipt = {"slots": 100.0 * score, "kv_bytes": int(2**20 * score), "peak_kv_bytes": int(2**21 * score)}
    receipt |= {"first_eviction_step": 0 if evicts else None, "batch_size": 1}
    found = {"example": f"e{index}", "index": index, "metrics": {"rouge1": 50 * score, "rouge2": 40 * score**2}}
    found |= {"prompt_tokens": 100, "new_tokens": 4, "skipped": None, "receipt": receipt, "info": info}
    found |= {"finish_reason": "stop", "stop_reason": WORSE} if index % 2 else {"finish_reason": "length"}
    found["seconds"] = {"ttft": 0.1, "tt2t": 0.2, "tpot": score / 100} if timed else dict.fromkeys(("ttft", "tpot"))
    return found | {"output": f"the {said} number {index}", "reference": f"the right number {index}"}


def run(
    folder: Path, labels: dict[str, Any], score: float, baseline: str | None, *, rows: int = EXAMPLES, **how: Any
) -> Run:
    """How it went: said (a word of its outputs), timed, cell (example -> info), finish."""
    made = Run.open(folder, {"labels": labels}, labels, {"commit": "abc1234", "device": "cpu"}, baseline=baseline)
    cell: Callable[[int], dict[str, Any]] = how.get("cell", lambda index: {})
    for index in range(rows):
        # Examples differ, so that intervals have a width; the later half loses most.
        of = score * (1 - 0.1 * (index % 3)) * (0.9 if index >= rows // 2 and baseline else 1.0)
        said = how.get("said", "right") if index % 2 else "right"
        evicts = baseline is not None
        made.append(row(index, of, said, evicts=evicts, timed=how.get("timed", False), info=cell(index)))
    if how.get("finish", True):
        made.finish(rows)
    return made


def labels(model: str, task: str, method: str, kv_ratio: float | None = None, setting: str = "") -> dict[str, Any]:
    found = {"model": model, "task": task, "method": method, "kv_ratio": kv_ratio, "setting": setting}
    return found | {"experiment": "trial"}


def diagnosed(run: Run) -> None:
    """A log of e1: layer 0 loses position 1 in both heads and 0 in one, layer 1 (one head) loses 0 at step 1."""
    texts = ["some ", EVIL, " text ", WORSE, " end"]
    log = ExampleLog("e1", 3, 1, [5, 6, 7, 8, 9], texts, [2, 1], True, True)
    write_example_log(run, log)
    gone = {"step": [0, 0, 0, 1], "layer": [0, 0, 0, 1], "head": [0, 1, 0, 0], "position": [1, 1, 0, 0]}
    write_evictions(run, log, gone | {"score": [0.0] * 4, "rank": [0] * 4, "threshold": [1.0] * 4})


def diverging(run: Run, level: float) -> None:
    """Divergences of three tokens an example around this level of KL, the first of them the prefill's."""
    lines = []
    for index in range(EXAMPLES):
        kl = [0.0, level * (1 + 0.1 * (index % 3)), 2 * level]
        line = {"example": f"e{index}", "index": index, "text": "own", "first_by_prefill": True, "tokens": [1, 2, 3]}
        numbers = {"kl": kl, "full_logprob": [-1.0] * 3, "logprob": [-1.0 - level] * 3, "same_top1": [1, 1, index % 2]}
        lines.append(line | numbers)
    run.append_divergence(lines)


def outputs(folder: Path) -> Path:
    """Two models and three tasks, one of them a needle; one run each partial, failed, refused, of older NUMERICS."""
    full = run(folder, labels("tiny", "xsum", "full"), 1.0, None, timed=True)
    for method, ratio, score in (
        ("h2o", 0.3, 0.5),
        ("h2o", 0.6, 0.8),
        ("keyformer", 0.3, 0.6),
        ("keyformer", 0.6, 0.99),
    ):
        made = run(folder, labels("tiny", "xsum", method, ratio), score, full.hash, timed=True, said="wrong")
        diverging(made, 1 - score)
    run(folder, labels("tiny", "xsum", "tova", 0.3), 0.4, full.hash, rows=6, timed=True, finish=False)
    failed = Run.open(folder, {"failed": 1}, labels("tiny", "xsum", "snapkv", 0.3), baseline=full.hash)
    failed.fail(RuntimeError(f"out of memory {EVIL}"))
    refuse(
        folder, ["kv_ratio=7"], labels("tiny", "xsum", "h2o", 7.0), ValueError(f"kv_ratio must be in (0, 1] {WORSE}")
    )

    evil = run(folder, labels(EVIL, WORSE, "full"), 1.0, None, said=EVIL)
    hostile = labels(EVIL, WORSE, WORSE, 0.5, f"x={EVIL}")
    talks = {"cell": lambda index: {"turn": index % 2, "distance": 0, "kl": 0.1, "top1": 1.0, "kl_tokens": 2}}
    diagnosed(run(folder, hostile, 0.7, evil.hash, said=WORSE, **talks))

    cells = [{"length": length, "depth": depth} for length in (128, 256) for depth in (0.0, 50.0, 100.0)]
    needle = {"cell": lambda index: cells[index % len(cells)]}
    whole = run(folder, labels("tiny", "needle", "full"), 1.0, None, **needle)
    run(folder, labels("tiny", "needle", "h2o", 0.3), 0.5, whole.hash, **needle)
    with numerics(kvexp.NUMERICS - 1):
        old = run(folder, labels("old", "xsum", "full"), 1.0, None)
        run(folder, labels("old", "xsum", "h2o", 0.3), 0.7, old.hash)
    return folder
