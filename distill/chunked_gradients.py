"""Values and hand-derived gradients of the losses: the fused twins of those in `losses`, tested equal to them.

Each loss L is differentiated by the drafter's log-probabilities, s = ∂L/∂(log d). The step from there to the logits,
s − d Σ s, is the same for all and is done once for a whole mixture; slopes that differ by a multiple of d are equal
after it.
"""

from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .chunked_targets import TargetTopK, draft_bucket_log_probs
from .losses import LOG_FLOOR, head_tail_shares, log_mixture, log_probs
from .mixture import Mixture, Term

Slope = tuple[Tensor, Tensor]  # loss [rows], ∂loss/∂(log d) [rows, outcomes]


class Pair:
    """Two distributions over the same outcomes, as floored log-probabilities ``[rows, outcomes]``."""

    def __init__(self, log_draft: Tensor, log_target: Tensor) -> None:
        self.log_draft = log_draft
        self.log_target = log_target

    @cached_property
    def draft(self) -> Tensor:
        return self.log_draft.exp()

    @cached_property
    def target(self) -> Tensor:
        return self.log_target.exp()

    @cached_property
    def forward_kl(self) -> Slope:
        return (self.target * (self.log_target - self.log_draft)).sum(-1), -self.target

    @cached_property
    def reverse_kl(self) -> Slope:
        terms = self.draft * (self.log_draft - self.log_target)
        return terms.sum(-1), terms

    @cached_property
    def tvd(self) -> Slope:
        gap = self.draft - self.target
        return gap.abs().sum(-1) / 2, self.draft * gap.sign() / 2


def mixture_gradient(
    mixture: Mixture,
    draft_logits: Float[Tensor, "rows vocab"],
    target: Float[Tensor, "rows vocab"] | TargetTopK | None,
    tokens: Int[Tensor, "rows"] | None,
) -> tuple[Float[Tensor, "rows"], Float[Tensor, "rows vocab"], Pair | None]:
    """The mixture's losses at some positions, their gradients by the draft logits, and the pair at temperature T.

    `target` holds logits over the drafter's rows, or top-k log-probabilities (temperature 1 only).
    """
    losses = draft_logits.new_zeros(draft_logits.shape[0])
    gradient: Tensor | None = None
    pair: Pair | None = None
    if target is not None and mixture.needs_target:
        log_draft = log_probs(mixture.tempered(draft_logits))
        if isinstance(target, TargetTopK):
            losses, slope = _bucketed(mixture, log_draft, target)
            draft = log_draft.exp()
        else:
            pair = Pair(log_draft, log_probs(mixture.tempered(target)))
            losses, slope = _weighted(mixture, pair)
            draft = pair.draft
        gradient = _to_logits(slope, log_draft, draft)
        if mixture.temperature != 1:
            losses = losses * mixture.temperature**2
            gradient.mul_(mixture.temperature)  # T² by the convention, 1/T by the chain rule
    for term in mixture.terms:
        if tokens is not None and term.name == "cross_entropy":
            values, hard = _cross_entropy(draft_logits, tokens)
            losses = losses + term.weight * values
            gradient = hard.mul_(term.weight) if gradient is None else gradient.add_(hard, alpha=term.weight)
    if gradient is None:
        raise ValueError(f"the loss {mixture} needs the target for divergences and tokens for cross_entropy")
    return losses, gradient, pair


def divergence_slope(term: Term, pair: Pair) -> Slope:
    """One divergence and its slope. Formulas: see the function of the same name in `losses`."""
    draft, target, option = pair.draft, pair.target, term.option
    match term.name:
        case "forward_kl":
            return pair.forward_kl
        case "reverse_kl":
            return pair.reverse_kl
        case "tvd":
            return pair.tvd
        case "jsd":
            return _jsd(pair, option)
        case "skew_forward_kl" if option > 0:
            log_middle = log_mixture(target, draft, option)
            slope = target * draft * torch.exp(-log_middle)
            return (target * (pair.log_target - log_middle)).sum(-1), slope.mul_(option - 1)
        case "skew_reverse_kl" if option > 0:
            log_middle = log_mixture(draft, target, option)
            log_ratio = pair.log_draft - log_middle
            return (draft * log_ratio).sum(-1), draft * (log_ratio - option * draft * torch.exp(-log_middle))
        case "skew_forward_kl":
            return pair.forward_kl
        case "skew_reverse_kl":
            return pair.reverse_kl
        case "adaptive_kl":
            head, tail = head_tail_shares(draft, target, option)
            return _blend(head, pair.forward_kl, tail, pair.reverse_kl)
        case "neg_log_acceptance":
            least = torch.minimum(pair.log_draft, pair.log_target)
            log_alpha = least.logsumexp(-1, keepdim=True)
            below = (pair.log_target - pair.log_draft).sign_().add_(1).div_(2)  # 1 where the drafter is the lesser
            return -log_alpha.squeeze(-1), (least - log_alpha).exp_().mul_(below).neg_()
        case "lk_hybrid":
            share = torch.exp(-option * torch.minimum(draft, target).sum(-1))
            return _blend(share, pair.forward_kl, 1 - share, pair.tvd)
    raise ValueError(f"{term.name} is not a divergence between two distributions")


def _jsd(pair: Pair, beta: float) -> Slope:
    if beta == 0:
        return pair.forward_kl
    if beta == 1:
        return pair.reverse_kl
    log_middle = log_mixture(pair.target, pair.draft, beta)
    to_draft = pair.draft * (pair.log_draft - log_middle)
    to_target = (pair.target * (pair.log_target - log_middle)).sum(-1)
    return beta * to_target + (1 - beta) * to_draft.sum(-1), to_draft.mul_(1 - beta)


def _blend(share: Tensor, first: Slope, other_share: Tensor, second: Slope) -> Slope:
    """A weighted sum of two losses whose weights are constants for the gradient."""
    slope = first[1] * share.unsqueeze(-1) + second[1] * other_share.unsqueeze(-1)
    return share * first[0] + other_share * second[0], slope


def _weighted(mixture: Mixture, pair: Pair) -> Slope:
    parts = [(term.weight, divergence_slope(term, pair)) for term in mixture.terms if term.name != "cross_entropy"]
    weight, (losses, slope) = parts[0]
    if weight != 1:
        losses, slope = losses * weight, slope * weight
    for weight, (more, other) in parts[1:]:
        losses, slope = losses + weight * more, torch.add(slope, other, alpha=weight)
    return losses, slope


def _bucketed(mixture: Mixture, log_draft: Tensor, target: TargetTopK) -> Slope:
    """k + 1 outcomes: the slope of the rest is shared among its tokens by their probabilities."""
    log_buckets, others = draft_bucket_log_probs(log_draft, target.ids)
    # Renormalised as a floored log-softmax does: the sum is 1 but for the floor of missing ids.
    losses, slope = _weighted(mixture, Pair(log_buckets, target.bucket_log_probs()))
    slope = slope * (log_buckets > LOG_FLOOR)
    rest_slope, log_rest = slope[:, -1:], log_buckets[:, -1:]
    full = torch.nn.functional.pad(others * torch.exp(-log_rest) * rest_slope, (0, 1))
    columns = target.ids.masked_fill(target.ids < 0, log_draft.shape[-1])
    return losses, full.scatter_(-1, columns, slope[:, :-1])[:, :-1]


def _cross_entropy(draft_logits: Tensor, tokens: Tensor) -> Slope:
    """Unlike the others, the gradient by the logits themselves."""
    log_draft = log_probs(draft_logits)
    known = (tokens >= 0).to(log_draft.dtype)
    columns = tokens.clamp(min=0).unsqueeze(-1)
    slope = torch.zeros_like(log_draft).scatter_(-1, columns, -known.unsqueeze(-1))
    losses = -log_draft.gather(-1, columns).squeeze(-1) * known
    return losses, _to_logits(slope, log_draft, log_draft.exp())


def _to_logits(slope: Tensor, log_draft: Tensor, draft: Tensor) -> Tensor:
    """From ∂/∂(log d) to ∂/∂logits; floored log-probabilities pass no gradient on."""
    slope = (log_draft - LOG_FLOOR).sign_().mul_(slope)
    return slope.addcmul_(draft, slope.sum(-1, keepdim=True), value=-1)
