"""`draftsmith train --dry-run`: the resolved recipe, what it would train and on how much data. No weights are loaded."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig

from ..data.encoded_set import encode_examples
from ..data.sources import Example
from ..distill.answer_rounds import Rounds
from ..distill.author import in_words, writing_dtype
from ..eval.run import evaluation_prompts
from ..models.loading import load_tokenizer, locate
from ..models.quiet import one_line_errors, quiet
from ..models.target import Target, eos_token_ids
from ..recipe import Recipe
from ..recipe_io import resolved_yaml
from .budget import split_minutes
from .checks import build_without_contents, check_dtype, check_recipe
from .data import answers_asked, cache_form, read_prompts_or_chats, tokenizer_of, usable_length
from .engine import resolve_precision


def dry_run(recipe: Recipe, num_processes: int = 1) -> str:
    """A description of the run, in as many processes.

    Raises:
        BadInput: whatever is wrong with recipe, data or configurations.
    """
    check_recipe(recipe, num_processes)
    examples = read_prompts_or_chats(recipe.data)
    config = read_config(recipe.target.model, recipe.target.trust_remote_code)
    tokenizer = load_tokenizer(recipe.target.model, recipe.target.trust_remote_code)
    lines = [resolved_yaml(recipe).rstrip(), ""]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = _loaded_dtype(recipe, config)
    check_dtype(recipe, dtype, device)
    lines += parameter_lines(recipe, config, tokenizer)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    written_in = writing_dtype(recipe.data.dtype, dtype, device, recipe.data.generation_batch)
    target = on_meta(recipe.target.model, config, tokenizer)
    lines += list(_data_lines(recipe, target, examples, usable_length(recipe.data.max_length, limit), written_in))
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
    total = sum(parameter.numel() for parameter in target.model.parameters())  # some kinds add to it
    built = build_without_contents(recipe, target)
    objective = built.trainable.objective
    trained = sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)
    own = sum(parameter.numel() for parameter in objective.parameters())
    return Parameters(total, own, trained, built.num_scored)


def on_meta(name: str, config: PreTrainedConfig, tokenizer: Any = None) -> Target:
    """A target without contents."""
    with torch.device("meta"), one_line_errors(name):
        model = AutoModelForCausalLM.from_config(config)
    model.eval().requires_grad_(False)
    return Target(model, tokenizer, name, eos_token_ids(model, tokenizer))


def _loaded_dtype(recipe: Recipe, config: PreTrainedConfig) -> torch.dtype:
    """The dtype that the target would be loaded in."""
    loaded = config.dtype or torch.get_default_dtype() if recipe.target.dtype == "auto" else recipe.target.dtype
    return getattr(torch, loaded) if isinstance(loaded, str) else loaded


def _data_lines(
    recipe: Recipe, target: Target, examples: list[Example], max_length: int, dtype: torch.dtype
) -> Iterator[str]:
    """The data, and what is kept of the target's outputs. `target`: without contents; `dtype`: in which it writes."""
    data, tokenizer = recipe.data, tokenizer_of(recipe, target)
    if data.responses == "given":
        encoded = encode_examples(tokenizer, examples, max_length, where="data.prompts")
        yield f"data: {encoded.describe()}"
        if data.cache != "none":
            form = cache_form(recipe, target.num_layers).of(target)
            yield form.size_words(target, encoded.num_tokens if form.unit == "token" else encoded.num_supervised)
        return
    parts = [f"{len(examples):,} given prompts"] if examples else []
    if "self" in data.sources:
        own = "as many as the minutes allow" if data.num_self_prompts is None else f"{data.num_self_prompts:,}"
        parts.append(f"prompts written by the target: {own}")
    yield f"data: {', '.join(parts)}; answered by the target with at most {data.max_new_tokens} tokens in {in_words(dtype)}"
    shares = split_minutes(recipe.engine)
    settings, amount = answers_asked(recipe, target, max_length, None if shares is None else shares.data)
    answers = Rounds(target, examples, "self" in data.sources, settings._replace(dtype=dtype), amount)
    if size := answers.size():
        yield size
    if data.cache == "topk":
        most = answers.most_tokens()
        yield cache_form(recipe, target.num_layers).of(target).size_words(target, most and most[0], at_most=True)
