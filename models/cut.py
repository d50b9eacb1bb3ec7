"""Draft models made from a target: some of its layers, or its configuration changed and its embeddings taken along."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from ..errors import BadInput, nearest
from .loading import load_exactly
from .quiet import one_line_errors, quiet
from .target import as_target

# Keys of a configuration that list layer numbers; lists with one entry a layer are recognised by name and length.
_LAYER_NUMBER_KEYS = ("mlp_only_layers", "moe_layers")
# What a layer's modules hold of their number and their making, not of what they compute.
_OF_THE_PLACE = ("layer_idx", "layer_id", "training", "_is_hf_initialized")
_PER_LAYER_WORDS = ("layer", "pattern", "intermediate_size", "attention_heads", "key_value_heads")


def cut_layers(target_model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A new causal LM made of copies of these layers of the target, in this order, with its embeddings, norm and head.

    The configuration is kept in step (number of layers, layer types and every other per-layer list, each layer's
    index), and embeddings and head are tied exactly if the target's are. Of a model that also sees images or hears,
    only the language model is taken. Weights are trainable, in the target's dtype and on its device.

    Raises:
        BadInput: a layer that is not there, or a family whose layers cannot take other places.
    """
    decoder, config, number = text_stack(target_model)
    if not layers or min(layers) < 0 or max(layers) >= number:
        raise BadInput(f"init.layers: {list(layers)}: expected layers from 0 to {number - 1}, at least one")
    name = type(target_model).__name__
    with quiet(), one_line_errors(f"init.layers: {name}"), torch.random.fork_rng(devices=[]):
        config = _in_step(config, layers)
        config.tie_word_embeddings = _tied(target_model)
        model = _build(target_model, config)
    prefix, stack = layer_list(decoder, number)
    state = {f"{model.base_model_prefix}.{key}": value for key, value in _cut_state(decoder, prefix, layers).items()}
    head: Any = target_model.get_output_embeddings()
    head_name = next(key for key, module in model.named_modules() if module is model.get_output_embeddings())
    state |= {f"{head_name}.{key}": value for key, value in head.state_dict().items()}
    load_exactly(model, state, f"init.layers: {name}")
    _check_behaviour(stack, layers, layer_list(model.base_model, len(layers))[1], name)
    return model.to(target_model.device).eval()


def text_stack(model: Any) -> tuple[nn.Module, PreTrainedConfig, int]:
    """The module that holds embeddings, layers and norm, its configuration, and how many layers there are."""
    config = model.config.get_text_config()
    decoder = model.base_model if config is model.config else model.get_decoder()
    return decoder, config, config.num_hidden_layers


def _build(target_model: Any, config: PreTrainedConfig) -> Any:
    config._attn_implementation = target_model.config._attn_implementation
    if target_model.config.get_text_config() is not target_model.config:
        model = AutoModelForCausalLM.from_config(config, dtype=target_model.dtype)
    else:  # the same class, so that models which bring their own code work too
        model = type(target_model)._from_config(config, dtype=target_model.dtype)
    model.config._name_or_path = ""
    if target_model.generation_config is not None:
        model.generation_config = copy.deepcopy(target_model.generation_config)
    return model


def _tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def layer_list(decoder: nn.Module, number: int) -> tuple[str, nn.ModuleList]:
    """The list of the decoder's layers, and its name there."""
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return name, module
    raise BadInput(f"{type(decoder).__name__}: its {number} layers are not in one list, so they cannot be cut")


def _cut_state(decoder: nn.Module, prefix: str, layers: Sequence[int]) -> dict[str, Tensor]:
    state = decoder.state_dict()
    cut = {key: value for key, value in state.items() if not key.startswith(f"{prefix}.")}
    for new, old in enumerate(layers):
        start = f"{prefix}.{old}."
        cut |= {f"{prefix}.{new}.{k.removeprefix(start)}": v for k, v in state.items() if k.startswith(start)}
    return cut


def _in_step(config: PreTrainedConfig, sources: Sequence[int], changes: dict[str, Any] | None = None) -> Any:
    """`config` with one layer for each entry of `sources` (numbers of present layers), and then `changes`."""
    number, values = config.num_hidden_layers, config.to_dict()
    for key, value in values.items():
        if not isinstance(value, list):
            continue
        if key in _LAYER_NUMBER_KEYS:
            values[key] = [new for new, old in enumerate(sources) if old in value]
        elif len(value) == number and any(word in key for word in _PER_LAYER_WORDS):
            values[key] = [value[old] for old in sources]
    values[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(sources)
    return type(config).from_dict({**values, **(changes or {})})


def _check_behaviour(old: nn.ModuleList, layers: Sequence[int], new: nn.ModuleList, name: str) -> None:
    """Raise BadInput where a layer in its new place differs in more than its number (its window, say)."""
    for place, layer in enumerate(layers):
        pairs = zip(old[layer].named_modules(), new[place].named_modules(), strict=False)
        for (path, before), (_, after) in pairs:
            for key, value in vars(before).items():
                plain = isinstance(value, bool | int | float | str | None)
                if plain and key not in _OF_THE_PLACE and vars(after).get(key) != value:
                    where = f"{path}.{key}" if path else key
                    raise BadInput(
                        f"init.layers: {name}: layer {layer} cannot take place {place}: {where} would change"
                    )


@torch.no_grad()
def block_influence(target: Any, token_batches: Iterable[Int[Tensor, "_ _"]]) -> list[float]:
    """How much every layer changes what passes through it: 1 minus the mean cosine of its input and output.

    BI_i = 1 - E_t[cos(X_i,t, X_i+1,t)], ShortGPT (arXiv:2403.03853, eq. 1), over all tokens of all batches
    (each ``[batch, length]``, without padding).

    Raises:
        BadInput: no tokens.
    """
    model = as_target(target).model
    decoder, _, number = text_stack(model)
    sums, tokens = torch.zeros(number, dtype=torch.float64), 0
    hooks = []
    for i, layer in enumerate(layer_list(decoder, number)[1]):

        def measure(module: nn.Module, args: tuple, kwargs: dict, output: Any, i: int = i) -> None:
            before = (args[0] if args else kwargs["hidden_states"]).float()
            after = (output[0] if isinstance(output, tuple) else output).float()
            sums[i] += torch.cosine_similarity(before, after, dim=-1).sum().double().cpu()

        hooks.append(layer.register_forward_hook(measure, with_kwargs=True))
    try:
        for batch in token_batches:
            decoder(input_ids=batch.to(model.device), use_cache=False)
            tokens += batch.numel()
    finally:
        for hook in hooks:
            hook.remove()
    if tokens == 0:
        raise BadInput("init.num_layers: no calibration texts to measure block influence on")
    return (1.0 - sums / tokens).tolist()


def choose_layers(target: Any, number: int, token_batches: Iterable[Int[Tensor, "_ _"]]) -> list[int]:
    """The `number` layers of the target with the most influence (:func:`block_influence`), in their order.

    Raises:
        BadInput: the target has fewer layers, or there are no tokens.
    """
    available = text_stack(as_target(target).model)[2]
    if not 1 <= number <= available:
        raise BadInput(f"init.num_layers: {number}: expected 1 to {available}")
    influence = block_influence(target, token_batches)
    return sorted(sorted(range(available), key=lambda i: -influence[i])[:number])


def from_config(
    target_model: PreTrainedModel, overrides: dict[str, Any], embeddings: Literal["copy", "project", "random"] = "copy"
) -> PreTrainedModel:
    """A causal LM of the target's family with `overrides` in its configuration and random layers.

    Per-layer lists follow ``num_hidden_layers`` unless given. The embeddings (and the head, where it is not tied to
    them) are the target's (``copy``), the target's projected to the new hidden size (``project``, see
    :func:`project_rows`), or random too. Weights are drawn from torch's global generator.

    Raises:
        BadInput: an unknown key, values that do not fit together, fewer ids than the target has, or ``copy`` with
            another hidden size.
    """
    _, config, number = text_stack(target_model)
    known = {*config.to_dict(), *config.attribute_map, "num_hidden_layers"}
    for key in overrides:
        if key not in known:
            raise BadInput(f"init.config: {type(config).__name__} has no key {key!r}{nearest(key, known)}")
    changes = {config.attribute_map.get(key, key): value for key, value in overrides.items()}
    layers = changes.get(config.attribute_map.get("num_hidden_layers", "num_hidden_layers"), number)
    if not isinstance(layers, int) or layers < 1:
        raise BadInput(f"init.config: num_hidden_layers: {layers!r}: expected a positive integer")
    with quiet(), one_line_errors("init.config"):
        model = _build(target_model, _in_step(config, [i % number for i in range(layers)], changes))
        if model.device.type != "meta":  # which has shapes only
            ids = torch.arange(2, device=model.device)[None]
            model.eval()(input_ids=ids, use_cache=False)  # head counts that do not divide show only here
    if embeddings != "random":
        _take_embeddings(target_model, model, embeddings)
    return model.to(target_model.device)


@torch.no_grad()
def _take_embeddings(source: Any, model: Any, how: str) -> None:
    pairs = [(source.get_input_embeddings(), model.get_input_embeddings())]
    if not _tied(model):
        pairs.append((source.get_output_embeddings(), model.get_output_embeddings()))
    for old, new in pairs:
        rows, width = old.weight.shape
        if len(new.weight) < rows:
            raise BadInput(
                f"init.config: vocab_size: {len(new.weight)} is less than the target's {rows} ids; to score fewer ids "
                "keep them all here and set drafter.vocabulary"
            )
        if how == "copy" and new.weight.shape[1] != width:
            raise BadInput(
                f"init.config: embeddings of width {width} cannot be copied into a model of hidden size "
                f"{new.weight.shape[1]}; use embeddings: project"
            )
        weight = old.weight if how == "copy" else project_rows(old.weight, new.weight.shape[1])
        new.weight[:rows] = weight.to(new.weight)
        if getattr(new, "bias", None) is not None and getattr(old, "bias", None) is not None:
            new.bias[:rows] = old.bias.to(new.bias)


def project_rows(weight: Float[Tensor, "rows width"], size: int) -> Float[Tensor, "rows size"]:
    """Rows projected to `size` dimensions so that their inner products change least: onto the first right singular
    vectors of the matrix (Eckart-Young). More dimensions than before are filled with zeros.
    """
    wide = weight.float()
    width = wide.shape[1]
    if size >= width:
        return torch.nn.functional.pad(wide, (0, size - width))
    _, directions = torch.linalg.eigh(wide.T @ wide)  # ascending
    return wide @ directions[:, width - size :].flip(-1)
