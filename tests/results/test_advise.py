"""Advice from recorded runs: refusals, what it prints, and how often its promises are wrong."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from commands import run_py
from report_runs import write
from turns import in_turn

from kvexp.results import advise_search
from kvexp.results.advise import Candidate, Terms, judged, main, recorded
from kvexp.results.advise_search import METHODS, Arm, Bracket, Search
from kvexp.results.read import read_runs
from kvexp.run.compose import options
from kvexp.run.store import OWN, runs
from kvexp.util.errors import ConfigError

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


def errors(draw, truth, mean, terms, draws=DRAWS, n=80):
    """Shares of draws with (a promise on a share, a bound on a mean) that is wrong, and of those with any promise.

    draw(rng) -> candidates of prompts 0 to n - 1; truth, mean: name -> its true share within the limit, capped mean.
    """
    rng = np.random.default_rng(7)
    wrong, short, any_held = 0, 0, 0
    for _ in range(draws):
        advice = judged(draw(rng), range(n // 2), range(n // 2, n), terms)
        each = [one for chain in advice.chains for one in chain]
        held = [one for one in each if one.holds]
        any_held += bool(held)
        wrong += any(truth[one.candidate.name] < terms.share for one in held)
        short += any(one.mean_bound < mean[one.candidate.name] for one in each)
    return wrong / draws, short / draws, any_held / draws


def of_rows(task, question, limit, confidence, share=0.9, **more):
    losses = recorded_losses(task, question)
    terms = Terms(limit=limit, share=share, confidence=confidence, **more)
    names = {f"{method} {ratio}": each for (method, ratio), each in losses.items()}
    truth = {name: (each <= limit).mean() for name, each in names.items()}
    mean = {name: np.minimum(each, terms.most).mean() for name, each in names.items()}
    found = errors(lambda rng: candidates(losses, rng.integers(0, 20, 80)), truth, mean, terms)
    print(f"{task} {question} kl={limit} share={share} confidence={confidence}: {found}")
    return found


@pytest.mark.parametrize("confidence", in_turn([0.9, 0.8, 0.95], of=3))
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
    terms = Terms(limit=0.1, share=0.9, confidence=confidence, finalists=3)
    scales = {
        (f"m{m}", ratio): 0.046 * (1 + (1 - ratio) * (m + 1) / 20) for m in range(6) for ratio in (0.9, 0.7, 0.5, 0.3)
    }
    truth = {f"{method} {ratio}": 1 - np.exp(-0.1 / scale) for (method, ratio), scale in scales.items()}
    most = terms.most
    mean = {f"{method} {ratio}": scale * (1 - np.exp(-most / scale)) for (method, ratio), scale in scales.items()}
    assert all(each < 0.9 for each in truth.values())

    def draw(rng):
        shared = rng.exponential(1, 80)
        losses = {key: scale * (shared if together else rng.exponential(1, 80)) for key, scale in scales.items()}
        return candidates(losses, np.arange(80))

    wrong, short, _ = errors(draw, truth, mean, terms)
    print(f"known law confidence={confidence} together={together}: {wrong}, {short}")
    assert 1 - wrong >= confidence - NOISE
    assert 1 - short >= confidence - NOISE


@pytest.mark.parametrize(("confidence", "half"), [(0.8, 16), (0.9, 22), (0.95, 29)])
def test_coverage_is_near_its_level_where_it_is_hardest(confidence, half):
    """One candidate just below the share, and as few prompts as carry it: the error is nearly all spent."""
    truth = 0.8999
    terms = Terms(limit=0.1, share=0.9, confidence=confidence)

    def draw(rng):
        losses = {("m", 0.5): 1.0 * (rng.random(2 * half) > truth)}
        return candidates(losses, np.arange(2 * half))

    wrong, _, _ = errors(draw, {"m 0.5": truth}, {"m 0.5": 0.0}, terms, n=2 * half)
    assert wrong == pytest.approx(truth**half, abs=0.03)
    assert confidence - NOISE <= 1 - wrong <= confidence + 0.04


def test_choosing_and_promising_on_the_same_prompts_would_be_wrong():
    """The halves are what makes it true: with one for both, the promises of the same losses are wrong too often."""
    terms = Terms(limit=0.1, share=0.9, confidence=0.9, finalists=1)
    rng, wrong = np.random.default_rng(3), 0
    for _ in range(300):
        losses = {(f"m{m}", 0.5): rng.exponential(0.0445, 40) for m in range(30)}
        advice = judged(candidates(losses, np.arange(40)), range(40), range(40), terms)
        wrong += any(one.holds for chain in advice.chains for one in chain)
    assert 1 - np.exp(-0.1 / 0.0445) < 0.9
    assert wrong / 300 > 0.2


@pytest.mark.parametrize("confidence", [0.95, 0.8])
@pytest.mark.parametrize("share", [0.75, 0.8, 0.9])
def test_the_bound_of_the_budget_that_is_shown_is_right(confidence, share):
    """The prompts that choose the cheapest budget that holds make its bound: 32 % were wrong at an error of 20 %."""
    truth = {"0.9": 0.95, "0.5": 0.85, "0.3": 0.8}
    terms, prompts = Terms(limit=0.1, share=share, confidence=confidence), [str(i) for i in range(120)]
    rng, above, more, draws = np.random.default_rng(11), 0, 0, 500
    for _ in range(draws):
        beyond = {name: rng.random(120) > within for name, within in truth.items()}
        each = [
            Candidate("m", name, float(name), dict(zip(prompts, 1.0 * of, strict=True)), name)
            for name, of in beyond.items()
        ]
        advice = judged(each, [], prompts, terms, [list(truth)])
        (answer,) = advice.answers
        above += answer is not None and answer.share_bound > truth[answer.candidate.name]
        more += answer is not None and answer.share_bound > share
        assert all(np.isnan(one.share_bound) for one in advice.chains[0] if not one.holds)
    error = 1 - confidence
    assert above / draws <= error + 2 * np.sqrt(error * confidence / draws)
    assert more if share == 0.75 else True, "where all budgets hold, the bound says more than the share"


# The command.


def hand(
    folder,
    n=80,
    methods=("h2o", "window"),
    ratios=(0.9, 0.5),
    loss=lambda method, ratio, i: 0.01,
    score=40.0,
    full=40.0,
    same=(1, 1, 1, 1),
    lost=(),
    failed=(),
):
    """Runs whose losses are known by prompt. lost: prompts without one; failed: those of them whose rows say so."""
    model = {"model": {"dtype": "float32"}}
    base = write(folder, "full", [full] * n, kv_ratio=None, changes={"receipt": {"kv_bytes": 10000}}, config=model)
    for method in methods:
        for ratio in ratios:
            receipt = {"receipt": {"kv_bytes": 10000 * ratio}}
            scores = [None if i in failed else score for i in range(n)]
            run = write(folder, method, scores, base.hash, kv_ratio=ratio, changes=receipt, config=model)
            long = len(same)
            line = {"text": OWN, "first_by_prefill": False, "tokens": [1] * long, "same_top1": list(same)}
            line |= {"logprob": [-1.0] * long, "full_logprob": [-1.0] * long}
            run.append_divergence(
                {"example": f"e{i}", "index": i, "kl": [loss(method, ratio, i)] * long, **line}
                for i in range(n)
                if i not in lost
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


@pytest.mark.parametrize("at", ["top1=0.9", "top1=0.8", "score_loss=2.1", "kl=0.1"])
def test_a_loss_at_the_limit_is_within_it(tmp_path, capsys, at):
    """1 - 0.9 is less than 0.1 in floats, 30 - 27.9 more than 2.1, and the mean of three times 0.1 more than 0.1."""
    loss, _, limit = at.partition("=")
    same = [[0] * round(10 * (1 - float(limit))) + [1] * round(10 * float(limit))] if loss == "top1" else [[1] * 3]
    base = hand(tmp_path, methods=["h2o"], ratios=[0.5], loss=lambda *_: 0.1, same=same[0], score=27.9, full=30.0)
    said_of = said(capsys, tmp_path, at)
    assert base.hash and " 0 of 40" in next(line for line in said_of.splitlines() if line.startswith("h2o "))


def test_prompts_on_which_a_run_failed_are_beyond_the_limit(tmp_path, capsys):
    """A quarter of the prompts has no loss: the full cache answers there, the run failed or was not tried."""
    hand(tmp_path, methods=["h2o"], ratios=[0.5], lost=range(0, 80, 4), failed=range(0, 80, 8))
    out = said(capsys, tmp_path)
    beyond = int(re.search(r"h2o +none of 1 .*?(\d+) of \d+", out)[1])
    assert beyond and f"h2o kv_ratio=0.5: on {beyond} of the {beyond} prompts beyond the limit it failed" in out
    assert "10 of 80 prompts count nowhere, as no method has a loss there" in out
    (found,) = recorded(read_runs(tmp_path, {}), "kl")
    assert len(found.prompts) == 70 and sum(np.isinf(list(found.candidates[0].losses.values()))) == 10


def test_a_run_that_failed_on_every_prompt_is_beyond_the_limit(tmp_path, capsys):
    hand(tmp_path, methods=["h2o"], ratios=[0.5])
    hand(tmp_path, methods=["window"], ratios=[0.9], lost=range(80), failed=range(80))
    out = said(capsys, tmp_path)
    assert re.search(r"^window +none of 1 .* 40 of 40", out, re.MULTILINE)
    assert "window kv_ratio=0.9: on 40 of the 40 prompts beyond the limit it failed" in out


@pytest.mark.parametrize("n", [40, 60, 80, 100])
def test_bounds_are_rounded_to_the_safe_side(tmp_path, capsys, n):
    """What a table shows as the largest share can be asked for; of a mean no less than its bound is shown."""
    hand(tmp_path, n=n, methods=["h2o"], ratios=[0.5], loss=lambda *_: 0.05)
    share = re.search(r"carry shares up +to ([\d.]+)", said(capsys, tmp_path, "share=0.5").replace("\n", " "))[1]
    (found,) = recorded(read_runs(tmp_path, {}), "kl")
    ((tested,),) = found.advice(Terms(share=0.5)).chains
    least, most = re.search(r"0 of \d+ +([\d.]+) +([\d.]+)", said(capsys, tmp_path, "share=0.5")).groups()
    assert float(share) == float(least) <= tested.share_bound and tested.mean_bound <= float(most) + 1e-9
    assert f"probability at least {float(share):g}, " in said(capsys, tmp_path, f"share={share}")


def test_prompts_that_one_budget_was_not_run_on_are_said(tmp_path, capsys):
    hand(tmp_path, methods=["h2o"], ratios=[0.5])
    hand(tmp_path, methods=["window"], ratios=[0.9], lost=range(0, 80, 4))
    out = said(capsys, tmp_path)
    line = next(line for line in out.splitlines() if line.startswith("window "))
    n = int(re.search(r"0 of (\d+)", line)[1])
    assert n < 40 and f"window kv_ratio=0.9: judged by {n} prompts; the other {40 - n} that promise have no loss" in out
    assert "h2o kv_ratio=0.5: judged by" not in out


def test_nothing_found_says_what_came_nearest_and_the_next_command(tmp_path, capsys):
    """Losses of 0.20 to 0.28 under h2o, of 5 under the other: 0.28 is what the better one stays within."""
    hand(tmp_path, loss=lambda method, ratio, i: 5.0 if method == "window" else 0.2 + 0.001 * i + (1 - ratio))
    out = said(capsys, tmp_path, "kl=0.1", "share=0.9")
    nearest = re.search(r"Nearest on the prompts that chose: h2o kv_ratio=0.9, 40 of 40 beyond the limit; (.*)", out)
    assert re.fullmatch(r"KL: median 0\.3\d, most 0\.3[78]\.", nearest[1])
    again = re.search(r"next: kvexp advise (\S+) share=0.9 kl=(0.3[78])$", out, re.MULTILINE)
    assert again[1] == str(tmp_path)
    out = said(capsys, tmp_path, "share=0.9", f"kl={again[2]}")
    assert "Promise: under h2o kv_ratio=0.9" in out and "Nearest" not in out


def test_scores_and_tokens(tmp_path, capsys):
    hand(tmp_path, score=37.0)
    assert "None of these" in said(capsys, tmp_path, "score_loss=2")
    assert "stays within 4 points of the full cache's score" in said(capsys, tmp_path, "score_loss=4")
    assert "likeliest token at 0.95 or more" in said(capsys, tmp_path, "top1=0.95")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["share=0.99"], "80 prompts are too few: half of them chooses, and 40 can promise share=0.927 at"),
        (["share=0.99"], r"give 598 prompts \(299 of them make the promise\); or ask for share=0.927"),
        (["kl=0.1", "top1=0.9"], "kl and top1 are two losses: give one"),
        (["kl=0.3", "kl=0.1"], "kl is given twice, as 0.3 and as 0.1: give one"),
        *[(["kl=a"], "kl must be a number, got 'a'"), (["kl=-1"], "kl must be above 0, got -1")],
        (["confidence=2"], r"confidence must be in \[0.5, 0.9999\], got 2"),
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
        Terms.of(["again"])


def test_what_n_prompts_carry():
    terms = Terms()
    terms.check(58)
    with pytest.raises(ConfigError, match="56 prompts are too few"):
        terms.check(56)
    assert terms.carries(40).startswith("40 make the promise: at confidence 0.95 they carry shares up to 0.927")
    some = Terms(share=0.5).carries(40)  # 15 of 16 prompts beyond the limit carry no half
    more = int(re.search(r"at most 14 beyond the limit \(15 would take (\d+) prompts\)", some)[1])
    assert Terms(share=0.5).carries(more).startswith(f"{more} make the promise") and 40 < more < 50
    assert [terms.many(n) for n in (29, 40, 46, 55, 60)] == [1, 3, 1, 2, 3], "further methods where they cost nothing"


# The search for a budget: what it finds and saves on known losses, and the command on a small trained model.


BUDGETS = (0.9, 0.7, 0.5, 0.3)


class Known(Search):
    """A search whose runs are rows of a table: (method, place of the budget) -> losses of all prompts."""

    def __init__(self, terms, losses):
        self.terms, self.losses = terms, losses
        names = dict.fromkeys(name for name, _ in losses)
        self.arms = [Arm.of(name, BUDGETS) for name in names]
        self.examples = [str(i) for i in range(len(next(iter(losses.values()))))]
        self.seen, self.hashes = {}, {}

    def name(self, arm, at):
        return f"{arm.name} {at}"

    def run(self, wanted, shard):
        part, of = map(int, shard.split("/"))
        n = len(self.examples)
        for arm, at in wanted:
            self.seen.setdefault((arm.name, at), set()).update(range(n * part // of, n * (part + 1) // of))

    def candidates(self):
        return {
            (name, at): Candidate(
                *(name, str(at), BUDGETS[at], {str(i): self.losses[name, at][i] for i in sorted(seen)}, f"{name} {at}")
            )
            for (name, at), seen in self.seen.items()
        }

    @property
    def texts(self):
        return sum(map(len, self.seen.values()))

    def advice(self):
        chains = self.choose()
        seen = {int(each) for each in self.choosing}
        assert all(each <= seen for each in self.seen.values()), "what promises is not looked at while choosing"
        self.test(chains)
        return judged(list(self.candidates().values()), self.choosing, self.promising, self.terms, chains)


def law(rng, scales, n=80):
    """Exponential losses by method and budget, larger with less of the cache, as hard for all methods."""
    shared = rng.exponential(1, n)
    return {
        (name, at): scale * (1 - ratio) * shared for name, scale in scales.items() for at, ratio in enumerate(BUDGETS)
    }


def test_it_finds_what_the_whole_grid_finds_with_a_part_of_the_texts():
    scales = {f"m{i}": 0.02 * 1.5**i for i in range(8)}
    same = shares = 0
    for seed in range(20):
        losses = law(np.random.default_rng(seed), scales)
        search = Known(Terms(finalists=1), losses)
        found = search.advice()
        whole = [
            Candidate(
                name, str(at), BUDGETS[at], dict(zip(search.examples, each.tolist(), strict=True)), f"{name} {at}"
            )
            for (name, at), each in losses.items()
        ]
        best = judged(whole, search.choosing, search.promising, search.terms)
        same += found.answers[0] is not None and found.answers[0].candidate.name == best.answers[0].candidate.name
        shares += search.texts / (len(losses) * 80) / 20
    assert same >= 18
    assert shares < 0.35, shares


def test_its_promises_are_not_wrong_too_often():
    """Every budget of every method is just short of the share, and the search picks the luckiest."""
    terms = Terms(confidence=0.9, share=0.8)
    wrong = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        losses = {(f"m{i}", at): 1.0 * (rng.random(80) > 0.795) for i in range(8) for at in range(len(BUDGETS))}
        wrong += any(each is not None for each in Known(terms, losses).advice().answers)
    assert wrong / 300 <= 0.1 + 2 * np.sqrt(0.1 * 0.9 / 300)


def test_it_stops_when_the_answer_cannot_change():
    """Each chain's dearest budget loses a prompt of the first part that promises: nothing is tested after that part."""
    losses = {("m", at): np.zeros(80) for at in range(len(BUDGETS))}
    for each in losses.values():
        each[45] = 1.0
    search = Known(Terms(), losses)
    advice = search.advice()
    assert advice.answers == [None]
    assert max(i for seen in search.seen.values() for i in seen) == 49, (
        "80 prompts in eight parts: 40 to 49 are the fifth"
    )
    (row,) = [chain[0] for chain in advice.chains]
    assert (row.beyond, row.n) == (1, 10)


@pytest.mark.parametrize(
    ("n", "rungs"),
    [(16, [(4, 10), (4, 5), (2, 2)]), (36, [(8, 10), (4, 5), (2, 2)]), (80, [(16, 10), (4, 5), (2, 2)])],
)
def test_each_round_tries_fewer_methods_on_more_prompts(n, rungs):
    search = Known(Terms(finalists=2), {(f"m{i}", 0): np.zeros(n) for i in range(10)})
    assert search.rungs == rungs
    assert n // rungs[0][0] >= 4


def test_none_is_worth_a_test():
    search = Known(Terms(), {("m", at): np.ones(80) for at in range(len(BUDGETS))})
    advice = search.advice()
    assert (advice.chains, advice.answers) == ([], [])
    assert max(i for seen in search.seen.values() for i in seen) < 40


def test_a_bracket_closes_on_the_cheapest_budget_that_is_fine():
    for size in (1, 2, 3, 8):
        for cheapest in range(-1, size):
            bracket, tried = Bracket(-1, size), 0
            while (at := bracket.next) is not None:
                bracket.learn(at, at <= cheapest)
                tried += 1
            assert bracket.fine == cheapest
            assert tried <= np.ceil(np.log2(size + 1))


def test_arms_are_options():
    assert set(METHODS) - {"full_quantised"} <= set(options("method"))
    arm = Arm.of("h2o+cache.bits=4", (0.2, 0.9))
    assert (arm.words, arm.budgets) == (("method=h2o", "cache.bits=4"), ("kv_ratio=0.9", "kv_ratio=0.2"))
    with pytest.raises(ConfigError, match="methods: the full cache is what the others are compared with"):
        Arm.of("full", (0.5,))


# The command, on a model of random weights.


@pytest.fixture
def prompts(tmp_path):
    rows = [
        {"prompt": f"Once upon a time there was dog number {i} " + "who ran and ran. " * (3 + i % 4)} for i in range(16)
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_runs_that_answer_nothing_have_bytes_by_their_ratio(prompts, capsys, monkeypatch):
    """The full cache of divergence=only has no rows that say how long the prompts are."""
    outputs = prompts.parent / "outputs"
    task = ["task=prompts", f"task.data_files={prompts}", "task.max_new_tokens=4", "limit=16"]
    run = ["model=tiny", "method=window", "kv_ratio=0.5", "divergence=only", f"outputs_dir={outputs}"]
    assert run_py(monkeypatch, capsys, *run, *task)[0] == 0
    out = said(capsys, outputs, "kl=50", "share=0.6", "confidence=0.8")
    assert re.search(r"^window +kv_ratio=0.5 +50 +- +0 of 8", out, re.MULTILINE)


def words(prompts, *more):
    own = ["kl=50", "share=0.6", "confidence=0.8", "methods=window,h2o", "budgets=0.9,0.5"]
    rest = ["model=tiny", "task.max_new_tokens=4", f"outputs_dir={prompts.parent / 'outputs'}"]
    return [f"data={prompts}", *own, *rest, *more]


def test_the_command_from_prompts_to_a_promise_and_again(prompts, capsys, monkeypatch):
    outputs = prompts.parent / "outputs"
    assert main(words(prompts, "--dry-run")) == 0
    out = capsys.readouterr().out
    assert "16 prompts: 8 choose; 8 make the promise" in out and "2 methods by 4 prompts" in out
    assert not outputs.exists(), "a dry run leaves nothing"

    kept, seen = advise_search.keep_plan, []

    def looked(place, changes):
        kept(place, changes)
        if "chains" in changes:
            seen.extend(line["index"] for run in runs(outputs) for line in run.divergence().values())

    monkeypatch.setattr(advise_search, "keep_plan", looked)
    assert main(words(prompts)) == 0
    out = capsys.readouterr().out
    assert seen and max(seen) < 8, "the plan is kept before a prompt that promises is run"
    assert "tiny on prompts: 0.6 of new prompts within 50 nats per token of the full cache" in out
    assert "kv_ratio=0.5" in out and "0 of 8" in out

    def files():
        return {path: path.read_bytes() for path in outputs.rglob("*.jsonl")}

    before = files()
    assert main(words(prompts)) == 0
    again = capsys.readouterr().out
    assert files() == before, "the same command finds its rows"
    assert again.splitlines()[-6:] == out.splitlines()[-6:]
    assert main([str(outputs), "kl=0.2", "share=0.6", "confidence=0.8"]) == 0
    assert "have answered 1 other question(s)" in capsys.readouterr().out


def test_a_search_that_finds_nothing_says_what_is_next(prompts, capsys):
    """No budget is worth a test: the same from the folder, and the command it names finds one."""
    assert main([word for word in words(prompts) if not word.startswith("kl=")] + ["kl=0.000001"]) == 0
    out = capsys.readouterr().out
    assert "prompts chose methods and budgets; the other 8, which make promises, had nothing to test" in out
    assert " -1 " not in out and "0.000," not in out and "within it" not in out
    assert "None of these" in out and "every budget lost too much to be worth a test" in out
    assert re.search(
        r"Nearest on the prompts that chose: (window|h2o) kv_ratio=0.\d, \d of \d beyond the limit; KL", out
    )
    (again,) = re.findall(r"next: kvexp advise (.*)$", out, re.MULTILINE)
    assert main([str(prompts.parent / "outputs"), "kl=0.000001", "share=0.6", "confidence=0.8"]) == 0
    assert "Nearest on the prompts that chose" in capsys.readouterr().out
    assert main(shlex.split(again)) == 0
    assert "prompts that make the promise" not in capsys.readouterr().err


def test_a_prompt_too_short_for_a_budget_is_beyond_the_limit(prompts, capsys):
    """Some prompts cannot hold what H2O protects; the search tried them, so they count, in the folder too."""
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    for row in rows[::2]:
        row["prompt"] = "Once upon a time"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["methods=snapkv", "budgets=0.9", "method.window=16"]
    kept = [word for word in words(prompts) if not word.startswith(("methods=", "budgets="))]
    assert main([*kept, *own]) == 0
    assert "Promise" not in capsys.readouterr().out
    (found,) = recorded(read_runs(prompts.parent / "outputs", {}), "kl")
    (candidate,) = found.candidates
    tried = [name for name in found.prompts if name in candidate.losses]
    assert sum(np.isinf(candidate.losses[name]) for name in tried) >= len(tried) // 4


def test_a_search_that_was_interrupted_promises_nothing(prompts, capsys, monkeypatch):
    def stopped(self, chains):
        raise ConfigError("stopped here")

    monkeypatch.setattr(advise_search.Search, "test", stopped)
    outputs = prompts.parent / "outputs"
    assert main(words(prompts)) == 2
    assert main([str(outputs), "kl=50", "share=0.6", "confidence=0.8"]) == 2
    said = capsys.readouterr().err
    assert "is not done: 0 of the prompts that make the promise have rows" in said and "needs 4" in said


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["share=0.9"], "16 prompts are too few: half of them chooses, and 8 can promise share=0.817"),
        (["methods=h20"], "h20"),
        (["methods=full"], "the full cache is what the others are compared with"),
        (["budgets=2"], "budgets must be in"),
        (["method=h2o"], "advise sets method itself: leave it out, and name methods= and budgets= to try"),
        (["data=missing.jsonl"], "missing.jsonl"),
        (["task.max_new_token=4"], "max_new_token"),
    ],
)
def test_refusals_come_before_a_model_loads(prompts, capsys, monkeypatch, more, why):
    monkeypatch.setattr(advise_search, "run_jobs", None)
    keys = {word.partition("=")[0] for word in more}
    kept = [word for word in words(prompts) if word.partition("=")[0] not in keys]
    assert main([*kept, *more]) == 2
    assert why in capsys.readouterr().err


def test_rows_of_no_known_kind(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"query": "a"}\n' * 3)
    assert main([f"data={tmp_path / 'a.jsonl'}", "model=tiny"]) == 2
    assert "its rows have query; kvexp knows rows with prompt, article, document" in capsys.readouterr().err
    (tmp_path / "b.jsonl").write_text('{"context": "a", "questions": []}\n' * 3)
    assert main([f"data={tmp_path / 'b.jsonl'}", "model=tiny"]) == 2  # questions on one text have an order
    assert "its rows have context, questions; kvexp knows rows with prompt" in capsys.readouterr().err
