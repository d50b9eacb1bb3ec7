"""A drafter's folder: what was saved comes back, for the target it was made for and for no other."""

import json

import pytest
import torch

from draftsmith.errors import BadInput
from draftsmith.heads.checkpoint import load_head, save_head
from draftsmith.models.target import Target, as_target

TENSORS = {"blocks.0.layers.0.weight": torch.arange(6.0).view(2, 3), "d2t": torch.tensor([0, 4])}


def with_tokenizer(model, tokenizer):
    target = as_target(model)
    return Target(target.model, tokenizer, "the/target", ())


def test_what_was_saved_comes_back(tiny_llama, tiny_tokenizer, tmp_path):
    target = with_tokenizer(tiny_llama(vocab_size=320), tiny_tokenizer)
    save_head(tmp_path / "head", "medusa", TENSORS, {"num_heads": 3}, target)
    config, tensors = load_head(tmp_path / "head", target)
    assert config == {"num_heads": 3}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert json.loads((tmp_path / "head" / "draftsmith.json").read_text())["kind"] == "medusa"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": 64}, "made for the target the/target with a hidden size of 32, .* has 64"),
        ({"layers": 3}, "with a number of layers of 2, .* has 3"),
        ({"vocab_size": 328}, "with a vocabulary size of 320, .* has 328"),
        ({"seed": 1}, "made for the target the/target, and the weights of .* are others"),
    ],
)
def test_another_target_is_refused_by_name_and_reason(change, reason, tiny_llama, tiny_tokenizer, tmp_path):
    save_head(tmp_path / "head", "medusa", TENSORS, {}, with_tokenizer(tiny_llama(vocab_size=320), tiny_tokenizer))
    with pytest.raises(BadInput, match=reason):
        load_head(tmp_path / "head", as_target(tiny_llama(**{"vocab_size": 320, **change})))


def test_another_tokenizer_is_refused(tiny_llama, tiny_tokenizer, tokenizer_factory, tmp_path):
    model = tiny_llama(vocab_size=320)
    save_head(tmp_path / "head", "medusa", TENSORS, {}, with_tokenizer(model, tiny_tokenizer))
    other = tokenizer_factory(320, ["Quite other words make quite other merges, and so other ids."])
    with pytest.raises(BadInput, match="different tokenizers"):
        load_head(tmp_path / "head", with_tokenizer(model, other))


def test_the_same_target_in_another_dtype_is_accepted(tiny_llama, tmp_path):
    save_head(tmp_path / "head", "medusa", TENSORS, {}, as_target(tiny_llama()))
    load_head(tmp_path / "head", as_target(tiny_llama().bfloat16()))


def test_damage_is_named(tiny_llama, tmp_path):
    target = as_target(tiny_llama())
    save_head(tmp_path / "head", "medusa", TENSORS, {}, target)
    with (tmp_path / "head" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(BadInput, match=r"model\.safetensors: damaged"):
        load_head(tmp_path / "head", target)
    with pytest.raises(BadInput, match="not a drafter's folder"):
        load_head(tmp_path, target)
