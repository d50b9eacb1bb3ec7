"""Weighing drafters that need no training against each other: acceptance on calibration texts, costs as measured."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..data.encoded_set import EncodedSet
from ..data.packing import pack
from ..decode.costs import StepCosts, measure_costs
from ..decode.sampling import Sampling, probabilities
from ..distill.batch import DistillBatch, distill_batch
from ..distill.teacher import Teacher
from ..models.target import Target

_ROWS_AT_ONCE = 256


class Worth(NamedTuple):
    """What a drafter is expected to be worth."""

    speedup: float  # over plain decoding, at the best number of draft tokens
    num_tokens: int  # that number, at least 1
    acceptance: float  # mean of single draft tokens


class Calibration:
    """Texts, and the target's own predictions at their labels.

    `batch` packs them; `acceptance` is alpha after the served sampling transforms, for greedy settings the share of labels
    where both argmaxes agree.
    """

    def __init__(self, target: Target, encoded: EncodedSet, num_labels: int, served: Sampling, seed: int = 0):
        """Takes whole examples in an order drawn with `seed` until they have `num_labels` labels or run out."""
        order = np.random.default_rng(seed).permutation(len(encoded))
        enough = int(np.searchsorted(np.cumsum(encoded.supervised[order]), num_labels)) + 1
        self.examples = [encoded[int(i)] for i in order[:enough]]
        packed = pack(self.examples, max(len(example.input_ids) for example in self.examples))
        self.target, self.served, self.batch = target, served, distill_batch(packed, target.device)
        self._teacher = Teacher(target)
        self._hidden = self._teacher.hidden(self.batch)
        parts = [self._teacher.head(rows).argmax(-1) for rows in self._hidden.split(_ROWS_AT_ONCE)]
        self._best = torch.cat(parts)

    @property
    def prompt(self) -> list[int]:
        """A text of median length, cut in half: what costs are measured after."""
        middle = sorted(self.examples, key=lambda example: len(example.input_ids))[len(self.examples) // 2]
        return middle.input_ids[: max(2, len(middle.input_ids) // 2)]

    def costs(self, most: int, seconds: float) -> StepCosts:
        """Of the target's passes over 1 to ``most + 1`` tokens, measured for about `seconds`."""
        return measure_costs(self.target, None, self.prompt, most, seconds=seconds)

    @torch.no_grad()
    def acceptance(
        self,
        hidden: Float[Tensor, "labels hidden"],
        logits_of: Callable[[Tensor], Tensor],
    ) -> Float[Tensor, "labels"]:
        """Expected acceptance at every label of what ``logits_of(hidden)`` gives, over the target's ids."""
        served = partial(probabilities, sampling=self.served)
        found = []
        for rows in torch.arange(len(hidden)).split(_ROWS_AT_ONCE):
            draft = logits_of(hidden[rows]).float()
            if self.served.temperature == 0:
                found.append((draft.argmax(-1) == self._best[rows]).float())
            else:
                target = self._teacher.head(self._hidden[rows]).float()
                found.append(torch.minimum(served(draft), served(target)).sum(-1).float())
        return torch.cat(found)

    def worth(self, acceptance: Float[Tensor, "labels"], draft_seconds: float, verification: Sequence[float]) -> Worth:
        """Expected speed-up of chains drafted with `draft_seconds` a token; ``verification[n]``: of a pass over n + 1."""
        tokens = tokens_a_pass(self.batch, acceptance, len(verification) - 1)
        speedups = [
            emitted * verification[0] / (n * draft_seconds + verification[n]) for n, emitted in enumerate(tokens) if n
        ]
        best = int(np.argmax(speedups))
        return Worth(speedups[best], best + 1, float(acceptance.mean()))


def tokens_a_pass(batch: DistillBatch, acceptance: Float[Tensor, "labels"], most: int) -> list[float]:
    """``[n]``: tokens that chains of n draft tokens emit a pass, drafted at every label that n - 1 others follow.

    1 + Σ_i Π_{j ≤ i} acceptance_j over the labels i positions on, a mean over the places where drafts may begin.
    """
    following = chances(batch, acceptance, most)
    expected = [1.0]
    for n in range(1, most + 1):
        whole = following[(following[:, :n] >= 0).all(-1), :n]
        expected.append(1.0 + float(whole.cumprod(-1).sum(-1).mean()) if len(whole) else expected[-1])
    return expected


def chances(batch: DistillBatch, acceptance: Float[Tensor, "labels"], length: int) -> Float[Tensor, "labels length"]:
    """`acceptance` at every label and the `length` - 1 after it; -1 beyond the end of its answer."""
    flat = acceptance.new_full((batch.input_ids.numel() + length,), -1.0)
    # No two answers touch: what precedes an answer (at least a document's first token) is no label.
    flat[batch.predictors] = acceptance
    following = torch.stack([flat[batch.predictors + i] for i in range(length)], -1)
    ended = (following < 0).cumsum(-1) > 0
    return following.masked_fill(ended, -1.0)
