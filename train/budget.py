"""A budget in minutes becomes numbers of steps once, at the start, and is noted in the run's folder."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..recipe import EngineSection


class Budget(NamedTuple):
    """Optimizer steps, and how long they are expected to take (None: not measured)."""

    steps: int
    seconds: float | None


def seconds_for_data(engine: EngineSection) -> float | None:
    """The data's share of a budget in minutes; None under another budget."""
    return None if engine.minutes is None else 60 * engine.minutes * engine.data_share


def fix_budget(
    engine: EngineSection,
    file: Path,
    steps_in: Callable[[float], int],
    seconds_a_step: Callable[[], float],
    seconds_an_evaluation: Callable[[], float],
    evaluate_every: int,
    elapsed: Callable[[], float] = lambda: 0.0,
) -> Budget:
    """The number of steps: as noted in `file`, else worked out from the recipe and noted there.

    ``steps_in(epochs)`` counts the steps of that many epochs. Under a budget in minutes training gets what data and final
    evaluation leave, from which the evaluations on the way are taken too. `elapsed`: seconds since the run began; what went
    beyond the data's share, a slow machine's loading and measuring too, is taken from training's, down to a quarter of it.
    """
    if file.exists():
        noted = json.loads(file.read_text())
        return Budget(int(noted["steps"]), noted["seconds"])
    if engine.steps is not None:
        budget = Budget(engine.steps, None)
    elif engine.epochs is not None:
        budget = Budget(max(1, steps_in(engine.epochs)), None)
    else:
        assert engine.minutes is not None
        share = 1 - engine.data_share - engine.evaluate_share
        each = seconds_a_step() + seconds_an_evaluation() / evaluate_every
        late = max(0.0, elapsed() - 60 * engine.minutes * engine.data_share)
        available = max(60 * engine.minutes * share - late, 60 * engine.minutes * share / 4)
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
