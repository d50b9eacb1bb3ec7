"""What acceptance is worth in time: expected tokens a step, expected speed-up, and the acceptance at which drafting
pays.

Every cost is in units of one plain target step. `cost_ratio` is the time of one drafter pass, and
`verification_cost[i]` is t(i + 1) / t(1), the time of a target pass over i + 1 tokens: it is measured, never assumed
flat, and a step that drafts n tokens verifies n + 1. Conditional acceptance holds, at i, the share of draft tokens i
accepted given that i - 1 was.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float


def verification_curve(seconds: Mapping[int, float]) -> list[float]:
    """t(n) / t(1) for n = 1, 2, … from times measured at some n; linear between the measured ones.

    Raises ValueError when one token was not measured or a time is not positive.
    """
    if 1 not in seconds or min(seconds.values()) <= 0:
        raise ValueError("the verification curve needs positive times and a measurement of one token")
    measured = sorted(seconds)
    grid = np.arange(1, measured[-1] + 1)
    times = np.interp(grid, measured, [seconds[n] for n in measured])
    return [float(t) for t in times / seconds[1]]


def expected_tokens(conditional: Float[np.ndarray, "*batch positions"]) -> Float[np.ndarray, "*batch"]:
    """Tokens a step emits on average for a chain: 1 + Σ_i Π_{j ≤ i} conditional[j].

    A step emits its accepted prefix and one token of the target's. With one constant acceptance this is the geometric
    sum of :func:`constant_acceptance_tokens`, eq. 1 of arXiv:2211.17192.
    """
    return np.asarray(1.0 + np.cumprod(conditional, axis=-1).sum(axis=-1))


def constant_acceptance_tokens(alpha: float, num_speculative_tokens: int) -> float:
    """(1 − α^(n+1)) / (1 − α), eq. 1 of arXiv:2211.17192: :func:`expected_tokens` when each token is accepted alike."""
    if alpha >= 1.0:
        return num_speculative_tokens + 1.0
    return (1.0 - alpha ** (num_speculative_tokens + 1)) / (1.0 - alpha)


def extend(conditional: Float[np.ndarray, "*batch positions"], length: int) -> Float[np.ndarray, "*batch {length}"]:
    """Conditional acceptance of `length` positions: where unmeasured (NaN or past the end), the last measured one holds
    on.

    An extrapolation, for drafts longer than those that were decoded; all NaN where nothing was measured.
    """
    rates = np.full((*conditional.shape[:-1], length), np.nan)
    kept = min(length, conditional.shape[-1])
    rates[..., :kept] = conditional[..., :kept]
    for i in range(1, length):
        rates[..., i] = np.where(np.isnan(rates[..., i]), rates[..., i - 1], rates[..., i])
    return rates


def step_cost(
    passes: float | int, verified_tokens: float, cost_ratio: float, verification_cost: Sequence[float]
) -> float:
    """Time of a step in plain steps: passes · c + t(verified) / t(1); NaN past the measured curve.

    With a flat curve and one pass a draft token this is the γc + 1 of theorem 3.8, arXiv:2211.17192. A fractional
    `verified_tokens` (a mean over steps) is interpolated.
    """
    measured = len(verification_cost)
    if not 1 <= verified_tokens <= measured:
        return float("nan")
    return passes * cost_ratio + float(np.interp(verified_tokens, np.arange(1, measured + 1), verification_cost))


def expected_speedup(
    conditional: Float[np.ndarray, "*batch positions"],
    num_speculative_tokens: int,
    cost_ratio: float,
    verification_cost: Sequence[float],
    passes: float | int | None = None,
    verified_tokens: float | None = None,
) -> Float[np.ndarray, "*batch"]:
    """Expected tokens of a step over its cost: theorem 3.8 of arXiv:2211.17192 with measured acceptance and costs.

    `passes` are the drafter's (None: one a draft token); `verified_tokens` those of the target's pass (None: the draft
    and one more; a tree has its nodes and one more, and `num_speculative_tokens` is its depth). NaN where the curve is
    too short.
    """
    n = num_speculative_tokens
    cost = step_cost(
        n if passes is None else passes,
        n + 1 if verified_tokens is None else verified_tokens,
        cost_ratio,
        verification_cost,
    )
    return np.asarray(expected_tokens(extend(conditional, n)) / cost)


def counted_speedup(
    accepted: Float[np.ndarray, "*batch positions"],
    drafted: Float[np.ndarray, "*batch positions"],
    steps: Float[np.ndarray, "*batch"],
    cost_ratio: float,
    verification_cost: Sequence[float],
    passes: float | int | None = None,
    nodes: Float[np.ndarray, "*batch"] | None = None,
) -> Float[np.ndarray, "*batch"]:
    """:func:`expected_speedup` of the steps that were made: some draft nothing, some less than they might.

    ``drafted[i]`` of the `steps` drafted more than i tokens, ``accepted[i]`` of them had token i accepted. `passes` as there,
    in a step that drafts. `nodes`: draft tokens of all steps together where a draft is a tree; a drafting step then costs
    what its mean number of them does. NaN where the curve is too short.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        if nodes is not None:
            drafting = drafted[..., 0]
            own = 0.0 if passes is None else passes
            mean = np.where(drafting > 0, nodes / np.maximum(drafting, 1e-12), 0.0)
            sizes = np.arange(1, len(verification_cost) + 1)
            each = own * cost_ratio + np.interp(mean + 1, sizes, verification_cost, right=np.nan)
            cost = steps - drafting + np.where(drafting > 0, drafting * each, 0.0)
        else:
            beyond = np.concatenate([steps[..., None], drafted, np.zeros_like(steps)[..., None]], axis=-1)
            exactly = beyond[..., :-1] - beyond[..., 1:]  # steps of 0, 1, … draft tokens
            costs = [1.0]
            for n in range(1, exactly.shape[-1]):
                costs.append(step_cost(n if passes is None else passes, n + 1, cost_ratio, verification_cost))
            cost = np.where(exactly > 0, exactly * np.asarray(costs), 0.0).sum(axis=-1)
        return np.asarray((steps + accepted.sum(axis=-1)) / cost)


def speedup_by_length(
    conditional: Float[np.ndarray, " positions"],
    cost_ratio: float,
    verification_cost: Sequence[float],
    passes: float | int | None = None,
    drafting: float = 1.0,
) -> list[float]:
    """Expected speed-up of a chain for 1, 2, … draft tokens, as far as the verification curve was measured.

    `passes` is None for a drafter that runs once a draft token, or the constant number of passes of parallel heads;
    `drafting` the share of steps in which there is a draft at all, the others being plain ones.
    """
    speedups = []
    for n in range(1, len(verification_cost)):
        tokens = float(expected_tokens(extend(conditional, n)))
        cost = step_cost(n if passes is None else passes, n + 1, cost_ratio, verification_cost)
        speedups.append((drafting * tokens + 1 - drafting) / (drafting * cost + 1 - drafting))
    return speedups


def best_num_speculative_tokens(
    conditional: Float[np.ndarray, " positions"],
    cost_ratio: float,
    verification_cost: Sequence[float],
    passes: float | int | None = None,
    drafting: float = 1.0,
) -> int:
    """The number of draft tokens with the highest expected speed-up; 0 when no draft is faster than plain decoding.

    This is the choice of γ in section 3.5 of arXiv:2211.17192, over the measured part of the verification curve.
    """
    speedups = speedup_by_length(conditional, cost_ratio, verification_cost, passes, drafting)
    best = max(range(len(speedups)), key=lambda i: speedups[i], default=None)
    return 0 if best is None or not speedups[best] > 1.0 else best + 1


def break_even_alpha(
    num_speculative_tokens: int,
    cost_ratio: float,
    verification_cost: Sequence[float],
    passes: float | int | None = None,
) -> float | None:
    """The constant acceptance at which drafting `num_speculative_tokens` neither gains nor loses time.

    Solves (1 − α^(n+1)) / (1 − α) = step cost (theorem 3.8 of arXiv:2211.17192 set to 1) by bisection, the left side
    being increasing. One draft token and a flat curve give α = c (corollary 3.9). None when even full acceptance does
    not pay or the curve is too short.
    """
    n = num_speculative_tokens
    cost = step_cost(n if passes is None else passes, n + 1, cost_ratio, verification_cost)
    if not cost <= n + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if constant_acceptance_tokens(middle, n) < cost else (low, middle)
    return high


def mbsu(block_efficiency: float, passes: float | int, drafter_parameters: int, target_parameters: int) -> float:
    """Memory-bound speed-up τ / (1 + passes · ρ), after arXiv:2403.00858: what reading weights alone would cost.

    ρ is the drafter's parameters over the target's, each as read in one pass; parallel heads make one pass a step.
    """
    return block_efficiency / (1.0 + passes * drafter_parameters / target_parameters)
