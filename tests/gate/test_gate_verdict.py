"""The gate's verdict: thresholds against binomial sums, and how often it is wrong on recorded losses."""

from __future__ import annotations

import csv
from math import comb
from pathlib import Path

import numpy as np
import pytest
from fake_server import PIECES

from kvexp.gate.sides import Place, SideError, divergence
from kvexp.gate.terms import Judgement, Terms

LEAGUE = Path(__file__).resolve().parents[2] / "experiments" / "methods_league.csv"
DRAWS = 2000
NOISE = 0.01  # two standard errors of 2,000 draws at 0.05


def terms(**words):
    return Terms("", "", "", **words)


def row(kl=0.0, *, top1=1.0, length=8, valid=True, bounded=False):
    sides = {"baseline": {"new_tokens": 8, "valid": True}, "candidate": {"new_tokens": length, "valid": valid}}
    return {**sides, "kl": kl, "top1": top1, "lower_bound": bounded}


def at_least(k, n, p):
    return sum(comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))


@pytest.mark.parametrize("n", [1, 2, 5, 28, 29, 30, 47, 80])
@pytest.mark.parametrize("share", [0.6, 0.9, 0.94])
def test_a_pass_and_a_fail_are_an_exact_test_each(n, share):
    asked = terms(kl=0.1, share=share, confidence=0.95)
    for beyond in range(n + 1):
        verdict = Judgement(asked, n, beyond, 0).verdict
        passes = 1 - at_least(beyond + 1, n, 1 - share) <= 0.05  # so few, if it were the share at most
        fails = at_least(beyond, n, 1 - share) <= 0.05  # so many, if it were the share at least
        assert verdict == ("pass" if passes else "fail" if fails else "undecided")


def test_what_is_beyond_and_what_cannot_be_known():
    asked = terms(kl=0.1, top1=0.9, length=0.25, valid="json")
    rows = [row(), row(0.1), row(0.11), row(top1=0.89), row(length=10), row(length=11), row(length=5), row(valid=False)]
    states = ["within", "within", "beyond", "beyond", "within", "beyond", "beyond", "beyond"]
    assert [asked.state(item) for item in rows] == states
    assert asked.state(row(0.01, bounded=True)) == "not known"
    assert asked.state(row(0.2, bounded=True)) == "beyond"
    assert terms(top1=0.9).state(row(0.2, bounded=True)) == "within"
    lost = {**row(), "baseline": {"new_tokens": 8, "valid": False}}
    assert asked.state(lost) == "left out"
    assert Judgement.of(asked, [*rows, lost]) == Judgement(asked, 8, 5, 0)


@pytest.mark.parametrize(("beyond", "n", "needed"), [(0, 20, range(29, 31)), (1, 20, range(60, 181)), (2, 20, [None])])
def test_how_many_prompts_would_decide(beyond, n, needed):
    judgement = Judgement(terms(kl=0.1), n, beyond, 0)
    assert judgement.verdict == "undecided"
    assert judgement.needed in needed
    assert Judgement(terms(kl=0.1), n, beyond, n - beyond).needed is None


def test_bounds_are_clopper_and_pearson():
    low, high = Judgement(terms(kl=0.1), 40, 3, 0).bounds
    assert at_least(37, 40, low) == pytest.approx(0.05)
    assert 1 - at_least(38, 40, high) == pytest.approx(0.05)


def recorded():
    """KL of 20 prompts of one run, as the league has recorded it on SmolLM2-135M."""
    with LEAGUE.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["kl_each"] and (line["method"], line["task"]) == ("snapkv", "news_qa"):
                return np.sort([float(value) for value in line["kl_each"].partition(": ")[2].split()])
    raise AssertionError


@pytest.mark.parametrize("n", [40, 100])
@pytest.mark.parametrize("within", [17, 18])
def test_on_recorded_losses_it_is_wrong_as_seldom_as_it_says(n, within):
    """Prompts drawn from 20 recorded ones; share=0.875 has the truth just below it (17 of 20) or just above (18)."""
    losses, rng = recorded(), np.random.default_rng(5)
    asked = terms(kl=float(losses[within - 1 : within + 1].mean()), share=0.875)
    assert np.mean(losses <= asked.kl) == within / 20
    verdicts, early = [], 0
    for _ in range(DRAWS):
        rows = [row(kl) for kl in rng.choice(losses, n)]
        verdict = Judgement.of(asked, rows).verdict
        counts = np.cumsum([asked.state(item) == "beyond" for item in rows])
        ends = [Judgement(asked, at + 1, int(count), 0).ends(n) for at, count in enumerate(counts)]
        assert any(ends) == (verdict == "fail")  # an early end is the verdict of all prompts
        early += any(ends[:-1])
        verdicts.append(verdict)
    wrong = verdicts.count("pass" if within == 17 else "fail") / DRAWS
    print(f"n={n}, true share {within / 20}: {wrong} wrong, {early} of {DRAWS} ended early")
    assert wrong <= 0.05 + NOISE
    assert early or within == 18


def place(logprobs, tokens=None, role="candidate"):
    return Place.of(role, range(len(logprobs)) if tokens is None else tokens, logprobs)


def test_the_divergence_of_less_than_all_tokens_is_a_lower_bound_that_grows():
    rng = np.random.default_rng(3)
    for _ in range(50):
        p, q = np.log(rng.dirichlet(np.full(30, 0.3), 2) + 1e-12)
        whole = divergence(place(p), place(q))
        assert whole == pytest.approx(sum(np.exp(p) * (p - q)), rel=1e-6)
        bounds = [
            divergence(*(place(logs[top], top.tolist()) for logs in (p, q) for top in [(-logs).argsort()[:count]]))
            for count in (1, 3, 10, 20)
        ]
        assert all(0 <= bound <= whole + 1e-9 for bound in bounds)
        mixed = divergence(place(p), place(q[1:6], list(range(1, 6))))
        assert 0 <= mixed <= whole + 1e-9


def test_a_token_that_underflows_costs_no_infinite_divergence():
    p, q = np.log([0.5, 0.5 - 1e-20, 1e-20]), np.array([np.log(0.5), np.log(0.5), -3.4e38])
    assert divergence(place(p), place(q)) < 1e-9


def test_places_of_text_are_told_by_their_text():
    assert place([-0.5, -1.2], PIECES[1:3]).likeliest == "a"
    assert not place([-0.5, -1.2], PIECES[1:3]).whole
    with pytest.raises(SideError, match="sent 2 log-probabilities of 1 tokens"):
        place([-0.5, -1.2], ["a", "a"])
