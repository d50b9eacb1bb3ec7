"""Products with weights kept in float16 and everything else in float32, for drafters on x86 (FBGEMM's kernels).

A drafter's pass over one token waits for its weights to come from memory: half the bytes are half the time, also on
processors without any instruction for products in 16 bits. The weights keep 11 significant bits (measured: logits move by
2e-4 of their norm); draft tokens are drawn from the distribution that results, and judged by it. The operators are
torch's, but not part of its documented interface: only this module knows them.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_LOST = 1e-3  # of a row's norm, at most, in rounding: more where its numbers are too small for float16, or too large


def half_supported() -> bool:
    """Whether this build of torch has the operators, and for this processor."""
    if torch.backends.quantized.engine not in ("fbgemm", "x86"):
        return False
    try:
        return HalfProduct(torch.eye(16))(torch.ones(1, 16)).sum().item() == 16
    except (AttributeError, RuntimeError):
        return False


def fits_half(weight: Tensor) -> bool:
    """Whether float16 keeps what every row of a float32 weight says."""
    if weight.dtype is not torch.float32:
        return False
    weight = weight.detach()
    lost = (weight.half().float() - weight).norm(dim=1)
    return bool((lost <= _LOST * weight.norm(dim=1)).all())


class HalfProduct:
    """``x @ weight.T + bias`` in float32, from a copy of `weight` in float16."""

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, "out"] | None = None):
        operators: Any = torch.ops.quantized
        self.packed = operators.linear_prepack_fp16(weight.detach(), None if bias is None else bias.detach())

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)
