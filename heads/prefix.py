"""Hydra's prefix attention: a decoder layer over the target's last hidden states, before the heads (arXiv:2402.05109)."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from ..decode.forward import CachedLM
from .eagle_model import Layer, Seen
from .medusa import zeroed


class PrefixAttention(nn.Module):
    """One Llama layer in the target's dimensions. What it adds is zero at the start, so that heads begin as without it."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layer = Layer(config, version=1)
        zeroed(self.layer.self_attn.o_proj)
        zeroed(self.layer.mlp.down_proj)
        # In a tuple: a cast of the module to bf16 would round the frequencies.
        self._rotary = (LlamaRotaryEmbedding(config),)

    def forward(
        self,
        hidden: Float[Tensor, "batch n hidden"],
        positions: Int[Tensor, "batch n"],
        seen: Seen,
        cache: Any = None,
    ) -> Float[Tensor, "batch n hidden"]:
        """Every position over those that it sees: the ones in `cache` (if given), then these."""
        attention, read = self.layer.self_attn, self.norm(hidden)
        cosines, sines = self._rotary[0].to(hidden.device)(hidden, positions)
        queries, keys = apply_rotary_pos_emb(
            attention.project(read, attention.q_proj), attention.project(read, attention.k_proj), cosines, sines
        )
        prefix = (keys, attention.project(read, attention.v_proj))
        if cache is not None:
            prefix = cache.update(*prefix, 0)
        return self.layer.finish(hidden, attention.attend(queries, prefix, seen, []))


class PrefixCache:
    """The layer while decoding: it follows the target's hidden states of what was emitted, row by row."""

    def __init__(self, attention: PrefixAttention, batch_size: int, dtype: torch.dtype, device: torch.device):
        self._cached = CachedLM(_Fed(attention, dtype, device), batch_size, hidden_states=(0,))

    @torch.no_grad()
    def extend(
        self, hidden: Float[Tensor, "batch n hidden"], counts: Int[Tensor, "batch"], host_counts: list[int]
    ) -> Float[Tensor, "batch n hidden"]:
        """Go on with each row's first ``counts[row]`` hidden states; what the layer makes of all of them."""
        placeholders = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        out = self._cached.feed(placeholders, want_logits=False, states=hidden).hidden_states[0]
        self._cached.keep(counts, host_counts)
        return out


class _Outputs(NamedTuple):
    logits: None
    hidden_states: tuple[Tensor]


class _Fed:
    """The layer as :class:`CachedLM` feeds a model: hidden states come in the place of tokens."""

    def __init__(self, attention: PrefixAttention, dtype: torch.dtype, device: torch.device):
        self.attention, self.config, self.dtype, self.device = attention, attention.config, dtype, device

    def __call__(self, **inputs: Any) -> _Outputs:
        return self.forward(**inputs)

    def forward(
        self, attention_mask: Any, position_ids: Tensor, cache: Any, states: Tensor, **options: Any
    ) -> _Outputs:
        return _Outputs(None, (self.attention(states, position_ids, attention_mask[:, 0], cache),))
