"""Trees grown by a draft model's confidence: lossless, reached by name, and worth more than a chain of their depth."""

from typing import Any

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.decode.draft_model import DraftModel
from draftsmith.decode.dynamic_tree import DynamicTree
from draftsmith.decode.loop import plain_generate
from draftsmith.decode.sampling import Sampling
from draftsmith.errors import BadInput
from draftsmith.models.draft_lm import DraftLM, cut_vocabulary

TREE = "dynamic:num_nodes=6,width=2"


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3", "tiny_gpt2"])
def test_greedy_output_is_plain_greedy_output(family: str, cut: bool, request: Any, reference: Any) -> None:
    made = request.getfixturevalue(family)
    target, model = made(seed=1), reference.disturbed(made(seed=1))
    drafter = DraftModel(cut_vocabulary(model, torch.arange(16, 64)) if cut else DraftLM(model), 64)
    ids, mask = reference.batch_of([reference.prompt_of(length, length) for length in (9, 1, 5)])
    settings: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": []}
    plain = plain_generate(target, ids, mask, **settings)
    out = speculative_generate(target, drafter, ids, mask, num_speculative_tokens=3, tree=TREE, **settings)
    assert out.tokens.tolist() == plain.tokens.tolist()
    assert out.stats.pooled.drafted_nodes > out.stats.drafted > 0
    assert out.stats.accepted > 0


def test_sampled_output_has_the_targets_joint_distribution(tiny_llama: Any, reference: Any) -> None:
    target, prompt = tiny_llama(vocab_size=5, layers=1, seed=5), [1, 4, 2]
    out = speculative_generate(
        target,
        reference.disturbed(tiny_llama(vocab_size=5, layers=1, seed=5), 0.2),
        torch.tensor([prompt] * 1500),
        max_new_tokens=3,
        num_speculative_tokens=2,
        tree=DynamicTree(num_nodes=4, width=2),
        eos_token_id=[],
        temperature=0.9,
        top_p=0.95,
    )
    assert out.stats.accepted > 0
    exact = reference.joint_distribution(target, prompt, 3, Sampling(0.9, top_p=0.95))
    reference.check_joint(out.tokens[:, len(prompt) :].tolist(), exact)


def test_more_is_accepted_than_of_a_chain_and_the_next_call_forgets_the_tree(tiny_llama: Any, reference: Any) -> None:
    target = tiny_llama(seed=1)
    drafter = DraftModel(reference.disturbed(tiny_llama(seed=1), 0.1), 64)
    ids, mask = reference.batch_of([reference.prompt_of(6, seed) for seed in range(6)])

    def tau(tree: Any) -> float:
        out = speculative_generate(
            target, drafter, ids, mask, max_new_tokens=24, num_speculative_tokens=3, tree=tree, eos_token_id=[]
        )
        assert out.stats.block_efficiency is not None
        return out.stats.block_efficiency

    chain = tau(None)
    assert tau("dynamic:num_nodes=12") > chain
    assert tau(None) == chain


def test_what_cannot_grow_is_one_line(tiny_llama: Any) -> None:
    ids = torch.tensor([[1, 2, 3]])
    for drafter, tree, says in (
        ("prompt_lookup", "dynamic", "no trees by its confidence"),
        (tiny_llama(), "dynamik", "did you mean 'dynamic'"),
        (tiny_llama(), "dynamic:nodes=3", "it takes: num_nodes=NUMBER, width=NUMBER"),
        (tiny_llama(), "dynamic:width=0", "width is 0"),
    ):
        with pytest.raises(BadInput, match=says):
            speculative_generate(tiny_llama(), drafter, ids, tree=tree)
