"""A better start for a draft model cut out of a target: its own output head, fitted before the first step.

The last hidden states of a few layers lie elsewhere than those of the whole target, whose head reads them. The linear map
that brings them closest is ridge regression, solved at once from sums over some thousand labels, and folded into the head:
what a tuned lens learns (arXiv:2303.08112), without an optimizer.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from ..models.draft_lm import DraftLM
from .batch import DistillBatch
from .teacher import Teacher, last_hidden

_RIDGE = 0.01  # on the mean of the squares; between 0.001 and 0.1 the result hardly moved


def has_own_head(lm: DraftLM) -> bool:
    """Whether the output head can change without the embeddings changing with it."""
    return lm.head.weight is not lm.model.get_input_embeddings().weight and lm.head.weight.requires_grad


@torch.no_grad()
def fit_head(lm: DraftLM, teacher: Teacher, batches: Iterable[DistillBatch], max_labels: int = 32768) -> float:
    """Replace the head's weight W (the target's rows) by W Mᵀ, where M minimises |X M - Y|² + ridge |M|².

    X and Y are the last hidden states of draft model and target at the labels of `batches`, read up to `max_labels`.
    Returns the share of Y's variance that X M explains.
    """
    width, size = lm.head.weight.shape[1], teacher.head.weight.shape[1]
    gram = torch.zeros(width, width, dtype=torch.float64, device=lm.device)
    cross = torch.zeros(width, size, dtype=torch.float64, device=lm.device)
    total, square, count = torch.zeros(size, dtype=torch.float64, device=lm.device), 0.0, 0
    for batch in batches:
        x = last_hidden(lm.backbone, lm, batch).flatten(0, 1)[batch.predictors].double()
        y = (batch.teacher if isinstance(batch.teacher, Tensor) else teacher.hidden(batch)).double()
        gram += x.T @ x
        cross += x.T @ y
        total += y.sum(0)
        square += float((y * y).sum())
        count += len(y)
        if count >= max_labels:
            break
    regular = _RIDGE * count * torch.eye(width, dtype=torch.float64, device=lm.device)
    mapping = torch.linalg.solve(gram + regular, cross)
    head = teacher.kept_head if teacher.kept_head is not None else teacher.head
    weight: Float[Tensor, "kept width"] = head.weight.double() @ mapping.T
    lm.head.weight.copy_(weight.to(lm.head.weight.dtype))
    missed = square - 2 * float((mapping * cross).sum()) + float((mapping * (gram @ mapping)).sum())
    return 1 - missed / (square - float((total * total).sum()) / max(count, 1))
