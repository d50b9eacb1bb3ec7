"""Ridge regression from running sums against the plain one."""

import pytest
import torch
from torch import nn

from draftsmith.distill.ridge import RidgeFit


def examples(count=5000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([100.0, 1.0, 0.01])
    x = torch.randn(count, 3, generator=generator) * sizes
    truth = torch.tensor([[0.01, 2.0, 0.0], [0.0, -1.0, 50.0]])
    return x, x @ truth.T + torch.tensor([3.0, -1.0]) + 0.1 * torch.randn(count, 2, generator=generator), truth


@pytest.mark.parametrize("pieces", [1, 3, 700])
def test_inputs_of_all_sizes_are_solved_for_in_any_portions(pieces):
    x, y, truth = examples()
    fit = RidgeFit()
    for a, b in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
        fit.add(a, b)
    linear = nn.Linear(3, 2)
    explained = fit.into(linear)
    size = x.square().mean(0).sqrt()
    torch.testing.assert_close(linear.weight * size, truth * size, rtol=0.02, atol=0.02)
    torch.testing.assert_close(linear.bias, torch.tensor([3.0, -1.0]), rtol=0.02, atol=0.02)
    missed = (y - linear(x)).square().sum()
    assert explained == pytest.approx(1 - float(missed.detach() / (y - y.mean(0)).square().sum()), abs=1e-5)
    torch.testing.assert_close(fit.input_sizes.float(), size)
    torch.testing.assert_close(fit.output_sizes.float(), y.square().mean(0).sqrt())


def test_a_map_without_a_constant_is_folded_into_a_weight():
    x, y, truth = examples()
    y = y - torch.tensor([3.0, -1.0])
    fit = RidgeFit(constant=False)
    fit.add(x, y)
    weight = torch.tensor([[1.0, 2.0]])
    folded, explained = fit.folded(weight)
    size = x.square().mean(0).sqrt()
    torch.testing.assert_close(folded * size, weight @ truth * size, rtol=0.03, atol=0.03)
    assert 0.99 < explained < 1
    with pytest.raises(ValueError, match="with a constant"):
        RidgeFit().folded(weight)


def test_without_examples_there_is_nothing_to_solve():
    linear = nn.Linear(3, 2)
    before = linear.weight.clone()
    assert RidgeFit().into(linear) == 0.0
    assert torch.equal(linear.weight, before)
    with pytest.raises(ValueError, match="no examples"):
        RidgeFit().solved()
