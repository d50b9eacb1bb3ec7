"""Expected counts of ids: the target's probabilities, summed, and the cut vocabulary chosen by them."""

import pytest
import torch

from draftsmith.data.chats import Encoded
from draftsmith.data.encoded_set import EncodedSet
from draftsmith.distill.id_frequencies import expected_counts, expected_counts_in
from draftsmith.distill.teacher_cache import cache_teacher
from draftsmith.heads.build import kept_ids
from draftsmith.models.target import as_target


@pytest.fixture
def written(tiny_llama, tmp_path):
    """A target, three examples and its cached last hidden states at their labels."""
    target = as_target(tiny_llama(layers=2))
    generator = torch.Generator().manual_seed(0)
    items = []
    for length in (9, 6, 12):
        ids = torch.randint(target.vocab_size, (length,), generator=generator).tolist()
        items.append(Encoded(ids, [False] * 3 + [True] * (length - 3)))
    encoded = EncodedSet.collect(enumerate(items))
    return target, encoded, cache_teacher(target, encoded, "hidden", 0, tmp_path / "hidden", "data")


def probabilities_at_labels(target, encoded):
    """``[labels, vocab]`` by plain passes over one example after the other."""
    rows = []
    for item in encoded:
        logits = target.model(input_ids=torch.tensor([item.input_ids])).logits[0, :-1]
        rows.append(logits[torch.tensor(item.loss_mask[1:])].softmax(-1).double())
    return torch.cat(rows)


@torch.no_grad()
def test_expected_counts_are_the_summed_probabilities(written):
    target, encoded, store = written
    counts = expected_counts(target, store)
    torch.testing.assert_close(counts, probabilities_at_labels(target, encoded).sum(0), rtol=5e-3, atol=1e-4)
    assert float(counts.sum()) == pytest.approx(encoded.num_supervised)


@torch.no_grad()
@pytest.mark.parametrize("max_rows", [9, 6, 5, 1])
def test_a_selection_is_even_over_all_answers(written, max_rows):
    target, encoded, store = written
    stride = -(-encoded.num_supervised // max_rows)
    expected = probabilities_at_labels(target, encoded)[::stride].sum(0)
    torch.testing.assert_close(expected_counts(target, store, max_rows), expected, rtol=5e-3, atol=1e-4)


def test_the_cut_vocabulary_keeps_the_most_expected_ids(written, tmp_path):
    target, encoded, store = written
    file = tmp_path / "counts.safetensors"
    encoded.expected_counts = expected_counts_in(file, target, store)
    best = encoded.expected_counts.argsort(descending=True)[:10]
    assert set(best.tolist()) <= set(kept_ids(10 + len(target.eos_token_ids), target, encoded).tolist())
    written_at = file.stat().st_mtime_ns
    assert torch.equal(expected_counts_in(file, target, store), encoded.expected_counts)
    assert file.stat().st_mtime_ns == written_at, "computed once"
