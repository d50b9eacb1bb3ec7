"""Sampling transforms: the one place that turns logits into the probabilities that are drawn from and judged by.

The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p, all in float32. Target and
drafter go through the same functions, so a draft token is drawn from exactly the distribution the verification rule is
told of.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import BadInput


class Sampling(NamedTuple):
    """Settings of the sampling transforms. Temperature 0 is the one-hot limit (greedy)."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0


# Sorting a whole vocabulary to find a nucleus of a few dozen tokens is the slowest part of sampling on a CPU, so the
# top tokens are tried first, this many, then more.
_NUCLEUS_GUESSES = (128, 2048)
# A cumulative probability this close to the limit is decided by float32 rounding; such rows are sorted in full, because
# the outcome must be what the plain computation gives. Rounding was measured as 5e-7 at 262,144 ids.
_NUCLEUS_MARGIN = 1e-6


def check_sampling(sampling: Sampling) -> Sampling:
    """`sampling` itself, if its values make sense.

    Raises:
        BadInput: naming the setting and its range.
    """
    ranges = {
        "temperature": (sampling.temperature == 0 or sampling.temperature >= 1e-6, "0, or at least 1e-06"),
        "top_k": (sampling.top_k is None or sampling.top_k >= 0, "a whole number of at least 1, or none"),
        "top_p": (sampling.top_p is None or 0 < sampling.top_p <= 1, "above 0, at most 1"),
        "min_p": (sampling.min_p is None or 0 <= sampling.min_p <= 1, "between 0 and 1"),
        "repetition_penalty": (sampling.repetition_penalty > 0, "above 0"),
    }
    for name, (good, expected) in ranges.items():
        if not good:
            raise BadInput(f"{name}: {getattr(sampling, name)!r} is out of range, expected {expected}")
    return sampling


def apply(
    logits: Float[Tensor, "*batch vocab"], sampling: Sampling, seen: Bool[Tensor, "*batch vocab"] | None = None
) -> Float[Tensor, "*batch vocab"]:
    """Transformed logits in float32; -inf where the transforms leave no probability.

    `seen` marks the ids of the context, which the repetition penalty concerns; None: no penalty. At
    temperature 0 the result is 0 at the largest logit (the lowest id where several are equal) and -inf elsewhere; the
    filters cannot matter there.
    """
    scores = logits.float()
    if seen is not None and sampling.repetition_penalty != 1.0:
        scores = penalise(scores, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        best = scores.argmax(-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter_(-1, best, 0.0)
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    if sampling.top_k and sampling.top_k < scores.shape[-1]:
        kept_least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kept_least, -torch.inf)  # equals of the last one stay, all of them
    if sampling.top_p is not None and sampling.top_p < 1:
        rows = scores.reshape(-1, scores.shape[-1])
        keep_nucleus = _nucleus_of_top if scores.device.type == "cpu" else _nucleus
        scores = keep_nucleus(rows, sampling.top_p).reshape(scores.shape)
    if sampling.min_p:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scores


def penalise(
    logits: Float[Tensor, "*batch vocab"], seen: Bool[Tensor, "*batch vocab"], penalty: float
) -> Float[Tensor, "*batch vocab"]:
    """The repetition penalty (arXiv:1909.05858): logits of `seen` ids divided by `penalty`, negative ones
    multiplied."""
    scores = logits.float()
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def probabilities(
    logits: Float[Tensor, "*batch vocab"], sampling: Sampling, seen: Bool[Tensor, "*batch vocab"] | None = None
) -> Float[Tensor, "*batch vocab"]:
    """The distribution that tokens are drawn from, float32: the softmax of :func:`apply`."""
    return apply(logits, sampling, seen).softmax(-1)


def served_probabilities(served: Sampling) -> Callable[[Tensor], Tensor]:
    """What decoding makes of logits, for alpha: that of a greedy run is reported at temperature 1, where filters meant for
    sampling have no place.
    """
    return partial(probabilities, sampling=Sampling(1.0) if served.temperature == 0 else served)


def draw(probs: Float[Tensor, "*batch vocab"], uniforms: Float[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """One id per distribution by its inverse cumulative distribution, summed in float64.

    `probs` need not add up to one (a residual is drawn from as it is), but must have mass; `uniforms` are float64 in
    [0, 1). An id of zero probability is never returned.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    # Below the total whatever was rounded: the first id that exceeds the threshold is then one that added mass.
    threshold = torch.minimum(uniforms.double().unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


def _nucleus(scores: Float[Tensor, "rows vocab"], top_p: float) -> Float[Tensor, "rows vocab"]:
    """Top-p (arXiv:1904.09751): drops the least likely ids while what is dropped weighs at most 1 - `top_p`.

    Where equals straddle the limit, the highest ids stay.
    """
    ascending, order = scores.sort(dim=-1, stable=True)
    drop = ascending.softmax(-1).cumsum(-1) <= (1 - top_p)
    drop[..., -1] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)


def _nucleus_of_top(
    scores: Float[Tensor, "rows vocab"], top_p: float, guesses: tuple[int, ...] = _NUCLEUS_GUESSES
) -> Float[Tensor, "rows vocab"]:
    """What :func:`_nucleus` gives, without sorting the rows whose nucleus is found among their top few ids."""
    if not guesses or guesses[0] * 4 > scores.shape[-1]:
        return _nucleus(scores, top_p)
    size = guesses[0]
    probs = scores.softmax(-1)
    values, ids = scores.topk(size, dim=-1)
    mass = probs.gather(-1, ids).cumsum(-1, dtype=torch.float64) / probs.sum(-1, keepdim=True, dtype=torch.float64)
    kept = torch.nn.functional.pad(mass[:, :-1], (1, 0)) < top_p  # by the mass of the ids ahead of each
    count = kept.sum(-1, keepdim=True)
    certain = ((mass - top_p).abs().amin(-1) > _NUCLEUS_MARGIN) & (mass[:, -1] > top_p)
    last, following = (values.gather(-1, at.clamp(max=size - 1)).squeeze(-1) for at in (count - 1, count))
    certain &= last != following  # equals at the limit: the full sort says which stay
    result = torch.full_like(scores, -torch.inf).scatter_(-1, ids, values.masked_fill(~kept, -torch.inf))
    open_rows = (~certain).nonzero().squeeze(-1)
    if len(open_rows):
        result[open_rows] = _nucleus_of_top(scores[open_rows], top_p, guesses[1:])
    return result
