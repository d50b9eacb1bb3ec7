"""Optimizer steps out of encoded examples: a fixed order, a fixed budget of tokens, the same over any number of ranks.

A step is a run of examples in epoch order, chosen before ranks are thought of. The ranks divide it among themselves, so
the examples of a step and the number its loss is divided by do not depend on how many processes train.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import BadInput
from .chats import Encoded
from .encoded_set import EncodedSet
from .packing import Packed, pack_rows, padded_width, plan_rows


class Step(NamedTuple):
    """What one rank does in one optimizer step."""

    micro_batches: list[Packed]  # as many on every rank; a rank without examples gets fillers of weight 0
    supervised_tokens: int  # of the whole step, all ranks together: the loss is divided by this
    tokens: int  # of the whole step, all ranks together, without padding
    examples: list[int]  # of the whole step, in epoch order
    own_examples: list[int]  # this rank's share
    epoch: int  # the epoch that the step's last example belongs to


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `count` examples in an epoch: a permutation, int64 [count], the same for the same arguments."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def split_by_rank(lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """Indices of every rank: the longest example first, each to the rank with the fewest tokens; in given order."""
    loads, shares = [0] * world_size, [[] for _ in range(world_size)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(world_size), key=lambda r: (loads[r], r))
        shares[rank].append(index)
        loads[rank] += int(lengths[index])
    return [sorted(share) for share in shares]


class TokenBatches:
    """An endless iterator over steps.

    `tokens_per_step` bounds the tokens of a step over all ranks (an example longer than that is a step of its own);
    `tokens_per_forward` bounds rows × length of a micro-batch on a rank, padding included (never under one row). Rows
    hold at most `length` tokens (None: as the longest example). A step may run over the end of an epoch, but never
    holds more examples than there are.

    ``state_dict()`` is {"epoch", "index"}: the next example to be read. Raises BadInput for a set that is empty or has
    an example longer than `length`.
    """

    def __init__(
        self,
        encoded: Sequence[Encoded],
        tokens_per_step: int,
        tokens_per_forward: int | None = None,
        length: int | None = None,
        packing: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        pad_id: int = 0,
    ) -> None:
        if not len(encoded):
            raise BadInput("there is no example to train on")
        self.encoded = encoded
        sizes = encoded.lengths if isinstance(encoded, EncodedSet) else [len(item.input_ids) for item in encoded]
        self.lengths = np.asarray(sizes, np.int64)
        self.length = int(self.lengths.max()) if length is None else length
        if self.lengths.max() > self.length:
            raise BadInput(f"an example of {self.lengths.max()} tokens does not fit into rows of {self.length}")
        self.tokens_per_step = tokens_per_step
        self.tokens_per_forward = tokens_per_forward or -(-tokens_per_step // world_size)
        self.packing, self.seed, self.pad_id = packing, seed, pad_id
        self.rank, self.world_size = rank, world_size
        self.epoch, self.index = 0, 0
        self._order: tuple[int, np.ndarray] | None = None

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        examples = self._take()
        lengths = [int(self.lengths[i]) for i in examples]
        shares = split_by_rank(lengths, self.world_size)
        plans = [self._micro_batches([examples[i] for i in share]) for share in shares]
        own = plans[self.rank]
        batches = [self._pack(rows) for rows in own]
        batches += [self._filler(examples[0])] * (max(map(len, plans)) - len(own))
        epoch = self.epoch if self.index else self.epoch - 1
        supervised = sum(self._supervised(i) for i in examples)
        return Step(batches, supervised, sum(lengths), examples, [examples[i] for i in shares[self.rank]], epoch)

    def state_dict(self) -> dict[str, int]:
        """Where the next step begins."""
        return {"epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken. Raises BadInput when it cannot be of this data."""
        epoch, index = int(state["epoch"]), int(state["index"])
        if epoch < 0 or not 0 <= index < len(self.lengths):
            raise BadInput(f"the data position {index} lies outside of {len(self.lengths)} examples: other data?")
        self.epoch, self.index = epoch, index

    def num_steps(self, epochs: float | int) -> int:
        """Steps until `epochs` passes over the data are read, the last one begun counted; from the very start."""
        wanted = epochs * len(self.lengths)
        here = self.epoch, self.index
        self.epoch, self.index, steps = 0, 0, 0
        try:
            while self.epoch * len(self.lengths) + self.index < wanted:
                self._take()
                steps += 1
        finally:
            self.epoch, self.index = here
        return steps

    def _take(self) -> list[int]:
        """The next step's examples; moves on."""
        taken: list[int] = []
        tokens = 0
        while True:
            example = int(self._current_order()[self.index])
            tokens += int(self.lengths[example])
            # A step of several passes over a small set would only repeat the same gradient: one pass is the most.
            if taken and (tokens > self.tokens_per_step or len(taken) == len(self.lengths)):
                return taken
            taken.append(example)
            self.index += 1
            if self.index == len(self.lengths):
                self.epoch, self.index = self.epoch + 1, 0

    def _current_order(self) -> np.ndarray:
        if self._order is None or self._order[0] != self.epoch:
            self._order = self.epoch, epoch_order(len(self.lengths), self.seed, self.epoch)
        return self._order[1]

    def _micro_batches(self, examples: list[int]) -> list[list[list[int]]]:
        """Micro-batches of rows of examples, for one rank: full rows first, so that rows of a batch are alike."""
        lengths = [int(self.lengths[i]) for i in examples]
        plan = plan_rows(lengths, self.length) if self.packing else [[i] for i in range(len(examples))]
        width = {id(row): padded_width(sum(lengths[i] for i in row)) for row in plan}
        batches: list[list[list[int]]] = []
        widest = 0
        for row in sorted(plan, key=lambda row: -width[id(row)]):
            if not batches or (len(batches[-1]) + 1) * widest > self.tokens_per_forward:
                batches.append([])
                widest = width[id(row)]
            batches[-1].append([examples[i] for i in row])
        return batches

    def _pack(self, rows: list[list[int]]) -> Packed:
        return pack_rows([[(i, self.encoded[i]) for i in row] for row in rows], self.pad_id, padded=True)

    def _filler(self, example: int) -> Packed:
        """One row that teaches nothing: ranks must run equally many passes for their collectives to meet."""
        encoded = Encoded(self.encoded[example].input_ids[:2], [False, False])
        return pack_rows([[(example, encoded)]], self.pad_id)._replace(placed=[])

    def _supervised(self, example: int) -> int:
        if isinstance(self.encoded, EncodedSet):
            return int(self.encoded.supervised[example])
        return sum(self.encoded[example].loss_mask[1:])
