"""`draftsmith train`: from a recipe to a drafter. Assembles target, data, drafter and objective, and runs the loop."""

import time
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..decode.costs import time_passes
from ..decode.packed import fast_products, unpack, use_backend
from ..distill.batch import DistillBatch
from ..distill.head_fit import fit_head, has_own_head
from ..distill.objective import DraftModelObjective
from ..distill.trainee import Staged, StepSource
from ..errors import BadInput
from ..eval.run import evaluation_prompts
from ..heads.build import Trainable, build_trainable
from ..models.target import Target, load_target
from ..progress import say
from ..provenance import Provenance, open_run
from ..recipe import ModelDrafter, Recipe, trains
from . import checkpoint, loop
from .budget import Budget, Shares, fix_budget, split_minutes, timed
from .checks import check_recipe, check_run
from .data import TrainingData, prepare_data, served_sampling
from .dry_run import dry_run
from .engine import Engine, start_engine
from .held_out import HeldOut
from .rng import seed_all
from .search import run_search
from .steps import build_steps, fitting_batches, steps_in

FINAL, START = "final", "start"
# `draftsmith eval` decodes every prompt plainly and with the drafter, and scores what both drafters say of the answers: about
# two and a half times as long as decoding alone. Loading, choosing a tree and measuring costs come first.
_EVALUATION_TIMES, _EVALUATION_SETUP = 2.7, 40.0
_WHOLE_STEP = {"fp32": 1.125, "bf16": 1.25}  # of its passes' time
_TIMED_TOKENS = 4096  # of the steps that a budget in minutes is worked out from, about

__all__ = ["dry_run", "train"]


def train(recipe: Recipe, *, resume: bool, command: list[str]) -> Path:
    """Run `recipe` to its end, from scratch or (`resume`) from where it stopped; the folder of the finished drafter.

    Raises:
        BadInput: whatever is wrong with recipe, data, models or output folder.
    """
    folder, began = Path(recipe.output).expanduser(), time.monotonic()
    engine = start_engine(
        recipe.engine.precision,
        deepspeed=recipe.engine.deepspeed,
        clip=recipe.optimizer.clip,
        threads=recipe.engine.threads,
    )
    with closing(engine):
        for line in engine.describe():
            say(line)
        check_recipe(
            recipe, engine.world_size
        )  # before there is a folder: a typo should cost neither it nor a download
        _on_main(engine, partial(open_run, folder, recipe.model_dump(mode="json"), resume=resume))
        if (folder / FINAL).exists():
            say(f"{folder} is finished: the drafter is in {folder / FINAL}")
            return folder / FINAL
        record = Provenance(folder, engine=engine.describe(), command=command) if engine.is_main else None
        target = load_target(recipe.target.model, recipe.target.dtype, engine.device, recipe.target.trust_remote_code)
        say(f"target: {target.name}, {_millions(target.model)} parameters")
        _on_main(engine, partial(check_run, recipe, target))
        data, held_out, shares = _prepare(recipe, target, folder, engine)
        say(f"data: {data.encoded.describe()}")
        outcome = _run_loop(recipe, target, data, held_out, folder, engine, command, (shares, began))
        if record is not None:
            record.finish(step=outcome.step, finished=outcome.finished)
    if outcome.signal is not None:
        raise SystemExit(128 + outcome.signal)
    return folder / FINAL


def _prepare(
    recipe: Recipe, target: Target, folder: Path, engine: Engine
) -> tuple[TrainingData, HeldOut | None, Shares | None]:
    """What to learn from, what to measure on, and the seconds for it. Rank 0 makes what is made once; the others read it."""
    backend = use_backend(target.model, "auto")
    say(f"linear layers of the target: {backend}")
    shares = engine.share(_on_main(engine, partial(_shares, recipe, target)))
    seconds = None if shares is None else shares.data
    data = _on_main_first(engine, partial(prepare_data, recipe, target, folder / "data", seconds))
    sampling = served_sampling(recipe.evaluate.sampling)
    measure = partial(HeldOut, recipe.evaluate, target, sampling, recipe.data.generation_batch, recipe.seed)
    # A sharded drafter is measured by all ranks or by none.
    held_out = _on_main_first(engine, measure) if engine.zero_stage == 3 else _on_main(engine, measure)
    unpack(target.model)
    return data, held_out, shares


def _shares(recipe: Recipe, target: Target) -> Shares | None:
    """How a budget in minutes is split, by what the evaluation after the training will take on this machine."""
    if recipe.engine.minutes is None or not trains(recipe.drafter):
        return split_minutes(recipe.engine)  # a search's share is that of its own last measurements
    prompt = [0] * min(64, (target.context_limit or 65) - 1)
    a_token = time_passes({"target": target.model}, prompt, seconds=0.5)["target"]
    prompts = len(evaluation_prompts(recipe.evaluate.prompts, recipe.evaluate.limit))
    plain = prompts * recipe.evaluate.max_new_tokens * a_token
    return split_minutes(recipe.engine, _EVALUATION_SETUP + _EVALUATION_TIMES * plain)


def _run_loop(
    recipe: Recipe,
    target: Target,
    data: TrainingData,
    held_out: HeldOut | None,
    folder: Path,
    engine: Engine,
    command: list[str],
    clock: tuple[Shares | None, float],
) -> loop.Outcome:
    """`clock`: how the minutes are split, and when the run began."""
    served = served_sampling(recipe.evaluate.sampling)
    seed_all(recipe.seed)  # a drafter with random weights is the same on every rank, and when a run is begun again
    built = build_trainable(recipe.drafter, recipe.objective, target, data.encoded, served, recipe.seed)
    if built.search is not None:
        return _search(recipe, built, target, held_out, folder, engine, command)
    objective = built.objective
    trained = sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)
    say(f"drafter: {_millions(objective)} parameters, {trained / 1e6:.1f} M trained, {built.num_scored:,} ids scored")
    objective.to(engine.device).train()
    if recipe.engine.gradient_checkpointing:
        assert isinstance(objective, DraftModelObjective)  # the recipe's schema has refused other kinds
        objective.lm.model.gradient_checkpointing_enable({"use_reentrant": False})
    steps = build_steps(recipe, target, data, engine, built)
    evaluate = None if held_out is None else _evaluation(built, held_out)
    # Before the engine wraps the drafter: rank 0 measures alone, and a wrapped drafter runs on all ranks or on none.
    fix = partial(_budget, recipe, folder, data, steps, built, held_out, engine, clock)
    budget = engine.share(_on_main(engine, fix))
    if not engine.share((folder / START).exists()):  # rank 0's answer: it may have been saved before another rank looks
        _on_main(engine, partial(built.save, folder / START))
    # A run whose checkpoints are all damaged starts again, as it did the first time; the loop names them.
    sound = engine.is_main and checkpoint.newest_sound(folder, lambda line: None) is not None
    if not engine.share(sound):
        _fit(recipe, data, engine, built)
    engine.prepare(
        objective,
        betas=recipe.optimizer.betas,
        epsilon=recipe.optimizer.epsilon,
        weight_decay=recipe.optimizer.weight_decay,
    )
    outcome = loop.train(engine, steps, _plan(recipe, folder, budget, command), evaluate=evaluate or (lambda step: {}))
    if outcome.finished:
        with engine.gathered():
            _on_main(engine, partial(built.save, folder / FINAL))
        say(f"finished: the drafter is in {folder / FINAL}")
    return outcome


def _fit(recipe: Recipe, data: TrainingData, engine: Engine, built: Trainable) -> None:
    """Solve for what can be solved before the first step: minutes of training for the price of seconds."""
    fit = built.fit or _head_fit(recipe, built)
    if fit is None:
        return
    say("fitting the drafter to the target")
    with fast_products(engine.device):
        explained = fit(fitting_batches(recipe, data, engine, built))
    say(f"the fit explains {explained:.0%} of the variance of the target's last hidden states")


def _head_fit(recipe: Recipe, built: Trainable) -> Callable[[Iterable[DistillBatch]], float] | None:
    """Of a cut draft model's own head."""
    init = recipe.drafter.init if isinstance(recipe.drafter, ModelDrafter) else None
    objective = built.objective
    if (
        init is None
        or init.fit_head is False
        or init.config is not None
        or not isinstance(objective, DraftModelObjective)
    ):
        return None
    return partial(fit_head, objective.lm, objective.teacher) if has_own_head(objective.lm) else None


def _search(
    recipe: Recipe,
    built: Trainable,
    target: Target,
    held_out: HeldOut | None,
    folder: Path,
    engine: Engine,
    command: list[str],
) -> loop.Outcome:
    """Look for the drafter instead of training it."""
    assert built.search is not None
    use_backend(target.model, "auto")  # the costs to weigh are those of decoding
    evaluate = None if held_out is None else _evaluation(built, held_out)
    outcome = run_search(built.search, recipe.engine, folder, evaluate, _resume_command(command))
    unpack(target.model)
    if outcome.finished:
        built.save(folder / FINAL)
        say(f"finished: the drafter is in {folder / FINAL}")
    return outcome


def _evaluation(built: Trainable, held_out: HeldOut) -> Callable[[int], dict[str, Any]]:
    def evaluate(step: int) -> dict[str, Any]:
        was_training = built.objective.training
        built.objective.eval()
        figures = held_out.measure(built.drafter)
        built.objective.train(was_training)
        words = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in figures.items())
        say(f"held-out prompts after step {step}: {words}")
        return figures

    return evaluate


def _budget(
    recipe: Recipe,
    folder: Path,
    data: TrainingData,
    steps: StepSource,
    built: Trainable,
    held_out: HeldOut | None,
    engine: Engine,
    clock: tuple[Shares | None, float],
) -> Budget:
    shares, began = clock
    objective, rollouts = built.objective, recipe.objective.rollouts

    def seconds_a_step() -> float:
        say("measuring how long a step and an evaluation take")
        # Small steps differ much in their tokens, and those of a staged objective in what they do: some are timed, as if
        # they lay all over the training.
        number = 1 if rollouts else max(2, min(16, _TIMED_TOKENS // recipe.engine.tokens_per_step))
        state, timed_steps = steps.state_dict(), []

        def make() -> None:
            steps.load_state_dict(state)
            timed_steps[:] = [next(steps) for _ in range(number)]

        making = timed(make, repeats=2 if rollouts else 1)
        steps.load_state_dict(state)
        staged: Staged | None = objective if isinstance(objective, Staged) else None

        def passes() -> None:
            for step, batches in enumerate(timed_steps):
                if staged is not None:  # as one of those between the steps that are measured
                    staged.begin_step(100 * step + 51, 100 * number)
                for batch in batches:
                    objective(batch).loss_sum.backward()
                objective.zero_grad(set_to_none=True)

        # Some is kept for what follows the passes: clipping, the optimizer, the log, checkpoints, alpha in every eighth step
        # (measured: 10 % of a small drafter's passes in fp32, 20 % in bf16).
        with engine.as_in_training():
            each = _WHOLE_STEP[engine.precision] * timed(passes, repeats=2) / number
        # Rollouts are made anew every so many steps. Of data that lie on disk the reading is within that.
        return each + making / (rollouts.staleness + 1) if rollouts else each

    def seconds_an_evaluation() -> float:
        assert held_out is not None
        held_out.read(built.drafter)  # where once is enough it is no part of what every evaluation costs
        return timed(partial(_evaluation(built, held_out), 0))

    return fix_budget(
        recipe.engine,
        folder / "budget.json",
        partial(steps_in, recipe, data),
        seconds_a_step,
        seconds_an_evaluation,
        recipe.evaluate.every,
        shares,
        lambda: time.monotonic() - began,
    )


def _plan(recipe: Recipe, folder: Path, budget: Budget, command: list[str]) -> loop.Plan:
    return loop.Plan(
        folder,
        budget.steps,
        recipe.optimizer.learning_rate,
        schedule=recipe.optimizer.schedule,
        warmup=recipe.optimizer.warmup,
        final_fraction=recipe.optimizer.final_fraction,
        checkpoint_every=recipe.engine.checkpoint_every,
        keep_checkpoints=recipe.engine.keep_checkpoints,
        evaluate_every=recipe.evaluate.every,
        seed=recipe.seed,
        resume=True,  # open_run has refused a second start already
        resume_command=_resume_command(command),
        expected_seconds=budget.seconds,
    )


def _resume_command(command: list[str]) -> str:
    return " ".join(command if "--resume" in command else [*command, "--resume"])


def _on_main(engine: Engine, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 while the others wait. Its BadInput is raised on every rank. None on the others."""
    problem: str | None = None
    result = None
    if engine.is_main:
        try:
            result = work()
        except BadInput as error:
            problem = str(error)
    problem = engine.share(problem)
    if problem is not None:
        raise BadInput(problem)
    return result


def _on_main_first(engine: Engine, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0, then on the others, which find on disk what it made."""
    result = _on_main(engine, work)
    return result if engine.is_main else work()


def _millions(model: nn.Module) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} M"
