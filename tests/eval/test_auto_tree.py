"""`--tree auto`: ranks are counted, shapes of every depth are weighed, and the clock decides among the best of them."""

import pytest
import torch

from draftsmith.decode.costs import StepCosts
from draftsmith.decode.draft_model import DraftModel
from draftsmith.decode.loop import plain_generate
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.tree import as_layout
from draftsmith.errors import BadInput
from draftsmith.eval import auto_tree
from draftsmith.eval.alpha import Answer
from draftsmith.models.target import as_target

RANKS = torch.tensor([0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.0, 0.0])


@pytest.fixture
def chosen(monkeypatch, tiny_llama):
    """`chosen(seconds, depth)`: the tree where a step with n nodes and d levels takes ``seconds(n, d)``; plain: 1."""
    monkeypatch.setattr(auto_tree, "rank_acceptance", lambda *arguments: RANKS)
    verification = dict.fromkeys(range(1, 26), 1.0)
    monkeypatch.setattr(auto_tree, "measure_costs", lambda *arguments, **options: StepCosts(verification, {1: 0.01}))

    def choose(seconds, depth):
        def step_seconds(target, drafter, shapes, prompt, sampling):
            return [1.0 if shape is None else seconds(len(shape.parents), shape.depth) for shape in shapes]

        monkeypatch.setattr(auto_tree, "step_seconds", step_seconds)
        target = as_target(tiny_llama())
        return auto_tree.choose_tree(
            target, DraftModel(tiny_llama(), 64), [Answer([1, 2, 3], [4])], Sampling(0.0), depth
        )

    return choose


def test_the_clock_decides_between_depths(chosen):
    deep, words = chosen(lambda nodes, depth: 1.0, 4)
    assert deep.depth == 4
    assert "4 deep" in words
    flat, words = chosen(lambda nodes, depth: 1.0 + depth, 4)
    assert flat.depth == 1
    assert f"{len(flat.parents)} nodes, 1 deep, expected 1.88 tokens a pass, 0.94 × plain decoding" == words


def test_no_tree_is_deeper_than_asked(chosen):
    assert chosen(lambda nodes, depth: 1.0, 2)[0].depth == 2


def test_steps_are_timed_with_every_shape(tiny_llama):
    """Also where the prompt fills the context almost."""
    target = as_target(tiny_llama(layers=3, max_position_embeddings=64))
    shapes = [None, as_layout([1, 1]), as_layout([3, 2])]
    for length in (5, 63):
        times = auto_tree.step_seconds(target, DraftModel(tiny_llama(), 64), shapes, [7] * length, Sampling(0.0))
        assert len(times) == 3
        assert all(0 < seconds < 60 for seconds in times)


def test_a_drafter_that_is_always_right_first_gets_a_chain(tiny_llama):
    model = tiny_llama()
    target = as_target(model)
    prompt = [5, 9, 2]
    answer = plain_generate(target, torch.tensor([prompt]), max_new_tokens=20, eos_token_id=[]).tokens[0, 3:].tolist()
    layout, words = auto_tree.choose_tree(
        target, DraftModel(tiny_llama(), 64), [Answer(prompt, answer)], Sampling(0.0), 3
    )
    assert set(layout.ranks) == {0}
    assert f"expected {layout.depth + 1:.2f} tokens a pass" in words


def test_a_drafter_without_branches_is_refused(tiny_llama):
    with pytest.raises(BadInput, match="no branches"):
        auto_tree.choose_tree(as_target(tiny_llama()), object(), [Answer([1], [2])], Sampling(0.0), 2)


def test_of_shapes_that_are_as_fast_the_one_of_most_tokens_is_taken():
    assert auto_tree._fastest([1.0, 0.98, 0.99, 0.9], [1.5, 1.9, 1.8, 2.5]) == 1
    assert auto_tree._fastest([1.0, 0.9], [1.5, 1.9]) == 0
