"""Training heads on the target's last hidden state: every head's loss on its own labels, and how often it is right.

Head k at position p guesses token p + k + 2 of the same document, which the target predicts from position p + k + 1. Both
positions are among those that labels are predicted from, so the hidden states there are all that is needed of the target.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..decode.sampling import Sampling, served_probabilities
from ..distill.batch import DistillBatch
from ..distill.chunked import LossSum, chunked_loss, label_rows
from ..distill.chunked_targets import TargetHidden
from ..distill.mixture import Mixture, parse_mixture
from ..distill.trainee import LossSums
from ..models.head import split
from ..models.target import Target
from .adapted import AdaptedTarget
from .features import TargetFeatures
from .heads_fit import Examples, can_be_fitted, fit_heads, widest_map
from .prefix import PrefixAttention
from .repeated_target import RepeatedTarget
from .trunk import DraftHeads

Metrics = dict[str, tuple[Tensor | int | float, Tensor | int | float]]

RANKS = 10  # most likely tokens of a head whose accuracy is measured
_MEASURE_EVERY = 32  # steps: accuracies are over the target's full vocabulary
_MEASURED_LABELS = 512  # of a training batch, at most
_ROWS_AT_ONCE = 256
_FITTED_LABELS, _LABELS_AN_INPUT = 32768, 4  # that linear maps are solved for on, at most
# What heads are worth at last is told by the end of the training alone: this share of it, measured so often.
_LAST_SHARE, _LAST_MEASURES = 0.25, 16


class HeadsObjective(nn.Module):
    """All heads under a mixture of losses, head k weighing ``decay ** k``.

    The loss is Σ_k decay^k Σ_labels loss_k / (supervised labels of the step): a later head has up to k + 1 labels fewer an
    answer. Of the target nothing is a submodule but, with `adapted`, what of it is trained.
    """

    rank_hits: Int[Tensor, "heads ranks"]
    rank_counts: Int[Tensor, "heads"]

    def __init__(
        self,
        heads: DraftHeads,
        target: Target,
        mixture: Mixture,
        decay: float,
        served: Sampling,
        chunk_tokens: int = 512,
        adapted: AdaptedTarget | None = None,
        target_weight: float = 0.0,
    ):
        """`served`: the sampling transforms that decoding will use (greedy: alpha is logged at temperature 1). `adapted`: a
        target that is trained too, held by KL(original || adapted) of weight `target_weight`.
        """
        super().__init__()
        self.heads, self.mixture, self.decay, self.chunk_tokens = heads, mixture, decay, chunk_tokens
        self.adapted, self.target_weight = adapted, target_weight
        self._features = TargetFeatures(target, (-1,))
        self._target_head = (split(target.model)[1],)
        self._served = served_probabilities(served)
        self._measures = False
        self._rows_of = heads.outputs.rows_of_ids()
        # Whole numbers, which a cast of the module to bf16 leaves alone.
        ranks = min(RANKS, heads.outputs.num_scored)
        self.register_buffer("rank_hits", torch.zeros(heads.num_heads, ranks, dtype=torch.long))
        self.register_buffer("rank_counts", torch.zeros(heads.num_heads, dtype=torch.long))

    def begin_step(self, step: int, total_steps: int) -> None:
        """Whole steps are measured, every so many and the last: on all ranks alike, resumed or not. Heads may train alone
        first.
        """
        last_part = int((1 - _LAST_SHARE) * total_steps)
        every = _MEASURE_EVERY
        if step >= last_part:
            every = max(1, min(every, (total_steps - last_part) // _LAST_MEASURES))
        self._measures = step % every == 0 or step + 1 == total_steps
        if step in (0, last_part):  # what passes before the training have shown is none of it
            self.rank_hits.zero_()
            self.rank_counts.zero_()
        if self.adapted is not None:
            self.adapted.begin_step(step, total_steps)

    def learning_rate_share(self, name: str) -> float:
        """Of the recipe's learning rate, for the parameter called `name`."""
        return self.adapted.learning_rate_share if self.adapted is not None and name.startswith("adapted.") else 1.0

    @property
    def accuracies(self) -> list[list[float]] | None:
        """``[head][rank]``: how often that head's rank-th most likely token is the target's, as measured since the last
        quarter of the training began (before that: since its first step).
        """
        counts = self.rank_counts.tolist()
        if not all(counts):
            return None
        return [[hit / count for hit in row] for row, count in zip(self.rank_hits.tolist(), counts, strict=True)]

    def forward(self, batch: DistillBatch) -> LossSums:
        """Sums over the batch's labels; in some steps also accuracies, alpha and the implied block efficiency."""
        original, hidden = self._read(batch)
        total, metrics = torch.zeros((), device=hidden.device), {}
        if self.adapted is not None:
            hidden, total, metrics = self._adapted(batch, original)
        prepared = self.heads.prepare(hidden)
        measure = self._measures or not self.training
        together = self.heads.outputs.projection == "shared"
        if together:
            total = total + self._loss_of_all(batch, original, prepared)
        if measure or not together:
            with torch.no_grad() if together else nullcontext():
                losses = self._losses(batch, original, prepared)
            if not together:
                total = total + sum(self.decay**head * loss.sum for head, loss in enumerate(losses))
            metrics |= {f"heads/{head}/loss": (loss.sum.detach(), loss.count) for head, loss in enumerate(losses)}
        if measure:
            metrics |= self._measured(batch, original if self.adapted is None else hidden.detach(), prepared.detach())
        return LossSums(total, batch.supervised, metrics)

    def _losses(self, batch: DistillBatch, original: Tensor, prepared: Tensor) -> list[LossSum]:
        """Head by head."""
        return [
            chunked_loss(
                self.mixture,
                self.heads.states(head, prepared[sources], self._seen(batch, sources, head)),
                self.heads.outputs.draft_head(head),
                self._targets(original[labels]) if self.mixture.needs_target else None,
                label_rows(batch.labels[labels], self._rows_of) if self.mixture.needs_tokens else None,
                batch.weights[labels],
                chunk_tokens=self.chunk_tokens,
            )
            for head, (sources, labels) in enumerate(self.pairs(batch))
        ]

    def _loss_of_all(self, batch: DistillBatch, original: Tensor, prepared: Tensor) -> Tensor:
        """The same added up and weighed, for heads of one projection: the target's is read once a label, not once a head."""
        states, labels, weights = [], [], []
        for head, (sources, ahead) in enumerate(self.pairs(batch)):
            states.append(self.heads.states(head, prepared[sources], self._seen(batch, sources, head)))
            labels.append(ahead)
            weights.append(self.decay**head * batch.weights[ahead])
        of_row, order = torch.cat(labels).sort(stable=True)
        return chunked_loss(
            self.mixture,
            torch.cat(states)[order],
            self.heads.outputs.draft_head(0),
            RepeatedTarget(**vars(self._targets(original)), of_row=of_row) if self.mixture.needs_target else None,
            label_rows(batch.labels[of_row], self._rows_of) if self.mixture.needs_tokens else None,
            torch.cat(weights)[order],
            chunk_tokens=self.chunk_tokens,
        ).sum

    @property
    def can_be_fitted(self) -> bool:
        """Whether :meth:`fit` has anything to solve for."""
        return can_be_fitted(self.heads)

    def fit(self, batches: Iterable[DistillBatch]) -> float:
        """Solve for a linear map of every head, on some thousand labels, and several for each of what the widest one reads.

        Returns the share of the variance of the hidden states that head 0's map explains.
        """
        most = max(_FITTED_LABELS, _LABELS_AN_INPUT * widest_map(self.heads))
        return fit_heads(self.heads, self._examples(batches, most))

    def _examples(self, batches: Iterable[DistillBatch], max_labels: int) -> Iterator[Examples]:
        labels = 0
        for batch in batches:
            with torch.no_grad():
                original, hidden = self._read(batch)
                prepared = self.heads.prepare(hidden)
            for head, (sources, ahead) in enumerate(self.pairs(batch)):
                yield Examples(head, prepared[sources], self._seen(batch, sources, head), original[ahead])
            labels += len(batch.labels)
            if labels >= max_labels:
                return

    def pairs(self, batch: DistillBatch) -> Iterator[tuple[Int[Tensor, "n"], Int[Tensor, "n"]]]:
        """For every head: labels whose predictor a hidden state is taken from, and the labels that are guessed from there.
        All tokens in between are labels too: nothing is drafted across an answer's ends.
        """
        numbers = torch.arange(len(batch.predictors), device=batch.predictors.device)
        where = torch.full((batch.input_ids.numel(),), -1, device=numbers.device)
        where[batch.predictors] = numbers
        in_document = batch.position_ids.flatten()[batch.predictors]
        for head in range(self.heads.num_heads):
            back = head + 1
            sources = where[(batch.predictors - back).clamp(min=0)]
            # Labels are in the order of their positions: as many lie between the two as there are positions, or a gap does.
            labels = ((in_document >= back) & (sources == numbers - back) & (sources >= 0)).nonzero()[:, 0]
            yield sources[labels], labels

    @torch.no_grad()
    def hits(self, batch: DistillBatch) -> tuple[Bool[Tensor, "labels heads"], Bool[Tensor, "labels heads"]]:
        """Which heads' most likely tokens are the target's, drafting from where each label is predicted; and which have a
        label there to be compared with.
        """
        target_hidden, hidden = self._read(batch)
        if self.adapted is not None:
            target_hidden = hidden = self.adapted.hidden(batch)
        return self._ranked(batch, target_hidden, self.heads.prepare(hidden), len(batch.labels))[:2]

    def _measured(
        self,
        batch: DistillBatch,
        target_hidden: Float[Tensor, "labels hidden"],
        prepared: Float[Tensor, "labels prepared"],
    ) -> Metrics:
        """Of the first labels: per head the share whose most likely (five most likely) tokens hold the target's; head 0's
        alpha; tokens a pass if every position of the text began a step and drafts were taken greedily.

        `target_hidden` are the last hidden states of the target that will verify: the changed one's, where it is trained too.
        """
        most = _MEASURED_LABELS if self.training else len(batch.labels)
        right, guessed, ranks, alpha = self._ranked(batch, target_hidden, prepared, most)
        counts = guessed.sum(0)
        if self.training:
            self.rank_hits += ranks
            self.rank_counts += counts
        metrics: Metrics = {"alpha": (alpha, counts[0])}
        for head, (hits, count) in enumerate(zip(ranks, counts, strict=True)):
            metrics[f"heads/{head}/top1"] = (hits[0], count)
            metrics[f"heads/{head}/top5"] = (hits[:5].sum(), count)
        starts = guessed.all(1)
        accepted = right[starts].long().cumprod(1).sum()
        return metrics | {"block_efficiency": (starts.sum() + accepted, starts.sum())}

    @torch.no_grad()
    def _ranked(
        self,
        batch: DistillBatch,
        target_hidden: Float[Tensor, "labels hidden"],
        prepared: Float[Tensor, "labels prepared"],
        most: int,
    ) -> tuple[Tensor, Tensor, Int[Tensor, "heads ranks"], Tensor]:
        """What :meth:`hits` gives, how often each rank of each head was the target's choice, and head 0's summed alpha."""
        outputs, head = self.heads.outputs, self._target_head[0]
        target_hidden = target_hidden.to(head.weight.dtype)  # under autocast what is trained gives another type
        best = torch.cat(
            [head(rows).argmax(-1) for rows in target_hidden[:most].split(_ROWS_AT_ONCE)] or [batch.labels]
        )
        right = torch.zeros(len(best), self.heads.num_heads, dtype=torch.bool, device=best.device)
        guessed, ranks = torch.zeros_like(right), torch.zeros_like(self.rank_hits)
        alpha = torch.zeros((), device=best.device)
        for k, (sources, labels) in enumerate(self.pairs(batch)):
            inside = labels < len(best)
            pieces = zip(sources[inside].split(_ROWS_AT_ONCE), labels[inside].split(_ROWS_AT_ONCE), strict=True)
            for at, label in pieces:
                logits = self.heads.logits(k, prepared[at], self._seen(batch, at, k))
                top = outputs.to_target_ids(logits.topk(ranks.shape[1], dim=-1).indices)
                found = top == best[label][:, None]
                ranks[k] += found.sum(0)
                right[at, k], guessed[at, k] = found[:, 0], True
                if k == 0:
                    scores = outputs.spread(logits.float(), -torch.inf)
                    alpha += torch.minimum(self._served(scores), self._served(head(target_hidden[label]))).sum()
        return right, guessed, ranks, alpha

    def _seen(self, batch: DistillBatch, sources: Int[Tensor, "n"], head: int) -> Int[Tensor, "n seen"]:
        """The newest emitted token and the `head` tokens after it, for hidden states at the predictors of `sources`."""
        steps = 1 + torch.arange(head + 1, device=sources.device)
        return batch.input_ids.flatten()[batch.predictors[sources][:, None] + steps]

    def _read(self, batch: DistillBatch) -> tuple[Float[Tensor, "labels hidden"], Float[Tensor, "labels hidden"]]:
        """The original target's last hidden states at the labels, and what heads read there, the target being frozen."""
        if self.heads.prefix is None:
            original = self._original(batch)
            return original, original
        return self._over_prefixes(batch, self.heads.prefix)

    def _original(self, batch: DistillBatch) -> Float[Tensor, "labels hidden"]:
        if self.adapted is None:
            return self._features.at_labels(batch)
        with self.adapted.original():
            return self._features.at_labels(batch)

    def _over_prefixes(self, batch: DistillBatch, prefix: PrefixAttention) -> tuple[Tensor, Tensor]:
        """The target's hidden states at the labels, and what the prefix layer makes of all of them there."""
        states = self._features(batch)[-1]
        seen = batch.masks(prefix.config, "sdpa", self.heads.dtype)
        assert isinstance(seen, Tensor)
        out = prefix(states.to(self.heads.dtype), batch.position_ids, seen[:, 0])
        return states.flatten(0, 1)[batch.predictors], out.flatten(0, 1)[batch.predictors]

    def _adapted(self, batch: DistillBatch, original: Float[Tensor, "labels hidden"]) -> tuple[Tensor, Tensor, Metrics]:
        """Hidden states that the heads shall read, what holds the target, and how far it has moved."""
        assert self.adapted is not None
        if not self.adapted.training_target:
            return original, self.adapted.zero(), {}
        hidden = self.adapted.hidden(batch)
        head = self._target_head[0]
        held = chunked_loss(
            parse_mixture("forward_kl"),
            hidden,
            self.adapted.draft_head(),
            TargetHidden(original, head),
            None,
            batch.weights,
            chunk_tokens=self.chunk_tokens,
        )
        return hidden, self.target_weight * held.sum, {"target_kl": (held.sum.detach(), held.count)}

    def _targets(self, hidden: Float[Tensor, "labels hidden"]) -> TargetHidden:
        outputs = self.heads.outputs
        return TargetHidden(hidden, self._target_head[0], outputs.kept_ids, outputs.base)
