"""Verification rules for a batch: what `verify.py` says of one sequence, vectorised over rows.

No value leaves the device per token or per row. Equality with the references, for the same uniforms, is tested.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .draft import Draft, Verdict
from .sampling import draw


def verify_greedy(
    draft: Draft, target_argmax: Int[Tensor, "batch nodes_and_one"], *, depth: int | None = None
) -> Verdict:
    """The lossless rules at temperature 0, from the target's argmax alone.

    `target_argmax[:, 0]` follows the newest emitted token, `target_argmax[:, 1 + i]` follows node i. Equals
    ``verify("lossless", ...)`` with one-hot `target_probs` whatever the draft's probabilities. `depth`: the depth of a
    tree where it is known, so that nothing has to be read from the device.
    """
    if depth is None and is_chain(draft):
        nodes = draft.tokens.shape[1]
        num_accepted = ((draft.tokens == target_argmax[:, :nodes]) & counted(draft)).long().cumprod(1).sum(1)
        next_tokens = target_argmax.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        return Verdict(num_accepted, chain_path(num_accepted, nodes), next_tokens)
    expected = target_argmax.gather(1, draft.parents + 1)
    num_accepted, path, last = follow((draft.tokens == expected) & counted(draft), draft, depth)
    return Verdict(num_accepted, path, target_argmax.gather(1, (last + 1).unsqueeze(1)).squeeze(1))


def verify(
    rule: str,
    draft: Draft,
    target_probs: Float[Tensor, "batch nodes_and_one vocab"],
    uniforms: Float[Tensor, "batch nodes_and_one"],
) -> Verdict:
    """What `rule` decides for every row.

    `target_probs[:, 0]` follows the newest emitted token, `target_probs[:, 1 + i]` follows node i; `uniforms`
    (float64 in [0, 1)) hold one number for each node's test and a last one for the next token.
    """
    return lossless_chain(draft, target_probs, uniforms)


def lossless_chain(
    draft: Draft,
    target_probs: Float[Tensor, "batch nodes_and_one vocab"],
    uniforms: Float[Tensor, "batch nodes_and_one"],
) -> Verdict:
    """Speculative sampling on a chain; twin of `verify.lossless`."""
    nodes = draft.tokens.shape[1]
    lengths = row_lengths(draft)
    ids = draft.tokens.unsqueeze(-1)
    target_of_token = target_probs[:, :nodes].gather(-1, ids).squeeze(-1).double()
    draft_of_token = 1.0 if draft.draft_probs is None else draft.draft_probs.gather(-1, ids).squeeze(-1).double()
    passes = (uniforms[:, :nodes] * draft_of_token < target_of_token) & counted(draft)
    num_accepted = passes.long().cumprod(1).sum(1)

    rows = torch.arange(len(lengths), device=lengths.device)
    weights = target_probs[rows, num_accepted].double()
    if nodes:
        rejected = num_accepted.clamp(max=nodes - 1)
        residual = (weights - draft_distribution(draft, rejected, weights.shape[-1])).clamp_min(0)
        # Without mass only by rounding: a rejection needs draft > target somewhere, hence target > draft elsewhere.
        use = (num_accepted < lengths) & (residual.amax(-1) > 0)
        weights = torch.where(use.unsqueeze(-1), residual, weights)
    return Verdict(num_accepted, chain_path(num_accepted, nodes), draw(weights, uniforms[:, nodes]))


def row_lengths(draft: Draft) -> Int[Tensor, "batch"]:
    """Nodes that count, per row."""
    batch, nodes = draft.tokens.shape
    return draft.tokens.new_full((batch,), nodes) if draft.lengths is None else draft.lengths


def counted(draft: Draft) -> Bool[Tensor, "batch nodes"]:
    """Which nodes count."""
    return torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < row_lengths(draft).unsqueeze(1)


def is_chain(draft: Draft) -> bool:
    """Whether every node hangs on the one before it (read from the device)."""
    nodes = draft.parents.shape[1]
    return bool((draft.parents == torch.arange(-1, nodes - 1, device=draft.parents.device)).all())


def draft_distribution(draft: Draft, node: Int[Tensor, "batch"], vocab: int) -> Float[Tensor, "batch vocab"]:
    """The distribution that the given node of each row was drawn from, float64; one-hot for chosen nodes."""
    rows = torch.arange(len(node), device=node.device)
    if draft.draft_probs is not None:
        return draft.draft_probs[rows, node].double()
    one_hot = torch.zeros(len(node), vocab, dtype=torch.float64, device=node.device)
    return one_hot.scatter_(1, draft.tokens[rows, node].unsqueeze(1), 1.0)


def follow(
    passes: Bool[Tensor, "batch nodes"], draft: Draft, depth: int | None = None
) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch depth"], Int[Tensor, "batch"]]:
    """Walk from the root, at every node to its first child that passes.

    Returns the number of nodes walked, their indices (-1 past the end) and the last one (-1: none).
    """
    batch, nodes = passes.shape
    at = draft.parents.new_full((batch,), -1)
    steps = []
    for _ in range(nodes if depth is None else depth):
        children = passes & (draft.parents == at.unsqueeze(1)) & (steps[-1].unsqueeze(1) >= 0 if steps else True)
        found, first = children.any(1), children.int().argmax(1)
        steps.append(torch.where(found, first, -1))
        at = torch.where(found, first, at)
    path = torch.stack(steps, 1) if steps else passes.new_zeros((batch, 0), dtype=torch.long)
    return (path >= 0).sum(1), path, at


def chain_path(num_accepted: Int[Tensor, "batch"], nodes: int) -> Int[Tensor, "batch nodes"]:
    """Node indices of an accepted prefix, -1 past it."""
    order = torch.arange(nodes, device=num_accepted.device)
    return torch.where(order < num_accepted.unsqueeze(1), order, -1)
