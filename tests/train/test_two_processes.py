"""Two gloo processes under the launcher: the same losses and weights as one, resume, signals, exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from draftsmith.errors import BadInput
from draftsmith.train.launch import relaunch
from draftsmith.train.logs import read_metrics
from draftsmith.train.weights import read_weights

FOLDER = Path(__file__).parent
LAUNCH = (
    "import sys; from draftsmith.train.launch import relaunch; sys.exit(relaunch(2, sys.argv[2:], module=sys.argv[1]))"
)


def launch(module: str, *arguments: str, **environment: str) -> subprocess.Popen:
    paths = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, module, *arguments],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, str]:
    """One launch that runs every engine in turn: starting processes is what takes the time."""
    folder = tmp_path_factory.mktemp("two")
    runs = [{"name": f"zero{stage}", "stage": stage} for stage in (1, 2, 3)]
    runs += [{"name": "zero2", "stage": 2, "resume": True, "forget": 8}, {"name": "ddp", "tied": True}]
    runs += [{"name": "ddp", "tied": True, "resume": True, "forget": 12}]
    runs += [{"name": "bf16_zero1", "stage": 1, "precision": "bf16"}, {"name": "bf16_ddp", "precision": "bf16"}]
    # DeepSpeed's collectives cannot be started on a group it did not make: its runs come first.
    runs.sort(key=lambda keywords: "stage" not in keywords)
    process = launch("toy_run", str(folder), json.dumps(runs))
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0, out
    return folder, out


def records(folder: Path) -> list[dict]:
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_two_processes_train_as_one_does(toy, tmp_path, two, name) -> None:
    """Uneven on purpose: rank 0 has two ragged micro-batches a step, rank 1 has one; clipping is active."""
    toy.run(tmp_path, tied=name == "ddp")
    one, other = records(tmp_path), records(two[0] / name)
    assert len(other) == 12
    for mine, theirs in zip(one, other, strict=True):
        for key in ("step", "loss", "agreement", "learning_rate", "gradient_norm", "supervised", "tokens"):
            assert theirs[key] == pytest.approx(mine[key], rel=1e-5, abs=1e-5), key
    assert any(record["gradient_norm"] > 0.5 for record in one)
    mine = read_weights(tmp_path / "latest" / "trainee.safetensors")
    theirs = read_weights(two[0] / name / "latest" / "trainee.safetensors")
    assert mine.keys() == theirs.keys()
    for key in mine:
        torch.testing.assert_close(theirs[key], mine[key], rtol=1e-4, atol=1e-5)


def test_the_log_s_first_lines_name_engine_stage_world_size_and_precision(two) -> None:
    _, out = two
    for line in (
        "engine: DDP, ZeRO stage none, world size 2 over gloo, cpu",
        "engine: DeepSpeed, ZeRO stage 1, world size 2 over gloo, cpu",
        "engine: DeepSpeed, ZeRO stage 3, world size 2 over gloo, cpu",
        "precision: bf16 (parameters in bf16, fp32 master copies), 1 CPU threads a process",
        "precision: bf16 (autocast, fp32 weights), 1 CPU threads a process",
    ):
        assert line in out.splitlines()


@pytest.mark.parametrize(("name", "step"), [("zero2", 4), ("ddp", 8)])
def test_runs_of_two_processes_resume_where_they_were(two, name, step) -> None:
    """Equality with one process was checked above on the resumed run's log."""
    folder, out = two
    assert f"resuming from {folder / name}/step_{step:06d}, step {step} of 12" in out


def test_ddp_does_not_outlive_the_engine(two) -> None:
    """As the last owner of the process group it can hang at exit, now and then."""
    assert two[1].count("model freed before its group: True") == 2


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_an_evaluation_can_read_whole_parameters_under_every_stage(toy_module, two, name) -> None:
    expected = sum(parameter.numel() for parameter in toy_module.Toy().parameters())
    record = next(r for r in read_metrics(two[0] / name / "metrics.jsonl") if r["kind"] == "evaluation")
    assert record["parameters"] == expected


def test_deepspeed_runs_in_a_process_that_no_launcher_started(toy, tmp_path) -> None:
    runs = [{"name": "alone", "stage": 2, "precision": "fp32"}]
    command = [sys.executable, str(FOLDER / "toy_run.py"), str(tmp_path), json.dumps(runs)]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert "engine: DeepSpeed, ZeRO stage 2, world size 1 over gloo, cpu" in done.stdout, done.stderr
    toy.run(tmp_path / "plain")
    mine, theirs = records(tmp_path / "plain"), records(tmp_path / "alone")
    assert [record["loss"] for record in theirs] == pytest.approx([record["loss"] for record in mine], rel=1e-5)


def test_bf16_losses_are_close_to_fp32_ones(two) -> None:
    exact = records(two[0] / "zero1")[-1]["loss"]
    for name in ("bf16_zero1", "bf16_ddp"):
        loss = records(two[0] / name)[-1]["loss"]
        assert loss == pytest.approx(exact, rel=0.02)
        assert loss != exact


def test_a_signal_to_the_launcher_reaches_the_ranks_which_save_and_say_how_to_go_on(tmp_path) -> None:
    runs = [{"name": "run", "total_steps": 100_000, "checkpoint_every": 100_000, "delay": 0.01}]
    process = launch("toy_run", str(tmp_path), json.dumps(runs))
    deadline = time.monotonic() + 900
    while not records(tmp_path / "run") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "SIGTERM: finishing this step and writing a checkpoint" in out
    step = records(tmp_path / "run")[-1]["step"]
    assert f"stopped after step {step} of 100000, saved {tmp_path}/run/step_{step:06d}; to go on: " in out
    assert out.count("outcome") == 2
    assert "Traceback" not in out
    assert (tmp_path / "run" / "latest" / "rank_1.pt").exists()


def test_a_worker_s_exit_code_is_the_launcher_s(tmp_path) -> None:
    (tmp_path / "failing.py").write_text(
        "import os, sys; print(f\"rank {os.environ['RANK']} {' '.join(sys.argv[1:])}\\n\", end=''); sys.exit(2)"
    )
    process = launch("failing", "--flag", "value", PYTHONPATH=str(tmp_path))
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 2, out
    assert "rank 0 --flag value" in out
    assert "Traceback" not in out


def test_a_worker_and_a_silly_number_of_processes_are_refused(monkeypatch) -> None:
    with pytest.raises(BadInput, match="0, expected at least 1"):
        relaunch(0, ["train"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInput, match="already runs under a launcher"):
        relaunch(2, ["train"])
