"""A pass of the frozen target over texts, and one over look-ahead embeddings behind tokens of these texts.

Both share one cache: the texts are read once, without gradients, and the embeddings look back at them. Embeddings behind
one token see that token, what it sees, and each other in order; embeddings behind different tokens do not see each other.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..decode.cache import RaggedCache
from ..decode.masks import attention_masks


class Context(NamedTuple):
    """Texts that the target has read."""

    backbone: Any
    model: Any  # names config and attention
    cache: RaggedCache
    position_ids: Int[Tensor, "rows length"]
    segment_ids: Int[Tensor, "rows length"]  # -1: padding
    last_hidden: Float[Tensor, "rows length hidden"]


@torch.no_grad()
def context_pass(
    backbone: Any,
    model: Any,
    input_ids: Int[Tensor, "rows length"],
    position_ids: Int[Tensor, "rows length"],
    segment_ids: Int[Tensor, "rows length"],
) -> Context:
    """Read packed texts: tokens see those before them in their own segment."""
    rows, length = input_ids.shape
    cache = RaggedCache(model.config.get_text_config(decoder=True).num_hidden_layers, rows, model.dtype)
    cache.place(None, 0, length)
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    seen = same & torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
    out = backbone(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=_masks(model, seen, position_ids, position_ids),
        cache=cache,
        use_cache=True,
    )
    return Context(backbone, model, cache, position_ids, segment_ids, out.last_hidden_state)


def lookahead_pass(
    context: Context, anchors: Int[Tensor, "rows anchors"], embeddings: Float[Tensor, "tokens hidden"]
) -> Float[Tensor, "rows anchors tokens hidden"]:
    """The target's last hidden states at `embeddings` behind the tokens in the columns `anchors`.

    Differentiable in the embeddings. Of a context only one pass can be differentiated.
    """
    rows, number = anchors.shape
    k, length = len(embeddings), context.position_ids.shape[1]
    host = anchors.repeat_interleave(k, 1)  # [rows, anchors · k], every anchor's embeddings side by side
    step = torch.arange(k, device=host.device).repeat(number)
    positions = context.position_ids.gather(1, host) + 1 + step
    columns = torch.arange(length, device=host.device)
    same = context.segment_ids.gather(1, host)[:, :, None] == context.segment_ids[:, None, :]
    before = same & (columns <= host[:, :, None])
    group = torch.arange(number, device=host.device).repeat_interleave(k)
    own = (group[:, None] == group) & (step[:, None] >= step)
    seen = torch.cat([before, own.expand(rows, -1, -1)], 2)
    context.cache.place(None, length, length + number * k)
    limit = getattr(context.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    out = context.backbone(
        inputs_embeds=embeddings.to(context.last_hidden.dtype).repeat(number, 1).expand(rows, -1, -1),
        position_ids=positions if limit is None else positions.clamp(max=limit - 1),
        attention_mask=_masks(context.model, seen, positions, torch.cat([context.position_ids, positions], 1)),
        cache=context.cache,
        use_cache=True,
    )
    return out.last_hidden_state.unflatten(1, (number, k))


def _masks(model: Any, seen: Tensor, positions: Tensor, key_positions: Tensor) -> Any:
    return attention_masks(model.config, model.config._attn_implementation, model.dtype, seen, positions, key_positions)
