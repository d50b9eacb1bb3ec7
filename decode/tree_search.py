"""Which tree to draft: the best static one for measured acceptance, and the nodes worth verifying of a grown one."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import BadInput
from .tree import MAX_NODES, TreeLayout, as_layout


def expected_accepted(layout: TreeLayout, acceptance: Sequence[Sequence[float]]) -> float:
    """Expected accepted tokens a step: the sum over nodes of the product of acceptances on the way to them.

    ``acceptance[depth - 1][rank]``: how often the rank-th child at that depth is accepted, given that its parent was
    (arXiv:2402.12374). Ranks and depths that were not measured count 0.
    """
    reached: list[float] = []
    for parent, rank, depth in zip(layout.parents, layout.ranks, layout.depths, strict=True):
        row = acceptance[depth - 1] if depth <= len(acceptance) else ()
        here = row[rank] if rank < len(row) else 0.0
        reached.append((reached[parent] if parent >= 0 else 1.0) * here)
    return float(sum(reached))


def best_tree(acceptance: Sequence[Sequence[float]], num_nodes: int) -> TreeLayout:
    """The tree of at most `num_nodes` nodes with the most :func:`expected_accepted` tokens (arXiv:2402.12374).

    Children are taken in the order of their ranks, as drawing them demands. Dynamic programme over depth, rank and
    nodes: with m nodes for the children from a rank on, either none is used, or that child gets a subtree of some size
    and the next rank the rest. Time grows as depths x ranks x nodes squared.

    Raises:
        BadInput: no statistics, a value outside [0, 1], or a node budget out of range.
    """
    _check(acceptance, num_nodes)
    # most[d][r][m]: of m nodes among the children of rank r and up at depth d, given their parent; size[d][r][m]:
    # nodes of child r's subtree then, 0 where no child is used.
    ranks = [len(row) for row in acceptance]
    most = [np.zeros((width + 1, num_nodes + 1)) for width in [*ranks, 0]]
    size = [np.zeros((width + 1, num_nodes + 1), dtype=int) for width in ranks]
    for depth in range(len(acceptance) - 1, -1, -1):
        for rank in range(ranks[depth] - 1, -1, -1):
            subtree = acceptance[depth][rank] * (1 + most[depth + 1][0])  # of 1 + index nodes
            others = most[depth][rank + 1]
            for nodes in range(1, num_nodes + 1):
                values = subtree[:nodes] + others[nodes - 1 :: -1][:nodes]
                best = int(values.argmax())
                if values[best] > 0:
                    most[depth][rank, nodes] = values[best]
                    size[depth][rank, nodes] = best + 1
    paths: list[list[int]] = []
    _collect(size, 0, num_nodes, [], paths)
    return as_layout(paths) if paths else as_layout([1])


def _collect(size: list[np.ndarray], depth: int, nodes: int, prefix: list[int], paths: list[list[int]]) -> None:
    if depth == len(size):
        return
    rank = 0
    while rank < len(size[depth]) - 1 and (here := int(size[depth][rank, nodes])) > 0:
        paths.append([*prefix, rank])
        _collect(size, depth + 1, here - 1, paths[-1], paths)
        nodes, rank = nodes - here, rank + 1


def tree_from_accuracies(accuracies: Sequence[Sequence[float]], num_nodes: int) -> TreeLayout:
    """Medusa's tree (arXiv:2401.10774): node by node the path of highest joint probability, the product of accuracies.

    ``accuracies[head][rank]``: how often that head's rank-th most likely token is the right one. Children are chosen,
    so a rank may be left out. Has at most `num_nodes` nodes; fewer where no other path has any probability.

    Raises:
        BadInput: as for :func:`best_tree`.
    """
    _check(accuracies, num_nodes)
    paths: list[list[int]] = []
    # Paths by descending probability; of equals the shorter, then the lower ranks.
    frontier = [(-value, 1, [rank]) for rank, value in enumerate(accuracies[0])]
    heapq.heapify(frontier)
    while frontier and len(paths) < num_nodes:
        value, depth, path = heapq.heappop(frontier)
        if value == 0:
            break
        paths.append(path)
        if depth < len(accuracies):
            for rank, accuracy in enumerate(accuracies[depth]):
                heapq.heappush(frontier, (value * accuracy, depth + 1, [*path, rank]))
    return as_layout(paths) if paths else as_layout([1])


def _check(statistics: Sequence[Sequence[float]], num_nodes: int) -> None:
    if not 1 <= num_nodes <= MAX_NODES:
        raise BadInput(f"tree: a budget of {num_nodes} nodes is out of range, expected 1 to {MAX_NODES}")
    if not statistics or not all(len(row) for row in statistics):
        raise BadInput("tree: no acceptance statistics, expected a list of rates by rank for every depth")
    if not all(0 <= value <= 1 for row in statistics for value in row):
        raise BadInput("tree: acceptance statistics must lie between 0 and 1")


class Layer(NamedTuple):
    """The nodes of one depth that a growing tree is continued from."""

    scores: Float[Tensor, "batch width"]  # joint log-probability of the path to each; -inf: there is no such node
    parents: Int[Tensor, "batch width"]  # position in the layer before
    ranks: Int[Tensor, "batch width"]  # which of the parent's offered children


def grow_layer(
    scores: Float[Tensor, "batch parents"], child_log_probs: Float[Tensor, "batch parents children"], width: int
) -> Layer:
    """EAGLE-2's expansion (arXiv:2406.16858): of all children of a layer, the `width` of highest joint confidence.

    `child_log_probs` are those of each parent's chosen children, under the drafter. The children must be chosen, not
    drawn: keeping drawn tokens by their confidence is biased.
    """
    batch, num_parents, children = child_log_probs.shape
    joint = (scores.unsqueeze(-1) + child_log_probs).reshape(batch, num_parents * children)
    best = joint.topk(min(width, joint.shape[1]), dim=1)
    return Layer(best.values, best.indices // children, best.indices % children)


class Selection(NamedTuple):
    """The nodes of a grown tree that are to be verified, in topological order."""

    nodes: Int[Tensor, "batch kept"]  # indices into the grown tree
    parents: Int[Tensor, "batch kept"]  # indices into `nodes`, -1 for children of the newest emitted token
    lengths: Int[Tensor, "batch"]  # nodes that exist


def select_nodes(
    scores: Float[Tensor, "batch nodes"], parents: Int[Tensor, "batch nodes"], num_nodes: int
) -> Selection:
    """EAGLE-2's reranking (arXiv:2406.16858): the `num_nodes` nodes of highest joint confidence over all depths.

    `scores` are joint log-probabilities, -inf for nodes that do not exist; a node's is at most its parent's, and of
    equals the parent wins, so that what is kept is a tree. Nodes are in topological order.
    """
    batch, nodes = scores.shape
    kept = min(num_nodes, nodes)
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :kept]
    chosen = best.sort(dim=1).values  # -inf nodes sort last by score, and must come last in the order too
    lengths = (scores.gather(1, best) > -torch.inf).sum(1)
    exists = scores.gather(1, chosen) > -torch.inf
    chosen = chosen.gather(1, (~exists).long().argsort(dim=1, stable=True))
    moved_to = torch.full((batch, nodes + 1), -1, dtype=torch.long, device=scores.device)
    moved_to.scatter_(1, chosen + 1, torch.arange(kept, device=scores.device).expand(batch, kept))
    new_parents = moved_to.gather(1, parents.gather(1, chosen) + 1)
    new_parents = torch.where(torch.arange(kept, device=scores.device) < lengths.unsqueeze(1), new_parents, -1)
    return Selection(chosen, new_parents, lengths)
