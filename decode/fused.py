"""A draft model's passes on a CPU, with fewer and larger operations.

A pass of a small drafter over one token is over in a few milliseconds, half of which transformers' code spends between the
products: some forty operations a layer. Here queries, keys and values come from one product, gate and up from another, and
norms are one operation each. What is computed is the same up to rounding, which :func:`fuse` checks before it switches.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from ..errors import BadInput
from ..models.draft_lm import DraftLM, DraftOutput
from ..models.views import final_norm, layers_of
from .cache import RaggedCache
from .forward import CachedLM
from .onednn import PackedProduct, supported

_FUSED = "_draftsmith_fused"
_AGREED = "_draftsmith_fused_agreed"  # whether fused logits were found to be the plain ones: weights do not change that
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of logits, relative to their norm

Norm = Callable[[Tensor], Tensor]


def fuse(draft_lm: DraftLM) -> bool:
    """Make passes over a :class:`CachedLM`'s cache run fused from now on; all others, gradients included, stay as they are.

    Call again after the weights have changed. Returns whether it was done: only for layers shaped like Llama's (Mistral,
    Qwen2, Qwen3 and their like) whose logits stay what they were.
    """
    unfuse(draft_lm)
    if draft_lm.device.type != "cpu" or not supported(draft_lm.dtype):
        return False
    passes = _passes(draft_lm)
    if passes is None or not draft_lm.__dict__.get(_AGREED, True):
        return False
    plain = draft_lm.forward

    def forward(
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> DraftOutput:
        ours = isinstance(cache, RaggedCache) and not options and not torch.is_grad_enabled()
        if ours and input_ids is not None and position_ids is not None:
            return passes.run(input_ids, attention_mask, position_ids, cache, logits_to_keep)
        return plain(input_ids, attention_mask, position_ids, cache, use_cache, logits_to_keep, **options)

    before = None if _AGREED in draft_lm.__dict__ else _logits(draft_lm)
    # Instance attributes, as for packed layers: parameters and names stay as they are.
    draft_lm.__dict__["forward"], draft_lm.__dict__[_FUSED] = forward, passes
    if before is not None:
        distance = (_logits(draft_lm) - before).norm()
        draft_lm.__dict__[_AGREED] = bool(distance <= _TOLERANCE[draft_lm.dtype] * before.norm())
        if not draft_lm.__dict__[_AGREED]:
            unfuse(draft_lm)
    return is_fused(draft_lm)


def unfuse(draft_lm: DraftLM) -> None:
    """Give the model its own forward back and free the fused copies."""
    if is_fused(draft_lm):
        del draft_lm.__dict__["forward"], draft_lm.__dict__[_FUSED]


def is_fused(draft_lm: DraftLM) -> bool:
    """Whether its cached passes run fused."""
    return _FUSED in draft_lm.__dict__


class _Layer:
    """A decoder layer: attention and gated MLP, each after a norm and added to what it read."""

    def __init__(self, layer: nn.Module):
        attention, mlp = _parts(layer, ("self_attn", "mlp"))
        q, k, v, o = _linears(attention, _PROJECTIONS)
        gate, up, down = _linears(mlp, _MLP)
        first, second = _parts(layer, ("input_layernorm", "post_attention_layernorm"))
        self.dim = attention.head_dim
        self.heads, self.kv_heads = q.out_features // self.dim, k.out_features // self.dim
        self.scaling = attention.scaling
        self.query_norm, self.key_norm = (_norm_or_none(attention, name) for name in ("q_norm", "k_norm"))
        self.first_norm, self.second_norm = _norm(first), _norm(second)
        self.qkv, self.out = _joined(q, k, v), _joined(o)
        self.inner, self.gate_up, self.down = gate.out_features, _joined(gate, up), _joined(down)

    def __call__(
        self,
        hidden: Float[Tensor, "rows n hidden"],
        rope: tuple[Float[Tensor, "rows n 1 dim"], Float[Tensor, "rows n 1 dim"]],
        mask: Float[Tensor, "rows 1 queries width"],
        cache: Any,
    ) -> Float[Tensor, "rows n hidden"]:
        hidden = hidden + self.out(self._attend(self.first_norm(hidden), rope, mask, cache))
        inner = self.gate_up(self.second_norm(hidden))
        return hidden + self.down(silu(inner[..., : self.inner]) * inner[..., self.inner :])

    def _attend(self, normed: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, cache: Any) -> Tensor:
        rows, n, _ = normed.shape
        parts = self.qkv(normed).view(rows, n, -1, self.dim)
        turned, values = parts[:, :, : self.heads + self.kv_heads], parts[:, :, self.heads + self.kv_heads :]
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = turned.split([self.heads, self.kv_heads], 2)
            turned = torch.cat([self.query_norm(queries), self.key_norm(keys)], 2)
        turned = _rotated(turned, *rope)
        queries, keys = turned.split([self.heads, self.kv_heads], 2)
        keys, values = cache.update(keys.transpose(1, 2), values.transpose(1, 2))
        # Queries that share keys stand side by side, so that no key is repeated.
        groups = self.heads // self.kv_heads
        queries = queries.view(rows, n, self.kv_heads, groups, self.dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        queries = queries.to(keys.dtype)  # attention is computed in what the cache holds
        mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scaling).to(normed.dtype)
        return mixed.view(rows, self.kv_heads, groups, n, self.dim).permute(0, 3, 1, 2, 4).reshape(rows, n, -1)


class _Passes:
    """All layers and the head."""

    def __init__(self, draft_lm: DraftLM):
        model: Any = draft_lm.model
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation != "sdpa":
            raise BadInput("this attention implementation takes another kind of mask")
        layers = layers_of(model)
        self.embed, self.rotary = model.get_input_embeddings(), model.base_model.rotary_emb
        self.layers = [_Layer(layer) for layer in layers]
        self.kinds = list(getattr(config, "layer_types", None) or [None] * len(layers))
        if len({layer.heads // layer.kv_heads for layer in self.layers}) != 1:
            raise BadInput("layers share keys differently")
        self.norm, self.head = _norm(final_norm(model)), draft_lm.head
        (linear,) = _linears(self.head, ("linear",))
        self.product = _joined(linear)

    def run(
        self,
        input_ids: Int[Tensor, "rows n"],
        masks: Any,
        position_ids: Int[Tensor, "rows n"],
        cache: RaggedCache,
        logits_to_keep: int,
    ) -> DraftOutput:
        """What the draft model's forward returns; `masks` as :func:`.masks.additive` makes them."""
        hidden = self.embed(input_ids)
        cos, sin = self.rotary(hidden, position_ids)
        rope = cos.unsqueeze(2), sin.unsqueeze(2)
        groups = self.layers[0].heads // self.layers[0].kv_heads
        of_kind: Any = masks if isinstance(masks, dict) else dict.fromkeys(self.kinds, masks)
        if input_ids.shape[1] > 1:  # of one token, queries that share keys see the same
            of_kind = {kind: mask.repeat(1, 1, groups, 1) for kind, mask in of_kind.items()}
        for layer, kind, cached in zip(self.layers, self.kinds, cache.layers, strict=True):
            hidden = layer(hidden, rope, of_kind[kind], cached)
        hidden = self.norm(hidden)
        return DraftOutput(self.head.transform(self.product(hidden[:, -logits_to_keep:])), hidden, cache)


def _passes(draft_lm: DraftLM) -> _Passes | None:
    try:
        return _Passes(draft_lm)
    except (AttributeError, BadInput):  # another shape of model
        return None


def _parts(module: nn.Module, names: tuple[str, ...]) -> list[Any]:
    return [getattr(module, name) for name in names]


def _linears(module: nn.Module, names: tuple[str, ...]) -> list[nn.Linear]:
    found = _parts(module, names)
    if any(type(layer) is not nn.Linear for layer in found):
        raise BadInput("layers that are more than a product")
    return found


def _joined(*layers: nn.Linear) -> PackedProduct:
    """One product in the place of several that read the same."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    if all(layer.bias is None for layer in layers):
        return PackedProduct(weight)
    zeros = [weight.new_zeros(layer.out_features) for layer in layers]
    biases = [zero if layer.bias is None else layer.bias.detach() for layer, zero in zip(layers, zeros, strict=True)]
    return PackedProduct(weight, torch.cat(biases))


def _norm(module: Any) -> Norm:
    weight, epsilon = module.weight.detach(), module.variance_epsilon
    shape = tuple(weight.shape)
    return lambda x: rms_norm(x, shape, weight, epsilon)


def _norm_or_none(module: Any, name: str) -> Norm | None:
    found = getattr(module, name, None)
    return None if found is None else _norm(found)


def _rotated(x: Float[Tensor, "rows n heads dim"], cos: Tensor, sin: Tensor) -> Float[Tensor, "rows n heads dim"]:
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat([-x[..., half:], x[..., :half]], -1), sin)


@torch.no_grad()
def _logits(draft_lm: DraftLM) -> Float[Tensor, "rows n scored"]:
    """Of a few tokens after prompts of two lengths, a branch among them."""
    size = draft_lm.vocab_size
    ids = (torch.arange(14).view(2, 7) * 31 + 5) % size
    cached = CachedLM(draft_lm, 2)
    cached.prefill(ids[:, :3], [3, 2])
    one, two = cached.feed(ids[:, 3:5]).logits, cached.feed(ids[:, 5:7], torch.tensor([[0, 0], [1, 1]])).logits
    assert one is not None
    assert two is not None
    return torch.cat([one, two], 1).float()
