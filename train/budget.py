"""A budget in minutes becomes numbers of steps once, at the start, and is noted in the run's folder."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..recipe import EngineSection


class Budget(NamedTuple):
    """Optimizer steps, and how long they are expected to take (None: not measured)."""

    steps: int
    seconds: float | None


class Shares(NamedTuple):
    """Seconds of a budget in minutes: for prompts and answers, and for training with the evaluations on its way."""

    data: float
    training: float


def split_minutes(engine: EngineSection, evaluation: float = math.inf) -> Shares | None:
    """What data and training get of a budget in minutes; None under another budget.

    `evaluation`: seconds that the evaluation after the training is expected to take. Where its share of the budget is more
    than that, the rest goes to data and training, in proportion to theirs.
    """
    if engine.minutes is None:
        return None
    total = 60 * engine.minutes
    left = total - min(total * engine.evaluate_share, evaluation)
    data = left * engine.data_share / (1 - engine.evaluate_share)
    return Shares(data, left - data)


def fix_budget(
    engine: EngineSection,
    file: Path,
    steps_in: Callable[[float], int],
    seconds_a_step: Callable[[], float],
    seconds_an_evaluation: Callable[[], float],
    evaluate_every: int,
    shares: Shares | None = None,
    elapsed: Callable[[], float] = lambda: 0.0,
) -> Budget:
    """The number of steps: as noted in `file`, else worked out from the recipe and noted there.

    ``steps_in(epochs)`` counts the steps of that many epochs. Under a budget in minutes training gets its part of
    `shares` (default: as :func:`split_minutes` has them), from which the evaluations on the way are taken too. `elapsed`:
    seconds since the run began; what went beyond the data's share, a slow machine's loading and measuring too, is taken
    from training's, down to a quarter of it.
    """
    if file.exists():
        noted = json.loads(file.read_text())
        return Budget(int(noted["steps"]), noted["seconds"])
    if engine.steps is not None:
        budget = Budget(engine.steps, None)
    elif engine.epochs is not None:
        budget = Budget(max(1, steps_in(engine.epochs)), None)
    else:
        shares = shares or split_minutes(engine)
        assert shares is not None
        each = seconds_a_step() + seconds_an_evaluation() / evaluate_every
        late = max(0.0, elapsed() - shares.data)
        available = max(shares.training - late, shares.training / 4)
        steps = max(1, int(available / each))
        if engine.max_epochs is not None:
            steps = min(steps, max(1, steps_in(engine.max_epochs)))
        budget = Budget(steps, round(steps * each, 1))
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps({"steps": budget.steps, "seconds": budget.seconds}))
    partial.replace(file)
    return budget


def timed(work: Callable[[], object], repeats: int = 1) -> float:
    """Seconds of one call: the shortest of `repeats`, since whatever else the machine does only adds."""
    times = []
    for _ in range(repeats):
        start = time.monotonic()
        work()
        times.append(time.monotonic() - start)
    return min(times)
