"""Ridge regression from running sums: a linear layer that is solved for instead of trained."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

_RIDGE = 0.01  # on the mean of the inputs' squares


class RidgeFit:
    """The best affine map from inputs to outputs seen so far."""

    def __init__(self, in_features: int):
        self.in_features = in_features
        self.count = 0
        # Of inputs with a one appended: products with themselves, with the outputs; and the outputs' squares.
        self._sums: list[Tensor] | None = None

    def add(self, inputs: Float[Tensor, "n in"], outputs: Float[Tensor, "n out"]) -> None:
        """Take further examples."""
        x = torch.nn.functional.pad(inputs.float(), (0, 1), value=1.0)
        y = outputs.float()
        sums = [part.double() for part in (x.T @ x, x.T @ y, y.square().sum(0))]
        self.count += len(x)
        self._sums = sums if self._sums is None else [old + new for old, new in zip(self._sums, sums, strict=True)]

    def into(self, linear: nn.Linear) -> float:
        """Set the layer's weight and bias; the share of the outputs' variance that it explains (of what it was fitted to)."""
        if self._sums is None:
            return 0.0
        gram, cross, squares = self._sums
        strength = _RIDGE * gram.diagonal()[:-1].mean()
        penalty = torch.full_like(gram.diagonal(), float(strength))
        penalty[-1] = 1e-6 * self.count  # the constant is not held back
        solution = torch.linalg.solve(gram + penalty.diag(), cross)
        with torch.no_grad():
            linear.weight.copy_(solution[:-1].T)
            linear.bias.copy_(solution[-1])
        missed = squares.sum() - 2 * (solution * cross).sum() + (solution * (gram @ solution)).sum()
        spread = squares.sum() - cross[-1].square().sum() / self.count
        return float(1 - missed / spread)
