"""Medusa-2: an adapter on the target, trained after the heads and held by the target's own distribution."""

import copy

import pytest
import torch

from draftsmith import load_drafter, speculative_generate
from draftsmith.decode.loop import plain_generate
from draftsmith.decode.onednn import supported
from draftsmith.decode.packed import is_packed, use_backend
from draftsmith.errors import BadInput
from draftsmith.heads.make import save_heads
from draftsmith.models.target import as_target
from draftsmith.recipe import BlockwiseDrafter, Medusa2Drafter
from draftsmith.train.optimizer import parameter_groups


def section(**changes):
    settings = {"num_heads": 2, "heads_first": 0.5, "lora": {"rank": 4, "alpha": 16}, "target_weight": 0.1}
    return Medusa2Drafter(**{**settings, **changes})


@pytest.fixture
def rows(tiny_llama, lab):
    return lab.greedy_rows(as_target(tiny_llama(layers=2, seed=1)), 8, 16)


CHANGING = {
    "medusa2": section(num_heads=3, lora_learning_rate=0.05, target_weight=2.0),
    "blockwise": BlockwiseDrafter(num_heads=3, inner_size=64, train_layers=1, target_learning_rate=0.03),
}


def test_an_adapter_on_a_bf16_target_is_trained_in_float32(tiny_llama, lab):
    """Beside DeepSpeed nothing keeps a copy: small steps would vanish in bf16."""
    target = as_target(tiny_llama(layers=2).bfloat16())
    made = lab.prepared(CHANGING["medusa2"], target)
    adapter = {name: weight for name, weight in made.objective.named_parameters() if weight.requires_grad}
    assert {weight.dtype for weight in adapter.values()} == {torch.float32}
    assert {weight.dtype for name, weight in target.model.named_parameters() if "lora" not in name} == {torch.bfloat16}
    batch = lab.batch_of(lab.greedy_rows(target, 4, 8))
    made.objective(batch).loss_sum.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in adapter.values())


@pytest.mark.parametrize("kind", CHANGING)
def test_every_head_learns_what_it_alone_is_responsible_for(kind, copier, lab):
    """While the target that is trained along goes on copying. The decoder then accepts what it drafts."""
    target = as_target(copy.deepcopy(copier.model))
    made = lab.prepared(CHANGING[kind], target)
    rows = lab.greedy_rows(copier, 64, 12)
    lab.fit(made, lab.batch_of(rows, length=60), steps=100, rate=5e-3)
    found = lab.figures(made, lab.batch_of(lab.greedy_rows(copier, 16, 20, seed=1), prompt=3, length=60))
    assert [found[f"heads/{k}/top1"] > 0.99 for k in range(3)] == [True] * 3, found
    assert 0 < found["target_kl"] < 0.01
    ids = torch.tensor(rows)[:, :5]
    out = speculative_generate(target, made.drafter, ids, max_new_tokens=21, num_speculative_tokens=3, eos_token_id=[])
    assert (out.stats.acceptance_rate or 0) > 0.98


@pytest.mark.parametrize("kind", CHANGING)
def test_the_training_metric_is_what_the_decoder_counts(kind, tiny_llama, lab):
    """It is about the changed target: its choices, from its hidden states."""
    target, original = (as_target(tiny_llama(layers=2, seed=3)) for _ in range(2))
    made = lab.prepared(CHANGING[kind], target)
    batch = lab.batch_of(lab.greedy_rows(original, 24, 24), length=54)
    lab.fit(made, batch, steps=60)
    found = lab.figures(made, batch)
    assert found["target_kl"] > 0.0001
    lab.check_metric(made, target)
    right, guessed = made.objective.hits(batch)
    assert found["heads/1/top1"] == pytest.approx(float(right[:, 1].sum() / guessed[:, 1].sum()))


def test_heads_train_alone_first_and_the_target_after_them(tiny_llama, rows, lab):
    target = as_target(tiny_llama(layers=2, seed=1))
    made = lab.prepared(section(), target)
    batch, objective = lab.batch_of(rows, length=38), made.objective.train()
    objective.begin_step(4, 10)
    sums = objective(batch)
    sums.loss_sum.backward()
    assert "target_kl" not in sums.metrics
    adapter = list(objective.adapted.parameters())
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in adapter)
    assert any(parameter.grad.any() for parameter in objective.heads.parameters())
    objective.zero_grad()
    objective.begin_step(5, 10)
    sums = objective(batch)
    sums.loss_sum.backward()
    assert "target_kl" in sums.metrics
    assert any(parameter.grad.any() for parameter in adapter)
    assert {id(p) for p in objective.parameters()}.isdisjoint(
        id(p) for name, p in target.model.named_parameters() if "lora_" not in name
    ), "of the target only the adapter is trained"


def test_the_adapter_has_a_learning_rate_of_its_own(tiny_llama, lab):
    made = lab.prepared(section(lora_learning_rate=0.125), as_target(tiny_llama()))
    groups = parameter_groups(made.objective, 0.0)
    assert {group["rate"] for group in groups} == {1.0, 0.125}
    slow = [id(p) for group in groups if group["rate"] == 0.125 for p in group["params"]]
    assert set(slow) == {id(p) for p in made.objective.adapted.parameters()}


def test_a_weight_on_the_targets_distribution_holds_it(tiny_llama, rows, lab):
    """Without it the target goes wherever that helps the heads; with it, it stays near what it was."""
    found = {}
    for weight in (0.0, 20.0):
        made = lab.prepared(section(target_weight=weight, heads_first=0.0), as_target(tiny_llama(layers=2, seed=1)))
        batch = lab.batch_of(rows, length=38)
        lab.fit(made, batch, steps=25)
        found[weight] = lab.figures(made, batch)["target_kl"]
    assert found[20.0] < 0.2 * found[0.0]


def test_the_adapted_target_travels_with_the_drafter_and_is_what_decoding_preserves(tiny_llama, rows, lab, tmp_path):
    target, fresh = (as_target(tiny_llama(layers=2, seed=1)) for _ in range(2))
    made = lab.prepared(section(heads_first=0.0), target)
    lab.fit(made, lab.batch_of(rows, length=38), steps=12)
    ids = torch.tensor([rows[0]])
    with torch.no_grad():
        adapted, original = target.model(input_ids=ids).logits, fresh.model(input_ids=ids).logits
        with made.objective.adapted.original():
            torch.testing.assert_close(target.model(input_ids=ids).logits, original)
    assert not torch.allclose(adapted, original, atol=1e-2)
    settings = {"max_new_tokens": 16, "eos_token_id": []}
    for drafter, lm in ((made.drafter, target), (None, fresh)):
        if drafter is None:
            save_heads(section(), made, target, tmp_path / "final")
            drafter = load_drafter(tmp_path / "final", fresh)
            torch.testing.assert_close(fresh.model(input_ids=ids).logits, adapted, rtol=1e-4, atol=1e-4)
        for tree in (None, [2, 2]):
            out = speculative_generate(lm, drafter, ids[:, :4], num_speculative_tokens=2, tree=tree, **settings)
            assert out.tokens.tolist() == plain_generate(lm, ids[:, :4], **settings).tokens.tolist()
    assert not any(parameter.requires_grad for parameter in fresh.model.parameters())


def test_a_target_is_changed_once_and_a_start_changes_nothing(tiny_llama, rows, lab, tmp_path):
    target = as_target(tiny_llama(layers=2, seed=1))
    made = lab.prepared(section(heads_first=0.0), target)
    save_heads(section(), made, target, tmp_path / "start")
    lab.fit(made, lab.batch_of(rows, length=38), steps=4)
    save_heads(section(), made, target, tmp_path / "final")
    save_heads(section(), made, target, tmp_path / "other")
    fresh = as_target(tiny_llama(layers=2, seed=1))
    before = [parameter.clone() for parameter in fresh.model.parameters()]
    load_drafter(tmp_path / "start", fresh)
    assert all(torch.equal(a, b) for a, b in zip(before, fresh.model.parameters(), strict=True))
    load_drafter(tmp_path / "final", fresh)
    changed = [parameter.clone() for parameter in fresh.model.parameters()]
    load_drafter(tmp_path / "final", fresh)
    load_drafter(tmp_path / "start", fresh)
    assert all(torch.equal(a, b) for a, b in zip(changed, fresh.model.parameters(), strict=True))
    with pytest.raises(BadInput, match=r"which .*final has changed already"):
        load_drafter(tmp_path / "other", fresh)


@pytest.mark.skipif(not supported(), reason="this build of torch has no packed linear layers")
def test_packed_weights_follow_the_change(tiny_llama, rows, lab, tmp_path):
    target = as_target(tiny_llama(layers=2, seed=1))
    made = lab.prepared(section(heads_first=0.0), target)
    lab.fit(made, lab.batch_of(rows, length=38), steps=4)
    save_heads(section(), made, target, tmp_path / "final")
    with torch.no_grad():
        expected = target.model(input_ids=torch.tensor([rows[0]])).logits
        fresh = as_target(tiny_llama(layers=2, seed=1))
        use_backend(fresh.model, "packed")
        load_drafter(tmp_path / "final", fresh)
        assert is_packed(fresh.model)
        torch.testing.assert_close(
            fresh.model(input_ids=torch.tensor([rows[0]])).logits, expected, rtol=1e-4, atol=1e-4
        )
