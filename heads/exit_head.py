"""An exit of the target after its first layers: a small adapter, or none, then the target's final norm and output head."""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from ..models.head import parameters_read
from ..models.target import Target
from ..models.views import Nothing, TwoParts, final_norm, layers_of
from .eagle_model import eagle_config
from .outputs import HeadOutputs

AdapterKind = Literal["none", "attention", "block"]


class ExitAdapter(nn.Module):
    """Llama layers in the target's dimensions between exit layer and output head.

    ``attention``: a norm and attention alone, as in Kangaroo; ``block``: a whole decoder layer. What they add is zero at
    the start, so that training begins at the plain exit.
    """

    def __init__(self, config: LlamaConfig, kind: AdapterKind):
        super().__init__()
        self.config = config
        network: Any = LlamaModel(config)
        self.layers: nn.ModuleList = network.layers
        for layer in network.layers:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
            if kind == "attention":
                layer.mlp, layer.post_attention_layernorm = Nothing(), nn.Identity()
        # Not a submodule: its embeddings and norm are none of the adapter's, its frequencies are never to be rounded.
        network.embed_tokens, network.norm, network.rotary_emb = (
            nn.Identity(),
            nn.Identity(),
            _Rotation(network.rotary_emb),
        )
        self._network = (network,)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self, hidden: Float[Tensor, "rows length hidden"], **inputs: Any
    ) -> Float[Tensor, "rows length hidden"]:
        """`inputs`: mask, positions and cache, as transformers' decoders take them."""
        return self._network[0](inputs_embeds=hidden.to(self.dtype), **inputs).last_hidden_state


class _Rotation(nn.Module):
    """Rotary embeddings whose frequencies a cast of the module to bfloat16 leaves alone."""

    def __init__(self, rotary: Any):
        super().__init__()
        self._frequencies, self._scale = rotary.inv_freq.detach().clone().float(), float(rotary.attention_scaling)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self._frequencies.device != x.device:
            self._frequencies = self._frequencies.to(x.device)
        angles = position_ids[..., None].float() * self._frequencies
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self._scale).to(x.dtype), (angles.sin() * self._scale).to(x.dtype)


class ExitHead(nn.Module):
    """What an exit adds to the target: the adapter (if any) and the output projection, the target's own or rows of it."""

    def __init__(
        self,
        target: Target,
        exit_layer: int,
        adapter: AdapterKind = "none",
        intermediate_size: int | None = None,
        kept_ids: Int[Tensor, "kept"] | None = None,
    ):
        """`exit_layer`: layers that draft. `kept_ids`: the ids that are scored; None: all.

        Raises:
            BadInput: the target has no layers beyond, or cannot be run in two parts.
        """
        super().__init__()
        self.exit_layer, self.intermediate_size, self.kind = exit_layer, intermediate_size, adapter
        self.outputs = HeadOutputs(target, 1, "shared", kept_ids=kept_ids)
        self.adapter: ExitAdapter | None = None
        if adapter != "none":
            config = eagle_config(target.model.config, intermediate_size)
            self.adapter = ExitAdapter(config, adapter).to(target.device)
        # In a tuple, so that nothing of the target is a submodule.
        self._target = (TwoParts(target.model, exit_layer), final_norm(target.model), target)

    @property
    def parts(self) -> TwoParts:
        """The target, cut at the exit layer."""
        return self._target[0]

    @property
    def norm(self) -> nn.Module:
        """The target's final norm."""
        return self._target[1]

    def read_by_head(
        self, hidden: Float[Tensor, "*batch hidden"], adapted: Float[Tensor, "*batch hidden"]
    ) -> Float[Tensor, "*batch hidden"]:
        """What the output projection reads, from the adapter's output over the hidden states of the exit layer."""
        return self.norm(adapted.to(hidden.dtype))

    def logits(self, read: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch scored"]:
        """Logits of the scored ids."""
        return self.outputs.logits(read, 0)

    def saved_config(self) -> dict[str, Any]:
        """What :func:`load_exit` needs besides the tensors."""
        return {"exit_layer": self.exit_layer, "adapter": self.kind, "intermediate_size": self.intermediate_size}

    @property
    def num_parameters_read(self) -> int:
        """Parameters that one drafting pass reads."""
        own = [self.outputs.read(), self.norm, *layers_of(self._target[2].model)[: self.exit_layer]]
        return parameters_read(nn.ModuleList([*own, *([] if self.adapter is None else [self.adapter])]))
