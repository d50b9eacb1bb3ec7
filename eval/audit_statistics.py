"""The hypothesis tests of the audit: goodness of fit, two samples, Holm's correction, and what they are able to find.

Every p-value comes from simulating the null hypothesis itself, so that it holds for small counts too and the chance of
a false alarm is at most what was asked for.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

POWER = 0.9
_ENOUGH = 20  # simulations as extreme as the data after which the p-value is known well enough
_CHUNK = 256


class Counts(NamedTuple):
    """How often each cell was drawn, and the probabilities it should have been drawn with."""

    counts: Int[np.ndarray, " cells"]
    probs: Float[np.ndarray, " cells"]

    @property
    def observed(self) -> Int[np.ndarray, " cells"]:
        """What is compared with simulated draws."""
        return self.counts

    def statistic(self, draws: Int[np.ndarray, "draws cells"]) -> Float[np.ndarray, " draws"]:
        """Pearson's, against the expected counts."""
        expected = self.counts.sum() * self.probs
        return ((draws - expected) ** 2 / expected).sum(-1)

    def variation(self, draws: Int[np.ndarray, "draws cells"]) -> Float[np.ndarray, " draws"]:
        """Total variation times the number of samples."""
        return np.abs(draws - self.counts.sum() * self.probs).sum(-1) / 2

    def simulate(self, rng: np.random.Generator, size: int) -> Int[np.ndarray, "draws cells"]:
        """Draws with the probabilities."""
        return rng.multinomial(self.counts.sum(), self.probs, size=size)


class Pair(NamedTuple):
    """How often each cell was drawn in each of two samples of one size."""

    first: Int[np.ndarray, " cells"]
    second: Int[np.ndarray, " cells"]

    @property
    def observed(self) -> Int[np.ndarray, " cells"]:
        """What is compared with simulated draws: the other sample follows from the totals."""
        return self.first

    def statistic(self, draws: Int[np.ndarray, "draws cells"]) -> Float[np.ndarray, " draws"]:
        """Pearson's, between the two samples."""
        both = self.first + self.second
        return ((2 * draws - both) ** 2 / both).sum(-1)

    def variation(self, draws: Int[np.ndarray, "draws cells"]) -> Float[np.ndarray, " draws"]:
        """Total variation between the two samples times their size."""
        return np.abs(2 * draws - self.first - self.second).sum(-1) / 2

    def simulate(self, rng: np.random.Generator, size: int) -> Int[np.ndarray, "draws cells"]:
        """First samples after random permutations of both: the cells' totals dealt out anew."""
        totals = self.first + self.second
        return rng.multivariate_hypergeometric(totals, self.first.sum(), size=size, method="marginals")


class Test(NamedTuple):
    """The outcome of one test."""

    name: str
    pvalue: float
    cells: int
    variation: float  # total variation between what was drawn and what it was held against, over the cells
    by_chance: float  # what to expect of it where nothing is wrong
    detectable: float  # any total variation over the cells from this on is found with 90 % power


def run_test(
    name: str, parts: Sequence[Counts] | Sequence[Pair], rng: np.random.Generator, level: float, simulations: int
) -> Test:
    """Were all `parts` drawn as they should be? Pearson's statistic, added up over the parts.

    Of `Counts` this is a test of goodness of fit, of `Pair` the permutation test of two samples. `level` is the
    significance that the test is held to (for what is detectable), `simulations` the most that are made.
    """
    total = sum(int(part.observed.sum()) for part in parts)
    pvalue, by_chance = _simulated(parts, rng, simulations)
    cells = sum(len(part.observed) for part in parts)
    needed = math.sqrt(noncentrality(cells - len(parts), level) / total)
    return Test(
        name,
        pvalue,
        cells,
        sum(part.variation(part.observed[None]).item() for part in parts) / total,
        by_chance / total,
        min(1.0, needed / math.sqrt(2) if isinstance(parts[0], Pair) else needed / 2),
    )


def _simulated(parts: Sequence[Counts] | Sequence[Pair], rng: np.random.Generator, most: int) -> tuple[float, float]:
    """The p-value of the summed statistic, and the mean summed variation where nothing is wrong.

    Simulations end with the twentieth that is as extreme as the data; the p-value is then 20 over their number
    (Besag and Clifford 1991, exact), else (1 + the extreme ones) / (1 + all).
    """
    seen = sum(part.statistic(part.observed[None]).item() for part in parts)
    extreme, done, by_chance = 0, 0, 0.0
    while done < most:
        size = min(_CHUNK, most - done)
        draws = [part.simulate(rng, size) for part in parts]
        sums = np.sum([part.statistic(each) for part, each in zip(parts, draws, strict=True)], axis=0)
        if not done:
            by_chance = sum(part.variation(each).mean().item() for part, each in zip(parts, draws, strict=True))
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


@lru_cache(maxsize=256)
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
