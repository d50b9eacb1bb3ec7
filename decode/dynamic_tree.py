"""Trees that follow the drafter's confidence (EAGLE-2, arXiv:2406.16858): grown level by level, then reranked.

Children are chosen (the most likely ones), never drawn, so that keeping them by their confidence is unbiased and every
rule for chosen children stays lossless.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import BadInput
from .draft import Draft
from .sampling import Sampling, probabilities
from .tree import MAX_NODES, TreeLayout, as_layout
from .tree_names import parse_tree_name
from .tree_search import grow_layer, select_nodes


class DynamicTree(NamedTuple):
    """How a tree grows: from the `width` most confident nodes of every depth; of all, `num_nodes` are verified."""

    num_nodes: int = 16
    width: int = 4  # also the children that each node offers

    def checked(self) -> "DynamicTree":
        """Itself.

        Raises:
            BadInput: a number out of range.
        """
        for name, value in self._asdict().items():
            if not 1 <= value <= MAX_NODES:
                raise BadInput(f"dynamic tree: {name} is {value}, expected 1 to {MAX_NODES}")
        return self


def as_tree(tree: Any) -> TreeLayout | DynamicTree | None:
    """What a user's `tree` describes: None (a chain), a name (``"dynamic:num_nodes=16,width=4"``), widths or paths.

    Raises:
        BadInput: it is none of these.
    """
    if tree is None:
        return None
    if isinstance(tree, str):
        tree = DynamicTree(**parse_tree_name(tree, "tree")[1])
    return tree.checked() if isinstance(tree, DynamicTree) else as_layout(tree)


def grow_dynamic_tree(
    shape: DynamicTree,
    depth: int,
    logits: Float[Tensor, "batch scored"],
    sampling: Sampling,
    feed: Callable[[Tensor, Tensor], Tensor],
    to_target_ids: Callable[[Tensor], Tensor],
) -> Draft:
    """A tree of at most ``shape.num_nodes`` nodes and `depth` levels, of the highest joint probabilities found.

    `logits` follow the newest token; ``feed(tokens [batch, n], parents [batch, n])`` gives the logits after further nodes
    (target ids; parents by number of fed node, -1: the newest token). Confidence is the drafter's probability after the
    sampling transforms, at temperature 1 where decoding is greedy.
    """
    weigh = sampling if sampling.temperature > 0 else Sampling(temperature=1.0)
    batch, device = logits.shape[0], logits.device
    logits = logits[:, None]  # [batch, nodes grown from, scored]
    scores = torch.zeros(batch, 1, device=device)  # of those nodes
    numbers = torch.full((batch, 1), -1, device=device)  # theirs among all offered nodes
    fed = numbers  # theirs among the fed nodes
    levels: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, joint log-probabilities, parents of all offered nodes
    offered = num_fed = 0
    for level in range(depth):
        offer = probabilities(logits, weigh).log().topk(min(shape.width, logits.shape[-1]), -1)
        children = offer.indices.shape[-1]
        tokens = to_target_ids(offer.indices).flatten(1)
        joint = (scores[..., None] + offer.values).flatten(1)
        levels.append((tokens, joint, numbers[..., None].expand(-1, -1, children).flatten(1)))
        if level == depth - 1:
            break
        grown = grow_layer(scores, offer.values, shape.width)
        at = grown.parents * children + grown.ranks
        logits = feed(tokens.gather(1, at), fed.gather(1, grown.parents))
        scores, numbers = grown.scores, offered + at
        width = at.shape[1]
        fed = (num_fed + torch.arange(width, device=device)).expand(batch, width)
        offered, num_fed = offered + tokens.shape[1], num_fed + width
    tokens, joint, parents = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
    kept = select_nodes(joint, parents, shape.num_nodes)
    return Draft(tokens.gather(1, kept.nodes), kept.parents, None, kept.lengths)
