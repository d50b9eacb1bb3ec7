"""Prompt lookup: draft what followed the last tokens where they occurred before, in the prompt or the output."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import BadInput
from .draft import Accepted, Draft, TargetOutputs, from_lists
from .named import check_whole
from .sampling import Sampling


class PromptLookup:
    """Matches the newest n-gram, the longest first, against everything before it; the latest match wins.

    A continuation that reaches the newest token goes on with its own beginning: a text that repeats itself is taken to go
    on doing so. A row without a match drafts nothing. Draft tokens are chosen without chance, so their ``draft_probs``
    are one-hot.
    """

    num_parameters_read = 0

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1):
        check_whole("prompt_lookup", max_ngram=max_ngram, min_ngram=min_ngram)
        if min_ngram > max_ngram:
            raise BadInput(f"prompt_lookup: min_ngram {min_ngram} is above max_ngram {max_ngram}")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.rows: list[list[int]] = []

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Take new prompts."""
        lengths = attention_mask.sum(1).tolist()
        self.rows = [row[:length] for row, length in zip(input_ids.tolist(), lengths, strict=True)]
        self.device = input_ids.device
        self.ends = [self._index(row) for row in self.rows]

    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """Continuations of the latest matches, `num_tokens` long."""
        found = [self._continuation(row, ends, num_tokens) for row, ends in zip(self.rows, self.ends, strict=True)]
        return from_lists(found, self.device)

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Append what was emitted."""
        for row, ends, tokens in zip(self.rows, self.ends, accepted.host_tokens, strict=True):
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
                found = row[at : at + num_tokens]
                return (found * -(-num_tokens // len(found)))[:num_tokens]
        return []
