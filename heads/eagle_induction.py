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
from ..distill.ridge import RidgeFit, main_directions
from .eagle_model import EagleModel

_SHARE = 3  # one key-value head in so many
_SCORE = 20.0  # at most, of a query with the key of the same place, before the softmax; of another place about 0
_LEAST_SURE = 0.25  # of queries that share a key, the least decided one's scores as a share of the most decided one's
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
    return model.layer.self_attn.kv_heads // _SHARE if len(slow_channels(model)) else 0


def slow_channels(model: EagleModel) -> Int[Tensor, "channels"]:
    """Channels of a head that rotary embeddings leave about alone, the slowest first."""
    order = model.frequencies.argsort()
    slow = order[model.frequencies[order] * _DISTANCE < 1]
    return torch.stack([slow, slow + model.layer.self_attn.head_dim // 2], -1).flatten()


def start_induction_heads(model: EagleModel, places: Iterable[Places]) -> None:
    """Solve for queries, keys and values of the last key-value heads of a version 3 layer, on some thousand places."""
    alike, copied = CanonicalFit(), RidgeFit(constant=False)
    for some in places:
        alike.add(some.read, some.next_feature)
        copied.add(some.next_token, some.wanted)
    attention, hidden, channels = model.layer.self_attn, model.config.hidden_size, slow_channels(model)
    dim, groups, number = attention.head_dim, attention.groups, num_induction_heads(model)
    found, said = alike.solved(), main_directions(copied.solved()[0], copied.input_products)
    first = attention.kv_heads - number
    for i in range(number):
        # Every head gets its share of the good directions.
        mine = slice(i, number * len(channels), number)
        queries, keys = _weighed(Canonical(*(part[mine] for part in found)), dim)
        at = (first + i) * dim
        _lay(attention.k_proj.weight[at : at + dim, hidden:], keys, channels)
        attention.k_proj.weight[at : at + dim, :hidden] = 0.0
        for group in range(groups):  # queries of one key differ in how sure they must be
            row = ((first + i) * groups + group) * dim
            share_of_score = _LEAST_SURE ** (group / max(groups - 1, 1))
            _lay(attention.q_proj.weight[row : row + dim], queries * share_of_score, channels)
        value = attention.v_proj.weight[at : at + dim]
        value.zero_()
        rows = said[i * dim : (i + 1) * dim]
        value[: len(rows), :hidden] = rows.to(value.dtype)


def _weighed(pairs: Canonical, dim: int) -> tuple[Tensor, Tensor]:
    """Queries and keys whose product, divided by the root of the head's size, grows with how likely both are of one place.

    In the logarithm of the likelihood ratio of normal variables the product of a pair counts by
    correlation / (1 - correlation²). Here it counts by the root of that, so that the few strongest do not decide alone;
    and all count less where that would be surer than `_SCORE` on average.
    """
    correlations = pairs.correlations
    weights = (correlations / (1 - correlations.square()).clamp(min=1e-3)).sqrt()
    weights *= dim**0.5 * _SCORE / (weights * correlations).sum().clamp(min=_SCORE)
    return pairs.left * weights.sqrt()[:, None], pairs.right * weights.sqrt()[:, None]


def _lay(
    rows: Float[Tensor, "dim read"], directions: Float[Tensor, "n read"], channels: Int[Tensor, "channels"]
) -> None:
    rows.zero_()
    rows[channels[: len(directions)]] = directions.to(rows.dtype)
