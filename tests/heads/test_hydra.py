"""Hydra: heads see the tokens before their own, on every path of a tree; prefix attention decodes as it trains."""

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.tree import as_layout
from draftsmith.heads import objective
from draftsmith.models.target import as_target
from draftsmith.recipe import HydraDrafter, MedusaDrafter


def trained(section, target, lab, steps=60):
    made = lab.prepared(section, target)
    lab.fit(made, lab.batch_of(lab.greedy_rows(target, 24, 24), length=54), steps=steps)
    return made


def test_head_0_sees_the_newest_token_and_later_heads_the_drafted_ones(tiny_llama, lab):
    made = trained(HydraDrafter(num_heads=3), as_target(tiny_llama()), lab, steps=5)
    heads = made.objective.heads
    prepared = heads.prepare(torch.randn(1, 32, generator=torch.Generator().manual_seed(1)))
    for head in range(3):
        tokens = torch.arange(3, 4 + head)[None]
        plain = heads.logits(head, prepared, tokens)
        for place in range(head + 1):
            other = tokens.clone()
            other[0, place] = 50
            assert not torch.allclose(heads.logits(head, prepared, other), plain), (head, place)


@pytest.mark.parametrize("prefix", [False, True])
def test_nodes_of_a_tree_are_what_their_heads_say_on_their_own_paths(prefix, tiny_llama, lab):
    """Every node's token is the one of its rank among the head's choices after the path to it."""
    target = as_target(tiny_llama(seed=3))
    made = trained(HydraDrafter(num_heads=3, prefix_attention=prefix), target, lab, steps=10)
    layout = as_layout([[0], [2], [0, 0], [0, 1], [2, 0], [2, 0, 1], [0, 1, 0]])
    drafter, heads = made.drafter, made.objective.heads
    ids = torch.tensor([[5, 9, 2, 7], [1, 3, 8, 8]])
    drafter.set_tree(layout)
    speculative_generate(target, drafter, ids, max_new_tokens=6, tree=layout.paths, eos_token_id=[])
    draft = drafter.propose(3, Sampling(0.0), [torch.Generator(), torch.Generator()])
    prepared = heads.prepare(drafter.hidden)
    for row in range(2):
        for node, path in enumerate(layout.paths):
            on_path = [int(drafter.newest[row, 0])]
            for depth in range(1, len(path)):
                on_path.append(int(draft.tokens[row, layout.paths.index(path[:depth])]))
            logits = heads.logits(len(path) - 1, prepared[row], torch.tensor(on_path))
            assert int(draft.tokens[row, node]) == int(logits.topk(path[-1] + 1).indices[-1])


def test_seeing_drafted_tokens_makes_later_heads_better(tiny_llama, lab):
    target = as_target(tiny_llama(seed=3))
    batch = lab.batch_of(lab.greedy_rows(target, 24, 24), length=54)
    hydra = lab.figures(trained(HydraDrafter(num_heads=3), target, lab), batch)
    medusa = lab.figures(trained(MedusaDrafter(num_heads=3), target, lab), batch)
    assert all(hydra[f"heads/{k}/top1"] > medusa[f"heads/{k}/top1"] + 0.1 for k in range(3))


def test_prefix_attention_decodes_with_the_states_it_was_trained_on(tiny_llama, lab):
    """The cached layer against a pass over everything, row by row of a ragged batch, after any number of steps."""
    target = as_target(tiny_llama(seed=3))
    made = trained(HydraDrafter(num_heads=3, prefix_attention=True), target, lab, steps=20)
    ids = torch.tensor([[5, 9, 2, 7, 1], [8, 0, 0, 0, 0], [4, 6, 6, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]])
    for new in (1, 2, 7, 12):
        settings = {"max_new_tokens": new, "num_speculative_tokens": 3, "tree": [2, 1], "eos_token_id": []}
        out = speculative_generate(target, made.drafter, ids, mask, **settings)
        for row, length in enumerate(out.lengths.tolist()):
            tokens = out.tokens[row : row + 1, :length]
            with torch.no_grad():
                states = target.model(input_ids=tokens, output_hidden_states=True).hidden_states[-1]
                seen = torch.ones(1, length, length, dtype=torch.bool).tril()
                expected = made.objective.heads.prefix(states, torch.arange(length)[None], seen)
            assert int(made.drafter.newest[row]) == int(tokens[0, -1])
            torch.testing.assert_close(made.drafter.hidden[row], expected[0, -2], rtol=1e-4, atol=1e-4)


def test_the_prefix_layer_changes_what_heads_can_learn(tiny_llama, lab):
    target = as_target(tiny_llama(seed=3))
    made = lab.prepared(HydraDrafter(num_heads=2, prefix_attention=True), target)
    batch = lab.batch_of(lab.greedy_rows(target, 4, 12), length=30)
    plain = lab.prepared(HydraDrafter(num_heads=2), target)
    assert float(made.objective(batch).loss_sum.detach()) == pytest.approx(
        float(plain.objective(batch).loss_sum.detach()), rel=1e-5
    )
    lab.fit(made, batch, steps=3)
    assert made.objective.heads.prefix.layer.self_attn.o_proj.weight.any()


def test_a_fitted_start_is_the_best_affine_guess(tiny_llama, lab):
    target = as_target(tiny_llama(seed=3))
    batch = lab.batch_of(lab.greedy_rows(target, 40, 24), length=54)
    made = lab.prepared(HydraDrafter(num_heads=2), target)
    before = lab.figures(made, batch)
    explained = made.objective.fit([batch, batch])
    after = lab.figures(made, batch)
    assert after["heads/0/loss"] < before["heads/0/loss"]
    assert after["heads/1/loss"] < before["heads/1/loss"]
    heads, trunk = made.objective.heads, made.objective.heads.trunk
    with torch.no_grad():
        original, _ = made.objective._read(batch)
        sources, labels = next(made.objective.pairs(batch))
        states = heads.states(0, original[sources], made.objective._seen(batch, sources, 0))
    missed = (original[labels] - states).square().sum()
    spread = (original[labels] - original[labels].mean(0)).square().sum()
    assert explained == pytest.approx(float(1 - missed / spread), abs=1e-3)
    assert 0 < explained < 1
    read = trunk.read(original[sources], made.objective._seen(batch, sources, 0))
    solved = torch.linalg.lstsq(torch.nn.functional.pad(read, (0, 1), value=1.0), original[labels]).solution
    best = (original[labels] - torch.nn.functional.pad(read, (0, 1), value=1.0) @ solved).square().sum()
    assert best <= missed < 1.2 * best + 0.05 * spread


@pytest.mark.parametrize("num_heads", [1, 3])
def test_a_start_is_solved_for_on_as_many_labels_as_its_widest_map_asks_for(num_heads, tiny_llama, lab, monkeypatch):
    """The last head reads one more embedding than it has heads before it, and needs labels for each of its inputs."""
    monkeypatch.setattr(objective, "_FITTED_LABELS", 1)
    target = as_target(tiny_llama(hidden=32))
    rows = lab.greedy_rows(target, 40, 24)
    batches = [lab.batch_of(rows[at : at + 1]) for at in range(len(rows))]
    read = []
    made = lab.prepared(HydraDrafter(num_heads=num_heads), target)
    made.objective.fit(batch for batch in batches if read.append(len(batch.labels)) is None)
    wanted = 4 * 32 * (1 + num_heads)  # of the hidden state and `num_heads` embeddings, each as wide as the target
    assert wanted <= sum(read) < wanted + 26
