"""Training an EAGLE drafter: a divergence from its target at every step of its unrolling."""

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..decode.sampling import Sampling, served_probabilities
from ..distill.batch import DistillBatch
from ..distill.chunked import LossSum, chunked_loss, label_rows
from ..distill.mixture import Mixture
from ..distill.teacher import Teacher
from ..distill.trainee import LossSums
from .eagle_fit import Features, fit_start
from .eagle_model import EagleModel
from .eagle_unroll import Anchors, Unrolled, find_anchors, unroll
from .repeated_target import RepeatedTarget

_METRICS_EVERY = 32  # steps; they need the target's full head, which a cut vocabulary otherwise never pays for
_ROWS_AT_ONCE = 256


class Weights(NamedTuple):
    """What the loss is made of besides the divergence."""

    steps: int = 1  # of the unrolling
    decay: float = 0.8  # step j weighs this to the power of j
    feature: float = 0.0  # of the smooth L1 distance to the target's last hidden state
    noise: float = 0.0  # half-width of the uniform noise on the target's features
    first_alone: float = 0.0  # share of the training in which only step 0 is taken


class EagleObjective(nn.Module):
    """An EAGLE drafter under a divergence from its target at every step of the unrolling.

    Returned is the weighted mean over steps of each step's sum over its labels, with the batch's supervised labels as
    count. (Of an answer of n tokens step j has n - j labels: nothing is drafted across an answer's ends.)
    """

    def __init__(
        self,
        model: EagleModel,
        teacher: Teacher,
        features: Features,
        layers: tuple[int, ...],
        mixture: Mixture,
        served: Sampling,
        weights: Weights,
        chunk_tokens: int = 512,
    ):
        """`teacher` has the kept ids of a cut vocabulary. `features` gives the target's hidden states of `layers` and the
        last ones, all counted from 0. `served`: the sampling transforms that decoding will use (greedy: alpha is
        logged at temperature 1).
        """
        super().__init__()
        self.model, self.mixture, self.layers, self.weights = model, mixture, layers, weights
        self.chunk_tokens = chunk_tokens
        # In a tuple, so that the target's parameters are not this module's.
        self._target = (teacher, features, teacher.target.model.get_input_embeddings())
        self._served = served_probabilities(served)
        self._rows_of = model.outputs.rows_of_ids()
        self._measures, self._alone = False, False

    def begin_step(self, step: int, total_steps: int) -> None:
        """Whole steps are measured, every so many and the last: on all ranks alike, resumed or not."""
        self._measures = step % _METRICS_EVERY == 0 or step + 1 == total_steps
        self._alone = step < self.weights.first_alone * total_steps

    def fit(self, batches: Iterable[DistillBatch]) -> float:
        """Solve for the start, before the first step; the share of the target's features that it explains."""
        teacher, features, embed = self._target
        return fit_start(self.model, self.layers, teacher.target.num_layers, features, embed, batches)

    def forward(self, batch: DistillBatch) -> LossSums:
        """Sums over the batch's labels; in some steps also of the metrics."""
        teacher, features, embed = self._target
        measure = self._measures or not self.training
        trained = 1 if self._alone and self.training else self.weights.steps
        steps = self.weights.steps if measure else trained
        anchors = find_anchors(batch, steps)
        if not anchors.at.shape[1]:
            nothing = torch.stack([parameter.sum() for parameter in self.model.parameters()]).sum() * 0.0
            return LossSums(nothing, batch.supervised, {})
        states = features(batch)
        last = states[teacher.target.num_layers].flatten(0, 1)
        fused = self._noised(self.model.fuse([states[layer] for layer in self.layers]))
        meter = Meter(teacher, last, anchors) if measure else None
        shares = [self.weights.decay**j for j in range(trained)]
        shares = [share / sum(shares) for share in shares]
        label_weights = _at_predictors(batch)
        total = fused.new_zeros((), dtype=torch.float32)
        unrolled = unroll(self.model, batch, embed, fused, anchors, steps)
        taken = list(islice(unrolled, trained))
        for one, share in zip(taken, shares, strict=True):
            if self.weights.feature:
                distance = (self._distance(one, last) * label_weights[one.predictors]).sum()
                total = total + share * self.weights.feature * distance
            if meter is not None:
                loss = self._divergence([one], [1.0], last, batch.input_ids, label_weights, one.step == 0)
                total = total + share * loss.sum
                meter.add(one, self.model, loss)
        if meter is None:
            total = total + self._divergence(taken, shares, last, batch.input_ids, label_weights).sum
        else:
            with torch.no_grad():  # steps that are not trained yet, but measured
                for one in unrolled:
                    meter.add(one, self.model, self._divergence([one], [1.0], last, batch.input_ids, label_weights))
        return LossSums(total, batch.supervised, {} if meter is None else meter.metrics())

    def _divergence(
        self,
        taken: list[Unrolled],
        shares: list[float],
        last: Tensor,
        ids: Tensor,
        label_weights: Tensor,
        measure: bool = False,
    ) -> LossSum:
        """Of some steps, each weighing its share: together they need the target's distributions once a label."""
        teacher = self._target[0]
        needs_target = self.mixture.needs_target or measure
        predictors, order = torch.cat([one.predictors for one in taken]).sort(stable=True)
        weights = [share * label_weights[one.predictors] for one, share in zip(taken, shares, strict=True)]
        return chunked_loss(
            self.mixture,
            self.model.read_by_head(torch.cat([one.outputs for one in taken])[order]),
            self.model.outputs.draft_head(0),
            RepeatedTarget(**vars(teacher.as_targets(last)), of_row=predictors) if needs_target else None,
            label_rows(ids.flatten()[predictors + 1], self._rows_of) if self.mixture.needs_tokens else None,
            torch.cat(weights)[order],
            chunk_tokens=self.chunk_tokens,
            metrics=measure,
            probabilities=self._served,
        )

    def _distance(self, one: Unrolled, last: Tensor) -> Float[Tensor, "labels"]:
        """Smooth L1 between outputs and the features that they stand for, a mean over the hidden size."""
        wanted = last[one.predictors].to(one.outputs.dtype)
        return torch.nn.functional.smooth_l1_loss(one.outputs, wanted, reduction="none").float().mean(-1)

    def _noised(self, features: Tensor) -> Tensor:
        if not (self.training and self.weights.noise):
            return features
        return features + self.weights.noise * (2 * torch.rand_like(features) - 1)


class Meter:
    """Per step: the loss, and how often the drafter's most likely token, or one of its five, is the target's own most likely
    one.
    """

    def __init__(self, teacher: Teacher, last: Float[Tensor, "positions hidden"], anchors: Anchors):
        positions = last.shape[0]
        self.teacher = teacher
        # Every label of a later step is some anchor's label of step 0.
        self.best = torch.full((positions,), -1, device=last.device)
        self.last = last
        self.right = torch.ones(anchors.at.numel(), dtype=torch.bool, device=last.device)  # all steps so far
        self.found: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        self.emitted = torch.zeros((), device=last.device)
        self.drafts = float((anchors.steps > 0).sum())

    @torch.no_grad()
    def add(self, one: Unrolled, model: EagleModel, loss: LossSum) -> None:
        """Take in a step with its loss, the first one with its alpha."""
        if one.step == 0:
            hidden = self.last[one.predictors].to(self.teacher.target.dtype)
            self.best[one.predictors] = torch.cat(
                [self.teacher.head(x).argmax(-1) for x in hidden.split(_ROWS_AT_ONCE)]
            )
        five = min(5, model.outputs.num_scored)
        parts = [model.logits(x).topk(five, -1).indices for x in one.outputs.split(_ROWS_AT_ONCE)]
        hits = model.outputs.to_target_ids(torch.cat(parts)) == self.best[one.predictors, None]
        self.right[one.anchors] &= hits[:, 0]
        self.emitted += self.right[one.anchors].sum()
        labels = float(len(hits))
        self.found[f"heads/{one.step}/loss"] = (loss.sum.detach(), loss.count)
        self.found[f"heads/{one.step}/top1"] = (hits[:, 0].sum(), labels)
        self.found[f"heads/{one.step}/top5"] = (hits.any(-1).sum(), labels)
        if loss.alpha_sum is not None:
            self.found["alpha"] = (loss.alpha_sum, loss.positions)

    def metrics(self) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        """Sums and counts; `block_efficiency` is that of greedy chains drafted from every anchor."""
        return {"block_efficiency": (self.emitted + self.drafts, self.drafts), **self.found}


def _at_predictors(batch: DistillBatch) -> Float[Tensor, "positions"]:
    """Weights of labels by the position that each is predicted from."""
    weights = batch.weights.new_zeros(batch.input_ids.numel())
    weights[batch.predictors] = batch.weights
    return weights
