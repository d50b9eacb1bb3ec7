"""Prompt lookup: draft what followed the last tokens where they occurred before, in the prompt or the output."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from .draft import Accepted, Draft, TargetOutputs, chain
from .sampling import Sampling


class PromptLookup:
    """Matches the newest n-gram, the longest first, against everything before it; the latest match wins.

    A row without a match drafts nothing. Draft tokens are chosen without chance, so their ``draft_probs`` are one-hot.
    """

    num_parameters_read = 0

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1):
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.rows: list[list[int]] = []

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Take new prompts."""
        lengths = attention_mask.sum(1).tolist()
        self.rows = [row[:length] for row, length in zip(input_ids.tolist(), lengths, strict=True)]
        self.device = input_ids.device
        self.ends = [self._index(row) for row in self.rows]

    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """Continuations of the latest matches, cut to `num_tokens`."""
        found = [self._continuation(row, ends, num_tokens) for row, ends in zip(self.rows, self.ends, strict=True)]
        lengths = [len(tokens) for tokens in found]
        width = max(lengths, default=0)
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in found], dtype=torch.long).view(
            len(found), width
        )
        return chain(tokens.to(self.device), lengths=torch.tensor(lengths, device=self.device))

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Append what was emitted."""
        emitted = accepted.host_tokens
        for row, ends, tokens in zip(self.rows, self.ends, emitted, strict=True):
            for token in tokens:
                row.append(token)
                self._remember(row, ends, len(row) - 1)

    def _index(self, row: list[int]) -> dict[tuple[int, ...], int]:
        ends: dict[tuple[int, ...], int] = {}
        for position in range(len(row)):
            self._remember(row, ends, position)
        return ends

    def _remember(self, row: list[int], ends: dict[tuple[int, ...], int], position: int) -> None:
        # N-grams that end just before `position`: the newest n-gram itself must not be its own match.
        for n in range(self.min_ngram, self.max_ngram + 1):
            if position - n >= 0:
                ends[tuple(row[position - n : position])] = position

    def _continuation(self, row: list[int], ends: dict[tuple[int, ...], int], num_tokens: int) -> list[int]:
        for n in range(min(self.max_ngram, len(row)), self.min_ngram - 1, -1):
            at = ends.get(tuple(row[-n:]))
            if at is not None:
                return row[at : at + num_tokens]
        return []
