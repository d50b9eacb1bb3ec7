"""Streaming: tokens as they are emitted, and which of them were drafted."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..models.target import as_target
from .loop import decode_steps
from .prompts import pad_rows
from .sampling import Sampling
from .stats import Stats


class StreamedStep(NamedTuple):
    """What one step emitted."""

    tokens: list[int]
    drafted: list[bool]  # whether each token is an accepted draft token
    stats: Stats  # the counts so far


def stream_generate(
    target: Any,
    drafter: Any,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    **settings: Any,
) -> Iterator[StreamedStep]:
    """Decode one prompt step by step; `settings` are those of ``speculative_generate``."""
    target = as_target(target)
    prompts = pad_rows([list(prompt_ids)], target)
    steps = decode_steps(
        target, drafter, prompts, sampling=sampling or Sampling(), max_new_tokens=max_new_tokens, **settings
    )
    for step in steps:
        tokens, drafted = step.tokens[0], step.num_from_draft[0]
        yield StreamedStep(tokens, [i < drafted for i in range(len(tokens))], step.stats)
