"""Promises by hand and against a naive graph of hypotheses, and how often they are wrong in simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import betabinom, binomtest

from kvexp.results import promise
from kvexp.results.divergence import holm_corrected
from kvexp.results.promise import held, mean_bound, most_beyond, prompts_needed, share_bound, share_p_value
from kvexp.tasks import CNNDailyMail, News, Soda

DRAWS = 1000


@pytest.mark.parametrize(
    ("share", "error", "beyond", "n"),
    [(0.9, 0.05, 0, 29), (0.9, 0.05, 1, 46), (0.95, 0.05, 0, 59), (0.99, 0.05, 0, 299), (0.9, 0.1, 0, 22)],
)
def test_prompts_needed_by_the_table_of_wilks(share, error, beyond, n):
    """Numbers of the one-sided tolerance limits of Wilks (1941), as printed in every table of them."""
    assert prompts_needed(share, error, beyond) == n
    assert most_beyond(n, share, error) == beyond
    assert most_beyond(n - 1, share, error) == beyond - 1


def test_p_value_and_bound_say_the_same():
    for n in (5, 29, 40):
        for beyond in range(n + 1):
            for share in (0.5, 0.9, 0.95):
                p = share_p_value(beyond, n, share)
                assert p == pytest.approx(binomtest(beyond, n, 1 - share, alternative="less").pvalue)
                assert (p <= 0.05) == (share_bound(beyond, n, 0.05) >= share - 1e-12)
            exact = binomtest(beyond, n, alternative="less").proportion_ci(0.95, method="exact")
            assert share_bound(beyond, n, 0.05) == pytest.approx(1 - exact.high)
            assert promise.chance(beyond, n, 40, 3) == pytest.approx(
                betabinom.cdf(3, 40, beyond + 0.5, n - beyond + 0.5)
            )
    assert promise.chance(1, 9, 40, -1) == 0
    assert share_p_value(0, 0, 0.9) == 1 and share_bound(0, 0, 0.05) == 0
    assert promise.largest_share(29, 0.05) == pytest.approx(0.05 ** (1 / 29))


def graph_of_hypotheses(chains, error):
    """Algorithm 1 of Bretz et al. (2009) with its matrix of weights: which hypotheses it rejects, chain by chain."""
    names = [(c, i) for c, chain in enumerate(chains) for i in range(len(chain))]
    p = {name: chains[name[0]][name[1]] for name in names}
    level = {(c, i): error / len(chains) if i == 0 else 0.0 for c, i in names}
    weight = {(one, other): 0.0 for one in names for other in names}
    for c, chain in enumerate(chains):
        for i in range(len(chain) - 1):
            weight[(c, i), (c, i + 1)] = 1.0
        for other in range(len(chains)):
            if other != c:
                weight[(c, len(chain) - 1), (other, 0)] = 1 / (len(chains) - 1)
    left, rejected = set(names), set()
    while found := sorted(name for name in left if p[name] <= level[name]):
        gone = found[0]
        left.remove(gone)
        rejected.add(gone)
        new = {}
        for one in left:
            level[one] += level[gone] * weight[gone, one]
            for other in left:
                if one == other:
                    new[one, other] = 0.0
                    continue
                loop = 1 - weight[one, gone] * weight[gone, one]
                through = weight[one, other] + weight[one, gone] * weight[gone, other]
                new[one, other] = through / loop if loop > 0 else 0.0
        weight = new
    return [sum((c, i) in rejected for i in range(len(chain))) for c, chain in enumerate(chains)]


def test_chains_are_the_graph_of_bretz_and_holm():
    rng = np.random.default_rng(1)
    for _ in range(300):
        chains = [rng.beta(0.3, 4, rng.integers(1, 5)) for _ in range(rng.integers(1, 5))]
        assert held(chains, 0.05) == graph_of_hypotheses(chains, 0.05)
        p = rng.beta(0.3, 4, 6)
        assert held([[each] for each in p], 0.05) == (holm_corrected(p) <= 0.05).tolist()
    assert held([[0.01, 0.06, 0.0]], 0.05) == [1], "what comes behind a failure is not looked at"
    assert held([[], [0.04]], 0.05) == [0, 1], "a chain without candidates spends nothing"


@pytest.mark.parametrize("confidence", [0.8, 0.9, 0.95])
@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda rng, n: rng.beta(0.3, 5, n), id="beta"),
        pytest.param(lambda rng, n: 1.0 * (rng.random(n) < 0.06), id="rare"),
        pytest.param(lambda rng, n: np.full(n, 0.5) + rng.choice([-0.5, 0.5], n), id="coin"),
        pytest.param(lambda rng, n: np.minimum(rng.exponential(0.05, n), 1), id="exponential"),
    ],
)
def test_bound_on_the_mean_is_not_passed_too_often(draw, confidence):
    rng = np.random.default_rng(2)
    mean = draw(np.random.default_rng(3), 2_000_000).mean()
    covered = np.mean([mean_bound(draw(rng, 40), 1 - confidence) >= mean for _ in range(DRAWS)])
    assert covered >= confidence - 0.015


def test_bound_on_the_mean_by_hand():
    """Two prompts without loss: the first bet, from the variance 1/4, and the second are capped, or are not."""
    error = 0.5
    bets = [np.sqrt(2 * np.log(2) / (2 * 0.25)), np.sqrt(2 * np.log(2) / (2 * (0.25 + 0.0625) / 2))]
    least = np.linspace(0.001, 0.999, 999)
    capital = np.array([np.prod([1 + min(bet, 0.75 / m) * (1 - m) for bet in bets]) for m in least])
    assert mean_bound(np.zeros(2), error) == pytest.approx(1 - least[capital >= 2].max(), abs=2e-3)
    assert mean_bound(np.ones(50), 0.05) == 1
    assert mean_bound(np.zeros(0), 0.05) == 1
    with pytest.raises(ValueError, match=r"losses must be in \[0, 1\], got 0.0..1.5"):
        mean_bound(np.array([0, 1.5]), 0.05)


def test_no_false_shift_more_often_than_said():
    """The p-value of two samples of one law is at least uniform, also where features are shared by many prompts."""
    rng = np.random.default_rng(4)
    found = [
        promise.shift_p_value(rng.integers(0, 3, (15, 2)), rng.integers(0, 3, (10, 2)), permutations=99)
        for _ in range(DRAWS)
    ]
    for level in (0.05, 0.2, 0.5):
        assert np.mean(np.array(found) <= level) <= level + 3 * np.sqrt(level * (1 - level) / DRAWS)


def texts(task, limit=None):
    return [example.prompt for example in task.examples()][:limit]


def test_dialogue_instead_of_news_is_a_shift():
    """Bundled articles against conversations of SODA; and no shift between two halves of the articles."""
    news = promise.text_features(texts(News()))
    soda = promise.text_features(texts(Soda(data_files="tests/fixtures/soda.jsonl"), 8))
    assert len(soda) >= 2
    assert promise.shift_p_value(news[:20], soda) <= 0.01
    assert promise.shift_p_value(news[::2], news[1::2]) > 0.05


def test_other_news_may_be_a_shift_too():
    """Real articles against the bundled ones: another writer, another length."""
    news = promise.text_features(texts(News()))
    other = promise.text_features(texts(CNNDailyMail(data_files="tests/fixtures/cnn_dailymail.jsonl")))
    assert len(other) >= 2
    assert promise.shift_p_value(news, other) < 0.05
