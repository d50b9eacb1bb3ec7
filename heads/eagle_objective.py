"""Training an EAGLE drafter: unrolled over its own outputs, as it will draft (training-time test, arXiv:2503.01840).

An anchor is a position s from which decoding could draft: the target's features are known up to s - 1, the tokens up to
s. In step j the drafter stands at position s + j, reads its own output of step j - 1 as the feature and predicts token
s + j + 1. Its query there sees the entries made of the target's features up to s and its own entries of steps 1 to j,
exactly the keys that the decoder's cache would hold. Step 0 alone is the training of version 1 (arXiv:2401.15077).

Keys and values are made for all positions, everything else for anchors only: nothing else of one layer is ever read.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..decode.sampling import Sampling, probabilities
from ..distill.batch import DistillBatch
from ..distill.chunked import LossSum, chunked_loss
from ..distill.mixture import Mixture
from ..distill.teacher import Teacher
from ..distill.trainee import LossSums
from .eagle_fit import Features, fit_start
from .eagle_model import EagleModel

_METRICS_EVERY = 8  # they need the target's full head, which a cut vocabulary otherwise never pays for
_ROWS_AT_ONCE = 256


class Anchors(NamedTuple):
    """Where drafts begin, row by row, padded to the fullest row."""

    at: Int[Tensor, "rows n"]  # position in the row
    steps: Int[Tensor, "rows n"]  # draft tokens that have a label; 0: padding


class Unrolled(NamedTuple):
    """One step of the unrolling, over the anchors that have a label in it."""

    step: int
    outputs: Float[Tensor, "labels hidden"]
    predictors: Int[Tensor, "labels"]  # flat positions of the target's prediction of the same token
    anchors: Int[Tensor, "labels"]  # flat number of each one's anchor


def find_anchors(batch: DistillBatch, steps: int) -> Anchors:
    """Positions after which 1 to `steps` supervised tokens of the same document follow without a gap.

    Excluded are first tokens of documents, before which there is no feature.
    """
    # A document's first token is never a label, so a run of labels never leaves its document.
    label = torch.nn.functional.pad(batch.loss_mask, (0, steps))
    length = batch.input_ids.shape[1]
    following = torch.stack([label[:, 1 + j : 1 + j + length] for j in range(steps)], -1)
    counts = following.long().cumprod(-1).sum(-1) * (batch.position_ids > 0) * (batch.segment_ids >= 0)
    most = int((counts > 0).sum(1).max())
    at = (counts == 0).long().argsort(dim=1, stable=True)[:, :most]
    return Anchors(at, counts.gather(1, at))


def unroll(
    model: EagleModel,
    batch: DistillBatch,
    embed: Callable[[Tensor], Tensor],
    features: Float[Tensor, "rows length hidden"],
    anchors: Anchors,
    steps: int,
) -> Iterator[Unrolled]:
    """The drafter's outputs at the anchors, step by step. `features` are the target's, fused, each at its own position."""
    before = torch.nn.functional.pad(features[:, :-1], (0, 0, 1, 0))  # the feature that each entry reads
    residual, read = model.inputs(embed(batch.input_ids), before)
    prefix = model.keys_values(read, model.rotation(batch.position_ids))
    seen = _seen(batch, anchors.at)
    length = batch.input_ids.shape[1]
    first = torch.arange(len(anchors.at), device=anchors.at.device)[:, None] * length
    own: list[tuple[Tensor, Tensor]] = []
    outputs = features[:, :0]
    for j in range(steps):
        at = (anchors.at + j).clamp(max=length - 1)
        positions = batch.position_ids.gather(1, anchors.at) + j
        if j == 0:
            residual, read = (_picked(states, at) for states in (residual, read))
        else:
            residual, read = model.inputs(embed(batch.input_ids.gather(1, at)), outputs)
        rotation = model.rotation(positions)
        if j:
            own.append(model.keys_values(read, rotation))
        attended = model.layer.self_attn.attend(model.queries(read, rotation), prefix, seen, own)
        outputs = model.layer.finish(residual, attended)
        labelled = (anchors.steps > j).flatten()
        numbers = labelled.nonzero().squeeze(-1)
        yield Unrolled(j, outputs.flatten(0, 1)[numbers], (first + at).flatten()[numbers], numbers)


def _picked(states: Float[Tensor, "rows length size"], at: Int[Tensor, "rows n"]) -> Float[Tensor, "rows n size"]:
    return states.gather(1, at[..., None].expand(-1, -1, states.shape[-1]))


def _seen(batch: DistillBatch, at: Int[Tensor, "rows n"]) -> Bool[Tensor, "rows n length"]:
    """Entries made of the target's features that a query at each anchor sees: its document's, up to its own."""
    keys = torch.arange(batch.input_ids.shape[1], device=at.device)
    same = batch.segment_ids.gather(1, at)[:, :, None] == batch.segment_ids[:, None, :]
    has_feature = (batch.position_ids > 0)[:, None, :]
    itself = keys == at[:, :, None]  # a padded anchor must see something: a softmax over nothing is nan
    return (same & has_feature & (keys <= at[:, :, None])) | itself


class Weights(NamedTuple):
    """What the loss is made of besides the divergence."""

    steps: int = 1  # of the unrolling
    decay: float = 0.8  # step j weighs this to the power of j
    feature: float = 0.0  # of the smooth L1 distance to the target's last hidden state
    noise: float = 0.0  # half-width of the uniform noise on the target's features


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
        self._served = partial(probabilities, sampling=Sampling(1.0) if served.temperature == 0 else served)
        self._measures = False

    def begin_step(self, step: int, total_steps: int) -> None:
        """Whole steps are measured, every eighth and the last: on all ranks alike, resumed or not."""
        self._measures = step % _METRICS_EVERY == 0 or step + 1 == total_steps

    def fit(self, batches: Iterable[DistillBatch]) -> float:
        """Solve for the start, before the first step; the share of the target's features that it explains."""
        teacher, features, embed = self._target
        return fit_start(self.model, self.layers, teacher.target.num_layers, features, embed, batches)

    def forward(self, batch: DistillBatch) -> LossSums:
        """Sums over the batch's labels; in some steps also of the metrics."""
        teacher, features, embed = self._target
        measure = self._measures or not self.training
        anchors = find_anchors(batch, self.weights.steps)
        if not anchors.at.shape[1]:
            nothing = torch.stack([parameter.sum() for parameter in self.model.parameters()]).sum() * 0.0
            return LossSums(nothing, batch.supervised, {})
        states = features(batch)
        last = states[teacher.target.num_layers].flatten(0, 1)
        fused = self._noised(self.model.fuse([states[layer] for layer in self.layers]))
        meter = Meter(teacher, last, anchors) if measure else None
        shares = [self.weights.decay**j for j in range(self.weights.steps)]
        total = fused.new_zeros((), dtype=torch.float32)
        for one in unroll(self.model, batch, embed, fused, anchors, self.weights.steps):
            label_weights = _at_predictors(batch)[one.predictors]
            loss = self._divergence(one, last, batch.input_ids, label_weights, measure and one.step == 0)
            distance = (self._distance(one, last) * label_weights).sum() if self.weights.feature else 0.0
            total = total + shares[one.step] / sum(shares) * (loss.sum + self.weights.feature * distance)
            if meter is not None:
                meter.add(one, self.model, loss)
        return LossSums(total, batch.supervised, {} if meter is None else meter.metrics())

    def _divergence(self, one: Unrolled, last: Tensor, ids: Tensor, label_weights: Tensor, measure: bool) -> LossSum:
        teacher = self._target[0]
        needs_target = self.mixture.needs_target or measure
        return chunked_loss(
            self.mixture,
            self.model.read_by_head(one.outputs),
            self.model.outputs.draft_head(0),
            teacher.as_targets(last[one.predictors]) if needs_target else None,
            _rows_of(ids.flatten()[one.predictors + 1], teacher.kept_ids) if self.mixture.needs_tokens else None,
            label_weights,
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
    """Per step: how often the drafter's most likely token, or one of its five, is the target's own most likely one."""

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
        """Take in a step."""
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


def _rows_of(labels: Int[Tensor, "labels"], kept_ids: Int[Tensor, "kept"] | None) -> Int[Tensor, "labels"]:
    """Labels as rows of the drafter's head; -1 for ids that it does not score."""
    if kept_ids is None:
        return labels
    rows = torch.searchsorted(kept_ids, labels).clamp(max=len(kept_ids) - 1)
    return torch.where(kept_ids[rows] == labels, rows, -1)
