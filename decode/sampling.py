"""Sampling transforms: the one place that turns logits into the probabilities that are drawn from and judged by."""

from typing import NamedTuple


class Sampling(NamedTuple):
    """Settings of the sampling transforms. Temperature 0 is the one-hot limit (greedy)."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
