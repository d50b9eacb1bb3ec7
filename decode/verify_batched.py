"""Verification rules for a batch: what `verify.py` and `verify_lossy.py` say of one sequence, vectorised over its rows.

No value leaves the device per token or per row (on a CPU, where that costs nothing, loops end early). Equality with the
references, for the same uniforms, is tested.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import BadInput
from .draft import Draft, Verdict
from .rules import rule_options as checked_options
from .sampling import draw
from .verify_batched_lossy import judged
from .verify_batched_tree import counted, draft_distribution, follow, multi, row_lengths


def verify(
    rule: str,
    draft: Draft,
    target_probs: Float[Tensor, "batch nodes_and_one vocab"],
    uniforms: Float[Tensor, "batch nodes_and_one"],
    rule_options: Mapping[str, Any] | None = None,
    judge_probs: Float[Tensor, "batch nodes_and_one vocab"] | None = None,
    *,
    depth: int | None = None,
) -> Verdict:
    """What `rule` decides for every row.

    `target_probs[:, 0]` follows the newest emitted token, `target_probs[:, 1 + i]` follows node i, after the sampling
    transforms; `uniforms` (float64 in [0, 1)) hold one number for each node's test and a last one for the next token.
    `judge_probs`: for lossy rules at temperature 0, the target's probabilities before the one-hot limit (temperature
    1); None: `target_probs` judge. `depth`: a tree's depth where it is known, which bounds the work; the width of the
    path.

    Raises:
        BadInput: an unknown rule or option, an option out of range, or `block` on a tree.
    """
    options = checked_options(rule, rule_options)
    if rule == "block":
        if not (draft.is_chain or _hangs_in_line(draft)):
            raise BadInput("rule: block verification is defined on a chain, and this draft is a tree; use multi")
        return block_chain(draft, target_probs, uniforms)
    if rule in ("lossless", "multi") or (rule == "lenient" and judge_probs is None):
        lenience = options.get("lenience", 1.0)
        if draft.is_chain:
            return lossless_chain(draft, target_probs, uniforms, lenience)
        return multi(draft, target_probs, uniforms, lenience, depth)
    judge_probs = target_probs if judge_probs is None else judge_probs
    return judged(rule, draft, judge_probs, target_probs, uniforms[:, -1], options, depth)


def verify_greedy(
    draft: Draft, target_argmax: Int[Tensor, "batch nodes_and_one"], *, depth: int | None = None
) -> Verdict:
    """The lossless rules at temperature 0, from the target's argmax alone.

    `target_argmax[:, 0]` follows the newest emitted token, `target_argmax[:, 1 + i]` follows node i. Equals
    ``verify("lossless", ...)`` with one-hot `target_probs`, for any draft. `depth` as for :func:`verify`.
    """
    if draft.is_chain:
        nodes = draft.tokens.shape[1]
        num_accepted = prefix(draft.tokens == target_argmax[:, :nodes], draft)
        next_tokens = target_argmax.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        return Verdict(num_accepted, chain_path(num_accepted, nodes), next_tokens)
    expected = target_argmax.gather(1, draft.parents + 1)
    num_accepted, path, last = follow(draft.tokens == expected, draft, depth)
    return Verdict(num_accepted, path, target_argmax.gather(1, (last + 1).unsqueeze(1)).squeeze(1))


def lossless_chain(
    draft: Draft,
    target_probs: Float[Tensor, "batch nodes_and_one vocab"],
    uniforms: Float[Tensor, "batch nodes_and_one"],
    lenience: float = 1.0,
) -> Verdict:
    """Speculative sampling on a chain; twin of `verify.lossless`."""
    nodes = draft.tokens.shape[1]
    target_of_token, draft_of_token = probs_of_tokens(draft, target_probs)
    num_accepted = prefix(uniforms[:, :nodes] * draft_of_token * lenience < target_of_token, draft)
    rows = torch.arange(len(num_accepted), device=num_accepted.device)
    weights = target_probs[rows, num_accepted].double()
    if nodes:
        rejected = num_accepted.clamp(max=nodes - 1)
        residual = (weights - draft_distribution(draft, rows, rejected, weights.shape[-1])).clamp_min_(0)
        # Without mass only by rounding: a rejection needs draft > target somewhere, hence target > draft elsewhere.
        use = (num_accepted < row_lengths(draft)) & (residual.amax(-1) > 0)
        weights = torch.where(use.unsqueeze(-1), residual, weights)
    return Verdict(num_accepted, chain_path(num_accepted, nodes), draw(weights, uniforms[:, nodes]))


def block_chain(
    draft: Draft,
    target_probs: Float[Tensor, "batch nodes_and_one vocab"],
    uniforms: Float[Tensor, "batch nodes_and_one"],
) -> Verdict:
    """Block verification of a chain; twin of `verify.block`.

    From the longest prefix to the empty one, each row stops at the first that passes. A prefix's test needs sums over
    the vocabulary, so on a CPU only the rows still searching are summed.
    """
    batch, nodes = draft.tokens.shape
    lengths = row_lengths(draft)
    rows = torch.arange(batch, device=lengths.device)
    ratios = prefix_ratios(*probs_of_tokens(draft, target_probs))
    num_accepted = lengths.clone()
    weights = target_probs[rows, lengths].double()
    passes = ratios[rows, lengths]
    on_cpu = lengths.device.type == "cpu"
    for _ in range(nodes):
        fails = (num_accepted > 0) & ~(uniforms[rows, (num_accepted - 1).clamp_min(0)] < passes)
        chosen = fails.nonzero().squeeze(1) if on_cpu else rows
        if not len(chosen):
            break
        at = (num_accepted[chosen] - 1).clamp_min(0)
        ratio = ratios[chosen, at]
        target = target_probs[chosen, at].double()
        drafted = draft_distribution(draft, chosen, at, target.shape[-1])
        surplus = (ratio.unsqueeze(1) * target - drafted).clamp_min_(0)
        mass = surplus.sum(-1)
        # No mass: nothing could follow this prefix but a longer one, which would have passed.
        passes_here = torch.where(mass > 0, mass / (mass + 1 - ratio).clamp_min(torch.finfo(mass.dtype).tiny), 0.0)
        weights_here = torch.where((mass > 0).unsqueeze(1), surplus, target)
        moved = fails[chosen]
        num_accepted[chosen] = torch.where(moved, at, num_accepted[chosen])
        passes[chosen] = torch.where(moved, passes_here, passes[chosen])
        weights[chosen] = torch.where(moved.unsqueeze(1), weights_here, weights[chosen])
    return Verdict(num_accepted, chain_path(num_accepted, nodes), draw(weights, uniforms[:, nodes]))


def prefix_ratios(
    target_of_token: Float[Tensor, "batch nodes"], draft_of_token: Float[Tensor, "batch nodes"]
) -> Float[Tensor, "batch nodes_and_one"]:
    """Target to draft probability of every prefix of a chain, capped at 1 from token to token; 1 for the empty one."""
    ratio = target_of_token.new_ones(target_of_token.shape[0])
    ratios = [ratio]
    for target, drafted in zip(target_of_token.unbind(1), draft_of_token.unbind(1), strict=True):
        ratio = (ratio * target / drafted).clamp(max=1.0)
        ratios.append(ratio)
    return torch.stack(ratios, 1)


def probs_of_tokens(
    draft: Draft, target_probs: Float[Tensor, "batch nodes_and_one vocab"]
) -> tuple[Float[Tensor, "batch nodes"], Float[Tensor, "batch nodes"]]:
    """Probability of every token of a chain under the target and under what it was drawn from, float64."""
    ids = draft.tokens.clamp(min=0).unsqueeze(-1)  # padding may be anything
    of_target = target_probs[:, : ids.shape[1]].gather(-1, ids).squeeze(-1).double()
    if draft.draft_probs is None:
        return of_target, torch.ones_like(of_target)
    return of_target, draft.draft_probs.gather(-1, ids).squeeze(-1).double()


def _hangs_in_line(draft: Draft) -> bool:
    """Whether a draft that was not marked as a chain is one all the same (read from the device)."""
    in_line = draft.parents == torch.arange(-1, draft.parents.shape[1] - 1, device=draft.parents.device)
    return bool((in_line | ~counted(draft)).all())


def prefix(passes: Bool[Tensor, "batch nodes"], draft: Draft) -> Int[Tensor, "batch"]:
    """How many nodes of a chain pass before the first that does not."""
    return (passes & counted(draft)).long().cumprod(1).sum(1)


def chain_path(num_accepted: Int[Tensor, "batch"], nodes: int) -> Int[Tensor, "batch nodes"]:
    """Node indices of an accepted prefix, -1 past it."""
    order = torch.arange(nodes, device=num_accepted.device)
    return torch.where(order < num_accepted.unsqueeze(1), order, -1)
