"""A start for heads on the target's last hidden state that is solved for, not trained: a linear map of every head."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..distill.ridge import RidgeFit
from .hydra import HydraTrunk
from .trunk import DraftHeads


class Examples(NamedTuple):
    """What a head starts from at some positions, and the target's hidden states where the tokens are predicted."""

    head: int
    prepared: Float[Tensor, "n prepared"]
    seen: Int[Tensor, "n seen"]  # the newest emitted token and the draft tokens before the head's own
    wanted: Float[Tensor, "n hidden"]


def can_be_fitted(heads: DraftHeads) -> bool:
    """Whether heads have a linear map that can be solved for: Hydra's own, or projections of their own."""
    return isinstance(heads.trunk, HydraTrunk) or heads.outputs.projection == "own"


def widest_map(heads: DraftHeads) -> int:
    """Inputs of the widest linear map that :func:`fit_heads` solves for: Hydra's last head reads all tokens before it."""
    if isinstance(heads.trunk, HydraTrunk):
        return heads.trunk.linear(heads.num_heads - 1).in_features
    return heads.outputs.draft_head(0).weight.shape[1]


@torch.no_grad()
def fit_heads(heads: DraftHeads, examples: Iterable[Examples]) -> float:
    """Solve by ridge regression: what the target's projection reads there is what a head's projection should. Hydra's maps
    are its own; of other heads they are folded into projections of their own.

    Returns the share of the variance of the hidden states that head 0's map explains.
    """
    trunk = heads.trunk
    fits = [RidgeFit(constant=isinstance(trunk, HydraTrunk)) for _ in range(heads.num_heads)]
    for one in examples:
        if isinstance(trunk, HydraTrunk):
            read = trunk.read(one.prepared, one.seen)
        else:
            read = heads.states(one.head, one.prepared, one.seen)
        fits[one.head].add(read, one.wanted)
    explained = []
    for head, fit in enumerate(fits):
        if isinstance(trunk, HydraTrunk):
            explained.append(fit.into(trunk.linear(head)))
        elif fit.count:
            explained.append(heads.outputs.take_projection(head, fit))
    return explained[0] if explained else 0.0
