"""The rules that judge tokens one by one, rows of a batch side by side: the batched twins of `verify_lossy.py`."""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .draft import Draft, Verdict
from .sampling import draw
from .verify_batched_tree import counted, target_of_tokens


def judged(
    rule: str,
    draft: Draft,
    judge_probs: Float[Tensor, "batch nodes_and_one vocab"],
    target_probs: Float[Tensor, "batch nodes_and_one vocab"],
    uniforms: Float[Tensor, "batch"],
    options: Mapping[str, float],
    depth: int | None = None,
) -> Verdict:
    """The longest path whose tokens all pass (of several the likeliest, then the first), then a token of the target."""
    of_token = target_of_tokens(draft, judge_probs)
    passes = _passes(rule, of_token, judge_probs, draft.parents + 1, options) & counted(draft)
    path = _longest(passes, of_token, draft, draft.tokens.shape[1] if depth is None else depth)
    num_accepted = (path >= 0).sum(1)
    last = path.max(1).values if path.shape[1] else num_accepted - 1  # indices grow along a path
    rows = torch.arange(len(last), device=last.device)
    return Verdict(num_accepted, path, draw(target_probs[rows, last + 1], uniforms))


def _passes(
    rule: str,
    of_token: Float[Tensor, "batch nodes"],
    judge_probs: Float[Tensor, "batch nodes_and_one vocab"],
    position: Int[Tensor, "batch nodes"],
    options: Mapping[str, float],
) -> Bool[Tensor, "batch nodes"]:
    """Which tokens are good enough, each by itself. `position`: where in `judge_probs` a node is judged."""
    if rule == "typical":
        entropy = torch.special.entr(judge_probs).sum(-1, dtype=torch.float64).gather(1, position)
        return of_token > (options["delta"] * (-entropy).exp()).clamp(max=options["epsilon"])
    if rule == "fallback_rollback":
        return of_token >= math.exp(-options["rollback_threshold"])
    if rule == "tolerant":
        top = judge_probs.topk(min(int(options["top"]), judge_probs.shape[-1]), dim=-1).values.double()
        best, least = (top[..., rank].gather(1, position) for rank in (0, -1))
        return (of_token >= least) & (of_token >= best * math.exp(-options["tolerance"]))
    assert rule == "lenient"
    return of_token >= judge_probs.amax(-1).double().gather(1, position) * options["lenience"]


def _longest(
    passes: Bool[Tensor, "batch nodes"], of_token: Float[Tensor, "batch nodes"], draft: Draft, depth: int
) -> Int[Tensor, "batch depth"]:
    """The longest path on which all pass; of several the likeliest, then the one whose last node comes first."""
    batch, nodes = passes.shape
    path = draft.parents.new_full((batch, depth), -1)
    if not nodes:
        return path
    # One level of the tree a round: a path reaches a node when it reached the node's parent.
    position = draft.parents + 1
    reached = torch.nn.functional.pad(torch.zeros_like(passes), (1, 0), value=True)
    likelihood = torch.nn.functional.pad(torch.zeros_like(of_token), (1, 0), value=1.0)
    length = torch.zeros_like(reached, dtype=torch.long)
    for _ in range(depth):
        reached[:, 1:] = passes & reached.gather(1, position)
        likelihood[:, 1:] = of_token * likelihood.gather(1, position)
        length[:, 1:] = length.gather(1, position) + 1
    length = torch.where(reached, length, -1)
    longest = length.amax(1, keepdim=True)
    likelihood = torch.where(length == longest, likelihood, -1.0)
    last = likelihood.argmax(1) - 1
    for step in range(depth - 1, -1, -1):  # back to the root
        here = longest.squeeze(1) > step
        path[:, step] = torch.where(here, last, -1)
        last = torch.where(here, draft.parents.gather(1, last.clamp_min(0).unsqueeze(1)).squeeze(1), last)
    return path
