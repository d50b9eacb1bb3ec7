"""Splitting a causal LM into its backbone and its output head, whatever the family does after the product."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..errors import BadInput

# Configuration keys, family by family, of what stands between the head's product and the logits.
_SOFTCAP_KEYS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma 2-4, Griffin, xLSTM
_MULTIPLIER_KEYS = ("lm_head_multiplier",)  # Falcon-H1
_DIVISOR_KEYS = ("logits_scaling", "logits_mup_width_multiplier")  # Granite, MiniCPM3; Inkling


class OutputHead(nn.Module):
    """The model's own output layer and what its family does to the product.

    ``logits = softcap · tanh(scale · (hidden @ weight.T + bias) / softcap)``; without a softcap the tanh is left out.

    `linear` is shared with the model, not copied, so it follows whatever replaces the weights in place.
    """

    def __init__(self, linear: nn.Module, scale: float = 1.0, softcap: float | None = None) -> None:
        super().__init__()
        self.linear = linear
        self.scale = scale
        self.softcap = softcap

    @property
    def weight(self) -> Float[Tensor, "vocab hidden"]:
        return self.linear.weight  # pyright: ignore[reportReturnType]

    @property
    def bias(self) -> Float[Tensor, "vocab"] | None:
        return getattr(self.linear, "bias", None)

    @property
    def is_linear(self) -> bool:
        """Whether the logits are the bare product: `transform` changes nothing."""
        return self.scale == 1.0 and self.softcap is None

    def forward(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """Logits of the ids this head scores, in the dtype of the product."""
        return self.transform(self.linear(hidden))

    def transform(self, product: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
        """From ``hidden @ weight.T + bias`` to logits. Elementwise, so it may be applied to any slice of the ids."""
        if self.scale != 1.0:
            product = product * self.scale
        if self.softcap is not None:
            product = torch.tanh(product / self.softcap) * self.softcap
        return product

    def rows(self, ids: Int[Tensor, "kept"]) -> "OutputHead":
        """A head of its own (copied, untied) that scores only `ids`, in that order."""
        weight, bias = self.weight.detach(), self.bias
        ids = ids.to(weight.device)
        linear = nn.Linear(
            weight.shape[1], len(ids), bias=bias is not None, device=weight.device, dtype=weight.dtype
        ).requires_grad_(self.weight.requires_grad)
        with torch.no_grad():
            linear.weight.copy_(weight[ids])
            if bias is not None:
                linear.bias.copy_(bias[ids])
        return OutputHead(linear, self.scale, self.softcap)


def split(model: Any) -> tuple[nn.Module, OutputHead]:
    """The backbone and the output head of a causal LM; both share the model's modules.

    ``backbone(input_ids=…, attention_mask=…, position_ids=…, cache=…).last_hidden_state`` is what the head reads:
    ``head(last_hidden_state)`` equals the model's logits (:func:`check_split` verifies that on a short input).

    Raises:
        BadInput: the model has no separate backbone or no output layer.
    """
    name = type(model).__name__
    backbone = getattr(model, "base_model", model)
    linear = model.get_output_embeddings()
    if backbone is model or linear is None:
        raise BadInput(f"{name}: no backbone with one output layer on top was found, so it cannot be used here")
    config = model.config.get_text_config()
    return backbone, OutputHead(linear, _scale(model, config), _first(config, _SOFTCAP_KEYS))


def _first(config: Any, keys: Sequence[str]) -> float | None:
    values = [getattr(config, key, None) for key in keys]
    return next((float(value) for value in values if value is not None), None)


def _scale(model: Any, config: Any) -> float:
    scale = _first(config, _MULTIPLIER_KEYS) or 1.0
    # Cohere multiplies and keeps the factor on the model; MPT has the same key in its config and never applies it.
    if isinstance(factor := getattr(model, "logit_scale", None), int | float):
        scale *= factor
    if divisor := _first(config, _DIVISOR_KEYS):
        scale = scale * divisor if config.model_type == "hyperclovax" else scale / divisor
    return float(scale)


@torch.no_grad()
def check_split(model: Any) -> None:
    """Verify on one short input that :func:`split` gives the model's logits, and that no position sees later tokens.
    Nothing is computed on the meta device.

    Raises:
        BadInput: one of the two does not hold; the line says which.
    """
    backbone, head = split(model)
    if head.weight.is_meta:
        return
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab_size, (1, 8), generator=torch.Generator().manual_seed(0)).to(head.weight.device)
    expected = model(input_ids=ids, use_cache=False).logits.float()
    found = head(backbone(input_ids=ids, use_cache=False).last_hidden_state).float()
    tolerance = 1e-4 if head.weight.dtype == torch.float32 else 5e-2
    name = type(model).__name__
    if found.shape != expected.shape or _relative_difference(found, expected) > tolerance:
        raise BadInput(f"{name}: its logits are not its output layer applied to its last hidden state; not supported")
    prefix = model(input_ids=ids[:, :5], use_cache=False).logits.float()
    if _relative_difference(prefix, expected[:, :5]) > 0.2:
        raise BadInput(f"{name}: its positions see later tokens, so it is not a causal LM")


def _relative_difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp_min(1e-12)).item()


def parameters_read(model: nn.Module) -> int:
    """Parameters read in one forward pass: all but lookup tables, of which a pass reads a few rows.

    An embedding table that is also the output head counts, since the head reads all of it. All experts count.
    """
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    products = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return sum(p.numel() for p in model.parameters() if id(p) not in lookups - products)
