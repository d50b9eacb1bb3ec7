"""The tests' own tests: p-values are honest, power is what is claimed, and Holm is Holm."""

import numpy as np
import pytest
from scipy.stats import binom, chi2, chisquare, ncx2

from draftsmith.eval.audit_statistics import Counts, Pair, holm, noncentrality, run_test

PROBS = np.array([0.4, 0.3, 0.15, 0.1, 0.03, 0.02])


def drawn(rng, probs, size=200):
    return Counts(rng.multinomial(size, probs), PROBS)


def pair(rng, probs, size=200):
    return Pair(rng.multinomial(size, PROBS), rng.multinomial(size, probs))


def rejections(make, probs, level, runs, seed=0):
    rng = np.random.default_rng(seed)
    tests = [run_test("", [make(rng, probs)], rng, level, 1000) for _ in range(runs)]
    return sum(test.pvalue <= level for test in tests), tests


@pytest.mark.parametrize("make", [drawn, pair])
@pytest.mark.parametrize("level", [0.05, 0.2])
def test_false_alarms_are_as_rare_as_asked(make, level):
    runs = 200
    count, _ = rejections(make, PROBS, level, runs)
    assert count <= binom.ppf(0.999, runs, level)
    assert count >= binom.ppf(0.001, runs, level / 2)  # and not for lack of trying


@pytest.mark.parametrize("make", [drawn, pair])
def test_a_deviation_of_the_stated_size_is_found_with_the_stated_power(make):
    level = 0.01
    _, (test,) = rejections(make, PROBS, level, 1)
    shifted = PROBS + test.detectable * np.array([1, -0.6, -0.2, -0.15, -0.03, -0.02])
    assert np.abs(shifted - PROBS).sum() / 2 == pytest.approx(test.detectable)
    count, tests = rejections(make, shifted, level, 200)
    assert count >= binom.ppf(0.001, 200, 0.9)
    assert np.mean([test.variation for test in tests]) == pytest.approx(test.detectable, rel=0.25)


def test_parts_add_up_to_more_power():
    """A deviation that no part shows alone is seen in all together, and the statement says so."""
    rng = np.random.default_rng(1)
    shifted = PROBS + 0.08 * np.array([1, -1, 0, 0, 0, 0])
    parts = [drawn(rng, shifted, 150) for _ in range(12)]
    alone = [run_test("", [part], rng, 0.001, 10_000) for part in parts]
    together = run_test("", parts, rng, 0.001, 10_000)
    assert min(test.pvalue for test in alone) > 0.001 >= together.pvalue
    assert together.detectable < min(test.detectable for test in alone) / 1.5
    assert together.cells == 12 * len(PROBS)


def test_the_p_value_of_large_counts_is_pearsons():
    rng = np.random.default_rng(2)
    counts = np.array([4000, 3040, 1540, 960, 260, 200])
    test = run_test("", [Counts(counts, PROBS)], rng, 0.01, 200_000)
    # Twenty simulations as extreme as the data: a relative error of a fifth.
    assert test.pvalue == pytest.approx(chisquare(counts, PROBS * counts.sum()).pvalue, rel=0.7)
    assert test.variation == pytest.approx(np.abs(counts / counts.sum() - PROBS).sum() / 2)


def test_a_single_cell_cannot_deviate():
    test = run_test("", [Counts(np.array([7]), np.array([1.0]))], np.random.default_rng(0), 0.01, 100)
    assert test.pvalue == 1.0
    assert test.detectable == 1.0


@pytest.mark.parametrize("freedom", [1, 5, 40, 300])
@pytest.mark.parametrize("level", [0.05, 1e-4])
def test_noncentrality_is_that_of_the_chi_square_test(freedom, level):
    found = noncentrality(freedom, level)
    assert ncx2.sf(chi2.isf(level, freedom), freedom, found) == pytest.approx(0.9, abs=1e-6)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []
