"""Distilling a draft model: what the training loop calls for every micro-batch."""

import torch
from torch import Tensor, nn

from ..decode.sampling import Sampling, served_probabilities
from ..models.draft_lm import DraftLM
from .batch import DistillBatch
from .chunked import DraftHead, chunked_loss, label_rows
from .mixture import Mixture
from .teacher import Teacher, last_hidden
from .trainee import LossSums

# The served alpha needs the target's full vocabulary, which a drafter with a cut one otherwise never pays for.
_METRICS_EVERY = 8


class DraftModelObjective(nn.Module):
    """A draft model under a divergence from its target. Only the draft model is a submodule: the target is not trained."""

    def __init__(self, lm: DraftLM, teacher: Teacher, mixture: Mixture, served: Sampling, chunk_tokens: int = 512):
        """`served`: the sampling transforms that decoding will use (greedy: alpha is logged at temperature 1)."""
        super().__init__()
        # In float32 whatever the target is in: bf16 cannot hold an optimizer's small steps. DeepSpeed casts a copy.
        self.lm = lm.float()
        self.mixture, self.chunk_tokens = mixture, chunk_tokens
        self._teacher = (teacher,)  # in a tuple, so that its parameters are not this module's
        self._served = served_probabilities(served)
        self._measures = False
        self.rank_of = _rank_of(lm, teacher.head.weight.shape[0])

    def begin_step(self, step: int, total_steps: int) -> None:
        """Whole steps are measured, every eighth and the last: on all ranks alike, resumed or not."""
        self._measures = step % _METRICS_EVERY == 0 or step + 1 == total_steps

    @property
    def teacher(self) -> Teacher:
        """The target as this objective asks it."""
        return self._teacher[0]

    def forward(self, batch: DistillBatch) -> LossSums:
        """Sums over the batch's labels; in some steps also of the served alpha and of greedy agreement."""
        hidden = last_hidden(self.lm.backbone, batch).flatten(0, 1)[batch.predictors]
        measure = self._measures or not self.training
        needs_target = self.mixture.needs_target or measure
        head = self.lm.head
        loss = chunked_loss(
            self.mixture,
            hidden,
            DraftHead(head.weight, head.bias, None if head.is_linear else head.transform),
            self._teacher[0].outputs(batch) if needs_target else None,
            label_rows(batch.labels, self.rank_of) if self.mixture.needs_tokens else None,
            batch.weights,
            chunk_tokens=self.chunk_tokens,
            metrics=measure,
            probabilities=self._served,
        )
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        if loss.alpha_sum is not None and loss.greedy_agreement_sum is not None:
            metrics["alpha"] = (loss.alpha_sum, loss.positions)
            metrics["greedy_agreement"] = (loss.greedy_agreement_sum, loss.positions)
        return LossSums(loss.sum, loss.count, metrics)


def _rank_of(lm: DraftLM, vocab_size: int) -> Tensor | None:
    """The drafter's row of each of the target's ids, -1 for those that it does not score; None: all, in order."""
    if lm.kept_ids is None and lm.num_scored >= vocab_size:
        return None
    scored = torch.arange(lm.num_scored, device=lm.device) if lm.kept_ids is None else lm.kept_ids
    rank = torch.full((vocab_size,), -1, device=lm.device)
    rank[scored] = torch.arange(len(scored), device=lm.device)
    return rank
