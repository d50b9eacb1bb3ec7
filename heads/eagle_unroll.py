"""An EAGLE drafter unrolled over its own outputs, as it will draft (training-time test, arXiv:2503.01840).

An anchor is a position s from which decoding could draft: the target's features are known up to s - 1, the tokens up to
s. In step j the drafter stands at position s + j, reads its own output of step j - 1 as the feature and predicts token
s + j + 1. Its query there sees the entries made of the target's features up to s and its own entries of steps 1 to j,
exactly the keys that the decoder's cache would hold. Step 0 alone is the training of version 1 (arXiv:2401.15077).

Keys and values are made for all positions, everything else for anchors only: nothing else of one layer is ever read.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..distill.batch import DistillBatch
from .eagle_model import EagleModel


class Anchors(NamedTuple):
    """Where drafts begin, row by row, padded to the fullest row."""

    at: Int[Tensor, "rows n"]  # position in the row
    steps: Int[Tensor, "rows n"]  # draft tokens that have a label; 0: padding


class Unrolled(NamedTuple):
    """One step of the unrolling, over the anchors that have a label in it."""

    step: int
    outputs: Float[Tensor, "labels hidden"]
    predictors: Int[Tensor, "labels"]  # flat positions of the target's prediction of the same token
    anchors: Int[Tensor, "labels"]  # flat number of each one's anchor


def find_anchors(batch: DistillBatch, steps: int) -> Anchors:
    """Positions after which 1 to `steps` supervised tokens of the same document follow without a gap.

    Excluded are first tokens of documents, before which there is no feature.
    """
    # A document's first token is never a label, so a run of labels never leaves its document.
    label = torch.nn.functional.pad(batch.loss_mask, (0, steps))
    length = batch.input_ids.shape[1]
    following = torch.stack([label[:, 1 + j : 1 + j + length] for j in range(steps)], -1)
    counts = following.long().cumprod(-1).sum(-1) * (batch.position_ids > 0) * (batch.segment_ids >= 0)
    most = int((counts > 0).sum(1).max())
    at = (counts == 0).long().argsort(dim=1, stable=True)[:, :most]
    return Anchors(at, counts.gather(1, at))


def unroll(
    model: EagleModel,
    batch: DistillBatch,
    embed: Callable[[Tensor], Tensor],
    features: Float[Tensor, "rows length hidden"],
    anchors: Anchors,
    steps: int,
) -> Iterator[Unrolled]:
    """The drafter's outputs at the anchors, step by step. `features` are the target's, fused, each at its own position."""
    before = features_before(features)
    residual, read = model.inputs(embed(batch.input_ids), before)
    prefix = model.keys_values(read, model.rotation(batch.position_ids))
    seen = seen_entries(batch, anchors.at)
    length = batch.input_ids.shape[1]
    first = torch.arange(len(anchors.at), device=anchors.at.device)[:, None] * length
    own: list[tuple[Tensor, Tensor]] = []
    outputs = features[:, :0]
    for j in range(steps):
        at = (anchors.at + j).clamp(max=length - 1)
        positions = batch.position_ids.gather(1, anchors.at) + j
        if j == 0:
            residual, read = (_picked(states, at) for states in (residual, read))
        else:
            residual, read = model.inputs(embed(batch.input_ids.gather(1, at)), outputs)
        rotation = model.rotation(positions)
        if j:
            own.append(model.keys_values(read, rotation))
        attended = model.layer.self_attn.attend(model.queries(read, rotation), prefix, seen, own)
        outputs = model.layer.finish(residual, attended)
        labelled = (anchors.steps > j).flatten()
        numbers = labelled.nonzero().squeeze(-1)
        yield Unrolled(j, outputs.flatten(0, 1)[numbers], (first + at).flatten()[numbers], numbers)


def features_before(features: Float[Tensor, "rows length hidden"]) -> Float[Tensor, "rows length hidden"]:
    """The feature that each entry reads: that of the position before."""
    return torch.nn.functional.pad(features[:, :-1], (0, 0, 1, 0))


def _picked(states: Float[Tensor, "rows length size"], at: Int[Tensor, "rows n"]) -> Float[Tensor, "rows n size"]:
    return states.gather(1, at[..., None].expand(-1, -1, states.shape[-1]))


def seen_entries(batch: DistillBatch, at: Int[Tensor, "rows n"]) -> Bool[Tensor, "rows n length"]:
    """Entries made of the target's features that a query at each anchor sees: its document's, up to its own."""
    keys = torch.arange(batch.input_ids.shape[1], device=at.device)
    same = batch.segment_ids.gather(1, at)[:, :, None] == batch.segment_ids[:, None, :]
    has_feature = (batch.position_ids > 0)[:, None, :]
    itself = keys == at[:, :, None]  # a padded anchor must see something: a softmax over nothing is nan
    return (same & has_feature & (keys <= at[:, :, None])) | itself
