"""How long a group of runs takes and what it holds: from rows of the same model and machine, else from an estimate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from kvexp.config.settings import Settings
from kvexp.errors import ConfigError
from kvexp.evaluate.limits import head_slot_bytes, slots_held
from kvexp.models.load import parse_dtype
from kvexp.models.model_size import ModelSize
from kvexp.record import runs


@dataclass(frozen=True)
class Machine:
    """flops: per second of dense matrix products at the model's usual precision; bandwidth: bytes per second."""

    name: str
    flops: float
    bandwidth: float
    layer_s: float  # of Python and launches, per layer and decode step


# Data sheets; a third of the peak, two thirds of the bandwidth and the time per layer are what eager code reaches.
MACHINES = {
    "a100": Machine("one A100 of 80 GB", 312e12 / 3, 2.0e12 * 2 / 3, 6e-4),
    "h100": Machine("one H100 of 80 GB", 989e12 / 3, 3.35e12 * 2 / 3, 6e-4),
    "h200": Machine("one H200 of 141 GB", 989e12 / 3, 4.8e12 * 2 / 3, 6e-4),
    "cpu": Machine("one CPU thread", 40e9, 10e9, 1e-3),
}


@dataclass(frozen=True)
class Rates:
    """Measured: seconds of a row per prompt token and per new token, its share of the batch it was in."""

    prompt: float
    new: dict[str, float]  # by method
    rows: int

    def of(self, method: str) -> float:
        return self.new.get(method) or fmean(self.new.values())


def measured(settings: Settings, device: str) -> Rates | None:
    """From timed rows of this model on this device under outputs_dir; rows of shared prefills hold no times."""
    if not settings.outputs_dir.is_dir():
        return None
    prompts: list[tuple[float, int]] = []
    new: dict[str, list[float]] = {}
    for run in runs(settings.outputs_dir):
        if run.config.get("model") != settings.identity["model"] or run.env.get("device") != device:
            continue
        for row in run.rows():
            spent, batch = row.get("seconds") or {}, (row.get("receipt") or {}).get("batch_size") or 1
            if spent.get("ttft") and spent.get("tpot"):
                prompts.append((spent["ttft"] / batch, row["prompt_tokens"]))
                new.setdefault(run.config["method"]["name"], []).append(spent["tpot"] / batch)
    if not prompts:
        return None
    per_token = sum(seconds for seconds, _ in prompts) / max(1, sum(tokens for _, tokens in prompts))
    return Rates(per_token, {method: fmean(each) for method, each in new.items()}, len(prompts))


def measured_seconds(
    rates: Rates, runs: Sequence[tuple[Settings, int]], prefills: int, prompt: float, new: float
) -> float:
    """Of runs with so many answers and forced texts to do each, after so many prefills."""
    return prefills * prompt * rates.prompt + sum(rows * new * rates.of(s.method.name) for s, rows in runs)


def estimated_seconds(
    machine: Machine, shape: ModelSize, runs: Sequence[tuple[Settings, int]], prefills: int, prompt: float, new: float
) -> float:
    """2 operations per parameter and token and 4 per query, key and component; a step reads weights and held slots.

    A second pass over a prompt takes what twice the prompt takes beyond the prompt.
    runs: with the answers and forced texts of each, which go side by side; prefills: of the whole group.
    """
    lead = runs[0][0]
    passes = second_passes([settings for settings, rows in runs if rows])
    attention = 4 * shape.layers * shape.width * prompt**2
    operations = 2 * shape.parameters * prompt * (1 + passes) + attention * (1 + 3 * passes)
    batch = lead.batch_size * lead.decoding.num_beams
    held = sum(slots_bytes(shape, settings, slots_of(settings, prompt)) for settings, rows in runs if rows)
    many = sum(1 for _, rows in runs if rows) * batch
    reading = (shape.weight_bytes(lead.model.dtype) + batch * held) / machine.bandwidth
    step = max(reading, 2 * shape.parameters * many / machine.flops) + shape.layers * machine.layer_s
    most = max(rows for _, rows in runs)
    return prefills * operations / machine.flops + math.ceil(most / lead.batch_size) * new * step


def second_passes(runs: Sequence[Settings]) -> int:
    """How often a prompt is fed once more before its evictions: runs that declare the same pass share it."""
    return len({settings.method.needs.second_pass for settings in runs} - {None})


def slots_of(settings: Settings, prompt: float) -> int:
    """Slots per kv head that a prompt holds once it is evicted; all of them where the budget is too small for it."""
    try:
        return slots_held(settings, [max(1, int(prompt))])[0]
    except ConfigError:
        return int(prompt) + settings.decoding.max_new_tokens


def kv_bytes(shape: ModelSize, runs: Sequence[Settings], prompt: float) -> int:
    """At most, of a batch: the prompts as they are read, and what every run keeps of them."""
    lead = runs[0]
    batch = lead.batch_size * lead.decoding.num_beams
    kept = sum(slots_bytes(shape, settings, slots_of(settings, prompt)) for settings in runs)
    return batch * (int(prompt) * shape.token_bytes(lead.model.dtype) + kept)


def slots_bytes(shape: ModelSize, settings: Settings, slots: int) -> int:
    """Bytes of so many slots per kv head in all layers, in as many bits as the run stores them."""
    itemsize = parse_dtype(settings.model.dtype).itemsize
    return shape.layers * shape.kv_heads * head_slot_bytes(settings, shape.head_dim, itemsize).of(slots)


def machine_here(device: str) -> Machine:
    """The one of `MACHINES` that this device's name fits; a CUDA device of another name counts as an A100."""
    import torch

    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        one = MACHINES["cpu"]
        return Machine(f"{threads} CPU thread(s)", one.flops * threads, one.bandwidth, one.layer_s)
    fitting = [machine for name, machine in MACHINES.items() if name in device.lower()]
    return fitting[0] if fitting else MACHINES["a100"]


def folder_rows(path: Path) -> set[str]:
    """Examples that have their row in a run folder; changes nothing there."""
    from kvexp.record import Run

    return {row["example"] for row in Run.load(path).rows()} if (path / "config.json").exists() else set()


def folder_texts(path: Path) -> tuple[set[tuple[str, str]], set[str]]:
    """((example, kind of text) that were forced, examples that were skipped) in a run folder; changes nothing there."""
    from kvexp.record import Run, divergence_lines

    if not (path / "config.json").exists():
        return set(), set()
    run = Run.load(path)
    return set(divergence_lines.read(run)), {row["example"] for row in run.rows() if row.get("skipped")}


def gigabytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def tokens(count: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"
