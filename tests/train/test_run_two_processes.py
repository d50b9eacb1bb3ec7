"""`draftsmith train --num-processes 2` over gloo: the same run as with one process, and a resumption of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from draftsmith.recipe_io import load_recipe
from draftsmith.train.logs import read_metrics
from draftsmith.train.run import train

ZERO = {"zero_optimization": {"stage": 2}}


def write_recipe(chat_folder: Path, folder: Path) -> Path:
    """Target answers with hidden states kept: rank 0 writes them, both ranks read; random layers, ragged examples."""
    recipe = {
        "target": {"model": str(chat_folder / "model"), "dtype": "float32"},
        "drafter": {"kind": "model", "init": {"config": {"num_hidden_layers": 1}}},
        "data": {
            "prompts": str(chat_folder / "chats.jsonl"),
            "responses": "target",
            "max_length": 64,
            "max_new_tokens": 12,
            "sampling": {"temperature": 1.5},
            "generation_batch": 8,
            "cache": "hidden",
        },
        "optimizer": {"learning_rate": 3e-3},
        "engine": {"steps": 6, "tokens_per_step": 500, "tokens_per_forward": 200, "checkpoint_every": 3},
        "evaluate": {
            "prompts": str(chat_folder / "prompts.jsonl"),
            "every": 3,
            "max_new_tokens": 8,
            "sampling": {"temperature": 0},
        },
        "output": str(folder / "run"),
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def records(folder: Path, kind: str) -> list[dict]:
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == kind]


@pytest.fixture(scope="module")
def one(chat_folder, tmp_path_factory, toy_module) -> Path:
    recipe = load_recipe(str(write_recipe(chat_folder, tmp_path_factory.mktemp("one"))))
    train(recipe, resume=False, command=["draftsmith"])
    toy_module.reset()
    return Path(recipe.output)


def launched(*arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-m", "draftsmith", "train", *arguments, "--num-processes", "2"],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("engine", ["DDP", "ZeRO-2"])
def test_two_processes_run_as_one_does(engine, one, chat_folder, tmp_path) -> None:
    recipe = write_recipe(chat_folder, tmp_path)
    overrides = [f"engine.deepspeed={ZERO}"] if engine == "ZeRO-2" else []
    out = launched(str(recipe), *overrides)
    name = "DeepSpeed, ZeRO stage 2" if engine == "ZeRO-2" else "DDP, ZeRO stage none"
    assert out.splitlines()[0] == f"engine: {name}, world size 2 over gloo, cpu"
    assert out.count("the target writes and answers prompts: 48 prompts in") == 1
    folder = tmp_path / "run"
    for kind in ("train", "evaluation"):
        mine, theirs = records(one, kind), records(folder, kind)
        assert len(mine) == len(theirs) == (6 if kind == "train" else 2)
        for a, b in zip(mine, theirs, strict=True):
            for key in {"step", "loss", "supervised", "tokens", "learning_rate", "gradient_norm", "alpha"} & a.keys():
                assert b[key] == pytest.approx(a[key], rel=1e-3, abs=1e-4), key
    mine, theirs = (load_file(at / "final" / "model.safetensors") for at in (one, folder))
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert (mine[key] - theirs[key]).abs().mean() < 1e-4, key
    if engine == "DDP":
        for path in (folder / "final", folder / "step_000006"):
            shutil.rmtree(path)
        (folder / "latest").unlink()
        assert "step_000003, step 3 of 6" in launched(str(recipe), "--resume")
        again = load_file(folder / "final" / "model.safetensors")
        assert all(torch.equal(again[key], theirs[key]) for key in theirs)
