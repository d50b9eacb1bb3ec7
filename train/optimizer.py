"""AdamW over what is trainable, with weight decay where it belongs."""

import torch
from torch import nn

from ..errors import BadInput


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict]:
    """Trainable parameters in groups: matrices, which decay, and norms, biases and embeddings, which do not.

    A head that shares its weight with an embedding counts as the embedding. Where the module has a method
    ``learning_rate_share(name)``, parameters of another share than 1 are groups of their own, with the share as ``rate``.
    Raises BadInput when nothing is trainable.
    """
    embeddings = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, nn.Embedding)
        for parameter in part.parameters(recurse=False)
    }
    share_of = getattr(module, "learning_rate_share", lambda name: 1.0)
    groups: dict[tuple[float, bool], dict] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            rate, decays = float(share_of(name)), parameter.ndim >= 2 and id(parameter) not in embeddings
            empty = {"params": [], "weight_decay": weight_decay if decays else 0.0, "rate": rate}
            groups.setdefault((rate, decays), empty)["params"].append(parameter)
    if not groups:
        raise BadInput("nothing to train: every parameter of the drafter is frozen")
    return [groups[key] for key in sorted(groups, reverse=True)]


def build_adamw(
    module: nn.Module, *, betas: tuple[float, float], epsilon: float, weight_decay: float, fused: bool
) -> torch.optim.AdamW:
    """AdamW; the learning rate is set before every step by the loop."""
    groups = parameter_groups(module, weight_decay)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=epsilon, fused=fused)
