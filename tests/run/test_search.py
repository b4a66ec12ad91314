"""hydra/sweeper=optuna: four trials, interrupted and taken up again, are the four of an undisturbed search."""

from __future__ import annotations

import pytest
from commands import run_py
from small import small

from kvexp.run import jobs
from kvexp.run.store import runs

optuna = pytest.importorskip("optuna")

FEW = small("limit=2", "task.max_new_tokens=4", "task.nll=false", "method=a2sf", "kv_ratio=0.4", "objective=rouge1")
SEARCH = (
    "-m",
    "hydra/sweeper=optuna",
    "hydra.sweeper.n_trials=4",
    "hydra.sweeper.batch=2",
    "method.alpha=interval(0,1)",
)


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    def called(*words, to="out"):
        return run_py(monkeypatch, capsys, *FEW, *words, f"outputs_dir={tmp_path / to}")

    return called


def trials(folder):
    """(searched value, objective) of the completed trials, in their order."""
    storage = f"sqlite:///{folder}/.sweeps/optuna.db"
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    done = [trial for trial in study.get_trials() if trial.state is optuna.trial.TrialState.COMPLETE]
    return [(trial.params["method.alpha"], trial.value) for trial in done]


def test_an_interrupted_search_goes_on_as_if_nothing_had_been(command, tmp_path, monkeypatch):
    code, out, err = command(*SEARCH, to="whole")
    assert code == 0, out + err
    whole = trials(tmp_path / "whole")
    assert len(whole) == 4 and "best of 4 trials" in out
    assert len({alpha for alpha, _ in whole}) == 4 and all(0 <= alpha <= 1 for alpha, _ in whole)
    good, calls = jobs.run_job, []

    def stopped(one, session, **how):
        calls.append(one)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return good(one, session, **how)

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "run_job", stopped)
        assert command(*SEARCH)[0] == 130
    assert len(trials(tmp_path / "out")) == 2
    code, out, err = command(*SEARCH)
    assert code == 0 and "2 of 4 trials are there already" in out, out + err
    assert trials(tmp_path / "out") == whole
    again = command(*SEARCH)
    assert again[0] == 0 and trials(tmp_path / "out") == whole
    more = command(*SEARCH, "hydra.sweeper.n_trials=5")
    assert more[0] == 0 and trials(tmp_path / "out")[:4] == whole and len(trials(tmp_path / "out")) == 5


def test_the_objective_is_the_metrics_mean_and_nll_is_minimised(command, tmp_path):
    words = ("objective=nll", "task.nll=true", "task.continuation_words=3")
    code, out, err = command(*SEARCH, *words)
    assert code == 0, out + err
    found = trials(tmp_path / "out")
    assert f"best of 4 trials: {min(value for _, value in found):.6g}" in out
    for run in runs(tmp_path / "out"):
        if run.baseline:
            mean = sum(row["metrics"]["nll"] for row in run.rows()) / 2
            assert (run.config["method"]["alpha"], mean) in [(a, pytest.approx(value)) for a, value in found]


def test_a_search_works_on_workers(command, tmp_path, monkeypatch):
    pytest.importorskip("joblib")
    from hydra_plugins.kvexp_shipping import JoblibLauncher

    monkeypatch.setattr(JoblibLauncher, "engine", lambda self, work, each: ((i, work(s)) for i, s in enumerate(each)))
    code, out, err = command(*SEARCH, "hydra/launcher=joblib")
    assert code == 0 and len(trials(tmp_path / "out")) == 4, out + err


def test_integers_logarithms_and_choices():
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    from hydra_plugins.kvexp_optuna import distribution

    words = {
        "a=interval(0,1)": FloatDistribution(0, 1),
        "a=tag(log,interval(1,10))": FloatDistribution(1, 10, log=True),
        "a=int(interval(1,10))": IntDistribution(1, 10),
        "a=choice(h2o,tova)": CategoricalDistribution(["h2o", "tova"]),
        "a=range(0,3)": CategoricalDistribution(["0", "1", "2"]),
        "a=1,null": CategoricalDistribution(["1", "null"]),
    }
    for word, wanted in words.items():
        assert distribution(OverridesParser.create().parse_overrides([word])[0]) == wanted, word


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("objective=null",), "needs objective=METRIC"),
        (("hydra.sweeper.n_trials=0",), "n_trials must be a whole number of at least 1, got 0"),
        (("hydra.sweeper.sampler=grid",), "must be tpe or random, got 'grid'"),
        (("hydra.sweeper.direction=up",), "maximize, minimize or null, got 'up'"),
        (("method.alpha=0.5",), "searches nothing"),
        (("method.alpha=interval(1,0)",), "cannot be"),
        (("objective=bleu",), "objective must be one of rouge1"),
    ],
)
def test_what_cannot_be_searched_is_one_line(command, words, message):
    code, out, err = command(*SEARCH, *words)
    assert code == 1 and message in err and "Traceback" not in err + out
