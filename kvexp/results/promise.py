"""Promises about new prompts from losses that were recorded: no assumption but that prompts are exchangeable.

A promise on a share says that a new prompt's loss stays within a limit with at least some probability; it is a
binomial test (Clopper and Pearson 1934). Many candidates are tested at one error for all of them together, as in Learn
then Test (arXiv:2110.01052): each `Chain` in a fixed order, from the dearest candidate to the cheapest, and several
chains side by side as in Bretz et al. (2009, doi:10.1002/sim.3495), which is Holm's procedure where every chain has one
candidate. The order has to be fixed by other prompts than those that the test counts. A promise on the mean is a
betting bound (Waudby-Smith and Ramdas, arXiv:2010.09686). No torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from scipy.special import bdtr, betaincinv, betaln, gammaln

from kvexp.results.stats import Floats

Chain: TypeAlias = Sequence[float]  # p-values in the order in which they are tested

MOST_BET = 0.75  # of what is at stake, on one prompt; arXiv:2010.09686 takes 1/2 or 3/4


@functools.cache
def share_p_value(beyond: int, n: int, share: float) -> float:
    """P-value of "a new prompt stays within the limit with less than this probability"; 1 without prompts.

    beyond: how many of n did not stay within it.
    """
    return float(bdtr(beyond, n, 1 - share)) if n else 1.0


@functools.cache
def share_bound(beyond: int, n: int, error: float) -> float:
    """Lower confidence bound, at 1 - error, on the probability that a new prompt stays within the limit."""
    return 1 - float(betaincinv(beyond + 1, n - beyond, 1 - error)) if beyond < n else 0.0


@functools.cache
def most_beyond(n: int, share: float, error: float) -> int:
    """How many of n prompts may be beyond the limit if the promise on the share is to hold; -1: not even none."""
    return next(k - 1 for k in range(n + 1) if share_p_value(k, n, share) > error)  # of k = n it is 1


def prompts_needed(share: float, error: float, beyond: int = 0) -> int:
    """The fewest prompts that carry the promise on the share with so many of them beyond the limit."""
    n = max(beyond + 1, math.ceil(math.log(error) / math.log(share)))
    while share_p_value(beyond, n, share) > error:
        n += 1
    return n


@functools.cache
def chance(beyond: int, seen: int, n: int, may: int) -> float:
    """Probability that of n further prompts at most `may` are beyond the limit, by Jeffreys' prior.

    beyond: of `seen` prompts. A beta-binomial sum: it ranks candidates and promises nothing.
    """
    k, a, b = np.arange(may + 1), beyond + 0.5, seen - beyond + 0.5
    ways = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
    return float(np.exp(ways + betaln(k + a, n - k + b) - betaln(a, b)).sum())


def largest_share(n: int, error: float) -> float:
    """The largest share that n prompts, none of them beyond the limit, can carry."""
    return share_bound(0, n, error)


def held(chains: Sequence[Chain], error: float) -> list[int]:
    """How many candidates of each chain hold, from its beginning; the probability that any does wrongly is <= error.

    Chains share the error equally. Each goes on with its share as long as its candidates hold; one that comes to its
    end hands its share to those that have not.
    """
    place = [0] * len(chains)
    filled = [at for at, chain in enumerate(chains) if len(chain)]
    level = {at: error / len(filled) for at in filled}
    while ready := [at for at in level if chains[at][place[at]] <= level[at]]:
        at = ready[0]
        place[at] += 1
        if place[at] == len(chains[at]):
            freed = level.pop(at)
            level = {other: share + freed / len(level) for other, share in level.items()}
    return place


def mean_bound(losses: Floats, error: float) -> float:
    """Upper confidence bound, at 1 - error, on the mean of losses in [0, 1], by betting against larger means.

    losses [n], in an order that does not depend on them. The bet on each prompt is made from those before it, by the
    variance seen so far (arXiv:2010.09686, equation 26), and the largest capital on the way counts (Ville's
    inequality). 1 without prompts. ValueError for a loss outside.
    """
    gains = 1 - np.asarray(losses, dtype=np.float64)
    if not len(gains):
        return 1.0
    if not (gains.min() >= 0 and gains.max() <= 1):
        raise ValueError(f"losses must be in [0, 1], got {float(1 - gains.max())}..{float(1 - gains.min())}")
    count = np.arange(1, len(gains) + 1)
    mean = (0.5 + np.cumsum(gains)) / (count + 1)
    variance = (0.25 + np.cumsum((gains - mean) ** 2)) / (count + 1)
    before = np.concatenate([[0.25], variance[:-1]])
    bets = np.sqrt(2 * math.log(1 / error) / (len(gains) * before))

    def short(least: float) -> float:
        """By how much the log of the capital stays below what refutes that the mean gain is `least` or less."""
        growth = np.log1p(np.minimum(bets, MOST_BET / least) * (gains - least))
        return float(math.log(1 / error) - np.cumsum(growth).max())

    tiny = 1e-12
    if short(tiny) > 0:
        return 1.0
    from scipy.optimize import brentq  # late: it takes a fifth of a second to load

    return 1 - float(brentq(short, tiny, 1.0, xtol=1e-9))
