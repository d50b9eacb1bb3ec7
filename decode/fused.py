"""A model's passes over a :class:`.forward.CachedLM`'s cache on a CPU, with fewer and larger operations.

Between the products of a layer transformers' code runs some forty operations. On a CPU these take milliseconds a pass
however few tokens it has: a fifth of a small target's step, half of a small drafter's. Here a norm is one operation, masks are
made once, what the modules hold is looked up once, and nothing is computed that is not asked for. A packed draft model's
queries, keys and values come from one product moreover, gate and up from another.

What is computed is the same up to rounding. That rests on what a layer is made of, down to its modules' classes, and not on
trying it out alone, which cannot see what a family does differently only later (in its ten thousandth position, say).
:func:`fuse` tries it out as well.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from ..errors import BadInput
from ..models.draft_lm import DraftLM
from ..models.head import OutputHead, split
from ..models.views import Bypass, Nothing, layers_of
from .cache import RaggedCache
from .forward import OWN_PASSES, CachedLM

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# What layers may be made of: whose code is known to compute what `_Attention`, `_MLP` and `_Norm` do.
_LAYERS = (llama.LlamaDecoderLayer, mistral.MistralDecoderLayer, qwen2.Qwen2DecoderLayer, qwen3.Qwen3DecoderLayer)
_ATTENTIONS = (llama.LlamaAttention, mistral.MistralAttention, qwen2.Qwen2Attention, qwen3.Qwen3Attention)
_MLPS = (llama.LlamaMLP, mistral.MistralMLP, qwen2.Qwen2MLP, qwen3.Qwen3MLP)
_NORMS = (llama.LlamaRMSNorm, mistral.MistralRMSNorm, qwen2.Qwen2RMSNorm, qwen3.Qwen3RMSNorm)
_BASES = (llama.LlamaModel, mistral.MistralModel, qwen2.Qwen2Model, qwen3.Qwen3Model)
_CAPTURING = "transformers.utils.output_capturing"  # whose hooks stay once a model has given hidden states
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative to the norm

Product = Callable[[Tensor], Tensor]
Join = Callable[[Tensor, Tensor | None], Product]  # of a weight [out, in] and a bias


def fuse(model: Any, join: Join | None = None, like: Any = None) -> bool:
    """Make passes of `model`, a causal LM or a ``DraftLM``, over a :class:`CachedLM`'s cache run fused from now on; all
    others, gradients included, stay as they are. Call again after the weights have been packed or unpacked.

    Products are those of the model's own layers, which may be packed. With `join`, layers that read the same become one
    product that it makes of their weights: it must be called again after these have changed. `like`: a fused model of which
    this one is a view: nothing is tried out again.

    Returns whether it was done: only on a CPU, for the layers of Llama, Mistral, Qwen2 and Qwen3, which nobody watches with
    hooks or has given another forward at this moment. Modules that are replaced afterwards are noticed: passes are then the
    model's own again.
    """
    unfuse(model)
    if model.device.type != "cpu" or model.dtype not in _TOLERANCE or _changed(model):
        return False
    passes = _passes(model, join)
    if passes is not None and ((like is not None and is_fused(like)) or _agree(model, passes)):
        model.__dict__[OWN_PASSES] = passes
    return is_fused(model)


def fuse_as(view: Any, whole: Any) -> None:
    """Fuse a view of `whole` where that is fused."""
    if is_fused(whole):
        fuse(view, like=whole)


def unfuse(model: Any) -> None:
    """Have the model run by its own forward again, and free joined copies."""
    model.__dict__.pop(OWN_PASSES, None)


def is_fused(model: Any) -> bool:
    """Whether its cached passes run fused. (A view of a fused model is another one.)"""
    passes = model.__dict__.get(OWN_PASSES)
    return passes is not None and passes.serves(model)


class FusedOutput(NamedTuple):
    """What a pass computed."""

    logits: Float[Tensor, "rows kept scored"] | None
    hidden_states: Sequence[Float[Tensor, "rows n hidden"]]  # counted as transformers does


class _Norm:
    def __init__(self, module: Any):
        _made_of(module, _NORMS)
        self.module, self.epsilon, self.shape = module, module.variance_epsilon, tuple(module.weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.shape, self.module.weight, self.epsilon)


class _SideBySide:
    """Several products of the same, end to end."""

    def __init__(self, layers: Sequence[nn.Linear]):
        self.layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        parts = [layer.forward(x) for layer in self.layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class _Attention:
    """Attention after its norm, added to what it read."""

    def __init__(self, layer: Any, join: Join | None):
        attention = layer.self_attn
        _made_of(attention, _ATTENTIONS)
        if attention.attention_dropout:
            raise BadInput("attention with dropout")
        q, k, v, o = _linears(attention, _PROJECTIONS)
        self.dim = attention.head_dim
        self.heads, self.kv_heads = q.out_features // self.dim, k.out_features // self.dim
        self.groups, self.scaling = self.heads // self.kv_heads, attention.scaling
        self.query_norm, self.key_norm = (_norm_or_none(attention, name) for name in ("q_norm", "k_norm"))
        self.norm, self.qkv, self.out = _Norm(layer.input_layernorm), _product(join, q, k, v), _product(join, o)

    def __call__(self, hidden: Float[Tensor, "rows n hidden"], about: "_About", kind: Any, cache: Any) -> Tensor:
        rows, n, _ = hidden.shape
        parts = self.qkv(self.norm(hidden)).view(rows, n, -1, self.dim)
        turned, values = parts[:, :, : self.heads + self.kv_heads], parts[:, :, self.heads + self.kv_heads :]
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = turned.split([self.heads, self.kv_heads], 2)
            turned = torch.cat([self.query_norm(queries), self.key_norm(keys)], 2)
        turned = _rotated(turned, about.cos, about.sin)
        queries, keys = turned.split([self.heads, self.kv_heads], 2)
        keys, values = cache.update(keys.transpose(1, 2), values.transpose(1, 2))
        # Queries that share keys stand side by side, so that no key is repeated.
        queries = queries.view(rows, n, self.kv_heads, self.groups, self.dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        queries = queries.to(keys.dtype)  # attention is computed in what the cache holds
        mask = about.mask(kind, self.groups)
        mixed = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scaling)
        mixed = mixed.to(hidden.dtype).view(rows, self.kv_heads, self.groups, n, self.dim)
        return hidden + self.out(mixed.permute(0, 3, 1, 2, 4).reshape(rows, n, -1))


class _MLP:
    """A gated MLP after its norm, added to what it read."""

    def __init__(self, layer: Any, join: Join | None):
        _made_of(layer.mlp, _MLPS)
        if not isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation):
            raise BadInput("another activation")
        gate, up, down = _linears(layer.mlp, _MLP_PROJECTIONS)
        self.norm, self.inner = _Norm(layer.post_attention_layernorm), gate.out_features
        self.gate_up, self.down = _product(join, gate, up), _product(join, down)

    def __call__(self, hidden: Float[Tensor, "rows n hidden"]) -> Float[Tensor, "rows n hidden"]:
        inner = self.gate_up(self.norm(hidden))
        return hidden + self.down(silu(inner[..., : self.inner]) * inner[..., self.inner :])


class _About:
    """What all layers of a pass have in common."""

    def __init__(self, rotary: Any, hidden: Tensor, positions: Int[Tensor, "rows n"], masks: Any):
        cos, sin = rotary(hidden, positions)
        self.cos, self.sin = cos.unsqueeze(2), sin.unsqueeze(2)
        self.masks, self.several = masks, hidden.shape[1] > 1
        self.made: dict[tuple[Any, int], Tensor] = {}

    def mask(self, kind: Any, groups: int) -> Tensor:
        """Of a kind of layer, repeated for the queries that share keys (of one token, these see the same)."""
        mask = self.masks[kind] if isinstance(self.masks, dict) else self.masks
        if not self.several or groups == 1:
            return mask
        if (kind, groups) not in self.made:
            self.made[kind, groups] = mask.repeat(1, 1, groups, 1)
        return self.made[kind, groups]


class _Layer(NamedTuple):
    """A decoder layer, of which a view may skip blocks."""

    attention: _Attention | None
    mlp: _MLP | None
    kind: Any

    @staticmethod
    def of(layer: Any, kind: Any, join: Join | None) -> "_Layer":
        if isinstance(layer, Bypass):
            return _Layer(None, None, kind)
        _made_of(layer, _LAYERS)
        attention = None if isinstance(layer.self_attn, Nothing) else _Attention(layer, join)
        mlp = None if isinstance(layer.mlp, Nothing) else _MLP(layer, join)
        return _Layer(attention, mlp, kind)


class FusedPasses:
    """All layers and the head of a causal LM. Masks are what :func:`.masks.additive` makes."""

    def __init__(self, owner: Any, model: Any, head: OutputHead, join: Join | None):
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation != "sdpa":
            raise BadInput("this attention implementation takes another kind of mask")
        base = model.base_model
        _made_of(base, _BASES)
        layers = layers_of(model)
        kinds = getattr(config, "layer_types", None) or [None] * len(layers)
        self.owner = weakref.ref(owner)
        self.embed, self.rotary = base.embed_tokens, base.rotary_emb
        self.layers = [_Layer.of(layer, kind, join) for layer, kind in zip(layers, kinds, strict=True)]
        self.norm, self.head = _Norm(base.norm), head
        (linear,) = _linears(head, ("linear",))
        self.product = _product(join, linear)
        # Every place in the model that holds a module, and which: an adapter or a new head would take such a place.
        self.places = [
            (inside._modules, name, found) for inside in model.modules() for name, found in inside._modules.items()
        ]

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the model runs by its own forward, until it is fused itself."""
        return None

    def serves(self, model: Any) -> bool:
        """Whether these are the passes of `model` as it is now: not of one that it was copied from, nor of other modules."""
        return self.owner() is model and all(held.get(name) is found for held, name, found in self.places)

    def run(
        self,
        input_ids: Int[Tensor, "rows n"],
        attention_mask: Any,
        position_ids: Int[Tensor, "rows n"],
        cache: RaggedCache,
        num_logits: int | None,
        inputs_embeds: Float[Tensor, "rows n hidden"] | None = None,
    ) -> FusedOutput:
        """Everything. `num_logits`: for how many tokens, from the end; 0: for all, None: for none."""
        hidden = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        states = self._through(0, len(self.layers), hidden, attention_mask, position_ids, cache)
        states[-1] = self.norm(states[-1])
        logits = None if num_logits is None else self.head.transform(self.product(states[-1][:, -num_logits:]))
        return FusedOutput(logits, states)

    def first(
        self, num_first: int, input_ids: Tensor, attention_mask: Any, position_ids: Tensor, cache: RaggedCache
    ) -> tuple[Tensor, Tensor]:
        """What ``TwoParts.first`` gives."""
        hidden = self._through(0, num_first, self.embed(input_ids), attention_mask, position_ids, cache)[-1]
        return hidden, self.norm(hidden)

    def rest(
        self,
        num_first: int,
        hidden: Tensor,
        want_logits: bool,
        attention_mask: Any,
        position_ids: Tensor,
        cache: RaggedCache,
    ) -> tuple[Tensor, Tensor | None]:
        """What ``TwoParts.rest`` gives."""
        states = self._through(num_first, len(self.layers), hidden, attention_mask, position_ids, cache)
        last = self.norm(states[-1])
        return last, self.head.transform(self.product(last)) if want_logits else None

    def _through(
        self, first: int, end: int, hidden: Tensor, masks: Any, positions: Tensor, cache: RaggedCache
    ) -> list[Tensor]:
        """What goes into each of these layers, and what comes out of the last one."""
        about, states = _About(self.rotary, hidden, positions, masks), [hidden]
        for layer, cached in zip(self.layers[first:end], cache.layers[first:end], strict=True):
            if layer.attention is not None:
                hidden = layer.attention(hidden, about, layer.kind, cached)
            if layer.mlp is not None:
                hidden = layer.mlp(hidden)
            states.append(hidden)
        return states


def _changed(model: nn.Module) -> bool:
    """Whether somebody wants to see what passes, or has given a module another forward (packed products aside)."""
    for module in model.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks):
            return True
        if "forward" in module.__dict__ and not isinstance(module, nn.Linear):
            return True
    return False


def _made_of(module: Any, classes: tuple[type, ...]) -> None:
    if type(module) not in classes:
        raise BadInput(f"a {type(module).__name__}, whose code is not known")


def _passes(model: Any, join: Join | None) -> FusedPasses | None:
    try:
        if isinstance(model, DraftLM):
            return FusedPasses(model, model.model, model.head, join)
        return FusedPasses(model, model, split(model)[1], join)
    except (AttributeError, BadInput):  # another shape of model
        return None


def _linears(module: nn.Module, names: tuple[str, ...]) -> list[Any]:
    found = [getattr(module, name) for name in names]
    if any(type(layer) is not nn.Linear for layer in found):
        raise BadInput("layers that are more than a product")
    return found


def _product(join: Join | None, *layers: nn.Linear) -> Product:
    """One product in the place of several that read the same."""
    if join is None:
        return _SideBySide(layers)
    weight = torch.cat([layer.weight.detach() for layer in layers])
    if all(layer.bias is None for layer in layers):
        return join(weight, None)
    zeros = [weight.new_zeros(layer.out_features) for layer in layers]
    biases = [zero if layer.bias is None else layer.bias.detach() for layer, zero in zip(layers, zeros, strict=True)]
    return join(weight, torch.cat(biases))


def _norm_or_none(module: Any, name: str) -> _Norm | None:
    found = getattr(module, name, None)
    return None if found is None else _Norm(found)


def _rotated(x: Float[Tensor, "rows n heads dim"], cos: Tensor, sin: Tensor) -> Float[Tensor, "rows n heads dim"]:
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat([-x[..., half:], x[..., :half]], -1), sin)


def _agree(model: Any, passes: FusedPasses) -> bool:
    expected = _outputs(model)
    model.__dict__[OWN_PASSES] = passes
    try:
        found = _outputs(model)
    finally:
        unfuse(model)
    tolerance = _TOLERANCE[model.dtype]
    return all((a - b).norm() <= tolerance * b.norm() for a, b in zip(found, expected, strict=True))


@torch.no_grad()
def _outputs(model: Any) -> list[Tensor]:
    """Logits, and of a model that gives them the hidden states, of a few tokens after prompts of two lengths, a branch among
    them.
    """
    config = model.config.get_text_config(decoder=True)
    states = () if isinstance(model, DraftLM) else range(config.num_hidden_layers + 1)
    ids = (torch.arange(14).view(2, 7) * 31 + 5) % config.vocab_size
    cached = CachedLM(model, 2, states)
    cached.prefill(ids[:, :3], [3, 2])
    outputs = [cached.feed(ids[:, 3:5]), cached.feed(ids[:, 5:7], torch.tensor([[0, 0], [1, 1]]))]
    return [
        tensor.float() for out in outputs for tensor in (out.logits, *out.hidden_states.values()) if tensor is not None
    ]
