"""The steps of a distillation run: packed micro-batches, with what the target said at their labels where it is cached."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..data.batches import TokenBatches
from ..data.encoded_set import EncodedSet
from ..data.packing import Packed, pack
from ..data.store import Store, layer_of
from .batch import DistillBatch, distill_batch
from .chunked_targets import TargetTopK
from .rollouts import Rollout, RolloutBuffer
from .teacher_cache import is_teacher_cache


class CachedTeacher:
    """Reads cached outputs of the target. Row i of a sequence's arrays belongs to its i-th supervised label, or to its
    i-th token where states of all positions are kept.
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
                # What the target answered with has none after an answer's last token, which nothing reads.
                states[layer][placed.row, placed.start : placed.start + len(rows)] = rows
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


class RolloutSteps:
    """Steps with rollouts in them: fixed data for one part of the tokens, answers made while training for the other."""

    def __init__(
        self,
        fixed: DistillSteps | None,
        buffer: RolloutBuffer,
        *,
        length: int,
        tokens_per_forward: int,
        device: torch.device,
    ):
        """`fixed`: the steps of the fixed part; None: rollouts alone. `length`: tokens a packed row holds."""
        self.fixed, self.buffer, self.device = fixed, buffer, device
        self.length, self.tokens_per_forward = length, tokens_per_forward
        self.step = 0
        self.served: float | None = None  # block efficiency of the stream, when last measured

    def __next__(self) -> list[DistillBatch]:
        batches = [] if self.fixed is None else next(self.fixed)
        for group in self._groups(self.buffer.take(self.step)):
            packed = pack([rollout.encoded for rollout in group], self.length)
            batches.append(distill_batch(packed, self.device, self._hidden(packed, group)))
        self.step += 1
        return batches

    def _groups(self, rollouts: list[Rollout]) -> Iterator[list[Rollout]]:
        group: list[Rollout] = []
        tokens = 0
        for rollout in rollouts:
            size = len(rollout.encoded.input_ids)
            if group and tokens + size > self.tokens_per_forward:
                yield group
                group, tokens = [], 0
            group.append(rollout)
            tokens += size
        if group:
            yield group

    def _hidden(self, packed: Packed, group: list[Rollout]) -> Tensor | None:
        """What decoding has computed already, in the order of the labels; None: the target must be asked."""
        parts = [group[placed.example].hidden for placed in sorted(packed.placed, key=lambda p: (p.row, p.start))]
        if any(part is None for part in parts):
            return None
        return torch.cat([part for part in parts if part is not None]).to(self.device)

    def measured(self) -> dict[str, float]:
        """For the log: how the stream was last served."""
        return {} if self.served is None else {"stream_block_efficiency": self.served}

    def note_served(self, step: int, block_efficiency: float) -> None:
        """Told by the online stream after each batch of prompts."""
        self.served = block_efficiency

    def state_dict(self) -> dict[str, Any]:
        """Where the next step begins, and the rollouts that it may use."""
        fixed = None if self.fixed is None else self.fixed.state_dict()
        return {"step": self.step, "fixed": fixed, "buffer": self.buffer.state_dict(), "served": self.served}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on from there."""
        self.step, self.served = int(state_dict["step"]), state_dict["served"]
        self.buffer.load_state_dict(state_dict["buffer"])
        if self.fixed is not None:
            self.fixed.load_state_dict(state_dict["fixed"])
