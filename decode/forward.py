"""A causal LM with a ragged cache: feed tokens (a chain or a tree), then say which of them stay."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..models.views import TwoParts
from .attention import cache_dtype, cached_attention
from .cache import RaggedCache
from .masks import additive, attention_masks

# In a model's ``__dict__``: passes over a :class:`CachedLM`'s cache that are quicker than its forward over few tokens
# (:mod:`.fused`); with more of them in a row, products outlast whatever else a layer does.
OWN_PASSES = "_draftsmith_passes"
_MOST_TOKENS = 64


class Outputs(NamedTuple):
    """What a pass computed for the fed tokens."""

    logits: Float[Tensor, "rows fed vocab"] | None
    hidden_states: dict[int, Float[Tensor, "rows fed hidden"]]


class CachedLM:
    """Feeds a model step by step. Rows are independent: each has its own length (tokens that are in its cache for good).

    Fed tokens are *pending* until :meth:`keep` or :meth:`keep_paths` says which stay; the rest is forgotten. Several feeds
    may be pending at once (a drafter grows its tree level by level). A chain may also be *begun*: run through the first
    layers only, until the next feed takes it through the others.
    """

    def __init__(self, model: Any, batch_size: int, hidden_states: Sequence[int] = ()):
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.cache = RaggedCache(config.num_hidden_layers, batch_size, cache_dtype(model))
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=model.device)
        self.host_lengths = [0] * batch_size  # the same on the host, so that no pass waits for the device
        self.num_pending = 0
        self.pending_seen: Tensor | None = None  # [batch, pending, pending], who sees whom; None: a chain
        self.pending_depth: Tensor | None = None  # [batch, pending]
        self._begun: list[Tensor] = []  # hidden states of pending tokens after the first layers of `_parts`
        self._parts: TwoParts | None = None
        self._num_layers = config.num_hidden_layers
        self._layers = tuple(self._num_layers + 1 + i if i < 0 else i for i in hidden_states)
        self._asked = tuple(hidden_states)
        self._limit = getattr(config, "max_position_embeddings", None)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def prefill(
        self,
        input_ids: Int[Tensor, "rows prompt"],
        lengths: Sequence[int],
        rows: Int[Tensor, "rows"] | None = None,
        start: int = 0,
        **inputs: Any,
    ) -> Outputs:
        """Put right-padded prompts into the cache for good, in the given `rows` (None: all), from column `start`.

        `lengths` are the numbers of real tokens in `input_ids`, `start` is how many tokens each of the rows holds already.
        Rows not named keep their contents. No logits are computed. `inputs` are what the model takes beside the tokens.
        """
        batch, width = input_ids.shape
        size = self.model.config.get_text_config(decoder=True).hidden_size
        nothing = torch.zeros(batch, 0, size, dtype=self.model.dtype, device=input_ids.device)
        hidden = dict.fromkeys(self._asked, nothing)
        if width:
            keys = torch.arange(start + width, device=input_ids.device).expand(batch, start + width)
            positions = keys[:, start:]
            self.cache.place(None if rows is None else positions, start, start + width, rows)
            seen = positions[:, :, None] >= keys[:, None, :]
            placed = _Placed(positions, seen, keys)
            hidden = self._run(input_ids, placed, want_logits=False, **inputs).hidden_states
        for row, length in zip(range(batch) if rows is None else rows.tolist(), lengths, strict=True):
            self.host_lengths[row] = start + length
        self.lengths = torch.tensor(self.host_lengths, device=self.lengths.device)
        return Outputs(None, hidden)

    @torch.no_grad()
    def feed(
        self,
        tokens: Int[Tensor, "batch fed"],
        parents: Int[Tensor, "batch fed"] | None = None,
        want_logits: bool = True,
        last_embeddings: Float[Tensor, "batch last hidden"] | None = None,
        prompts: Int[Tensor, "batch prompt"] | None = None,
        **inputs: Any,
    ) -> Outputs:
        """Run the model on `tokens` after each row's cache.

        `parents` index into the pending tokens, this feed's included (-1: the token follows the kept ones). None: a chain
        that goes on from the newest pending token. Where tokens were begun, `tokens` is a chain that starts with them.
        `last_embeddings` stand in for those of as many tokens at the end; `inputs` are what the model takes beside tokens.
        `prompts`, of one length and the first thing that the cache holds, are read for good in the same pass.
        """
        if prompts is not None:
            if last_embeddings is None:
                return self._read_and_feed(prompts, tokens, parents)
            self.prefill(prompts, [prompts.shape[1]] * len(prompts))
        if last_embeddings is not None:
            known = self.model.get_input_embeddings()(tokens[:, : tokens.shape[1] - last_embeddings.shape[1]])
            inputs["inputs_embeds"] = torch.cat([known, last_embeddings.to(known.dtype)], 1)
        if self._begun:
            assert parents is None, "what was begun is a chain"
            return self._finish(tokens, want_logits, **inputs)
        return self._run(tokens, self._place(tokens, parents), want_logits, **inputs)

    @torch.no_grad()
    def begin(
        self, tokens: Int[Tensor, "batch fed"], parts: TwoParts
    ) -> tuple[Float[Tensor, "batch fed hidden"], Float[Tensor, "batch fed hidden"]]:
        """Run the first layers on `tokens`, a chain that goes on from the newest pending token, which was begun too.

        Returns what ``parts.first`` does. Their keys and values stay: the next :meth:`feed` adds those of the other layers.
        """
        assert self.num_pending == sum(part.shape[1] for part in self._begun), "a token between was fed, not begun"
        placed = self._place(tokens, None)
        inputs = self._inputs(tokens, placed)
        if passes := self._own_passes(tokens.shape[1]):
            hidden, normed = passes.first(parts.num_first, **inputs)
        else:
            with cached_attention(self.model):
                hidden, normed = parts.first(**inputs, use_cache=True)
        self._begun.append(hidden)
        self._parts = parts
        return hidden, normed

    def forget_pending(self) -> None:
        """Forget all pending tokens."""
        self._advance(torch.zeros_like(self.lengths), [0] * len(self.host_lengths))

    def keep(self, counts: Int[Tensor, "batch"], host_counts: Sequence[int]) -> None:
        """Keep the first ``counts[row]`` pending tokens of every row (a chain), forget the others.

        `host_counts` are the same numbers on the host.
        """
        self._advance(counts, host_counts)

    def keep_paths(
        self, paths: Int[Tensor, "batch depth"], counts: Int[Tensor, "batch"], host_counts: Sequence[int]
    ) -> None:
        """Keep the pending tokens ``paths[row, :counts[row]]`` (a root-to-node path; entries past the count are ignored)."""
        if paths.shape[1]:
            steps = torch.arange(paths.shape[1], device=paths.device)[None]
            wanted = steps < counts[:, None]
            source = self.lengths[:, None] + torch.where(wanted, paths, steps)
            self.cache.move(source, self.lengths[:, None] + steps.expand_as(paths))
        self._advance(counts, host_counts)

    def select_rows(self, rows: Int[Tensor, "kept"], host_lengths: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order; `host_lengths` are their lengths."""
        self.cache.select_rows(rows)
        self.lengths = self.lengths.index_select(0, rows)
        self.host_lengths = list(host_lengths)

    def repeat_row(self, row: int) -> None:
        """Put what `row` holds into every row."""
        self.cache.repeat_row(row, self.host_lengths[row])
        self.host_lengths = [self.host_lengths[row]] * len(self.host_lengths)
        self.lengths = torch.full_like(self.lengths, self.host_lengths[row])

    def clear_row(self, row: int, length: int = 0) -> None:
        """Forget all of one row but its first `length` tokens."""
        self.host_lengths[row] = length
        self.lengths[row] = length

    def _advance(self, counts: Tensor, host_counts: Sequence[int]) -> None:
        self.lengths = self.lengths + counts
        self.host_lengths = [length + count for length, count in zip(self.host_lengths, host_counts, strict=True)]
        self.num_pending, self.pending_seen, self.pending_depth = 0, None, None
        self._begun, self._parts = [], None

    def _finish(self, tokens: Tensor, want_logits: bool, **inputs: Any) -> Outputs:
        """Take begun tokens through the layers that they lack, and the tokens after them through all."""
        parts = self._parts
        assert parts is not None
        if tokens.shape[1] > self.num_pending:
            self.begin(tokens[:, self.num_pending :], parts)
        if unknown := [layer for layer in self._layers if layer not in (parts.num_first, self._num_layers)]:
            raise ValueError(
                f"a pass in two parts knows the hidden states between them and the last ones, not those of layers {unknown}"
            )
        between = torch.cat(self._begun, 1)
        self.num_pending, self._begun = 0, []
        inputs |= self._inputs(tokens, self._place(tokens, None))
        if passes := self._own_passes(tokens.shape[1]):
            del inputs["input_ids"]
            last, logits = passes.rest(parts.num_first, between, want_logits, **inputs)
        else:
            with cached_attention(self.model):
                last, logits = parts.rest(between, want_logits, **inputs, use_cache=True)
        return Outputs(logits, self._states({parts.num_first: between, self._num_layers: last}))

    def _read_and_feed(self, prompts: Tensor, tokens: Tensor, parents: Tensor | None) -> Outputs:
        """One pass over prompts, which an empty cache keeps, and pending tokens; what it computed for the latter."""
        assert not any(self.host_lengths)
        assert self.num_pending == 0
        (batch, length), fed = prompts.shape, tokens.shape[1]
        self.lengths, self.host_lengths = torch.full_like(self.lengths, length), [length] * batch
        positions, seen, keys = self._place(tokens, parents)
        width = seen.shape[-1]
        self.cache.place(None, 0, width)
        columns = torch.arange(width, device=tokens.device)
        before = columns[:length]
        causal = (columns[None, :] <= before[:, None]).expand(batch, length, width)
        placed = _Placed(
            torch.cat([before.expand(batch, length), positions.expand(batch, fed)], 1),
            torch.cat([causal, seen.expand(batch, fed, width)], 1),
            keys,
        )
        out = self._run(torch.cat([prompts, tokens], 1), placed, num_logits=fed)
        return Outputs(out.logits, {layer: hidden[:, length:] for layer, hidden in out.hidden_states.items()})

    def _place(self, tokens: Tensor, parents: Tensor | None) -> "_Placed":
        """Make `tokens` pending, and say where their keys go and what they see."""
        fed, before = tokens.shape[1], self.num_pending
        total = before + fed
        if parents is None and self.pending_seen is None:
            seen_pending, depth = None, torch.arange(before, total, device=tokens.device)[None]
        else:
            seen_pending, depth = self._grow_tree(tokens, parents)
        longest = max(self.host_lengths)
        start, width = longest + before, longest + total
        positions = self.lengths[:, None] + depth
        columns = None
        if min(self.host_lengths) != longest:
            columns = self.lengths[:, None] + torch.arange(before, total, device=tokens.device)
        self.cache.place(columns, start, width)
        keys = torch.arange(width, device=tokens.device)
        if seen_pending is None:
            key_positions = keys.expand(tokens.shape[0], width)
            seen = key_positions[:, None, :] <= positions[:, :, None]
        else:
            seen, key_positions = self._tree_mask(seen_pending, keys, before)
        self.num_pending = total
        return _Placed(positions, seen, key_positions)

    def _grow_tree(self, tokens: Tensor, parents: Tensor | None) -> tuple[Tensor, Tensor]:
        """Extend "who sees whom" among pending tokens by this feed's; returns it and the fed tokens' depths."""
        batch, fed = tokens.shape
        before, total = self.num_pending, self.num_pending + fed
        seen = torch.zeros(batch, total, total, dtype=torch.bool, device=tokens.device)
        depth = torch.zeros(batch, total, dtype=torch.long, device=tokens.device)
        if before:
            old = self.pending_seen
            if old is None:
                old = torch.ones(before, before, dtype=torch.bool, device=tokens.device).tril()
            seen[:, :before, :before] = old
            depth[:, :before] = (
                torch.arange(before, device=tokens.device) if self.pending_depth is None else self.pending_depth
            )
        if parents is None:
            parents = torch.arange(before - 1, total - 1, device=tokens.device).expand(batch, fed)
        rows = torch.arange(batch, device=tokens.device)
        for i in range(fed):
            parent, node = parents[:, i], before + i
            has_parent = parent >= 0
            up = parent.clamp(min=0)
            seen[:, node] = seen[rows, up] & has_parent[:, None]
            seen[:, node, node] = True
            depth[:, node] = torch.where(has_parent, depth[rows, up] + 1, 0)
        self.pending_seen, self.pending_depth = seen, depth
        return seen, depth[:, before:]

    def _tree_mask(self, seen: Tensor, keys: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """Visibility ``[batch, fed, width]`` and the keys' positions ``[batch, width]``."""
        assert self.pending_depth is not None
        batch, total = seen.shape[0], seen.shape[1]
        node = (keys[None] - self.lengths[:, None]).expand(batch, -1)  # the key's number among pending tokens
        inside = (node >= 0) & (node < total)
        at = node.clamp(0, total - 1)
        visible = seen[:, before:].gather(2, at[:, None, :].expand(batch, total - before, -1))
        kept = (node < 0)[:, None, :]
        positions = torch.where(node < 0, keys[None], self.lengths[:, None] + self.pending_depth.gather(1, at))
        return kept | (visible & inside[:, None, :]), positions

    def _run(
        self, tokens: Tensor, placed: "_Placed", want_logits: bool = True, num_logits: int = 0, **inputs: Any
    ) -> Outputs:
        """`num_logits`: for how many tokens, from the end, they are wanted; 0: for all."""
        taken = self._inputs(tokens, placed)
        if passes := self._own_passes(tokens.shape[1]):
            out = passes.run(**taken, num_logits=num_logits if want_logits else None, **inputs)
            return Outputs(out.logits, self._states(out.hidden_states))
        taken["use_cache"] = True
        if self._layers:
            inputs["output_hidden_states"] = True
        if self._keeps_logits and (num_logits or not want_logits):
            inputs["logits_to_keep"] = num_logits or 1
        if "inputs_embeds" in inputs:
            del taken["input_ids"]
        with cached_attention(self.model):
            out = self.model(**taken, **inputs)
        return Outputs(
            out.logits[:, -num_logits:] if want_logits else None, self._states(getattr(out, "hidden_states", None))
        )

    def _own_passes(self, num_tokens: int) -> Any:
        """The model's fused passes, if there are any for so many tokens a row."""
        passes = self.model.__dict__.get(OWN_PASSES)
        return passes if passes is not None and num_tokens <= _MOST_TOKENS and passes.serves(self.model) else None

    def _states(self, by_layer: Any) -> dict[int, Tensor]:
        """Those that were asked for, as they were asked for."""
        return {asked: by_layer[layer] for asked, layer in zip(self._asked, self._layers, strict=True)}

    def _inputs(self, tokens: Tensor, placed: "_Placed") -> dict[str, Any]:
        """What a model takes, whatever it is asked for."""
        config, implementation = self.model.config, self.model.config._attn_implementation
        # Only padding lies beyond the limit, but a table of positions has no row for it.
        fed = placed.positions if self._limit is None else placed.positions.clamp(max=self._limit - 1)
        masks = attention_masks(
            config, implementation, self.model.dtype, placed.seen, placed.positions, placed.key_positions
        )
        if implementation == "sdpa":
            masks = additive(masks, cache_dtype(self.model))
        taken = {"input_ids": tokens, "attention_mask": masks, "position_ids": fed}
        return {**taken, "cache": self.cache}


class _Placed(NamedTuple):
    """Where fed tokens are, and which columns of the cache they see."""

    positions: Int[Tensor, "rows fed"]
    seen: Bool[Tensor, "rows fed width"]
    key_positions: Int[Tensor, "rows width"]
