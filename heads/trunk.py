"""Draft heads: a trunk that makes what is read, and projections that make logits of it."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..models.loading import load_exactly
from .outputs import HeadOutputs
from .prefix import PrefixAttention


@runtime_checkable
class Trunk(Protocol):
    """What differs between kinds of heads. Head k guesses the token k + 2 positions after the one that `hidden` belongs
    to: the k-th draft token (from 0) after the newest emitted one. Every trunk is a ``nn.Module`` of its own.
    """

    sees_drafted: bool  # whether heads look at `tokens`

    def prepare(self, hidden: Tensor) -> Tensor:
        """What all heads have in common, made once of the target's hidden states."""
        ...

    def __call__(self, head: int, prepared: Tensor, tokens: Tensor) -> Tensor:
        """``[*batch, hidden]``; `tokens` ``[*batch, head + 1]``: the newest emitted one and the draft tokens after it."""
        ...


class DraftHeads(nn.Module):
    """All heads of a drafter: what is trained and saved."""

    def __init__(self, trunk: nn.Module, outputs: HeadOutputs, num_heads: int, prefix: PrefixAttention | None = None):
        """`prefix`: a layer over the target's hidden states of all positions so far, whose output the trunk reads."""
        super().__init__()
        assert isinstance(trunk, Trunk)
        self.trunk, self.outputs, self.num_heads, self.prefix = trunk, outputs, num_heads, prefix

    @property
    def sees_drafted(self) -> bool:
        """Whether a head must wait for the tokens of those before it."""
        return bool(self.trunk.sees_drafted)

    def prepare(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch prepared"]:
        """The target's hidden states in the heads' own type, as far as all heads have it in common."""
        return self.trunk.prepare(hidden.to(self.dtype))  # pyright: ignore[reportCallIssue]

    def states(
        self, head: int, prepared: Float[Tensor, "*batch prepared"], tokens: Int[Tensor, "*batch seen"]
    ) -> Float[Tensor, "*batch hidden"]:
        """What a head reads its logits from."""
        return self.trunk(head, prepared, tokens)

    def logits(
        self, head: int, prepared: Float[Tensor, "*batch prepared"], tokens: Int[Tensor, "*batch seen"]
    ) -> Float[Tensor, "*batch scored"]:
        """Logits of the scored ids."""
        return self.outputs.logits(self.states(head, prepared, tokens), head)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.trunk.parameters()).dtype

    def saved_state(self) -> dict[str, Tensor]:
        """Tensors under the names that they have on disk: trunk and projections side by side."""
        prefix = {} if self.prefix is None else self.prefix.state_dict(prefix="prefix.")
        return {**self.trunk.state_dict(), **self.outputs.state_dict(), **prefix}

    def load_saved(self, tensors: dict[str, Tensor], name: str) -> None:
        """Take what :meth:`saved_state` gave.

        Raises:
            BadInput: a tensor is missing, of another shape, or unknown; the line starts with `name`.
        """
        trunk = self.trunk.state_dict().keys()

        def place(key: str) -> str:
            return key if key.startswith("prefix.") else ("trunk." if key in trunk else "outputs.") + key

        load_exactly(self, {place(key): value for key, value in tensors.items()}, name)
