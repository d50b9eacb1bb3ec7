"""Trees of draft tokens: static layouts, masks, and the drawing of children.

A tree is its nodes' parents, -1 for a child of the newest emitted token, parents before children. A node's rank says
which child of its parent it is: the rank-th draw, or the rank-th most likely token. A chain is the tree of width one.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import BadInput
from .draft import Draft
from .sampling import draw

Drawing = Literal["with_replacement", "without_replacement", "chosen"]  # how the children of a node come about
MAX_NODES = 4096  # a verification pass feeds every node: beyond this a tree is a mistake


class TreeLayout(NamedTuple):
    """The shape of a static tree, nodes ordered by depth, then as their parents, then by rank."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]  # among the children of the parent
    depths: tuple[int, ...]  # 1 for the children of the newest emitted token

    @property
    def depth(self) -> int:
        """The longest path, in nodes."""
        return max(self.depths, default=0)

    @property
    def num_nodes(self) -> int:
        """Nodes to verify."""
        return len(self.parents)

    @property
    def num_children(self) -> tuple[int, ...]:
        """Children to propose after the newest emitted token, then after every node: the last rank used, and one."""
        counts = [0] * (len(self.parents) + 1)
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            counts[parent + 1] = max(counts[parent + 1], rank + 1)
        return tuple(counts)

    @property
    def paths(self) -> list[list[int]]:
        """Every node as the ranks on its way from the root (Medusa's format)."""
        paths: list[list[int]] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), rank])
        return paths

    def truncated(self, depth: int) -> "TreeLayout":
        """The same tree without the nodes deeper than `depth`."""
        keep = sum(here <= depth for here in self.depths)  # the deeper ones come last
        return TreeLayout(self.parents[:keep], self.ranks[:keep], self.depths[:keep])

    def without_gaps(self) -> "TreeLayout":
        """The same shape with every node's children ranked 0, 1, ...: what drawn children need.

        A rank may be left out among chosen children only. Of drawn ones the rule must see every draw, in order.
        """
        ranks = [self.parents[:node].count(parent) for node, parent in enumerate(self.parents)]
        return self._replace(ranks=tuple(ranks))

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.depth == len(self.parents)


def as_layout(tree: Any) -> TreeLayout:
    """The layout that a user's `tree` describes.

    Either widths per depth (``[3, 2, 1]``: three children of the newest token, two of each of those, one of each of
    those) or root-to-node paths of ranks (``[[0], [1], [0, 0]]``, arXiv:2401.10774), in which every path's parent must
    be listed too.

    Raises:
        BadInput: an empty tree, a mixture, a number out of range, a path listed twice, a path without its parent.
    """
    if isinstance(tree, TreeLayout):
        return tree
    if isinstance(tree, (str, bytes)) or not isinstance(tree, Sequence) or len(tree) == 0:
        raise BadInput(
            f"tree: {tree!r} is neither widths per depth ([3, 2, 1]) nor a list of paths ([[0], [1], [0, 0]])"
        )
    if all(isinstance(item, int) and not isinstance(item, bool) for item in tree):
        return _from_widths([int(width) for width in tree])
    paths = []
    for item in tree:
        ranks = list(item) if isinstance(item, (list, tuple)) else []
        if not ranks or not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks):
            raise BadInput(f"tree: {item!r} is not a path, expected a list of child ranks such as [0, 1]")
        paths.append(tuple(ranks))
    return _from_paths(paths)


def _from_widths(widths: list[int]) -> TreeLayout:
    if min(widths) < 1:
        raise BadInput(f"tree: widths per depth must be at least 1, got {widths}")
    parents, ranks, depths = [], [], []
    level = [-1]
    for depth, width in enumerate(widths, start=1):
        if len(parents) + len(level) * width > MAX_NODES:
            raise BadInput(f"tree: widths {widths} make more than {MAX_NODES} nodes")
        following = []
        for parent in level:
            for rank in range(width):
                following.append(len(parents))
                parents.append(parent)
                ranks.append(rank)
                depths.append(depth)
        level = following
    return TreeLayout(tuple(parents), tuple(ranks), tuple(depths))


def _from_paths(paths: Sequence[tuple[int, ...]]) -> TreeLayout:
    if len(paths) > MAX_NODES:
        raise BadInput(f"tree: {len(paths)} paths, at most {MAX_NODES} are allowed")
    ordered = sorted(paths, key=lambda path: (len(path), path))
    index = {(): -1} | {path: i for i, path in enumerate(ordered)}
    for before, path in itertools.pairwise(ordered):
        if before == path:
            raise BadInput(f"tree: path {list(path)} is listed twice")
    for path in ordered:
        if path[:-1] not in index:
            raise BadInput(f"tree: path {list(path)} needs its parent {list(path[:-1])} in the list")
    parents = tuple(index[path[:-1]] for path in ordered)
    return TreeLayout(parents, tuple(path[-1] for path in ordered), tuple(len(path) for path in ordered))


def ancestors(parents: Int[Tensor, "*batch nodes"]) -> Bool[Tensor, "*batch nodes nodes"]:
    """``mask[i, j]``: node j is node i or one of its ancestors: what node i attends to within its draft."""
    nodes = parents.shape[-1]
    steps = parents.unsqueeze(-1) == torch.arange(nodes, device=parents.device)
    reach = (steps | torch.eye(nodes, dtype=torch.bool, device=parents.device)).float()
    for _ in range(max(nodes - 1, 0).bit_length()):  # paths of length 1, 2, 4, ...
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0


def depths(parents: Int[Tensor, "batch nodes"], lengths: Int[Tensor, "batch"]) -> Int[Tensor, "batch"]:
    """How deep each row's tree is, over the nodes that count; 0 for a row without any."""
    counts = torch.arange(parents.shape[1], device=parents.device) < lengths.unsqueeze(1)
    deepest = torch.nn.functional.pad(ancestors(parents).sum(-1) * counts, (0, 1))  # a draft may have no nodes at all
    return deepest.amax(-1)


def draw_children(
    probs: Float[Tensor, "batch vocab"],
    num_children: int,
    uniforms: Float[Tensor, "batch children"] | None,
    how: Drawing,
) -> tuple[Int[Tensor, "batch children"], Bool[Tensor, "batch children"]]:
    """Tokens for the children of one node, in the order in which they are to be tried, and which of them exist.

    Drawn with or without replacement (arXiv:2402.14160), one uniform number in [0, 1) a child; or chosen: the most
    likely ones, which is no chance and makes their distributions one-hot (`uniforms` unused). Where the support is
    smaller than `num_children`, the last ones do not exist when drawn without replacement or chosen.
    """
    if how == "chosen":
        top = probs.topk(min(num_children, probs.shape[-1]), dim=-1)
        missing = (0, num_children - top.indices.shape[-1])
        return torch.nn.functional.pad(top.indices, missing), torch.nn.functional.pad(top.values > 0, missing)
    assert uniforms is not None
    if how == "with_replacement":
        tokens = torch.stack([draw(probs, uniforms[:, rank]) for rank in range(num_children)], 1)
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    left = probs.clone()
    tokens, exist = [], []
    for rank in range(num_children):
        exist.append(left.amax(-1) > 0)
        tokens.append(torch.where(exist[-1], draw(left, uniforms[:, rank]), 0))
        left.scatter_(-1, tokens[-1].unsqueeze(-1), 0.0)
    return torch.stack(tokens, 1), torch.stack(exist, 1)


def compact(draft: Draft, exist: Bool[Tensor, "batch nodes"]) -> Draft:
    """`draft` without the nodes that do not exist and what hangs on them: each row's nodes move together, in order."""
    batch, nodes = draft.tokens.shape
    order = torch.arange(nodes, device=draft.tokens.device)
    if draft.lengths is not None:
        exist = exist & (order < draft.lengths.unsqueeze(1))
    keep = exist & ~(ancestors(draft.parents) & ~exist.unsqueeze(1)).any(-1)
    kept_first = (~keep).long().argsort(dim=1, stable=True)
    moved_to = torch.nn.functional.pad(keep.long().cumsum(1) - 1, (1, 0), value=-1)
    lengths = keep.sum(1)
    parents = moved_to.gather(1, draft.parents.gather(1, kept_first) + 1)
    rows = torch.arange(batch, device=order.device).unsqueeze(1)
    return draft._replace(
        tokens=draft.tokens.gather(1, kept_first),
        parents=torch.where(order < lengths.unsqueeze(1), parents, -1),
        draft_probs=None if draft.draft_probs is None else draft.draft_probs[rows, kept_first],
        lengths=lengths,
    )
