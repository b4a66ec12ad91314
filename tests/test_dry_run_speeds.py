"""--dry-run by measured speeds: the model of cost on planted speeds, the kept file, and the plan's peak of memory."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from commands import run_py
from small import small
from tiny import tiny

from kvexp.config.model_spec import ModelSpec
from kvexp.core import AttentionScoreSpec
from kvexp.dry_run import speed_files
from kvexp.dry_run.cost import second_passes
from kvexp.dry_run.peak_memory import HeldCaches
from kvexp.dry_run.speed_files import KeptSpeed
from kvexp.dry_run.speed_model import (
    GroupWork,
    Speed,
    observation_coefficients,
    observes_prompt,
    prefill_coefficients,
    work_seconds,
)
from kvexp.errors import ConfigError
from kvexp.evaluate.rows import environment
from kvexp.methods import A2SF, H2O, TOVA, Keyformer, KVzip, KVzipPlus, Window

FEW = small("limit=4", "task.max_new_tokens=5", "task.nll=false", "batch_size=2")
SPEED = Speed(
    processes=1,
    threads=1,
    prefill_s=(0.5, 1e-2, 1e-4),
    score_s=1e-5,
    variant_s=1e-3,
    step_s=((1.0, 1.0), (8.0, 8.0), (40.0, 24.0)),
    slot_s=1e-3,
    forced_s=0.25,
)
KEPT = KeptSpeed((SPEED,), start_s=7.0, base_bytes=300 << 20, date="2026-11-22")
WORK = GroupWork(
    prompts=4, prompt=100.0, new=10.0, scores=2, variants=8, answers=36, texts=0, slots=50.0, text_slots=0.0, groups=4
)


def test_a_step_lies_on_lines_between_the_measured_rows():
    assert SPEED.step(1, 0) == SPEED.step(0.5, 0) == 1
    assert SPEED.step(4.5, 0) == 4.5 and SPEED.step(24, 0) == 16
    assert SPEED.step(72, 0) == 40, "beyond the largest along the last line"
    assert SPEED.step(8, 1000) == 9
    assert dataclasses.replace(SPEED, step_s=((1.0, 1.0),)).step(9, 0) == 1


def test_a_prefill_pays_for_length_scores_and_variants():
    assert SPEED.prefill(100, 0, 0) == pytest.approx(0.5 + 1 + 1)
    assert SPEED.prefill(100, 2, 8) == pytest.approx(0.5 + 1 + 0.8 + 1.2)


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
    prefills = 4 * SPEED.prefill(100, 2, 8)
    apart = 4 * 10 * SPEED.step(9, 9 * 50)
    assert work_seconds(SPEED, WORK) == pytest.approx(prefills + apart)
    together = dataclasses.replace(WORK, groups=1)
    assert work_seconds(SPEED, together) == pytest.approx(prefills + 10 * SPEED.step(36, 36 * 50))
    texts = dataclasses.replace(WORK, texts=36, text_slots=20.0)
    more = 4 * 10 * (SPEED.step(9, 9 * 20) + 9 * 0.25)
    assert work_seconds(SPEED, texts) == pytest.approx(prefills + apart + more)
    two = dataclasses.replace(SPEED, processes=2)
    assert work_seconds(two, WORK) == pytest.approx((prefills + apart) / 2)
    three = dataclasses.replace(SPEED, processes=3)
    assert work_seconds(three, WORK) == pytest.approx((prefills + apart) / 2), "one of three takes two of the groups"
    assert work_seconds(SPEED, dataclasses.replace(WORK, prompts=0)) == 0
    repeated = dataclasses.replace(WORK, second_passes=2)
    again = 4 * 2 * (SPEED.prefill(200, 0, 0) - SPEED.prefill(100, 0, 0))
    assert work_seconds(SPEED, repeated) == pytest.approx(prefills + apart + again)


def test_runs_that_declare_the_same_second_pass_share_it():
    methods = (KVzip(), KVzip(), KVzip(chunk=500), KVzipPlus(), H2O())
    runs = [SimpleNamespace(method=method) for method in methods]
    assert [second_passes(runs[:count]) for count in range(1, 6)] == [1, 1, 2, 3, 3]
    assert second_passes(runs[4:]) == 0


def test_the_peak_holds_copies_and_the_padding_of_stacks():
    def caches(slots, stacks, token):
        sizes = [token * each for each in slots]
        return HeldCaches(slots, sizes, stacks, kinds=0, answers=True, token=token, layers=4)

    held = caches([105, 50, 50], [False, True, True], 400)
    assert held.bytes == 205 * 400 and held.copies == 1 and held.stacked_bytes == 2 * 50 * 400
    assert held.peak(1) == (205 + 100) * 400 and held.peak(3) == 3 * held.peak(1)
    forced = dataclasses.replace(held, kinds=1)
    assert forced.copies == 2 and forced.peak(1) == (205 + 105 + 170) * 400, "what is stacked is shared until then"
    assert dataclasses.replace(forced, answers=False).peak(1) == held.peak(1)
    wide = caches([100, 60, 60], [True] * 3, 400)
    assert wide.stacked_bytes == 3 * 100 * 400, "as wide as the widest"
    alone = caches([10_000, 10], [True, True], 4_000_000)
    assert alone.stacked_bytes == 0, "too unlike to be put together"


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))
    return ModelSpec.of({"kind": "random", "family": "llama", "config": {"num_hidden_layers": 2}})


def test_a_kept_speed_is_read_as_it_was_measured(spec):
    key = speed_files.surroundings(spec, "cpu")
    assert speed_files.kept(key) is None
    path = speed_files.keep(key, KEPT)
    assert speed_files.kept(key) == KEPT and [path] == list(path.parent.iterdir())
    two = dataclasses.replace(SPEED, processes=2)
    both = KeptSpeed((two, SPEED), 7.0, 1, "2026-11-22")
    assert both.of(2) == two and both.of(1) == SPEED and both.of(9) == two


@pytest.mark.parametrize("name", ["model", "device", "processor", "threads", "torch", "numerics", "format"])
def test_a_speed_of_other_surroundings_is_not_used(spec, name):
    key = speed_files.surroundings(spec, "cpu")
    speed_files.keep({**key, name: "another"}, KEPT)
    assert speed_files.kept(key) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_speed_of_another_dtype_is_not_used(spec, dtype):
    speed_files.keep(speed_files.surroundings(dataclasses.replace(spec, dtype=dtype), "cpu"), KEPT)
    assert speed_files.kept(speed_files.surroundings(spec, "cpu")) is None


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
    key = speed_files.surroundings(spec, "cpu")
    path = speed_files.keep(key, KEPT)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    with pytest.raises(ConfigError, match=r"does not hold measured speeds .*--dry-run=measure measures them again"):
        speed_files.kept(key)


def test_a_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch, spec):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"cannot be kept .*KVEXP_CACHE"):
        speed_files.keep(speed_files.surroundings(spec, "cpu"), KEPT)


def test_a_plan_goes_by_what_was_measured_here(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))
    asked = []

    def measured(spec, started):
        assert started >= 0
        asked.append(spec)
        return KEPT

    monkeypatch.setattr("kvexp.dry_run.speed_measurement.measure", measured)
    sweep = ("-m", "method=h2o,window", "kv_ratio=0.3,0.5", "divergence=false", *FEW, f"outputs_dir={tmp_path / 'out'}")
    before = run_py(monkeypatch, capsys, "--dry-run", *sweep)[1]
    assert "estimated for" in before and "peak about" in before and not asked
    code, out, err = run_py(monkeypatch, capsys, "--dry-run=measure", *sweep)
    assert code == 0 and err == "", err
    assert len(asked) == 1 and "time: measured here on 2026-11-22" in out
    assert not (tmp_path / "out").exists()
    assert run_py(monkeypatch, capsys, "--dry-run", *sweep)[1] == out, "kept, and used from then on"
    assert "estimated for one A100" in run_py(monkeypatch, capsys, "--dry-run=a100", *sweep)[1]
    (file,) = (tmp_path / "cache" / "speeds").iterdir()
    file.write_text(file.read_text()[:40])
    code, out, err = run_py(monkeypatch, capsys, "--dry-run", *sweep)
    assert code == 1 and "does not hold measured speeds" in err and "Traceback" not in err


def test_a_measurement_has_all_its_parts(monkeypatch):
    from kvexp.dry_run import speed_measurement

    model = tiny("llama")
    spec = ModelSpec.of({"kind": "random", "family": "llama"})
    monkeypatch.setattr(speed_measurement, "load", lambda _: (model, None))
    monkeypatch.setattr(speed_measurement, "num_workers", lambda _: 1)
    monkeypatch.setattr(speed_measurement, "SECONDS", 0.01)  # the shortest lengths
    made = speed_measurement.measure(spec, started=3.0)
    (speed,) = made.speeds
    assert made.start_s >= 3 and [rows for rows, _ in speed.step_s] == list(speed_measurement.ROWS)
    assert speed_files.kept_of(json.loads(json.dumps(dataclasses.asdict(made)))) == made
    assert environment()["threads"] == speed.threads
