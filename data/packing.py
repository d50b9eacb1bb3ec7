"""Packing examples into rows: several documents side by side that never see each other."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import BadInput
from .chats import Encoded

_WIDTHS = 32  # widths of rows in training are multiples of this


class Placed(NamedTuple):
    """Where an example went: ``row``, first position ``start``, number of tokens ``length``."""

    example: int
    row: int
    start: int
    length: int


class Packed(NamedTuple):
    """Rows of documents. Padding has segment -1, position 0 and weight 0."""

    input_ids: Int[Tensor, "rows length"]
    position_ids: Int[Tensor, "rows length"]  # counts from 0 in every document
    segment_ids: Int[Tensor, "rows length"]  # 0, 1, … along a row
    loss_mask: Bool[Tensor, "rows length"]  # True: a supervised label, predicted from the position before
    weights: Float[Tensor, "rows length"]  # 1 where loss_mask is True, else 0
    placed: list[Placed]  # in row order; ``example`` as given to `pack`

    @property
    def num_supervised(self) -> int:
        """Supervised labels in these rows."""
        return int(self.loss_mask.sum())


def plan_rows(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Which examples share a row of `length` tokens: first fit, longest first; deterministic.

    Raises BadInput when an example is longer than a row.
    """
    rows: list[list[int]] = []
    space: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size = int(lengths[index])
        if size > length:
            raise BadInput(f"an example of {size} tokens does not fit into rows of {length}")
        row = next((r for r, free in enumerate(space) if free >= size), None)
        if row is None:
            rows.append([])
            space.append(length)
            row = len(rows) - 1
        rows[row].append(index)
        space[row] -= size
    return rows


def padded_width(width: int) -> int:
    """The width that rows of `width` tokens are given in training.

    Products of few different shapes: on a CPU a shape that is new costs the making of a kernel, several times the product
    itself; on a GPU tensor cores want multiples of 8.
    """
    return -(-width // _WIDTHS) * _WIDTHS


def pack_rows(rows: Sequence[Sequence[tuple[int, Encoded]]], pad_id: int = 0, padded: bool = False) -> Packed:
    """Lay out (example number, encoded) pairs as given, rows as wide as the fullest one, or its :func:`padded_width`."""
    width = max(sum(len(encoded.input_ids) for _, encoded in row) for row in rows)
    shape = (len(rows), padded_width(width) if padded else width)
    input_ids = torch.full(shape, pad_id, dtype=torch.long)
    position_ids = torch.zeros(shape, dtype=torch.long)
    segment_ids = torch.full(shape, -1, dtype=torch.long)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    placed = []
    for number, row in enumerate(rows):
        start = 0
        for segment, (example, encoded) in enumerate(row):
            size = len(encoded.input_ids)
            here = (number, slice(start, start + size))
            input_ids[here] = torch.tensor(encoded.input_ids, dtype=torch.long)
            position_ids[here] = torch.arange(size)
            segment_ids[here] = segment
            # The first token of a document has nothing before it: the position before is another document's.
            loss_mask[here] = torch.tensor([False, *encoded.loss_mask[1:]])
            placed.append(Placed(example, number, start, size))
            start += size
    return Packed(input_ids, position_ids, segment_ids, loss_mask, loss_mask.float(), placed)


def pack(
    examples: Sequence[Encoded],
    length: int,
    numbers: Sequence[int] | None = None,
    packing: bool = True,
    pad_id: int = 0,
) -> Packed:
    """Pack `examples` into as few rows of at most `length` tokens as first fit finds.

    `numbers` names the examples in ``placed`` (default 0, 1, …). With ``packing=False`` every example has a row of its
    own. Raises BadInput for an empty list and for an example longer than `length`.
    """
    if not examples:
        raise BadInput("there is no example to pack")
    numbers = range(len(examples)) if numbers is None else numbers
    plan = plan_rows([len(encoded.input_ids) for encoded in examples], length)
    if not packing:
        plan = [[index] for index in sorted(range(len(examples)))]
    return pack_rows([[(numbers[index], examples[index]) for index in row] for row in plan], pad_id)
