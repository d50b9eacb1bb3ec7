"""Where a drafter stops by its own confidence, without biasing what is emitted.

What depends on a drawn token may decide only on what comes after it: a token that was drawn stays, whatever its own
probability was. What depends on the distribution alone may also decide on the token that has not been drawn yet.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import BadInput


class Confidence(NamedTuple):
    """Stop drafting a row where its confidence falls below `threshold`."""

    threshold: float | Tensor  # one for all, or [batch]: one a row
    # False: after a token whose own probability is below it. True: before a token when no token's probability reaches
    # it (BiLD's fallback, arXiv:2302.07863).
    before: bool = False


class Stopping:
    """Which rows of a step still draft.

    Probabilities are the drafter's after the sampling transforms, those of temperature 1 where decoding is greedy (all
    are 1 otherwise). To stop early is to know that every row has stopped, so each question waits for the device.
    """

    def __init__(self, confidence: Confidence, idle: Bool[Tensor, "batch"]):
        """`idle` rows have finished: nobody waits for them."""
        self.confidence = confidence
        self.stopped = idle
        self.lengths = torch.zeros_like(idle, dtype=torch.long)

    def before(self, probs: Float[Tensor, "batch scored"]) -> bool:
        """To ask before a token is drawn from `probs`. True: no row drafts on."""
        if not self.confidence.before:
            return False
        self.stopped = self.stopped | (probs.amax(-1) < self.confidence.threshold)
        return bool(self.stopped.all())

    def after(self, probs: Float[Tensor, "batch scored"], choice: Int[Tensor, "batch"]) -> bool:
        """To ask after `choice` was drawn from `probs`, which counts it. True: no row drafts on."""
        self.lengths = self.lengths + ~self.stopped
        if self.confidence.before:
            return False
        own = probs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)
        self.stopped = self.stopped | (own < self.confidence.threshold)
        return bool(self.stopped.all())


def set_confidence(drafter: Any, confidence: Confidence | None, is_tree: bool = False, needed: bool = True) -> None:
    """Tell `drafter` when to stop (None: never). Not `needed`: one that cannot do so is left alone.

    Raises:
        BadInput: it cannot, and it is needed.
    """
    able = hasattr(drafter, "set_confidence") and not is_tree
    if confidence is not None and needed and not able:
        why = (
            "a tree has a depth of its own" if is_tree else f"{type(drafter).__name__} has no probabilities to stop by"
        )
        raise BadInput(f"a confidence threshold cannot be used: {why}")
    if hasattr(drafter, "set_confidence"):
        drafter.set_confidence(confidence if able else None)
