"""Canonical correlations from running sums: the directions of two vectors in which one says most about the other."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_RIDGE = 0.01  # on every channel's variance: else directions that hardly vary correlate by chance


class Canonical(NamedTuple):
    """Pairs of directions, the best correlated first. Along each, both sides have variance 1."""

    left: Float[Tensor, "pairs left"]
    right: Float[Tensor, "pairs right"]
    correlations: Float[Tensor, "pairs"]


class CanonicalFit:
    """Canonical correlation analysis (Hotelling, 1936) of the pairs of vectors seen so far."""

    def __init__(self) -> None:
        self.count = 0
        self._left_size = 0
        self._origin: Tensor | None = None  # that vectors are counted from, or a large mean would drown small variances
        self._sums: Tensor | None = None  # products of (left, right, 1) with themselves

    def add(self, left: Float[Tensor, "n left"], right: Float[Tensor, "n right"]) -> None:
        """Take further pairs."""
        rows = torch.cat([left, right], -1).float()
        if not len(rows):
            return
        if self._origin is None:
            self._origin = rows.mean(0)
        rows = torch.nn.functional.pad(rows - self._origin, (0, 1), value=1.0)
        products = (rows.T @ rows).double()
        self._sums = products if self._sums is None else self._sums.add_(products)
        self.count, self._left_size = self.count + len(rows), left.shape[-1]

    def solved(self) -> Canonical:
        """All pairs of directions, in float64: as many as the right side has channels.

        What they give is 0 on average, as nearly as linear maps without a constant can have it.

        Raises:
            ValueError: nothing was added.
        """
        if self._sums is None or self._origin is None:
            raise ValueError("directions of vectors that were never seen cannot be found")
        moments = self._sums / self.count
        offset, size = moments[:-1, -1], self._left_size
        covariance, mean = moments[:-1, :-1] - offset[:, None] * offset, self._origin + offset
        variances = covariance.diagonal().clamp(min=0)
        covariance += (_RIDGE * variances + 1e-6 * variances.mean() + 1e-12).diag()
        left, across, right = covariance[:size, :size], covariance[:size, size:], covariance[size:, size:]
        # The right side guessed from the left by least squares, and what takes the left directions' mean away.
        solutions = torch.linalg.solve(left, torch.cat([across, mean[:size, None]], 1))
        guess = solutions[:, :-1]
        values, vectors = torch.linalg.eigh(right)
        whiten = (vectors * values.rsqrt()) @ vectors.T
        shared, turned = torch.linalg.eigh(whiten @ (across.T @ guess) @ whiten)
        correlations = shared.flip(-1).clamp(min=1e-12, max=1.0).sqrt()
        rights = turned.flip(-1).T @ whiten
        lefts = rights @ guess.T / correlations[:, None]
        return Canonical(
            _without_mean(lefts, mean[:size], solutions[:, -1]),
            _without_mean(rights, mean[size:], whiten @ (whiten @ mean[size:])),
            correlations,
        )


def _without_mean(
    directions: Float[Tensor, "pairs size"], mean: Float[Tensor, "size"], towards: Float[Tensor, "size"]
) -> Float[Tensor, "pairs size"]:
    """Nearest, by least squares, to what they would give with a constant. `towards`: inverse covariance times `mean`."""
    return directions - (directions @ mean)[:, None] * towards / (1 + mean @ towards)
