"""What one forward pass of distillation takes: packed rows, where its labels are predicted, what the target said there."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..data.packing import Packed
from ..decode.forward import attention_masks


@dataclass(frozen=True)
class DistillBatch:
    """A micro-batch. Positions are flat indices into ``rows × length``."""

    input_ids: Int[Tensor, "rows length"]
    position_ids: Int[Tensor, "rows length"]
    segment_ids: Int[Tensor, "rows length"]  # -1: padding
    loss_mask: Bool[Tensor, "rows length"]  # True: a supervised label
    predictors: Int[Tensor, "labels"]  # the position that each label is predicted from
    labels: Int[Tensor, "labels"]
    weights: Float[Tensor, "labels"]
    tokens: int  # without padding
    documents: tuple[int, ...] | None = None  # of a single row: the lengths of its documents, padding one more
    # Cached outputs of the target: hidden states at the predictors, TargetTopK there, or a dict of hidden states at all
    # positions by layer ``{layer: [rows, length, hidden]}``. None: ask the target.
    teacher: Any = None

    @property
    def supervised(self) -> float:
        """Supervised labels: what the loss is divided by."""
        return float(self.weights.sum())

    def masks(self, config: Any, implementation: str, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Attention masks of a model: documents never see each other, sliding windows included."""
        same = self.segment_ids[:, :, None] == self.segment_ids[:, None, :]
        length = self.input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
        # Padding sees itself and the padding before it: a softmax over nothing is nan.
        return attention_masks(config, implementation, dtype, same & causal, self.position_ids, self.position_ids)


def distill_batch(packed: Packed, device: torch.device, teacher: Any = None) -> DistillBatch:
    """A micro-batch from packed rows, on `device`."""
    length = packed.input_ids.shape[1]
    rows, columns = packed.loss_mask.nonzero(as_tuple=True)  # a document's first token is never a label
    documents = None
    if len(packed.segment_ids) == 1:
        documents = tuple(packed.segment_ids[0].unique_consecutive(return_counts=True)[1].tolist())
    return DistillBatch(
        packed.input_ids.to(device),
        packed.position_ids.to(device),
        packed.segment_ids.to(device),
        packed.loss_mask.to(device),
        (rows * length + columns - 1).to(device),
        packed.input_ids[rows, columns].to(device),
        packed.weights[rows, columns].to(device),
        sum(place.length for place in packed.placed),  # a filler's tokens belong to no example
        documents,
        teacher,
    )
