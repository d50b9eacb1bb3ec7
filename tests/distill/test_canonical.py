"""Canonical correlations: against another way to them, and the promises that a linear map without a constant needs."""

import pytest
import torch

from draftsmith.distill.canonical import CanonicalFit


def pairs(count=4000, shared=(0.9, 0.5, 0.1), left=6, right=4, mean=3.0, seed=0):
    """Vectors that have some directions in common, with these correlations, turned, scaled and off the origin."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    strength = torch.tensor(shared)
    x, y = normal(count, left), normal(count, right)
    known = x[:, : len(shared)]
    y[:, : len(shared)] = strength * known + (1 - strength**2).sqrt() * y[:, : len(shared)]
    turned = [side @ torch.linalg.qr(normal(side.shape[1], side.shape[1])).Q for side in (x, y)]
    return 5 * turned[0] + mean, turned[1] / 5 - mean


def solved(x, y, parts=7):
    fit = CanonicalFit()
    for rows in zip(x.chunk(parts), y.chunk(parts), strict=True):
        fit.add(*rows)
    return fit.solved()


def test_correlations_are_those_of_orthonormal_bases():
    """The singular values of Q_left^T Q_right, where Q are orthonormal bases of the centred columns (Björck, Golub 1973)."""
    x, y = pairs()
    bases = [torch.linalg.qr((side - side.mean(0)).double()).Q for side in (x, y)]
    wanted = torch.linalg.svdvals(bases[0].T @ bases[1])
    torch.testing.assert_close(solved(x, y).correlations, wanted, atol=0.02, rtol=0)
    assert wanted[:3].tolist() == pytest.approx([0.9, 0.5, 0.1], abs=0.06)


def test_both_sides_have_variance_one_and_pairs_correlate_with_each_other_alone():
    x, y = pairs(mean=0.0)
    found = solved(x, y)
    right = y.double() @ found.right.T
    torch.testing.assert_close(right.T.cov(), torch.eye(4, dtype=torch.float64), atol=0.03, rtol=0)
    left = x.double() @ found.left.T
    torch.testing.assert_close(left.var(0)[:2], torch.ones(2, dtype=torch.float64), atol=0.1, rtol=0)
    across = torch.cat([left, right], 1).T.corrcoef()[:4, 4:]
    torch.testing.assert_close(across[:2, :2], found.correlations[:2].diag(), atol=0.05, rtol=0)


def test_what_the_directions_give_is_zero_on_average():
    """A mean ten times the spread, as embeddings and hidden states have in some channels."""
    x, y = pairs(mean=50.0)
    found = solved(x, y)
    for side, directions in ((x, found.left), (y, found.right)):
        mean = (side.double() @ directions.T).mean(0)
        torch.testing.assert_close(mean, torch.zeros(4, dtype=torch.float64), atol=0.05, rtol=0)


def test_channels_that_never_vary_correlate_with_nothing():
    x, y = pairs()
    x, y = torch.cat([x, torch.full((len(x), 2), 3.3)], 1), torch.cat([y, torch.full((len(y), 1), -1234.5)], 1)
    found = solved(x, y)
    assert torch.isfinite(found.left).all()
    assert torch.isfinite(found.right).all()
    assert found.correlations[0] == pytest.approx(0.9, abs=0.05)
    assert found.correlations[-1] < 0.1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_handful_of_pairs_gives_directions_all_the_same(count):
    x, y = pairs(count)
    assert all(bool(torch.isfinite(part).all()) for part in solved(x + 100.0, y, parts=1))


def test_nothing_seen_is_an_error():
    with pytest.raises(ValueError, match="never seen"):
        CanonicalFit().solved()
