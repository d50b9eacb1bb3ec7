"""Growing a static tree with a draft model: the children of a level's nodes come from one pass over that level."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .draft import Draft
from .sampling import Sampling, probabilities
from .tree import TreeLayout, compact, draw_children


class GrownTree(NamedTuple):
    """A draft and, for every node of it, which node of the layout it is (nodes that could not be drawn are left out)."""

    draft: Draft
    layout_nodes: Int[Tensor, "batch nodes"]


def grow_tree(
    layout: TreeLayout,
    logits: Float[Tensor, "batch scored"],
    sampling: Sampling,
    uniforms: Float[Tensor, "batch draws"] | None,
    feed: Callable[[Tensor, Tensor], Tensor],
    to_target_ids: Callable[[Tensor], Tensor],
    spread: Callable[[Tensor], Tensor],
) -> GrownTree:
    """Draw a tree of `layout`. Siblings are drawn without replacement, or are the most likely ones at temperature 0.

    `logits` follow the newest token; ``feed(tokens [batch, n], parents [batch, n])`` gives the logits after further nodes
    (parents by number of node); `uniforms` hold one number per child to draw (`draws_needed`), None at temperature 0.
    """
    greedy = sampling.temperature == 0
    # Chosen children exist by their number alone, so that nothing is to be left out afterwards.
    all_exist = greedy and max(layout.ranks) < logits.shape[-1]
    after = {-1: logits}
    batch, nodes = logits.shape[0], len(layout.parents)
    tokens = torch.zeros(batch, nodes, dtype=torch.long, device=logits.device)
    exist = torch.zeros(batch, nodes, dtype=torch.bool, device=logits.device)
    probs: list[Tensor] = []
    drawn = 0
    for depth in range(1, layout.depth + 1):
        level = [i for i, d in enumerate(layout.depths) if d == depth]
        for parent in sorted({layout.parents[i] for i in level}):
            children = [i for i in level if layout.parents[i] == parent]
            count = max(layout.ranks[i] for i in children) + 1
            if all_exist:
                ids = after[parent].topk(count, dim=-1).indices
                tokens[:, children] = to_target_ids(ids)[:, [layout.ranks[i] for i in children]]
                continue
            kept = after[parent].softmax(-1) if greedy else probabilities(after[parent], sampling)
            numbers = None if uniforms is None else uniforms[:, drawn : drawn + count]
            drawn += count
            ids, there = draw_children(kept, count, numbers, "chosen" if greedy else "without_replacement")
            ranks = [layout.ranks[i] for i in children]
            tokens[:, children], exist[:, children] = to_target_ids(ids)[:, ranks], there[:, ranks]
            if not greedy:
                wide = spread(kept)
                probs.extend([wide] * len(children))
        if depth < layout.depth:
            parents = torch.tensor([layout.parents[i] for i in level], device=tokens.device).expand(batch, -1)
            following = feed(tokens[:, level], parents)
            after = {node: following[:, i] for i, node in enumerate(level)}
    parents = torch.tensor(layout.parents, device=tokens.device).expand(batch, nodes)
    draft = Draft(tokens, parents, torch.stack(probs, 1) if probs else None, with_replacement=False)
    numbers = torch.arange(nodes, device=tokens.device).expand(batch, nodes)
    if all_exist:
        return GrownTree(draft, numbers)
    order = compact(Draft(numbers, parents), exist).tokens
    return GrownTree(compact(draft, exist), order)


def draws_needed(layout: TreeLayout) -> int:
    """Uniform numbers that `grow_tree` uses, per row."""
    return sum(layout.num_children)


def in_layout(path: Int[Tensor, "batch depth"], grown: GrownTree) -> Any:
    """A path of the draft's node numbers as the layout's; -1 stays."""
    return torch.where(path >= 0, grown.layout_nodes.gather(1, path.clamp(min=0)), -1)
