"""A drafter's own folder: its tensors, its config, and what target it belongs to. The target itself is not in it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import BadInput
from ..models.folder import MANIFEST, check_files, hash_files, read_manifest, write_manifest, written_whole
from ..models.quiet import one_line_errors, quiet
from ..models.target import Target
from ..models.vocabulary import check_saved_tokenizer, tokenizer_hash
from ..models.weights_sample import same_weights, weights_sample

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save_head(
    folder: str | Path,
    kind: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    target: Target,
    extra: Callable[[Path], None] | None = None,
) -> None:
    """Save a drafter as `folder`, whole or not at all: ``model.safetensors``, ``config.json``, ``draftsmith.json`` and
    the target's tokenizer, against which a later target's is compared.

    `config` is what the kind needs to build its modules again, in JSON; `tensors` must be whole (gathered); `extra` writes
    further files into the folder.
    """
    with written_whole(folder) as partial, quiet():
        own = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
        save_file(own, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
        if extra is not None:
            extra(partial)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(partial)
        write_manifest(
            partial,
            kind,
            target=target.name,
            target_layers=target.num_layers,
            target_weights=weights_sample(target),
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            tokenizer_hash=None if target.tokenizer is None else tokenizer_hash(target.tokenizer),
            sha256=hash_files(partial),
        )


def load_head(folder: str | Path, target: Target) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors (on the CPU, as saved) of a folder that :func:`save_head` wrote for this target.

    Raises:
        BadInput: it was made for another target (other sizes, tokenizer or weights), or files are missing or damaged;
            the line names the target it was made for and says what differs.
    """
    folder = Path(folder).expanduser()
    manifest = read_manifest(folder)
    if manifest is None:
        raise BadInput(f"{folder}: no {MANIFEST}, so this is not a drafter's folder")
    _check_target(folder, manifest, target)
    check_files(folder, manifest["sha256"])
    with one_line_errors(str(folder)):
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    if not isinstance(config, dict):
        raise BadInput(f"{folder / CONFIG}: expected an object")
    return config, tensors


def _check_target(folder: Path, manifest: Mapping[str, Any], target: Target) -> None:
    keys = ("target", "target_layers", "target_weights", "hidden_size", "vocab_size", "tokenizer_hash", "sha256")
    if missing := [key for key in keys if key not in manifest]:
        raise BadInput(f"{folder / MANIFEST}: the key {missing[0]!r} is missing")
    made_for = f"{folder}: this drafter was made for the target {manifest['target']}"
    sizes = {
        "hidden size": (manifest["hidden_size"], target.hidden_size),
        "number of layers": (manifest["target_layers"], target.num_layers),
        "vocabulary size": (manifest["vocab_size"], target.vocab_size),
    }
    for what, (wanted, found) in sizes.items():
        if wanted != found:
            raise BadInput(f"{made_for} with a {what} of {wanted}, {target.name} has {found}")
    check_saved_tokenizer(folder, manifest["tokenizer_hash"], target.tokenizer)
    if not same_weights(manifest["target_weights"], weights_sample(target)):
        raise BadInput(f"{made_for}, and the weights of {target.name} are others")
