"""The target's hidden states at every position of a training batch: read from a cache, or computed on the fly."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..distill.batch import DistillBatch
from ..distill.chunked_targets import TargetTopK
from ..distill.teacher import Teacher, absolute_layer, all_hidden
from ..models.target import Target


class TargetFeatures:
    """Hidden states of some layers, indexed as transformers does: 0 the embeddings, i the output of layer i, the last
    one after the final norm; negative numbers count from the end.
    """

    def __init__(self, target: Target, layers: Sequence[int]):
        self.layers = tuple(layers)
        self.last = target.num_layers
        self._absolute = {layer: absolute_layer(layer, target.num_layers) for layer in layers}
        self._teacher = Teacher(target)

    @torch.no_grad()
    def __call__(self, batch: DistillBatch) -> dict[int, Float[Tensor, "rows length hidden"]]:
        """By layer as asked for. Padding positions hold no meaning."""
        cached = batch.teacher
        if isinstance(cached, dict) and all(layer in cached for layer in self._absolute.values()):
            dtype = self._teacher.target.dtype
            return {asked: cached[layer].to(dtype) for asked, layer in self._absolute.items()}
        states = all_hidden(self._teacher, batch, tuple(self._absolute.values()))
        return {asked: states[layer] for asked, layer in self._absolute.items()}

    @torch.no_grad()
    def at_labels(self, batch: DistillBatch) -> Float[Tensor, "labels hidden"]:
        """The last hidden states at the positions that labels are predicted from."""
        cached = batch.teacher
        if isinstance(cached, dict) and self.last in cached:
            hidden = cached[self.last].flatten(0, 1)[batch.predictors]
            return hidden.to(self._teacher.target.dtype)
        targets = self._teacher.outputs(batch)
        assert not isinstance(targets, TargetTopK)  # the recipe's schema has refused it
        return targets.hidden
