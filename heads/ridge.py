"""Ridge regression from running sums: a linear layer that is solved for instead of trained."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

_RIDGE = 0.01  # on the mean of the inputs' squares


class RidgeFit:
    """The best affine (without `constant`: linear) map from inputs to outputs seen so far."""

    def __init__(self, in_features: int, constant: bool = True):
        self.in_features, self.constant = in_features, constant
        self.count = 0
        # Of inputs with a one (no constant: a zero) appended: products with themselves, with the outputs; and of the
        # outputs: squares and sums.
        self._sums: list[Tensor] | None = None

    def add(self, inputs: Float[Tensor, "n in"], outputs: Float[Tensor, "n out"]) -> None:
        """Take further examples."""
        x = torch.nn.functional.pad(inputs.float(), (0, 1), value=float(self.constant))
        y = outputs.float()
        sums = [part.double() for part in (x.T @ x, x.T @ y, y.square().sum(0), y.sum(0))]
        self.count += len(x)
        self._sums = sums if self._sums is None else [old + new for old, new in zip(self._sums, sums, strict=True)]

    def into(self, linear: nn.Linear) -> float:
        """Set the layer's weight and bias; the share of the outputs' variance that it explains (of what it was fitted to)."""
        if self._sums is None:
            return 0.0
        solution, explained = self._solved()
        with torch.no_grad():
            linear.weight.copy_(solution[:-1].T)
            linear.bias.copy_(solution[-1])
        return explained

    def folded(self, weight: Float[Tensor, "rows out"]) -> tuple[Float[Tensor, "rows in"], float]:
        """The product of `weight` and the map, which must have no constant; and the explained share, as :meth:`into`.

        Raises:
            ValueError: nothing was added, or the map has a constant.
        """
        if self._sums is None or self.constant:
            raise ValueError("only a map without a constant that has seen examples can be folded into a weight")
        solution, explained = self._solved()
        return (weight.double() @ solution[:-1].T).to(weight.dtype), explained

    def _solved(self) -> tuple[Float[Tensor, "in_and_one out"], float]:
        assert self._sums is not None
        gram, cross, squares, sums = self._sums
        strength = _RIDGE * gram.diagonal()[:-1].mean()
        penalty = torch.full_like(gram.diagonal(), float(strength))
        penalty[-1] = 1e-6 * self.count  # the constant is not held back
        solution = torch.linalg.solve(gram + penalty.diag(), cross)
        missed = squares.sum() - 2 * (solution * cross).sum() + (solution * (gram @ solution)).sum()
        spread = squares.sum() - sums.square().sum() / self.count
        return solution, float(1 - missed / spread)
