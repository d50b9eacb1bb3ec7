"""The steps of a distillation run: packed micro-batches, with what the target said at their labels where it is cached."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..data.batches import TokenBatches
from ..data.encoded_set import EncodedSet
from ..data.packing import Packed, pack
from ..data.store import Store, layer_of
from ..decode.stats import RowStats
from .batch import DistillBatch, distill_batch
from .chunked_targets import TargetTopK
from .online import OnlineStream
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
        def of_example(example: int) -> dict[int, Tensor]:
            arrays = self._arrays(example)
            return {layer: arrays[name] for name, layer in self.layers.items()}

        return _laid_out(packed, of_example, device)

    def _arrays(self, example: int) -> dict[str, Tensor]:
        return self.store[example if self._by_item else int(self.encoded.sources[example])].arrays

    def _rows(self, example: int) -> dict[str, Tensor]:
        labels = int(self.encoded.supervised[example])
        arrays = self._arrays(example)
        return {name: rows[:labels] for name, rows in arrays.items()}  # fewer where the example was cut


def _laid_out(
    packed: Packed, states_of: Callable[[int], dict[int, Tensor]], device: torch.device
) -> dict[int, Float[Tensor, "rows length hidden"]]:
    """Hidden states of all positions by layer, where the examples lie; 0 at padding."""
    states: dict[int, Tensor] = {}
    for placed in packed.placed:
        for layer, whole in states_of(placed.example).items():
            rows = whole[: placed.length]
            if layer not in states:
                states[layer] = rows.new_zeros(*packed.input_ids.shape, rows.shape[-1])
            # What was decoded has none after an answer's last token, which nothing reads.
            states[layer][placed.row, placed.start : placed.start + len(rows)] = rows
    return {layer: rows.to(device) for layer, rows in states.items()}


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
        tokens_per_forward: int | None,
        device: torch.device,
    ):
        """`fixed`: the steps of the fixed part; None: rollouts alone. `length`: tokens a packed row holds.
        `tokens_per_forward` None: a step's rollouts are read in one pass.
        """
        self.fixed, self.buffer, self.device = fixed, buffer, device
        self.length, self.tokens_per_forward = length, tokens_per_forward
        self.step = 0
        self._served: RowStats | None = None  # counts of what was served for the newest step
        if isinstance(buffer.source, OnlineStream):
            buffer.source.told = self._note_served

    def __next__(self) -> list[DistillBatch]:
        self._served = None
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
            if group and self.tokens_per_forward is not None and tokens + size > self.tokens_per_forward:
                yield group
                group, tokens = [], 0
            group.append(rollout)
            tokens += size
        if group:
            yield group

    def _hidden(self, packed: Packed, group: list[Rollout]) -> Tensor | dict[int, Tensor] | None:
        """What decoding has computed already, in the order of the labels or at all positions; None: the target must be
        asked.
        """
        parts = [group[placed.example].hidden for placed in sorted(packed.placed, key=lambda p: (p.row, p.start))]
        at_labels = [part for part in parts if isinstance(part, Tensor)]
        if len(at_labels) == len(parts):
            return torch.cat(at_labels).to(self.device)
        everywhere = {i: rollout.hidden for i, rollout in enumerate(group) if isinstance(rollout.hidden, dict)}
        return _laid_out(packed, everywhere.__getitem__, self.device) if len(everywhere) == len(group) else None

    def measured(self) -> dict[str, tuple[float, float]]:
        """For the log, as sums and counts: how the stream was served for the newest step, if it was."""
        served = self._served
        if served is None:
            return {}
        return {
            "stream_block_efficiency": (served.emitted, served.target_calls),
            "stream_acceptance_rate": (served.accepted, served.drafted),
        }

    def _note_served(self, counts: RowStats) -> None:
        self._served = counts

    def state_dict(self) -> dict[str, Any]:
        """Where the next step begins, and the rollouts that it may use."""
        fixed = None if self.fixed is None else self.fixed.state_dict()
        return {"step": self.step, "fixed": fixed, "buffer": self.buffer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on from there."""
        self.step = int(state_dict["step"])
        self.buffer.load_state_dict(state_dict["buffer"])
        if self.fixed is not None:
            self.fixed.load_state_dict(state_dict["fixed"])
