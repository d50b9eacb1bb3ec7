"""AdamW over what is trainable, with weight decay where it belongs."""

import torch
from torch import nn

from ..errors import BadInput


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict]:
    """Trainable parameters in two groups: matrices, which decay, and norms, biases and embeddings, which do not.

    A head that shares its weight with an embedding counts as the embedding. Raises BadInput when nothing is trainable.
    """
    embeddings = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, nn.Embedding)
        for parameter in part.parameters(recurse=False)
    }
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable:
        raise BadInput("nothing to train: every parameter of the drafter is frozen")
    decays = [parameter.ndim >= 2 and id(parameter) not in embeddings for parameter in trainable]
    matrices = [parameter for parameter, decay in zip(trainable, decays, strict=True) if decay]
    others = [parameter for parameter, decay in zip(trainable, decays, strict=True) if not decay]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_adamw(
    module: nn.Module, *, betas: tuple[float, float], epsilon: float, weight_decay: float, fused: bool
) -> torch.optim.AdamW:
    """AdamW; the learning rate is set before every step by the loop."""
    groups = parameter_groups(module, weight_decay)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=epsilon, fused=fused)
