"""The training loop. One for everything that trains: draft models and heads alike.

It knows nothing of what is trained: a trainee turns a micro-batch into sums (`LossSums`), a source yields this rank's
micro-batches for each step, and the gradient of a step is exactly the sum of all losses over the number of supervised
positions, over every micro-batch of every rank.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from ..distill.trainee import LossSums, MicroBatch, Staged, Stateful, StepSource
from ..errors import BadInput
from ..progress import say, stage
from . import checkpoint
from .engine import Engine
from .interrupt import StopRequest, stop_on_signals
from .logs import RunLog
from .rng import preserved_rng
from .schedule import learning_rate


class Diverged(BadInput):
    """The loss or its gradient is no longer finite. Nothing of it was saved."""


class Plan(NamedTuple):
    """How long, how fast, and when to save and to evaluate. Units: optimizer steps."""

    folder: Path
    total_steps: int
    peak_learning_rate: float
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = 0.03
    final_fraction: float = 0.0
    checkpoint_every: int = 200
    keep_checkpoints: int = 2
    evaluate_every: int = 200
    seed: int = 0
    resume: bool = False
    resume_command: str = "the same command with --resume"  # what a stopped run tells its user to type
    expected_seconds: float | None = None  # of the whole loop, when known beforehand


class Outcome(NamedTuple):
    """Where the loop stopped: at the end, or after the step in which a signal came."""

    step: int
    finished: bool  # not stopped by a signal
    signal: int | None  # its number; shells expect exit code 128 + signal
    checkpoint: Path


class StepTotals(NamedTuple):
    """One step over all its micro-batches and ranks."""

    loss: float  # a supervised position
    metrics: dict[str, float]
    supervised: float
    tokens: int
    stop: int | None  # a signal that some rank received


def train(
    engine: Engine,
    steps: StepSource,
    plan: Plan,
    *,
    evaluate: Callable[[int], dict[str, Any]] | None = None,
    extra: Mapping[str, Stateful] | None = None,
) -> Outcome:
    """Trains what the engine was prepared with, from scratch or from the newest sound checkpoint, to the last step.

    `evaluate(step)` runs every ``plan.evaluate_every`` steps and at the end, on rank 0 while the others wait (under
    ZeRO-3 on every rank, since a sharded trainee runs on all or none); it changes no random state and no train or eval
    mode. `extra` are further objects a resumed run needs. Raises Diverged naming the step when the loss is not finite,
    and BadInput when a checkpoint does not fit. All ranks call it.
    """
    states = {"steps": steps, **(extra or {})}
    engine.seed(plan.seed)
    step = resume(engine, plan, states)
    log = RunLog(plan.folder, is_main=engine.is_main, resumed_step=step)
    evaluated, stop = engine.share(log.last_evaluation), None
    saved = plan.folder / checkpoint.folder_name(step)
    shown = stage("training", plan.total_steps, done=step, expected_seconds=plan.expected_seconds)
    with stop_on_signals() as request, closing(log), shown as bar:
        while stop is None:
            at_end = step >= plan.total_steps
            if evaluate and step and (at_end or step % plan.evaluate_every == 0) and evaluated != step:
                log.write("evaluation", step, run_evaluation(engine, evaluate, step))
                evaluated = step
            if at_end:
                break
            start, rate = time.perf_counter(), rate_at(plan, step)
            if isinstance(engine.trainee, Staged):
                engine.trainee.begin_step(step, plan.total_steps)
            batches = next(steps)
            measured = getattr(steps, "measured", dict)()  # what making the step's data has shown, if anything
            totals = accumulate(engine, batches, request, measured)
            check_finite("loss", totals.loss, step + 1, plan)
            norm = engine.step(rate)
            check_finite("norm of the gradient", norm, step + 1, plan)
            step, stop = step + 1, totals.stop
            log.write("train", step, step_record(totals, norm, rate, time.perf_counter() - start))
            shown_metrics = {name: value for name, value in totals.metrics.items() if "/" not in name}
            bar.advance(1, tokens=totals.tokens, loss=totals.loss, **shown_metrics)
            if stop is not None or step % plan.checkpoint_every == 0 or step == plan.total_steps:
                log.flush()
                saved = checkpoint.save(plan.folder, step, engine, states, keep=plan.keep_checkpoints)
    if stop is not None:
        say(f"stopped after step {step} of {plan.total_steps}, saved {saved}; to go on: {plan.resume_command}")
    return Outcome(step, stop is None, stop, saved)


def resume(engine: Engine, plan: Plan, states: Mapping[str, Stateful]) -> int:
    """The step to go on from: 0 for a new run, else that of the newest sound checkpoint, which is loaded."""
    found = engine.share(bool(checkpoint.list_checkpoints(plan.folder)))
    if found and not plan.resume:
        raise BadInput(f"output: {plan.folder} already holds a run: add --resume, or choose another output")
    newest = engine.share(checkpoint.newest_sound(plan.folder, say) if engine.is_main else None)
    if newest is None:
        if found:
            say("no sound checkpoint is left: starting from step 0")
        return 0
    step = checkpoint.load(newest, engine, states)
    ended = ": this run is finished" if step >= plan.total_steps else ""
    say(f"resuming from {newest}, step {step} of {plan.total_steps}{ended}")
    return step


def rate_at(plan: Plan, step: int) -> float:
    """The learning rate of the step that follows `step` finished ones."""
    return learning_rate(
        step,
        plan.total_steps,
        peak=plan.peak_learning_rate,
        schedule=plan.schedule,
        warmup=plan.warmup,
        final_fraction=plan.final_fraction,
    )


def accumulate(
    engine: Engine,
    micro_batches: Sequence[MicroBatch],
    request: StopRequest,
    measured: Mapping[str, tuple[float, float]] | None = None,
) -> StepTotals:
    """Forward and backward of one step: leaves the exact gradient of (sum of losses / supervised positions).

    `measured` are this rank's further metrics, as sums and counts.

    Ranks may hold different numbers of micro-batches; one with fewer repeats its last with weight zero, since ranks
    must make the same number of backward passes.
    """
    announced = engine.gather((float(sum(batch.supervised for batch in micro_batches)), len(micro_batches)))
    supervised, rounds = sum(count for count, _ in announced), max(number for _, number in announced)
    if supervised <= 0:
        raise BadInput("data: no supervised token in a whole step: every label of its examples is masked")
    own = []
    for index in range(rounds):
        real = index < len(micro_batches)
        scale = engine.world_size / supervised if real else 0.0
        sums = engine.forward_backward(
            micro_batches[min(index, len(micro_batches) - 1)], scale, last=index + 1 == rounds
        )
        if real:
            own.append(sums)
    tokens = sum(batch.tokens for batch in micro_batches)
    stop = None if request.signal is None else int(request.signal)
    return combine(engine.gather(({**pool(own), **(measured or {})}, tokens, stop)), supervised)


def pool(parts: Sequence[LossSums]) -> dict[str, tuple[float, float]]:
    """Sums over this rank's micro-batches; the loss is the metric named ``loss``."""
    pooled: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (value, count) in {"loss": (part.loss_sum, part.count), **part.metrics}.items():
            value_before, count_before = pooled.get(name, (0.0, 0.0))
            pooled[name] = (value_before + float(value), count_before + float(count))
    return pooled


def combine(ranks: Sequence[tuple[dict[str, tuple[float, float]], int, int | None]], supervised: float) -> StepTotals:
    """Totals over all ranks. Raises RuntimeError when the trainee counted other positions than were announced."""
    sums: dict[str, list[tuple[float, float]]] = {}
    for pooled, _, _ in ranks:
        for name, pair in pooled.items():
            sums.setdefault(name, []).append(pair)
    totals = {name: (sum(v for v, _ in pairs), sum(c for _, c in pairs)) for name, pairs in sums.items()}
    loss_sum, counted = totals.pop("loss")
    if not math.isclose(counted, supervised, rel_tol=1e-3):
        raise RuntimeError(
            f"the trainee counted {counted} supervised positions, its micro-batches announce {supervised}"
        )
    metrics = {name: value / count for name, (value, count) in totals.items() if count}
    stop = next((stop for _, _, stop in ranks if stop is not None), None)
    return StepTotals(loss_sum / supervised, metrics, supervised, sum(tokens for _, tokens, _ in ranks), stop)


def check_finite(what: str, value: float | None, step: int, plan: Plan) -> None:
    """Raises Diverged unless `value` is finite (or unknown)."""
    if value is None or math.isfinite(value):
        return
    kept = checkpoint.list_checkpoints(plan.folder)
    last = f"the last checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"
    raise Diverged(f"step {step}: the {what} is {value}; {last}; a lower optimizer.learning_rate or clip may help")


def step_record(totals: StepTotals, norm: float | None, rate: float, seconds: float) -> dict[str, Any]:
    """What is logged of a step."""
    record: dict[str, Any] = {"loss": totals.loss, **totals.metrics, "learning_rate": rate}
    if norm is not None:
        record["gradient_norm"] = norm
    return record | {
        "supervised": totals.supervised,
        "tokens": totals.tokens,
        "seconds": seconds,
        "tokens_per_second": totals.tokens / seconds,
    }


def run_evaluation(engine: Engine, evaluate: Callable[[int], dict[str, Any]], step: int) -> dict[str, Any]:
    """Rank 0's evaluation, on every rank; random states and modes are as before afterwards."""
    modes = {module: module.training for module in engine.trainee.modules()}
    with preserved_rng():
        result = evaluate(step) if engine.is_main or engine.zero_stage == 3 else None
    restore_modes(modes)
    return engine.share(result)


def restore_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Puts each module back into train or eval mode by itself, not its children."""
    for module, training in modes.items():
        module.training = training
