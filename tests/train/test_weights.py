import torch
from safetensors import safe_open

from draftsmith.train.weights import read_weights, write_weights


def test_tied_weights_are_stored_once_and_come_back_under_both_names(toy_module, tmp_path) -> None:
    model, other = toy_module.Toy(tied=True), toy_module.Toy(tied=True)
    write_weights(model.state_dict(), tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert "head.weight" not in file.keys()  # noqa: SIM118 (not a mapping)
    other.load_state_dict(read_weights(tmp_path / "w.safetensors"))
    assert torch.equal(other.head.weight, model.head.weight)
    assert other.head.weight is other.embedding.weight


def test_untied_equal_weights_transposed_and_empty_ones_stay_apart(tmp_path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"a": weight.clone(), "b": weight.clone(), "t": weight.clone().T, "none": torch.empty(0)}
    write_weights(state, tmp_path / "w.safetensors")
    back = read_weights(tmp_path / "w.safetensors")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert back["a"].data_ptr() != back["b"].data_ptr()
