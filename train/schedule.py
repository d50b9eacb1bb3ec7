"""The learning rate as a function of the step: nothing to save, nothing to restore."""

import math
from typing import Literal, assert_never


def warmup_steps(warmup: int | float, total_steps: int) -> int:
    """Steps of warm-up: a share of all steps when `warmup` is below 1, else a number of steps."""
    steps = math.ceil(warmup * total_steps) if warmup < 1 else int(warmup)
    return min(steps, total_steps)


def learning_rate(
    step: int,
    total_steps: int,
    *,
    peak: float,
    schedule: Literal["cosine", "linear", "constant"] = "cosine",
    warmup: int | float = 0.0,
    final_fraction: float = 0.0,
) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up to `peak`, then a decay to its final fraction.

    The final value belongs to step `total_steps`, one past the last, so that a decay to zero wastes no step.
    """
    warm = warmup_steps(warmup, total_steps)
    if step < warm:
        return peak * (step + 1) / warm
    progress = min(1.0, (step - warm) / max(1, total_steps - warm))
    match schedule:
        case "constant":
            return peak
        case "linear":
            share = 1.0 - progress
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            assert_never(schedule)
    return peak * (final_fraction + (1.0 - final_fraction) * share)
