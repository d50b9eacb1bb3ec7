import json
import shutil

import pytest
import torch

from draftsmith.errors import BadInput
from draftsmith.train import checkpoint
from draftsmith.train.engine import start_engine


@pytest.fixture
def engine(toy):
    engine = start_engine("fp32")
    engine.prepare(toy.Toy(tied=True), betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.0)
    return engine


@pytest.fixture
def saved(engine, toy, tmp_path):
    """A run folder with the checkpoints of steps 2, 4 and 6."""
    for step in (2, 4, 6):
        checkpoint.save(tmp_path, step, engine, {"steps": toy.ToySteps()}, keep=5)
    return tmp_path


def names(folder) -> list[str]:
    return [path.name for path in checkpoint.list_checkpoints(folder)]


def test_a_checkpoint_restores_weights_optimizer_random_states_and_data(engine, toy, tmp_path) -> None:
    steps, buffer = toy.ToySteps(), toy.Buffer()
    sums = engine.forward_backward(next(steps)[0], 1.0, last=True)
    assert sums.loss_sum.requires_grad is False
    engine.step(0.1)
    buffer.seen = [3, 1]
    checkpoint.save(tmp_path, 1, engine, {"steps": steps, "buffer": buffer}, keep=1)
    expected = next(steps)[0].ids, torch.rand(2)
    weights = {name: tensor.clone() for name, tensor in engine.trainee.state_dict().items()}
    moments = json.dumps(engine.optimizer.state_dict(), default=lambda tensor: tensor.tolist())

    engine.forward_backward(next(steps)[0], 1.0, last=True)
    engine.step(0.1)
    other_steps, other_buffer = toy.ToySteps(seed=77), toy.Buffer()
    newest = tmp_path / "step_000001"
    assert checkpoint.newest_sound(tmp_path) == newest
    assert checkpoint.load(newest, engine, {"steps": other_steps, "buffer": other_buffer}) == 1
    assert other_buffer.seen == [3, 1]
    assert torch.equal(next(other_steps)[0].ids, expected[0])
    assert torch.equal(torch.rand(2), expected[1])
    assert all(torch.equal(tensor, weights[name]) for name, tensor in engine.trainee.state_dict().items())
    assert json.dumps(engine.optimizer.state_dict(), default=lambda tensor: tensor.tolist()) == moments
    assert engine.trainee.head.weight is engine.trainee.embedding.weight


def test_latest_points_at_the_newest_and_older_ones_are_dropped(engine, toy, tmp_path) -> None:
    for step in (1, 2, 1_000_000, 1_000_001):
        checkpoint.save(tmp_path, step, engine, {"steps": toy.ToySteps()}, keep=2)
    assert names(tmp_path) == ["step_1000000", "step_1000001"]
    assert (tmp_path / "latest").resolve() == (tmp_path / "step_1000001").resolve()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1000000", "step_1000001"]


def truncate(path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("harm", "file", "reason"),
    [
        (truncate, "trainee.safetensors", "trainee.safetensors is truncated or changed"),
        (flip, "optimizer.pt", "optimizer.pt is truncated or changed"),
        (lambda path: path.unlink(), "rank_0.pt", "rank_0.pt is missing"),
        (lambda path: path.unlink(), "manifest.json", "manifest.json is missing"),
        (truncate, "manifest.json", "manifest.json is not a manifest"),
        (lambda path: path.write_text("[]"), "manifest.json", "manifest.json is not a manifest"),
        (lambda path: path.write_text('{"format": 99}'), "manifest.json", "format 99, this version reads 1"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(saved, harm, file, reason) -> None:
    harm(saved / "step_000006" / file)
    said: list[str] = []
    assert checkpoint.newest_sound(saved, said.append) == saved / "step_000004"
    assert said == [f"skipping checkpoint {saved / 'step_000006'}: {reason}"]


def test_when_all_are_damaged_there_is_none(saved) -> None:
    for folder in checkpoint.list_checkpoints(saved):
        flip(folder / "rank_0.pt")
    said: list[str] = []
    assert checkpoint.newest_sound(saved, said.append) is None
    assert len(said) == 3


def test_saving_after_a_damaged_later_one_never_drops_the_sound_ones(engine, toy, saved) -> None:
    truncate(saved / "step_000006" / "rank_0.pt")
    checkpoint.save(saved, 5, engine, {"steps": toy.ToySteps()}, keep=1)
    assert names(saved) == ["step_000005"]
    checkpoint.save(saved, 6, engine, {"steps": toy.ToySteps()}, keep=2)
    truncate(saved / "step_000006" / "rank_0.pt")
    checkpoint.save(saved, 6, engine, {"steps": toy.ToySteps()}, keep=2)
    assert names(saved) == ["step_000005", "step_000006"]
    assert checkpoint.damage(saved / "step_000006") is None


def test_folders_that_are_no_checkpoints_are_left_alone(saved) -> None:
    (saved / "step_by_step").mkdir()
    shutil.copytree(saved / "step_000006", saved / ".partial_step_000008")
    assert names(saved) == ["step_000002", "step_000004", "step_000006"]


@pytest.mark.parametrize("filled_by", ["trainee.safetensors", "optimizer.pt", "manifest.json"])
def test_a_full_disk_is_one_line_and_leaves_no_checkpoint(
    filled_by, engine, toy, tmp_path, small_disk, monkeypatch
) -> None:
    """Each in its own writer: safetensors, torch, and plain text."""
    engine.forward_backward(next(toy.ToySteps())[0], 1.0, last=True)
    engine.step(0.1)
    whole = checkpoint.save(tmp_path / "whole", 1, engine, {"steps": toy.ToySteps()}, keep=1)
    sizes = {path.name: path.stat().st_size for path in whole.iterdir()}
    if filled_by == "manifest.json":
        monkeypatch.setattr(checkpoint, "FORMAT", "x" * 10 * max(sizes.values()))
        sizes[filled_by] = 10 * max(sizes.values())
    assert sizes["trainee.safetensors"] < sizes["optimizer.pt"]
    reason = r"step_000001: cannot write the checkpoint: \S"
    with small_disk(sizes[filled_by] - 1), pytest.raises(BadInput, match=reason) as refused:
        checkpoint.save(tmp_path, 1, engine, {"steps": toy.ToySteps()}, keep=1)
    assert len(str(refused.value).splitlines()) == 1
    assert names(tmp_path) == []
    monkeypatch.undo()
    checkpoint.save(tmp_path, 1, engine, {"steps": toy.ToySteps()}, keep=1)
    assert not list(tmp_path.glob(".partial*"))


def test_an_error_that_is_not_the_disks_is_no_bad_input(engine, toy, tmp_path, monkeypatch) -> None:
    def broken(*arguments):
        raise RuntimeError("a collective failed")

    monkeypatch.setattr(checkpoint, "_write_manifest", broken)
    with pytest.raises(RuntimeError, match="a collective failed"):
        checkpoint.save(tmp_path, 1, engine, {"steps": toy.ToySteps()}, keep=1)


def test_a_checkpoint_of_other_processes_engines_or_states_is_refused(engine, toy, saved) -> None:
    folder, states = saved / "step_000006", {"steps": toy.ToySteps()}
    manifest = checkpoint.read_manifest(folder)
    for change, message in (
        ({"world_size": 2}, "written by 2 processes, this run has 1: resume with --num-processes 2"),
        ({"zero_stage": 3}, "written under ZeRO stage 3, this run has None"),
    ):
        (folder / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(BadInput, match=message):
            checkpoint.load(folder, engine, states)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match=r"holds the states of \['steps'\], this run needs \['buffer', 'steps'\]"):
        checkpoint.load(folder, engine, states | {"buffer": toy.Buffer()})
