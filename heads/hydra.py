"""Hydra's heads: each also sees the draft tokens before its own (arXiv:2402.05109)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu

from ..models.target import Target
from .medusa import ResidualBlocks, zeroed


class HydraHead(nn.Module):
    """Head k reads ``[hidden, embedding of the newest emitted token, embeddings of the k draft tokens after it]``.

    A linear map and a SiLU layer bring these to the hidden size, residual SiLU blocks follow. At the start the hidden state
    passes through.
    """

    def __init__(self, hidden_size: int, num_tokens: int, num_layers: int):
        super().__init__()
        size = (1 + num_tokens) * hidden_size
        self.linear = zeroed(nn.Linear(size, hidden_size))
        with torch.no_grad():
            self.linear.weight[:, :hidden_size].fill_diagonal_(1.0)
        self.mix = nn.Linear(size, hidden_size)
        self.out = zeroed(nn.Linear(hidden_size, hidden_size))
        self.blocks = ResidualBlocks(hidden_size, num_layers - 1)

    def forward(self, read: Float[Tensor, "*batch read"]) -> Float[Tensor, "*batch hidden"]:
        """`read`: the hidden state and the tokens' embeddings, end to end."""
        return self.blocks(self.linear(read) + self.out(silu(self.mix(read))))


class HydraTrunk(nn.Module):
    """One network a head; the target's embedding table is used, not held.

    Embeddings are brought to a root mean square of 1 (as the hidden states after a final norm about are): their size
    differs from family to family by factors of a hundred.
    """

    sees_drafted = True

    def __init__(self, target: Target, num_heads: int, num_layers: int):
        super().__init__()
        hidden = target.hidden_size
        self.heads = nn.ModuleList(HydraHead(hidden, head + 1, num_layers) for head in range(num_heads))
        self._embed = (target.model.get_input_embeddings(),)  # in a tuple: not a submodule, not trained

    def prepare(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch prepared"]:
        """What all heads have in common: the target's hidden states."""
        return hidden

    def forward(
        self, head: int, prepared: Float[Tensor, "*batch prepared"], tokens: Int[Tensor, "*batch seen"]
    ) -> Float[Tensor, "*batch hidden"]:
        """What head `head` reads its logits from; `tokens`: the newest emitted one and `head` draft tokens after it."""
        return self.heads[head](self.read(prepared, tokens))

    @torch.no_grad()
    def _embedded(self, tokens: Int[Tensor, "*batch seen"]) -> Float[Tensor, "*batch seen hidden"]:
        embedded = self._embed[0](tokens)
        return nn.functional.rms_norm(embedded, embedded.shape[-1:])

    def read(
        self, prepared: Float[Tensor, "*batch prepared"], tokens: Int[Tensor, "*batch seen"]
    ) -> Float[Tensor, "*batch read"]:
        """What the head for so many tokens reads."""
        return torch.cat([prepared, self._embedded(tokens).to(prepared.dtype).flatten(-2)], -1)

    def linear(self, head: int) -> nn.Linear:
        """The linear map of a head, from what it reads to the hidden size."""
        own = self.heads[head]
        assert isinstance(own, HydraHead)
        return own.linear
