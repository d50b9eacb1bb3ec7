"""A key-value cache whose rows have lengths of their own and that rolls back by forgetting.

transformers' caches append the same number of columns to every row and shrink by copying. Speculative decoding accepts a
different number of tokens in every row, so here each row keeps its length, writes at its own end, and rolls back by
lowering that length: what lies beyond is masked until it is overwritten. Sliding-window layers keep all columns (the
window is in the mask), which makes their rollback exact too.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

_GROWTH = 64  # columns; the buffer grows by half its size, in multiples of this


class _Columns:
    """Where the coming forward pass writes, shared by all layers."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None  # [fed rows] indices into the batch; None: all rows
        self.columns: Tensor | None = None  # [fed rows, fed tokens]; None: every row writes at `start`
        self.start = 0
        self.width = 0  # columns the pass sees


class RaggedLayer(CacheLayerMixin):
    """One layer's keys and values, ``[batch, capacity, heads, head_dim]`` so that one token of one row is contiguous."""

    is_sliding = False
    is_croppable = False

    def __init__(self, where: _Columns, batch_size: int, dtype: torch.dtype):
        super().__init__()
        self.where = where
        self.batch_size = batch_size
        self.dtype = dtype

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            states.new_zeros(
                self.batch_size, _rounded(self.where.width), states.shape[1], states.shape[3], dtype=self.dtype
            )
            for states in (key_states, value_states)
        )
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write ``[fed rows, heads, fed tokens, head_dim]``; return the columns that the pass sees, in the same layout."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._written(self.keys, key_states)
        self.values = self._written(self.values, value_states)
        return self._seen(self.keys), self._seen(self.values)

    def _written(self, buffer: Tensor | None, states: Tensor) -> Tensor:
        assert buffer is not None
        where, states = self.where, states.transpose(1, 2)
        if where.width > buffer.shape[1]:
            grown = buffer.new_zeros(buffer.shape[0], _rounded(where.width * 3 // 2), *buffer.shape[2:])
            grown[:, : buffer.shape[1]] = buffer
            buffer = grown
        if where.columns is None:
            buffer[:, where.start : where.start + states.shape[1]] = states
        else:
            rows = torch.arange(buffer.shape[0], device=buffer.device) if where.rows is None else where.rows
            buffer[rows[:, None], where.columns] = states.to(buffer.dtype)
        return buffer

    def _seen(self, buffer: Tensor) -> Tensor:
        seen = buffer[:, : self.where.width]
        if self.where.rows is not None:
            seen = seen.index_select(0, self.where.rows)
        return seen.transpose(1, 2)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy column ``source[row, i]`` to ``destination[row, i]`` in every row."""
        rows = torch.arange(self.batch_size, device=source.device)[:, None]
        for buffer in (self.keys, self.values):
            assert buffer is not None
            buffer[rows, destination] = buffer[rows, source]

    def select_rows(self, rows: Tensor) -> None:
        """Keep only these rows of the batch, in this order."""
        self.batch_size = rows.shape[0]
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def repeat_row(self, row: int, width: int) -> None:
        """Copy the first `width` columns of `row` to every row."""
        for buffer in (self.keys, self.values):
            assert buffer is not None
            buffer[:, :width] = buffer[row, :width].clone()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.where.width, 0

    def get_seq_length(self) -> int:
        return self.where.start

    def get_max_length(self) -> int:
        return -1


class RaggedCache(Cache):
    """Keys and values of every layer for rows of different lengths. Lengths are the caller's (see ``CachedLM``)."""

    def __init__(self, num_layers: int, batch_size: int, dtype: torch.dtype):
        """`dtype`: of the keys and values that are kept, whatever the model computes them in."""
        self.where = _Columns()
        super().__init__(layers=[RaggedLayer(self.where, batch_size, dtype) for _ in range(num_layers)])

    def place(
        self, columns: Int[Tensor, "rows fed"] | None, start: int, width: int, rows: Int[Tensor, "rows"] | None = None
    ) -> None:
        """Say where the coming pass writes: at `columns`, or (None) at `start` in every row; it sees `width` columns."""
        self.where.columns, self.where.start, self.where.width, self.where.rows = columns, start, width, rows

    def move(self, source: Int[Tensor, "batch n"], destination: Int[Tensor, "batch n"]) -> None:
        """Copy columns within their rows, in every layer."""
        for layer in self.layers:
            if layer.is_initialized:  # type: ignore[union-attr]
                layer.move(source, destination)  # type: ignore[union-attr]

    def select_rows(self, rows: Int[Tensor, "kept"]) -> None:
        """Keep only these rows of the batch, in this order."""
        for layer in self.layers:
            layer.select_rows(rows)  # type: ignore[union-attr]

    def repeat_row(self, row: int, width: int) -> None:
        """Copy the first `width` columns of `row` to every row, in every layer."""
        for layer in self.layers:
            if layer.is_initialized:  # type: ignore[union-attr]
                layer.repeat_row(row, width)  # type: ignore[union-attr]

    def visible(self, layer: int, row: int, length: int) -> tuple[Float[Tensor, "heads length dim"], Tensor]:
        """Keys and values of one row's first `length` columns (for tests and inspection)."""
        cached = self.layers[layer]
        return cached.keys[row, :length].transpose(0, 1), cached.values[row, :length].transpose(0, 1)  # type: ignore[index]


def _rounded(width: int) -> int:
    return -(-width // _GROWTH) * _GROWTH
