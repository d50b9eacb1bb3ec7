"""Making draft heads from a recipe's section, training them and bringing them back from their folder."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from pydantic import TypeAdapter
from torch import Tensor

from ..decode.sampling import Sampling
from ..distill.mixture import parse_mixture
from ..models.quiet import one_line_errors
from ..models.target import Target
from ..models.vocabulary import d2t, kept_ids_of, t2d
from ..recipe import BlockwiseDrafter, HydraDrafter, Medusa2Drafter, MedusaDrafter, ObjectiveSection
from .adapted import LAYERS, change_target, with_adapter, with_trained_layers
from .blockwise import BlockwiseTrunk
from .checkpoint import load_head, save_head
from .drafting import HeadsDrafter
from .eagle_model import eagle_config
from .hydra import HydraTrunk
from .medusa import MedusaTrunk, medusa_config
from .objective import HeadsObjective
from .outputs import HeadOutputs
from .prefix import PrefixAttention
from .trunk import DraftHeads

HeadsConfig = MedusaDrafter | Medusa2Drafter | BlockwiseDrafter | HydraDrafter
KINDS = ("medusa", "medusa2", "blockwise", "hydra")
_SECTION: TypeAdapter[HeadsConfig] = TypeAdapter(HeadsConfig)


class HeadsInTraining(NamedTuple):
    """What training needs of heads."""

    objective: HeadsObjective
    drafter: HeadsDrafter


def make_heads(config: HeadsConfig, target: Target, kept_ids: Int[Tensor, "kept"] | None) -> DraftHeads:
    """New heads in float32, on the target's device. `kept_ids`: of a cut vocabulary; None: all ids are scored."""
    hidden, number = target.hidden_size, config.num_heads
    prefix = None
    match config:
        case MedusaDrafter() | Medusa2Drafter():
            trunk = MedusaTrunk(hidden, number, config.num_layers)
        case BlockwiseDrafter():
            trunk = BlockwiseTrunk(hidden, number, config.inner_size or hidden)
        case HydraDrafter():
            trunk = HydraTrunk(target, number, config.num_layers)
            if config.prefix_attention:
                prefix = PrefixAttention(eagle_config(target.model.config))
    outputs = HeadOutputs(target, number, config.output, config.rank, kept_ids)
    return DraftHeads(trunk, outputs, number, prefix).to(target.device)


def heads_in_training(
    config: HeadsConfig,
    objective: ObjectiveSection,
    target: Target,
    kept_ids: Int[Tensor, "kept"] | None,
    served: Sampling,
) -> HeadsInTraining:
    """New heads with their objective and the drafter that decodes with them as they are trained.

    Kinds that train the target too change it in place.
    """
    heads = make_heads(config, target, kept_ids)
    adapted, weight = None, 0.0
    match config:
        case Medusa2Drafter():
            adapted = with_adapter(target, config.lora, config.lora_learning_rate, config.heads_first)
            weight = config.target_weight
        case BlockwiseDrafter() if config.train_layers:
            adapted = with_trained_layers(target, config.train_layers, config.share_for_target)
            weight = config.weight_for_target
        case _:
            pass
    trained = HeadsObjective(
        heads,
        target,
        parse_mixture(objective.loss, objective.temperature),
        config.head_decay,
        served,
        objective.chunk_tokens,
        adapted,
        weight,
    )
    return HeadsInTraining(trained, HeadsDrafter(heads, adapted=adapted))


def save_heads(config: HeadsConfig, made: HeadsInTraining, target: Target, folder: str | Path) -> None:
    """Write the heads, what of the target was changed, and the accuracies that a tree can be built from."""
    outputs, adapted = made.objective.heads.outputs, made.objective.adapted
    tensors = _in_type(made.objective.heads.saved_state(), target.dtype)
    if outputs.kept_ids is not None:
        tensors |= {"d2t": d2t(outputs.kept_ids), "t2d": t2d(outputs.kept_ids, target.vocab_size)}
    known: dict[str, Any] = {"model_type": config.kind, "hidden_size": target.hidden_size}
    if isinstance(config, MedusaDrafter | Medusa2Drafter):
        known = medusa_config(
            target.hidden_size, target.vocab_size, config.num_heads, config.num_layers, outputs.num_scored
        )
    known |= {"draft_heads": config.model_dump(mode="json"), "accuracies": made.objective.accuracies}
    if adapted is not None:
        known["target_changed"] = adapted.change.happened()
        tensors |= _in_type(adapted.change.tensors(), target.dtype)
    save_head(folder, config.kind, tensors, known, target, None if adapted is None else adapted.change.save)


def load_heads(folder: str | Path, target: Target) -> HeadsDrafter:
    """The drafter that :func:`save_heads` wrote. Where training changed the target, `target` is changed in place.

    Raises:
        BadInput: it belongs to another target, or the folder's contents do not fit together.
    """
    folder = Path(folder).expanduser()
    known, tensors = load_head(folder, target)
    with one_line_errors(str(folder)):
        config = _SECTION.validate_python(known["draft_heads"])
        accuracies = known["accuracies"]
    kept_ids = None
    if "d2t" in tensors:
        kept_ids = kept_ids_of(tensors.pop("d2t"), target.vocab_size)
        del tensors["t2d"]
    layers = {name: tensors.pop(name) for name in list(tensors) if name.startswith(LAYERS)}
    with torch.random.fork_rng(devices=[]):
        heads = make_heads(config, target, kept_ids)
    heads.load_saved(tensors, str(folder))
    if known.get("target_changed"):
        change_target(target, folder.resolve(), layers)
    heads.to(target.dtype).requires_grad_(False)
    return HeadsDrafter(heads.eval(), accuracies)


def _in_type(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
