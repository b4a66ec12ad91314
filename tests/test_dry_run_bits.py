"""Plans of quantised caches: the bytes that they say are those that a run's ledger then holds."""

from pathlib import Path

import pytest
from test_quantised_runs import settings

from kvexp.dry_run import cost
from kvexp.dry_run.group_cost import GroupPlan, RunWork
from kvexp.dry_run.workload import model_shape
from kvexp.evaluate.evaluate_run import evaluate_run

FEW = (
    "model=testbed_rope",
    "task=testbed_summary",
    "limit=1",
    "batch_size=1",
    "task.max_new_tokens=40",
    "generation.eos=null",
    "divergence=false",
    "cache.group=16",
)


def planned_bytes(given, prompt):
    """(of the slots that the run keeps, of what the plan's line says): bytes of one prompt."""
    shape = model_shape(given.model)
    return cost.slots_bytes(shape, given, cost.slots_of(given, prompt)), cost.kv_bytes(shape, [given], prompt)


@pytest.mark.parametrize("method", ["h2o", "full"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_bytes_of_a_plan_are_those_that_the_run_holds(method: str, bits: int, tmp_path: Path) -> None:
    given = settings(*FEW, f"method={method}", "kv_ratio=0.5", f"cache.bits={bits}", f"outputs_dir={tmp_path}")
    (row,) = evaluate_run(given).rows()
    held, prompt = row["receipt"]["kv_bytes"], row["prompt_tokens"]
    planned, line = planned_bytes(given, prompt)
    assert row["new_tokens"] == 40
    assert planned == (held if method == "full" else pytest.approx(held, rel=0.02))
    token = model_shape(given.model).token_bytes("float32")
    assert line == planned + token * prompt, "the prompt is read as it is"


def test_fewer_bits_are_fewer_bytes_at_the_peak_too() -> None:
    def peak(*words: str) -> int:
        one = settings(*FEW, "method=h2o", "kv_ratio=0.5", *words)
        shape = model_shape(one.model)
        made = GroupPlan([RunWork(one, 1, {})], shape, 1, 800, 40, shared=False, free=1 << 40, threads=1)
        return made.peak().caches

    plain, four = peak(), peak("cache.bits=4")
    assert four < 0.5 * plain
