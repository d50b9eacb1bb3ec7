"""Decoding with an EAGLE network: it follows the target's features over what was emitted, its own while it drafts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..decode.confidence import Confidence, Stopping
from ..decode.draft import Accepted, Draft, TargetOutputs
from ..decode.draft_chain import draft_chain
from ..decode.draft_tree import draws_needed, grow_tree
from ..decode.dynamic_tree import DynamicTree, grow_dynamic_tree
from ..decode.forward import CachedLM
from ..decode.sampling import Sampling
from ..decode.streams import row_uniforms
from ..decode.tree import TreeLayout
from ..models.head import parameters_read
from ..models.target import Target
from .eagle_model import EagleModel


class _Fed(NamedTuple):
    logits: None
    hidden_states: tuple[Tensor]


class _Entries:
    """The network as :class:`CachedLM` feeds a model: an entry is a token and the feature before it."""

    def __init__(self, model: EagleModel, embed: nn.Module):
        self.model, self.embed = model, embed
        self.config, self.dtype, self.device = model.config, model.dtype, model.device

    def __call__(self, **inputs: Any) -> _Fed:
        return self.forward(**inputs)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any,
        position_ids: Tensor,
        cache: Any,
        features: Tensor,
        **options: Any,
    ) -> _Fed:
        outputs = self.model(self.embed(input_ids), features, position_ids, attention_mask[:, 0], cache)
        return _Fed(None, (outputs,))


class Eagle:
    """EAGLE, versions 1 and 3, as a drafter: chains, static trees, trees by confidence.

    Its cache holds one entry for every emitted token but the first, each made of the target's feature, except those of the
    newest tokens: they come with the next pass. Entries made of its own outputs are forgotten after every step, whatever
    was accepted of them: the target's features take their places.
    """

    def __init__(
        self,
        model: EagleModel,
        target: Target,
        layers: Sequence[int],
    ):
        """`layers`: the target's hidden states that make a feature."""
        self.model, self.vocabulary = model, model.outputs.kept_ids
        self.wants = {"hidden_states": list(layers)}
        # In a tuple, so that nobody takes the target's embeddings for the drafter's.
        self._embed = (target.model.get_input_embeddings(),)
        self.tree: TreeLayout | None = None
        self.dynamic: DynamicTree | None = None
        self.confidence: Confidence | None = None

    @property
    def module(self) -> nn.Module:
        """What the packed backend packs: the network and the output head that it reads."""
        return nn.ModuleList([self.model, self.model.outputs.read()])

    @property
    def num_parameters_read(self) -> int:
        """Parameters that one drafting pass reads. ``fc`` of version 3 is read once a step, and counts."""
        return parameters_read(self.module)

    def num_passes(self, num_tokens: int) -> int:
        """One pass a draft token."""
        return num_tokens

    def set_tree(self, layout: TreeLayout | None) -> None:
        """Draft this tree from now on; None: chains, or trees by confidence where these are switched on."""
        self.tree = layout

    def set_dynamic_tree(self, shape: DynamicTree | None) -> None:
        """Draft trees by confidence from now on, to the depth asked for (arXiv:2406.16858); None: not any more."""
        self.dynamic = None if shape is None else shape.checked()

    def set_confidence(self, confidence: Confidence | None) -> None:
        """End chains by its own probabilities from now on; None: never."""
        self.confidence = confidence

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Take right-padded prompts. Their entries come with the target's features, in the first `observe`."""
        batch = input_ids.shape[0]
        self.cached = CachedLM(_Entries(self.model, self._embed[0]), batch, hidden_states=(0,))
        self.prompts = input_ids
        self.prompt_lengths = attention_mask.sum(1)
        self.unfinished = torch.ones_like(self.prompt_lengths, dtype=torch.bool)
        self.outputs = torch.zeros(
            batch, self.model.config.hidden_size, dtype=self.model.dtype, device=input_ids.device
        )
        self._set_newest(input_ids[:, :0], self.outputs[:, None][:, :0], [0] * batch)

    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """A chain of `num_tokens`, the tree that was set, cut to this depth, or a tree by confidence of this depth."""
        self._catch_up()
        logits = self.model.logits(self.outputs)
        draft = self._draft(num_tokens, logits, sampling, generators)
        self.cached.keep(
            torch.zeros_like(self.prompt_lengths), [0] * len(self.prompts)
        )  # none of its own entries stays
        if min(self.cached.host_lengths) > 0:
            return draft
        # After a prompt of a single token there is no feature yet to draft from.
        empty = self.cached.lengths == 0
        lengths = (
            torch.full_like(empty, draft.tokens.shape[1], dtype=torch.long) if draft.lengths is None else draft.lengths
        )
        return draft._replace(lengths=lengths.masked_fill(empty, 0))

    def withdraw(self, rows: Bool[Tensor, "batch"]) -> None:
        """Nothing is kept of a draft: its own entries are forgotten by the time that it is proposed."""

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Take the target's features of what was emitted."""
        assert target_outputs is not None
        self._catch_up()
        states = [target_outputs.hidden_states[layer] for layer in self.wants["hidden_states"]]
        if target_outputs.logits is None:
            self._take_prompts(states)
            return
        self.unfinished = accepted.lengths > 0
        # Entry i: the feature of the i-th token that was fed and stays, and the token emitted after it.
        width = max(1, *accepted.host_lengths)
        fed = torch.nn.functional.pad(accepted.path[:, : width - 1].clamp(min=-1) + 1, (1, 0))
        fed = torch.nn.functional.pad(fed, (0, width - fed.shape[1]))
        stay = [state.gather(1, fed[..., None].expand(-1, -1, state.shape[-1])) for state in states]
        tokens = torch.nn.functional.pad(accepted.tokens.clamp(min=0), (0, width - accepted.tokens.shape[1]))
        self._set_newest(tokens, self.model.fuse(stay), accepted.host_lengths)

    @torch.no_grad()
    def teacher_forced_hidden(
        self, input_ids: Int[Tensor, "batch length"], attention_mask: Tensor, hidden_states: dict[int, Tensor]
    ) -> Float[Tensor, "batch length hidden"]:
        """Its outputs after every position of right-padded rows, from the target's features; 0 after the first one."""
        outputs = self.outputs_over(input_ids, hidden_states)
        return torch.nn.functional.pad(outputs, (0, 0, 1, 0))

    def outputs_over(
        self, input_ids: Int[Tensor, "batch length"], hidden_states: dict[int, Tensor]
    ) -> Float[Tensor, "batch entries hidden"]:
        """Outputs of the entries at positions 1 and up, in one pass without a cache."""
        features = self.model.fuse([hidden_states[layer][:, :-1] for layer in self.wants["hidden_states"]])
        positions = torch.arange(features.shape[1], device=input_ids.device).expand(features.shape[:2])
        seen = positions[:, :, None] >= positions[:, None, :]
        return self.model(self._embed[0](input_ids[:, 1:]), features, positions, seen)

    @torch.no_grad()
    def first_token_logits(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n vocab"]:
        """Logits over the target's vocabulary; -inf outside the drafter's."""
        return self.model.outputs.spread(self.model.logits(hidden).float(), -torch.inf)

    def _take_prompts(self, states: list[Tensor]) -> None:
        """Put the prompts' entries into the cache; the last one of each stays to be fed, as after every later step."""
        tokens = self.prompts[:, 1:]
        counts = (self.prompt_lengths - 1).tolist()
        if not tokens.shape[1]:
            return
        features = self.model.fuse(states)
        if tokens.shape[1] > 1:
            self.cached.prefill(tokens[:, :-1], [max(count - 1, 0) for count in counts], features=features[:, :-1])
        last = (self.prompt_lengths - 2).clamp(min=0)[:, None]
        newest = features.gather(1, last[..., None].expand(-1, -1, features.shape[-1]))
        self._set_newest(tokens.gather(1, last), newest, [min(count, 1) for count in counts])

    def _set_newest(self, tokens: Tensor, features: Tensor, host_counts: list[int]) -> None:
        self.newest, self.newest_features, self.newest_host = tokens, features, list(host_counts)
        self.newest_counts = torch.tensor(self.newest_host, device=tokens.device)

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Feed the entries that are still to be fed."""
        if not any(self.newest_host):
            return
        outputs = self._feed(self.newest, self.newest_features, None)
        self.cached.keep(self.newest_counts, self.newest_host)
        last = (self.newest_counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, outputs.shape[-1])
        moved = self.newest_counts[:, None] > 0
        self.outputs = torch.where(moved, outputs.gather(1, last)[:, 0], self.outputs)
        self._set_newest(self.newest[:, :0], self.newest_features[:, :0], [0] * len(self.newest_host))

    def _feed(self, tokens: Tensor, features: Tensor, parents: Tensor | None) -> Tensor:
        return self.cached.feed(tokens, parents, want_logits=False, features=features).hidden_states[0]

    def _draft(
        self, num_tokens: int, logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
    ) -> Draft:
        outputs = self.model.outputs
        if self.tree is not None:
            layout = self.tree if sampling.temperature == 0 else self.tree.without_gaps()
            layout = layout.truncated(num_tokens)
            uniforms = self._uniforms(draws_needed(layout), sampling, generators)
            feed = _Grown(self)
            return grow_tree(layout, logits, sampling, uniforms, feed, outputs.to_target_ids, outputs.spread).draft
        if self.dynamic is not None:
            return grow_dynamic_tree(self.dynamic, num_tokens, logits, sampling, _Grown(self), outputs.to_target_ids)
        latest = self.outputs

        def feed_next(token: Tensor) -> Tensor:
            nonlocal latest
            latest = self._feed(token[:, None], latest[:, None], None)[:, 0]
            return self.model.logits(latest)

        stopping = None if self.confidence is None else Stopping(self.confidence, ~self.unfinished)
        uniforms = self._uniforms(num_tokens, sampling, generators)
        return draft_chain(
            num_tokens, logits, sampling, uniforms, feed_next, outputs.to_target_ids, outputs.spread, stopping
        )

    def _uniforms(self, count: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor | None:
        if sampling.temperature == 0:
            return None
        return row_uniforms(count, generators, self.prompts.device)


class _Grown:
    """Feeds a tree's nodes, level by level: each goes on from its parent's output. Gives the logits after them."""

    def __init__(self, drafter: Eagle):
        self.drafter = drafter
        self.outputs = drafter.outputs[:, None]  # of the newest token, then of every node fed

    def __call__(self, tokens: Tensor, parents: Tensor) -> Tensor:
        features = self.outputs.gather(1, (parents + 1)[..., None].expand(-1, -1, self.outputs.shape[-1]))
        outputs = self.drafter._feed(tokens, features, parents)
        self.outputs = torch.cat([self.outputs, outputs], 1)
        return self.drafter.model.logits(outputs)
