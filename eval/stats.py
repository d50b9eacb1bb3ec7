"""Pooled rates, per-prompt means, and bootstrap intervals over prompts.

A prompt is the unit of sampling: its tokens depend on each other, so resampling tokens would claim too much. Every
figure is a function of sums of counts; the interval is the percentile interval (95 %) of that function over resampled
prompts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from .records import PromptRecord

RESAMPLES = 2000
LEVEL = 0.95

# Figure: (numerator, denominator), fields of PromptRecord summed over prompts.
RATIOS = {
    "alpha": ("alpha_sum", "alpha_positions"),
    "greedy_agreement": ("agreement_sum", "alpha_positions"),
    "alpha_at_step_starts": ("step_start_alpha_sum", "step_starts"),
    "greedy_agreement_at_step_starts": ("step_start_agreement_sum", "step_starts"),
    "acceptance_rate": ("accepted", "drafted"),
    "block_efficiency": ("emitted", "target_calls"),
    "tokens_per_second": ("emitted", "seconds"),
    "plain_tokens_per_second": ("plain_emitted", "plain_seconds"),
    "speedup": ("plain_seconds", "seconds"),
    "target_log_probability": ("target_log_probability_sum", "emitted"),
    "plain_target_log_probability": ("plain_target_log_probability_sum", "plain_emitted"),
}
TOTALS = (
    "target_calls",
    "drafted",
    "drafted_nodes",
    "accepted",
    "emitted",
    "seconds",
    "plain_seconds",
    "plain_emitted",
    "alpha_positions",
    "step_starts",
)


class Estimate(NamedTuple):
    """A figure pooled over prompts, its interval, and the mean of the prompts' own figures. NaN: undefined."""

    pooled: Float[np.ndarray, "*k"]
    low: Float[np.ndarray, "*k"]
    high: Float[np.ndarray, "*k"]
    mean_per_prompt: Float[np.ndarray, "*k"]


def ratio(numerator: Float[np.ndarray, "*k"], denominator: Float[np.ndarray, "*k"]) -> Float[np.ndarray, "*k"]:
    """numerator / denominator, NaN where the denominator is zero."""
    safe = np.where(denominator == 0, np.nan, denominator)
    return np.asarray(numerator / safe)


def resampling_weights(
    prompts: int, resamples: int = RESAMPLES, seed: int = 0
) -> Float[np.ndarray, "resamples prompts"]:
    """How often each resample draws each prompt: `resamples` draws of `prompts` prompts with replacement."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(prompts, np.full(prompts, 1.0 / prompts), size=resamples).astype(np.float64)


def estimate(
    statistic: Callable[..., np.ndarray],
    weights: Float[np.ndarray, "resamples prompts"],
    *counts: Float[np.ndarray, "prompts ..."],
) -> Estimate:
    """`statistic` of the summed `counts`, with its interval over the resamples in `weights`.

    `statistic` takes one array a count and works elementwise, so one function serves the pooled sums, each prompt's own
    counts and every resample's sums. Prompts with a NaN in any count are left out. No interval (NaN) from a single
    prompt.
    """
    missing = np.any([np.isnan(count).reshape(len(count), -1).any(axis=1) for count in counts], axis=0)
    counts = tuple(np.where(missing.reshape(-1, *[1] * (count.ndim - 1)), 0.0, count) for count in counts)
    pooled = np.asarray(statistic(*[np.asarray(count.sum(axis=0)) for count in counts]))
    each = np.asarray(statistic(*counts))
    resampled = np.asarray(statistic(*[weights @ count for count in counts]))
    defined = np.isfinite(each).sum(axis=0)
    low, high = _quantiles(resampled)
    mean = np.where(defined > 0, np.nansum(each, axis=0) / np.maximum(defined, 1), np.nan)
    return Estimate(pooled, np.where(defined > 1, low, np.nan), np.where(defined > 1, high, np.nan), mean)


def _quantiles(resampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The interval's ends over axis 0, of the resamples in which the figure is defined."""
    tail = (1.0 - LEVEL) / 2
    undefined = np.isnan(resampled).all(axis=0)
    filled = np.where(undefined, 0.0, resampled)
    low, high = np.nanquantile(filled, [tail, 1.0 - tail], axis=0)
    return np.where(undefined, np.nan, low), np.where(undefined, np.nan, high)


def column(prompts: Sequence[PromptRecord], name: str) -> Float[np.ndarray, " prompts"]:
    """One field of every prompt; NaN where it was not measured."""
    values = [getattr(prompt, name) for prompt in prompts]
    return np.array([np.nan if value is None else float(value) for value in values])


class Positions(NamedTuple):
    """Counts by draft position; a prompt that decoded nothing has zeros."""

    drafted: Float[np.ndarray, "prompts positions"]
    accepted: Float[np.ndarray, "prompts positions"]
    tested: Float[np.ndarray, "prompts positions"]


def positions(prompts: Sequence[PromptRecord]) -> Positions | None:
    """The per-position counts of all prompts, padded with zeros; None when no prompt was decoded.

    Raises ValueError where a prompt's lists contradict each other.
    """
    width = max((len(prompt.drafted_at or []) for prompt in prompts), default=0)
    if width == 0:
        return None
    drafted, accepted, tested = np.zeros((3, len(prompts), width))
    for row, prompt in enumerate(prompts):
        if prompt.drafted_at is None:
            continue
        size = len(prompt.drafted_at)
        drafted[row, :size] = prompt.drafted_at
        accepted[row, : len(prompt.accepted_at or [])] = prompt.accepted_at or []
        if prompt.tested_at is not None:
            tested[row, : len(prompt.tested_at)] = prompt.tested_at
        else:
            tested[row, 0] = drafted[row, 0]
            tested[row, 1:] = np.minimum(accepted[row, :-1], drafted[row, 1:])
        if (accepted[row] > tested[row]).any() or (tested[row] > drafted[row]).any():
            raise ValueError(f"prompt {prompt.question_id!r}: more accepted than tested or drafted at a position")
    return Positions(drafted, accepted, tested)


def summarise(
    prompts: Sequence[PromptRecord], weights: Float[np.ndarray, "resamples prompts"] | None = None, seed: int = 0
) -> dict[str, Any]:
    """Every measured figure of these prompts: pooled, `…_ci` and `…_mean_per_prompt`; None where it was not measured.

    Rates by position are lists: `per_position_acceptance[i]` is accepted over drafted, `conditional_acceptance[i]`
    accepted over tested (the token before it was accepted). Times are in seconds, log-probabilities in nats per token.
    """
    weights = resampling_weights(len(prompts), seed=seed) if weights is None else weights
    figures: dict[str, Any] = {}
    for name, (numerator, denominator) in RATIOS.items():
        _add(figures, name, estimate(ratio, weights, column(prompts, numerator), column(prompts, denominator)))
    times = (column(prompts, name) for name in ("plain_seconds", "plain_emitted", "seconds", "emitted"))
    _add(figures, "speedup_per_token", estimate(_speedup_per_token, weights, *times))
    counts = positions(prompts)
    for name in ("per_position_acceptance", "conditional_acceptance"):
        if counts is None:
            figures |= {name: None, f"{name}_ci": None, f"{name}_mean_per_prompt": None}
        else:
            reached = counts.drafted if name == "per_position_acceptance" else counts.tested
            _add(figures, name, estimate(ratio, weights, counts.accepted, reached))
    for name in TOTALS:
        values = [getattr(prompt, name) for prompt in prompts if getattr(prompt, name) is not None]
        figures[name] = sum(values) if values else None
    for name in ("drafted", "accepted", "tested"):
        figures[f"{name}_at"] = None if counts is None else [int(n) for n in getattr(counts, name).sum(axis=0)]
    compared = [prompt.identical for prompt in prompts if prompt.identical is not None]
    figures["identical_to_target"] = [sum(compared), len(compared)] if compared else None
    return figures


def _speedup_per_token(plain_seconds: Any, plain_emitted: Any, seconds: Any, emitted: Any) -> np.ndarray:
    return ratio(ratio(plain_seconds, plain_emitted), ratio(seconds, emitted))


def _add(figures: dict[str, Any], name: str, found: Estimate) -> None:
    figures[name] = nullable(found.pooled)
    figures[f"{name}_ci"] = intervals(found.low, found.high)
    figures[f"{name}_mean_per_prompt"] = nullable(found.mean_per_prompt)


def nullable(values: Any) -> Any:
    """A float, or a list of floats, with None for NaN."""
    array = np.asarray(values, dtype=np.float64)
    return [nullable(value) for value in array] if array.ndim else (float(array) if np.isfinite(array) else None)


def intervals(low: Any, high: Any) -> Any:
    """[low, high], or a list of them; None for one that is undefined."""
    low, high = np.asarray(low), np.asarray(high)
    if low.ndim:
        return [intervals(*ends) for ends in zip(low, high, strict=True)]
    return [float(low), float(high)] if np.isfinite(low) and np.isfinite(high) else None
