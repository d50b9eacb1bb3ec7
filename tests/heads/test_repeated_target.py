"""Draft positions that are compared with the same distributions of the target: read once, and the loss is the same."""

import pytest
import torch

from draftsmith.data.chats import Encoded
from draftsmith.data.packing import pack
from draftsmith.decode.sampling import Sampling
from draftsmith.distill.batch import distill_batch
from draftsmith.distill.chunked_targets import TargetHidden
from draftsmith.heads.eagle import eagle_in_training
from draftsmith.heads.repeated_target import RepeatedTarget
from draftsmith.models.target import as_target
from draftsmith.recipe import EagleDrafter, HydraDrafter, ObjectiveSection


def test_rows_in_a_row_cost_one_row_of_the_head():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8), torch.randn(11, 8)
    read = []

    def head(rows):
        read.append(len(rows))
        return rows @ weight.T

    of_row = torch.tensor([0, 0, 0, 2, 2, 3, 0])
    repeated = RepeatedTarget(hidden, head, of_row=of_row)
    plain = TargetHidden(hidden[of_row], lambda rows: rows @ weight.T)
    rows = torch.tensor([1, 3, 4, 6])
    torch.testing.assert_close(repeated.logits(slice(1, 6), full=False), plain.logits(slice(1, 6), full=False))
    torch.testing.assert_close(
        repeated.select(rows).logits(slice(None), full=True), plain.select(rows).logits(slice(None), full=True)
    )
    assert read == [3, 3]


def batch_of(lengths=(12, 9, 7)):
    ids = [torch.randint(64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]
    encoded = [Encoded(row, [i >= 3 for i in range(len(row))]) for row in ids]
    return distill_batch(pack(encoded, sum(lengths)), torch.device("cpu"))


def loss_and_gradients(objective, batch):
    sums = objective(batch)
    sums.loss_sum.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in objective.named_parameters()}
    objective.zero_grad()
    return sums, {"loss": sums.loss_sum.detach(), **gradients}


@pytest.mark.parametrize("loss", ["forward_kl", {"cross_entropy": 1.0, "tvd": 0.5}])
def test_heads_lose_the_same_measured_one_by_one_or_not(loss, tiny_llama, lab):
    made = lab.prepared(HydraDrafter(num_heads=3, vocabulary=40), as_target(tiny_llama(seed=3)), loss=loss)
    made.objective.train()
    made.objective.begin_step(0, 100)
    measured, expected = loss_and_gradients(made.objective, batch_of())
    made.objective.begin_step(1, 100)
    together, found = loss_and_gradients(made.objective, batch_of())
    assert "heads/2/loss" in measured.metrics
    assert not together.metrics
    torch.testing.assert_close(found, expected)


def eagle(target, **options):
    torch.manual_seed(0)
    config = EagleDrafter(step_decay=0.5, **options)
    return eagle_in_training(config, ObjectiveSection(loss="forward_kl"), target, None, Sampling()).objective.train()


@pytest.mark.parametrize("version", [1, 3])
def test_an_eagle_loses_the_same_measured_or_not(version, tiny_llama):
    objective = eagle(as_target(tiny_llama(layers=3)), version=version, unroll=3)
    objective.begin_step(0, 100)
    measured, expected = loss_and_gradients(objective, batch_of())
    objective.begin_step(1, 100)
    together, found = loss_and_gradients(objective, batch_of())
    assert "heads/2/top1" in measured.metrics
    assert not together.metrics
    torch.testing.assert_close(found, expected)


def test_the_first_step_can_be_taken_alone_for_a_while(tiny_llama):
    target = as_target(tiny_llama(layers=3))
    staged = eagle(target, version=1, unroll=3, first_alone=0.5)
    alone, whole = eagle(target, version=1, unroll=1), eagle(target, version=1, unroll=3)
    for step, same_as in ((0, alone), (49, alone), (50, whole), (64, whole)):
        staged.begin_step(step, 100)
        same_as.begin_step(step, 100)
        found, expected = (loss_and_gradients(objective, batch_of()) for objective in (staged, same_as))
        torch.testing.assert_close(found[1], expected[1])
        assert ("heads/2/top1" in found[0].metrics) == (step in (0, 64)), "measured as it will draft"
