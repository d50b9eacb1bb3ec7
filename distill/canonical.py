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
        self._sums: Tensor | None = None  # products of (left, right, 1) with themselves

    def add(self, left: Float[Tensor, "n left"], right: Float[Tensor, "n right"]) -> None:
        """Take further pairs."""
        rows = torch.nn.functional.pad(torch.cat([left, right], -1).float(), (0, 1), value=1.0)
        products = (rows.T @ rows).double()
        self._sums = products if self._sums is None else self._sums + products
        self.count, self._left_size = self.count + len(rows), left.shape[-1]

    def solved(self) -> Canonical:
        """All pairs of directions, in float64: as many as the right side has channels.

        What the left ones give is 0 on average, as nearly as a linear map without a constant can have it; what the right
        ones give has a mean.

        Raises:
            ValueError: nothing was added.
        """
        if self._sums is None:
            raise ValueError("directions of vectors that were never seen cannot be found")
        moments = self._sums / self.count
        mean, size = moments[:-1, -1], self._left_size
        covariance = moments[:-1, :-1] - mean[:, None] * mean
        covariance += _RIDGE * covariance.diagonal().clamp(min=1e-12).diag()
        left, across, right = covariance[:size, :size], covariance[:size, size:], covariance[size:, size:]
        values, vectors = torch.linalg.eigh(right)
        whiten = (vectors * values.rsqrt()) @ vectors.T
        guess = torch.linalg.solve(left, across)  # of the right side, by least squares
        shared, turned = torch.linalg.eigh(whiten @ (across.T @ guess) @ whiten)
        correlations = shared.flip(-1).clamp(min=1e-12, max=1.0).sqrt()
        rights = turned.flip(-1).T @ whiten
        lefts = rights @ guess.T / correlations[:, None]
        # Nearest, by least squares, to what they would give with a constant.
        towards = torch.linalg.solve(left, mean[:size])
        lefts -= (lefts @ mean[:size])[:, None] * towards / (1 + mean[:size] @ towards)
        return Canonical(lefts, rights, correlations)
