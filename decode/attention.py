"""Attention within a cached pass: transformers' own, told what the device is quick at."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_WIDE = "draftsmith_float32"
_FORCE_GROUPS = "TRANSFORMERS_SDPA_FORCE_GQA"  # transformers looks at it in every attention layer


def cache_dtype(model: Any) -> torch.dtype:
    """What keys and values are kept in: the model's dtype, or float32 where attention is computed in that."""
    return torch.float32 if _is_wide(model) else model.dtype


@contextmanager
def cached_attention(model: Any) -> Iterator[None]:
    """Around a pass over a :class:`.cache.RaggedCache` with masks for every token.

    On a CPU, keys are shared among queries rather than copied for each (measured: 4 % of a pass over a few tokens; on a GPU
    a mask and shared keys together leave only torch's slow kernel), and a model in half precision has its attention
    computed in float32: torch multiplies one query by its keys a row at a time there, in bfloat16 three times as slowly.
    """
    if model.device.type != "cpu":
        yield
        return
    before = os.environ.get(_FORCE_GROUPS)
    os.environ[_FORCE_GROUPS] = "1"
    try:
        with attention_by(_WIDE, model.config) if _is_wide(model) else nullcontext():
            yield
    finally:
        if before is None:
            del os.environ[_FORCE_GROUPS]
        else:
            os.environ[_FORCE_GROUPS] = before


@contextmanager
def attention_by(implementation: str, config: Any) -> Iterator[None]:
    """Inside, layers of a transformers model's `config` compute attention by another of its implementations."""
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def _is_wide(model: Any) -> bool:
    half = model.dtype in (torch.bfloat16, torch.float16)
    return half and model.device.type == "cpu" and model.config._attn_implementation in ("sdpa", _WIDE)


def _wide_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    mixed, weights = sdpa_attention_forward(
        module, query.float(), key.float(), value.float(), attention_mask, **options
    )
    return mixed.to(query.dtype), weights


AttentionInterface.register(_WIDE, _wide_attention)
AttentionMaskInterface.register(_WIDE, sdpa_mask)
