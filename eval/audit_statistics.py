"""The hypothesis tests of the audit: goodness of fit, two samples, Holm's correction, and what they are able to find.

Every p-value comes from simulating the null hypothesis itself, so that it holds for small counts too and the chance of
a false alarm is at most what was asked for.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

POWER = 0.9
_ENOUGH = 20  # simulations as extreme as the data after which the p-value is known well enough
_CHUNK = 256


class Counts(NamedTuple):
    """How often each cell of one distribution was drawn."""

    counts: Int[np.ndarray, " cells"]
    probs: Float[np.ndarray, " cells"]  # what they would be drawn with


class Pair(NamedTuple):
    """How often each cell was drawn in each of two samples of one size."""

    first: Int[np.ndarray, " cells"]
    second: Int[np.ndarray, " cells"]


class Test(NamedTuple):
    """The outcome of one test."""

    name: str
    pvalue: float
    cells: int
    variation: float  # total variation between what was drawn and what it was held against, over the cells
    by_chance: float  # what to expect of it where nothing is wrong
    detectable: float  # any total variation over the cells from this on is found with 90 % power


def goodness_of_fit(
    name: str, parts: Sequence[Counts], rng: np.random.Generator, level: float, simulations: int
) -> Test:
    """Were all `parts` drawn with their probabilities? Pearson's statistic, added up over the parts.

    `level` is the significance the test is held to (for what is detectable), `simulations` the most that are made.
    """

    def statistic(draws: np.ndarray, part: Counts) -> np.ndarray:
        expected = part.counts.sum() * part.probs
        return ((draws - expected) ** 2 / expected).sum(-1)

    def variation(draws: np.ndarray, part: Counts) -> np.ndarray:
        return np.abs(draws - part.counts.sum() * part.probs).sum(-1) / 2

    def simulate(part: Counts, size: int) -> np.ndarray:
        return rng.multinomial(part.counts.sum(), part.probs, size=size)

    total = sum(int(part.counts.sum()) for part in parts)
    pvalue, by_chance = _simulated(parts, [part.counts for part in parts], statistic, variation, simulate, simulations)
    freedom = sum(len(part.probs) - 1 for part in parts)
    return Test(
        name,
        pvalue,
        sum(len(part.probs) for part in parts),
        sum(float(variation(part.counts, part)) for part in parts) / total,
        by_chance / total,
        min(1.0, math.sqrt(noncentrality(freedom, level) / total) / 2),
    )


def two_samples(name: str, parts: Sequence[Pair], rng: np.random.Generator, level: float, simulations: int) -> Test:
    """Were both samples of every part drawn from one distribution? The permutation test of Pearson's statistic.

    Given the cells' totals, a permutation deals them out as a multivariate hypergeometric draw, which is simulated.
    """

    def statistic(draws: np.ndarray, part: Pair) -> np.ndarray:
        both = part.first + part.second
        return ((2 * draws - both) ** 2 / both).sum(-1)

    def variation(draws: np.ndarray, part: Pair) -> np.ndarray:
        return np.abs(2 * draws - part.first - part.second).sum(-1) / 2

    def simulate(part: Pair, size: int) -> np.ndarray:
        return rng.multivariate_hypergeometric(
            part.first + part.second, part.first.sum(), size=size, method="marginals"
        )

    total = sum(int(part.first.sum()) for part in parts)
    pvalue, by_chance = _simulated(parts, [part.first for part in parts], statistic, variation, simulate, simulations)
    freedom = sum(len(part.first) - 1 for part in parts)
    return Test(
        name,
        pvalue,
        sum(len(part.first) for part in parts),
        sum(float(variation(part.first, part)) for part in parts) / total,
        by_chance / total,
        min(1.0, math.sqrt(noncentrality(freedom, level) / (2 * total))),
    )


def _simulated(
    parts: Sequence,
    observed: Sequence[np.ndarray],
    statistic: Callable,
    variation: Callable,
    simulate: Callable,
    most: int,
) -> tuple[float, float]:
    """The p-value of the summed statistic, and the mean summed variation under the null hypothesis.

    Simulations end with the twentieth that is as extreme as the data; the p-value is then 20 over their number
    (Besag and Clifford 1991, exact), else (1 + the extreme ones) / (1 + all).
    """
    seen = sum(float(statistic(draws, part)) for draws, part in zip(observed, parts, strict=True))
    extreme, done, by_chance = 0, 0, 0.0
    while done < most:
        size = min(_CHUNK, most - done)
        draws = [simulate(part, size) for part in parts]
        sums = np.sum([statistic(each, part) for each, part in zip(draws, parts, strict=True)], axis=0)
        if not done:
            by_chance = float(np.sum([variation(each, part).mean() for each, part in zip(draws, parts, strict=True)]))
        hits = np.flatnonzero(sums >= seen * (1 - 1e-12))
        if extreme + len(hits) >= _ENOUGH:
            return _ENOUGH / (done + int(hits[_ENOUGH - extreme - 1]) + 1), by_chance
        extreme, done = extreme + len(hits), done + size
    return (1 + extreme) / (1 + done), by_chance


def simulations_for(tests: int, significance: float) -> int:
    """Simulations that let a p-value fall well below what Holm asks of the smallest of `tests`."""
    return math.ceil(10 * tests / significance)


def holm(pvalues: Sequence[float]) -> list[float]:
    """p-values corrected so that the chance of any false alarm is at most the significance (Holm 1979)."""
    order = sorted(range(len(pvalues)), key=lambda i: pvalues[i])
    corrected, largest = [1.0] * len(pvalues), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(pvalues) - rank) * pvalues[i]))
        corrected[i] = largest
    return corrected


def noncentrality(freedom: int, level: float, power: float = POWER) -> float:
    """The noncentrality at which a chi-square test of this `level` rejects with this `power`.

    A deviation of total variation TV from n draws has at least 4 n TV² (Cauchy-Schwarz), or 2 n TV² between two samples
    of n each, whatever its shape.
    """
    if freedom == 0:
        return math.inf  # a single cell: nothing can deviate
    critical = _solve(lambda x: _chi_square_above(freedom, 0.0, x) <= level)
    return _solve(lambda x: _chi_square_above(freedom, x, critical) >= power)


def _chi_square_above(freedom: int, noncentral: float, x: float) -> float:
    """P(chi-square > x): a Poisson mixture of central ones."""
    mean = noncentral / 2
    spread = 10 * math.sqrt(mean) + 20
    more = torch.arange(max(0, math.floor(mean - spread)), math.ceil(mean + spread) + 1, dtype=torch.float64)
    weights = (torch.xlogy(more, torch.tensor(mean, dtype=torch.float64)) - mean - torch.lgamma(more + 1)).exp()
    above = torch.special.gammaincc(freedom / 2 + more, torch.full_like(more, x / 2))
    return float((weights * above).sum())


def _solve(holds: Callable[[float], bool]) -> float:
    """The smallest x >= 0 from which on the monotone `holds`, by bisection."""
    high = 1.0
    while not holds(high):
        high *= 2
    low = 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
