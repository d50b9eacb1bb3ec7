"""Drafting from an intermediate layer of the target (arXiv:2404.16710, 2404.18911, 2307.05908).

The first layers draft: what they make of the newest token goes through the target's final norm and output head, with a
small trained adapter between (as in Kangaroo, arXiv:2404.18911) or without. They write the target's own cache, and
verification goes on from their hidden states, so that no key or value of theirs is computed twice: a step of n draft
tokens takes n passes over the first layers, one more for the last draft token, and one over the other layers.

The target is never changed. (An adapter *inside* the first layers would change what they write into the cache, which then
could not be shared: so there is none.)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..decode.confidence import Confidence, Stopping
from ..decode.draft import Accepted, Draft, TargetOutputs
from ..decode.draft_chain import draft_chain
from ..decode.forward import CachedLM
from ..decode.sampling import Sampling
from ..decode.streams import row_uniforms
from .exit_head import ExitAdapter, ExitHead


class _Adapted(NamedTuple):
    logits: None
    hidden_states: tuple[Tensor]


class _AdapterLM:
    """The adapter as :class:`CachedLM` feeds a model: a token is its hidden state after the exit layer."""

    def __init__(self, adapter: ExitAdapter):
        self.adapter = adapter
        self.config, self.dtype, self.device = adapter.config, adapter.dtype, adapter.device

    def __call__(self, **inputs: Any) -> _Adapted:
        return self.forward(**inputs)

    def forward(
        self, input_ids: Tensor, features: Tensor, output_hidden_states: bool = True, **inputs: Any
    ) -> _Adapted:
        return _Adapted(None, (self.adapter(features, **inputs),))


class EarlyExit:
    """The target's first layers as a drafter of chains.

    It owns no cache of the first layers: it begins the newest token and its draft in the decoder's. The adapter's cache
    holds what was emitted except the newest token and, after a step that accepted all of its draft (or drafted nothing),
    the token before it: these wait, with their hidden states, for the next proposal.
    """

    def __init__(self, head: ExitHead):
        self.head = head
        self.vocabulary: Tensor | None = head.outputs.kept_ids
        self.confidence: Confidence | None = None
        self.wants = {} if head.adapter is None else {"hidden_states": [head.exit_layer]}

    @property
    def module(self) -> nn.Module:
        """What the packed backend packs beside the target."""
        own = [self.head.outputs.read()]
        return nn.ModuleList(own if self.head.adapter is None else [*own, self.head.adapter])

    @property
    def num_parameters_read(self) -> int:
        """Parameters that one pass reads: the first layers, the adapter, norm and output projection."""
        return self.head.num_parameters_read

    def num_passes(self, num_tokens: int) -> int:
        """One pass a draft token. (The last draft token's pass over the first layers is part of its verification.)"""
        return num_tokens

    def set_confidence(self, confidence: Confidence | None) -> None:
        """End chains by its own probabilities from now on; None: never."""
        self.confidence = confidence

    def share_cache(self, lm: CachedLM) -> None:
        """Draft in this cache of the target's from now on."""
        self.shared = lm

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Take right-padded prompts. Their hidden states come with the first `observe`."""
        lengths = attention_mask.sum(1)
        batch = input_ids.shape[0]
        self.newest = input_ids.gather(1, lengths[:, None] - 1)  # [batch, 1]
        self.prompts, self.prompt_lengths = input_ids[:, :-1], [int(n) - 1 for n in lengths.tolist()]
        self._set_unfinished([1] * batch)
        self.num_begun = 0  # tokens, the newest one included
        if self.head.adapter is not None:
            self.cached = CachedLM(_AdapterLM(self.head.adapter), batch, hidden_states=(0,))
            self._wait(input_ids.new_zeros(batch, 0, self.head.adapter.config.hidden_size).float(), [0] * batch)

    @torch.no_grad()
    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """A chain of at most `num_tokens`."""
        hidden, normed = self._begin(self.newest)
        first = normed[:, 0] if self.head.adapter is None else self._catch_up(hidden)

        def feed(token: Tensor) -> Tensor:
            hidden, normed = self._begin(token[:, None])
            if self.head.adapter is None:
                return self.head.logits(normed[:, 0])
            return self.head.logits(self.head.read_by_head(hidden, self._adapt(hidden))[:, 0])

        uniforms = None
        if sampling.temperature:
            uniforms = row_uniforms(num_tokens, generators, self.newest.device)
        stopping = None if self.confidence is None else Stopping(self.confidence, self.unfinished == 0)
        outputs = self.head.outputs
        logits = self.head.logits(first)
        return draft_chain(
            num_tokens, logits, sampling, uniforms, feed, outputs.to_target_ids, outputs.spread, stopping
        )

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Keep what was accepted of what the adapter was fed, and what it lacks."""
        if self.head.adapter is not None:
            assert target_outputs is not None
            hidden = target_outputs.hidden_states[self.head.exit_layer]
            if target_outputs.logits is None:
                if hidden.shape[1]:
                    self.cached.prefill(self.prompts, self.prompt_lengths, features=hidden)
                return
            self._take(accepted, hidden)
        last = accepted.tokens.gather(1, (accepted.lengths - 1).clamp(min=0)[:, None])
        self.newest = torch.where(accepted.lengths[:, None] > 0, last, self.newest)
        self._set_unfinished([int(n > 0) for n in accepted.host_lengths])
        self.num_begun = 0

    @torch.no_grad()
    def teacher_forced_hidden(
        self, input_ids: Int[Tensor, "batch length"], attention_mask: Tensor, hidden_states: dict[int, Tensor]
    ) -> Float[Tensor, "batch length hidden"]:
        """What the output projection reads, for every position of right-padded rows."""
        if self.head.adapter is None:
            return self.head.parts.first(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)[1]
        hidden = hidden_states[self.head.exit_layer]
        return self.head.read_by_head(hidden, self.head.adapter(hidden, use_cache=False))

    @torch.no_grad()
    def first_token_logits(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n vocab"]:
        """Logits over the target's vocabulary; -inf outside the drafter's."""
        return self.head.outputs.spread(self.head.logits(hidden).float(), -torch.inf)

    def _begin(self, tokens: Int[Tensor, "batch 1"]) -> tuple[Tensor, Tensor]:
        self.num_begun += 1
        return self.shared.begin(tokens, self.head.parts)

    def _adapt(self, hidden: Float[Tensor, "batch n hidden"]) -> Float[Tensor, "batch n hidden"]:
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)  # which it does not look at
        return self.cached.feed(tokens, want_logits=False, features=hidden).hidden_states[0]

    def _set_unfinished(self, host: list[int]) -> None:
        self.unfinished_host = host
        self.unfinished = torch.tensor(host, device=self.newest.device)

    def _wait(self, hidden: Float[Tensor, "batch n hidden"], host_counts: list[int]) -> None:
        self.waiting, self.waiting_host = hidden, host_counts
        self.waiting_counts = torch.tensor(host_counts, device=hidden.device)

    def _catch_up(self, newest: Float[Tensor, "batch 1 hidden"]) -> Float[Tensor, "batch hidden"]:
        """Feed the adapter what waits and the newest token; what the output projection reads after that."""
        joined = self._appended(newest, self.unfinished, self.unfinished_host)
        adapted = self._adapt(joined)
        self.cached.keep(self.waiting_counts, self.waiting_host)
        last = (self.waiting_counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, adapted.shape[-1])
        read = self.head.read_by_head(newest, adapted.gather(1, last))[:, 0]
        self._wait(joined[:, :0], [0] * len(self.waiting_host))
        return read

    def _appended(self, hidden: Tensor, counts: Tensor, host_counts: list[int]) -> Tensor:
        """Make hidden states wait behind those that do, row by row."""
        host = [old + new for old, new in zip(self.waiting_host, host_counts, strict=True)]
        joined = torch.cat([self.waiting.to(hidden.dtype), hidden], 1)
        at = torch.arange(max(1, *host), device=counts.device).expand(len(host), -1)
        further = self.waiting.shape[1] + at - self.waiting_counts[:, None]
        at = torch.where(at < self.waiting_counts[:, None], at, further).clamp(max=joined.shape[1] - 1)
        joined = joined.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
        self._wait(joined, host)
        return joined

    def _take(self, accepted: Accepted, hidden: Float[Tensor, "batch fed hidden"]) -> None:
        """`hidden` are those of the newest token and the draft, as verified."""
        fed = max(self.num_begun - 1, 0)  # draft tokens that the adapter was fed
        known = int(self.num_begun > 0)  # whether it was fed the newest token
        stay = [max(n - 1, 0) for n in accepted.host_lengths]  # accepted draft tokens
        kept = [min(n, fed) for n in stay]
        self.cached.keep(torch.tensor(kept, device=hidden.device), kept)
        first = [known + n for n in kept]
        counts = [max(n - start, 0) for n, start in zip(accepted.host_lengths, first, strict=True)]
        at = torch.tensor(first, device=hidden.device)[:, None] + torch.arange(max(1, *counts), device=hidden.device)
        missing = hidden.gather(1, at.clamp(max=hidden.shape[1] - 1)[..., None].expand(-1, -1, hidden.shape[-1]))
        self._appended(missing, torch.tensor(counts, device=hidden.device), counts)
