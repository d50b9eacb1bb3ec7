"""Walking a tree of drafts, rows of a batch side by side: the batched twin of `verify.multi`."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .draft import Draft, Verdict
from .sampling import draw


def multi(
    draft: Draft,
    target_probs: Float[Tensor, "batch nodes_and_one vocab"],
    uniforms: Float[Tensor, "batch nodes_and_one"],
    lenience: float = 1.0,
    depth: int | None = None,
) -> Verdict:
    """Recursive rejection over a tree; twin of `verify.multi`."""
    walk = _walk_chosen if draft.draft_probs is None else _walk_drawn
    num_accepted, path, weights = walk(draft, target_probs, uniforms, lenience, depth)
    return Verdict(num_accepted, path, draw(weights, uniforms[:, -1]))


def _walk_chosen(
    draft: Draft, target_probs: Tensor, uniforms: Tensor, lenience: float, depth: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen children: every node's test is known beforehand, and only the last node's distribution is touched.

    What the target has left when a child is tried is one minus what its elder siblings took.
    """
    batch, nodes = draft.tokens.shape
    of_target = target_of_tokens(draft, target_probs)
    siblings = draft.parents.unsqueeze(2) == draft.parents.unsqueeze(1)
    elder = siblings & torch.ones(nodes, nodes, dtype=torch.bool, device=siblings.device).tril(-1)
    same = elder & (draft.tokens.unsqueeze(2) == draft.tokens.unsqueeze(1))
    repeated = same.any(2)
    taken = (elder & ~repeated.unsqueeze(1)).double() @ of_target.unsqueeze(2)
    left = (1 - taken.squeeze(2)).clamp_min(0)
    passes = (uniforms[:, :nodes] * lenience * left < of_target) & ~repeated
    num_accepted, path, last = follow(passes, draft, depth)

    rows = torch.arange(batch, device=last.device)
    target = target_probs[rows, last + 1].double()
    # The last node's children were all rejected; other nodes write to a column beyond the vocabulary.
    rejected = torch.where(counted(draft) & (draft.parents == last.unsqueeze(1)), draft.tokens, target.shape[1])
    left = torch.nn.functional.pad(target, (0, 1)).scatter_(1, rejected, 0.0)[:, :-1]
    return num_accepted, path, torch.where(left.amax(1, keepdim=True) > 0, left, target)


def _walk_drawn(
    draft: Draft, target_probs: Tensor, uniforms: Tensor, lenience: float, depth: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Drawn children, one test of every row at a time; distributions are touched only where a child was rejected."""
    assert draft.draft_probs is not None
    batch, nodes = draft.tokens.shape
    all_rows = torch.arange(batch, device=draft.tokens.device)
    order = torch.arange(nodes, device=draft.tokens.device)
    at = draft.parents.new_full((batch,), -1)
    tested = at  # the node tested last: the next one has a larger index
    path = draft.parents.new_full((batch, nodes), -1)
    left = _Left(draft, target_probs)
    num_accepted = torch.zeros_like(at)
    for _ in range(nodes):
        candidates = counted(draft) & (draft.parents == at.unsqueeze(1)) & (order > tested.unsqueeze(1))
        found = candidates.any(1)
        if found.device.type == "cpu" and not found.any():
            break
        node = candidates.int().argmax(1)
        token = draft.tokens[all_rows, node].clamp(min=0)
        drafted = draft.draft_probs[all_rows, node, token].double() / left.drawn_mass
        accepted = found & (uniforms[all_rows, node] * drafted * lenience < left.of_token(at, token))
        left.update(found & ~accepted, accepted, at, node, token)
        path.scatter_(1, num_accepted.clamp(max=nodes - 1).unsqueeze(1), torch.where(accepted, node, -1).unsqueeze(1))
        num_accepted = num_accepted + accepted
        at, tested = torch.where(accepted, node, at), torch.where(found, node, tested)
    return num_accepted, path[:, :depth], left.distribution(at)


class _Left:
    """What each row's target has left at the node it stands on, and what that node's next child was drawn from."""

    def __init__(self, draft: Draft, target_probs: Tensor):
        batch, _, vocab = target_probs.shape
        device = target_probs.device
        self.draft, self.target_probs = draft, target_probs
        self.rows = torch.arange(batch, device=device)
        self.untouched = torch.ones(batch, dtype=torch.bool, device=device)  # nothing rejected yet: the target itself
        self.remaining = torch.zeros(batch, vocab, dtype=torch.float64, device=device)
        self.tried = torch.zeros(batch, 1 if draft.with_replacement else vocab, dtype=torch.bool, device=device)
        self.drawn_mass = torch.ones(batch, dtype=torch.float64, device=device)  # of the draft, without tried siblings

    def of_token(self, at: Tensor, token: Tensor) -> Tensor:
        """Probability left for one token a row."""
        target = self.target_probs[self.rows, at + 1, token].double()
        return torch.where(self.untouched, target, self.remaining[self.rows, token])

    def distribution(self, at: Tensor) -> Tensor:
        """All that is left, float64."""
        target = self.target_probs[self.rows, at + 1].double()
        return torch.where(self.untouched.unsqueeze(1), target, self.remaining)

    def update(self, rejected: Tensor, accepted: Tensor, at: Tensor, node: Tensor, token: Tensor) -> None:
        """Take in one test a row: a rejection leaves a residual, an acceptance moves on to the node's own target."""
        rows = rejected.nonzero().squeeze(1) if rejected.device.type == "cpu" else self.rows
        if len(rows):
            self._reject(rows, rejected[rows], at[rows], node[rows], token[rows].unsqueeze(1))
        self.untouched = (self.untouched & ~rejected) | accepted
        self.drawn_mass = self.drawn_mass.masked_fill(accepted, 1.0)
        self.tried &= ~accepted.unsqueeze(1)

    def _reject(self, rows: Tensor, rejected: Tensor, at: Tensor, node: Tensor, token: Tensor) -> None:
        target = self.target_probs[rows, at + 1].double()
        left = torch.where(self.untouched[rows].unsqueeze(1), target, self.remaining[rows])
        drawn = draft_distribution(self.draft, rows, node, left.shape[1])
        if not self.draft.with_replacement:
            drawn = drawn.masked_fill(self.tried[rows], 0.0)
        residual = (left - drawn / self.drawn_mass[rows].unsqueeze(1)).clamp_min_(0)
        mass = residual.sum(1, keepdim=True)
        left = torch.where(mass > 0, residual / mass, left)  # no mass only by rounding
        self.remaining[rows] = torch.where(rejected.unsqueeze(1), left, self.remaining[rows])
        if not self.draft.with_replacement:
            self.tried[rows] = self.tried[rows].scatter(
                1, token, rejected.unsqueeze(1) | self.tried[rows].gather(1, token)
            )
            mass = drawn.scatter(1, token, 0.0).sum(1)
            self.drawn_mass[rows] = torch.where(rejected, mass, self.drawn_mass[rows])


def follow(
    passes: Bool[Tensor, "batch nodes"], draft: Draft, depth: int | None = None
) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch depth"], Int[Tensor, "batch"]]:
    """Walk from the root, at every node to its first child that passes.

    Returns the number of nodes walked, their indices (-1 past the end) and the last one (-1: none).
    """
    batch, nodes = passes.shape
    passes = passes & counted(draft)
    at = draft.parents.new_full((batch,), -1)
    path = draft.parents.new_full((batch, nodes if depth is None else depth), -1)
    moving = torch.ones_like(at, dtype=torch.bool)
    for step in range(path.shape[1]):
        children = passes & (draft.parents == at.unsqueeze(1)) & moving.unsqueeze(1)
        moving = children.any(1)
        if moving.device.type == "cpu" and not moving.any():
            break
        first = children.int().argmax(1)
        path[:, step] = torch.where(moving, first, -1)
        at = torch.where(moving, first, at)
    return (path >= 0).sum(1), path, at


def row_lengths(draft: Draft) -> Int[Tensor, "batch"]:
    """Nodes that count, per row."""
    batch, nodes = draft.tokens.shape
    return draft.tokens.new_full((batch,), nodes) if draft.lengths is None else draft.lengths


def counted(draft: Draft) -> Bool[Tensor, "batch nodes"]:
    """Which nodes count."""
    return torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < row_lengths(draft).unsqueeze(1)


def target_of_tokens(
    draft: Draft, target_probs: Float[Tensor, "batch nodes_and_one vocab"]
) -> Float[Tensor, "batch nodes"]:
    """The target's probability of every node's token after that node's parent, float64."""
    rows = torch.arange(len(draft.tokens), device=draft.tokens.device).unsqueeze(1)
    return target_probs[rows, draft.parents + 1, draft.tokens.clamp(min=0)].double()


def draft_distribution(
    draft: Draft, rows: Int[Tensor, "rows"], node: Int[Tensor, "rows"], vocab: int
) -> Float[Tensor, "rows vocab"]:
    """The distribution that one node of each of `rows` was drawn from, float64; one-hot for chosen nodes."""
    if draft.draft_probs is not None:
        return draft.draft_probs[rows, node].double()
    one_hot = torch.zeros(len(rows), vocab, dtype=torch.float64, device=rows.device)
    return one_hot.scatter_(1, draft.tokens[rows, node].clamp(min=0).unsqueeze(1), 1.0)
