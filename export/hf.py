"""A draft model with a full vocabulary as a plain transformers folder, for ``generate(assistant_model=...)``."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import BadInput
from ..eval.report import read_report
from ..models.draft_lm import check_manifest
from ..models.folder import MANIFEST, check_files, read_manifest, written_whole
from ..models.loading import load_causal_lm, load_tokenizer
from ..models.lora import ADAPTER_CONFIG, load_adapter
from ..models.quiet import one_line_errors, quiet
from ..recipe_io import print_warning
from .card import Facts, find_report, is_about, model_card, run_recipe, served_length


def export_hf(checkpoint: Path, out: Path, report: Path | None = None) -> Path:
    """Write `checkpoint` as a transformers folder; an adapter is merged.

    Raises:
        BadInput: not a draft model, a cut vocabulary, damaged files, or a folder that gives other logits when read back
            (then nothing is left at `out`).
    """
    manifest = _draft_model(checkpoint)
    measured = find_report(checkpoint) if report is None else read_report(report)
    other = None if measured is None or is_about(measured, checkpoint) else measured["drafter"]
    if other is not None:
        print_warning(f"{report} is about {other}, not {checkpoint}: the model card says so")
    check_files(checkpoint, manifest["sha256"])
    model = _load(checkpoint, manifest)
    if (length := served_length(measured)) is not None:
        # Serve as measured: this many draft tokens a step, none held back for the drafter's doubts.
        config: Any = model.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = length, "constant"
        config.assistant_confidence_threshold = 0.0
    facts = Facts(
        target=manifest["target"],
        architecture=type(model).__name__,
        num_parameters=model.num_parameters(),
        num_layers=model.config.get_text_config().num_hidden_layers,
        dtype=str(model.dtype).removeprefix("torch."),
    )
    with written_whole(out) as partial:
        with quiet(), one_line_errors(str(checkpoint)):
            model.save_pretrained(partial)
            if manifest["tokenizer_hash"] is not None:
                load_tokenizer(str(checkpoint)).save_pretrained(partial)
        card = model_card(facts, measured, run_recipe(checkpoint), other)
        (partial / "README.md").write_text(card, encoding="utf-8")
        _check_logits(model, partial, checkpoint)
    return out


def _draft_model(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint that a plain transformers folder can hold."""
    manifest = read_manifest(checkpoint)
    if manifest is None:
        hint = f" (did you mean {checkpoint / 'final'}?)" if (checkpoint / "final" / MANIFEST).is_file() else ""
        raise BadInput(f"{checkpoint}: holds no {MANIFEST}, expected a drafter's folder, such as a run's final/{hint}")
    if manifest["kind"] != "model":
        raise BadInput(
            f"{checkpoint}: a drafter of kind {manifest['kind']!r} reads its target's hidden states; the format hf "
            "holds models that stand alone"
        )
    check_manifest(checkpoint, manifest)
    if manifest["kept"] is not None:
        raise BadInput(
            f"{checkpoint}: scores {manifest['kept']:,} of {manifest['vocab_size']:,} ids, and a plain transformers "
            "model scores them all: train without drafter.vocabulary to export to hf"
        )
    return manifest


def _load(checkpoint: Path, manifest: dict[str, Any]) -> PreTrainedModel:
    """The model in its own dtype on the CPU, an adapter merged."""
    if not (checkpoint / ADAPTER_CONFIG).is_file():
        return load_causal_lm(str(checkpoint), "auto", "cpu")
    model = load_causal_lm(manifest["base"] or str(checkpoint / "base"), "auto", "cpu")
    load_adapter(model, checkpoint)
    return model


def _check_logits(model: PreTrainedModel, folder: Path, checkpoint: Path) -> None:
    """Read `folder` back and compare its logits with `model`'s on random ids. Raises BadInput when they differ.

    Equal weights may still round differently: products depend on how the weights are aligned in memory.
    """
    expected, found = _logits(model), _logits(load_causal_lm(str(folder), "auto", "cpu"))
    worst = (expected - found).abs().max().item()
    if not worst <= (1e-4 if model.dtype is torch.float32 else 2e-2) * max(1.0, expected.abs().max().item()):
        raise BadInput(f"{checkpoint}: read back, the export gives other logits (by {worst:.2g}); nothing was written")


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Float[Tensor, "rows length vocab"]:
    config = model.config.get_text_config()
    length = min(16, getattr(config, "max_position_embeddings", None) or 16)
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, use_cache=False).logits.float()
