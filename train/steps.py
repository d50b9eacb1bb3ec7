"""From a recipe and its data to the steps that the loop takes, rollouts included."""

import sys
from collections.abc import Iterator

from ..data.batches import TokenBatches
from ..data.encoded_set import EncodedSet
from ..decode.packed import use_backend
from ..decode.streams import mix
from ..distill.attention import reads_by_document
from ..distill.batch import DistillBatch
from ..distill.objective import DraftModelObjective
from ..distill.online import OnlineStream
from ..distill.rollouts import DrafterAnswers, RolloutBuffer
from ..distill.steps import CachedTeacher, DistillSteps, RolloutSteps
from ..distill.trainee import StepSource
from ..errors import BadInput
from ..heads.build import Trainable, recorded_layers
from ..models.target import Target
from ..progress import say
from ..recipe import Recipe, RolloutSection
from .data import TrainingData, served_sampling
from .engine import Engine


def build_steps(recipe: Recipe, target: Target, data: TrainingData, engine: Engine, built: Trainable) -> StepSource:
    """The run's steps.

    Raises:
        BadInput: no prompts to make rollouts of, or fewer than processes.
    """
    rollouts = recipe.objective.rollouts
    share = 1.0 if rollouts is None else 1.0 - rollouts.fraction
    fixed = None
    if share > 0:
        batches = _batches(
            recipe, data, round(recipe.engine.tokens_per_step * share) or 1, built, engine.rank, engine.world_size
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
    tokens = max(1, recipe.engine.tokens_per_step // engine.world_size)  # in a pass no more than a rank trains on
    steps = DistillSteps(_batches(recipe, data, tokens, built), engine.device, cached)
    while steps.batches.epoch == 0:
        yield from next(steps)


def steps_in(recipe: Recipe, data: TrainingData, epochs: float) -> int:
    """Steps of this many passes over the fixed data, counted as if all of a step were fixed data."""
    return _batches(recipe, data, recipe.engine.tokens_per_step).num_steps(epochs)


def _batches(
    recipe: Recipe,
    data: TrainingData,
    tokens: int,
    built: Trainable | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> TokenBatches:
    """`built` None: only the number of steps is of interest, which rows do not change."""
    longest, room = int(data.encoded.lengths.max()), recipe.data.max_length
    if built is not None and _reads_by_document(built, longest):
        room = -(-tokens // world_size)  # all that a pass reads in one row, without padding
    if recipe.engine.tokens_per_forward is not None:
        room = min(room, recipe.engine.tokens_per_forward)  # a row is the least that a pass reads
    return TokenBatches(
        data.encoded,
        tokens,
        recipe.engine.tokens_per_forward,
        length=max(longest, room) if recipe.data.packing else longest,
        packing=recipe.data.packing,
        seed=recipe.seed,
        rank=rank,
        world_size=world_size,
    )


def _reads_by_document(built: Trainable, longest: int) -> bool:
    """Whether the length of a row is of no account: heads with attention of their own have it over whole rows."""
    objective = built.objective
    return isinstance(objective, DraftModelObjective) and reads_by_document(objective.lm.backbone, longest)


def _with_rollouts(
    recipe: Recipe,
    section: RolloutSection,
    target: Target,
    data: TrainingData,
    engine: Engine,
    built: Trainable,
    fixed: DistillSteps | None,
) -> RolloutSteps:
    source = _source(recipe, section, target, built)
    prompts = answerable(prompts_of(data.encoded), source.longest)
    if len(prompts) < engine.world_size:
        raise BadInput(
            f"objective.rollouts: {len(prompts)} distinct prompts for {engine.world_size} processes, expected one each at least"
        )
    buffer = RolloutBuffer(
        source,
        prompts[engine.rank :: engine.world_size],
        tokens_per_step=max(1, round(recipe.engine.tokens_per_step * section.fraction / engine.world_size)),
        staleness=section.staleness,
        size=section.buffer,
        replay=section.source == "online",
        seed=mix(recipe.seed, engine.rank),
        answer_length=section.max_new_tokens,
    )
    length = max(max(map(len, prompts)) + section.max_new_tokens, recipe.data.max_length)
    return RolloutSteps(
        fixed,
        buffer,
        length=sys.maxsize if _reads_by_document(built, length) else length,
        tokens_per_forward=recipe.engine.tokens_per_forward,
        device=engine.device,
    )


def _source(recipe: Recipe, section: RolloutSection, target: Target, built: Trainable) -> DrafterAnswers | OnlineStream:
    sampling = served_sampling(section.sampling)
    if section.source == "drafter":
        assert isinstance(built.objective, DraftModelObjective), "the recipe's schema has refused it"
        lm = built.objective.lm
        return DrafterAnswers(lm, target, sampling, section.max_new_tokens, recipe.data.generation_batch)
    layers = recorded_layers(recipe.drafter, target.num_layers)
    if layers == ():
        say(
            f"online: the target runs a second time over what was served, a {recipe.drafter.kind} drafter has to ask it"
        )
    else:
        # It verifies in every step and never changes. Not "auto", which goes by the clock: a resumed run computes the same.
        use_backend(target.model, "packed")
    return OnlineStream(
        target,
        built.drafter,
        built.objective,
        sampling,
        section.max_new_tokens,
        recipe.evaluate.num_speculative_tokens,
        recipe.data.generation_batch,
        layers,
    )


def answerable(prompts: list[list[int]], longest: int | None) -> list[list[int]]:
    """Prompts that leave room for an answer in `longest` tokens; says how many do not.

    Raises:
        BadInput: none does.
    """
    if longest is None:
        return prompts
    kept = [prompt for prompt in prompts if len(prompt) < longest]
    if not kept:
        raise BadInput(
            f"objective.rollouts: no prompt leaves room for an answer in the {longest:,} tokens of the context"
        )
    if len(kept) < len(prompts):
        say(
            f"{len(prompts) - len(kept):,} prompts leave no room for an answer in {longest:,} tokens: no rollout of them"
        )
    return kept


def prompts_of(encoded: EncodedSet) -> list[list[int]]:
    """What comes before the first supervised token of every example; each prompt once."""
    found: dict[tuple[int, ...], None] = {}
    for item in encoded:
        first = item.loss_mask.index(True)
        found[tuple(item.input_ids[: max(first, 1)])] = None
    return [list(prompt) for prompt in found]
