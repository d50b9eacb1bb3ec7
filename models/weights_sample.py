"""A few of a target's weights, to know it again by: a name says nothing of what lies under it today."""

import hashlib
import json
from collections.abc import Sequence

import torch

from .target import Target

_FEWEST, _MOST = 64, 512  # weights that are compared: one of every matrix where these bounds allow it
_NEIGHBOURS = 64  # of the same row, whose size tells what is a small difference
# How far a weight may be off, relative to the root mean square of its neighbours, which is at least an eighth of the
# largest of the 64: rounding makes at most 8/254 of it in 8-bit blocks and 8/256 in bfloat16. Of hundreds of weights a
# fine-tuning moves some further, another training all.
_TOLERANCE = 0.032
_SAMPLE = "_draftsmith_sample"


@torch.no_grad()
def weights_sample(target: Target) -> list[float] | None:
    """Some of the target's weights, always the same ones, each followed by the root mean square of those beside it. None
    where it has no contents here (the meta device, a sharded model). Of a target that was changed since: those it had before
    (`remember_weights`).
    """
    remembered = target.model.__dict__.get(_SAMPLE)
    if remembered is not None:
        return remembered
    matrices = [parameter for parameter in target.model.parameters() if parameter.ndim >= 2]
    matrices = [parameter for parameter in matrices if parameter.is_floating_point()]
    if not matrices or any(parameter.is_meta or not parameter.numel() for parameter in matrices):
        return None
    sample = []
    number = min(max(_FEWEST, len(matrices)), _MOST)
    for i in range(number):
        # Of few matrices all, and again from the first; of too many some that lie evenly among them.
        matrix = matrices[i * len(matrices) // number if len(matrices) > number else i % len(matrices)]
        row, column = divmod(i * 1_000_003 % matrix.numel(), matrix.shape[-1])  # a prime: the places are spread out
        first = max(0, min(column, matrix.shape[-1] - _NEIGHBOURS))
        # On the CPU in float64, so that a hash of it is the same on every device.
        beside = matrix.flatten(0, -2)[row, first : first + _NEIGHBOURS].double().cpu()
        values = (beside[column - first].item(), beside.square().mean().sqrt().item())
        sample += [float(f"{value:.6g}") for value in values]
    return sample


def remember_weights(target: Target) -> None:
    """To call before the target is changed: the drafter that comes with the change still belongs to what it was."""
    target.model.__dict__.setdefault(_SAMPLE, weights_sample(target))


def same_weights(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    """Whether two samples are of one model, perhaps in two dtypes. True where one of them is not known."""
    if one is None or other is None:
        return True
    if len(one) != len(other):
        return False
    pairs = zip(one[::2], other[::2], one[1::2], strict=True)
    return all(abs(a - b) <= _TOLERANCE * size for a, b, size in pairs)


def weights_hash(target: Target) -> str | None:
    """A sha256 over the sample: for what must come from these very weights, in this very dtype."""
    sample = weights_sample(target)
    return None if sample is None else hashlib.sha256(json.dumps(sample).encode()).hexdigest()
