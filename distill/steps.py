"""The steps of a distillation run: packed micro-batches, with what the target said at their labels where it is cached."""

from typing import Any

import torch
from torch import Tensor

from ..data.batches import TokenBatches
from ..data.encoded_set import EncodedSet
from ..data.packing import Packed
from ..data.store import Store
from .batch import DistillBatch, distill_batch
from .chunked_targets import TargetTopK
from .teacher_cache import is_teacher_cache, layer_of


class CachedTeacher:
    """Reads cached outputs of the target. Row i of a sequence's arrays belongs to its i-th supervised label, or to its
    i-th token where the cache holds states of all positions.
    """

    def __init__(self, store: Store, encoded: EncodedSet, rank_of: Tensor | None = None):
        """`rank_of [vocab]`: the drafter's row of every id (-1: none), for top-k caches and a cut vocabulary."""
        self.store, self.encoded, self.rank_of = store, encoded, rank_of
        self.layers = {name: layer for name in store.arrays if (layer := layer_of(name)) is not None}
        self._by_item = is_teacher_cache(store)  # else the answers themselves: the set's items name their sequences

    def outputs(self, packed: Packed, device: torch.device) -> Tensor | TargetTopK | dict[int, Tensor]:
        """Hidden states ``[labels, hidden]`` or top-k log-probabilities, in the order of the batch's labels; or hidden
        states of all positions by layer, ``[rows, length, hidden]``, 0 at padding.
        """
        if self.layers:
            return self._states(packed, device)
        parts = [self._rows(placed.example) for placed in sorted(packed.placed, key=lambda p: (p.row, p.start))]
        arrays = {name: torch.cat([part[name] for part in parts]).to(device) for name in self.store.arrays}
        if "hidden" in arrays:
            return arrays["hidden"]
        ids = arrays["top_ids"].long()
        if self.rank_of is not None:
            ids = self.rank_of.to(device)[ids]
        return TargetTopK(ids, arrays["top_log_probs"].float(), arrays["rest_log_mass"].float())

    def _states(self, packed: Packed, device: torch.device) -> dict[int, Tensor]:
        states: dict[int, Tensor] = {}
        for placed in packed.placed:
            arrays = self._arrays(placed.example)
            for name, layer in self.layers.items():
                rows = arrays[name][: placed.length]
                if layer not in states:
                    states[layer] = rows.new_zeros(*packed.input_ids.shape, rows.shape[-1])
                states[layer][placed.row, placed.start : placed.start + placed.length] = rows
        return {layer: rows.to(device) for layer, rows in states.items()}

    def _arrays(self, example: int) -> dict[str, Tensor]:
        return self.store[example if self._by_item else int(self.encoded.sources[example])].arrays

    def _rows(self, example: int) -> dict[str, Tensor]:
        labels = int(self.encoded.supervised[example])
        arrays = self._arrays(example)
        return {name: rows[:labels] for name, rows in arrays.items()}  # fewer where the example was cut


class DistillSteps:
    """This rank's micro-batches, step by step (the training loop's source of steps)."""

    def __init__(self, batches: TokenBatches, device: torch.device, teacher: CachedTeacher | None):
        self.batches, self.device, self.teacher = batches, device, teacher

    def __next__(self) -> list[DistillBatch]:
        return [self._batch(packed) for packed in next(self.batches).micro_batches]

    def _batch(self, packed: Packed) -> DistillBatch:
        cached = self.teacher.outputs(packed, self.device) if self.teacher is not None and packed.placed else None
        return distill_batch(packed, self.device, cached)

    def state_dict(self) -> dict[str, Any]:
        """Where the next step begins."""
        return dict(self.batches.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on from there."""
        self.batches.load_state_dict(state_dict)
