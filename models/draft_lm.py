"""A draft model: a standalone causal LM that proposes, with the target's full vocabulary or a cut one."""

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..errors import BadInput
from .folder import check_files, hash_files, read_manifest, write_manifest, written_whole
from .head import OutputHead, check_split, parameters_read, split
from .loading import load_causal_lm, load_exactly
from .lora import ADAPTER_CONFIG, has_lora, load_adapter, save_adapter, without_lora
from .quiet import one_line_errors, quiet
from .target import Target, as_target
from .vocabulary import (
    check_kept_ids,
    check_model_tokenizer,
    check_saved_tokenizer,
    d2t,
    kept_ids_of,
    t2d,
    tokenizer_hash,
)

KIND = "model"
CUT_WEIGHTS = "cut_vocabulary.safetensors"  # not a name that from_pretrained looks for
CUT_MODEL_TYPE = "draftsmith_cut_vocabulary"  # nor a model type that it knows


class DraftOutput(NamedTuple):
    """What one forward pass of a draft model gives."""

    logits: Float[Tensor, "batch scored kept"]  # of the kept ids, in their order; of all ids for a full vocabulary
    last_hidden_state: Float[Tensor, "batch length hidden"]  # what the head reads
    cache: Any


class DraftLM(nn.Module):
    """A causal LM for drafting.

    With a cut vocabulary every id is embedded and only ``kept_ids`` are scored: the output layer has as many rows,
    untied from the embeddings, and the draft probabilities of all other ids are zero.

    Args:
        model: the transformers causal LM; its output layer has ``len(kept_ids)`` rows where `kept_ids` is given.
        kept_ids: the ids that are scored, increasing; None for all.
        base_name: hub id or folder that the weights came from, unchanged so far; what an adapter refers to.
    """

    kept_ids: Int[Tensor, "kept"] | None

    def __init__(
        self, model: PreTrainedModel, kept_ids: Int[Tensor, "kept"] | None = None, base_name: str | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.base_name = base_name
        self.register_buffer("kept_ids", None if kept_ids is None else kept_ids.to(model.device))

    @property
    def backbone(self) -> nn.Module:
        """The layers up to what the head reads; shared with the model."""
        return split(self.model)[0]

    @property
    def head(self) -> OutputHead:
        """The output head over the kept ids; shared with the model."""
        return split(self.model)[1]

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """Ids that are embedded (kept or not); may exceed the tokenizer's by padding."""
        return self.config.get_text_config().vocab_size

    @property
    def num_scored(self) -> int:
        """Ids that are scored: the last dimension of the logits."""
        return self.vocab_size if self.kept_ids is None else len(self.kept_ids)

    @property
    def num_parameters_read(self) -> int:
        """Parameters read in one pass."""
        return parameters_read(self.model)

    @property
    def d2t(self) -> Int[Tensor, "kept"] | None:
        """Offsets: ``target id = draft id + d2t[draft id]``; None for a full vocabulary."""
        return None if self.kept_ids is None else d2t(self.kept_ids)

    @property
    def t2d(self) -> Bool[Tensor, "vocab"] | None:
        """Which ids are scored; None for a full vocabulary."""
        return None if self.kept_ids is None else t2d(self.kept_ids, self.vocab_size)

    def forward(
        self,
        input_ids: Int[Tensor, "batch length"] | None = None,
        attention_mask: Any = None,
        position_ids: Int[Tensor, "#batch length"] | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **backbone_options: Any,
    ) -> DraftOutput:
        """Logits of the last `logits_to_keep` positions (0: of all), over the kept ids.

        `attention_mask` and `cache` are whatever the transformers model takes; `use_cache` None means: if one is given.
        """
        backbone, head = split(self.model)
        output = backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=cache is not None if use_cache is None else use_cache,
            **backbone_options,
        )
        hidden = output.last_hidden_state
        return DraftOutput(head(hidden[:, -logits_to_keep:]), hidden, getattr(output, "cache", None))

    def expand(
        self, values: Float[Tensor, "*batch kept"], vocab_size: int | None = None, fill: float = float("-inf")
    ) -> Float[Tensor, "*batch vocab"]:
        """Values of the scored ids (logits, say) laid out over the first `vocab_size` ids, `fill` elsewhere.

        `vocab_size` None means the draft model's own; the target's may be smaller or larger by padding.
        """
        size = vocab_size or self.vocab_size
        if self.kept_ids is None and values.shape[-1] == size:
            return values
        ids = torch.arange(values.shape[-1], device=values.device) if self.kept_ids is None else self.kept_ids
        inside = int((ids < size).sum())  # ids increase, so those that fit come first
        full = values.new_full((*values.shape[:-1], size), fill)
        full[..., ids[:inside]] = values[..., :inside]
        return full


def cut_vocabulary(model: PreTrainedModel, kept_ids: Int[Tensor, "kept"]) -> DraftLM:
    """A copy of `model` that embeds every id and scores `kept_ids` only, with an output layer of its own (untied).

    Raises:
        BadInput: the ids are not increasing ids of the vocabulary, or the model runs code of its own, which a saved
            draft model could not bring along.
    """
    if type(model.config).model_type not in CONFIG_MAPPING:
        raise BadInput(f"vocabulary: cannot be cut for {type(model).__name__}, which runs code of its own")
    kept_ids = kept_ids.to(model.device, torch.int64)
    check_kept_ids(kept_ids, model.config.get_text_config().vocab_size)
    own = copy.deepcopy(model)
    replace_head(own, split(own)[1].rows(kept_ids).linear)
    return DraftLM(own, kept_ids)


def replace_head(model: PreTrainedModel, linear: nn.Module) -> None:
    """Put `linear` in the place of the model's output layer, untied from the embeddings from now on."""
    model.set_output_embeddings(linear)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}  # so that nothing ties it back to the embeddings, whose rows it lacks


def save_draft_lm(
    draft_lm: DraftLM,
    folder: str | Path,
    *,
    target_name: str,
    tokenizer: Any,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Save a draft model as `folder`, whole or not at all; an earlier folder of that name is replaced.

    A full vocabulary makes a plain transformers folder with ``draftsmith.json`` beside it. A cut one makes a folder
    that only :func:`load_draft_lm` reads: ``from_pretrained`` stops at its ``config.json``. With an adapter, the
    adapter is saved (peft's format) and its base by name, or in ``base/`` where the base has no name.

    Args:
        target_name: the target it was trained for.
        tokenizer: saved too, and what a later target's tokenizer is compared with; None: neither.
        state_dict: of `draft_lm`, gathered, where its parameters are sharded.
    """
    model = draft_lm.model
    state = draft_lm.state_dict() if state_dict is None else state_dict
    state = {name.removeprefix("model."): tensor for name, tensor in state.items() if name != "kept_ids"}
    adapter = has_lora(model)
    others_train = any(p.requires_grad and ".lora_" not in name for name, p in model.named_parameters())
    base_name = draft_lm.base_name if draft_lm.kept_ids is None and not others_train else None
    with written_whole(folder) as partial, quiet():
        if adapter:
            save_adapter(model, partial, base_name, state)
        if not adapter or base_name is None:
            _write_weights(draft_lm, without_lora(state), partial / "base" if adapter else partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        write_manifest(
            partial,
            KIND,
            target=target_name,
            tokenizer_hash=None if tokenizer is None else tokenizer_hash(tokenizer),
            hidden_size=draft_lm.config.get_text_config().hidden_size,
            vocab_size=draft_lm.vocab_size,
            kept=None if draft_lm.kept_ids is None else len(draft_lm.kept_ids),
            adapter=adapter,
            base=base_name if adapter else None,
            sha256=hash_files(partial),
        )


def _write_weights(draft_lm: DraftLM, state: dict[str, Tensor], folder: Path) -> None:
    model = draft_lm.model
    folder.mkdir(exist_ok=True)
    if draft_lm.d2t is None or draft_lm.t2d is None:
        plain = copy.copy(model)  # the adapter's config, if any, must not make this an adapter's folder
        plain.__dict__.pop("peft_config", None)
        plain.save_pretrained(folder, state_dict=state)
        return
    config = {"model_type": CUT_MODEL_TYPE, "architectures": None, "base_config": model.config.to_dict()}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {**state, "d2t": draft_lm.d2t, "t2d": draft_lm.t2d}
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, folder / CUT_WEIGHTS)


def load_draft_lm(
    name: str | Path, target: Any, dtype: Any = None, device: Any = None, trust_remote_code: bool = False
) -> DraftLM:
    """Load a draft model: a folder of :func:`save_draft_lm`, a peft adapter's folder, or any causal LM (hub id, folder,
    ``.gguf``) with the target's tokenizer. In eval mode; an adapter is merged.

    Args:
        target: a target, or a transformers causal LM (no tokenizer is compared then).
        dtype, device: None: the target's.

    Raises:
        BadInput: another kind of drafter, another tokenizer, files that are missing, damaged or do not fit together.
    """
    target = as_target(target)
    dtype, device = dtype or target.dtype, device or target.device
    folder = Path(name).expanduser()
    manifest = read_manifest(folder) if folder.is_dir() else None
    if manifest is not None:
        check_manifest(folder, manifest)
        check_saved_tokenizer(folder, manifest["tokenizer_hash"], target.tokenizer)
        check_files(folder, manifest["sha256"])
    if (folder / ADAPTER_CONFIG).is_file():
        draft_lm = _load_base(folder, manifest, target, dtype, device, trust_remote_code)
        with quiet(), one_line_errors(str(name)):
            load_adapter(draft_lm.model, folder)
    elif manifest is not None:
        draft_lm = _read_weights(folder, manifest["kept"], dtype, device)
    else:
        model = load_causal_lm(str(name), dtype, device, trust_remote_code)
        _check_vocabulary(str(name), model, target, trust_remote_code)
        check_split(model)
        draft_lm = DraftLM(model, base_name=str(folder.resolve() if folder.exists() else name))
    if getattr(draft_lm.model, "_is_stateful", False):
        raise BadInput(f"{name}: keeps a recurrent state, which cannot be rolled back")
    return draft_lm.eval()


def _load_base(
    folder: Path, manifest: dict[str, Any] | None, target: Target, dtype: Any, device: Any, trust_remote_code: bool
) -> DraftLM:
    if manifest is not None and manifest["base"] is None:
        return _read_weights(folder / "base", manifest["kept"], dtype, device)
    with one_line_errors(str(folder / ADAPTER_CONFIG)):
        base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not isinstance(base, str):
        raise BadInput(f"{folder / ADAPTER_CONFIG}: does not name the base model that the adapter sits on")
    model = load_causal_lm(base, dtype, device, trust_remote_code)
    _check_vocabulary(base, model, target, trust_remote_code)
    return DraftLM(model)


def _read_weights(folder: Path, kept: int | None, dtype: Any, device: Any) -> DraftLM:
    if kept is None:
        return DraftLM(load_causal_lm(str(folder), dtype, device))
    with quiet(), one_line_errors(str(folder)), torch.random.fork_rng(devices=[]):
        config = dict(json.loads((folder / "config.json").read_text(encoding="utf-8"))["base_config"])
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
        state = load_file(folder / CUT_WEIGHTS)
        offsets, scored = state.pop("d2t"), state.pop("t2d")
    kept_ids = kept_ids_of(offsets, model.config.get_text_config().vocab_size)
    if len(kept_ids) != kept or not torch.equal(t2d(kept_ids, len(scored)), scored):
        raise BadInput(f"{folder}: d2t, t2d and the manifest's {kept} kept ids contradict each other")
    replace_head(model, split(model)[1].rows(kept_ids).linear)
    load_exactly(model, state, str(folder))
    return DraftLM(model.to(device), kept_ids)


def check_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise BadInput unless `manifest` has what that of a draft model has."""
    if manifest["kind"] != KIND:
        raise BadInput(f"{folder}: holds a drafter of kind {manifest['kind']!r}, expected {KIND!r} (a draft model)")
    if missing := {"target", "tokenizer_hash", "vocab_size", "kept", "base", "sha256"} - manifest.keys():
        raise BadInput(f"{folder}/draftsmith.json: the key {min(missing)!r} is missing")
    if not isinstance(manifest["kept"], int | None) or not isinstance(manifest["sha256"], dict):
        raise BadInput(f"{folder}/draftsmith.json: kept must be a number or null, sha256 an object")


def _check_vocabulary(name: str, model: PreTrainedModel, target: Target, trust_remote_code: bool) -> None:
    same_size = model.config.get_text_config().vocab_size == target.vocab_size
    check_model_tokenizer(name, target.tokenizer, trust_remote_code, optional=same_size)
