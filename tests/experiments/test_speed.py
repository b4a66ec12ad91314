"""How a sweep takes time and memory by measured speeds: the model of cost on planted speeds, the arrangement of prompts
that the sweep itself would make, and the kept file."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import run_py
from commands import settings as composed_settings
from small import small
from tiny import tiny

from experiments.studies import speed as study
from experiments.studies.speed import (
    GroupPlan,
    GroupWork,
    KeptSpeed,
    Speed,
    observation_coefficients,
    observes_prompt,
    prefill_coefficients,
    work_seconds,
)
from kvexp.core import AttentionScoreSpec
from kvexp.hf.load import ModelSize
from kvexp.methods import A2SF, H2O, TOVA, Keyformer, Window
from kvexp.run import batches as prefill_groups
from kvexp.run import rows as limits
from kvexp.run.model_spec import ModelSpec
from kvexp.run.plan import Planned, Workload
from kvexp.run.rows import environment
from kvexp.util import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["model=tiny", "task=sample", "task.nll=false", "task.max_new_tokens=10", "generation.eos=null"]
SHAPE = ModelSize(1000, 800, 50, layers=2, width=8, kv_heads=2, head_dim=4, positions=4096)
SHAPE_OF_BITS = dataclasses.replace(SHAPE, head_dim=32)
PLENTY = 1 << 40
# A prefill takes a second a prompt, a step nothing but a tenth of a second for each of its rows.
SPEED = Speed(1, 1, (1.0, 0.0, 0.0), 0.0, 0.0, ((1.0, 0.1), (101.0, 10.1)), 0.0, 0.0)
KEPT = KeptSpeed((SPEED,), "2026-11-22")


@functools.cache
def settings(*overrides: str):
    return composed_settings(*SMALL, *overrides, typed=overrides)


def lacking(settings, rows: int, texts: dict[str, int]) -> Planned:
    """A run that lacks so many rows and texts."""
    return Planned(settings, Workload((), 0, 0, ""), rows, texts)


def plan(prompts: int, members: int = 2, *overrides: str, texts: int = 0, free: int = PLENTY, threads: int = 1):
    one = settings("method=window", "kv_ratio=0.5", *overrides)
    runs = [lacking(one.baseline(), prompts, {})]
    runs += [lacking(one, prompts, {"own": texts} if texts else {}) for _ in range(members - 1)]
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
    need = sum(plenty.held()) + 100 * SHAPE.token_bytes("float32")
    assert plenty.arrangement().groups == 1

    def with_room(batches: float):
        free = int(batches * need / limits.SHARE) + 4 * SHAPE.linear  # the packed copy besides
        return dataclasses.replace(plenty, free=free).arrangement()

    assert with_room(1.2).groups == 4 and with_room(1.2).parts == 1
    assert with_room(0.5).parts > 1


def test_texts_are_forced_beside_the_full_cache_on_copies():
    without, made = plan(4, 3), plan(4, 3, texts=4)
    assert made.kinds == ["own"] and made.copies == 2 and without.copies == 1
    # 4 prefills; 12 rows of answers and 12 of texts (two variants and the full cache on four prompts), 10 steps each.
    assert made.seconds(KEPT) == pytest.approx(4 + 10 * 1.2 + 10 * 1.2)
    assert without.seconds(KEPT) == pytest.approx(4 + 10 * 1.2)


def test_a_full_cache_that_is_done_stands_beside_its_texts():
    made = plan(4, 3, texts=4)
    rest = [dataclasses.replace(run, left=0) for run in made.runs]
    only = dataclasses.replace(made, runs=rest)
    assert len(only.active) == 2 and len(only.held()) == 3 and only.copies == 1
    assert only.seconds(KEPT) == pytest.approx(4 + 10 * 1.2)


def test_a_run_alone_reads_its_prompts_again_for_its_texts():
    one = settings("method=window", "kv_ratio=0.5", "batch_size=2")
    made = GroupPlan([lacking(one, 4, {"own": 4})], SHAPE, 8, 100, 10, shared=False, free=PLENTY, threads=1)
    # Answers: 4 prefills, two batches of two rows. Texts: 4 more, eight rows in the same steps.
    assert made.seconds(KEPT) == pytest.approx(4 + 2 * 10 * 0.2 + 4 + 10 * 0.8)
    answers = dataclasses.replace(made, runs=[lacking(one, 4, {})], prompts=4)
    assert answers.seconds(KEPT) == pytest.approx(4 + 2 * 10 * 0.2)


BENT = Speed(
    processes=1,
    threads=1,
    prefill_s=(0.5, 1e-2, 1e-4),
    score_s=1e-5,
    variant_s=1e-3,
    step_s=((1.0, 1.0), (8.0, 8.0), (40.0, 24.0)),
    slot_s=1e-3,
    forced_s=0.25,
)
BENT_KEPT = KeptSpeed((BENT,), date="2026-11-22")
WORK = GroupWork(
    prompts=4, prompt=100.0, new=10.0, scores=2, variants=8, answers=36, texts=0, slots=50.0, text_slots=0.0, groups=4
)


def test_a_step_lies_on_lines_between_the_measured_rows():
    assert BENT.step(1, 0) == BENT.step(0.5, 0) == 1
    assert BENT.step(4.5, 0) == 4.5 and BENT.step(24, 0) == 16
    assert BENT.step(72, 0) == 40, "beyond the largest along the last line"
    assert BENT.step(8, 1000) == 9
    assert dataclasses.replace(BENT, step_s=((1.0, 1.0),)).step(9, 0) == 1


def test_a_prefill_pays_for_length_scores_and_variants():
    assert BENT.prefill(100, 0, 0) == pytest.approx(0.5 + 1 + 1)
    assert BENT.prefill(100, 2, 8) == pytest.approx(0.5 + 1 + 0.8 + 1.2)


@pytest.mark.parametrize("true", [(0.5, 1e-2, 1e-4), (0.0, 2e-3, 0.0), (0.1, 0.0, 3e-5)])
def test_the_coefficients_of_a_prefill_are_found_again(true):
    each, linear, square = true
    points = [(0, each), *((n, each + linear * n + square * n * n) for n in (256, 1024))]
    assert prefill_coefficients(points) == pytest.approx(true, abs=1e-9)


def test_coefficients_of_noisy_prefills_are_never_negative():
    bent = prefill_coefficients([(8, 0.1), (100, 1.1), (200, 1.5)])
    assert bent == pytest.approx((0.1, 1.4 / 200, 0.0))
    steep = prefill_coefficients([(8, 0.1), (100, 0.2), (200, 10.1)])
    assert steep == pytest.approx((0.1, 0.0, 10 / 200**2))
    assert min(observation_coefficients(2, (1000, 0.0), 40, (250, 0.0))) == 0


def test_what_scores_and_variants_cost_is_found_again():
    score, variant = 2e-7, 3e-4

    def more(scores: int, variants: int, n: int) -> float:
        return scores * score * n * n + variants * variant * n

    found = observation_coefficients(2, (1024, more(2, 2, 1024)), 40, (256, more(2, 40, 256)))
    assert found == pytest.approx((score, variant))


def test_scores_of_few_rows_cost_nothing():
    observing = [
        method for method in (H2O(), Keyformer(), A2SF(), TOVA(), Window()) if observes_prompt(method.score_spec)
    ]
    assert [method.name for method in observing] == ["h2o", "keyformer"]
    assert observes_prompt(AttentionScoreSpec()) and not observes_prompt(AttentionScoreSpec(last_rows=1))


def test_a_group_costs_its_prefills_steps_and_texts():
    prefills = 4 * BENT.prefill(100, 2, 8)
    apart = 4 * 10 * BENT.step(9, 9 * 50)
    assert work_seconds(BENT, WORK) == pytest.approx(prefills + apart)
    together = dataclasses.replace(WORK, groups=1)
    assert work_seconds(BENT, together) == pytest.approx(prefills + 10 * BENT.step(36, 36 * 50))
    texts = dataclasses.replace(WORK, texts=36, text_slots=20.0)
    more = 4 * 10 * (BENT.step(9, 9 * 20) + 9 * 0.25)
    assert work_seconds(BENT, texts) == pytest.approx(prefills + apart + more)
    two = dataclasses.replace(BENT, processes=2)
    assert work_seconds(two, WORK) == pytest.approx((prefills + apart) / 2)
    three = dataclasses.replace(BENT, processes=3)
    assert work_seconds(three, WORK) == pytest.approx((prefills + apart) / 2), "one of three takes two of the groups"
    assert work_seconds(BENT, dataclasses.replace(WORK, prompts=0)) == 0
    repeated = dataclasses.replace(WORK, second_passes=2)
    again = 4 * 2 * (BENT.prefill(200, 0, 0) - BENT.prefill(100, 0, 0))
    assert work_seconds(BENT, repeated) == pytest.approx(prefills + apart + again)


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))
    return ModelSpec.of({"kind": "random", "family": "llama", "config": {"num_hidden_layers": 2}})


def test_a_kept_speed_is_read_as_it_was_measured(spec):
    key = study.surroundings(spec, "cpu")
    assert study.kept(key) is None
    path = study.keep(key, BENT_KEPT)
    assert study.kept(key) == BENT_KEPT and [path] == list(path.parent.iterdir())
    two = dataclasses.replace(BENT, processes=2)
    both = KeptSpeed((two, BENT), "2026-11-22")
    assert both.of(2) == two and both.of(1) == BENT and both.of(9) == two


@pytest.mark.parametrize("name", ["model", "device", "processor", "threads", "torch", "numerics", "format"])
def test_a_speed_of_other_surroundings_is_not_used(spec, name):
    key = study.surroundings(spec, "cpu")
    study.keep({**key, name: "another"}, BENT_KEPT)
    study.keep(study.surroundings(dataclasses.replace(spec, dtype="bfloat16"), "cpu"), BENT_KEPT)
    assert study.kept(key) is None


def _without_speeds(text: str) -> str:
    plain = json.loads(text)
    plain["measured"]["speeds"] = []
    return json.dumps(plain)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"slot_s": 0.001', '"slot_s": -1'),
        lambda text: text.replace('"slot_s": 0.001', '"slot_s": NaN'),
        lambda text: text.replace('"slot_s"', '"other"'),
        lambda text: text.replace('"llama"', '"opt"'),
        _without_speeds,
    ],
)
def test_a_damaged_file_is_told(spec, damage):
    key = study.surroundings(spec, "cpu")
    path = study.keep(key, BENT_KEPT)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    with pytest.raises(ConfigError, match=r"does not hold measured speeds .*`measure` makes them again"):
        study.kept(key)


def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch, spec):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"cannot write .*KVEXP_CACHE"):
        study.keep(study.surroundings(spec, "cpu"), BENT_KEPT)


def test_a_plan_goes_by_what_was_measured_here(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))
    asked = []

    def measured(spec):
        asked.append(spec)
        return BENT_KEPT

    def study_of(*words):
        return study.main([*words]), *capsys.readouterr()

    monkeypatch.setattr(study, "measure", measured)
    few = small("limit=4", "task.max_new_tokens=5", "task.nll=false", "batch_size=2")
    sweep = ("-m", "method=h2o,window", "kv_ratio=0.3,0.5", "divergence=false", *few, f"outputs_dir={tmp_path / 'out'}")
    code, before, err = study_of("plan", *sweep)
    assert code == 0 and "estimated for" in before and not asked
    code, out, err = study_of("measure", *sweep)
    assert code == 0 and err == "", err
    assert len(asked) == 1 and "time: measured here on 2026-11-22" in out
    assert not (tmp_path / "out").exists()
    assert study_of("plan", *sweep)[1] == out, "kept, and used from then on"
    assert "estimated for" in run_py(monkeypatch, capsys, "--dry-run", *sweep)[1]
    (file,) = (tmp_path / "cache" / "speeds").iterdir()
    file.write_text(file.read_text()[:40])
    code, out, err = study_of("plan", *sweep)
    assert code == 1 and "does not hold measured speeds" in err and "Traceback" not in err
    assert study_of("--help")[0] == 0 and study_of("method=h2o")[0] == 2


def test_a_measurement_has_all_its_parts(monkeypatch):
    model = tiny("llama")
    spec = ModelSpec.of({"kind": "random", "family": "llama"})
    monkeypatch.setattr(study, "load", lambda _: (model, None))
    monkeypatch.setattr(study, "num_workers", lambda _: 1)
    monkeypatch.setattr(study, "SECONDS", 0.01)  # the shortest lengths
    made = study.measure(spec)
    (speed,) = made.speeds
    assert [rows for rows, _ in speed.step_s] == list(study.ROWS)
    assert study.kept_of(json.loads(json.dumps(dataclasses.asdict(made)))) == made
    assert environment()["threads"] == speed.threads


def test_fewer_bits_are_fewer_bytes_too():
    def held(*words):
        one = settings("method=h2o", "kv_ratio=0.5", "cache.group=16", *words)
        made = GroupPlan([lacking(one, 1, {})], SHAPE_OF_BITS, 1, 800, 40, shared=False, free=PLENTY, threads=1)
        return sum(made.held())

    assert held("cache.bits=4") < 0.5 * held()
