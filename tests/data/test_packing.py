"""Packing: nothing lost, nothing mixed, and documents that do not see each other."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.chats import Encoded
from draftsmith.data.packing import pack, plan_rows
from draftsmith.distill.batch import distill_batch
from draftsmith.errors import BadInput


def encoded(length: int, first: int = 1) -> Encoded:
    ids = [(first + i) % 60 + 1 for i in range(length)]
    return Encoded(ids, [i >= length // 2 for i in range(length)])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 20), min_size=1, max_size=30), st.booleans())
def test_every_token_is_placed_once(lengths, packing):
    examples = [encoded(length, 7 * i) for i, length in enumerate(lengths)]
    packed = pack(examples, 20, packing=packing)
    assert sorted(place.example for place in packed.placed) == list(range(len(lengths)))
    for example, row, start, length in packed.placed:
        here = (row, slice(start, start + length))
        assert packed.input_ids[here].tolist() == examples[example].input_ids
        assert packed.position_ids[here].tolist() == list(range(length))
        assert packed.loss_mask[here].tolist() == [False, *examples[example].loss_mask[1:]]
        assert len(packed.segment_ids[here].unique()) == 1
    assert (packed.segment_ids >= 0).sum() == sum(lengths)
    assert torch.equal(packed.weights, packed.loss_mask.float())
    assert packed.num_supervised == sum(sum(e.loss_mask[1:]) for e in examples)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_rows_are_filled_and_never_overfull(lengths):
    rows = plan_rows(lengths, 50)
    loads = sorted(sum(lengths[i] for i in row) for row in rows)
    assert loads[-1] <= 50
    assert len(loads) < 2 or loads[0] + loads[1] > 50  # else first fit would have joined them


def test_too_long_and_empty_are_refused():
    with pytest.raises(BadInput, match="21 tokens does not fit into rows of 20"):
        pack([encoded(21)], 20)
    with pytest.raises(BadInput, match="no example"):
        pack([], 20)


def masks(packed, model) -> Any:
    return distill_batch(packed, torch.device("cpu")).masks(model.config, "sdpa", model.dtype)


def test_mask_is_causal_within_documents_only(tiny_llama):
    packed = pack([encoded(5), encoded(2), encoded(2)], 5)
    row = next(place.row for place in packed.placed if place.example == 1)
    assert packed.segment_ids[row].tolist() == [0, 0, 1, 1, -1]
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    assert masks(packed, tiny_llama())[row, 0].int().tolist() == expected


def test_packed_logits_are_the_unpacked_ones(tiny_llama):
    model = tiny_llama()
    examples = [encoded(length, 5 * length) for length in (9, 6, 4, 12)]
    packed = pack(examples, 19)
    assert packed.input_ids.shape[0] == 2
    inputs = {"input_ids": packed.input_ids, "position_ids": packed.position_ids}
    with torch.no_grad():
        logits = model(**inputs, attention_mask=masks(packed, model)).logits
        leaking = model(**inputs, attention_mask=torch.ones_like(packed.input_ids)).logits
        worst_leak = 0.0
        for example, row, start, length in packed.placed:
            alone = model(torch.tensor([examples[example].input_ids])).logits[0]
            torch.testing.assert_close(logits[row, start : start + length], alone, atol=1e-5, rtol=1e-5)
            worst_leak = max(worst_leak, (leaking[row, start : start + length] - alone).abs().max().item())
    assert worst_leak > 1e-2, "documents would not be told apart without the mask: the test shows nothing"
