"""Drafting a chain token by token: drawn or most likely, stopped early where a confidence says so."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .confidence import Stopping
from .draft import Draft, chain
from .sampling import Sampling, draw, probabilities


def draft_chain(
    num_tokens: int,
    logits: Float[Tensor, "batch scored"],
    sampling: Sampling,
    uniforms: Float[Tensor, "batch tokens"] | None,
    feed: Callable[[Int[Tensor, "batch"]], Float[Tensor, "batch scored"]],
    to_target_ids: Callable[[Tensor], Tensor],
    spread: Callable[[Tensor], Tensor],
    stopping: Stopping | None = None,
) -> Draft:
    """A chain of at most `num_tokens` tokens, of which `logits` give the first one's distribution.

    ``feed(tokens)`` gives the logits after further tokens (target ids); it is not called for the last one. `uniforms` hold
    one number a token, None at temperature 0. ``to_target_ids`` maps scored ids to the target's, ``spread`` their
    probabilities to its vocabulary.
    """
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    for i in range(num_tokens):
        if i:
            logits = feed(tokens[-1])
        kept = None if uniforms is None else probabilities(logits, sampling)
        confident = None if stopping is None else logits.float().softmax(-1) if kept is None else kept
        if stopping is not None and confident is not None and stopping.before(confident):
            break
        if kept is None or uniforms is None:
            choice = logits.argmax(-1)
        else:
            choice = draw(kept, uniforms[:, i])
            probs.append(spread(kept))
        tokens.append(to_target_ids(choice))
        if stopping is not None and confident is not None and stopping.after(confident, choice):
            break
    drafted = torch.stack(tokens, 1) if tokens else torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
    return chain(drafted, torch.stack(probs, 1) if probs else None, None if stopping is None else stopping.lengths)
