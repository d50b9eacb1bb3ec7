"""Medusa's heads: each guesses one further token from the target's last hidden state (arXiv:2401.10774)."""

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu


class ResidualBlocks(nn.Module):
    """A stack of ``x + SiLU(linear(x))``. All weights are zero at the start, so that it begins as the identity."""

    def __init__(self, hidden_size: int, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(zeroed(nn.Linear(hidden_size, hidden_size)) for _ in range(num_layers))

    def forward(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """Same shape."""
        for layer in self.layers:
            hidden = hidden + silu(layer(hidden))
        return hidden


class MedusaTrunk(nn.Module):
    """One stack of residual blocks a head, ``blocks.{h}.layers.{l}``. Heads do not see one another's tokens."""

    sees_drafted = False

    def __init__(self, hidden_size: int, num_heads: int, num_layers: int):
        super().__init__()
        # A loop, not a product of a list: that would be one set of weights under many names.
        self.blocks = nn.ModuleList(ResidualBlocks(hidden_size, num_layers) for _ in range(num_heads))

    def prepare(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch prepared"]:
        """What all heads have in common: the target's hidden states."""
        return hidden

    def forward(
        self, head: int, prepared: Float[Tensor, "*batch prepared"], tokens: Int[Tensor, "*batch seen"]
    ) -> Float[Tensor, "*batch hidden"]:
        """What head `head` reads its logits from. `tokens` are not looked at."""
        return self.blocks[head](prepared)


def medusa_config(
    hidden_size: int, vocab_size: int, num_heads: int, num_layers: int, num_scored: int
) -> dict[str, object]:
    """The configuration that serving engines know Medusa heads by. `num_scored`: rows of an output projection, fewer than
    `vocab_size` where the vocabulary is cut.
    """
    cut: dict[str, object] = {"truncated_vocab_size": num_scored} if num_scored < vocab_size else {}
    return cut | {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        "medusa_fc_bias": True,
    }


def zeroed(linear: nn.Linear) -> nn.Linear:
    """The layer with all weights zero."""
    nn.init.zeros_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear
