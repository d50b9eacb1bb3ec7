"""What the target says at the positions that labels are predicted from: asked on the fly, or read from a cache."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import BadInput
from ..models.head import OutputHead, split
from ..models.target import Target
from .attention import attention_over
from .batch import DistillBatch
from .chunked_targets import TargetHidden, TargetTopK


class Teacher:
    """The target as a teacher. Hidden states are what is passed around: logits exist chunk by chunk only."""

    def __init__(self, target: Target, kept_ids: Int[Tensor, "kept"] | None = None):
        """`kept_ids`: the ids that the drafter scores, for a cut vocabulary."""
        self.target = target
        self.backbone, self.head = split(target.model)
        self.kept_ids = None if kept_ids is None else kept_ids.to(target.device)
        # A copy of the kept rows: indexing the whole table for every chunk would cost more than the product.
        self.kept_head: OutputHead | None = None if kept_ids is None else self.head.rows(kept_ids)

    @torch.no_grad()
    def outputs(self, batch: DistillBatch) -> TargetHidden | TargetTopK:
        """The batch's cached outputs, or those of a forward pass over its rows."""
        if isinstance(batch.teacher, TargetTopK):
            return batch.teacher
        if isinstance(batch.teacher, dict) and self.target.num_layers in batch.teacher:
            return self.as_targets(batch.teacher[self.target.num_layers].flatten(0, 1)[batch.predictors])
        hidden = batch.teacher if isinstance(batch.teacher, Tensor) else self.hidden(batch)
        return self.as_targets(hidden)

    def as_targets(self, hidden: Float[Tensor, "labels hidden"]) -> TargetHidden:
        """Hidden states with the heads that turn them into logits."""
        return TargetHidden(hidden.to(self.target.dtype), self.head, self.kept_ids, self.kept_head)

    @torch.no_grad()
    def hidden(self, batch: DistillBatch) -> Float[Tensor, "labels hidden"]:
        """Last hidden states (after the final norm) at the batch's predictors."""
        return last_hidden(self.backbone, batch).flatten(0, 1)[batch.predictors]


def absolute_layer(layer: int, num_layers: int) -> int:
    """A layer's number as transformers counts hidden states; a negative one counts from the end.

    Raises:
        BadInput: there is no such layer.
    """
    absolute = num_layers + 1 + layer if layer < 0 else layer
    if not 0 <= absolute <= num_layers:
        raise BadInput(f"hidden states of layer {layer} do not exist: the target has {num_layers} layers")
    return absolute


@torch.no_grad()
def all_hidden(
    teacher: Teacher, batch: DistillBatch, layers: Sequence[int]
) -> dict[int, Float[Tensor, "rows length hidden"]]:
    """The target's hidden states of `layers` (counted from 0) over packed rows, the last one after the final norm."""
    last = teacher.target.num_layers
    with attention_over(batch, teacher.backbone) as masks:
        out = teacher.backbone(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=masks,
            use_cache=False,
            output_hidden_states=any(layer != last for layer in layers),
        )
    return {layer: out.last_hidden_state if layer == last else out.hidden_states[layer] for layer in layers}


def last_hidden(backbone: Any, batch: DistillBatch) -> Float[Tensor, "rows length hidden"]:
    """A backbone's last hidden states over packed rows."""
    with attention_over(batch, backbone) as masks:
        out = backbone(
            input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=masks, use_cache=False
        )
    return out.last_hidden_state
