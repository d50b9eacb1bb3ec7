"""What the audit says of a rule that is not lossless: how far its output is from the target's."""

from collections.abc import Sequence

import numpy as np

from ..decode.streams import mix
from . import stats
from .alpha import Answer
from .audit_engine import Engine
from .drift import token_log_probabilities


def audit_drift(engine: Engine, prompts: Sequence[list[int]], *, max_new_tokens: int, seed: int) -> list[str]:
    """Decode by the rule and plainly; say how likely the target finds either, and how often greedy answers agree."""
    seeds = [mix(seed, i) for i in range(len(prompts))]
    answers = engine.answers(prompts, max_new_tokens, seeds, "decoding by the rule")
    plain = engine.plain(prompts, max_new_tokens, seeds, "plain decoding")
    both = [
        [Answer(prompt, tokens) for prompt, tokens in zip(prompts, each.tokens, strict=True)]
        for each in (answers, plain)
    ]
    logs = [token_log_probabilities(engine.target, each) for each in both]
    sums = [np.array([float(row.sum()) for row in each]) for each in logs]
    counts = [np.array([float(len(row)) for row in each]) for each in logs]
    weights = stats.resampling_weights(len(prompts), seed=seed)
    drift = stats.estimate(_difference, weights, sums[0], counts[0], sums[1], counts[1])
    interval = "" if np.isnan(drift.low) else f" (95 % interval over prompts {drift.low:+.3f} to {drift.high:+.3f})"
    means = [float(total.sum() / count.sum()) for total, count in zip(sums, counts, strict=True)]
    lines = [
        answers.line,
        f"mean target log-probability per token: {means[0]:.3f} nats by the rule, {means[1]:.3f} by plain decoding, "
        f"drift {float(drift.pooled):+.3f}{interval}",
    ]
    if engine.sampling.temperature > 0:
        engine = engine.at_temperature_zero()
        answers = engine.answers(prompts, max_new_tokens, seeds, "decoding by the rule, greedily")
        plain = engine.plain(prompts, max_new_tokens, seeds, "plain decoding, greedily")
    same = sum(mine == other for mine, other in zip(answers.tokens, plain.tokens, strict=True))
    return [*lines, f"at temperature 0, {same} of {len(prompts)} answers are plain decoding's token for token"]


def _difference(by_rule: np.ndarray, tokens: np.ndarray, plain: np.ndarray, plain_tokens: np.ndarray) -> np.ndarray:
    return np.asarray(stats.ratio(by_rule, tokens) - stats.ratio(plain, plain_tokens))
