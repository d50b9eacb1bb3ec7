"""What a drafter hands to the verifier, what it hears back, and the protocol it satisfies.

A draft is a tree: tokens and the node each hangs on. A chain is the tree of width one. Nothing is registered and
nothing is inherited: any object with these methods is a drafter.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .sampling import Sampling


class Companions(NamedTuple):
    """Tokens that ride along in the verification pass for their logits alone (a lookahead window, for one).

    No rule sees them, none can be accepted, nothing counts them. Draft nodes do not attend to them.
    """

    tokens: Int[Tensor, "batch companions"]
    parents: Int[Tensor, "batch companions"]  # among companions, smaller than the index; -1: it follows its host
    hosts: Int[Tensor, "batch companions"] | None = None  # draft nodes; -1 and None: the newest emitted token
    embeddings: Float[Tensor, "batch companions hidden"] | None = None  # in place of those of `tokens`


class Draft(NamedTuple):
    """Draft tokens of one step, rows of a batch side by side.

    Nodes are in topological order: a node's parent has a smaller index. A row may hold fewer nodes than the widest one;
    its first ``lengths[row]`` nodes count.
    """

    tokens: Int[Tensor, "batch nodes"]
    parents: Int[Tensor, "batch nodes"]  # index of the parent node, -1 for a child of the newest emitted token
    # The distribution each node's token was drawn from, after the sampling transforms (siblings drawn without
    # replacement share the one before any removal). None: chosen without chance, hence one-hot.
    draft_probs: Float[Tensor, "batch nodes vocab"] | None = None
    lengths: Int[Tensor, "batch"] | None = None  # None: every row holds all nodes
    with_replacement: bool = True  # how siblings were drawn
    is_chain: bool = False  # node i hangs on node i - 1 in every row (set by `chain`): cheaper masks and rollback
    companions: Companions | None = None


def chain(tokens: Tensor, draft_probs: Tensor | None = None, lengths: Tensor | None = None) -> Draft:
    """A draft without branches: node i hangs on node i - 1."""
    batch, nodes = tokens.shape
    parents = torch.arange(-1, nodes - 1, device=tokens.device).expand(batch, nodes)
    return Draft(tokens, parents, draft_probs, lengths, is_chain=True)


def from_lists(
    tokens: Sequence[Sequence[int]], device: torch.device, parents: Sequence[Sequence[int]] | None = None
) -> Draft:
    """A draft chosen on the host, one list a row, of any lengths. `parents` None: chains."""
    lengths = [len(row) for row in tokens]
    width = max(lengths, default=0)

    def padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
        filled = [[*row, *[fill] * (width - len(row))] for row in rows]
        return torch.tensor(filled, dtype=torch.long).view(len(filled), width).to(device)

    counts = torch.tensor(lengths, device=device)
    if parents is None or not width:
        return chain(padded(tokens, 0), lengths=counts)
    return Draft(padded(tokens, 0), padded(parents, -1), lengths=counts)


class Verdict(NamedTuple):
    """What a verification rule decides, for every row."""

    num_accepted: Int[Tensor, "batch"]  # accepted draft tokens
    path: Int[Tensor, "batch depth"]  # their node indices from the root; -1 past num_accepted
    next_tokens: Int[Tensor, "batch"]  # the recovered or bonus token


class Accepted(NamedTuple):
    """What was emitted in a step: accepted draft tokens, then the recovered or bonus token.

    ``lengths`` is 0 for rows that emitted nothing: finished ones, and all of them in the call that follows the prefill.
    """

    tokens: Int[Tensor, "batch emitted"]  # right-padded with -1
    lengths: Int[Tensor, "batch"]
    path: Int[Tensor, "batch depth"]  # nodes of the draft that were accepted; -1 elsewhere
    host_tokens: list[list[int]]  # the same on the host, unpadded: reading a tensor would wait for the device

    @property
    def host_lengths(self) -> list[int]:
        """`lengths` on the host."""
        return [len(tokens) for tokens in self.host_tokens]


class TargetOutputs(NamedTuple):
    """What the target's last pass computed, for drafters that asked (``wants``).

    The pass was fed, per row, the newest emitted token, the draft's nodes and its companions; in the call after the
    prefill, the prompt without its last token. ``hidden_states[i]`` is indexed as transformers does: 0 the embeddings,
    i the output of layer i, the last one after the final norm. Negative indices in ``wants`` count from the end.
    """

    tokens: Int[Tensor, "batch fed"]
    valid: Bool[Tensor, "batch fed"]  # False: padding
    hidden_states: dict[int, Float[Tensor, "batch fed hidden"]]
    logits: Float[Tensor, "batch fed vocab"] | None  # None after the prefill


@runtime_checkable
class Drafter(Protocol):
    """Anything that proposes. It works on a batch at a time and owns its caches.

    Optional attributes: ``wants``, a dict such as ``{"hidden_states": [-1]}`` or ``{"logits": True}``: what of the
    target's pass ``observe`` needs; ``vocabulary``: the ids it can propose (None: all); ``num_parameters_read``:
    parameters read in one pass (for mbsu); ``num_passes(num_tokens)``: its passes to draft that many (parallel heads:
    1); ``num_companions``: tokens fed beside a draft, a number or ``num_companions(num_tokens)``; and for alpha
    ``teacher_forced_hidden(input_ids, attention_mask, hidden_states) -> [batch, length, size]``, what its first draft
    token is predicted from after every position of right-padded rows, with ``first_token_logits(hidden [n, size]) ->
    [n, vocab]``, -inf outside its vocabulary. Called before ``start`` where they exist: ``set_tree(layout or None)``,
    ``set_confidence(confidence or None)`` (see `confidence.py`) and ``share_cache(lm)``: the target as the decoder feeds
    it, prompts already in its cache. Such a drafter may *begin* the newest token and its draft there, in that order, and
    nothing else: verification goes on from what it began.

    A step may draft nothing, because no row has room or the length policy says so. ``propose`` is not called then, and
    ``observe`` follows ``observe``.
    """

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Forget everything and take new prompts, right-padded."""
        ...

    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """Draft up to `num_tokens` tokens (the depth, for a tree) after what was emitted so far."""
        ...

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Learn what was emitted and roll back to it. `target_outputs` is None unless the drafter `wants` some."""
        ...


def wants(drafter: Any) -> dict[str, Any]:
    """What `drafter` asked for of the target's passes."""
    return getattr(drafter, "wants", None) or {}


def share_cache(drafter: Any, lm: Any) -> bool:
    """Give `drafter` the target as it is fed (a ``CachedLM``) if it takes it. Whether it does."""
    able = hasattr(drafter, "share_cache")
    if able:
        drafter.share_cache(lm)
    return able


def num_companions(drafter: Any, num_tokens: int) -> int:
    """Tokens that `drafter` has fed beside a draft of `num_tokens`."""
    number: Any = getattr(drafter, "num_companions", 0)
    return cast(int, number(num_tokens) if callable(number) else number)
