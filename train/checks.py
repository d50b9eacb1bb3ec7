"""What is refused before any data is made, which may take hours: by the recipe alone, then by what the target is."""

from typing import Any, NamedTuple

import torch
from torch import nn

from ..data.chats import Encoded
from ..data.encoded_set import EncodedSet
from ..distill.chunked import check_temperature
from ..distill.mixture import parse_mixture
from ..distill.objective import DraftModelObjective
from ..distill.rollouts import readable_length
from ..errors import BadInput
from ..eval.run import encode_openings, evaluation_prompts
from ..heads.build import Trainable, build_trainable, kept_ids
from ..models.draft_lm import replace_head
from ..models.target import Target, without_contents
from ..recipe import BlockwiseDrafter, DrafterInit, DrafterSection, Medusa2Drafter, ModelDrafter, Recipe
from ..recipe_drafters import trains
from .data import served_sampling
from .engine import resolve_precision
from .zero import zero_config


def check_recipe(recipe: Recipe, num_processes: int = 1) -> None:
    """What the schema cannot say and no model is needed for. Raises BadInput."""
    mixture = parse_mixture(recipe.objective.loss, recipe.objective.temperature)
    rollouts = recipe.objective.rollouts
    if recipe.data.cache == "topk" and rollouts is None:
        check_temperature(mixture)
    if mixture.needs_tokens and rollouts is not None and rollouts.source == "drafter":
        raise BadInput(
            "objective.loss: cross_entropy learns the tokens as they stand, and those of rollouts from the drafter are its "
            "own: take a divergence from the target, or rollouts from 'online'"
        )
    if "self" in recipe.data.sources and recipe.data.num_self_prompts is None and recipe.engine.minutes is None:
        raise BadInput("data.num_self_prompts: needed for prompts 'self' unless engine.minutes is the budget")
    if not trains(recipe.drafter) and num_processes > 1:
        raise BadInput(f"drafter.kind: {recipe.drafter.kind} is searched for, not trained: start it in one process")
    if recipe.engine.deepspeed is not None:
        zero = zero_config(recipe.engine.deepspeed, precision=recipe.engine.precision, clip=recipe.optimizer.clip)
        if zero["zero_optimization"]["stage"] == 3 and _changes_target(recipe.drafter):
            raise BadInput("engine.deepspeed: ZeRO-3 shards what is trained of the target away from it; use stage 2")


def _changes_target(drafter: DrafterSection) -> bool:
    return isinstance(drafter, Medusa2Drafter) or (isinstance(drafter, BlockwiseDrafter) and drafter.train_layers > 0)


def check_run(recipe: Recipe, target: Target) -> None:
    """Build the drafter as the run will, without contents, and read the evaluation prompts.

    Raises:
        BadInput: the drafter does not fit the target, or a key asks for more than the target has.
    """
    prompts = evaluation_prompts(recipe.evaluate.prompts, recipe.evaluate.limit)
    if target.tokenizer is not None:
        encode_openings(target, prompts, where="evaluate.prompts")
    check_dtype(recipe, target.dtype, target.device)
    build_without_contents(recipe, without_contents(target))


def _check_positions(recipe: Recipe, target: Target, built: Trainable) -> None:
    """Raise BadInput for a draft model made for fewer positions than training's examples may have."""
    if not isinstance(built.objective, DraftModelObjective):
        return
    limit = readable_length(target, built.objective.lm)
    longest = min(recipe.data.max_length, target.context_limit or recipe.data.max_length)
    if limit is not None and limit < longest:
        raise BadInput(
            f"data.max_length: {longest:,} tokens, but the drafter reads {limit:,}: set it to at most {limit:,}"
        )


def check_dtype(recipe: Recipe, dtype: torch.dtype, device: torch.device) -> None:
    """Raises BadInput where layers of the target would be trained in a type that an optimizer cannot step in, or in another
    than the target's other layers are in: DeepSpeed in bf16 casts them, and keeps copies in float32 beside them.
    """
    drafter = recipe.drafter
    if not isinstance(drafter, BlockwiseDrafter) or not drafter.train_layers:
        return
    cast = recipe.engine.deepspeed is not None and resolve_precision(recipe.engine.precision, device) == "bf16"
    found = str(dtype).removeprefix("torch.")
    if cast and dtype != torch.bfloat16:
        raise BadInput(
            f"drafter.train_layers: DeepSpeed would train these layers in bfloat16, and the target's others are in {found}: "
            "set target.dtype to bfloat16, or engine.precision to fp32"
        )
    if not cast and dtype != torch.float32:
        raise BadInput(
            f"drafter.train_layers: the target is in {found}, too coarse for an optimizer's small steps: set target.dtype "
            "to float32 (without DeepSpeed engine.precision may be bf16)"
        )


class Built(NamedTuple):
    """A drafter on the meta device, where tensors have shapes and no contents."""

    trainable: Trainable
    num_scored: int  # ids that it can propose


def build_without_contents(recipe: Recipe, target: Target) -> Built:
    """The drafter of `recipe` for a `target` on the meta device. Nothing is measured: no influences, no frequencies.

    Raises:
        BadInput: they do not fit each other, or the examples that are asked for.
    """
    served = served_sampling(recipe.evaluate.sampling)
    with torch.device("meta"):
        built = build_trainable(_without_measurement(recipe.drafter), recipe.objective, target, _nothing(), served)
        _check_positions(recipe, target, built)
        return Built(built, _cut(built.objective, recipe.drafter, target) or built.num_scored)


def _without_measurement(drafter: Any) -> Any:
    """A drafter of the same shape for whose making nothing has to be computed."""
    if not isinstance(drafter, ModelDrafter):
        return drafter
    changes: dict[str, Any] = {"vocabulary": None}
    if drafter.vocabulary is not None:
        changes["train_embeddings"] = True  # embeddings and head part only when the head is cut
    if drafter.init is not None and drafter.init.num_layers is not None:
        changes["init"] = DrafterInit(layers=list(range(drafter.init.num_layers)))
    return drafter.model_copy(update=changes)


def _cut(objective: nn.Module, drafter: Any, target: Target) -> int | None:
    """Give a draft model the head of its cut vocabulary; which ids it would keep is not known yet."""
    if not isinstance(drafter, ModelDrafter) or drafter.vocabulary is None:
        return None
    assert isinstance(objective, DraftModelObjective)
    model, kept = objective.lm.model, len(kept_ids(drafter.vocabulary, target, _nothing()))
    head: Any = model.get_output_embeddings()
    replace_head(model, nn.Linear(head.weight.shape[1], kept, bias=head.bias is not None))
    if not drafter.train_embeddings:
        model.get_input_embeddings().requires_grad_(False)
    return kept


def _nothing() -> EncodedSet:
    """A training set in the stead of one that does not exist yet."""
    return EncodedSet.collect([(0, Encoded([0, 1], [False, True]))])
