"""Attention heads of an EAGLE drafter that start as induction heads: they look for what followed the like of the newest token.

A text says things again: names, phrases, code. An induction head (arXiv:2209.11895) finds an earlier place that looked as
the end of the text does now, and says what came there. In the target this takes two layers; here one will do, since an
entry holds a token together with the target's feature of the position *before* it. So a key made of the feature, and a value
made of the token, are a place and what followed it. What minutes of training would not find is solved for:

- The query has to guess, from the newest token and the feature before it, the feature that is not there yet. Queries and
  keys are the directions in which this guess is best: canonical correlations of what an entry reads with the next
  entry's feature. They are laid where rotary embeddings turn slowly, so that the distance does not matter.
- The value is the best linear guess, from a token's embedding, of the feature that the token is predicted from.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..distill.canonical import Canonical, CanonicalFit
from ..distill.ridge import RidgeFit
from .eagle_model import EagleModel

_SHARE = 3  # one key-value head in so many
_SCORE = 20.0  # at most, of a query with the key of the same place, before the softmax; of another place about 0
_DISTANCE = 512  # tokens over which a key must be known again: a rotation by less than 1 radian


class Places(NamedTuple):
    """Positions of a text: what attention reads there, what of it the next entry will read as its feature, which token came
    next, and the target's feature that it was predicted from, as the output head's norm leaves it.
    """

    read: Float[Tensor, "n read"]
    next_feature: Float[Tensor, "n hidden"]
    next_token: Float[Tensor, "n hidden"]  # its embedding, as attention reads it
    wanted: Float[Tensor, "n hidden"]


def num_induction_heads(model: EagleModel) -> int:
    """Key-value heads, the last ones, that start so; 0 where there are too few, or rotary embeddings turn too fast."""
    attention = model.layer.self_attn
    heads = attention.k_proj.out_features // attention.head_dim
    return heads // _SHARE if len(slow_channels(model)) else 0


def slow_channels(model: EagleModel) -> Int[Tensor, "channels"]:
    """Channels of a head that rotary embeddings leave about alone."""
    slow = (model.frequencies * _DISTANCE < 1).nonzero().flatten()
    return torch.cat([slow, slow + model.layer.self_attn.head_dim // 2])


def start_induction_heads(model: EagleModel, places: Iterable[Places]) -> None:
    """Solve for queries, keys and values of the last key-value heads of a version 3 layer, on some thousand places."""
    alike, copied = CanonicalFit(), RidgeFit(constant=False)
    for some in places:
        alike.add(some.read, some.next_feature)
        copied.add(some.next_token, some.wanted)
    attention, hidden, channels = model.layer.self_attn, model.config.hidden_size, slow_channels(model)
    dim, groups, number = attention.head_dim, attention.groups, num_induction_heads(model)
    found, said = alike.solved(), main_directions(copied.solved()[0], copied.input_products)
    first = attention.k_proj.out_features // dim - number
    for i in range(number):
        # Every head gets its share of the good directions.
        mine = slice(i, number * len(channels), number)
        queries, keys = _weighed(Canonical(*(part[mine] for part in found)), dim)
        at = (first + i) * dim
        _lay(attention.k_proj.weight[at : at + dim, hidden:], keys, channels)
        attention.k_proj.weight[at : at + dim, :hidden] = 0.0
        for group in range(groups):  # queries of one key differ in how sure they must be
            row = ((first + i) * groups + group) * dim
            _lay(attention.q_proj.weight[row : row + dim], queries * 0.5**group, channels)
        value = attention.v_proj.weight[at : at + dim]
        value.zero_()
        rows = said[i * dim : (i + 1) * dim]
        value[: len(rows), :hidden] = rows.to(value.dtype)


def main_directions(weight: Float[Tensor, "out in"], input_products: Float[Tensor, "in in"]) -> Float[Tensor, "out in"]:
    """A linear map turned so that its outputs lie along their main directions, the largest first."""
    outputs = weight @ input_products @ weight.T
    return torch.linalg.eigh(outputs).eigenvectors.flip(-1).T @ weight


def _weighed(pairs: Canonical, dim: int) -> tuple[Tensor, Tensor]:
    """Queries and keys whose product, divided by the root of the head's size, says how much likelier it is that both are of
    one place: the logarithm of the ratio for normal variables, less where that would be surer than `_SCORE` on average.
    """
    correlations = pairs.correlations
    weights = correlations / (1 - correlations.square()).clamp(min=1e-3)
    weights *= dim**0.5 * _SCORE / (weights * correlations).sum().clamp(min=_SCORE)
    return pairs.left * weights.sqrt()[:, None], pairs.right * weights.sqrt()[:, None]


def _lay(
    rows: Float[Tensor, "dim read"], directions: Float[Tensor, "n read"], channels: Int[Tensor, "channels"]
) -> None:
    rows.zero_()
    rows[channels[: len(directions)]] = directions.to(rows.dtype)
