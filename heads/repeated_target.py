"""The target's distributions for several draft positions at once, which are compared with the same ones."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from ..distill.chunked_targets import TargetHidden


@dataclass(frozen=True, kw_only=True)
class RepeatedTarget(TargetHidden):
    """Row i of the loss is compared with row ``of_row[i]`` of `hidden`. Rows that follow each other with the same one cost
    one row of the target's head.
    """

    of_row: Int[Tensor, "rows"]

    def select(self, rows: Tensor) -> "RepeatedTarget":
        """The same head over some of the positions."""
        return replace(self, of_row=self.of_row[rows])

    def logits(self, rows: slice, full: bool) -> Tensor:
        """As :meth:`TargetHidden.logits`."""
        needed, which = torch.unique_consecutive(self.of_row[rows], return_inverse=True)
        once = TargetHidden(self.hidden[needed], self.head, self.kept_ids, self.kept_head)
        return once.logits(slice(None), full)[which]
