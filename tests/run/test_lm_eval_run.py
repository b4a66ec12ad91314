"""`run.py task=lm_eval`: rows of the runner with the numbers of `kvexp lm-eval`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import config_of, run_py
from commands import settings as composed_settings

from kvexp.run.batches import evaluate_run
from kvexp.run.model_spec import load
from kvexp.run.store import runs
from kvexp.util.errors import ConfigError

pytest.importorskip("lm_eval", reason="lm-eval is not installed; it comes with kvexp[eval]")

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "tests" / "fixtures" / "lm_eval"


def settings(outputs, *overrides, tasks="piqa"):
    """The runs of a command line, one per lm-eval task."""
    words = [f"task.tasks=[{tasks}]", f"task.data_dir={ROWS}", f"outputs_dir={outputs}", "task=lm_eval", *overrides]
    return composed_settings(*words, typed=words).parts()


def one(outputs, *overrides, **options):
    (part,) = settings(outputs, *overrides, **options)
    return evaluate_run(part)


def lm_of(part, **options):
    """kvexp as lm-eval's model, with the very model of a run."""
    from kvexp.run.lm_eval_model import KvexpLM

    model, tokenizer = load(part.model)
    return KvexpLM(model, tokenizer=tokenizer, **options)


def sums(lm, part):
    """Per item, the log-probabilities that lm-eval's model gives its requests."""
    items = list(part.task.examples())
    made = iter(lm.loglikelihood([instance for item in items for instance in item.instances]))
    return [[next(made) for _ in item.instances] for item in items]


def test_an_item_with_nothing_to_judge_is_a_skipped_row(tmp_path, monkeypatch):
    from kvexp.lm_eval import Encoder

    (part,) = settings(tmp_path, "method=full", "limit=2")
    first, pair = next(iter(part.task.examples())).requests[0].continuation, Encoder.pair
    empty = lambda self, context, words: pair(self, context, "" if words == first else words)  # noqa: E731
    monkeypatch.setattr(Encoder, "pair", empty)
    rows = evaluate_run(part).rows()
    assert rows[0]["skipped"].startswith("there is nothing to judge in ''") and not rows[1]["skipped"]


SAME = {
    "full": (["method=full"], {}),
    "h2o": (["method=h2o", "kv_ratio=0.2"], {"method": "h2o", "kv_ratio": 0.2}),
    "keyformer": (
        ["method=keyformer", "kv_ratio=0.3", "seed=7", "method.recent_ratio=0.2"],
        {"method": "keyformer", "kv_ratio": 0.3, "seed": 7, "method.recent_ratio": 0.2},
    ),
    "tokens": (
        ["method=window", "budget=tokens", "budget.tokens=6", "cache.evict_every=2"],
        {"method": "window", "budget.tokens": 6, "cache.evict_every": 2},
    ),
    "row mask": (
        ["method=keyformer", "kv_ratio=0.3", "task.protocol=keyformer"],
        {"method": "keyformer", "kv_ratio": 0.3, "protocol": "keyformer"},
    ),
    "global": (
        ["method=h2o", "kv_ratio=0.3", "task.protocol=h2o", "task.mask=global"],
        {"method": "h2o", "kv_ratio": 0.3, "protocol": "h2o", "mask": "global"},
    ),
    "a2sf": (
        ["method=a2sf", "kv_ratio=0.3", "task.protocol=a2sf", "task.padded_batch=3"],
        {"method": "a2sf", "kv_ratio": 0.3, "protocol": "a2sf", "padded_batch": 3},
    ),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] if c in ("full", "h2o", "tokens") else []) for c in SAME],
)
def test_rows_have_the_numbers_of_lm_evals_own_command(case, tmp_path):
    """Both ways over the same items; also with batches of rows in the one and not in the other."""
    overrides, options = SAME[case]
    limit = "limit=null" if case == "a2sf" else "limit=2"  # a batch of the release holds other items of the task
    for name in ("piqa", "winogrande"):
        (part,) = settings(tmp_path, *overrides, "batch_size=3", limit, tasks=name)
        record = evaluate_run(part)
        measured = sums(lm_of(part, **options), part)
        for row, results in zip(record.rows(), measured, strict=True):
            logprobs = row["choices"]["logprobs"]
            if options.get("protocol") in ("keyformer", "h2o"):
                logprobs = [p / n for p, n in zip(logprobs, row["choices"]["tokens"], strict=True)]
            assert logprobs == pytest.approx([p for p, _ in results], abs=1e-4)
        scores = [part.task.score_item(i, r) for i, r in zip(part.task.examples(), measured, strict=True)]
        assert [row["metrics"] for row in record.rows()] == scores


def test_lm_evals_evaluator_agrees_with_the_table(tmp_path):
    """The whole of lm-eval, its evaluator included, over kvexp as its model: the mean of the rows."""
    import lm_eval

    (part,) = settings(tmp_path, "method=h2o", "kv_ratio=0.3", "task.num_fewshot=1")
    rows = evaluate_run(part).rows()
    lm = lm_of(part, method="h2o", kv_ratio=0.3)
    task = part.task.definition
    task.set_fewshot_seed(1234)
    found = lm_eval.evaluate(lm, {"tasks": {"piqa": task}}, bootstrap_iters=0)["results"]["piqa"]
    for name in ("acc", "acc_norm"):
        assert 100 * found[f"{name},none"] == pytest.approx(sum(row["metrics"][name] for row in rows) / len(rows))


def test_padded_budgets_do_not_go_by_the_limit(tmp_path):
    words = ("method=window", "kv_ratio=0.3", "task.protocol=a2sf")
    few, all_ = one(tmp_path / "few", *words, "limit=1"), one(tmp_path / "all", *words)
    assert few.rows()[0]["choices"] == all_.rows()[0]["choices"]
    own = one(tmp_path / "own", *words, "task.budget_length=own")
    assert [row["choices"] for row in own.rows()] != [row["choices"] for row in all_.rows()]


def test_a_question_after_the_eviction(tmp_path):
    """The budget is of the examples alone, and no token of a choice is judged by the full prefill."""
    words = ("method=h2o", "kv_ratio=0.5", "task.num_fewshot=1", "limit=2")
    inside = one(tmp_path, *words)
    after = one(tmp_path, *words, "task.question=after_eviction")
    assert after.hash != inside.hash
    for row, other in zip(after.rows(), inside.rows(), strict=True):
        assert row["question_tokens"] > 0
        assert row["prompt_tokens"] + row["question_tokens"] == other["prompt_tokens"]
        assert row["receipt"]["slots"] == pytest.approx(0.5 * row["prompt_tokens"], abs=1.5)
        assert row["choices"]["logprobs"] != other["choices"]["logprobs"]
    baselines = {r.labels["setting"]: r.rows() for r in runs(tmp_path) if r.labels["method"] == "full"}
    one_, two = (
        [row["choices"]["logprobs"] for row in rows] for rows in baselines.values()
    )  # of a full cache the place of the question changes nothing
    for a, b in zip(one_, two, strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_texts_and_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    own = {name: ROWS / f"{name}.yaml" for name in ("own_texts", "own_answers", "own_words")}
    words = ("task.data_dir=null", "method=h2o", "kv_ratio=0.3")
    for name, path in own.items():
        (part,) = settings(tmp_path, *words, tasks=str(path))
        record = evaluate_run(part)
        assert record.labels["task"] == name
        lm = lm_of(part, method="h2o", kv_ratio=0.3)
        items = list(part.task.examples())
        instances = [item.instances[0] for item in items]
        for row, item in zip(record.rows(), items, strict=True):
            if name == "own_texts":
                (total,) = lm.loglikelihood_rolling([item.instances[0]])
                assert sum(row["choices"]["logprobs"]) == pytest.approx(total, abs=1e-3)
                assert row["metrics"]["word_nll"] == pytest.approx(-total / len(item.reference.split()), abs=1e-4)
            elif name == "own_words":
                ((logprob, _),) = lm.loglikelihood([item.instances[0]])
                assert row["metrics"]["nll"] == pytest.approx(-logprob, abs=1e-4)
        if name == "own_answers":
            assert [row["output"] for row in record.rows()] == lm.generate_until(instances)
            assert all(set(row["metrics"]) == {"exact_match"} for row in record.rows())
            assert all(0 < row["new_tokens"] <= 7 for row in record.rows())


def test_what_cannot_be_asked_is_a_row_that_says_why(tmp_path):
    short = ("model.config.max_position_embeddings=20",)
    rows = one(tmp_path, *short, "kv_ratio=0.5", "limit=2").rows()
    assert [row["skipped"] for row in rows] == ["too long", None], "' bury the jar in sand' has 21 tokens"
    assert rows[1]["prompt_cut"] is True
    assert rows[0]["metrics"] == {}
    with pytest.raises(ConfigError, match="none of the 2 examples can be run: too long"):
        one(tmp_path, *short, "kv_ratio=0.5", "limit=2", "task.truncate=skip")
    with pytest.raises(ConfigError, match="none of the 2 examples can be run: the budget of layer 0 is 0 slots"):
        one(tmp_path, "kv_ratio=0.02", "limit=2")


PAPERS = {
    "a2sf": ({"protocol": "a2sf", "num_fewshot": 0}, 0.2),
    "h2o": ({"protocol": "h2o", "num_fewshot": 5}, 0.2),
    "keyformer": ({"protocol": "keyformer", "num_fewshot": 0}, 0.5),
}


@pytest.mark.parametrize("paper", PAPERS)
def test_a_papers_preset(paper, tmp_path):
    expected, ratio = PAPERS[paper]
    (part,) = settings(
        tmp_path, f"protocol={paper}", f"method={paper}", "task.num_fewshot=1" if paper == "h2o" else "seed=0"
    )
    assert part.budget.kv_ratio == ratio
    assert part.limit is None
    assert part.task.protocol == expected["protocol"]
    assert part.task.measured.mode == "row_mask"
    task = config_of("task=lm_eval", f"protocol={paper}").task
    assert {name: task[name] for name in expected} == expected
    evaluate_run(settings(tmp_path, f"protocol={paper}", f"method={paper}", "limit=1", "task.num_fewshot=1")[0])


BAD = {
    "generation=beam4": "generation.num_beams does not reach lm-eval's tasks",
    "generation.max_new_tokens=7": "generation.max_new_tokens does not reach lm-eval's tasks",
    "task.num_fewshot=9": "task.num_fewshot=9, but the split train of piqa holds 3 rows",
    "task.data_dir=/nowhere": "task.data_dir=/nowhere is no folder",
    "task.question=after_eviction": "without examples there is no context to evict",
    "task.protocol=row_mask budget.layers=cake": "takes kv_ratio (or tokens) and nothing else of a budget",
    "task.protocol=row_mask select.by=chunk": "masks by the method's own priorities: leave the group select alone",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_values_are_said_before_a_model_loads(case, tmp_path, monkeypatch):
    import kvexp.run.batches as module

    monkeypatch.setattr(module, "load", lambda spec: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError) as error:
        one(tmp_path, *case.split())
    assert BAD[case] in str(error.value)


def command(module, *arguments):
    env = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *module, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_both_command_lines_give_the_same_numbers(tmp_path, stories260k):
    """Slow: lm-eval's command line reads all its definitions."""
    names = ("piqa", "winogrande", "copa")
    run_py = command(
        *(["run.py"], "task=lm_eval", f"task.tasks=[{','.join(names)}]", f"task.data_dir={ROWS}", "task.num_fewshot=1"),
        *("model=local", f"model.path={stories260k}", "method=keyformer", "kv_ratio=0.5", f"outputs_dir={tmp_path}"),
    )
    assert run_py.returncode == 0, run_py.stderr
    means = {}
    for record in runs(tmp_path):
        if record.labels["method"] == "keyformer":
            rows = record.rows()
            means[record.labels["task"]] = sum(row["metrics"]["acc"] for row in rows) / len(rows)
    out = tmp_path / "lm_eval"
    theirs = command(
        *(["-m", "kvexp", "lm-eval"], "--model", "kvexp"),
        *("--model_args", f"pretrained={stories260k},method=keyformer,kv_ratio=0.5", "--tasks", ",".join(names)),
        *("--num_fewshot", "1", "--data_dir", str(ROWS), "--output_path", str(out)),
    )
    assert theirs.returncode == 0, theirs.stderr
    (path,) = out.rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    assert {name: 100 * results[name]["acc,none"] for name in names} == pytest.approx(means)


def test_a_benchmark_whose_prompts_are_too_short_leaves_the_others(tmp_path, monkeypatch, capsys):
    """copa's prompts have 24 tokens at most and cannot hold SnapKV's window in half of them; arc_easy's can."""
    words = ["task.tasks=[copa,arc_easy]", f"task.data_dir={ROWS}", "method=snapkv", "method.window=16", "kv_ratio=0.5"]
    words += ["task=lm_eval", "model=tiny", "limit=1", f"outputs_dir={tmp_path}"]
    code, _, err = run_py(monkeypatch, capsys, *words)
    assert code == 1 and "error: copa: budget of 12 slots cannot hold" in err, err
    assert {(each.labels["task"], each.labels["method"]) for each in runs(tmp_path) if each.finished} == {
        ("arc_easy", "full"),
        ("arc_easy", "snapkv"),
    }
