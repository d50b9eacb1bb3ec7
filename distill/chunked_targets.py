"""How the chunked loss is given the target's distributions: as hidden states, or as cached top-k log-probabilities."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .losses import LOG_FLOOR, log_probs


@dataclass(frozen=True)
class TargetHidden:
    """Last hidden states of the target, and its output head: rows ``[n, hidden]`` to logits ``[n, vocab]``.

    For a drafter with a cut vocabulary, `kept_ids` lists the target's id of each of the drafter's rows, and `kept_head`
    (optional) gives the logits of these ids only: it is used when no metric asks for the full vocabulary.
    """

    hidden: Float[Tensor, "tokens hidden"]
    head: Callable[[Tensor], Tensor]
    kept_ids: Int[Tensor, "kept"] | None = None
    kept_head: Callable[[Tensor], Tensor] | None = None

    def select(self, rows: Tensor) -> "TargetHidden":
        """The same head over some of the positions."""
        return TargetHidden(self.hidden[rows], self.head, self.kept_ids, self.kept_head)

    def logits(self, rows: slice, full: bool) -> Tensor:
        """Logits at `rows`: over the full vocabulary when `full`, else over the kept ids where these are known."""
        hidden = self.hidden[rows]
        if full or self.kept_ids is None:
            return self.head(hidden)
        return self.kept_head(hidden) if self.kept_head is not None else self.head(hidden)[:, self.kept_ids]


@dataclass(frozen=True)
class TargetTopK:
    """The target's k most probable tokens a position, with the exact log of the mass of all others.

    The loss treats the rest as one bucket: k + 1 outcomes, the drafter's probabilities outside `ids` added up. Of an
    f-divergence (KL, TV, JSD, skew) that is a lower bound of the value over the full vocabulary. `ids` count the
    drafter's rows; -1 marks a token that a cut vocabulary lacks: the loss leaves it out and renormalises what remains,
    the rest included.
    """

    ids: Int[Tensor, "tokens k"]
    log_probs: Float[Tensor, "tokens k"]
    log_rest: Float[Tensor, "tokens"]

    def select(self, rows: Tensor | slice) -> "TargetTopK":
        """Some of the positions."""
        return TargetTopK(self.ids[rows], self.log_probs[rows], self.log_rest[rows])

    def bucket_log_probs(self) -> Float[Tensor, "tokens buckets"]:
        """The target's log-probabilities of the k ids and of the rest, floored and renormalised over what is kept."""
        known = self.log_probs.masked_fill(self.ids < 0, float("-inf"))
        return log_probs(torch.cat([known, self.log_rest.unsqueeze(-1)], dim=-1))


def draft_bucket_log_probs(
    log_draft: Float[Tensor, "tokens vocab"], ids: Int[Tensor, "tokens k"]
) -> tuple[Float[Tensor, "tokens buckets"], Float[Tensor, "tokens vocab"]]:
    """The drafter's log-probabilities of `ids` and of all others together, and its probabilities with `ids` set to 0.

    A negative id has the floored log-probability. The first result, used as logits beside the target's, makes any
    divergence the bucketed one; it is differentiable.
    """
    missing = ids < 0
    picked = log_draft.gather(-1, ids.clamp(min=0)).masked_fill(missing, LOG_FLOOR)
    # An extra column takes the writes of missing ids, which must not fall on a real one.
    columns = ids.masked_fill(missing, log_draft.shape[-1])
    others = torch.nn.functional.pad(log_draft.exp(), (0, 1)).scatter(-1, columns, 0.0)[:, :-1]
    rest = others.sum(-1, keepdim=True).clamp(min=torch.finfo(log_draft.dtype).tiny).log()
    return torch.cat([picked, rest], dim=-1), others
