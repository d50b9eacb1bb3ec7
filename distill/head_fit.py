"""A better start for a draft model cut out of a target: its own output head, fitted before the first step.

The last hidden states of a few layers lie elsewhere than those of the whole target, whose head reads them. The linear map
that brings them closest is ridge regression, solved at once from sums over some thousand labels, and folded into the head:
what a tuned lens learns (arXiv:2303.08112), without an optimizer.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..models.draft_lm import DraftLM
from .batch import DistillBatch
from .ridge import RidgeFit
from .teacher import Teacher, last_hidden


def has_own_head(lm: DraftLM) -> bool:
    """Whether the output head can change without the embeddings changing with it."""
    return lm.head.weight is not lm.model.get_input_embeddings().weight and lm.head.weight.requires_grad


@torch.no_grad()
def fit_head(lm: DraftLM, teacher: Teacher, batches: Iterable[DistillBatch], max_labels: int = 32768) -> float:
    """Replace the head's weight W (the target's rows) by W M, where M takes the draft model's last hidden states closest
    to the target's, at the labels of `batches`, read up to `max_labels`.

    Returns the share of the variance of the target's that M explains.
    """
    fit = RidgeFit(constant=False)
    for batch in batches:
        wanted = batch.teacher if isinstance(batch.teacher, Tensor) else teacher.hidden(batch)
        fit.add(last_hidden(lm.backbone, batch).flatten(0, 1)[batch.predictors], wanted)
        if fit.count >= max_labels:
            break
    head = teacher.kept_head if teacher.kept_head is not None else teacher.head
    weight, explained = fit.folded(head.weight)
    lm.head.weight.copy_(weight)
    return explained
