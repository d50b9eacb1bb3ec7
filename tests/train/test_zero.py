import pytest

from draftsmith.errors import BadInput
from draftsmith.train.zero import zero_config


def test_defaults_let_deepspeed_divide_by_ranks_only() -> None:
    config = zero_config({"zero_optimization": {"stage": 2}}, precision="bf16", clip=0.5)
    assert config["train_micro_batch_size_per_gpu"] == config["gradient_accumulation_steps"] == 1
    assert config["gradient_clipping"] == 0.5
    assert config["bf16"] == {"enabled": True}
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert config["zero_optimization"] == {"stage": 2}
    assert zero_config({"zero_optimization": {"stage": 1}}, precision="fp32", clip=None)["gradient_clipping"] == 0.0


def test_the_recipe_s_own_keys_win_and_auto_means_absent() -> None:
    given = {
        "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"},
        "train_batch_size": "auto",
        "bf16": "auto",
        "communication_data_type": "fp32",
    }
    config = zero_config(given, precision="fp32", clip=1.0)
    expected = {"stage": 3, "overlap_comm": True, "stage3_gather_16bit_weights_on_model_save": True}
    assert config["zero_optimization"] == expected
    assert config["communication_data_type"] == "fp32"
    assert "train_batch_size" not in config
    assert config["bf16"] == {"enabled": False}
    assert given["train_batch_size"] == "auto"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}, "engine.tokens_per_forward"),
        ({"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}, "engine.precision is fp32 or bf16"),
        ({"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}, "set the optimizer section"),
        ({"zero_optimization": {"stage": 4}}, "stage: 0, 1, 2 or 3"),
        ({}, "expected zero_optimization"),
        ({"zero_optimisation": {"stage": 2}}, "did you mean 'zero_optimization'"),
    ],
)
def test_keys_that_belong_elsewhere_are_refused_by_name(given, message) -> None:
    with pytest.raises(BadInput, match=message):
        zero_config(given, precision="fp32", clip=1.0)
