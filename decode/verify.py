"""The lossless verification rules for one sequence, written to be read.

Each function is pure: draft tokens, the distributions they were drawn from, the target's distributions and uniform
numbers in; which nodes are accepted and the next token out. The batched versions, used for decoding, are tested equal
to these. The rules that trade exactness for speed are in `verify_lossy.py`.

Throughout, ``target_probs[0]`` follows the newest emitted token and ``target_probs[1 + i]`` follows draft node i; both
kinds of probabilities are taken after the sampling transforms. ``draft_probs`` None means that tokens were chosen
without chance, so that their distributions are one-hot. ``uniforms[i]`` decides on node i, the last one draws the next
token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .sampling import draw


class Decision(NamedTuple):
    """What a rule decides about one draft."""

    num_accepted: int
    path: list[int]  # the accepted nodes, from the root on
    next_token: int  # recovered (after a rejection) or bonus


def lossless(
    tokens: Sequence[int],
    draft_probs: Float[Tensor, "nodes vocab"] | None,
    target_probs: Float[Tensor, "nodes_and_one vocab"],
    uniforms: Sequence[float],
    lenience: float = 1.0,
) -> Decision:
    """Speculative sampling on a chain (arXiv:2211.17192, arXiv:2302.01318).

    Token x is accepted with probability min(1, target(x) / draft(x)). After the first rejection the next token comes
    from the residual max(0, target - draft), normalised; with no rejection, from the target. The emitted tokens are
    distributed as the target's own: min(target, draft) + residual = target.

    `lenience` below 1 shrinks draft(x) before the comparison (arXiv:2211.17192, appendix): no longer lossless, but no
    token becomes more than 1 / lenience times as likely.
    """
    for i, token in enumerate(tokens):
        draft = draft_distribution(draft_probs, i, token, target_probs)
        if uniforms[i] * draft[token] * lenience >= target_probs[i, token].double():
            return Decision(i, list(range(i)), pick(residual(target_probs[i].double(), draft), uniforms[-1]))
    return Decision(len(tokens), list(range(len(tokens))), pick(target_probs[len(tokens)], uniforms[-1]))


def block(
    tokens: Sequence[int],
    draft_probs: Float[Tensor, "nodes vocab"] | None,
    target_probs: Float[Tensor, "nodes_and_one vocab"],
    uniforms: Sequence[float],
) -> Decision:
    """Block verification of a chain (arXiv:2403.10444, algorithm 2): lossless, on average no shorter than `lossless`.

    A prefix is judged as a whole, by its ratio of target to draft probability (capped at 1 from token to token), and
    the longest prefix that passes its own test is accepted, even where a shorter one would have failed.
    """
    ratios = [1.0]  # of the prefixes of length 0, 1, ...
    for i, token in enumerate(tokens):
        drafted = float(draft_distribution(draft_probs, i, token, target_probs)[token])
        ratios.append(min(ratios[-1] * float(target_probs[i, token]) / drafted, 1.0))

    length, weights = len(tokens), target_probs[len(tokens)].double()
    passes = ratios[length]
    while length > 0 and not uniforms[length - 1] < passes:
        length -= 1
        target = target_probs[length].double()
        draft = draft_distribution(draft_probs, length, tokens[length], target_probs)
        surplus = (ratios[length] * target - draft).clamp_min(0)
        mass = float(surplus.sum())
        passes = mass / (mass + 1 - ratios[length]) if mass > 0 else 0.0
        weights = surplus if mass > 0 else target
    return Decision(length, list(range(length)), pick(weights, uniforms[-1]))


def multi(
    tokens: Sequence[int],
    parents: Sequence[int],
    draft_probs: Float[Tensor, "nodes vocab"] | None,
    target_probs: Float[Tensor, "nodes_and_one vocab"],
    uniforms: Sequence[float],
    with_replacement: bool = True,
    lenience: float = 1.0,
) -> Decision:
    """Recursive rejection over a tree of drafts (arXiv:2305.09781, SpecInfer): lossless.

    Going down from the root, the children of a node are tried in order, each against what the target has left after
    the rejections before it. Drawn with replacement, every child is tested against the distribution it was drawn from.
    Drawn without (arXiv:2402.14160), against that distribution with the tried siblings removed, renormalised. Chosen
    ones are accepted with the target's remaining mass on them, else that mass is removed. On a chain this is
    `lossless`.
    """
    at, path = -1, []
    remaining, tried = target_probs[0].double(), []
    for i, token in enumerate(tokens):  # parents come first, so one pass meets the children of every accepted node
        if parents[i] != at:
            continue
        draft = draft_distribution(draft_probs, i, token, target_probs)
        if draft_probs is not None and tried and not with_replacement:
            draft[tried] = 0
            draft /= draft.sum()
        if uniforms[i] * draft[token] * lenience < remaining[token]:
            at = i
            path.append(i)
            remaining, tried = target_probs[1 + i].double(), []
        else:
            remaining = residual(remaining, draft)
            tried.append(token)
    return Decision(len(path), path, pick(remaining, uniforms[-1]))


def draft_distribution(
    draft_probs: Float[Tensor, "nodes vocab"] | None, node: int, token: int, target_probs: Float[Tensor, "rows vocab"]
) -> Float[Tensor, "vocab"]:
    """The distribution that a node's token was drawn from, float64: one-hot where it was chosen."""
    if draft_probs is not None:
        return draft_probs[node].to(torch.float64, copy=True)
    one_hot = torch.zeros(target_probs.shape[-1], dtype=torch.float64)
    one_hot[token] = 1
    return one_hot


def residual(target: Float[Tensor, "vocab"], draft: Float[Tensor, "vocab"]) -> Float[Tensor, "vocab"]:
    """What is left of `target` after a draft token was rejected: max(0, target - draft), normalised.

    A rejection proves that there is mass left; where rounding leaves none, `target` itself is the limit.
    """
    left = (target - draft).clamp_min(0)
    mass = left.sum()
    return left / mass if mass > 0 else target


def pick(weights: Float[Tensor, "vocab"], uniform: float) -> int:
    """One id, drawn in proportion to `weights`."""
    return int(draw(weights, torch.tensor(uniform, dtype=torch.float64)))
