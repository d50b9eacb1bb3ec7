"""EAGLE drafters from a recipe's section into training, and into their folder and back."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from ..decode.sampling import Sampling
from ..distill.mixture import parse_mixture
from ..distill.teacher import Teacher, absolute_layer
from ..errors import BadInput
from ..models.quiet import one_line_errors
from ..models.target import Target
from ..models.vocabulary import kept_ids_of
from ..recipe import EagleDrafter, ObjectiveSection
from .checkpoint import load_head, save_head
from .eagle_drafter import Eagle
from .eagle_model import EagleModel, eagle_config
from .eagle_objective import EagleObjective, Weights
from .features import TargetFeatures
from .outputs import HeadOutputs

KIND = "eagle"
_ARCHITECTURES = {1: "EagleLlamaForCausalLM", 3: "LlamaForCausalLMEagle3"}
_SECTION = "draft_eagle"  # in config.json
_LAYER_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "rms_norm_eps", "rope_parameters"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("vocab_size", "bos_token_id", "eos_token_id"),
)


class EagleInTraining(NamedTuple):
    """What training needs of an EAGLE drafter."""

    objective: EagleObjective
    drafter: Eagle


def feature_layers(config: EagleDrafter, num_layers: int) -> tuple[int, ...]:
    """The hidden states (as transformers counts them) that features are made of.

    Version 1: the last, after the final norm. Version 3: those that published drafters read, the inputs of the third, the
    middle and the third last layer; where a target has too few layers for that, the first, a middle and the last output.

    Raises:
        BadInput: a given layer does not exist.
    """
    if config.layers is not None:
        return tuple(absolute_layer(layer, num_layers) for layer in config.layers)
    if config.version == 1:
        return (num_layers,)
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return (min(1, num_layers), (num_layers + 1) // 2, num_layers)


def make_eagle(config: EagleDrafter, target: Target, kept_ids: Int[Tensor, "kept"] | None) -> EagleModel:
    """A new drafter in float32, on the target's device. `kept_ids`: of a cut vocabulary; None: all ids are scored."""
    outputs = HeadOutputs(target, 1, "shared" if config.version == 1 else "own", kept_ids=kept_ids)
    layer = eagle_config(target.model.config, config.intermediate_size, config.num_key_value_heads)
    with torch.device(target.device):
        model = EagleModel(layer, config.version, outputs, len(feature_layers(config, target.num_layers)))
    outputs.requires_grad_(config.train_output)
    return model.to(target.device)


def eagle_in_training(
    config: EagleDrafter,
    objective: ObjectiveSection,
    target: Target,
    kept_ids: Int[Tensor, "kept"] | None,
    served: Sampling,
) -> EagleInTraining:
    """A new drafter with its objective and the drafter that decodes with it as it is trained."""
    model, layers = make_eagle(config, target, kept_ids), feature_layers(config, target.num_layers)
    trained = EagleObjective(
        model,
        Teacher(target, kept_ids),
        TargetFeatures(target, tuple(dict.fromkeys((*layers, target.num_layers)))),
        layers,
        parse_mixture(objective.loss, objective.temperature),
        served,
        Weights(config.num_unrolled, config.step_decay, config.weight_of_features, config.noise, config.first_alone),
        objective.chunk_tokens,
    )
    return EagleInTraining(trained, Eagle(model, target, layers))


def save_eagle(config: EagleDrafter, model: EagleModel, target: Target, folder: str | Path) -> None:
    """Write the drafter under the names and in the shapes of published checkpoints of its version."""
    layer, scored = model.config, model.outputs.num_scored
    known: dict[str, Any] = {"model_type": "llama", "architectures": [_ARCHITECTURES[model.version]]}
    known |= {key: getattr(layer, key) for key in _LAYER_KEYS}
    known |= {"draft_vocab_size": scored, "tie_word_embeddings": False, "attention_bias": False}
    known[_SECTION] = config.model_dump(mode="json")
    if model.version == 3:
        known[_SECTION]["layers"] = list(feature_layers(config, target.num_layers))
    state = model.saved_state()
    tensors = {name: t.to(target.dtype) if t.is_floating_point() else t for name, t in state.items()}
    save_head(folder, KIND, tensors, known, target)


def load_eagle(folder: str | Path, target: Target) -> Eagle:
    """The drafter that :func:`save_eagle` wrote.

    Raises:
        BadInput: it belongs to another target, or the folder's contents do not fit together.
    """
    folder = Path(folder).expanduser()
    known, tensors = load_head(folder, target)
    if _SECTION not in known:
        raise BadInput(f"{folder / 'config.json'}: the key {_SECTION!r} is missing")
    with one_line_errors(str(folder)):
        config = EagleDrafter.model_validate(known[_SECTION])
    kept_ids = None
    if "d2t" in tensors:
        kept_ids = kept_ids_of(tensors["d2t"], target.vocab_size)
    with torch.random.fork_rng(devices=[]):
        model = make_eagle(config, target, kept_ids)
    model.load_saved(tensors, str(folder))
    model.to(target.dtype).requires_grad_(False)
    return Eagle(model.eval(), target, feature_layers(config, target.num_layers))
