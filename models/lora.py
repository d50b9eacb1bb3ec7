"""Low-rank adapters on a draft model (peft): added in place, saved in peft's own format, loaded merged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import BadInput

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."  # how peft names the wrapped model's parameters in its files


def add_lora(
    model: PreTrainedModel, rank: int, alpha: float, dropout: float = 0.0, target_modules: Any = "all-linear"
) -> None:
    """Freeze `model` and put a trainable adapter on its linear layers, in place. The output layer gets none.

    Args:
        target_modules: ``"all-linear"`` or the names of layers, such as ``["q_proj", "v_proj"]``.

    Raises:
        BadInput: no layer has one of these names.
    """
    model.requires_grad_(False)
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=target_modules)  # pyright: ignore[reportArgumentType]
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise BadInput(f"lora.target_modules: {target_modules} names no linear layer of this model") from error


def has_lora(model: nn.Module) -> bool:
    """Whether adapters have been added (and not merged)."""
    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def merge(model: PreTrainedModel) -> None:
    """Add the adapters' products to the weights they sit on and remove them, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config


def without_lora(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The base model's state in a state dict of a model with adapters, under the base model's own names."""
    return {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if ".lora_" not in name}


def save_adapter(
    model: PreTrainedModel, folder: Path, base_name: str | None, state: dict[str, Float[Tensor, "..."]] | None = None
) -> None:
    """Write the adapter as peft does (``adapter_config.json`` and ``adapter_model.safetensors``).

    `base_name` is the hub id or folder of the weights it sits on; `state` the model's gathered state dict where its
    parameters are sharded.
    """
    config: Any = model.peft_config["default"]
    config.base_model_name_or_path = base_name
    config.save_pretrained(str(folder))
    adapter = get_peft_model_state_dict(model, state_dict=state)
    tensors = {_PEFT_PREFIX + name: tensor.detach().contiguous().cpu() for name, tensor in adapter.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Merge the adapter saved in `folder` into `model`, in place.

    Raises:
        BadInput: its weights are not in a safetensors file (nothing is unpickled), or do not fit the model.
    """
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise BadInput(f"{folder}: no {ADAPTER_WEIGHTS}; adapters are read from safetensors only")
    try:
        wrapped = PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder}: this adapter does not fit its base model") from error
    wrapped.merge_and_unload()  # pyright: ignore[reportCallIssue]
    if hasattr(model, "peft_config"):
        del model.peft_config
