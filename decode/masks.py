"""Attention masks that say, token by token, who sees whom."""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import BadInput


def attention_masks(
    config: Any,
    implementation: str,
    dtype: torch.dtype,
    seen: Bool[Tensor, "rows fed width"],
    positions: Int[Tensor, "rows fed"],
    key_positions: Int[Tensor, "rows width"],
) -> Tensor | dict[str, Tensor]:
    """What a model takes as ``attention_mask`` so that queries see exactly the keys in `seen`.

    Sliding-window layers see those of them whose position is less than a window away. Boolean ``[rows, 1, fed, width]`` for
    sdpa, additive for eager attention; a dict by kind of layer for models that mix kinds.

    Raises:
        BadInput: an attention implementation without token-level masks, or layers whose state cannot be rolled back.
    """
    if implementation not in ("sdpa", "eager"):
        raise BadInput(
            f"attention implementation {implementation!r} takes no token-level mask: "
            "load the model with attn_implementation='sdpa'"
        )

    def as_taken(mask: Tensor) -> Tensor:
        if implementation == "sdpa":
            return mask[:, None]
        return torch.where(mask[:, None], torch.zeros((), dtype=dtype), torch.finfo(dtype).min)

    windows = windows_of(config.get_text_config(decoder=True))
    if not windows:
        return as_taken(seen)
    masks: dict[str, Tensor] = {}
    for kind, window in windows.items():
        if window:
            near = positions[:, :, None] - key_positions[:, None, :] < window
            masks[kind] = as_taken(seen & near)
        else:
            masks[kind] = as_taken(seen)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def additive(masks: Tensor | dict[str, Tensor], dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Boolean masks as what sdpa adds to its scores: made once a pass, where sdpa would make it in every layer.

    `dtype`: what attention is computed in.
    """

    def added(mask: Tensor) -> Tensor:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)

    return {kind: added(mask) for kind, mask in masks.items()} if isinstance(masks, dict) else added(masks)


def windows_of(config: Any) -> dict[str, int | None]:
    """Kinds of attention layers and their windows (None: full). Empty for models of full attention only."""
    window = getattr(config, "sliding_window", None)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise BadInput(
            f"layers of type {unknown[0]!r} keep a state that cannot be rolled back: the model cannot verify drafts"
        )
    if not kinds:
        # Mistral and Phi-3 have one window for all layers and name no layer types.
        uses_window = window is not None and getattr(config, "use_sliding_window", True)
        return {"sliding_attention": window} if uses_window else {}
    if kinds == ["full_attention"]:
        return {}
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}
