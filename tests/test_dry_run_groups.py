"""How a plan takes the prompts of a group: as the sweep does, whose own function for that is asked beside it."""

import dataclasses
import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks import dry_run_check
from kvexp.config.settings import settings_of
from kvexp.dry_run.group_cost import GroupPlan, RunWork
from kvexp.dry_run.speed_files import KeptSpeed
from kvexp.dry_run.speed_model import Speed
from kvexp.evaluate import limits
from kvexp.models.model_size import ModelSize
from kvexp.sweep import prefill_groups

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["model=tiny", "task=sample", "task.nll=false", "task.max_new_tokens=10", "generation.eos=null"]
SHAPE = ModelSize(1000, 800, 50, layers=2, width=8, kv_heads=2, head_dim=4, positions=4096)
PLENTY = 1 << 40
# A prefill takes a second a prompt, a step nothing but a tenth of a second for each of its rows.
SPEED = Speed(1, 1, (1.0, 0.0, 0.0), 0.0, 0.0, ((1.0, 0.1), (101.0, 10.1)), 0.0, 0.0)
KEPT = KeptSpeed((SPEED,), 0.0, 0, "2026-11-22")


@functools.cache
def settings(*overrides: str):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = OmegaConf.to_container(compose("config", [*SMALL, *overrides]), resolve=True)
    return settings_of({k: v for k, v in config.items() if k not in ("log", "experiment", "diagnose")}, {}, overrides)


def plan(prompts: int, members: int = 2, *overrides: str, texts: int = 0, free: int = PLENTY, threads: int = 1):
    one = settings("method=window", "kv_ratio=0.5", *overrides)
    runs = [RunWork(one.baseline(), prompts, {})]
    runs += [RunWork(one, prompts, {"own": texts} if texts else {}) for _ in range(members - 1)]
    return GroupPlan(runs, SHAPE, prompts, 100, 10, shared=True, free=free, threads=threads)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("members", [2, 13, 21, 40, 70])
@pytest.mark.parametrize("batches", [1, 2, 3, 4, 6, 7, 30])
def test_batches_are_grouped_as_the_sweep_groups_them(batches, members, threads):
    made = plan(batches, members, threads=threads)
    here = made.arrangement()
    like = [SimpleNamespace(settings=made.lead)] * members
    assert here.groups == len(prefill_groups.decode_groups([[]] * batches, like, here.processes))
    rounds = -(-batches // threads)
    several = threads > 1 and rounds * threads <= prefill_groups.MIN_UTILISATION * batches and sys.platform == "linux"
    assert here.processes == (threads if several else 1) and here.parts == 1


def test_a_limit_of_time_takes_batches_alone():
    here = plan(6, 2, "timeout_s=60", threads=3).arrangement()
    assert (here.processes, here.groups) == (1, 6)


def test_short_memory_splits_groups_then_runs():
    plenty = plan(4, 5)
    need = plenty.held().bytes + 100 * plenty.held().token
    assert plenty.arrangement().groups == 1

    def with_room(batches: float):
        free = int(batches * need / limits.SHARE) + 4 * SHAPE.linear  # the packed copy besides
        return dataclasses.replace(plenty, free=free).arrangement()

    assert with_room(1.2).groups == 4 and with_room(1.2).parts == 1
    assert with_room(0.5).parts > 1


def test_texts_are_forced_beside_the_full_cache_on_copies():
    without, made = plan(4, 3), plan(4, 3, texts=4)
    assert made.kinds == ["own"] and made.held().copies == 2 and without.held().copies == 1
    assert made.peak().caches > without.peak().caches > 0
    # 4 prefills; 12 rows of answers and 12 of texts (two variants and the full cache on four prompts), 10 steps each.
    assert made.seconds(KEPT) == pytest.approx(4 + 10 * 1.2 + 10 * 1.2)
    assert without.seconds(KEPT) == pytest.approx(4 + 10 * 1.2)


def test_a_full_cache_that_is_done_stands_beside_its_texts():
    made = plan(4, 3, texts=4)
    rest = [dataclasses.replace(run, answers=0) for run in made.runs]
    only = dataclasses.replace(made, runs=rest)
    assert len(only.active) == 2 and len(only.held().slots) == 3 and only.held().copies == 1
    assert only.seconds(KEPT) == pytest.approx(4 + 10 * 1.2)


def test_a_run_alone_reads_its_prompts_again_for_its_texts():
    one = settings("method=window", "kv_ratio=0.5", "batch_size=2")
    made = GroupPlan([RunWork(one, 4, {"own": 4})], SHAPE, 8, 100, 10, shared=False, free=PLENTY, threads=1)
    # Answers: 4 prefills, two batches of two rows. Texts: 4 more, eight rows in the same steps.
    assert made.seconds(KEPT) == pytest.approx(4 + 2 * 10 * 0.2 + 4 + 10 * 0.8)
    answers = dataclasses.replace(made, runs=[RunWork(one, 4, {})], prompts=4)
    assert answers.seconds(KEPT) == pytest.approx(4 + 2 * 10 * 0.2)
    assert dataclasses.replace(made, runs=[RunWork(one, 0, {})], prompts=0).peak().caches == 0


def test_the_peak_is_of_all_processes():
    # Two processes with two prompts each hold what one holds that decodes all four in the same steps.
    two, one = plan(4, 3, threads=2), plan(4, 3, threads=1)
    assert two.arrangement().processes == 2 and one.arrangement().groups == 1
    assert two.peak(base=7).caches == one.peak().caches > 0
    peak = two.peak(base=7)
    assert (peak.base, peak.weights, peak.packed) == (7, 4000, 3200)
    assert peak.total == peak.base + peak.weights + peak.packed + peak.caches + peak.working
    assert plan(4, 3, "model.pack_linear=false").peak().packed == 0


def test_the_check_says_by_how_much_a_plan_was_off():
    sample = {"wall_s": 50.0, "peak_bytes": 2_000_000_000, "planned": {"seconds": 40.0, "bytes": 2_400_000_000}}
    unknown = {**sample, "planned": {"seconds": None, "bytes": 2_000_000_000}}
    rows = [{"variant": "a", "samples": [sample]}, {"variant": "b", "samples": [unknown]}]
    seconds, memory, not_known, right = dry_run_check.lines({"key": {"tiny": False}, "rows": rows})
    assert seconds.ratio.value == pytest.approx(0.2) and seconds.cells()[7] == "met"
    assert memory.ratio.value == pytest.approx(0.2) and memory.cells()[7] == "MISSED"
    assert memory.note == "2.4e+03 planned, 2e+03 taken"
    assert not_known.ratio is None and not_known.note == "not known beforehand"
    assert right.ratio.value == 0


def test_the_memory_of_a_command_is_that_of_all_its_processes():
    from benchmarks.processes import watched

    hold = "import time; x = bytearray(60 << 20); time.sleep(1.5)"
    forked = f"import os, time; pid = os.fork(); {hold}; pid and os.wait()"
    one, two = (watched(["-c", code])["peak_bytes"] for code in (hold, forked))
    assert 60 << 20 < one < 100 << 20 and 120 << 20 < two < 200 << 20
    with pytest.raises(RuntimeError, match="ended with 1"):
        watched(["-c", "x = bytearray(1 << 30)"], limit=1 << 29)
