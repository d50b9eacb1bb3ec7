"""Measured step costs: what a verification pass and a drafter step cost against one plain target step.

Nothing is assumed flat: on a CPU a pass over several tokens can cost several steps. Measurements are interleaved (each
round times every size once), so that a busy machine slows all of them alike, and medians are taken over the rounds.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..models.target import Target
from .draft import Accepted, Drafter, TargetOutputs, num_companions, share_cache, wants
from .forward import CachedLM
from .lookup_first import LookupFirst
from .sampling import Sampling

_ENOUGH = 60  # rounds, after which a median no longer moves: passes of tiny models need not fill the time allowed


class StepCosts(NamedTuple):
    """Seconds, medians. ``verification[n]`` is a target pass over n tokens; ``draft[k]`` is one proposal of k tokens.

    Passes over n > 1 tokens are those that verify a draft of n - 1: with the drafter's companions, and, where it shares
    the target's cache, from what its proposal has begun.
    """

    verification: dict[int, float]
    draft: dict[int, float]
    passes: int | None = None  # the drafter's in the longest proposal; None: one a token

    @property
    def cost_ratio(self) -> float | None:
        """c: time of one drafter pass over time of one target step, from the longest proposal measured."""
        if not self.draft:
            return None
        longest = max(self.draft)
        return self.draft[longest] / (self.passes or longest) / self.verification[1]


@torch.no_grad()
def measure_costs(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    num_speculative_tokens: int,
    batch_size: int = 1,
    seconds: float = 8.0,
    min_rounds: int = 5,
    num_nodes: int | None = None,
) -> StepCosts:
    """Time target passes over 1 to ``num_speculative_tokens + 1`` tokens and the drafter's proposals after `prompt`.

    `num_nodes`: of the tree that the drafter grows; passes then go up to that many and one.

    Of two drafters in turn the one that runs passes is timed.

    Takes up to about `seconds`, at least `min_rounds` rounds. A drafter that stops by itself is timed up to where it stops.
    """
    if isinstance(drafter, LookupFirst):
        drafter = drafter.then
    ids = torch.tensor([list(prompt)] * batch_size, device=target.device)
    layers = wants(drafter).get("hidden_states", ()) if drafter is not None else ()
    lm = CachedLM(target.model, batch_size, layers)
    prefill = lm.prefill(ids[:, :-1], [ids.shape[1] - 1] * batch_size)
    sampling, generators = Sampling(), [torch.Generator() for _ in range(batch_size)]
    shares = drafter is not None and share_cache(drafter, lm)

    def reset() -> None:
        lm.forget_pending()
        if drafter is not None:
            _start(drafter, ids, prefill.hidden_states)

    def propose(count: int) -> int:
        assert drafter is not None
        draft = drafter.propose(count, sampling, generators)
        return draft.tokens.shape[1] if draft.is_chain and draft.tokens.shape[1] else count

    def verify(count: int) -> None:
        fed = count + (num_companions(drafter, count - 1) if count > 1 else 0)
        lm.feed(ids[:, -1:].expand(-1, fed).contiguous())

    tasks: dict[tuple[str, int], _Task] = {}
    for count in range(1, (num_nodes or num_speculative_tokens) + 2):
        begun = partial(propose, count - 1) if shares and count > 1 else None
        tasks["verify", count] = _Task(partial(verify, count), begun, reset if begun else lm.forget_pending)
    passes: Callable[[int], int] | None = getattr(drafter, "num_passes", None)
    drafted = 0
    if drafter is not None:
        reset()
        drafted = propose(num_speculative_tokens)
        reset()
        tasks["draft", drafted] = _Task(partial(propose, num_speculative_tokens), None, reset)
    times = _interleaved(tasks, seconds, min_rounds)
    return StepCosts(
        {count: seconds for (kind, count), seconds in times.items() if kind == "verify"},
        {count: seconds for (kind, count), seconds in times.items() if kind == "draft"},
        passes(drafted) if passes is not None and drafted else None,
    )


@torch.no_grad()
def time_passes(
    models: Mapping[str, Any], prompt: Sequence[int], seconds: float = 4.0, min_rounds: int = 5
) -> dict[str, float]:
    """Seconds (medians) of a pass over one token after `prompt`, by name, of models that take turns."""
    tasks: dict[tuple[str, int], _Task] = {}
    for name, model in models.items():
        lm = CachedLM(model, 1)
        ids = torch.tensor([list(prompt)], device=model.device)
        lm.prefill(ids[:, :-1], [ids.shape[1] - 1])
        tasks[name, 1] = _Task(partial(lm.feed, ids[:, -1:]), None, lm.forget_pending)
    return {name: median for (name, _), median in _interleaved(tasks, seconds, min_rounds).items()}


def _start(drafter: Drafter, ids: Tensor, hidden: dict[int, Tensor]) -> None:
    drafter.start(ids, torch.ones_like(ids))
    if wants(drafter):
        batch = ids.shape[0]
        none = Accepted(ids[:, :0], torch.zeros(batch, dtype=torch.long, device=ids.device), ids[:, :0], [[]] * batch)
        valid = torch.ones_like(ids[:, :-1], dtype=torch.bool)
        drafter.observe(none, TargetOutputs(ids[:, :-1], valid, hidden, None))


class _Task(NamedTuple):
    """What is timed, and what happens outside the clock: a proposal changes the drafter's state."""

    run: Callable[[], Any]
    before: Callable[[], Any] | None
    after: Callable[[], Any]


def _interleaved(tasks: dict[tuple[str, int], _Task], seconds: float, min_rounds: int) -> dict[tuple[str, int], float]:
    times: dict[tuple[str, int], list[float]] = {key: [] for key in tasks}
    deadline = time.perf_counter() + seconds
    rounds = 0
    while rounds < min_rounds + 1 or (rounds <= _ENOUGH and time.perf_counter() < deadline):
        for key, task in tasks.items():
            if task.before is not None:
                task.before()
            _synchronise()
            start = time.perf_counter()
            task.run()
            _synchronise()
            if rounds:  # the first round warms up
                times[key].append(time.perf_counter() - start)
            task.after()
        rounds += 1
    return {key: statistics.median(values) for key, values in times.items()}


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
