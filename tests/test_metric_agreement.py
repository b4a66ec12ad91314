"""Does KL order runs as the task's metric does: planted orders, a naive tau, and pairs that are decided both ways."""

import math

import numpy as np
import pytest
from scipy.stats import kendalltau

from kvexp.divergence import agreement as command
from kvexp.record import Run, divergence_lines
from kvexp.results.metric_agreement import agreement
from kvexp.results.read import folders

N = 40


def made(outputs, method, kl, score, task="xsum", **more):
    """A run whose examples have this mean KL and score, one per example."""
    labels = {"model": "tiny", "task": task, "method": method, "kv_ratio": 0.5}
    base = Run.open(outputs, {"method": "full", "task": task}, labels | {"method": "full"})
    run = Run.open(outputs, labels, labels, baseline=None if method == "full" else base.hash)
    row = {"seconds": {}, "new_tokens": 3, "finish_reason": "length", "skipped": None, **more}
    run.append(*(row | {"example": f"e{i}", "index": i, "metrics": {"rouge2": float(s)}} for i, s in enumerate(score)))
    if kl is not None:
        divergence_lines.append(run, [line(i, float(value)) for i, value in enumerate(kl)])
    return run.hash


def line(index, kl):
    found = {"example": f"e{index}", "index": index, "text": "own", "first_by_prefill": False, "tokens": [1, 2]}
    return found | {"kl": [kl, kl], "full_logprob": [-1.0] * 2, "logprob": [-1.5] * 2, "same_top1": [1, 1]}


def noisy(mean, seed, spread=0.05):
    return np.abs(mean + spread * np.random.default_rng(seed).standard_normal(N))


def only(frame):
    (row,) = frame.to_dict("records")
    return row


def test_one_order_is_tau_one_and_the_other_minus_one(tmp_path):
    made(tmp_path, "full", None, noisy(30, 0))
    for place, method in enumerate(("h2o", "keyformer", "window")):
        made(tmp_path, method, noisy(0.1 * (place + 1), place, 0.01), noisy(30 - 5 * place, 7 + place))
    row = only(agreement(folders(tmp_path), 0.05))
    assert (row["tau"], row["low"], row["high"]) == (1, 1, 1) and (row["n"], row["runs"]) == (N, 3)
    assert (row["pairs"], row["by_kl"], row["by_metric"], row["by_both"], row["contradicted"]) == (3, 3, 3, 3, [])
    assert (row["kl_0.25"], row["kl_1"]) == (3, 3) and row["kl_4"] == 2, "0.2 nats are within no side of 0.2"


def test_pairs_that_are_decided_against_each_other_are_named(tmp_path):
    made(tmp_path, "full", None, noisy(30, 0))
    near = made(tmp_path, "h2o", noisy(0.1, 1, 0.01), noisy(10, 4))
    made(tmp_path, "keyformer", noisy(0.2, 2, 0.01), noisy(10, 5))
    far = made(tmp_path, "window", noisy(0.3, 3, 0.01), noisy(20, 6))
    row = only(agreement(folders(tmp_path), 0.05))
    assert (near, far) in row["contradicted"] and (far, near) not in row["contradicted"]
    assert row["tau"] < 0 and row["by_both"] >= len(row["contradicted"])


def test_tau_is_that_of_scipy_over_the_means_of_shared_examples(tmp_path):
    rng = np.random.default_rng(5)
    made(tmp_path, "full", None, noisy(30, 0))
    kl = {name: rng.gamma(2, 0.1, N) for name in ("h2o", "keyformer", "window", "a2sf", "tova", "snapkv")}
    score = {name: rng.integers(0, 3, N) * 10.0 for name in kl}
    for name in kl:
        made(tmp_path, name, kl[name][: N - 3 * (name == "tova")], score[name])
    row = only(agreement(folders(tmp_path), 0.05))
    shared = N - 3
    want = kendalltau([-kl[name][:shared].mean() for name in kl], [score[name][:shared].mean() for name in kl])
    assert row["n"] == shared and row["tau"] == pytest.approx(want.statistic) and row["low"] < row["tau"] < row["high"]


def test_few_examples_decide_nothing_and_two_runs_are_none(tmp_path):
    made(tmp_path, "full", None, [30.0] * 3)
    for place, method in enumerate(("h2o", "window")):
        made(tmp_path, method, [0.1 * (place + 1)] * 3, [20.0, 21.0, 22.0])
    assert agreement(folders(tmp_path), 0.05).empty
    made(tmp_path, "tova", [0.01, 0.02, 0.03], [25.0, 24.0, 26.0])
    row = only(agreement(folders(tmp_path), 0.05))
    assert math.isnan(row["low"]) and row["by_kl"] == row["kl_1"] == 0


def test_the_command_prints_it_and_names_what_it_lacks(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")
    assert command.main([str(tmp_path)]) == 2 and "kvexp divergence measures it" in capsys.readouterr().err
    made(tmp_path, "full", None, noisy(30, 0))
    made(tmp_path, "h2o", noisy(0.1, 1, 0.01), noisy(10, 4))
    made(tmp_path, "keyformer", noisy(0.2, 2, 0.01), noisy(15, 5))
    made(tmp_path, "window", noisy(0.3, 3, 0.01), noisy(20, 6))
    assert command.main([str(tmp_path), "--csv", str(tmp_path / "a.csv")]) == 0
    out = capsys.readouterr().out
    assert "tiny / xsum" in out and "-1.00" in out and (tmp_path / "a.csv").exists()
    assert "xsum: h2o 0.5 diverges less than window 0.5, which has more rouge2" in out
