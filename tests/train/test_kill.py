"""A run that is killed with SIGKILL, wherever that happens, goes on to the very losses of one that never was."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# One process imports everything and forks a child for each moment: every child is a run that dies by its own SIGKILL.
SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import toy_run
from draftsmith.train import checkpoint

def die(*arguments, **keywords):
    os.kill(os.getpid(), signal.SIGKILL)

def run_until(moment):
    if moment == "while the files of a checkpoint are written":
        write = checkpoint._write_manifest
        checkpoint._write_manifest = lambda folder, step, engine: write(folder, step, engine) if step < 8 else die()
    elif moment == "in the middle of a step":
        draw, drawn = toy_run.ToySteps.__next__, []
        toy_run.ToySteps.__next__ = lambda self: die() if len(drawn) == 2 else (drawn.append(1), draw(self))[1]
    elif moment == "between the rename and the new link":
        replace = os.replace
        os.replace = lambda source, target: die() if Path(source).name == ".latest" else replace(source, target)
    elif moment == "while an old checkpoint is removed":
        checkpoint.shutil.rmtree = lambda folder, ignore_errors=False: None if ignore_errors else die()
    toy_run.run(Path(sys.argv[2]), dropout=0.2, keep_checkpoints=1, resume=True)

for moment in sys.argv[3:]:
    if (child := os.fork()) == 0:
        run_until(moment)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    found = sorted(path.name for path in Path(sys.argv[2]).glob("step_*"))
    print("after", -os.WTERMSIG(status), *found, flush=True)
"""


def test_killed_runs_resume_to_the_losses_of_an_unkilled_one(toy, tmp_path, losses) -> None:
    toy.run(tmp_path / "whole", dropout=0.2)
    toy.reset()
    moments = {
        "while the files of a checkpoint are written": "step_000004",  # that of step 8 is not there
        "in the middle of a step": "step_000004",  # the log is ahead of the checkpoint
        "between the rename and the new link": "step_000004 step_000008",  # `latest` points at step 4
        "while an old checkpoint is removed": "step_000008 step_000012",
    }
    run = tmp_path / "run"
    command = [sys.executable, "-c", SCRIPT, str(FOLDER), str(run), *moments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    after = [line for line in done.stdout.splitlines() if line.startswith("after")]
    assert after == [f"after {-signal.SIGKILL} {found}" for found in moments.values()], done.stderr
    outcome, _ = toy.run(run, dropout=0.2, keep_checkpoints=1, resume=True)
    assert outcome.finished
    assert losses(run) == losses(tmp_path / "whole")


@pytest.mark.parametrize("name", ["step_000004", "step_000008"])
def test_the_newest_checkpoint_being_damaged_costs_steps_but_no_exactness(toy, tmp_path, losses, name, capsys) -> None:
    toy.run(tmp_path / "whole", dropout=0.2)
    toy.reset()
    toy.run(tmp_path / "run", dropout=0.2, keep_checkpoints=3)
    toy.reset()
    for folder in (tmp_path / "run").glob("step_*"):
        if folder.name > name:
            (folder / "trainee.safetensors").write_bytes(b"half")
    capsys.readouterr()
    toy.run(tmp_path / "run", dropout=0.2, resume=True)
    said = capsys.readouterr().out
    assert f"skipping checkpoint {tmp_path}/run/step_000012: trainee.safetensors is truncated or changed" in said
    assert f"resuming from {tmp_path}/run/{name}" in said
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
