"""How attention is computed over packed rows: document by document where that is quicker."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..decode.attention import attention_by
from ..decode.masks import windows_of
from .batch import DistillBatch

_LONGEST_ROW = 512  # tokens: attention's probabilities then take at most twice what a layer's other activations do
_DOCUMENTS = "draftsmith_documents"
_lengths: ContextVar[tuple[int, ...]] = ContextVar("lengths of the documents in a row")


@contextmanager
def attention_over(batch: DistillBatch, backbone: Any) -> Iterator[Tensor | dict[str, Tensor] | None]:
    """Around a pass of a transformers model over packed rows; what it takes as its ``attention_mask``.

    Documents never see each other, sliding windows included. A single row is read document by document where
    :func:`reads_by_document` says so, and needs no mask.
    """
    if batch.documents is None or not reads_by_document(backbone, max(batch.documents)):
        config = backbone.config
        with quick_attention(backbone, batch.input_ids.shape[1]):
            yield batch.masks(config, config._attn_implementation, next(backbone.parameters()).dtype)
        return
    before = _lengths.set(batch.documents)
    try:
        with _implemented_by(_DOCUMENTS, backbone):
            yield None
    finally:
        _lengths.reset(before)


def reads_by_document(backbone: Any, longest: int) -> bool:
    """Whether a row of documents of at most `longest` tokens costs attention no more than the documents do one by one.

    So it is on a CPU, where a mask saves no work: a row may then be as long as the pass, without padding. Not where activations
    are recomputed (outside of :func:`attention_over`), where a sliding window is shorter than a document, nor for models whose
    attention is not transformers' to choose.
    """
    if backbone.device.type != "cpu" or backbone.config._attn_implementation != "sdpa":
        return False
    if not getattr(backbone, "_supports_attention_backend", False) or _recomputes(backbone):
        return False
    windows = windows_of(backbone.config.get_text_config(decoder=True)).values()
    return all(window is None or window >= longest for window in windows)


def quick_attention(model: Any, longest: int) -> AbstractContextManager[None]:
    """Inside, attention over short rows on a CPU, in bf16 and for a backward pass, is two products and a softmax.

    torch's fused kernel keeps no probabilities, but its backward pass reaches less than a tenth of what bf16 products do
    there: a step of 480 ms took 390 without it (four layers, rows of 256 tokens). `longest` row in tokens. Elsewhere, and
    where activations are recomputed (which would be outside this block, and otherwise), nothing changes.
    """
    if model.config._attn_implementation != "sdpa" or not _unfused(model.device.type, longest) or _recomputes(model):
        return nullcontext()
    return _implemented_by("eager", model)


def _unfused(device: str, longest: int) -> bool:
    in_bf16 = device == "cpu" and torch.is_autocast_enabled("cpu")
    return in_bf16 and torch.is_grad_enabled() and longest <= _LONGEST_ROW


def _recomputes(model: Any) -> bool:
    return bool(getattr(model, "is_activation_checkpointing", False))


@contextmanager
def _implemented_by(implementation: str, model: Any) -> Iterator[None]:
    # Layers look the name up in their own configuration: of a cut or a composed model not always the model's.
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    with ExitStack() as inside:
        for config in configs.values():
            inside.enter_context(attention_by(implementation, config))
        yield


def _by_document(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """An attention function for transformers: of one row ``[1, heads, tokens, dim]``, each document by itself."""
    assert attention_mask is None
    lengths = _lengths.get()
    attend = _in_two_products if _unfused(query.device.type, max(lengths)) else sdpa_attention_forward
    # `split`, whose backward pass is one concatenation: that of a slice would write a row of zeros for every document.
    parts = zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True)
    return torch.cat([attend(module, q, k, v, None, **options)[0] for q, k, v in parts], 1), None


def _in_two_products(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What `sdpa_attention_forward` computes of a causal document, without a fused kernel."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    shares = scores.masked_fill(later, -torch.inf).softmax(-1, dtype=torch.float32).to(query.dtype)
    shares = torch.nn.functional.dropout(shares, options.get("dropout", 0.0), module.training)
    return (shares @ value).transpose(1, 2), None


AttentionInterface.register(_DOCUMENTS, _by_document)
