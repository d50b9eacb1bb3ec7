"""The network of an EAGLE drafter: one decoder layer that goes on from the target's features, a token at a time.

Its entry at position s takes the target's feature of position s - 1 together with the embedding of token s, and its output
stands for the feature of position s: what token s + 1 is predicted from. Drafting on, its own output takes the place of
the feature. Position 0 has no feature before it and hence no entry.

- Version 1 (arXiv:2401.15077): the feature is the target's last hidden state *after* its final norm, which is what the
  target's output head reads, so an output becomes logits by the head alone. Feature and embedding go through ``fc``.
- Version 3 (arXiv:2503.01840): hidden states of a low, a middle and a high layer go through ``fc`` into one feature.
  Queries, keys and values read embedding and feature side by side, each normed; norm and output head are the drafter's.

Tensors are named, shaped and ordered (embedding first) as in published checkpoints of either version.
"""

from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from ..errors import BadInput
from ..models.loading import load_exactly
from ..models.vocabulary import d2t, t2d
from .outputs import HeadOutputs

# Who sees whom; while drafting, what sdpa adds to the scores of it.
Seen = Bool[Tensor, "batch n width"] | Float[Tensor, "batch n width"]
KeysValues = tuple[Float[Tensor, "batch kv_heads _ dim"], Float[Tensor, "batch kv_heads _ dim"]]
_HEAD_NAMES = ("outputs.lm_heads.0.", "lm_head.")  # here, and on disk
# Scalings whose frequencies do not depend on how long a sequence has become: what is in the cache stays valid.
_STEADY_ROPE = ("default", "linear", "llama3", "yarn")


def eagle_config(
    target_config: Any,
    intermediate_size: int | None = None,
    num_key_value_heads: int | Literal["all"] | None = None,
) -> LlamaConfig:
    """One Llama layer in the target's dimensions: hidden size, heads, key-value heads, RoPE, norm.

    Families that differ from Llama elsewhere (biases, norms of queries and keys, learned positions) get a plain Llama
    layer. Sizes come from the configuration, never from weights, which a sharded target does not hold.
    `num_key_value_heads`: None: the target's; ``"all"``: one for every attention head.

    Raises:
        BadInput: a number of key-value heads that does not divide the target's attention heads.
    """
    text = target_config.get_text_config(decoder=True)
    hidden, heads = text.hidden_size, text.num_attention_heads
    key_value_heads = heads if num_key_value_heads == "all" else num_key_value_heads
    if key_value_heads is not None and heads % key_value_heads:
        raise BadInput(
            f"drafter.num_key_value_heads: {key_value_heads} does not divide the target's {heads} attention heads"
        )
    inner = intermediate_size or getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None)
    config = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=hidden,
        intermediate_size=inner or 4 * hidden,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads or getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_parameters=_rope(text),
        tie_word_embeddings=False,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
    )
    config._attn_implementation = "sdpa"
    return config


def _rope(text: Any) -> dict[str, Any]:
    given = getattr(text, "rope_parameters", None) or {}
    given = given.get("full_attention", given)  # Gemma 3 has one set a kind of layer
    if given.get("rope_type", "default") not in _STEADY_ROPE:
        given = {"rope_theta": given.get("rope_theta", 10000.0)}
    known = {key: value for key, value in given.items() if key != "partial_rotary_factor"}
    return {"rope_type": "default", "rope_theta": 10000.0} | known


class Attention(nn.Module):
    """Grouped-query attention without biases; its input may be wider than its output."""

    def __init__(self, config: LlamaConfig, input_size: int):
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        self.head_dim, self.groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
        self.kv_heads = config.num_key_value_heads
        width, kv_width = config.num_attention_heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=False)
        self.k_proj = nn.Linear(input_size, kv_width, bias=False)
        self.v_proj = nn.Linear(input_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def project(self, inputs: Tensor, layer: nn.Linear) -> Float[Tensor, "batch heads n dim"]:
        """One of the three projections, by heads."""
        return layer(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def attend(
        self,
        queries: Float[Tensor, "batch heads n dim"],
        prefix: KeysValues,
        seen: Seen,
        own: list[KeysValues],
    ) -> Float[Tensor, "batch n hidden"]:
        """Every query over the keys of `prefix` that it sees and, one each, the keys of `own` at its own index.

        With `own`, `seen` says who is seen; without, it may also be what is added to the scores.
        """
        return self.o_proj(self.mix(queries, prefix, seen, own))

    def mix(
        self,
        queries: Float[Tensor, "batch heads n dim"],
        prefix: KeysValues,
        seen: Seen,
        own: list[KeysValues],
    ) -> Float[Tensor, "batch n mixed"]:
        """The values that :meth:`attend` brings together, head by head, before the last projection.

        A cache may keep keys and values in a wider type than the layer's own: attention is then computed in that.
        """
        keys, values = prefix
        dtype, queries = queries.dtype, queries.to(keys.dtype)
        batch, kv_heads, width = keys.shape[:3]
        n = queries.shape[2]
        # Queries that share keys stand side by side, so that no key is repeated.
        grouped = queries.reshape(batch, kv_heads, self.groups * n, self.head_dim).to(keys.dtype)  # the cache's, maybe
        mask = seen[:, None].repeat(1, 1, self.groups, 1)
        if not own:
            mixed = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        else:
            split = grouped.unflatten(2, (self.groups, n))
            scores = (grouped @ keys.transpose(2, 3)).masked_fill(~mask, -torch.inf).unflatten(2, (self.groups, n))
            beside = torch.stack([(split * k[:, :, None]).sum(-1) for k, _ in own], -1)
            weights = torch.cat([scores, beside], -1).float().mul(self.head_dim**-0.5).softmax(-1).to(values.dtype)
            mixed = weights[..., :width].flatten(2, 3) @ values
            for i, (_, v) in enumerate(own):
                mixed = mixed + (weights[..., width + i, None] * v[:, :, None]).flatten(2, 3)
        heads = mixed.to(queries.dtype).reshape(batch, kv_heads * self.groups, n, self.head_dim)
        return heads.transpose(1, 2).flatten(2).to(dtype)


class Layer(nn.Module):
    """The decoder layer. What it reads is prepared by the model: version 1 has no norm before its attention."""

    def __init__(self, config: LlamaConfig, version: int):
        super().__init__()
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, hidden if version == 1 else 2 * hidden)
        self.mlp = LlamaMLP(config)
        if version == 3:
            self.input_layernorm = LlamaRMSNorm(hidden, epsilon)  # of the embedding
            self.hidden_norm = LlamaRMSNorm(hidden, epsilon)  # of the feature
        self.post_attention_layernorm = LlamaRMSNorm(hidden, epsilon)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """What follows attention."""
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleModel(nn.Module):
    """``fc``, the decoder layer, for version 3 a norm, and the output head (the target's own, or one of its own).

    Args:
        config: the layer's dimensions (:func:`eagle_config`).
        version: 1 or 3.
        outputs: one projection; of its own for version 3.
        num_features: hidden states that make one feature (version 3).
    """

    scale: Float[Tensor, "size"]

    def __init__(self, config: LlamaConfig, version: int, outputs: HeadOutputs, num_features: int = 3):
        super().__init__()
        self.config, self.version, self.outputs = config, version, outputs
        hidden = config.hidden_size
        if version == 1:
            self.fc = nn.Linear(2 * hidden, hidden, bias=True)
        else:
            self.fc = nn.Linear(num_features * hidden, hidden, bias=False)
        # While training, what `fc` reads is brought to one size, channel by channel (`eagle_fit.fit_start`); on disk this is
        # folded into it.
        self.register_buffer("scale", torch.ones(self.fc.in_features))
        self.layers = nn.ModuleList([Layer(config, version)])
        if version == 3:
            self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        rotary = LlamaRotaryEmbedding(config)
        # Not buffers: a cast of the module to bfloat16 would round the frequencies.
        self.frequencies, self._rope_scale = rotary.inv_freq.detach().clone(), float(rotary.attention_scaling)

    @property
    def layer(self) -> Layer:
        """The one layer."""
        return self.layers[0]  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def fuse(self, features: list[Float[Tensor, "*batch hidden"]]) -> Float[Tensor, "*batch hidden"]:
        """The target's hidden states (one for version 1, three for version 3) as one feature in the drafter's dtype."""
        features = [feature.to(self.dtype) for feature in features]
        return features[0] if self.version == 1 else self._fc(features)

    def inputs(
        self, embedded: Float[Tensor, "*batch hidden"], features: Float[Tensor, "*batch hidden"]
    ) -> tuple[Float[Tensor, "*batch hidden"], Float[Tensor, "*batch size"]]:
        """The residual stream and what attention reads, from token embeddings and the features before them."""
        embedded = embedded.to(self.dtype)
        if self.version == 1:
            joined = self._fc([embedded, features])
            return joined, joined
        return features, torch.cat([self.layer.input_layernorm(embedded), self.layer.hidden_norm(features)], -1)

    def _fc(self, parts: list[Tensor]) -> Tensor:
        # DeepSpeed casts parameters alone: in bf16 it leaves `scale` wider than they are.
        return self.fc((torch.cat(parts, -1) * self.scale).to(self.dtype))

    def rotation(self, positions: Int[Tensor, "batch n"]) -> tuple[Tensor, Tensor]:
        """Cosines and sines for `positions`."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat([angles, angles], -1)
        return ((angles.cos() * self._rope_scale).to(self.dtype), (angles.sin() * self._rope_scale).to(self.dtype))

    def keys_values(self, read: Float[Tensor, "batch n size"], rotation: tuple[Tensor, Tensor]) -> KeysValues:
        """Keys (rotated) and values of entries."""
        attention = self.layer.self_attn
        keys = _rotated(attention.project(read, attention.k_proj), rotation)
        return keys, attention.project(read, attention.v_proj)

    def queries(self, read: Float[Tensor, "batch n size"], rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries of entries."""
        return _rotated(self.layer.self_attn.project(read, self.layer.self_attn.q_proj), rotation)

    def forward(
        self,
        embedded: Float[Tensor, "batch n hidden"],
        features: Float[Tensor, "batch n hidden"],
        positions: Int[Tensor, "batch n"],
        seen: Seen,
        cache: Any = None,
    ) -> Float[Tensor, "batch n hidden"]:
        """Outputs of entries, each over the entries that it sees: those in `cache` (if given), then these."""
        residual, read = self.inputs(embedded, features)
        rotation = self.rotation(positions)
        prefix = self.keys_values(read, rotation)
        if cache is not None:
            prefix = cache.update(*prefix, 0)
        attended = self.layer.self_attn.attend(self.queries(read, rotation), prefix, seen, [])
        return self.layer.finish(residual, attended)

    def read_by_head(self, outputs: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """What the output head turns into logits."""
        return outputs if self.version == 1 else self.norm(outputs)

    def logits(self, outputs: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch scored"]:
        """Logits of the scored ids."""
        return self.outputs.logits(self.read_by_head(outputs), 0)

    def saved_state(self) -> dict[str, Tensor]:
        """Tensors under the names of published checkpoints; for a cut vocabulary ``d2t`` and ``t2d`` among them."""
        state = {name.replace(*_HEAD_NAMES): tensor for name, tensor in self.state_dict().items() if name != "scale"}
        state["fc.weight"] = state["fc.weight"] * self.scale
        kept = self.outputs.kept_ids
        return state if kept is None else {**state, "d2t": d2t(kept), "t2d": t2d(kept, self.outputs.vocab_size)}

    def load_saved(self, tensors: dict[str, Tensor], name: str) -> None:
        """Take what :meth:`saved_state` gave.

        Raises:
            BadInput: a tensor is missing, of another shape, or unknown; the line starts with `name`.
        """
        here, on_disk = _HEAD_NAMES
        own = {key.replace(on_disk, here): tensor for key, tensor in tensors.items() if key not in ("d2t", "t2d")}
        load_exactly(self, {**own, "scale": torch.ones_like(self.scale)}, name)


def _rotated(states: Float[Tensor, "batch heads n dim"], rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosines, sines = (part[:, None] for part in rotation)
    return states * cosines + rotate_half(states) * sines
