"""`draftsmith train --dry-run`: the resolved recipe, what it would train and on how much data. No weights are loaded."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig

from ..data.chats import Encoded
from ..data.encoded_set import EncodedSet, encode_examples
from ..data.sources import Example
from ..distill.author import in_words, writing_dtype
from ..distill.objective import DraftModelObjective
from ..errors import BadInput
from ..eval.run import evaluation_prompts
from ..heads.build import build_trainable
from ..models.draft_lm import replace_head
from ..models.loading import load_tokenizer, locate
from ..models.quiet import one_line_errors, quiet
from ..models.target import Target
from ..recipe import DrafterInit, ModelDrafter, Recipe
from ..recipe_io import resolved_yaml
from .data import check_recipe, read_prompts_or_chats, served_sampling, usable_length
from .engine import resolve_precision


def dry_run(recipe: Recipe) -> str:
    """A description of the run.

    Raises:
        BadInput: whatever is wrong with recipe, data or configurations.
    """
    check_recipe(recipe)
    examples = read_prompts_or_chats(recipe.data)
    config = read_config(recipe.target.model, recipe.target.trust_remote_code)
    tokenizer = load_tokenizer(recipe.target.model, recipe.target.trust_remote_code)
    lines = [resolved_yaml(recipe).rstrip(), ""]
    lines += parameter_lines(recipe, config, tokenizer)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines += list(_data_lines(recipe, examples, tokenizer, limit, _dtype_of_answers(recipe, config, device)))
    lines.append(f"training: in {resolve_precision(recipe.engine.precision, device)}")
    lines.append(f"evaluation: {len(evaluation_prompts(recipe.evaluate.prompts, recipe.evaluate.limit)):,} prompts")
    lines.append("dry run: nothing was trained or written")
    return "\n".join(lines)


def read_config(name: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The model's configuration, without its weights."""
    place = locate(name)
    with quiet(), one_line_errors(name):
        return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)


class Parameters(NamedTuple):
    """What a run holds."""

    target: int
    drafter: int  # of its own: what it shares with a frozen target does not count
    trained: int
    num_scored: int  # ids that the drafter can propose


def parameter_lines(recipe: Recipe, config: PreTrainedConfig, tokenizer: Any = None) -> list[str]:
    """Parameters of target and drafter, in words."""
    found = count_parameters(recipe, config, tokenizer)
    return [
        f"target: {recipe.target.model}, {found.target:,} parameters",
        f"drafter: {recipe.drafter.kind}, {found.drafter:,} parameters, {found.trained:,} of them trained, "
        f"{found.num_scored:,} ids scored",
    ]


def count_parameters(recipe: Recipe, config: PreTrainedConfig, tokenizer: Any = None) -> Parameters:
    """Parameters of target and drafter, counted on the meta device, where tensors have shapes and no contents."""
    target = on_meta(recipe.target.model, config, tokenizer)
    served = served_sampling(recipe.evaluate.sampling)
    with torch.device("meta"):
        built = build_trainable(_without_measurement(recipe.drafter), recipe.objective, target, _nothing(), served)
        num_scored = _cut(built.objective, recipe.drafter) or built.num_scored
    trained = sum(parameter.numel() for parameter in built.objective.parameters() if parameter.requires_grad)
    own = sum(parameter.numel() for parameter in built.objective.parameters())
    total = sum(parameter.numel() for parameter in target.model.parameters())
    return Parameters(total, own, trained, num_scored)


def on_meta(name: str, config: PreTrainedConfig, tokenizer: Any = None) -> Target:
    """A target without contents."""
    with torch.device("meta"), one_line_errors(name):
        model = AutoModelForCausalLM.from_config(config)
    model.eval().requires_grad_(False)
    return Target(model, tokenizer, name, ())


def _without_measurement(drafter: Any) -> Any:
    """A drafter of the same shape for whose making nothing has to be computed: no influences, no frequencies."""
    if not isinstance(drafter, ModelDrafter):
        return drafter
    changes: dict[str, Any] = {"vocabulary": None}
    if drafter.init is not None and drafter.init.num_layers is not None:
        changes["init"] = DrafterInit(layers=list(range(drafter.init.num_layers)))
    return drafter.model_copy(update=changes)


def _cut(objective: nn.Module, drafter: Any) -> int | None:
    """Give a draft model the head of its cut vocabulary; which ids it would keep is not known yet."""
    if not isinstance(drafter, ModelDrafter) or drafter.vocabulary is None:
        return None
    assert isinstance(objective, DraftModelObjective)
    model = objective.lm.model
    head: Any = model.get_output_embeddings()
    replace_head(model, nn.Linear(head.weight.shape[1], drafter.vocabulary, bias=head.bias is not None))
    if not drafter.train_embeddings:
        model.get_input_embeddings().requires_grad_(False)
    return drafter.vocabulary


def _nothing() -> EncodedSet:
    """A training set in the stead of one that does not exist yet."""
    return EncodedSet.collect([(0, Encoded([0, 1], [False, True]))])


def _dtype_of_answers(recipe: Recipe, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype in which the target would write on `device`."""
    loaded = config.dtype or torch.get_default_dtype() if recipe.target.dtype == "auto" else recipe.target.dtype
    loaded = getattr(torch, loaded) if isinstance(loaded, str) else loaded
    return writing_dtype(recipe.data.dtype, loaded, device)


def _data_lines(
    recipe: Recipe, examples: list[Example], tokenizer: Any, context_limit: int | None, dtype: torch.dtype
) -> Iterator[str]:
    data = recipe.data
    if data.responses == "given":
        if tokenizer is None:
            raise BadInput(f"target.model: {recipe.target.model} has no tokenizer, so no data can be encoded")
        max_length = usable_length(data.max_length, context_limit)
        yield f"data: {encode_examples(tokenizer, examples, max_length, where='data.prompts').describe()}"
        return
    parts = [f"{len(examples):,} given prompts"] if examples else []
    if "self" in data.sources:
        own = "as many as the minutes allow" if data.num_self_prompts is None else f"{data.num_self_prompts:,}"
        parts.append(f"prompts written by the target: {own}")
    yield f"data: {', '.join(parts)}; answered by the target with at most {data.max_new_tokens} tokens in {in_words(dtype)}"
