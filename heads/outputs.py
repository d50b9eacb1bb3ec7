"""From what heads compute to logits: the target's output projection, one of their own, or the target's with a trained
low-rank update; over all ids or over those of a cut vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..distill.chunked import DraftHead
from ..distill.ridge import RidgeFit
from ..models.head import OutputHead, split
from ..models.target import Target

Projection = Literal["shared", "own", "low_rank"]


class HeadOutputs(nn.Module):
    """One output projection a head. Only what is trained is held: a shared one stays the target's.

    ``lm_heads.{h}`` are projections of their own; ``downs.{h}`` and ``ups.{h}`` the factors of a low-rank update
    ``W + up · down``, where W is the target's. At the start each gives the target's logits.
    """

    def __init__(
        self,
        target: Target,
        num_heads: int,
        projection: Projection = "shared",
        rank: int = 64,
        kept_ids: Int[Tensor, "kept"] | None = None,
    ):
        """`kept_ids`: the ids that are scored; None: all of the target's.

        Sizes come from the target's configuration: a sharded target's own parameters are empty here and are gathered for
        copying only.
        """
        super().__init__()
        head = split(target.model)[1]
        hidden, self.vocab_size = target.hidden_size, target.vocab_size
        self.kept_ids = None if kept_ids is None else kept_ids.to(target.device)
        scored = self.vocab_size if kept_ids is None else len(kept_ids)
        with whole(head.linear):
            base = head if self.kept_ids is None else head.rows(self.kept_ids)
            if projection == "own":
                self.lm_heads = nn.ModuleList(_copy(base.linear, hidden, scored) for _ in range(num_heads))
        if projection == "low_rank":
            self.downs = nn.ModuleList(nn.Linear(hidden, rank, bias=False) for _ in range(num_heads))
            self.ups = nn.ModuleList(nn.Linear(rank, scored, bias=False) for _ in range(num_heads))
            for up in self.ups:
                nn.init.zeros_(up.weight)  # pyright: ignore[reportArgumentType]
        self.projection: Projection = projection
        self.num_scored = scored
        self._base = (base.requires_grad_(False) if self.kept_ids is not None else base,)  # not a submodule: frozen

    @property
    def base(self) -> OutputHead:
        """The target's head over the scored ids."""
        return self._base[0]

    def read(self) -> nn.ModuleList:
        """Every module that a pass over all heads reads, the target's projection included where it is used."""
        return nn.ModuleList([self] if self.projection == "own" else [self, self.base])

    def draft_head(self, head: int) -> DraftHead:
        """A head's projection as the chunked loss takes it, differentiable in what is trained."""
        post = self.base.transform if self._transforms else None
        match self.projection:
            case "shared":
                return DraftHead(self.base.weight, self.base.bias, post)
            case "own":
                own = _linear(self.lm_heads, head)
                return DraftHead(own.weight, own.bias, post)
            case "low_rank":
                down, up = _linear(self.downs, head).weight, _linear(self.ups, head).weight
                return DraftHead(self.base.weight.to(up.dtype) + up @ down, self.base.bias, post)

    def logits(self, hidden: Float[Tensor, "*batch hidden"], head: int) -> Float[Tensor, "*batch scored"]:
        """Logits of the scored ids."""
        if self.projection == "own":
            own = _linear(self.lm_heads, head)
            return self.base.transform(own(hidden.to(own.weight.dtype)))
        product = self.base.linear(hidden.to(self.base.weight.dtype))
        if self.projection == "low_rank":
            down, up = _linear(self.downs, head), _linear(self.ups, head)
            product = product + up(down(hidden.to(down.weight.dtype)))
        return self.base.transform(product)

    @torch.no_grad()
    def take_projection(self, head: int, fit: RidgeFit) -> float:
        """Make a head's own projection the target's after the map that was fitted; the share that the map explains."""
        weight, explained = fit.folded(self.base.weight)
        _linear(self.lm_heads, head).weight.copy_(weight)
        return explained

    def to_target_ids(self, choice: Tensor) -> Tensor:
        """Rows of the projections as ids of the target."""
        return choice if self.kept_ids is None else self.kept_ids[choice]

    def spread(self, scores: Float[Tensor, "*batch scored"], fill: float = 0.0) -> Float[Tensor, "*batch vocab"]:
        """Values of the scored ids over the target's vocabulary, `fill` elsewhere."""
        if self.kept_ids is None:
            return scores
        return scores.new_full((*scores.shape[:-1], self.vocab_size), fill).index_copy_(-1, self.kept_ids, scores)

    def rows_of_ids(self) -> Int[Tensor, "vocab"] | None:
        """The projections' row of every id of the target, -1 for ids that they do not score; None: all, in order."""
        if self.kept_ids is None:
            return None
        rows = torch.full((self.vocab_size,), -1, device=self.kept_ids.device)
        rows[self.kept_ids] = torch.arange(len(self.kept_ids), device=rows.device)
        return rows

    @property
    def _transforms(self) -> bool:
        return self.base.scale != 1.0 or self.base.softcap is not None


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Inside, the module's parameters are whole on every rank, for reading, also those that ZeRO-3 has sharded."""
    sharded = [parameter for parameter in module.parameters() if hasattr(parameter, "ds_id")]
    if not sharded:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded, modifier_rank=None):
        yield


def _copy(linear: nn.Module, hidden: int, scored: int) -> nn.Linear:
    """A trainable copy in float32 (the engine casts it where it trains in another type)."""
    weight, bias = linear.weight, getattr(linear, "bias", None)
    assert isinstance(weight, Tensor)
    own = nn.Linear(hidden, scored, bias=bias is not None, device=weight.device, dtype=torch.float32)
    with torch.no_grad():
        own.weight.copy_(weight)
        if bias is not None:
            own.bias.copy_(bias)
    return own


def _linear(layers: nn.ModuleList, head: int) -> nn.Linear:
    layer = layers[head]
    assert isinstance(layer, nn.Linear)
    return layer
