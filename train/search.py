"""Runs that search for a drafter instead of training one: trials in the place of steps, with the same budget and log."""

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from ..heads.search import Search
from ..progress import say, stage
from ..recipe import EngineSection
from .budget import Budget, fix_budget, timed
from .interrupt import stop_on_signals
from .logs import RunLog
from .loop import Outcome

STATE = "search.json"


def run_search(
    search: Search,
    engine: EngineSection,
    folder: Path,
    evaluate: Callable[[int], dict[str, Any]] | None,
    resume_command: str,
) -> Outcome:
    """Try candidates until the budget is spent or nothing is left, choose, and measure the choice on held-out prompts.

    Every trial is on disk when the next one begins: a run that was stopped goes on where it was. A budget in minutes
    becomes a number of trials at the start, ``engine.steps`` is one.
    """
    file, trials = folder / STATE, 0
    if file.exists():
        saved = json.loads(file.read_text(encoding="utf-8"))
        search.load_state_dict(saved["search"])
        trials = saved["trials"]
        say(f"resuming the search after {trials} trials")
    log = RunLog(folder, is_main=True, resumed_step=trials)
    with stop_on_signals() as request, closing(log):
        if not search.exhausted:
            search.prepare()
            budget = _budget(search, engine, folder)
            with stage("searching", budget.steps, done=trials, unit="trials", expected_seconds=budget.seconds) as bar:
                while trials < budget.steps and request.signal is None:
                    figures = search.trial()
                    if search.exhausted:
                        say(f"every candidate within reach was tried after {trials} trials")
                        break
                    trials += 1
                    _write(file, {"trials": trials, "search": search.state_dict()})
                    log.write("trial", trials, figures)
                    bar.advance(1, **figures)  # pyright: ignore[reportArgumentType]
        if request.signal is not None:
            say(f"stopped after {trials} trials, saved {file}; to go on: {resume_command}")
            return Outcome(trials, False, int(request.signal), file)
        found = search.finish()
        if found:
            figures = {key: value for key, value in found.items() if isinstance(value, int | float)}
            say(
                "the search chose: " + ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in figures.items())
            )
        if evaluate is not None:
            log.write("evaluation", trials, evaluate(trials))
    return Outcome(trials, True, None, file)


def _budget(search: Search, engine: EngineSection, folder: Path) -> Budget:
    """The number of trials, fixed once."""

    def no_epochs(epochs: float) -> int:
        raise AssertionError("the recipe's schema has refused a search in epochs")

    def seconds_a_trial() -> float:
        say("measuring how long a trial takes")
        state = search.state_dict()
        seconds = timed(search.trial)
        search.load_state_dict(state)
        return seconds

    return fix_budget(engine, folder / "budget.json", no_epochs, seconds_a_trial, lambda: 0.0, 1)


def _write(file: Path, content: dict[str, Any]) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    os.replace(partial, file)
