"""The distillation loss in bounded memory: from hidden states and two output heads, chunk by chunk.

A chunk of positions goes through the drafter's head and the target's, the losses and their gradients by the logits are
made at once, and the gradients go on into those of the hidden states and of the head. Nothing of size positions ×
vocabulary outlives its chunk and nothing is computed twice; backward only scales what the forward pass has made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import BadInput
from .chunked_gradients import Pair, mixture_gradient
from .chunked_targets import TargetHidden, TargetTopK
from .mixture import Mixture

Probabilities = Callable[[Tensor], Tensor]

MAX_CHUNK_LOGITS = 2**26  # a chunk's logits, whatever `chunk_tokens` says: 256 MiB in float32
# Logits whose losses are computed at once. On a CPU the temporaries then stay in its cache (beyond 16 MiB each, getting
# their pages from the system costs more than the arithmetic); on an accelerator a kernel must outlast its launch.
BLOCK_LOGITS = {"cpu": 2**20}
BLOCK_LOGITS_ELSEWHERE = 2**24
# Chunks are multiples of this, so that products have few different shapes (why: ``padded_width`` in data/packing.py).
CHUNK_SIZES = 64


class DraftHead(NamedTuple):
    """The drafter's output head: logits = post(hidden @ weightᵀ + bias).

    `post` maps logits ``[rows, vocab]`` to the same shape, row by row and without parameters of its own (a softcap, a
    scale). It is applied in float32.
    """

    weight: Float[Tensor, "vocab hidden"]
    bias: Float[Tensor, "vocab"] | None = None
    post: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class LossSum:
    """Sums over the supervised positions of a call, to be divided by the counts of the whole window, all ranks."""

    sum: Float[Tensor, ""]  # Σ weight · loss, float32, differentiable
    count: Float[Tensor, ""]  # Σ weight
    positions: int  # positions with a weight other than zero: what the sums below are over, unweighted
    alpha_sum: Float[Tensor, ""] | None = None
    greedy_agreement_sum: Float[Tensor, ""] | None = None


def chunked_loss(
    mixture: Mixture,
    draft_hidden: Float[Tensor, "tokens hidden"],
    draft_head: DraftHead,
    target: TargetHidden | TargetTopK | None = None,
    tokens: Int[Tensor, "tokens"] | None = None,
    weights: Float[Tensor, "tokens"] | None = None,
    *,
    chunk_tokens: int = 256,
    metrics: bool = False,
    probabilities: Probabilities | None = None,
) -> LossSum:
    """Σ weight · loss over positions, with gradients for `draft_hidden` and the head where they want them.

    `tokens` are ids among the drafter's rows, -1 for one that it lacks (cross_entropy only). `weights` default to 1;
    positions of weight 0 never reach a head. At most `chunk_tokens` positions are worked on at a time (fewer when the
    vocabulary is large). Where the two heads differ in rows only by padding, the loss is over the ids that both score.

    `metrics` adds the sums of alpha and of greedy agreement over the target's full vocabulary (a full target head even
    where the loss needs none or a part): alpha from the distributions that `probabilities` makes of logits (the served
    sampling transforms; by default softmax at temperature 1). From a top-k target alpha is the part on its k ids, low
    by at most the rest's mass, and `probabilities` does not apply.

    The sum can be scaled and added to others, but differentiated only once. Raises BadInput for a temperature other
    than 1 with a top-k target, ValueError when a loss lacks its target or tokens.
    """
    _check(mixture, target, tokens, metrics)
    if weights is None:
        weights = draft_hidden.new_ones(draft_hidden.shape[0], dtype=torch.float32)
    supervised = weights.nonzero().squeeze(-1)
    positions = supervised.shape[0]
    size = max(1, min(chunk_tokens, MAX_CHUNK_LOGITS // draft_head.weight.shape[0]))
    missing = 0
    if size >= CHUNK_SIZES < positions:  # the last chunk is filled up, with positions of weight 0
        size, missing = size - size % CHUNK_SIZES, -positions % CHUNK_SIZES
    if missing or positions < weights.shape[0]:
        rows = torch.cat([supervised, supervised[:1].expand(missing)])
        draft_hidden, weights = draft_hidden[rows], weights[rows]
        weights[positions:] = 0.0
        target = None if target is None else target.select(rows)
        tokens = None if tokens is None else tokens[rows]
    weights = weights.to(torch.float32)
    work = _Work(mixture, draft_hidden, draft_head, metrics, probabilities)
    with torch.no_grad():
        for start in range(0, positions, size):
            work.chunk(slice(start, start + size), min(size, positions - start), target, tokens, weights)
    total = _Precomputed.apply(
        work.total, draft_hidden, draft_head.weight, draft_head.bias, work.hidden_grad, work.weight_grad, work.bias_grad
    )
    measured = metrics and target is not None
    return LossSum(
        sum=total,
        count=weights.sum(),
        positions=positions,
        alpha_sum=work.alpha if measured else None,
        greedy_agreement_sum=work.agreement if measured else None,
    )


def label_rows(labels: Int[Tensor, "n"], rows_of_ids: Int[Tensor, "vocab"] | None) -> Int[Tensor, "n"]:
    """Labels as ids among the drafter's rows, -1 for those that it lacks. `rows_of_ids`: of every id; None: all, in order."""
    return labels if rows_of_ids is None else rows_of_ids.to(labels.device)[labels]


def _check(mixture: Mixture, target: Any, tokens: Tensor | None, metrics: bool) -> None:
    if (target is None and (mixture.needs_target or metrics)) or (tokens is None and mixture.needs_tokens):
        raise ValueError(f"the loss {mixture} lacks its target or its tokens")
    if isinstance(target, TargetTopK):
        check_temperature(mixture)


def check_temperature(mixture: Mixture) -> None:
    """Raises BadInput for a mixture that a top-k cache of the target cannot serve."""
    if mixture.needs_target and mixture.temperature != 1:
        raise BadInput(
            f"objective.temperature: must be 1 with a top-k cache of the target, got {mixture.temperature:g}: "
            "the mass of the rest is known at temperature 1 only"
        )


class _Precomputed(torch.autograd.Function):
    """A sum whose gradients are known already: backward hands them out, scaled in place (hence only once)."""

    @staticmethod
    def forward(
        ctx: Any,
        total: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hidden_grad: Tensor | None,
        weight_grad: Tensor | None,
        bias_grad: Tensor | None,
    ) -> Tensor:
        # Saved rather than kept as attributes: autograd drops them after backward, so `.grad` can take the buffer over.
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        scaled = [
            None if grad is None else grad.mul_(scale.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return None, *scaled, None, None, None


class _Work:
    """The running sums and gradient buffers of one call. A buffer is None where no gradient is wanted."""

    def __init__(
        self,
        mixture: Mixture,
        hidden: Tensor,
        head: DraftHead,
        metrics: bool,
        probabilities: Probabilities | None,
    ) -> None:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device) if autocast else head.weight.dtype
        self.mixture, self.metrics, self.probabilities = mixture, metrics, probabilities
        self.hidden = hidden.detach().to(self.dtype)
        self.weight = head.weight.detach().to(self.dtype)
        self.bias = None if head.bias is None else head.bias.detach().to(self.dtype)
        self.post = head.post
        self.block_logits = BLOCK_LOGITS.get(device, BLOCK_LOGITS_ELSEWHERE)
        # Sums over many chunks are kept in float32 at least, whatever the weights are in.
        wide = torch.promote_types(self.dtype, torch.float32)
        self.total, self.alpha, self.agreement = hidden.new_zeros(3, dtype=wide).unbind()
        on = torch.is_grad_enabled()
        self.hidden_grad = torch.empty_like(self.hidden) if on and hidden.requires_grad else None
        # As large as the head: zeros would cost as much as a small chunk's product. The first chunk fills it, if there is one.
        make = torch.empty_like if len(hidden) else torch.zeros_like
        self.weight_grad = make(self.weight, dtype=wide) if on and head.weight.requires_grad else None
        bias = head.bias if on and head.bias is not None and head.bias.requires_grad else None
        self.bias_grad = None if bias is None else torch.zeros_like(bias, dtype=wide)
        self.buffer = hidden.new_empty(0, dtype=self.dtype)

    def chunk(
        self,
        rows: slice,
        count: int,
        target: TargetHidden | TargetTopK | None,
        tokens: Tensor | None,
        weights: Tensor,
    ) -> None:
        """Add the losses, metrics and gradients of the positions `rows`, of which the first `count` are wanted."""
        hidden, weights = self.hidden[rows], weights[rows]
        target_logits = None
        if isinstance(target, TargetHidden) and (self.mixture.needs_target or self.metrics):
            target_logits = target.logits(rows, full=self.metrics)
        vocab = self.weight.shape[0]
        if isinstance(target, TargetHidden) and target_logits is not None and target.kept_ids is None:
            vocab = min(vocab, target_logits.shape[-1])
        logits = self._draft_logits(hidden, vocab)
        step = max(1, self.block_logits // vocab)
        for start in range(0, count, step):
            block = slice(start, min(start + step, count))
            here: Tensor | TargetTopK | None = None if target_logits is None else target_logits[block]
            if isinstance(target, TargetTopK):
                here = target.select(rows).select(block)
            kept = target.kept_ids if isinstance(target, TargetHidden) else None
            labels = None if tokens is None else tokens[rows][block]
            logits[block] = self._block(logits[block], here, kept, labels, weights[block])
        logits[count:] = 0.0
        self._collect(rows, hidden, logits)

    def _draft_logits(self, hidden: Tensor, vocab: int) -> Tensor:
        """Raw logits, in a buffer that all chunks share."""
        if self.buffer.shape != (hidden.shape[0], vocab):
            self.buffer = hidden.new_empty(hidden.shape[0], vocab)
        torch.mm(hidden, self.weight[:vocab].t(), out=self.buffer)
        return self.buffer if self.bias is None else self.buffer.add_(self.bias[:vocab])

    def _block(
        self,
        raw: Tensor,
        target: Tensor | TargetTopK | None,
        kept: Tensor | None,
        tokens: Tensor | None,
        weights: Tensor,
    ) -> Tensor:
        """Add a block's losses and metrics; its weighted gradient by the raw logits."""
        raw = raw.to(self.total.dtype)
        logits = raw
        if self.post is not None:
            with torch.enable_grad():
                raw = raw.detach().requires_grad_()
                capped = self.post(raw)
            logits = capped.detach()
        full = target
        if isinstance(full, Tensor):
            target = _over_draft_rows(full, kept, logits.shape[-1])
        losses, gradient, pair = mixture_gradient(self.mixture, logits, target, tokens)
        self.total += (losses * weights).sum()
        if self.metrics and full is not None:
            self._measure(logits, full, kept, pair)
        gradient = gradient.mul_(weights.unsqueeze(-1))
        return gradient if self.post is None else torch.autograd.grad(capped, raw, gradient)[0]

    def _measure(self, logits: Tensor, target: Tensor | TargetTopK, kept: Tensor | None, pair: Pair | None) -> None:
        if isinstance(target, TargetTopK):
            missing = target.ids < 0
            draft = logits.softmax(-1).gather(-1, target.ids.clamp(min=0)).masked_fill(missing, 0.0)
            self.alpha += torch.minimum(draft, target.log_probs.exp()).sum()
            best = target.ids.gather(-1, target.log_probs.argmax(-1, keepdim=True)).squeeze(-1)
            self.agreement += (logits.argmax(-1) == best).sum()
            return
        vocab = logits.shape[-1]
        same = pair is not None and self.mixture.temperature == 1 and target.shape[-1] == vocab and kept is None
        if pair is not None and same and self.probabilities is None:
            draft_probs, target_probs = pair.draft, pair.target
        else:
            make = self.probabilities or (lambda scores: scores.softmax(-1, dtype=self.total.dtype))
            draft_probs, target_probs = make(logits), _over_draft_rows(make(target), kept, vocab)
        self.alpha += torch.minimum(draft_probs, target_probs).sum()
        choice = logits.argmax(-1)
        self.agreement += ((choice if kept is None else kept[choice]) == target.argmax(-1)).sum()

    def _collect(self, rows: slice, hidden: Tensor, gradient: Tensor) -> None:
        """Carry a chunk's gradient by the raw logits on to the hidden states and the head."""
        vocab = gradient.shape[-1]
        if self.hidden_grad is not None:
            torch.mm(gradient, self.weight[:vocab], out=self.hidden_grad[rows])
        if self.weight_grad is not None:
            kept, same = self.weight_grad[:vocab], self.weight_grad.dtype == gradient.dtype
            if rows.start == 0:
                self.weight_grad[vocab:] = 0.0
                torch.mm(gradient.t(), hidden, out=kept) if same else kept.copy_(gradient.t() @ hidden)
            elif same:
                kept.addmm_(gradient.t(), hidden)
            else:
                kept.add_(gradient.t() @ hidden)
        if self.bias_grad is not None:
            self.bias_grad[:vocab].add_(gradient.sum(0, dtype=self.bias_grad.dtype))


def _over_draft_rows(scores: Tensor, kept: Tensor | None, vocab: int) -> Tensor:
    """Target scores at the drafter's rows; as they are where the target's head gave only these."""
    if kept is None or scores.shape[-1] == kept.shape[0]:
        return scores[..., :vocab]
    return scores[..., kept]
