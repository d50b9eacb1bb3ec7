"""oneDNN's products with weights that it has reordered. The operators are private to torch: only this module knows them."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_ROWS_HINT = 4  # the number of rows oneDNN picks the layout for; others work with it as well


def supported(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this build of torch has the operators, and this processor the products in `dtype`."""
    operators: Any = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):
        return False
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not all(hasattr(operators, name) for name in names):
        return False
    return dtype is torch.float32 or operators._is_mkldnn_bf16_supported()


class PackedProduct:
    """``x @ weight.T + bias`` from a copy of `weight` in oneDNN's blocked layout, for `x` of the weight's dtype."""

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, "out"] | None = None):
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
        self.bias = None if bias is None else bias.detach()

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def product(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    """``a @ b`` of weights that change from call to call."""
    return torch.ops.mkldnn._linear_pointwise(a.contiguous(), b.t().contiguous(), None, "none", [], "")
