"""Known changes of a model, which say what a divergence is worth."""

from __future__ import annotations

import copy
import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import kendalltau
from test_sweep_divergence import ONE_BY_ONE, group
from tiny import stock, tiny, tokens

from experiments.studies import kl_scale as command
from experiments.studies.kl_scale import (
    SEEDS,
    agreement,
    forced_logits,
    line_of,
    logits_under,
    measured,
    scale_table,
    with_rounded_weights,
)
from kvexp.core import Budget, CacheConfig
from kvexp.hf.cpu_linear import rounded
from kvexp.methods import Full, Keyformer
from kvexp.results.divergence import NAME, read_scale, scale_of, write_scale
from kvexp.results.read import folders
from kvexp.run.batches import run_group
from kvexp.run.session import Session
from kvexp.run.store import Run, runs


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rounding_is_to_the_nearest_level_of_each_row(bits):
    torch.manual_seed(0)
    weight = torch.randn(5, 40) * torch.tensor([1.0, 10, 0.1, 3, 0])[:, None]
    made, most = rounded(weight, bits), 2 ** (bits - 1) - 1
    step = weight.abs().amax(1) / most
    assert ((made - weight).abs().amax(1) <= step / 2 + 1e-7).all()
    levels = [len(row.unique()) for row in made]
    assert max(levels) <= 2 * most + 1 and made[4].eq(0).all()
    assert torch.equal(made.abs().amax(1), weight.abs().amax(1)), "the largest of a row stays"


def test_a_copy_is_changed_and_the_model_is_not():
    model = stock("llama")
    before = copy.deepcopy(model.state_dict())
    changed = with_rounded_weights(model, 4)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not torch.equal(
        changed.state_dict()["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"]
    )
    assert torch.equal(changed.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_fewer_bits_diverge_more_and_none_not_at_all():
    model, prompt, text = stock("llama"), tokens(1, 30).tolist(), tokens(2, 6).tolist()
    full = forced_logits(model, prompt, text)
    whole = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
    assert torch.allclose(full, whole, atol=1e-5), "the logits that predict each token"
    found = {
        str(bits): [line_of(full, forced_logits(with_rounded_weights(model, bits), prompt, text), text, "e", 0)]
        for bits in (16, 8, 4)
    }
    frame = scale_table(found).set_index("change")
    assert frame.loc["16", "kl"] < 1e-5 < frame.loc["8", "kl"] < frame.loc["4", "kl"]
    assert frame.loc["16", "top1"] == 1


def test_fed_token_by_token_under_a_full_cache_is_one_forward():
    model, prompt, text = tiny("llama"), tokens(1, 30).tolist(), tokens(2, 6).tolist()
    whole = CacheConfig(Full())
    assert torch.allclose(logits_under(model, whole, prompt, text, 0), forced_logits(model, prompt, text), atol=1e-5)
    noised = CacheConfig(Keyformer(), Budget(kv_ratio=0.5))
    one, same, other = (logits_under(model, noised, prompt, text, seed) for seed in (3, 3, 4))
    assert torch.equal(one, same) and torch.allclose(one[0], other[0]) and not torch.allclose(one, other, atol=1e-3)


def test_a_run_without_rows_has_a_scale(tmp_path):
    """divergence=only: its texts are enough."""
    run_group(group(tmp_path, *ONE_BY_ONE, "divergence=only", methods=("h2o", "window")), Session())
    run = next(run for run in runs(tmp_path) if run.baseline)
    frame = scale_table(measured(run)).set_index("change")
    assert set(frame["n"]) == {4} and frame.loc["8-bit weights", "kl"] < frame.loc["4-bit weights", "kl"]
    assert 0 < frame.loc[SEEDS, "kl"] < 20 and frame.loc[SEEDS, "tokens"] == 4 * 7, "the prefill's token is left out"
    first = measured(run, 1)
    assert {len(lines) for lines in first.values()} == {1} and {line["index"] for line in first[SEEDS]} == {0}


def test_a_scale_is_kept_in_its_runs_folder(tmp_path):
    run = Run.open(tmp_path, {"method": "h2o"}, {"method": "h2o"})
    assert read_scale(run) == [] == scale_of([run])
    frame = pd.DataFrame([{"change": "8-bit", "n": 3, "kl": 0.01, "kl_low": math.nan, "top1": 0.9}])
    write_scale(run, frame)
    assert read_scale(run) == [{"change": "8-bit", "n": 3, "kl": 0.01, "kl_low": None, "top1": 0.9}] == scale_of([run])
    (run.path / NAME).write_text('{"changes": [{"change": "8-bit", "kl": "much"}]}')
    with pytest.warns(UserWarning, match="numbers kl and top1"):
        assert read_scale(run) == []


# Does KL order runs as the task's metric does: planted orders, a naive tau, and pairs that are decided both ways.


N = 40


def made(outputs, method, kl, score, task="xsum", **more):
    """A run whose examples have this mean KL and score, one per example."""
    labels = {"model": "tiny", "task": task, "method": method, "kv_ratio": 0.5}
    base = Run.open(outputs, {"method": "full", "task": task}, labels | {"method": "full"})
    run = Run.open(outputs, labels, labels, baseline=None if method == "full" else base.hash)
    row = {"seconds": {}, "new_tokens": 3, "finish_reason": "length", "skipped": None, **more}
    run.append(*(row | {"example": f"e{i}", "index": i, "metrics": {"rouge2": float(s)}} for i, s in enumerate(score)))
    if kl is not None:
        run.append_divergence([line(i, float(value)) for i, value in enumerate(kl)])
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
    assert command.main(["agreement", str(tmp_path)]) == 2
    assert "kvexp results --view divergence --measure" in capsys.readouterr().err
    made(tmp_path, "full", None, noisy(30, 0))
    made(tmp_path, "h2o", noisy(0.1, 1, 0.01), noisy(10, 4))
    made(tmp_path, "keyformer", noisy(0.2, 2, 0.01), noisy(15, 5))
    made(tmp_path, "window", noisy(0.3, 3, 0.01), noisy(20, 6))
    files = ["--csv", str(tmp_path / "a.csv"), "--rows", str(tmp_path / "rows.csv")]
    assert command.main(["agreement", str(tmp_path), *files]) == 0
    rows = pd.read_csv(tmp_path / "rows.csv")
    assert set(rows["measure"]) == {"kl", "rouge2"} and len(rows.columns) > 6 and (rows.iloc[:, 4:].max() >= 0).all()
    out = capsys.readouterr().out
    assert "tiny / xsum" in out and "-1.00" in out and (tmp_path / "a.csv").exists()
    assert "xsum: h2o 0.5 diverges less than window 0.5, which has more rouge2" in out
