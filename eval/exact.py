"""The target's own next-token logits, computed without any cache, and how far rounding alone moves them."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..decode.forward import CachedLM
from ..decode.sampling import Sampling, penalise
from ..models.head import split
from ..models.target import Target

_TOKENS_PER_PASS = 4096
_VERIFIED_TOGETHER = 5  # tokens of the verification-like pass that rounding is measured with


@torch.no_grad()
def logits_after(
    target: Target, contexts: Sequence[Sequence[int]], sampling: Sampling
) -> Float[Tensor, "contexts vocab"]:
    """Logits of the token after each context (all of one length), float32 on the CPU, repetition penalty included."""
    backbone, head = split(target.model)
    ids = torch.tensor(contexts, dtype=torch.long)
    parts = []
    for part in ids.split(max(1, _TOKENS_PER_PASS // ids.shape[1])):
        hidden = backbone(input_ids=part.to(target.device), use_cache=False).last_hidden_state[:, -1]
        parts.append(head(hidden).float().cpu())
    return _penalised(torch.cat(parts), ids, sampling)


@torch.no_grad()
def logits_along(
    target: Target, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling
) -> Float[Tensor, "tokens vocab"]:
    """Logits that predict each token of `answer` after `prompt` and the tokens before it: as :func:`logits_after`."""
    backbone, head = split(target.model)
    ids = torch.tensor([[*prompt, *answer][:-1]], dtype=torch.long)
    hidden = backbone(input_ids=ids.to(target.device), use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
    logits = head(hidden).float().cpu()
    if sampling.repetition_penalty == 1.0:
        return logits
    return torch.cat([_penalised(row[None], ids[:, : len(prompt) + i], sampling) for i, row in enumerate(logits)])


def _penalised(logits: Tensor, contexts: Tensor, sampling: Sampling) -> Tensor:
    if sampling.repetition_penalty == 1.0:
        return logits
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, contexts, True)
    return penalise(logits, seen, sampling.repetition_penalty)


@torch.no_grad()
def rounding(target: Target, context: Sequence[int]) -> float:
    """How far apart the logits after `context` are in passes of different shapes, which are equal but for rounding.

    The shapes are those that decoding uses: the whole context at once, alone and beside copies of itself; one token,
    and a handful, after a cache. The figure is the largest difference of any id's logit, and at least one unit in the
    last place of the largest logit in the target's dtype.
    """
    one = logits_after(target, [context], Sampling())
    beside = logits_after(target, [context] * 4, Sampling())[:1]
    shapes = [
        one,
        beside,
        *(_after_cache(target, context, fed) for fed in (1, _VERIFIED_TOGETHER) if fed < len(context)),
    ]
    stacked = torch.stack(shapes)
    ulp = torch.finfo(target.dtype).eps * float(one.abs().max())
    return max(ulp, float((stacked.amax(0) - stacked.amin(0)).max()))


def _after_cache(target: Target, context: Sequence[int], fed: int) -> Tensor:
    ids = torch.tensor([list(context)], device=target.device)
    lm = CachedLM(target.model, 1)
    lm.prefill(ids[:, :-fed], [len(context) - fed])
    logits = lm.feed(ids[:, -fed:]).logits
    assert logits is not None
    return logits[:, -1].float().cpu()
