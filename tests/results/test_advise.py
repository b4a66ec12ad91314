"""Advice from recorded runs: refusals, what it prints, and how often its promises are wrong."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from report_runs import write

from kvexp.results.advise import Asked, Candidate, judged, main
from kvexp.run.store import OWN
from kvexp.util import ConfigError

LEAGUE = Path(__file__).resolve().parents[2] / "experiments" / "methods_league.csv"
DRAWS = 1000
NOISE = 0.015  # two standard errors of 1,000 draws at a confidence of 0.95


def recorded_losses(task, question):
    """Mean KL of each of 20 prompts, by method and kv_ratio, as the league has recorded them on smollm2_135m."""
    found = {}
    with LEAGUE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if (row["task"], row["question"]) == (task, question) and row["kl_each"]:
                _, _, values = row["kl_each"].partition(": ")
                name = f"{row['method']} {row['how']}".strip()
                found[name, float(row["kv_ratio"])] = np.array([float(value) for value in values.split()])
    assert len({len(each) for each in found.values()}) == 1
    return found


def candidates(losses, drawn):
    """Candidates whose prompts are drawn rows; losses: (method, kv_ratio) -> one per row."""
    return [
        Candidate(method, f"kv_ratio={ratio:g}", ratio, dict(enumerate(each[drawn])), f"{method} {ratio}")
        for (method, ratio), each in losses.items()
    ]


def errors(draw, truth, mean, asked, draws=DRAWS, n=80):
    """Shares of draws with (a promise on a share, a bound on a mean) that is wrong, and of those with any promise.

    draw(rng) -> candidates of prompts 0 to n - 1; truth, mean: name -> its true share within the limit, capped mean.
    """
    rng = np.random.default_rng(7)
    wrong, short, any_held = 0, 0, 0
    for _ in range(draws):
        advice = judged(draw(rng), range(n // 2), range(n // 2, n), asked)
        each = [one for chain in advice.chains for one in chain]
        held = [one for one in each if one.holds]
        any_held += bool(held)
        wrong += any(truth[one.candidate.name] < asked.share for one in held)
        short += any(one.mean_bound < mean[one.candidate.name] for one in each)
    return wrong / draws, short / draws, any_held / draws


def of_rows(task, question, limit, confidence, share=0.9, **more):
    losses = recorded_losses(task, question)
    asked = Asked(limit=limit, share=share, confidence=confidence, **more)
    names = {f"{method} {ratio}": each for (method, ratio), each in losses.items()}
    truth = {name: (each <= limit).mean() for name, each in names.items()}
    mean = {name: np.minimum(each, asked.most).mean() for name, each in names.items()}
    found = errors(lambda rng: candidates(losses, rng.integers(0, 20, 80)), truth, mean, asked)
    print(f"{task} {question} kl={limit} share={share} confidence={confidence}: {found}")
    return found


@pytest.mark.parametrize("confidence", [0.8, 0.9, 0.95])
def test_coverage_on_recorded_rows(confidence):
    """The true share of every promise is known, since prompts are drawn with replacement from recorded rows."""
    wrong, short, any_held = of_rows("news_qa", "after_eviction", 0.02, confidence)
    assert 1 - wrong >= confidence - NOISE
    assert 1 - short >= confidence - NOISE
    assert any_held > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("confidence", [0.8, 0.9, 0.95])
@pytest.mark.parametrize(("task", "limit"), [("needle", 0.05), ("needle", 0.2), ("cnn_dailymail", 0.02)])
def test_coverage_on_more_recorded_rows(task, limit, confidence):
    for finalists in (None, 3):
        wrong, short, _ = of_rows(task, "after_eviction", limit, confidence, share=0.85, finalists=finalists)
        assert 1 - wrong >= confidence - NOISE
        assert 1 - short >= confidence - NOISE


@pytest.mark.parametrize("confidence", [0.8, 0.9, 0.95])
@pytest.mark.parametrize(
    "together",
    [
        pytest.param(True, id="one prompt is hard for all", marks=pytest.mark.slow),
        pytest.param(False, id="each by itself"),
    ],
)
def test_coverage_on_losses_of_a_known_law(together, confidence):
    """Exponential losses whose scale the budget sets, of six methods, some of which lie just below the share.

    The worst case of a search: many candidates are nearly good enough, and none is.
    """
    asked = Asked(limit=0.1, share=0.9, confidence=confidence, finalists=3)
    scales = {
        (f"m{m}", ratio): 0.046 * (1 + (1 - ratio) * (m + 1) / 20) for m in range(6) for ratio in (0.9, 0.7, 0.5, 0.3)
    }
    truth = {f"{method} {ratio}": 1 - np.exp(-0.1 / scale) for (method, ratio), scale in scales.items()}
    most = asked.most
    mean = {f"{method} {ratio}": scale * (1 - np.exp(-most / scale)) for (method, ratio), scale in scales.items()}
    assert all(each < 0.9 for each in truth.values())

    def draw(rng):
        shared = rng.exponential(1, 80)
        losses = {key: scale * (shared if together else rng.exponential(1, 80)) for key, scale in scales.items()}
        return candidates(losses, np.arange(80))

    wrong, short, _ = errors(draw, truth, mean, asked)
    print(f"known law confidence={confidence} together={together}: {wrong}, {short}")
    assert 1 - wrong >= confidence - NOISE
    assert 1 - short >= confidence - NOISE


@pytest.mark.parametrize(("confidence", "half"), [(0.8, 16), (0.9, 22), (0.95, 29)])
def test_coverage_is_near_its_level_where_it_is_hardest(confidence, half):
    """One candidate just below the share, and as few prompts as carry it: the error is nearly all spent."""
    truth = 0.8999
    asked = Asked(limit=0.1, share=0.9, confidence=confidence)

    def draw(rng):
        losses = {("m", 0.5): 1.0 * (rng.random(2 * half) > truth)}
        return candidates(losses, np.arange(2 * half))

    wrong, _, _ = errors(draw, {"m 0.5": truth}, {"m 0.5": 0.0}, asked, n=2 * half)
    assert wrong == pytest.approx(truth**half, abs=0.03)
    assert confidence - NOISE <= 1 - wrong <= confidence + 0.04


def test_choosing_and_promising_on_the_same_prompts_would_be_wrong():
    """The halves are what makes it true: with one for both, the promises of the same losses are wrong too often."""
    asked = Asked(limit=0.1, share=0.9, confidence=0.9, finalists=1)
    rng, wrong = np.random.default_rng(3), 0
    for _ in range(300):
        losses = {(f"m{m}", 0.5): rng.exponential(0.0445, 40) for m in range(30)}
        advice = judged(candidates(losses, np.arange(40)), range(40), range(40), asked)
        wrong += any(one.holds for chain in advice.chains for one in chain)
    assert 1 - np.exp(-0.1 / 0.0445) < 0.9
    assert wrong / 300 > 0.2


# The command.


def hand(folder, n=80, methods=("h2o", "window"), ratios=(0.9, 0.5), loss=lambda method, ratio, i: 0.01, score=40.0):
    """Runs whose losses are known by prompt."""
    model = {"model": {"dtype": "float32"}}
    base = write(folder, "full", [40.0] * n, kv_ratio=None, changes={"receipt": {"kv_bytes": 10000}}, config=model)
    for method in methods:
        for ratio in ratios:
            receipt = {"receipt": {"kv_bytes": 10000 * ratio}}
            run = write(folder, method, [score] * n, base.hash, kv_ratio=ratio, changes=receipt, config=model)
            same = {"text": OWN, "first_by_prefill": False, "tokens": [1] * 4, "same_top1": [1] * 4}
            same |= {"logprob": [-1.0] * 4, "full_logprob": [-1.0] * 4}
            run.append_divergence(
                {"example": f"e{i}", "index": i, "kl": [loss(method, ratio, i)] * 4, **same} for i in range(n)
            )
    return base


def said(capsys, *words):
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    assert main([str(word) for word in words]) == 2
    return capsys.readouterr().err.strip()


def test_the_cheapest_budget_that_holds(tmp_path, capsys):
    hand(tmp_path, loss=lambda method, ratio, i: 5.0 if method == "window" else 0.08 if ratio == 0.5 else 0.0)
    out = said(capsys, tmp_path, "kl=0.1")
    lines = out.splitlines()
    assert lines[0] == "tiny on xsum: 0.9 of new prompts within 0.1 nats per token of the full cache"
    h2o, window = (next(line for line in lines if line.startswith(name)) for name in ("h2o", "window"))
    assert h2o.split()[:8] == ["h2o", "kv_ratio=0.5", "50", "4.88", "KiB", "0", "of", "40"]
    assert "none of 2" in window and "40 of 40" in window
    assert "h2o kv_ratio=0.5 a new prompt of this kind stays within 0.1 nats per token" in out
    assert "window: 40 of 40 beyond the limit at kv_ratio=0.9: too many are beyond it for any number." in out
    assert "exchangeable" in out
    assert all(len(line) <= 100 for line in lines[2:8]), "the table fits a screen"


def test_a_budget_that_is_not_good_enough_does_not_hold(tmp_path, capsys):
    """At 0.5 one prompt of five is beyond; 0.9 holds."""
    hand(tmp_path, methods=["h2o"], loss=lambda method, ratio, i: 0.5 if ratio == 0.5 and i % 5 == 0 else 0.0)
    assert "kv_ratio=0.9" in next(line for line in said(capsys, tmp_path).splitlines() if line.startswith("h2o "))


def test_none_of_these_is_an_answer(tmp_path, capsys):
    hand(tmp_path, methods=["h2o"], loss=lambda method, ratio, i: 0.5 if i % 25 == 0 else 0.0)
    out = said(capsys, tmp_path, "kl=0.1", "share=0.92")
    assert "None of these: no budget that was tested holds the promise of 0.92" in out
    assert re.search(r"about \d+ prompts might change that", out)


def test_scores_and_tokens(tmp_path, capsys):
    hand(tmp_path, score=37.0)
    assert "None of these" in said(capsys, tmp_path, "score_loss=2")
    assert "stays within 4 points of the full cache's score" in said(capsys, tmp_path, "score_loss=4")
    assert "likeliest token at 0.95 or more" in said(capsys, tmp_path, "top1=0.95")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["share=0.99"], "80 prompts are too few: half of them chooses, and 40 can promise share=0.928 at"),
        (["share=0.99"], r"give 598 prompts \(299 of them make the promise\); or ask for share=0.927"),
        (["kl=0.1", "top1=0.9"], "kl and top1 are two losses: give one"),
        (["kl=a"], "kl must be a number, got 'a'"),
        (["kl=-1"], "kl must be above 0, got -1"),
        (["confidence=2"], r"confidence must be in \[0.5, 0.9999\], got 2"),
        (["target=llama"], "target must be a model of `kvexp models`, got llama"),
        (["context=9"], "context is of a target: add target=MODEL"),
        (["methods=h2o"], "data=, methods=, budgets= and --dry-run are for prompts that are to be run"),
        (["metod=h2o"], "cannot choose runs by metod; their labels are"),
        (["method=a2sf"], "has method=a2sf; there are method=full,h2o,window"),
        (["--full"], "advise has no option --full"),
    ],
)
def test_refusals(tmp_path, capsys, words, why):
    hand(tmp_path)
    assert re.search(why, refused(capsys, tmp_path, *words))


def test_several_tasks_are_not_mixed(tmp_path, capsys):
    base = hand(tmp_path)
    write(tmp_path, "full", [1.0] * 9, kv_ratio=None, task="news")
    assert base.hash and said(capsys, tmp_path, "task=xsum")
    assert "no run under" in refused(capsys, tmp_path, "task=news")
    with pytest.raises(ConfigError, match="advise takes a folder of runs or KEY=VALUE, got 'again'"):
        Asked.of(["again"])


def test_what_n_prompts_carry():
    asked = Asked()
    asked.check(58)
    with pytest.raises(ConfigError, match="56 prompts are too few"):
        asked.check(56)
    assert asked.carries(40).startswith("40 make the promise: at confidence 0.95 they carry shares up to 0.928")
    assert [asked.many(n) for n in (29, 40, 46, 55, 60)] == [1, 3, 1, 2, 3], "further methods where they cost nothing"
