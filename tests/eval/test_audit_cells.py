"""Cells cover everything once, with the probabilities that brute force gives, and none is too small to count in."""

import itertools

import numpy as np
import pytest
import torch

from draftsmith.decode.loop import plain_generate
from draftsmith.decode.sampling import Sampling, probabilities
from draftsmith.eval.audit_cells import ENDED, IMPOSSIBLE, ExactCells, frequent_cells
from draftsmith.models.target import as_target

PROMPT = [1, 4, 2]


def by_brute_force(model, sampling, count):
    """Probability of every sequence of `count` tokens."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, weight in joint.items():
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0, -1]
            for token, prob in enumerate(probabilities(logits, sampling).double().tolist()):
                longer[(*tokens, token)] = weight * prob
        joint = longer
    return joint


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_p=0.9), Sampling(1.0, top_k=3)])
@pytest.mark.parametrize(("samples", "joint_tokens"), [(50, 1), (50, 2), (3000, 3)])
def test_enumerated_cells_have_the_exact_probabilities(tiny_llama, sampling, samples, joint_tokens):
    model = tiny_llama(vocab_size=6, layers=1, hidden=16, seed=5)
    cells = ExactCells(as_target(model), PROMPT, sampling, joint_tokens, samples, ())
    assert cells.complete
    joint = by_brute_force(model, sampling, joint_tokens)
    masses = np.zeros(len(cells.probs))
    for tokens, weight in joint.items():
        counts, outside = cells.count([tokens], rounding=0.0)
        assert bool(outside) == (weight == 0), "the support is the target's"
        if outside:
            assert outside[0][2] == IMPOSSIBLE
        else:
            masses += weight * counts.counts
    assert masses == pytest.approx(cells.probs, abs=1e-6)
    assert len(cells.probs) == 1 or samples * cells.probs.min() >= 5 * (1 - 1e-6)


def test_unlikely_starts_are_pooled_where_outcomes_are_many(tiny_llama):
    model = tiny_llama(vocab_size=300, layers=1, hidden=16, seed=5)
    cells = ExactCells(as_target(model), PROMPT, Sampling(1.0), 2, 1000, ())
    assert not cells.complete
    assert 1000 * cells.probs.min() >= 5 * (1 - 1e-6)
    assert cells.probs.sum() == pytest.approx(1.0)
    out = plain_generate(model, torch.tensor([PROMPT] * 1000), max_new_tokens=2, temperature=1.0, eos_token_id=[])
    counts, outside = cells.count(out.tokens[:, 3:].tolist(), rounding=0.0)
    assert not outside
    assert counts.counts.sum() == 1000
    assert np.abs(counts.counts / 1000 - cells.probs).max() < 0.06


def test_an_end_of_sequence_token_ends_a_cell_and_nothing_else_does(tiny_llama):
    model = tiny_llama(vocab_size=6, layers=1, hidden=16, seed=5)
    cells = ExactCells(as_target(model), PROMPT, Sampling(1.0), 2, 500, eos=[3])
    counts, outside = cells.count([[3], [3], [0]], rounding=0.0)
    assert counts.counts.sum() == 2
    assert outside == [([0], 1, ENDED)]
    joint = by_brute_force(model, Sampling(1.0), 1)
    assert cells.probs[counts.counts.argmax()] >= joint[(3,)] * (1 - 1e-6)


def test_rounding_decides_at_the_edge_of_a_filter_only(tiny_llama):
    model = tiny_llama(vocab_size=6, layers=1, hidden=16, seed=5)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    order = logits.argsort(descending=True).tolist()
    gap = float(logits[order[1]] - logits[order[2]])
    cells = ExactCells(as_target(model), PROMPT, Sampling(1.0, top_k=2), 1, 500, ())
    assert cells.count([[order[2]]], rounding=0.9 * gap)[1][0][2] == IMPOSSIBLE
    assert not cells.count([[order[2]]], rounding=1.1 * gap)[1]
    assert cells.count([[6], [-1]], rounding=1e9)[1] == [([6], 0, IMPOSSIBLE), ([-1], 0, IMPOSSIBLE)]


def test_frequent_cells_keep_what_is_frequent_and_the_rest_of_every_frequent_start():
    first = [(0, 0)] * 6 + [(0, 1)] * 4 + [(0, 2)] * 4 + [(1, 0)] * 2 + [(2,)] * 5
    second = [(0, 0)] * 7 + [(0, 1)] * 3 + [(0, 3)] * 3 + [(1, 1)] * 3 + [(2,)] * 5
    pair = frequent_cells(first, second)
    # Kept: (0, 0); the rest of (0,); the ended (2,); what begins otherwise.
    assert sorted(zip(pair.first.tolist(), pair.second.tolist(), strict=True)) == [(2, 3), (5, 5), (6, 7), (8, 6)]
    assert pair.first.sum() == pair.second.sum() == 21


def test_frequent_cells_cover_every_sample():
    rng = np.random.default_rng(0)
    first, second = (rng.zipf(1.5, size=(400, 2)).clip(max=50).tolist() for _ in range(2))
    pair = frequent_cells(first, second)
    assert pair.first.sum() == pair.second.sum() == 400
    frequent = {key for key in itertools.product(range(1, 51), repeat=2) if (first + second).count(list(key)) >= 10}
    assert len(pair.first) >= len(frequent)
