"""From a name to a transformers causal LM and its tokenizer: hub id, local folder, GGUF file or the demo target."""

import os
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import constants as hub_constants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import BadInput, nearest
from .demo import DEMO_NAME, demo_folder
from .folder import read_manifest
from .gguf import converted_folder
from .quiet import one_line_errors, quiet

DTYPES = ("auto", "float32", "bfloat16", "float16")


def locate(name: str) -> str:
    """Where the files of `name` are: a local folder, or the hub id itself.

    The demo target is fetched and a GGUF file converted on first use, both into the user's cache folder.

    Raises:
        BadInput: nothing of that name is here and it cannot be a hub id.
    """
    if name == DEMO_NAME:
        return str(demo_folder())
    if not name:
        raise BadInput("an empty model name; expected a folder, a .gguf file or a hub id")
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise BadInput(f"{name}: no such GGUF file")
        return str(converted_folder(path))
    if path.is_dir():
        return str(path)
    if path.is_file():
        raise BadInput(f"{name}: a file; expected a model folder, a .gguf file or a hub id")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise BadInput(f"{name}: no such folder")
    if "/" not in name and (hint := nearest(name, [DEMO_NAME])):
        raise BadInput(f"{name}: no such model or folder{hint}")
    return name if hub_reachable() else _cached_snapshot(name)


def hub_reachable() -> bool:
    """Whether the model hub answers. The hub's own client would retry for half a minute before it says so."""
    if hub_constants.HF_HUB_OFFLINE:
        return False
    endpoint = urllib.parse.urlparse(hub_constants.ENDPOINT)
    if urllib.request.getproxies().get(endpoint.scheme):
        return True  # the proxy resolves the name, so nothing can be said from here
    try:
        port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
        socket.create_connection((endpoint.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True


def _cached_snapshot(name: str) -> str:
    try:
        return huggingface_hub.snapshot_download(name, local_files_only=True)
    except (OSError, ValueError):
        raise BadInput(
            f"{name}: no such folder here, not in the hub's cache, and the model hub cannot be reached"
        ) from None


def load_causal_lm(
    name: str,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal LM in eval mode. Weights are read from safetensors only; none may be missing.

    `device` None means the current CUDA device where there is one, else the CPU; ``"auto"`` spreads the layers over all
    devices. For the meta device, where tensors have shapes and no contents, no weights are read.

    Raises:
        BadInput: not found, hub not reachable, not a causal LM, wrong or incomplete weights.
    """
    dtype, device = check_dtype(dtype), check_device(device)
    where = locate(str(name))
    placed = device == "auto" or torch.device(device).type != "cpu"
    with quiet(), one_line_errors(str(name)):
        refuse_unsupported(str(name), read_config(where, str(name)), trust_remote_code)
        if device == torch.device("meta"):
            return _without_weights(where, dtype, trust_remote_code)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where,
            dtype=dtype,
            device_map=device if placed else None,  # straight to where it goes, without a copy on the CPU
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise BadInput(f"{name}: {len(missing)} weights are missing, the first is {missing[0]}")
    return model.eval()


def _without_weights(where: str, dtype: str | torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    return model.eval()


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a model's name.

    Raises:
        BadInput: there is none, or it cannot be read.
    """
    where = locate(str(name))
    local = Path(where)
    if local.is_dir() and not any(local.glob("*token*")) and not any(local.glob("vocab*")):
        raise BadInput(f"{name}: the folder holds no tokenizer")
    with quiet(), one_line_errors(f"{name}: tokenizer"):
        return AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)


def check_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """The torch dtype of that name; ``"auto"`` (the checkpoint's own) stays as it is."""
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise BadInput(f"dtype: unknown value {dtype!r}, expected one of {', '.join(DTYPES)}{nearest(dtype, DTYPES)}")
    return getattr(torch, dtype)


def check_device(device: str | torch.device | None) -> str | torch.device:
    """``"auto"`` or a torch device that exists here."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "auto":
        return "auto"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise BadInput(f"device: {device!r} is not a torch device such as cpu or cuda:0") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"device: {device} was asked for, but there are {torch.cuda.device_count()} CUDA devices here")
    return found


def read_config(where: str, name: str) -> dict[str, Any]:
    """The raw ``config.json`` of a folder or hub id, without building anything from it."""
    manifest = read_manifest(where) if os.path.isdir(where) else None
    if manifest is not None and (manifest["kind"] != "model" or manifest.get("kept") or manifest.get("adapter")):
        what = "with a cut vocabulary" if manifest.get("kept") else "that is an adapter"
        what = what if manifest["kind"] == "model" else f"of kind {manifest['kind']!r}"
        raise BadInput(f"{name}: a drafter {what}, not a model that stands alone")
    if os.path.isdir(where) and not os.path.isfile(os.path.join(where, "config.json")):
        raise BadInput(f"{name}: no config.json in this folder, so it holds no model")
    config, _ = PreTrainedConfig.get_config_dict(where)
    return config


def refuse_unsupported(name: str, config: dict[str, Any], trust_remote_code: bool) -> None:
    """Raise BadInput, before any weight is read, for what can never be a target or a draft model."""
    kind = config.get("model_type")
    if config.get("is_encoder_decoder"):
        raise BadInput(f"{name}: an encoder-decoder model ({kind}); only decoder-only models can draft or be verified")
    if trust_remote_code and config.get("auto_map"):
        return
    if kind not in CONFIG_MAPPING:
        if config.get("auto_map"):
            raise BadInput(f"{name}: runs code of its own ({kind}); set trust_remote_code if you trust its author")
        raise BadInput(f"{name}: unknown model_type {kind!r} in its config.json{nearest(str(kind), CONFIG_MAPPING)}")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise BadInput(f"{name}: a {kind} model is not a causal LM")


def load_exactly(model: torch.nn.Module, state: dict[str, torch.Tensor], name: str) -> None:
    """Copy `state` into `model`; every parameter must be there with its shape, and nothing else. On the meta device shapes
    are all there is.

    Raises:
        BadInput: one is not; the line starts with `name` and says which.
    """
    own = model.state_dict()
    for key in sorted(own.keys() | state.keys()):
        if key not in state:
            raise BadInput(f"{name}: the weight {key} is missing")
        if key not in own:
            raise BadInput(f"{name}: the weight {key} is not one of {type(model).__name__}")
        if own[key].shape != state[key].shape:
            raise BadInput(f"{name}: {key} has shape {tuple(state[key].shape)}, expected {tuple(own[key].shape)}")
    if not all(tensor.is_meta for tensor in own.values()):
        model.load_state_dict(state)
