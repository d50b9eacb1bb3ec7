"""Divergences between the drafter's and the target's next-token distributions, one loss a position.

Every function takes logits ``[..., vocab]``, the drafter's first, and returns one unreduced loss a position, in nats
unless it says otherwise; only the drafter's side is meant to be differentiated. In the formulas ``t`` is the target's
distribution, ``d`` the drafter's, sums run over the vocabulary. Arithmetic is in float32 (float64 for float64 logits).

A probability of zero (a logit of -inf, or one so far below the largest) is taken as ``exp(LOG_FLOOR)``: where a formula
says infinity the value is large and finite, and neither it nor a gradient is ever NaN. No gradient reaches a floored
logit: a mask put it there, not the network. Logits that are ordinary finite numbers are never floored.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

LOG_FLOOR = -1000.0  # the least log-probability: far below what float32 holds as a probability (-103)


def log_probs(logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    """Floored log-softmax, in float32 (float64 stays)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.log_softmax(logits, dim=-1, dtype=wide).clamp(min=LOG_FLOOR)


def forward_kl(
    draft_logits: Float[Tensor, "*batch vocab"], target_logits: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """Forward KL divergence, KL(target‖drafter) = Σ t (log t − log d) (distillation: arXiv:1503.02531; for drafters:
    DistillSpec, arXiv:2310.08461)."""
    log_draft, log_target = log_probs(draft_logits), log_probs(target_logits)
    return (log_target.exp() * (log_target - log_draft)).sum(-1)


def reverse_kl(
    draft_logits: Float[Tensor, "*batch vocab"], target_logits: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """Reverse KL divergence, KL(drafter‖target) = Σ d (log d − log t) (MiniLLM, arXiv:2306.08543).

    Where the target's probability is zero and the drafter's is not, the formula is infinite; here it costs
    ``-LOG_FLOOR`` nats a unit of the drafter's probability.
    """
    log_draft, log_target = log_probs(draft_logits), log_probs(target_logits)
    return (log_draft.exp() * (log_draft - log_target)).sum(-1)


def jsd(
    draft_logits: Float[Tensor, "*batch vocab"], target_logits: Float[Tensor, "*batch vocab"], beta: float | int = 0.5
) -> Float[Tensor, "*batch"]:
    """Generalised Jensen-Shannon divergence, β KL(t‖m) + (1−β) KL(d‖m) with m = β t + (1−β) d (GKD, arXiv:2306.13649).

    β = 0 means forward KL and β = 1 reverse KL, by the convention of the field's trainers. That is a jump: the formula
    itself tends to 0 at both ends (divided by β, or by 1−β, it tends to these two divergences).
    Raises ValueError unless 0 ≤ beta ≤ 1.
    """
    _check_share("beta", beta)
    if beta == 0:
        return forward_kl(draft_logits, target_logits)
    if beta == 1:
        return reverse_kl(draft_logits, target_logits)
    log_draft, log_target = log_probs(draft_logits), log_probs(target_logits)
    draft, target = log_draft.exp(), log_target.exp()
    log_middle = log_mixture(target, draft, beta)
    to_target = (target * (log_target - log_middle)).sum(-1)
    to_draft = (draft * (log_draft - log_middle)).sum(-1)
    return beta * to_target + (1 - beta) * to_draft


def tvd(
    draft_logits: Float[Tensor, "*batch vocab"], target_logits: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """Total variation distance, ½ Σ |t − d| = 1 − Σ min(t, d) = 1 − alpha, between 0 and 1 (arXiv:2211.17192, cor. 3.6;
    as a loss: DistillSpec, arXiv:2310.08461)."""
    return (log_probs(draft_logits).exp() - log_probs(target_logits).exp()).abs().sum(-1) / 2


def skew_forward_kl(
    draft_logits: Float[Tensor, "*batch vocab"], target_logits: Float[Tensor, "*batch vocab"], skew: float | int = 0.1
) -> Float[Tensor, "*batch"]:
    """Skew forward KL, KL(t‖m) with m = skew · t + (1 − skew) · d (DistiLLM, arXiv:2402.03898). At most −log skew.

    Raises ValueError unless 0 ≤ skew < 1; skew 0 is forward KL.
    """
    _check_share("skew", skew, one=False)
    if skew == 0:
        return forward_kl(draft_logits, target_logits)
    log_draft, log_target = log_probs(draft_logits), log_probs(target_logits)
    target = log_target.exp()
    return (target * (log_target - log_mixture(target, log_draft.exp(), skew))).sum(-1)


def skew_reverse_kl(
    draft_logits: Float[Tensor, "*batch vocab"], target_logits: Float[Tensor, "*batch vocab"], skew: float | int = 0.1
) -> Float[Tensor, "*batch"]:
    """Skew reverse KL, KL(d‖m) with m = skew · d + (1 − skew) · t (DistiLLM, arXiv:2402.03898). At most −log skew.

    Raises ValueError unless 0 ≤ skew < 1; skew 0 is reverse KL.
    """
    _check_share("skew", skew, one=False)
    if skew == 0:
        return reverse_kl(draft_logits, target_logits)
    log_draft, log_target = log_probs(draft_logits), log_probs(target_logits)
    draft = log_draft.exp()
    return (draft * (log_draft - log_mixture(draft, log_target.exp(), skew))).sum(-1)


def adaptive_kl(
    draft_logits: Float[Tensor, "*batch vocab"],
    target_logits: Float[Tensor, "*batch vocab"],
    head_mass: float | int = 0.5,
) -> Float[Tensor, "*batch"]:
    """Adaptive KL, (g_head · KL(t‖d) + g_tail · KL(d‖t)) / (g_head + g_tail) (AKL, arXiv:2404.02657).

    ``g`` is Σ |t − d| over the head or the tail of the vocabulary, a constant for the gradient. The head is the most
    probable tokens of the target whose probabilities add up to at most `head_mass`, always the first of them, and all
    that tie with the last of them. Raises ValueError unless 0 ≤ head_mass ≤ 1.
    """
    _check_share("head_mass", head_mass)
    head, tail = head_tail_shares(
        log_probs(draft_logits).exp().detach(), log_probs(target_logits).exp().detach(), head_mass
    )
    return head * forward_kl(draft_logits, target_logits) + tail * reverse_kl(draft_logits, target_logits)


def neg_log_acceptance(
    draft_logits: Float[Tensor, "*batch vocab"], target_logits: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """Negative log of the expected acceptance, −log Σ min(t, d) = −log alpha (LK losses, arXiv:2602.23881).

    Summed in log space: its gradient, that of TV divided by alpha, stays useful where alpha is too small for float32.
    """
    return -torch.minimum(log_probs(draft_logits), log_probs(target_logits)).logsumexp(-1)


def lk_hybrid(
    draft_logits: Float[Tensor, "*batch vocab"], target_logits: Float[Tensor, "*batch vocab"], eta: float | int = 3.0
) -> Float[Tensor, "*batch"]:
    """λ · KL(t‖d) + (1 − λ) · TV(t, d) with λ = exp(−eta · alpha) (LK losses, arXiv:2602.23881).

    alpha is the position's own Σ min(t, d), a constant for the gradient: KL where the drafter is far, TV where near.
    """
    share = torch.exp(-eta * alpha(draft_logits, target_logits).detach())
    return share * forward_kl(draft_logits, target_logits) + (1 - share) * tvd(draft_logits, target_logits)


def cross_entropy(
    draft_logits: Float[Tensor, "*batch vocab"], tokens: Int[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """Cross-entropy on the tokens, −log d[token]: sequence-level distillation when the target wrote them
    (arXiv:1606.07947). A negative token, one that the drafter's vocabulary lacks, costs nothing."""
    picked = log_probs(draft_logits).gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(tokens < 0, 0.0, -picked)


def alpha(
    draft_logits: Float[Tensor, "*batch vocab"], target_logits: Float[Tensor, "*batch vocab"]
) -> Float[Tensor, "*batch"]:
    """Σ min(t, d) = 1 − TV: the expected acceptance of one draft token, 0 to 1 (arXiv:2211.17192, cor. 3.6)."""
    return torch.minimum(log_probs(draft_logits).exp(), log_probs(target_logits).exp()).sum(-1)


def log_mixture(
    first: Float[Tensor, "*batch vocab"], second: Float[Tensor, "*batch vocab"], share: float | int
) -> Float[Tensor, "*batch vocab"]:
    """log(share · first + (1 − share) · second) of two distributions, finite where both are zero."""
    return torch.lerp(second, first, share).clamp(min=torch.finfo(first.dtype).tiny).log()


def head_tail_shares(
    draft: Float[Tensor, "*batch vocab"], target: Float[Tensor, "*batch vocab"], head_mass: float | int
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Shares of Σ |t − d| that fall on the target's head and on its tail (see `adaptive_kl`); both 0 when t = d."""
    # Sorting a large vocabulary costs more than its output heads do, and the head is nearly always short.
    ranked = target.topk(min(target.shape[-1], 1024), dim=-1).values
    if ranked.shape[-1] < target.shape[-1] and bool((ranked.sum(-1) <= head_mass).any()):
        ranked = target.sort(dim=-1, descending=True).values
    last = (ranked.cumsum(-1) <= head_mass).sum(-1, keepdim=True).sub(1).clamp(min=0)
    in_head = target >= ranked.gather(-1, last)
    gap = (target - draft).abs()
    total = gap.sum(-1).clamp(min=torch.finfo(gap.dtype).tiny)
    # Two sums: the tail as a difference would not be exactly zero where the head holds everything.
    return (gap * in_head).sum(-1) / total, (gap * ~in_head).sum(-1) / total


def _check_share(name: str, value: float | int, one: bool = True) -> None:
    if not (0 <= value < 1 or (one and value == 1)):
        raise ValueError(f"{name} must be at least 0 and {'at most' if one else 'below'} 1, got {value}")
