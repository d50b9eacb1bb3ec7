"""A state dict as one safetensors file, tied weights stored once."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def write_weights(state: Mapping[str, Tensor], path: Path) -> None:
    """Writes `state`; names that share one tensor are stored once and listed in the file's metadata."""
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple, str] = {}
    for name, tensor in state.items():
        storage = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)
        if (owner := first.setdefault(storage, name)) != name:
            aliases[name] = owner
        else:
            kept[name] = tensor.detach().contiguous()
    save_file(kept, path, metadata={"aliases": json.dumps(aliases)})


def read_weights(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The state dict that :func:`write_weights` wrote, under all its names."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return state | {name: state[owner] for name, owner in aliases.items()}
