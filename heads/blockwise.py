"""Blockwise parallel decoding: one feed-forward layer makes the states of all heads (arXiv:1811.03115, section 4)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from .medusa import zeroed


class BlockwiseTrunk(nn.Module):
    """``hidden + output(relu(input(hidden)))``: from hidden to heads · inner size, and on to heads · hidden.

    Heads share all of the inner layer, each has its own rows of the second product. That starts at zero, so that each head
    begins as the target's own output.
    """

    sees_drafted = False

    def __init__(self, hidden_size: int, num_heads: int, inner_size: int):
        super().__init__()
        self.hidden_size = hidden_size
        self.input = nn.Linear(hidden_size, num_heads * inner_size)
        self.output = zeroed(nn.Linear(num_heads * inner_size, num_heads * hidden_size))

    def prepare(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch prepared"]:
        """What all heads have in common: the hidden state and the inner layer, side by side."""
        return torch.cat([hidden, relu(self.input(hidden))], -1)

    def forward(
        self, head: int, prepared: Float[Tensor, "*batch prepared"], tokens: Int[Tensor, "*batch seen"]
    ) -> Float[Tensor, "*batch hidden"]:
        """What head `head` reads its logits from. `tokens` are not looked at."""
        hidden, inner = prepared[..., : self.hidden_size], prepared[..., self.hidden_size :]
        rows = slice(head * self.hidden_size, (head + 1) * self.hidden_size)
        return hidden + linear(inner, self.output.weight[rows], self.output.bias[rows])
