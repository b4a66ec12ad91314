"""Run folders of a context's life, made by hand: conversations, questions, chunks, long answers."""

from pathlib import Path
from typing import Any

from kvexp.run.store import Run

EVIL = "<img src=x onerror=alert(1)>"


def opened(folder: Path, task: str, labels: dict[str, Any], config: dict[str, Any], baseline: Run | None) -> Run:
    labels = {"model": "tiny", "task": task, "experiment": "trial", "setting": "", **labels}
    identity = {"labels": labels, "task": {"name": task}, **config}
    return Run.open(folder, identity, labels, {"device": "cpu"}, baseline=baseline and baseline.hash)


def row(index: int, example: str, metrics: dict[str, float], **more: Any) -> dict[str, Any]:
    made = {"example": example, "index": index, "metrics": metrics, "prompt_tokens": 100, "new_tokens": 8}
    made |= {"output": "words", "reference": "right", "skipped": None, "finish_reason": "stop", "stop_reason": None}
    receipt = {"slots": 50.0, "kv_bytes": 1000, "peak_kv_bytes": 2000, "batch_size": 1, "first_eviction_step": 0}
    return {**made, "receipt": receipt, "seconds": {}, "info": {}, **more}


def conversations(folder: Path, count: int = 24) -> None:
    """Three turns each, of which a run answers the first of all, the second of every other one, the third of none."""
    base = None
    for method in ("full", "h2o"):
        labels = {"method": method, "kv_ratio": None if base is None else 0.3}
        run = opened(folder, "dialogue", labels, {"task": {"name": "dialogue", "history": "own"}}, base)
        for index in range(3 * count):
            talk, turn = divmod(index, 3)
            right = base is None or turn == 0 or (turn == 1 and talk % 2 == 0)
            info = {"turn": turn, "distance": 2 - turn, "kl_tokens": 4, "kl": 0.1 * (turn + 1), "top1": 0.9}
            run.append(row(index, f"talk{talk} turn {turn}", {"exact": 100.0 * right}, info=info, answered=right))
        run.finish(3 * count)
        base = base or run


def questions(folder: Path, count: int = 24) -> None:
    """Two questions of each context, hidden and in the prompt; a run loses the second of every other hidden one."""
    for place in ("after_eviction", "in_prompt"):
        base, hidden = None, place == "after_eviction"
        for method in ("full", "h2o"):
            labels = {"method": method, "kv_ratio": None if base is None else 0.5, "setting": EVIL}
            run = opened(folder, "news_qa", labels, {"task": {"name": "news_qa", "question": place}}, base)
            for index in range(2 * count):
                context, number = divmod(index, 2)
                lost = base is not None and hidden and number and context % 2
                shared = {"context": {"digest": f"c{context}", "question": number, "of": 2}} if hidden else {}
                run.append(row(index, f"q{index}", {"exact": 0.0 if lost else 100.0}, **shared))
            run.finish(2 * count)
            base = base or run


def chunks(folder: Path, count: int = 24) -> None:
    """A prompt read whole, and in chunks of 32 and 128."""
    full = opened(folder, "news", {"method": "full", "kv_ratio": None}, {}, None)
    runs = [(full, 100.0, 8000)]
    for chunk, score, peak in ((None, 90.0, 6000), (32, 40.0, 2500), (128, 60.0, 4000)):
        words = "" if chunk is None else f"prefill=bounded prefill.chunk={chunk}"
        setting = f"budget.tokens=64 {words}".strip()
        config = {} if chunk is None else {"prefill": {"bounded_chunk": chunk}}
        labels = {"method": "h2o", "kv_ratio": None, "tokens": 64, "setting": setting}
        runs.append((opened(folder, "news", labels, config, full), score, peak))
    for run, score, peak in runs:
        for index in range(count):
            made = row(index, f"n{index}", {"rouge1": score - index % 3})
            run.append({**made, "receipt": {**made["receipt"], "peak_kv_bytes": peak}})
        run.finish(count)


def long_answers(folder: Path) -> None:
    """Two answers of a run and the full cache; the run's KL is 0.1 to token 64 and 0.2 behind it."""
    base = None
    for method, new in (("full", 100), ("h2o", 80)):
        labels = {"method": method, "kv_ratio": None, "tokens": None if base is None else 256}
        run = opened(folder, "long_answers", labels, {}, base)
        lines = []
        for index in range(2):
            metrics = {"not_repeated": 75.0, "loop_free": 100.0 if index else 50.0}
            run.append(row(index, f"l{index}", metrics, new_tokens=new, output="a b c d"))
            kl = [0.1] * 64 + [0.2] * 36
            line = {"example": f"l{index}", "index": index, "text": "own", "first_by_prefill": False}
            line |= {"tokens": list(range(100)), "kl": kl, "full_logprob": [-1.0] * 100}
            lines.append({**line, "logprob": [-1.0 - each for each in kl], "same_top1": [1] * 100})
        if base is not None:
            run.append_divergence(lines)
        run.finish(2)
        base = base or run


def outputs(folder: Path) -> Path:
    """All of them."""
    for make in (conversations, questions, chunks, long_answers):
        make(folder)
    return folder
