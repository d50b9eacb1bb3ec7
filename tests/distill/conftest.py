"""Random cases for the chunked loss, and the plain loss to compare it with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftsmith.distill import chunked
from draftsmith.distill.chunked import DraftHead, LossSum, chunked_loss
from draftsmith.distill.chunked_targets import TargetHidden, TargetTopK
from draftsmith.distill.mixture import Mixture


@dataclass
class Case:
    """Random hidden states and heads; what wants a gradient is a leaf."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target_hidden: Tensor
    target_weight: Tensor
    tokens: Tensor
    weights: Tensor
    post: Callable[[Tensor], Tensor] | None = None

    @property
    def head(self) -> DraftHead:
        return DraftHead(self.weight, self.bias, self.post)

    @property
    def target(self) -> TargetHidden:
        return TargetHidden(self.target_hidden, self.target_logits)

    def target_logits(self, hidden: Tensor | None = None) -> Tensor:
        return (self.target_hidden if hidden is None else hidden) @ self.target_weight.t()

    def draft_logits(self) -> Tensor:
        logits = nn.functional.linear(self.hidden, self.weight, self.bias)
        return logits if self.post is None else self.post(logits)

    def chunked(self, mixture: Mixture, target: TargetHidden | TargetTopK | None = None, **settings: Any) -> LossSum:
        target = self.target if target is None else target
        return chunked_loss(mixture, self.hidden, self.head, target, self.tokens, self.weights, **settings)

    def plain(self, mixture: Mixture) -> Tensor:
        return (mixture(self.draft_logits(), self.target_logits(), self.tokens) * self.weights).sum()

    def gradients(self, value: Tensor) -> list[Tensor]:
        leaves = [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf is not None and leaf.requires_grad]
        return list(torch.autograd.grad(value, leaves))

    def assert_same(self, found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
        """Equal values and gradients: to `tolerance`, times the loss or the largest entry where these exceed 1."""
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        size = max(1.0, expected.abs().item())  # a floored probability costs hundreds of nats, which gradients cancel
        for one, other in zip(self.gradients(found), self.gradients(expected), strict=True):
            assert one.dtype == other.dtype
            atol = tolerance * max(size, other.abs().max().item())
            torch.testing.assert_close(one, other, atol=atol, rtol=tolerance)


def _make_case(
    seed: int, tokens: int = 7, vocab: int = 11, width: int = 5, bias: bool = True, dtype: torch.dtype = torch.float32
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return Case(
        normal(tokens, width).requires_grad_(),
        normal(vocab, width).requires_grad_(),
        normal(vocab).requires_grad_() if bias else None,
        normal(tokens, width + 1),
        normal(vocab, width + 1),
        torch.randint(-1, vocab, (tokens,), generator=generator),
        torch.rand(tokens, generator=generator) + 0.1,
    )


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    """``make_case(seed, tokens=7, vocab=11, width=5, bias=True, dtype=torch.float32)``"""
    return _make_case


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, so that small cases have several in a chunk."""
    monkeypatch.setitem(chunked.BLOCK_LOGITS, "cpu", 32)
