"""Knowing a target again by some of its weights."""

import torch

from draftsmith.models.target import as_target, without_contents
from draftsmith.models.weights_sample import remember_weights, same_weights, weights_hash, weights_sample


def test_a_sample_tells_models_apart_but_not_dtypes(tiny_llama):
    sample = weights_sample(as_target(tiny_llama()))
    assert sample is not None
    assert len(sample) == 2 * 64, "weights, each with the size of those beside it"
    assert same_weights(sample, weights_sample(as_target(tiny_llama().bfloat16())))
    assert not same_weights(sample, weights_sample(as_target(tiny_llama(seed=1))))
    assert same_weights(sample, None), "nothing is known"
    hashes = {weights_hash(as_target(model)) for model in (tiny_llama(), tiny_llama(seed=1), tiny_llama().bfloat16())}
    assert len(hashes) == 3
    assert weights_hash(as_target(tiny_llama())) in hashes


def test_a_copy_with_one_matrix_changed_a_little_is_another_model(tiny_llama):
    """As a merged low-rank adapter leaves it: most weights the same, some of one kind a few percent off."""
    sample = weights_sample(as_target(tiny_llama()))
    for name, parameter in tiny_llama().named_parameters():
        if parameter.ndim < 2:
            continue
        tuned = tiny_llama()
        matrix = tuned.get_parameter(name)
        with torch.no_grad():
            matrix += 0.1 * matrix.square().mean().sqrt() * torch.randn_like(matrix).sign()
        assert not same_weights(sample, weights_sample(as_target(tuned))), name


def test_a_copy_in_8_bit_blocks_is_the_same_model(tiny_llama):
    rounded = tiny_llama()
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.ndim >= 2:
                blocks = parameter.reshape(-1, 16)
                step = blocks.abs().amax(1, keepdim=True) / 127
                parameter.copy_(((blocks / step).round() * step).view_as(parameter))
    assert same_weights(weights_sample(as_target(tiny_llama())), weights_sample(as_target(rounded)))


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
