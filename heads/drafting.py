"""Decoding with heads on the target's last hidden state, parallel ones or ones that wait for each other's tokens."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..decode.confidence import Confidence, Stopping
from ..decode.draft import Accepted, Draft, TargetOutputs
from ..decode.draft_chain import draft_chain
from ..decode.draft_tree import draws_needed, grow_tree
from ..decode.dynamic_tree import DynamicTree, grow_dynamic_tree
from ..decode.sampling import Sampling
from ..decode.streams import row_uniforms
from ..decode.tree import TreeLayout
from ..models.head import parameters_read
from .adapted import AdaptedTarget
from .prefix import PrefixCache
from .trunk import DraftHeads


class HeadsDrafter:
    """Medusa, blockwise and Hydra heads as a drafter.

    Between steps it holds, per row, the newest emitted token and the target's last hidden state that this token was
    predicted from (zeros for a prompt of one token, before which the target saw nothing).
    """

    def __init__(
        self,
        heads: DraftHeads,
        accuracies: Sequence[Sequence[float]] | None = None,
        adapted: AdaptedTarget | None = None,
    ):
        """`accuracies[head][rank]`: how often a head's rank-th most likely token was the target's, measured in training.
        `adapted`: the target, where it is being trained too.
        """
        self.heads = heads
        self.accuracies, self.adapted = accuracies, adapted
        self.wants = {"hidden_states": [-1]}
        self.vocabulary: Tensor | None = heads.outputs.kept_ids
        self.tree: TreeLayout | None = None
        self.dynamic: DynamicTree | None = None
        self.confidence: Confidence | None = None

    @property
    def module(self) -> nn.Module:
        """What the packed backend packs: the heads and the target's projection where they read it."""
        prefix = [] if self.heads.prefix is None else [self.heads.prefix]
        return nn.ModuleList([*prefix, self.heads.trunk, self.heads.outputs.read()])

    @property
    def num_parameters_read(self) -> int:
        """Parameters that one pass reads: all heads where they are parallel, else one of them (the mean) and what it shares
        with the target.
        """
        read = parameters_read(self.module)
        if not self.heads.sees_drafted:
            return read
        shared = 0 if self.heads.outputs.projection == "own" else parameters_read(self.heads.outputs.base)
        return shared + (read - shared) // self.heads.num_heads

    def num_passes(self, num_tokens: int) -> int:
        """Parallel heads take one pass, sequential ones one a token."""
        return min(num_tokens, self.heads.num_heads) if self.heads.sees_drafted else 1

    def set_tree(self, layout: TreeLayout | None) -> None:
        """Draft this tree from now on; None: chains, or trees by confidence where these are switched on."""
        self.tree = layout

    def set_dynamic_tree(self, shape: DynamicTree | None) -> None:
        """Draft trees by confidence from now on (arXiv:2406.16858); None: not any more."""
        self.dynamic = None if shape is None else shape.checked()

    def set_confidence(self, confidence: Confidence | None) -> None:
        """End chains by its own probabilities from now on; None: never."""
        self.confidence = confidence

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Take right-padded prompts. The hidden states of all but their last tokens come with the first `observe`."""
        lengths = attention_mask.sum(1)
        self.prompt_lengths = lengths.tolist()
        self.newest = input_ids.gather(1, lengths[:, None] - 1)  # [batch, 1]
        self.hidden: Tensor | None = None  # [batch, hidden]
        self.prefix: PrefixCache | None = None
        if self.heads.prefix is not None:
            self.prefix = PrefixCache(self.heads.prefix, len(lengths), self.heads.dtype, input_ids.device)
        self.unfinished = torch.ones_like(lengths, dtype=torch.bool)

    @torch.no_grad()
    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """A chain of at most `num_tokens` (one a head), or the tree that was set, cut to this depth."""
        assert self.hidden is not None
        depth = min(num_tokens, self.heads.num_heads)
        drafting = _Drafting(self.heads, self.heads.prepare(self.hidden), self.newest)
        if self.tree is not None:
            return self._propose_tree(self.tree, depth, drafting, sampling, generators)
        first = drafting.first()
        outputs = self.heads.outputs
        if self.dynamic is not None:
            return grow_dynamic_tree(self.dynamic, depth, first, sampling, drafting.after_level, outputs.to_target_ids)
        stopping = None if self.confidence is None else Stopping(self.confidence, ~self.unfinished)
        uniforms = _uniforms(depth, sampling, generators, first.device)
        return draft_chain(
            depth, first, sampling, uniforms, drafting.after_token, outputs.to_target_ids, outputs.spread, stopping
        )

    def withdraw(self, rows: Bool[Tensor, "batch"]) -> None:
        """Nothing is kept of a draft, so there is nothing to forget."""

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Take the hidden state that the newest token was predicted from."""
        assert target_outputs is not None
        hidden = target_outputs.hidden_states[-1]
        if self.hidden is None:  # after the prefill of all but the prompts' last tokens
            counts = target_outputs.valid.sum(1)
            self.hidden = hidden.new_zeros(len(counts), hidden.shape[-1])
            self._take(hidden, counts, [length - 1 for length in self.prompt_lengths])
            return
        self.unfinished = accepted.lengths > 0
        num_accepted = (accepted.lengths - 1).clamp(min=0)
        path = torch.nn.functional.pad(accepted.path.clamp(min=-1) + 1, (1, 0))  # the newest token, then the nodes
        fed = hidden.gather(1, path[..., None].expand(-1, -1, hidden.shape[-1]))
        self._take(
            fed, accepted.lengths.clamp(max=path.shape[1]), [min(n, path.shape[1]) for n in accepted.host_lengths]
        )
        if accepted.tokens.shape[1]:
            last = accepted.tokens.gather(1, num_accepted[:, None])
            self.newest = torch.where(self.unfinished[:, None], last, self.newest)

    @torch.no_grad()
    def _take(
        self, hidden: Float[Tensor, "batch n hidden"], counts: Int[Tensor, "batch"], host_counts: list[int]
    ) -> None:
        """Keep the last of each row's first `counts` hidden states; rows without any keep what they had."""
        assert self.hidden is not None
        if not hidden.shape[1]:
            return
        if self.prefix is not None:
            hidden = self.prefix.extend(hidden.to(self.heads.dtype), counts, host_counts)
        last = hidden[torch.arange(len(counts), device=counts.device), (counts - 1).clamp(min=0)]
        self.hidden = torch.where(counts[:, None] > 0, last, self.hidden)

    @torch.no_grad()
    def teacher_forced_hidden(
        self, input_ids: Int[Tensor, "batch length"], attention_mask: Tensor, hidden_states: dict[int, Tensor]
    ) -> Float[Tensor, "batch length hidden"]:
        """What head 0 reads its logits from, for every position of right-padded rows: position i's token is the newest, and
        the hidden state is that of position i - 1.
        """
        hidden = hidden_states[-1]
        if self.heads.prefix is not None:
            positions = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
            seen = positions[:, :, None] >= positions[:, None, :]
            hidden = self.heads.prefix(hidden.to(self.heads.dtype), positions, seen)
        before = torch.nn.functional.pad(hidden[:, :-1], (0, 0, 1, 0))
        return self.heads.states(0, self.heads.prepare(before), input_ids[..., None])

    @torch.no_grad()
    def first_token_logits(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n vocab"]:
        """Logits over the target's vocabulary; -inf outside the drafter's."""
        return self.heads.outputs.spread(self.heads.outputs.logits(hidden, 0).float(), -torch.inf)

    def _propose_tree(
        self,
        layout: TreeLayout,
        depth: int,
        drafting: "_Drafting",
        sampling: Sampling,
        generators: Sequence[torch.Generator],
    ) -> Draft:
        outputs = self.heads.outputs
        if sampling.temperature > 0:
            layout = layout.without_gaps().truncated(depth)
        else:
            layout = layout.truncated(depth)
            if not self.heads.sees_drafted and max(layout.ranks) < outputs.num_scored:
                return _chosen_by_depth(layout, drafting)
        first = drafting.first()
        uniforms = _uniforms(draws_needed(layout), sampling, generators, first.device)
        return grow_tree(
            layout, first, sampling, uniforms, drafting.after_level, outputs.to_target_ids, outputs.spread
        ).draft


class _Drafting:
    """One step's draft as it grows, level by level: the tokens on the way to every node of the newest level."""

    def __init__(self, heads: DraftHeads, prepared: Float[Tensor, "batch prepared"], newest: Int[Tensor, "batch one"]):
        self.heads, self.prepared = heads, prepared
        self.paths = newest[:, None]  # [batch, nodes, depth + 1]
        self.first_of_level, self.num_fed = -1, 0  # numbers of fed nodes; the root is -1

    def first(self) -> Float[Tensor, "batch scored"]:
        """The distribution of the first draft token."""
        return self.logits_at(0)

    def logits_at(self, depth: int) -> Float[Tensor, "batch scored"]:
        """A head's logits for the one path that there is, or for all paths where heads do not look at tokens."""
        return self.heads.logits(depth, self.prepared, self.paths[:, 0])

    def after_token(self, tokens: Int[Tensor, "batch"]) -> Float[Tensor, "batch scored"]:
        """The next distribution of a chain that goes on with `tokens`."""
        self.paths = torch.cat([self.paths, tokens[:, None, None]], -1)
        return self.logits_at(self.paths.shape[-1] - 1)

    def after_level(
        self, tokens: Int[Tensor, "batch nodes"], parents: Int[Tensor, "batch nodes"]
    ) -> Float[Tensor, "batch nodes scored"]:
        """The distributions after a level's nodes, whose parents are nodes of the level before, by number of fed node."""
        at = (parents - self.first_of_level)[..., None].expand(-1, -1, self.paths.shape[-1])
        self.paths = torch.cat([self.paths.gather(1, at), tokens[..., None]], -1)
        self.first_of_level, self.num_fed = self.num_fed, self.num_fed + tokens.shape[1]
        head, nodes = self.paths.shape[-1] - 1, tokens.shape[1]
        if not self.heads.sees_drafted:
            return self.logits_at(head)[:, None].expand(-1, nodes, -1)
        return self.heads.logits(head, self.prepared[:, None].expand(-1, nodes, -1), self.paths)


def _chosen_by_depth(layout: TreeLayout, drafting: _Drafting) -> Draft:
    """A tree of most likely tokens where they depend on the depth alone: one search a head instead of one a node."""
    batch = len(drafting.prepared)
    device = drafting.prepared.device
    tokens = torch.zeros(batch, len(layout.parents), dtype=torch.long, device=device)
    for depth in range(1, layout.depth + 1):
        level = [node for node, here in enumerate(layout.depths) if here == depth]
        ranks = [layout.ranks[node] for node in level]
        top = drafting.logits_at(depth - 1).topk(max(ranks) + 1, dim=-1).indices
        tokens[:, level] = drafting.heads.outputs.to_target_ids(top)[:, ranks]
    parents = torch.tensor(layout.parents, device=device).expand(batch, -1)
    return Draft(tokens, parents, with_replacement=False)


def _uniforms(
    count: int, sampling: Sampling, generators: Sequence[torch.Generator], device: torch.device
) -> Tensor | None:
    if sampling.temperature == 0:
        return None
    return row_uniforms(count, generators, device)
