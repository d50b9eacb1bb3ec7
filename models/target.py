"""The target: the model whose output distribution is preserved, frozen."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import BadInput
from .head import check_split
from .loading import load_causal_lm, load_tokenizer


@dataclass(frozen=True, eq=False)
class Target:
    """A frozen causal LM with what decoding needs to know about it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    eos_token_ids: tuple[int, ...]  # generation ends with any of these; empty: never

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the output head. May exceed the tokenizer's ids (padding)."""
        rows = getattr(self.model.get_output_embeddings(), "out_features", None)
        return rows or self.model.config.get_text_config().vocab_size

    @property
    def hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    @property
    def num_layers(self) -> int:
        return self.model.config.get_text_config().num_hidden_layers

    @property
    def context_limit(self) -> int | None:
        """Positions the model was made for, or None where its positions have no end.

        Rotary frequencies of the kind ``longrope`` change for a whole pass once a position in it lies beyond the original
        length. A draft would cross that line in another step than plain decoding does, so decoding ends there.
        """
        config = self.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        rope = getattr(config, "rope_parameters", None) or {}
        if limit is None or rope.get("rope_type") != "longrope":
            return limit
        original = rope.get("original_max_position_embeddings")
        return min(limit, original or getattr(config, "original_max_position_embeddings", None) or limit)


def load_target(
    name: str,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """Load a target by hub id, folder, ``.gguf`` file or the demo target's name (``smollm2-135m-instruct``).

    Its logits are checked once against its backbone and head taken apart, on a short input.

    Raises:
        BadInput: not found, hub not reachable, not a decoder-only causal LM, incomplete weights.
    """
    name = str(name)
    model = load_causal_lm(name, dtype, device, trust_remote_code)
    _check_verifies(model, name)
    check_split(model)
    return _freeze(model, load_tokenizer(name, trust_remote_code), name)


def as_target(model_or_target: Any) -> Target:
    """A target as it is, or a plain transformers causal LM made one: put in eval mode and frozen, without a tokenizer.

    Raises:
        BadInput: it is neither.
    """
    if isinstance(model_or_target, Target):
        return model_or_target
    if not isinstance(model_or_target, PreTrainedModel):
        raise BadInput(f"expected a target or a transformers causal LM, got {type(model_or_target).__name__}")
    if model_or_target.config.is_encoder_decoder or model_or_target.get_output_embeddings() is None:
        raise BadInput(f"{type(model_or_target).__name__}: only decoder-only causal LMs can be targets")
    name = model_or_target.name_or_path or type(model_or_target).__name__
    _check_verifies(model_or_target, name)
    return _freeze(model_or_target, None, name)


def _check_verifies(model: Any, name: str) -> None:
    """Raise BadInput for a model that cannot verify a draft: its state cannot go back, or it tells positions by columns of
    the cache, which differ between the rows of a batch and between the branches of a tree.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(model, "_is_stateful", False):
        raise BadInput(f"{name}: keeps a recurrent state ({config.model_type}), which cannot be rolled back")
    if getattr(config, "alibi", False) or config.model_type in _BY_COLUMN:
        raise BadInput(
            f"{name}: tells positions by columns of the cache ({config.model_type}), so it cannot verify drafts"
        )


_BY_COLUMN = (
    *("bloom", "mpt"),  # ALiBi
    "gpt_neo",  # windows
    # Decoders of encoder-decoder families: learned positions, which they take from the cache's length.
    *("bart", "mbart", "pegasus", "bigbird_pegasus", "blenderbot", "blenderbot-small", "plbart", "marian", "trocr"),
    "openai-gpt",  # no cache at all
)


def in_dtype(target: Target, dtype: torch.dtype) -> Target:
    """A copy of `target` as if it had been loaded in `dtype`; the target itself stays as it is and shares nothing with it.

    Tied weights stay tied. What a model family keeps in float32 whatever the dtype stays so, and so do buffers, such as the
    frequencies of rotary positions.

    Raises:
        ValueError: a module runs another forward than its class's (packed weights): the copy would run the target's.
    """
    if any("forward" in module.__dict__ for module in target.model.modules()):
        raise ValueError("the model's products are packed: unpack it before it is copied")
    kept = _kept_in_float32(target.model, dtype)
    # To the deep copy these are parameters that it has copied already: none is copied in the old dtype first.
    cast: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=False)
        for name, parameter in target.model.named_parameters()
        if parameter.is_floating_point() and not any(part in name for part in kept)
    }
    return replace(target, model=copy.deepcopy(target.model, cast))


def without_contents(target: Target) -> Target:
    """`target` on the meta device: its modules with the shapes of their tensors, of which none is copied."""
    empty: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in target.model.buffers()}
    for parameter in target.model.parameters():
        empty[id(parameter)] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    return replace(target, model=copy.deepcopy(target.model, empty))


def _kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Parts of the names of parameters that transformers loads in float32 although the model is loaded in `dtype`."""
    kept: set[str] = set()
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return kept


def _freeze(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> Target:
    model.eval().requires_grad_(False)  # a trainable target could be changed through tensors that a drafter shares
    return Target(model, tokenizer, name, eos_token_ids(model, tokenizer))


def eos_token_ids(model: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """The ids that end a generation: the generation config's, else the model config's, else the tokenizer's."""
    sources = (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer)
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(int(i) for i in ids)
    return ()
