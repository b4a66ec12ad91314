"""The yardstick: a full cache beside published numbers, beside lm-eval's own model, and what tables say of it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import yaml
from test_results import noisy, write
from tiny import stock

from experiments.studies import yardstick as hflm_agreement
from experiments.studies import yardstick as published_numbers
from experiments.studies.yardstick import FullCacheScore, PublishedNumber, main, mean_score, published, verdict
from kvexp import NUMERICS
from kvexp.hf.load import byte_tokenizer
from kvexp.results.table import notes, table
from kvexp.run.store import Run, check_of, keep_check, runs
from kvexp.util import ConfigError

ROWS = Path(__file__).parents[1] / "fixtures" / "lm_eval"
PIQA = PublishedNumber("piqa", "acc_norm", 60.0)


# ---- numbers and verdicts, by hand


def test_the_published_numbers_of_smollm2_have_a_source():
    known = published("smollm2_135m")
    assert {(one.task, one.metric): one.number for one in known.numbers} == {
        ("piqa", "acc_norm"): 66.92,
        ("arc_easy", "acc"): 54.12,
        ("arc_challenge", "acc_norm"): 27.73,
    }
    assert "0-shot" in known.protocol and "SLERP" in known.source and "Q4_1" in known.weights


def test_a_model_without_numbers_is_told_so():
    with pytest.raises(ConfigError, match="no published number is known for model=tiny; there are numbers for smollm2"):
        published("tiny")


def rows(*scores, metric="acc_norm"):
    return [{"metrics": {metric: score}, "skipped": None} for score in scores]


def test_a_mean_and_its_standard_error():
    made = mean_score(rows(*[100.0] * 60, *[0.0] * 40), 400, PIQA)
    assert (made.n, made.items, made.score) == (100, 400, 60.0)
    assert made.stderr == pytest.approx(100 * math.sqrt(0.6 * 0.4 / 99))  # lm-eval's own, of the sample
    assert made.inside and made.distance == 0


@pytest.mark.parametrize(("right", "inside"), [(69, True), (70, False), (49, False), (50, True)])
def test_inside_is_within_two_standard_errors(right, inside):
    made = mean_score(rows(*[100.0] * right, *[0.0] * (100 - right)), 100, PIQA)
    bound = 2 * 100 * math.sqrt(right * (100 - right) / 99e4)
    assert made.inside is inside is (abs(right - 60) <= bound)


def test_items_without_a_score_are_no_mean():
    with pytest.raises(ConfigError, match="1 items are too few"):
        mean_score(rows(100.0), 9, PIQA)
    lost = [*rows(100.0, 0.0), {"metrics": {}, "skipped": "too long"}]
    with pytest.raises(ConfigError, match=r"1 of 3 items have no acc_norm \(too long\)"):
        mean_score(lost, 9, PIQA)


def one(task, score, published_number, n=100, items=100):
    return FullCacheScore(task, "acc", n, items, score, 1.0, published_number)


def test_the_verdict_names_what_is_off_farthest_first():
    assert verdict([one("piqa", 60, 61), one("arc", 50, 49)]) == "checked"
    assert verdict([one("piqa", 60, 62.5), one("arc", 50, 45)]) == (
        "off by +5.0 points in arc (published 45), -2.5 points in piqa (published 62.5)"
    )
    assert verdict([one("piqa", 60, 61, n=20), one("arc", 50, 49)]) == "checked, on 120 of 200 items"


# ---- the file that tables read


def test_a_check_belongs_to_weights_and_numerics(tmp_path):
    model = {"path": "abc", "dtype": "float32", "chat": False, "device": "cpu"}
    assert check_of(tmp_path, model, NUMERICS) == "unchecked"
    file = keep_check(tmp_path, model, {"verdict": "checked", "numerics": NUMERICS})
    assert check_of(tmp_path, {**model, "chat": True, "device": "cuda"}, NUMERICS) == "checked"
    for other in ({**model, "path": "abd"}, {**model, "dtype": "bfloat16"}, "abc", None):
        assert check_of(tmp_path, other, NUMERICS) == "unchecked"
    assert check_of(tmp_path, model, NUMERICS + 1) == "unchecked"
    for damaged in ("", "[]", '{"numerics": 6}', '{"verdict": 3}'):
        file.write_text(damaged)
        assert check_of(tmp_path, model, NUMERICS) == "unchecked"


def test_tables_with_verdicts_carry_it(tmp_path):
    full = write(tmp_path, "full", noisy())
    write(tmp_path, "h2o", noisy(seed=3), full.hash)
    assert "baseline unchecked: full cache of tiny, against published numbers." in notes(table(tmp_path))
    assert not any("against published" in line for line in notes(table(tmp_path, {"method": "full"})))
    labels = {"model": "known", "task": "xsum", "method": "full"}
    known = {"model": {"path": "abc", "dtype": "float32"}, "method": "full"}
    base = Run.open(tmp_path, known, labels)
    for name, run in (
        ("full", base),
        ("tova", Run.open(tmp_path, {**known, "method": "tova"}, {**labels, "method": "tova"}, baseline=base.hash)),
    ):
        for row in full.rows():
            evicted = {"receipt": {**row["receipt"], "first_eviction_step": 0 if name == "tova" else None}}
            run.append({**row, **evicted})
        run.finish(100)
    keep_check(
        tmp_path, {**known["model"], "chat": True}, {"verdict": "off by -9.0 points in piqa", "numerics": NUMERICS}
    )
    frame = table(tmp_path)
    assert frame.set_index("hash").loc[base.hash, "baseline_check"] == "off by -9.0 points in piqa"
    found = [line for line in notes(frame) if "against published" in line]
    assert found == [
        "baseline off by -9.0 points in piqa: full cache of known, against published numbers.",
        "baseline unchecked: full cache of tiny, against published numbers.",
    ]


# ---- the command


@pytest.fixture
def yardstick(tmp_path, monkeypatch, capsys):
    """yardstick(*words) -> (exit code, stdout, stderr) on a tiny model of random weights with published numbers."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; it comes with kvexp[eval]")
    folder, numbers = tmp_path / "random", tmp_path / "published.yaml"
    stock("llama", vocab_size=259, bos_token_id=256, eos_token_id=257).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    each = {"piqa": {"metric": "acc_norm", "number": 50.0}, "arc_easy": {"metric": "acc", "number": 25.0}}
    texts = {"protocol": "0-shot", "weights": "these", "source": "this test"}
    numbers.write_text(yaml.safe_dump({"tiny_random": {**texts, "numbers": each, "beside": ["another harness: 49"]}}))
    monkeypatch.setattr(published_numbers, "FILE", numbers)

    def called(*words):
        own = [f"outputs_dir={tmp_path / 'out'}", "model=local", f"model.path={folder}", f"task.data_dir={ROWS}"]
        monkeypatch.setattr(sys, "argv", ["yardstick"])
        capsys.readouterr()
        code = main(["--numbers", "tiny_random", *own, *words])
        return (code, *capsys.readouterr())

    return called


def test_the_command_compares_and_agrees_with_lm_eval(yardstick, tmp_path):
    code, out, err = yardstick("--check-lm-eval", "2", "limit=3")
    assert "full cache of tiny_random: 0-shot" in out, err
    assert "lm-eval's HFLM, piqa: 4 log-likelihoods of 2 items differ by at most" in out
    assert out.count("agree") == 2 and "DISAGREE" not in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(("piqa", "arc_easy"))}
    assert lines["piqa"][1:3] == ["acc_norm", "3/4"] and lines["arc_easy"][1:3] == ["acc", "3/3"]
    made = {run.labels["task"]: run.rows() for run in runs(tmp_path / "out")}
    assert set(made) == {"piqa", "arc_easy"}
    for name, metric in (("piqa", "acc_norm"), ("arc_easy", "acc")):
        mean = sum(row["metrics"][metric] for row in made[name]) / 3
        assert float(lines[name][3]) == pytest.approx(mean, abs=0.01)
    inside = [line[-1] == "inside" for line in lines.values()]
    assert code == (0 if all(inside) else 1)
    assert ("baseline checked, on 6 of 7 items" in out) is all(inside)
    (file,) = (tmp_path / "out" / ".yardstick").glob("*.json")
    kept = json.loads(file.read_text())
    assert kept["verdict"] in out and [score["n"] for score in kept["scores"]] == [3, 3]
    assert set(table(tmp_path / "out")["baseline_check"]) == {kept["verdict"]}
    again = yardstick("limit=2")[1]
    assert "3 of 2" in again or "2/4" in again  # rows that are there are not made again
    assert all(len(run.rows()) == 3 for run in runs(tmp_path / "out"))


def test_disagreement_with_lm_eval_fails(yardstick, monkeypatch):
    true = hflm_agreement.stock_model

    def other(settings):
        lm = true(settings)
        said = lm.loglikelihood
        lm.loglikelihood = lambda *given, **named: [
            (a - 0.002 * (i == 1), b) for i, (a, b) in enumerate(said(*given, **named))
        ]
        return lm

    monkeypatch.setattr("experiments.studies.yardstick.stock_model", other)
    code, out, _ = yardstick("--check-lm-eval", "1", "limit=2")
    assert code == 1 and "differ by at most 2.0e-03 nats (allowed: 0.001): DISAGREE" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["method=h2o"], "method=h2o: the yardstick sets task, method and protocol itself; it takes model, limit"),
        (["task.num_fewshot=5"], "task.num_fewshot=5: the yardstick sets task, method and protocol itself"),
        (["limit=0"], "limit must be at least 1 or null, got 0"),
        (["--check-lm-eval", "0"], "--check-lm-eval must be at least 1 item, got 0"),
        (["--numbers", "nobody"], "no published number is known for model=nobody"),
        (["model.dtype=float8"], "dtype"),
    ],
)
def test_mistakes_are_one_line(yardstick, words, told):
    code, _, err = yardstick(*words)
    assert code == 2 and told in err and err.count("\n") == 1, err


def test_random_weights_have_no_yardstick(yardstick, monkeypatch, capsys):
    assert main(["--numbers", "tiny_random", "model=tiny", f"task.data_dir={ROWS}"]) == 2
    assert "model=tiny has random weights: there is nothing to compare them with" in capsys.readouterr().err
