"""Prompts as the decoder takes them: right-padded ids and their lengths."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import BadInput
from ..models.target import Target


class Prompts(NamedTuple):
    """Right-padded prompts; every row holds at least one token."""

    ids: Int[Tensor, "batch prompt"]
    lengths: list[int]
    pad_id: int

    def rows(self) -> list[list[int]]:
        """The prompts without padding."""
        return [row[:length] for row, length in zip(self.ids.tolist(), self.lengths, strict=True)]

    @property
    def attention_mask(self) -> Int[Tensor, "batch prompt"]:
        """1 where a token is."""
        columns = torch.arange(self.ids.shape[1], device=self.ids.device)
        return (columns[None] < torch.tensor(self.lengths, device=self.ids.device)[:, None]).long()


def right_padded(input_ids: Tensor, attention_mask: Tensor | None, target: Target) -> Prompts:
    """Move padding, wherever it is, to the right; start empty rows from BOS; check the context limit.

    Raises:
        BadInput: wrong shapes, an empty prompt for a target without BOS, a prompt longer than the target's context.
    """
    if input_ids.ndim == 1:
        input_ids = input_ids[None]
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise BadInput(f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}")
    rows = [
        [token for token, real in zip(ids, mask, strict=True) if real]
        for ids, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
    ]
    return pad_rows(rows, target)


def pad_rows(rows: list[list[int]], target: Target) -> Prompts:
    """:class:`Prompts` from lists of ids, on the target's device."""
    rows = [row or [_start_token(target)] for row in rows]
    lengths = [len(row) for row in rows]
    limit = target.context_limit
    if limit is not None and max(lengths, default=0) > limit:
        raise BadInput(f"a prompt of {max(lengths)} tokens does not fit the target's context of {limit}")
    pad_id = target.eos_token_ids[0] if target.eos_token_ids else 0
    ids = torch.full((len(rows), max(lengths, default=0)), pad_id, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return Prompts(ids.to(target.device), lengths, pad_id)


def _start_token(target: Target) -> int:
    sources: list[Any] = [target.model.generation_config, target.model.config, target.tokenizer]
    for source in sources:
        token = getattr(source, "bos_token_id", None)
        if isinstance(token, int):
            return token
    raise BadInput("an empty prompt needs a BOS token, and the target has none")
