"""Ridge regression from running sums: a linear layer that is solved for instead of trained."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

_ROWS_AT_ONCE = 2048  # what adding up their products costs beside the products themselves is then little
_RIDGE = 0.01  # on every input's mean square; between 0.001 and 0.1 the result hardly moved


class RidgeFit:
    """The best affine (without `constant`: linear) map from inputs to outputs seen so far.

    Every input's weights are held back as if its root mean square were 1: layers, channels and embeddings of a model differ
    in size by factors of a hundred.
    """

    def __init__(self, constant: bool = True):
        self.constant = constant
        self.count = 0
        self._waiting: list[tuple[Tensor, Tensor]] = []
        # Of inputs with a one (no constant: a zero) appended: products with themselves, with the outputs; and of the
        # outputs: squares and sums.
        self._sums: list[Tensor] | None = None

    def add(self, inputs: Float[Tensor, "n in"], outputs: Float[Tensor, "n out"]) -> None:
        """Take further examples."""
        self.count += len(inputs)
        self._waiting.append((inputs.float(), outputs.float()))
        if sum(len(x) for x, _ in self._waiting) >= _ROWS_AT_ONCE:
            self._add_up()

    def _add_up(self) -> None:
        inputs, outputs = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        x = torch.nn.functional.pad(inputs, (0, 1), value=float(self.constant))
        sums = [part.double() for part in (x.T @ x, x.T @ outputs, outputs.square().sum(0), outputs.sum(0))]
        self._sums = sums if self._sums is None else [old + new for old, new in zip(self._sums, sums, strict=True)]
        self._waiting.clear()

    @property
    def _all(self) -> list[Tensor]:
        """The sums over all examples."""
        if self._waiting:
            self._add_up()
        if self._sums is None:
            raise ValueError("a map that has seen no examples cannot be solved for")
        return self._sums

    def into(self, linear: nn.Linear) -> float:
        """Set the layer's weight and bias; the share of the outputs' variance that it explains (of what it was fitted to)."""
        if not self.count:
            return 0.0
        weight, constant, explained = self.solved()
        with torch.no_grad():
            linear.weight.copy_(weight)
            linear.bias.copy_(constant)
        return explained

    def folded(self, weight: Float[Tensor, "rows out"]) -> tuple[Float[Tensor, "rows in"], float]:
        """The product of `weight` and the map, which must have no constant; and the explained share, as :meth:`into`.

        Raises:
            ValueError: nothing was added, or the map has a constant.
        """
        if self.constant:
            raise ValueError("a map with a constant cannot be folded into a weight")
        mapping, _, explained = self.solved()
        return (weight.double() @ mapping).to(weight.dtype), explained

    def solved(self) -> tuple[Float[Tensor, "out in"], Float[Tensor, "out"], float]:
        """Weight and constant of the map, in float64, and the share of the outputs' variance that it explains.

        Raises:
            ValueError: nothing was added.
        """
        gram, cross, squares, _ = self._all
        penalty = _RIDGE * gram.diagonal().clamp(min=1e-12 * self.count)
        penalty[-1] = 1e-6 * self.count  # the constant is not held back
        solution = torch.linalg.solve(gram + penalty.diag(), cross)
        missed = squares.sum() - 2 * (solution * cross).sum() + (solution * (gram @ solution)).sum()
        return solution[:-1].T, solution[-1], 1 - float(missed) / self.spread

    @property
    def spread(self) -> float:
        """Squared distances of the outputs from their mean, all added up."""
        _, _, squares, sums = self._all
        return float(squares.sum() - sums.square().sum() / self.count)

    @property
    def input_products(self) -> Float[Tensor, "in in"]:
        """Inputs times inputs, a mean over the examples."""
        return self._all[0][:-1, :-1] / self.count

    @property
    def input_sizes(self) -> Float[Tensor, "in"]:
        """Root mean square of every input."""
        return self.input_products.diagonal().sqrt()

    @property
    def output_sizes(self) -> Float[Tensor, "out"]:
        """Root mean square of every output."""
        return (self._all[2] / self.count).sqrt()


def main_directions(weight: Float[Tensor, "out in"], input_products: Float[Tensor, "in in"]) -> Float[Tensor, "out in"]:
    """A linear map turned so that its outputs lie along their main directions, the largest first.

    `input_products`: inputs times inputs, as :attr:`RidgeFit.input_products` has them.
    """
    outputs = weight @ input_products @ weight.T
    return torch.linalg.eigh(outputs).eigenvectors.flip(-1).T @ weight
