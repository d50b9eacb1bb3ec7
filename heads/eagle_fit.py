"""A start for an EAGLE drafter that is solved, not trained: the best linear guess of the target's next feature.

What ``fc`` gives is passed on by the residual stream. Solved for by ridge regression over some thousand labels, it alone
drafts better than minutes of training from random weights would (a tuned lens, arXiv:2303.08112, one token ahead).
Attention and MLP add nothing at first: they learn what a linear map cannot know.
"""

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from ..distill.batch import DistillBatch
from .eagle_model import EagleModel

Features = Callable[[DistillBatch], dict[int, Float[Tensor, "rows length hidden"]]]

_RIDGE = 0.01  # on the mean of the squares


@torch.no_grad()
def fit_start(
    model: EagleModel,
    layers: tuple[int, ...],
    last: int,
    features: Features,
    embed: Callable[[Tensor], Tensor],
    batches: Iterable[DistillBatch],
    max_labels: int = 32768,
) -> float:
    """Set scale and weight of ``fc``, and version 3's norm, from labels of `batches`, `max_labels` at most.

    ``scale`` brings every channel that ``fc`` reads to a root mean square of 1: layers, channels and embeddings of a
    target differ in size by factors of a hundred, and the small ones would be learned last. The norm gives what the
    output head reads the size of the target's last hidden states (`last` is their number), channel by channel.

    Returns the share of those states' variance that ``fc`` explains.
    """
    inputs, wanted = [], []
    labels = 0
    for batch in batches:
        states = features(batch)
        x, y = _pairs(model, layers, last, states, embed, batch)
        inputs.append(x.cpu())
        wanted.append(y.cpu())
        labels += len(x)
        if labels >= max_labels:
            break
    x, y = (torch.cat(parts)[:max_labels].to(model.device, torch.float32) for parts in (inputs, wanted))
    size = x.square().mean(0).sqrt().clamp(min=1e-6)
    gain = y.square().mean(0).sqrt().clamp(min=1e-6)
    if model.version == 3:
        model.norm.weight.copy_(gain)
        y = y / gain
    model.scale.copy_(1 / size)
    return _solve(model, x / size, y)


def _pairs(
    model: EagleModel,
    layers: tuple[int, ...],
    last: int,
    states: dict[int, Tensor],
    embed: Callable[[Tensor], Tensor],
    batch: DistillBatch,
) -> tuple[Float[Tensor, "labels size"], Float[Tensor, "labels hidden"]]:
    """What ``fc`` reads at every label's predictor that has a feature before it, and the target's feature there."""
    at = batch.predictors[batch.position_ids.flatten()[batch.predictors] > 0]
    read = [states[layer].flatten(0, 1)[at - 1] for layer in layers]
    if model.version == 1:
        read.insert(0, embed(batch.input_ids.flatten()[at]))
    return torch.cat(read, -1), states[last].flatten(0, 1)[at]


def _solve(model: EagleModel, x: Float[Tensor, "labels size"], y: Float[Tensor, "labels hidden"]) -> float:
    bias = model.fc.bias is not None
    if bias:
        x = torch.nn.functional.pad(x, (0, 1), value=1.0)
    wide = x.double()
    gram = wide.T @ wide
    gram += _RIDGE * len(x) * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    solution = torch.linalg.solve(gram, wide.T @ y.double()).to(y.dtype)
    model.fc.weight.copy_(solution[: model.fc.in_features].T)
    if bias:
        model.fc.bias.copy_(solution[-1])
    torch.nn.init.zeros_(model.layer.self_attn.o_proj.weight)
    torch.nn.init.zeros_(model.layer.mlp.down_proj.weight)  # type: ignore[arg-type]
    missed = (y - x @ solution).square().sum()
    return float(1 - missed / (y - y.mean(0)).square().sum())
