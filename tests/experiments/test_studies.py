"""Studies that no sweep needs: bits or tokens, the yardstick, the testbed's export."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path

import gguf_files
import pytest
import yaml
from commands import composed
from hydra.core.override_parser.overrides_parser import OverridesParser
from test_results import noisy, write
from tiny import stock

import kvexp.run.batches as runner
from experiments.studies import testbed as command
from experiments.studies import yardstick as study
from experiments.studies.testbed import export_tasks as export
from experiments.studies.yardstick import FullCacheScore, PublishedNumber, mean_score, published, verdict
from kvexp import NUMERICS
from kvexp.hf.load import byte_tokenizer
from kvexp.results.table import notes, table
from kvexp.run.model_spec import load
from kvexp.run.settings import settings_of
from kvexp.run.store import Run, check_of, keep_check, runs
from kvexp.tasks import TestbedChoice, TestbedQA
from kvexp.util.errors import ConfigError

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
    numbers.write_text(yaml.safe_dump({"tiny_random": {**texts, "numbers": each, "notes": ["another harness: 49"]}}))
    monkeypatch.setattr(study, "FILE", numbers)

    def called(*words):
        own = [f"outputs_dir={tmp_path / 'out'}", "model=local", f"model.path={folder}", f"task.data_dir={ROWS}"]
        monkeypatch.setattr(sys, "argv", ["yardstick"])
        capsys.readouterr()
        code = study.main(["--numbers", "tiny_random", *own, *words])
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


def test_lm_evals_own_model_of_a_gguf_file_is_its_conversion(yardstick, tmp_path):
    tokenizer = gguf_files.bpe_tokenizer()
    model = gguf_files.small_model("llama", tokenizer)
    file = gguf_files.write(tmp_path / "small.gguf", model, tokenizer, kind="Q4_1")
    code, out, err = yardstick(f"model.path={file}", "--check-lm-eval", "1", "limit=2")
    assert code in (0, 1) and out.count("agree") == 2 and "DISAGREE" not in out, err


def test_disagreement_with_lm_eval_fails(yardstick, monkeypatch):
    true = study.stock_model

    def other(settings):
        lm = true(settings)
        said = lm.loglikelihood
        lm.loglikelihood = lambda *given, **named: [
            (a - 0.002 * (i == 1), b) for i, (a, b) in enumerate(said(*given, **named))
        ]
        return lm

    monkeypatch.setattr(study, "stock_model", other)
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
    assert study.main(["--numbers", "tiny_random", "model=tiny", f"task.data_dir={ROWS}"]) == 2
    assert "model=tiny has random weights: there is nothing to compare them with" in capsys.readouterr().err


# The testbed through lm-eval's, LongBench's and needle's own code: high scores where nothing is evicted, and ours.


SIZE = 6
OWN = (f"task.size={SIZE}", "task.marked=4")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return export(tmp_path_factory.mktemp("testbed"), size=SIZE)


def settings(folder, *overrides):
    words = [*overrides, "model=testbed_rope", f"outputs_dir={folder}", "method=h2o", "kv_ratio=0.3"]
    return settings_of(*composed(*words))


def both(folder, *overrides):
    """Rows of full attention and of h2o at 0.3."""
    (asked,) = settings(folder, *overrides).parts()
    runner.evaluate_run(asked)
    return [runner.evaluate_run(each).rows() for each in (asked.baseline(), asked)]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def mean(rows, metric):
    return sum(row["metrics"][metric] for row in rows) / len(rows)


def test_lm_eval_and_our_own_choice_agree(tmp_path, written):
    """Item by item, choice by choice, with full attention and under eviction."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; it comes with kvexp[eval]")
    theirs, ours = both(tmp_path, *written["lm_eval"]), both(tmp_path, "task=testbed_choice", *OWN)
    for one, other in zip(theirs, ours, strict=True):
        assert len(one) == len(other) == SIZE
        for row, own in zip(one, other, strict=True):
            assert row["prompt_tokens"] == own["prompt_tokens"] and row["reference"] == own["reference"]
            assert row["choices"]["tokens"] == own["choices"]["tokens"]
            assert row["choices"]["logprobs"] == pytest.approx(own["choices"]["logprobs"], abs=1e-4)
            assert row["metrics"]["acc"] == own["metrics"]["acc"]
    full, evicted = theirs
    assert [row["receipt"]["slots"] for row in evicted] == [row["receipt"]["slots"] for row in ours[1]]
    assert mean(full, "acc") >= 90 > mean(evicted, "acc")


def test_lm_evals_own_model_agrees(tmp_path, written):
    """The third judge: lm-eval's HFLM, which knows nothing of kvexp, on the same weights."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed; it comes with kvexp[eval]")
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    (asked,) = settings(tmp_path, *written["lm_eval"], "limit=4").parts()
    items = list(asked.task.examples())
    hf = HFLM(AutoModelForCausalLM.from_pretrained(asked.model.path), tokenizer=load(asked.model)[1], batch_size=2)
    found = hf.loglikelihood([instance for item in items for instance in item.instances], disable_tqdm=True)
    full = runner.evaluate_run(asked.baseline()).rows()
    logprobs = [value for row in full for value in row["choices"]["logprobs"]]
    assert [value for value, _ in found] == pytest.approx(logprobs, abs=1e-4)


def test_longbenchs_code_on_the_questions(tmp_path, written):
    """Its prompt in front, its metric; the answers are those that our own task gets where nothing is evicted."""
    full, evicted = both(tmp_path, *written["longbench"])
    ours, _ = both(tmp_path, "task=testbed_qa", *OWN)
    assert [row["reference"] for row in full] == [row["reference"] for row in ours]
    assert mean(full, "score") >= 85 and mean(ours, "f1") >= 85
    assert mean(evicted, "score") < mean(full, "score")
    assert full[0]["prompt_tokens"] > ours[0]["prompt_tokens"]  # the official instruction


def test_needles_code_on_the_codes(tmp_path, written):
    full, evicted = both(tmp_path, *written["needle"], "task.lengths=[200]", "task.depths=[0,30]")
    assert len(full) == 6 and all(199 <= row["prompt_tokens"] <= 200 for row in full)
    assert mean(full, "exact") == 100 > mean(evicted, "exact")


def test_the_files_hold_what_the_tasks_ask(tmp_path):
    export(tmp_path, size=5, split="validation", seed=3)
    options = {"size": 5, "split": "validation", "seed": 3, "marked": 4}
    rows = read(tmp_path / "lm_eval" / "testbed_choice.test.jsonl")
    for row, example in zip(rows, TestbedChoice(**options).examples(), strict=True):
        assert row["prompt"] == example.prompt and row["choices"][row["answer"]] == example.reference
        assert tuple(f" {choice}" for choice in row["choices"]) == example.choices
    rows = read(tmp_path / "longbench" / "triviaqa.jsonl")
    for row, example in zip(rows, TestbedQA(**options).examples(), strict=True):
        assert f"{row['context']} {row['input']}" == example.prompt and row["answers"] == [example.reference]
    words = " ".join(path.read_text() for path in sorted((tmp_path / "haystack").iterdir())).split()
    assert "code" not in words and len(words) > 1000


def test_the_command_prints_commands_that_hydra_reads(tmp_path, capsys):
    command.main(["export", str(tmp_path / "a folder, with 'marks'"), "--size", "3"])
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [["kvexp", "run"]] * 3
    for line in lines:
        values = {each.key_or_group: each.value() for each in OverridesParser.create().parse_overrides(line[2:])}
        place = {"lm_eval": "task.tasks", "longbench": "task.data_files", "needle": "task.haystack"}[values["task"]]
        assert "a folder, with 'marks'" in str(values[place])
        settings_of(*composed(*line[2:])).task.check()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        export(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"task\.size must be at least 1, got 0"):
        export(tmp_path, size=0)
