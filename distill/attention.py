"""How attention is computed while a draft model learns on a CPU."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..decode.attention import attention_by

_LONGEST_ROW = 512  # tokens: attention's probabilities then take at most twice what a layer's other activations do


def quick_attention(model: Any, row_length: int) -> AbstractContextManager[None]:
    """Inside, attention over short rows on a CPU, in bf16 and for a backward pass, is two products and a softmax.

    torch's fused kernel keeps no probabilities, but its backward pass reaches less than a tenth of what bf16 products do
    there: a step of 480 ms took 390 without it (four layers, rows of 256 tokens). `row_length` in tokens. Elsewhere, and
    where activations are recomputed (which would be outside this block, and otherwise), nothing changes.
    """
    fused = model.config._attn_implementation == "sdpa"
    in_bf16 = model.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    recomputed = getattr(model, "is_activation_checkpointing", False)
    if not (fused and in_bf16 and torch.is_grad_enabled() and row_length <= _LONGEST_ROW) or recomputed:
        return nullcontext()
    return attention_by("eager", model)
