"""From a recipe and its data to the steps that the loop takes, rollouts included."""

from collections.abc import Callable, Iterator
from typing import Any

from ..data.batches import TokenBatches
from ..data.encoded_set import EncodedSet
from ..decode.streams import mix
from ..distill.batch import DistillBatch
from ..distill.objective import DraftModelObjective
from ..distill.rollouts import DrafterAnswers, OnlineStream, RolloutBuffer, Source
from ..distill.steps import CachedTeacher, DistillSteps, RolloutSteps
from ..distill.trainee import StepSource
from ..errors import BadInput
from ..heads.build import Trainable
from ..models.target import Target
from ..recipe import Recipe, RolloutSection
from .data import TrainingData, served_sampling
from .engine import Engine


def build_steps(recipe: Recipe, target: Target, data: TrainingData, engine: Engine, built: Trainable) -> StepSource:
    """The run's steps.

    Raises:
        BadInput: rollouts that this drafter or engine cannot make.
    """
    rollouts = recipe.objective.rollouts
    share = 1.0 if rollouts is None else 1.0 - rollouts.fraction
    fixed = None
    if share > 0:
        batches = _batches(
            recipe, data, round(recipe.engine.tokens_per_step * share) or 1, engine.rank, engine.world_size
        )
        cached = None if data.cached is None else CachedTeacher(data.cached, data.encoded, built.rank_of)
        fixed = DistillSteps(batches, engine.device, cached)
    if rollouts is None:
        assert fixed is not None
        return fixed
    return _with_rollouts(recipe, rollouts, target, data, engine, built, fixed)


def fitting_batches(recipe: Recipe, data: TrainingData, engine: Engine, built: Trainable) -> Iterator[DistillBatch]:
    """Micro-batches of one pass over the fixed data, the same on every rank."""
    cached = None if data.cached is None else CachedTeacher(data.cached, data.encoded, built.rank_of)
    steps = DistillSteps(_batches(recipe, data, recipe.engine.tokens_per_step), engine.device, cached)
    while steps.batches.epoch == 0:
        yield from next(steps)


def steps_in(recipe: Recipe, data: TrainingData, epochs: float) -> int:
    """Steps of this many passes over the fixed data, counted as if all of a step were fixed data."""
    return _batches(recipe, data, recipe.engine.tokens_per_step).num_steps(epochs)


def _batches(recipe: Recipe, data: TrainingData, tokens: int, rank: int = 0, world_size: int = 1) -> TokenBatches:
    longest = int(data.encoded.lengths.max())
    return TokenBatches(
        data.encoded,
        tokens,
        recipe.engine.tokens_per_forward,
        length=max(longest, recipe.data.max_length) if recipe.data.packing else longest,
        packing=recipe.data.packing,
        seed=recipe.seed,
        rank=rank,
        world_size=world_size,
    )


def _with_rollouts(
    recipe: Recipe,
    section: RolloutSection,
    target: Target,
    data: TrainingData,
    engine: Engine,
    built: Trainable,
    fixed: DistillSteps | None,
) -> RolloutSteps:
    if engine.zero_stage == 3:
        raise BadInput("objective.rollouts: a drafter sharded by ZeRO-3 cannot decode; use stage 2 or less")
    if data.cached is not None and "top_ids" in data.cached.arrays and fixed is not None:
        raise BadInput(
            "objective.rollouts: fixed data with a top-k cache cannot be mixed with rollouts; use cache: hidden"
        )
    prompts = prompts_of(data.encoded)
    tokens = max(1, round(recipe.engine.tokens_per_step * section.fraction / engine.world_size))
    steps: RolloutSteps
    buffer = RolloutBuffer(
        _source(recipe, section, target, built, lambda step, served: steps.note_served(step, served)),
        prompts[engine.rank :: engine.world_size],
        tokens_per_step=tokens,
        staleness=section.staleness,
        size=section.buffer,
        replay=section.source == "online",
        seed=mix(recipe.seed, engine.rank),
    )
    longest = max(map(len, prompts)) + section.max_new_tokens
    forward = recipe.engine.tokens_per_forward or tokens
    steps = RolloutSteps(
        fixed, buffer, length=max(longest, recipe.data.max_length), tokens_per_forward=forward, device=engine.device
    )
    return steps


def _source(
    recipe: Recipe, section: RolloutSection, target: Target, built: Trainable, served: Callable[[int, float], Any]
) -> Source:
    sampling = served_sampling(section.sampling)
    if section.source == "online":
        return OnlineStream(
            target,
            built.drafter,
            built.objective,
            sampling,
            section.max_new_tokens,
            recipe.evaluate.num_speculative_tokens,
            served,
        )
    if not isinstance(built.objective, DraftModelObjective):
        raise BadInput(
            f"objective.rollouts.source: a {recipe.drafter.kind} drafter writes no text of its own; use online, or none"
        )
    return DrafterAnswers(built.objective.lm, target, sampling, section.max_new_tokens, recipe.data.generation_batch)


def prompts_of(encoded: EncodedSet) -> list[list[int]]:
    """What comes before the first supervised token of every example; each prompt once."""
    found: dict[tuple[int, ...], None] = {}
    for item in encoded:
        first = item.loss_mask.index(True)
        found[tuple(item.input_ids[: max(first, 1)])] = None
    return [list(prompt) for prompt in found]
