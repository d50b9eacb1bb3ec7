"""The draft model: a standalone causal LM as a drafter, in chains or trees, with its full vocabulary or a cut one."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..models.draft_lm import DraftLM
from .confidence import Confidence, Stopping
from .draft import Accepted, Draft, TargetOutputs
from .draft_chain import draft_chain
from .draft_tree import GrownTree, draws_needed, grow_tree, in_layout
from .dynamic_tree import DynamicTree, grow_dynamic_tree
from .forward import CachedLM
from .sampling import Sampling
from .streams import row_uniforms
from .tree import TreeLayout


class DraftModel:
    """A causal LM (transformers' or a :class:`DraftLM`) that shares the target's tokenizer.

    Its cache holds what was emitted except the newest tokens: one after a rejection, two when the whole draft was
    accepted (the last draft token was never fed), one more for every step that drafted nothing. The first pass of a
    step feeds them.
    """

    def __init__(self, model: Any, vocab_size: int):
        """`vocab_size` is the target's number of logits, which ``draft_probs`` must match."""
        self.lm = model if isinstance(model, DraftLM) else DraftLM(model)
        self.vocab_size = vocab_size
        self.vocabulary: Tensor | None = self.lm.kept_ids
        self.dynamic: DynamicTree | None = None
        self.tree: TreeLayout | None = None
        self.confidence: Confidence | None = None

    @property
    def module(self) -> DraftLM:
        """What the packed backend packs."""
        return self.lm

    @property
    def num_parameters_read(self) -> int:
        """Parameters that one pass reads: all but the embedding table (one row of it), plus the output head."""
        return self.lm.num_parameters_read

    def num_passes(self, num_tokens: int) -> int:
        """One pass a draft token."""
        return num_tokens

    def set_tree(self, layout: TreeLayout | None) -> None:
        """Draft this tree from now on; None: chains."""
        self.tree = layout

    def set_dynamic_tree(self, shape: DynamicTree | None) -> None:
        """Grow trees by confidence from now on; None: chains, or the tree that is set."""
        self.dynamic = None if shape is None else shape.checked()

    def set_confidence(self, confidence: Confidence | None) -> None:
        """End chains by its own probabilities from now on; None: never."""
        self.confidence = confidence

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Take right-padded prompts; all but their last token goes into the cache."""
        lengths = attention_mask.sum(1)
        self.cached = CachedLM(self.lm, input_ids.shape[0])
        self.cached.prefill(self._known(input_ids[:, :-1]), [int(n) - 1 for n in lengths.tolist()])
        self.newest = input_ids.gather(1, lengths[:, None] - 1)  # [batch, n], right-padded
        self.newest_counts = torch.ones_like(lengths)
        self.newest_host = [1] * input_ids.shape[0]
        self.caught_up = False  # whether `newest` has been fed
        self.depth_fed = 0
        self.grown: GrownTree | None = None
        self.withdrawn: list[bool] | None = None  # rows whose draft is another's

    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """A chain of `num_tokens`, or the tree that was set, cut to this depth."""
        logits = self._catch_up()
        self.grown = None
        if self.tree is not None:
            layout = self.tree if sampling.temperature == 0 else self.tree.without_gaps()
            return self._propose_tree(layout.truncated(num_tokens), logits, sampling, generators)
        if self.dynamic is not None:
            # What it feeds is not counted in `depth_fed`: after the step all of it is forgotten, what was accepted is fed
            # with the next newest token.
            return grow_dynamic_tree(self.dynamic, num_tokens, logits, sampling, self._feed_nodes, self._to_target_ids)
        return self._propose_chain(num_tokens, logits, sampling, generators)

    def withdraw(self, rows: Bool[Tensor, "batch"]) -> None:
        """What was proposed for `rows` will not be verified: nothing that was fed of it stays."""
        self.withdrawn = rows.tolist()

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Keep the accepted part of what was fed; remember what must be fed next."""
        host = [max(n - 1, 0) for n in accepted.host_lengths]  # accepted draft tokens; the last emitted is the target's
        kept_host = [min(n, self.depth_fed) for n in host]
        kept = (accepted.lengths - 1).clamp(min=0, max=self.depth_fed)
        path = accepted.path
        if self.withdrawn is not None:
            others = torch.tensor(self.withdrawn, device=kept.device)
            kept, path = kept.masked_fill(others, 0), path.masked_fill(others[:, None], -1)
            kept_host = [0 if other else n for n, other in zip(kept_host, self.withdrawn, strict=True)]
        if self.grown is None or not self.depth_fed:
            self.cached.keep(kept, kept_host)
        else:
            path = in_layout(path, self.grown)
            self.cached.keep_paths(path[:, : self.depth_fed], kept, kept_host)
        missing_host = [n - k for n, k in zip(accepted.host_lengths, kept_host, strict=True)]  # 0: finished rows
        width = max(1, *missing_host)
        at = (kept[:, None] + torch.arange(width, device=kept.device)).clamp(max=accepted.tokens.shape[1] - 1)
        emitted = accepted.tokens.gather(1, at).clamp(min=0)
        counts = accepted.lengths - kept
        if not self.caught_up:  # the step drafted nothing: what was to be fed still is
            emitted, counts, missing_host = self._appended(emitted, counts, missing_host)
        self.newest, self.newest_counts, self.newest_host = emitted, counts, missing_host
        self.caught_up, self.depth_fed, self.withdrawn = False, 0, None

    @torch.no_grad()
    def teacher_forced_hidden(
        self, input_ids: Int[Tensor, "batch length"], attention_mask: Tensor, hidden_states: dict[int, Tensor]
    ) -> Float[Tensor, "batch length hidden"]:
        """Its own last hidden states, for every position of right-padded rows. The target's are not used."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        limit = getattr(self.lm.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None:  # as where it drafts: the last position stands for all beyond
            positions = positions.clamp(max=limit - 1)
        out = self.lm.backbone(
            input_ids=self._known(input_ids),
            attention_mask=attention_mask,
            position_ids=positions.expand_as(input_ids),
            use_cache=False,
        )
        return out.last_hidden_state

    @torch.no_grad()
    def first_token_logits(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n vocab"]:
        """Logits over the target's vocabulary; -inf outside the drafter's."""
        logits = self.lm.head(hidden).float()
        if self.vocabulary is None:
            return _fit(logits, self.vocab_size)
        return logits.new_full((len(hidden), self.vocab_size), -torch.inf).index_copy_(-1, self.vocabulary, logits)

    def _catch_up(self) -> Tensor:
        """Feed what was emitted since the last draft; returns the logits for the first token, ``[batch, vocab]``."""
        out = self.cached.feed(self._known(self.newest))
        assert out.logits is not None
        self.cached.keep(self.newest_counts, self.newest_host)
        self.caught_up = True
        last = (self.newest_counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, out.logits.shape[-1])
        return self._scored(out.logits.gather(1, last)[:, 0])

    def _appended(self, tokens: Tensor, counts: Tensor, host_counts: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        """`newest` and further tokens, row by row."""
        host = [old + new for old, new in zip(self.newest_host, host_counts, strict=True)]
        at = torch.arange(max(1, *host), device=tokens.device).expand(len(host), -1)
        before = self.newest.gather(1, at.clamp(max=self.newest.shape[1] - 1))
        further = (at - self.newest_counts[:, None]).clamp(min=0, max=tokens.shape[1] - 1)
        joined = torch.where(at < self.newest_counts[:, None], before, tokens.gather(1, further))
        return joined, self.newest_counts + counts, host

    def _scored(self, logits: Tensor) -> Tensor:
        return logits if self.vocabulary is not None else logits[..., : self.vocab_size]

    def _propose_chain(
        self, num_tokens: int, logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
    ) -> Draft:
        uniforms = None if sampling.temperature == 0 else self._uniforms(num_tokens, generators)
        stopping = None if self.confidence is None else Stopping(self.confidence, self.newest_counts == 0)
        return draft_chain(
            num_tokens, logits, sampling, uniforms, self._feed_next, self._to_target_ids, self._spread, stopping
        )

    def _feed_next(self, token: Int[Tensor, "batch"]) -> Tensor:
        out = self.cached.feed(self._known(token[:, None]))
        assert out.logits is not None
        self.depth_fed += 1
        return self._scored(out.logits[:, 0])

    def _feed_nodes(self, tokens: Tensor, parents: Tensor) -> Tensor:
        out = self.cached.feed(self._known(tokens), parents)
        assert out.logits is not None
        return self._scored(out.logits)

    def _propose_tree(
        self, layout: TreeLayout, logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
    ) -> Draft:
        def feed(tokens: Tensor, parents: Tensor) -> Tensor:
            self.depth_fed += 1
            return self._feed_nodes(tokens, parents)

        uniforms = None if sampling.temperature == 0 else self._uniforms(draws_needed(layout), generators)
        self.grown = grow_tree(layout, logits, sampling, uniforms, feed, self._to_target_ids, self._spread)
        return self.grown.draft

    def _uniforms(self, count: int, generators: Sequence[torch.Generator]) -> Tensor:
        return row_uniforms(count, generators, self.newest.device)

    def _known(self, tokens: Tensor) -> Tensor:
        """Ids that the embedding table has: a smaller table differs from the target's by padding rows only."""
        return tokens.clamp(max=self.lm.vocab_size - 1)

    def _to_target_ids(self, choice: Tensor) -> Tensor:
        return choice if self.vocabulary is None else self.vocabulary[choice]

    def _spread(self, kept: Tensor) -> Tensor:
        """Probabilities over the vocabulary that the drafter scores -> over the target's."""
        if self.vocabulary is None:
            return _fit(kept, self.vocab_size, 0.0)
        return kept.new_zeros(*kept.shape[:-1], self.vocab_size).index_copy_(-1, self.vocabulary, kept)


def _fit(scores: Tensor, vocab_size: int, fill: float = float("-inf")) -> Tensor:
    """Pad or cut the last dimension to `vocab_size`: tables of one tokenizer differ by padding rows."""
    missing = vocab_size - scores.shape[-1]
    if missing <= 0:
        return scores[..., :vocab_size]
    return torch.nn.functional.pad(scores, (0, missing), value=fill)
