"""Knowing a target again by some of its weights."""

import torch

from draftsmith.models.target import as_target, without_contents
from draftsmith.models.weights_sample import remember_weights, same_weights, weights_hash, weights_sample


def test_a_sample_tells_models_apart_but_not_dtypes(tiny_llama):
    sample = weights_sample(as_target(tiny_llama()))
    assert len(sample or []) == 64
    assert same_weights(sample, weights_sample(as_target(tiny_llama().bfloat16())))
    assert not same_weights(sample, weights_sample(as_target(tiny_llama(seed=1))))
    assert same_weights(sample, None), "nothing is known"
    hashes = {weights_hash(as_target(model)) for model in (tiny_llama(), tiny_llama(seed=1), tiny_llama().bfloat16())}
    assert len(hashes) == 3
    assert weights_hash(as_target(tiny_llama())) in hashes


def test_a_target_that_is_going_to_change_is_known_by_what_it_was(tiny_llama):
    target = as_target(tiny_llama())
    before = weights_sample(target)
    remember_weights(target)
    with torch.no_grad():
        next(target.model.parameters()).zero_()
    assert weights_sample(target) == before


def test_a_target_without_contents_has_no_sample(tiny_llama):
    empty = without_contents(as_target(tiny_llama()))
    assert weights_sample(empty) is None
    assert weights_hash(empty) is None
