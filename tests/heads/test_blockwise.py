"""Blockwise heads: one layer for all, and the target's own last layers trained along where asked for."""

import pytest
import torch

from draftsmith import load_drafter, speculative_generate
from draftsmith.decode.loop import plain_generate
from draftsmith.errors import BadInput
from draftsmith.heads.make import save_heads
from draftsmith.models.target import as_target
from draftsmith.recipe import BlockwiseDrafter


def test_heads_share_the_inner_layer_and_have_their_own_rows_of_the_second(tiny_llama, lab):
    target = as_target(tiny_llama())
    made = lab.prepared(BlockwiseDrafter(num_heads=3, inner_size=16), target)
    trunk = made.objective.heads.trunk
    assert tuple(trunk.input.weight.shape) == (3 * 16, 32)
    assert tuple(trunk.output.weight.shape) == (3 * 32, 3 * 16)
    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        trunk.output.weight[32:64] = 0.1
    states = [trunk(head, trunk.prepare(hidden), torch.zeros(4, head + 1, dtype=torch.long)) for head in range(3)]
    assert torch.equal(states[0], hidden)
    assert not torch.equal(states[1], hidden)
    assert torch.equal(states[2], hidden)


def test_the_inner_size_is_the_targets_where_none_is_given(tiny_llama, lab):
    made = lab.prepared(BlockwiseDrafter(num_heads=2), as_target(tiny_llama()))
    assert tuple(made.objective.heads.trunk.input.weight.shape) == (64, 32)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3", "tiny_gpt2"])
def test_trained_layers_change_the_target_and_travel_with_the_drafter(family, request, lab, tmp_path):
    make = request.getfixturevalue(family)
    target, untouched = as_target(make(layers=3, seed=1)), as_target(make(layers=3, seed=1))
    before = [parameter.clone() for parameter in target.model.parameters()]
    section = BlockwiseDrafter(num_heads=2, inner_size=16, train_layers=1, target_weight=0.1)
    made = lab.prepared(section, target)
    rows = lab.greedy_rows(untouched, 8, 16)
    batch = lab.batch_of(rows, length=38)
    lab.fit(made, batch, steps=6)
    ids = torch.tensor([rows[0]])
    with torch.no_grad():
        changed, original = target.model(input_ids=ids).logits, untouched.model(input_ids=ids).logits
        assert not torch.allclose(changed, original, atol=1e-2)
        with made.objective.adapted.original():
            assert torch.equal(target.model(input_ids=ids).logits, original), "to the bit"
    with made.objective.adapted.original():
        assert all(torch.equal(a, b) for a, b in zip(before, target.model.parameters(), strict=True))
    save_heads(section, made, target, tmp_path / "final")
    drafter = load_drafter(tmp_path / "final", untouched)
    torch.testing.assert_close(untouched.model(input_ids=ids).logits, changed)
    settings = {"max_new_tokens": 16, "eos_token_id": []}
    out = speculative_generate(untouched, drafter, ids[:, :4], num_speculative_tokens=2, tree=[2, 1], **settings)
    assert out.tokens.tolist() == plain_generate(untouched, ids[:, :4], **settings).tokens.tolist()


def test_a_target_has_only_so_many_layers(tiny_llama, lab):
    with pytest.raises(BadInput, match=r"drafter\.train_layers: 3 layers, the target has 2"):
        lab.prepared(BlockwiseDrafter(train_layers=3), as_target(tiny_llama()))
