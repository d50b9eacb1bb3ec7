"""A start for an EAGLE drafter that is solved, not trained: the best linear guess of the target's next feature.

From the target's last hidden state and the embedding of the token after it, ridge regression over some thousand labels
tells the next last hidden state better than minutes of training from random weights would (a tuned lens, arXiv:2303.08112,
one token ahead). What is left to learn is what a linear map cannot know.

- Version 1: the map is ``fc``. Attention and MLP add nothing at first.
- Version 3: ``fc`` makes the last hidden state of the fused ones, which the residual stream passes on. The step from there
  to the next one is attention's, which alone reads the embedding: queries and keys of most heads start alike, so that an
  entry attends to itself most of all, and values and output projection are as much of the map as so many values can carry.
  Drafting on from its own outputs then is the same step again. The other heads start as induction heads
  (`eagle_induction`).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..distill.batch import DistillBatch
from ..distill.ridge import RidgeFit, main_directions
from .eagle_induction import Places, num_induction_heads, start_induction_heads
from .eagle_model import Attention, EagleModel
from .eagle_unroll import features_before, seen_entries

Features = Callable[[DistillBatch], dict[int, Float[Tensor, "rows length hidden"]]]

_SELF_SCORE = 10.0  # of an entry's query with its own key, before the softmax
_NOISE = 0.3  # of queries, so that those of one key learn different things


@torch.no_grad()
def fit_start(
    model: EagleModel,
    layers: tuple[int, ...],
    last: int,
    features: Features,
    embed: Callable[[Tensor], Tensor],
    batches: Iterable[DistillBatch],
) -> float:
    """Solve for the start on the first labels of `batches`, some thousand, and more of wide targets, whose hidden states have
    as many more unknowns; `last` is the number of the last hidden states.

    Also set are ``scale``, which brings every channel that ``fc`` reads to a root mean square of 1 (they differ by factors
    of a hundred, and the small ones would be learned last), and version 3's norm, which gives what the output head reads
    the size of the target's last hidden states, channel by channel.

    Returns the share of the variance of the target's last hidden states that the start explains.
    """
    torch.nn.init.zeros_(model.layer.mlp.down_proj.weight)  # type: ignore[arg-type]
    torch.nn.init.zeros_(model.layer.self_attn.o_proj.weight)
    taken = list(_first_labels(batches, max(24576, 16 * model.config.hidden_size)))
    if not taken:
        return 0.0
    read = _Read(features, embed, layers, last)
    return _first_version(model, taken, read) if model.version == 1 else _third_version(model, taken, read)


class _Read(NamedTuple):
    """Where what the drafter reads comes from."""

    features: Features
    embed: Callable[[Tensor], Tensor]
    layers: tuple[int, ...]
    last: int


def _first_labels(batches: Iterable[DistillBatch], most: int) -> Iterator[DistillBatch]:
    labels = 0
    for batch in batches:
        if len(_with_a_feature(batch)):
            yield batch
        labels += len(batch.labels)
        if labels >= most:
            break


def _with_a_feature(batch: DistillBatch) -> Int[Tensor, "labels"]:
    """Every label's predictor that has a feature before it."""
    return batch.predictors[batch.position_ids.flatten()[batch.predictors] > 0]


def _first_version(model: EagleModel, batches: list[DistillBatch], read: _Read) -> float:
    step = RidgeFit()
    for batch in batches:
        at, feature = _with_a_feature(batch), read.features(batch)[read.last].flatten(0, 1)
        step.add(torch.cat([read.embed(batch.input_ids.flatten()[at]), feature[at - 1]], -1), feature[at])
    sizes = step.input_sizes.clamp(min=1e-6)
    weight, constant, explained = step.solved()
    model.scale.copy_(1 / sizes)
    model.fc.weight.copy_(weight * sizes)
    model.fc.bias.copy_(constant)
    return explained


def _third_version(model: EagleModel, batches: list[DistillBatch], read: _Read) -> float:
    """First what the layer reads and what most of its heads make of that; then the other heads; then, over the same batches
    again, what becomes of all that attention mixes.
    """
    _fuse_and_step(model, batches, read)
    if num_induction_heads(model):
        start_induction_heads(model, (_places(model, batch, read) for batch in batches))
    return _bring_together(model, batches, read)


def _fuse_and_step(model: EagleModel, batches: list[DistillBatch], read: _Read) -> None:
    """Solve for ``fc``, and for the values of the heads by which attention takes the step to the next feature."""
    fused, step = RidgeFit(constant=False), RidgeFit(constant=False)
    for batch in batches:
        at, states = _with_a_feature(batch), read.features(batch)
        feature = states[read.last].flatten(0, 1)
        embedded = model.layer.input_layernorm(read.embed(batch.input_ids.flatten()[at]).to(model.dtype))
        fused.add(torch.cat([states[layer].flatten(0, 1)[at - 1] for layer in read.layers], -1), feature[at - 1])
        step.add(torch.cat([embedded, feature[at - 1].to(model.dtype)], -1), feature[at])
    gain, sizes = fused.output_sizes.clamp(min=1e-6), fused.input_sizes.clamp(min=1e-6)
    model.norm.weight.copy_(gain)
    model.scale.copy_(1 / sizes)
    model.fc.weight.copy_(fused.solved()[0] / gain[:, None] * sizes)
    attention = model.layer.self_attn
    _attend_to_itself(attention)
    stepping = attention.kv_heads - num_induction_heads(model)
    _read_for_the_step(attention.v_proj.weight[: stepping * attention.head_dim], step, gain)


def _attend_to_itself(attention: Attention) -> None:
    """A key is a random projection of what attention reads, and so, but for some noise, are the queries that meet it."""
    keys, queries, dim = attention.k_proj.weight, attention.q_proj.weight, attention.head_dim
    std = (_SELF_SCORE / (dim**0.5 * keys.shape[1])) ** 0.5  # of inputs of size 1
    torch.nn.init.normal_(keys, std=std)
    alike = keys.unflatten(0, (-1, 1, dim)).expand(-1, attention.groups, -1, -1).flatten(0, 2)
    queries.copy_(alike + _NOISE * std * torch.randn_like(alike))


def _read_for_the_step(values: Tensor, step: RidgeFit, gain: Float[Tensor, "hidden"]) -> None:
    """Values are what the step from a feature of size 1 a channel to the next adds, along its main directions."""
    hidden = len(gain)
    weight = step.solved()[0] / gain[:, None]
    sizes = torch.cat([torch.ones_like(gain), gain])
    weight *= sizes
    weight[:, hidden:] -= torch.eye(hidden, dtype=weight.dtype, device=weight.device)
    main = main_directions(weight, step.input_products / sizes / sizes[:, None])[: len(values)]
    values.zero_()
    values[: len(main)] = main.to(values.dtype)


class _AroundAttention(NamedTuple):
    """Of a batch: what comes into the layer and what should come out of it."""

    at: Int[Tensor, "labels"]  # where the labels are predicted, by flat position
    fused: Float[Tensor, "rows length hidden"]  # the target's features
    residual: Float[Tensor, "rows length hidden"]
    seen_by_attention: Float[Tensor, "rows length read"]
    wanted: Float[Tensor, "labels hidden"]  # the target's last hidden states, as the norm takes them


def _around_attention(model: EagleModel, batch: DistillBatch, read: _Read) -> _AroundAttention:
    at, states = _with_a_feature(batch), read.features(batch)
    fused = model.fuse([states[layer] for layer in read.layers])
    residual, seen_by_attention = model.inputs(read.embed(batch.input_ids), features_before(fused))
    wanted = states[read.last].flatten(0, 1)[at].to(model.dtype) / model.norm.weight
    return _AroundAttention(at, fused, residual, seen_by_attention, wanted)


def _places(model: EagleModel, batch: DistillBatch, read: _Read) -> Places:
    """The positions of a batch where labels are predicted."""
    around = _around_attention(model, batch, read)
    next_token = read.embed(batch.input_ids.flatten()[around.at + 1]).to(model.dtype)
    return Places(
        around.seen_by_attention.flatten(0, 1)[around.at],
        model.layer.hidden_norm(around.fused).flatten(0, 1)[around.at],
        model.layer.input_layernorm(next_token),
        around.wanted,
    )


def _bring_together(model: EagleModel, batches: list[DistillBatch], read: _Read) -> float:
    """Solve for attention's last projection, given the values that it mixes."""
    attention, last = model.layer.self_attn, RidgeFit(constant=False)
    total = torch.zeros(2, model.config.hidden_size, dtype=torch.float64, device=model.device)
    for batch in batches:
        around = _around_attention(model, batch, read)
        rotation = model.rotation(batch.position_ids)
        everywhere = torch.arange(batch.input_ids.shape[1], device=model.device).expand_as(batch.input_ids)
        keys_values, seen = model.keys_values(around.seen_by_attention, rotation), seen_entries(batch, everywhere)
        mixed = attention.mix(model.queries(around.seen_by_attention, rotation), keys_values, seen, [])
        last.add(mixed.flatten(0, 1)[around.at], around.wanted - around.residual.flatten(0, 1)[around.at])
        total += torch.stack([around.wanted.double().sum(0), around.wanted.double().square().sum(0)])
    weight, _, explained = last.solved()
    attention.o_proj.weight.copy_(weight)
    spread = total[1].sum() - total[0].square().sum() / last.count
    return 1 - (1 - explained) * last.spread / float(spread)
