"""Training look-ahead embeddings: behind some tokens of the training texts, all else being the frozen target's.

Embedding i behind the token at position p guesses token p + i + 2, as the target predicts it from position p + i + 1.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..decode.sampling import Sampling, served_probabilities
from ..distill.batch import DistillBatch
from ..distill.chunked import DraftHead, chunked_loss
from ..distill.chunked_targets import TargetHidden
from ..distill.mixture import Mixture
from ..distill.trainee import LossSums
from ..models.head import split
from ..models.target import Target
from .lookahead_pass import context_pass, lookahead_pass
from .lookahead_tokens import LookaheadEmbeddings

_MEASURE_EVERY = 32  # steps
_ROWS_AT_ONCE = 256


class LookaheadObjective(nn.Module):
    """The embeddings under a mixture of losses, embedding i weighing ``decay ** i``.

    A pass behind every token would cost k times the text. In training the embeddings stand behind a random share of the
    tokens that have a label, and each row's sums are scaled up by what was left out of it: the loss is an unbiased estimate
    of Σ_i decay^i Σ_labels loss_i / (supervised labels of the step).
    """

    def __init__(
        self,
        embeddings: LookaheadEmbeddings,
        target: Target,
        mixture: Mixture,
        served: Sampling,
        share: float,
        decay: float,
        chunk_tokens: int = 256,
    ):
        """`share` of the tokens; `served`: the sampling transforms that decoding will use (greedy: alpha is logged at
        temperature 1)."""
        super().__init__()
        self.embeddings, self.mixture, self.share, self.decay = embeddings, mixture, share, decay
        self.chunk_tokens = chunk_tokens
        self._target = (split(target.model), target.model)  # in a tuple: not trained
        self._served = served_probabilities(served)
        self._measures = False

    def begin_step(self, step: int, total_steps: int) -> None:
        """Whole steps are measured, every so many and the last: on all ranks alike, resumed or not."""
        self._measures = step % _MEASURE_EVERY == 0 or step + 1 == total_steps

    def forward(self, batch: DistillBatch) -> LossSums:
        """Sums over the batch's labels; in some steps also the metrics."""
        (backbone, head), model = self._target
        measure = self._measures or not self.training
        following = self._following(batch)  # [rows, length]: labels that embeddings behind each token have
        anchors, scale = self._anchors(following)
        if not anchors.shape[1]:
            return LossSums(self.embeddings.raw.sum() * 0.0, batch.supervised, {})
        context = context_pass(backbone, model, batch.input_ids, batch.position_ids, batch.segment_ids)
        states = lookahead_pass(context, anchors, self.embeddings())
        counts = following.gather(1, anchors)
        last, ids = context.last_hidden.flatten(0, 1), batch.input_ids.flatten()
        weights = _label_weights(batch)
        first = torch.arange(len(anchors), device=anchors.device)[:, None] * batch.input_ids.shape[1]
        flat = (first + anchors).flatten()
        scale = scale[:, None].expand_as(anchors).flatten()
        total = torch.zeros((), device=anchors.device)
        metrics: dict[str, tuple[Tensor | int | float, Tensor | int | float]] = {}
        right = torch.zeros(flat.shape[0], self.embeddings.num_tokens, dtype=torch.bool, device=flat.device)
        for i in range(self.embeddings.num_tokens):
            rows = (counts > i).flatten().nonzero().squeeze(-1)
            predictors, own = flat[rows] + i + 1, states[:, :, i].flatten(0, 1)[rows]
            loss = chunked_loss(
                self.mixture,
                own,
                DraftHead(head.weight, head.bias, head.transform),
                TargetHidden(last[predictors], head),
                ids[predictors + 1] if self.mixture.needs_tokens else None,
                scale[rows] * weights[predictors + 1],
                chunk_tokens=self.chunk_tokens,
                metrics=measure and i == 0,
                probabilities=self._served,
            )
            total = total + self.decay**i * loss.sum
            if measure:
                hits = self._hits(own.detach(), last[predictors])
                right[rows, i] = hits[:, 0]
                metrics[f"heads/{i}/loss"] = (loss.sum.detach(), loss.count)
                metrics[f"heads/{i}/top1"] = (hits[:, 0].sum(), len(hits))
                metrics[f"heads/{i}/top5"] = (hits.any(-1).sum(), len(hits))
            if loss.alpha_sum is not None:
                metrics["alpha"] = (loss.alpha_sum, loss.positions)
        if measure:
            starts = (counts == self.embeddings.num_tokens).flatten()
            emitted = 1.0 + right[starts].long().cumprod(1).sum(1)
            metrics["block_efficiency"] = (emitted.sum(), starts.sum())
        return LossSums(total, batch.supervised, metrics)

    def _following(self, batch: DistillBatch) -> Int[Tensor, "rows length"]:
        """For every token that a label follows: how many labels follow that label without a gap, k at most; 0 elsewhere."""
        k = self.embeddings.num_tokens
        label = torch.nn.functional.pad(batch.loss_mask, (0, k + 1))
        length = batch.input_ids.shape[1]
        # A document's first token is never a label, so a run of labels never leaves its document.
        runs = torch.stack([label[:, 1 + i : 1 + i + length] for i in range(k + 1)], -1).long().cumprod(-1)
        return (runs.sum(-1) - 1).clamp(min=0)

    def _anchors(
        self, following: Int[Tensor, "rows length"]
    ) -> tuple[Int[Tensor, "rows anchors"], Float[Tensor, "rows"]]:
        """Columns of the tokens that embeddings stand behind, and what each row's sums are to be scaled by: of a row with
        few tokens that have a label, a larger share is taken. Rows with fewer than others are filled up with tokens that
        have none.
        """
        able = following > 0
        if self.training:
            order = torch.rand(able.shape, device=able.device)
        else:  # spread evenly, the same in every call
            order = (torch.arange(able.shape[1], device=able.device) * 0.618034 % 1.0).expand(able.shape)
        most = int((able.sum(1).max().float() * self.share).ceil())
        chosen = order.masked_fill(~able, 2.0).argsort(1)[:, :most]
        return chosen, able.sum(1) / able.gather(1, chosen).sum(1).clamp(min=1)

    @torch.no_grad()
    def _hits(
        self, own: Float[Tensor, "labels hidden"], target: Float[Tensor, "labels hidden"]
    ) -> Bool[Tensor, "labels 5"]:
        """Whether each of the five most likely tokens is the target's most likely one."""
        head = self._target[0][1]
        five = min(5, head.weight.shape[0])
        pairs = zip(own.split(_ROWS_AT_ONCE), target.split(_ROWS_AT_ONCE), strict=True)
        parts = [head(guess).topk(five, -1).indices == head(real).argmax(-1, keepdim=True) for guess, real in pairs]
        return torch.cat(parts) if parts else torch.zeros(0, five, dtype=torch.bool, device=own.device)


def _label_weights(batch: DistillBatch) -> Float[Tensor, "positions"]:
    """Weights of labels by their own flat position."""
    weights = batch.weights.new_zeros(batch.input_ids.numel() + 1)
    weights[batch.predictors + 1] = batch.weights
    return weights
