"""A few of a target's weights, to know it again by: a name says nothing of what lies under it today."""

import hashlib
import json
from collections.abc import Sequence

import torch

from .target import Target

_SAMPLED = 64  # weights of the target that are compared
# Mean difference, relative to the mean size, above which sampled weights are another model's: rounding to bf16 makes
# 0.002, an independent training 1 and more.
_TOLERANCE = 0.02
_SAMPLE = "_draftsmith_sample"


@torch.no_grad()
def weights_sample(target: Target) -> list[float] | None:
    """Some of the target's weights, always the same ones. None where it has no contents here (the meta device, a sharded
    model). Of a target that was changed since: those it had before (`remember_weights`).
    """
    remembered = target.model.__dict__.get(_SAMPLE)
    if remembered is not None:
        return remembered
    matrices = [parameter for parameter in target.model.parameters() if parameter.ndim >= 2]
    matrices = [parameter for parameter in matrices if parameter.is_floating_point()]
    if not matrices or any(parameter.is_meta or not parameter.numel() for parameter in matrices):
        return None
    sample = []
    for i in range(_SAMPLED):
        matrix = matrices[i * 7919 % len(matrices)]
        flat = i * 1_000_003 % matrix.numel()  # both are primes: the places are spread out
        row, column = divmod(flat, matrix.shape[-1])
        sample.append(float(f"{matrix.flatten(0, -2)[row, column].item():.6g}"))
    return sample


def remember_weights(target: Target) -> None:
    """To call before the target is changed: the drafter that comes with the change still belongs to what it was."""
    target.model.__dict__.setdefault(_SAMPLE, weights_sample(target))


def same_weights(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    """Whether two samples are of one model, perhaps in two dtypes. True where one of them is not known."""
    if one is None or other is None:
        return True
    difference = sum(abs(a - b) for a, b in zip(one, other, strict=True))
    return difference <= _TOLERANCE * sum(map(abs, one))


def weights_hash(target: Target) -> str | None:
    """A sha256 over the sample: for what must come from these very weights, in this very dtype."""
    sample = weights_sample(target)
    return None if sample is None else hashlib.sha256(json.dumps(sample).encode()).hexdigest()
