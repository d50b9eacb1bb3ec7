"""Tokenizer comparison and the choice of kept ids."""

import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.errors import BadInput
from draftsmith.models.vocabulary import (
    check_same_tokenizer,
    choose_vocabulary,
    count_tokens,
    d2t,
    t2d,
    tokenizer_hash,
)


def changed(tokenizer, change):
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    change(description)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(description)))


def test_hash_ignores_template_and_padding_but_no_part_of_the_tokenization(tokenizer_factory, tmp_path):
    tokenizer = tokenizer_factory()
    expected = tokenizer_hash(tokenizer)
    assert tokenizer_hash(tokenizer_factory(chat_template=None)) == expected
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == expected
    padded = copy.deepcopy(tokenizer)
    padded.backend_tokenizer.enable_padding(length=7)
    assert tokenizer_hash(padded) == expected
    others = [
        tokenizer_factory(texts=["another text altogether, another text"] * 5),
        changed(tokenizer, lambda d: d["model"]["merges"].reverse()),
        changed(tokenizer, lambda d: d.update(normalizer={"type": "NFC"})),
        changed(tokenizer, lambda d: d.update(pre_tokenizer=None)),
    ]
    extended = tokenizer_factory()
    extended.add_tokens(["<tool>"])
    hashes = [tokenizer_hash(other) for other in [*others, extended]]
    assert len({expected, *hashes}) == 6


def test_differences_are_named(tokenizer_factory):
    tokenizer = tokenizer_factory()
    check_same_tokenizer(tokenizer, tokenizer_factory(chat_template=None))
    extended = tokenizer_factory()
    extended.add_tokens(["<tool>"])
    with pytest.raises(BadInput, match="1 of 321 ids differ, the first is 320: target none, drafter '<tool>'"):
        check_same_tokenizer(tokenizer, extended)
    with pytest.raises(BadInput, match="target '<tool>', drafter none"):
        check_same_tokenizer(extended, tokenizer)

    def swap(description):
        merges = description["model"]["merges"]
        merges[3], merges[4] = merges[4], merges[3]

    with pytest.raises(BadInput, match="other merges from number 3 on"):
        check_same_tokenizer(tokenizer, changed(tokenizer, swap))
    split_digits = copy.deepcopy(tokenizer)
    split_digits.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    check_same_tokenizer(tokenizer, split_digits)  # the ids mean the same


@given(st.data())
def test_kept_ids_are_special_ones_then_the_most_frequent(data):
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=30)))
    always = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=3))
    size = data.draw(st.integers(max(1, len(always)), max(1, len(always), len(counts))))
    if size > len(counts):
        return
    kept = choose_vocabulary(counts, size, always=always)
    assert len(kept) == size
    assert (kept[1:] > kept[:-1]).all()
    assert always <= set(kept.tolist())
    chosen = set(kept.tolist()) - always
    left = set(range(len(counts))) - set(kept.tolist())
    for inside in chosen:
        for outside in left:
            assert (-counts[inside], inside) < (-counts[outside], outside)
    draft_ids = torch.arange(size)
    assert torch.equal(draft_ids + d2t(kept), kept)
    assert torch.equal(t2d(kept, len(counts)).nonzero().flatten(), kept)


def test_sizes_that_cannot_be(tiny_tokenizer):
    counts = count_tokens([[1, 2, 2], [], [5]], 8)
    assert counts.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert choose_vocabulary(counts, 4, always=[7, 99]).tolist() == [1, 2, 5, 7]
    with pytest.raises(BadInput, match="9 is more than the 8 ids"):
        choose_vocabulary(counts, 9)
    with pytest.raises(BadInput, match="less than the 3 special ids"):
        choose_vocabulary(counts, 2, always=[0, 1, 2])
