import pytest
import torch
from torch import nn

from draftsmith.errors import BadInput
from draftsmith.train.optimizer import build_adamw, parameter_groups


def test_only_matrices_that_are_no_embedding_decay(toy_module) -> None:
    model = toy_module.Toy()
    matrices, others = parameter_groups(model, 0.1)
    assert {id(parameter) for parameter in matrices["params"]} == {id(model.hidden.weight), id(model.head.weight)}
    assert matrices["weight_decay"] == 0.1
    expected = {
        id(parameter) for parameter in (model.embedding.weight, model.norm.weight, model.norm.bias, model.hidden.bias)
    }
    assert {id(parameter) for parameter in others["params"]} == expected
    assert others["weight_decay"] == 0.0


def test_a_head_tied_to_the_embedding_counts_once_and_does_not_decay(toy_module) -> None:
    model = toy_module.Toy(tied=True)
    matrices, others = parameter_groups(model, 0.1)
    assert [id(parameter) for parameter in matrices["params"]] == [id(model.hidden.weight)]
    assert sum(parameter is model.embedding.weight for parameter in others["params"]) == 1


def test_frozen_parameters_are_left_out_and_an_empty_group_is_dropped(toy_module) -> None:
    model = toy_module.Toy()
    model.requires_grad_(False)
    model.hidden.weight.requires_grad_(True)
    groups = parameter_groups(model, 0.1)
    assert [len(group["params"]) for group in groups] == [1]
    before = model.head.weight.clone()
    optimizer = build_adamw(model, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1, fused=True)
    optimizer.param_groups[0]["lr"] = 0.1
    model.hidden.weight.grad = torch.ones_like(model.hidden.weight)
    optimizer.step()
    assert torch.equal(model.head.weight, before)


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(BadInput, match="every parameter of the drafter is frozen"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), 0.0)


def test_parameters_with_a_learning_rate_of_their_own_are_groups_of_their_own(toy_module) -> None:
    class Slower(toy_module.Toy):
        def learning_rate_share(self, name: str) -> float:
            return 0.25 if name.startswith("hidden.") else 1.0

    model = Slower()
    groups = parameter_groups(model, 0.1)
    assert [(group["rate"], group["weight_decay"]) for group in groups] == [
        (1.0, 0.1),
        (1.0, 0.0),
        (0.25, 0.1),
        (0.25, 0.0),
    ]
    assert groups[2]["params"] == [model.hidden.weight]
    assert groups[3]["params"] == [model.hidden.bias]
