"""Measured step costs: what a verification pass and a drafter step cost against one plain target step.

Nothing is assumed flat: on a CPU a pass over several tokens can cost several steps. Measurements are interleaved (each
round times every size once), so that a busy machine slows all of them alike, and medians are taken over the rounds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..models.target import Target
from .draft import Accepted, Drafter, TargetOutputs, wants
from .forward import CachedLM
from .sampling import Sampling


class StepCosts(NamedTuple):
    """Seconds, medians. ``verification[n]`` is a target pass over n tokens; ``draft[k]`` is one proposal of k tokens."""

    verification: dict[int, float]
    draft: dict[int, float]

    @property
    def cost_ratio(self) -> float | None:
        """c: time of one drafter step over time of one target step, from the longest proposal measured."""
        if not self.draft:
            return None
        longest = max(self.draft)
        return self.draft[longest] / longest / self.verification[1]


@torch.no_grad()
def measure_costs(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    num_speculative_tokens: int,
    batch_size: int = 1,
    seconds: float = 8.0,
    min_rounds: int = 5,
) -> StepCosts:
    """Time target passes over 1 to ``num_speculative_tokens + 1`` tokens and the drafter's proposals after `prompt`.

    Takes about `seconds`, at least `min_rounds` rounds.
    """
    ids = torch.tensor([list(prompt)] * batch_size, device=target.device)
    layers = wants(drafter).get("hidden_states", ()) if drafter is not None else ()
    lm = CachedLM(target.model, batch_size, layers)
    prefill = lm.prefill(ids[:, :-1], [ids.shape[1] - 1] * batch_size)
    zero = torch.zeros(batch_size, dtype=torch.long, device=ids.device)
    tasks: dict[tuple[str, int], Callable[[], Any]] = {}

    def verify(count: int) -> None:
        lm.feed(ids[:, -1:].expand(-1, count).contiguous())
        lm.keep(zero, [0] * batch_size)

    for count in range(1, num_speculative_tokens + 2):
        tasks["verify", count] = lambda count=count: verify(count)
    if drafter is not None:
        _start(drafter, ids, prefill.hidden_states)
        sampling, generators = Sampling(), [torch.Generator() for _ in range(batch_size)]
        tasks["draft", num_speculative_tokens] = lambda: drafter.propose(num_speculative_tokens, sampling, generators)
    times = _interleaved(tasks, seconds, min_rounds, after=_reset(drafter, ids, prefill.hidden_states))
    return StepCosts(
        {count: seconds for (kind, count), seconds in times.items() if kind == "verify"},
        {count: seconds for (kind, count), seconds in times.items() if kind == "draft"},
    )


def _start(drafter: Drafter, ids: Tensor, hidden: dict[int, Tensor]) -> None:
    drafter.start(ids, torch.ones_like(ids))
    if wants(drafter):
        batch = ids.shape[0]
        none = Accepted(ids[:, :0], torch.zeros(batch, dtype=torch.long, device=ids.device), ids[:, :0], [[]] * batch)
        valid = torch.ones_like(ids[:, :-1], dtype=torch.bool)
        drafter.observe(none, TargetOutputs(ids[:, :-1], valid, hidden, None))


def _reset(drafter: Drafter | None, ids: Tensor, hidden: dict[int, Tensor]) -> Callable[[str], None]:
    """A proposal changes the drafter's state: start it anew, outside the clock."""

    def reset(kind: str) -> None:
        if kind == "draft" and drafter is not None:
            _start(drafter, ids, hidden)

    return reset


def _interleaved(
    tasks: dict[tuple[str, int], Callable[[], Any]], seconds: float, min_rounds: int, after: Callable[[str], None]
) -> dict[tuple[str, int], float]:
    times: dict[tuple[str, int], list[float]] = {key: [] for key in tasks}
    deadline = time.perf_counter() + seconds
    rounds = 0
    while rounds < min_rounds + 1 or time.perf_counter() < deadline:
        for key, task in tasks.items():
            _synchronise()
            start = time.perf_counter()
            task()
            _synchronise()
            if rounds:  # the first round warms up
                times[key].append(time.perf_counter() - start)
            after(key[0])
        rounds += 1
    return {key: statistics.median(values) for key, values in times.items()}


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
