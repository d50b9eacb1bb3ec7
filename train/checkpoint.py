"""Checkpoints of a run: written beside their place and renamed, checked before they are read.

A run folder holds ``step_000200/`` folders and ``latest``, a link to the newest. In each: ``trainee.safetensors``, the
optimizer (``optimizer.pt`` or ``deepspeed/``), one ``rank_0.pt`` a process (random states, data position, whatever else
the run keeps) and ``manifest.json``, which is written last and lists every file with its size and hash.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..distill.trainee import Stateful
from ..errors import BadInput
from ..errors_disk import disk_errors
from .engine import Engine
from .rng import restore_rng, rng_state

FORMAT = 1
_STEP_FOLDER = re.compile(r"step_(\d{6,})")


def folder_name(step: int) -> str:
    """``step_000200`` for 200."""
    return f"step_{step:06d}"


def list_checkpoints(run_folder: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first, whether sound or not."""
    found = [path for path in run_folder.glob("step_*") if path.is_dir() and _STEP_FOLDER.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """200 for ``step_000200``."""
    return int(folder.name.removeprefix("step_"))


def save(run_folder: Path, step: int, engine: Engine, states: Mapping[str, Stateful], *, keep: int) -> Path:
    """Writes the checkpoint of `step` (all ranks call it) and drops all but the newest `keep`.

    At no moment is there a half-written folder under a checkpoint's name. Raises BadInput when the disk refuses.
    """
    final = run_folder / folder_name(step)
    partial = run_folder / f".partial_{final.name}"
    with disk_errors(f"{final}: cannot write the checkpoint"):
        if engine.is_main:
            _remove_leftovers(run_folder)
            partial.mkdir(parents=True)
        engine.wait()
        engine.save(partial)
        own = {"rng": rng_state(), "states": {name: state.state_dict() for name, state in states.items()}}
        torch.save(own, partial / f"rank_{engine.rank}.pt")
        engine.wait()
        if engine.is_main:
            _write_manifest(partial, step, engine)
            _put_in_place(partial, final)
            _prune(run_folder, step, keep)
    engine.wait()
    return final


def _write_manifest(folder: Path, step: int, engine: Engine) -> None:
    files = {str(path.relative_to(folder)): _stamp(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    manifest = {
        "format": FORMAT,
        "step": step,
        "world_size": engine.world_size,
        "zero_stage": engine.zero_stage,
        "files": files,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    for path in [*folder.rglob("*"), folder]:
        _flush_to_disk(path)


def _stamp(path: Path) -> list[int | str]:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(partial: Path, final: Path) -> None:
    """Renames the finished folder and points ``latest`` at it, each in one atomic step."""
    if final.exists():  # a damaged one that was skipped on resume
        _discard(final)
    os.rename(partial, final)
    link = final.parent / ".latest"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    os.replace(link, final.parent / "latest")
    _flush_to_disk(final.parent)


def _discard(folder: Path) -> None:
    """Removes a checkpoint: renamed first, so that an interrupted removal leaves no half under its name."""
    doomed = folder.with_name(f".discarded_{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def _prune(run_folder: Path, step: int, keep: int) -> None:
    """Keeps the newest `keep` up to `step`. Later ones are damaged ones that a resumed run skipped: they go too."""
    up_to_now = [path for path in list_checkpoints(run_folder) if step_of(path) <= step]
    for folder in list_checkpoints(run_folder):
        if folder not in up_to_now[-keep:]:
            _discard(folder)


def _remove_leftovers(run_folder: Path) -> None:
    for pattern in (".partial_step_*", ".discarded_step_*"):
        for folder in run_folder.glob(pattern):
            shutil.rmtree(folder)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None when every file is there, whole and unchanged."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            return f"format {manifest['format']}, this version reads {FORMAT}"
        for name, stamp in manifest["files"].items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _stamp(folder / name) != stamp:
                return f"{name} is truncated or changed"
    except FileNotFoundError:
        return "manifest.json is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is not a manifest"
    return None


def newest_sound(run_folder: Path, say: Callable[[str], None] = print) -> Path | None:
    """The newest checkpoint that is whole; each one that is not is named with the reason and skipped."""
    for folder in reversed(list_checkpoints(run_folder)):
        reason = damage(folder)
        if reason is None:
            return folder
        say(f"skipping checkpoint {folder}: {reason}")
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a sound checkpoint."""
    return json.loads((folder / "manifest.json").read_text())


def load(folder: Path, engine: Engine, states: Mapping[str, Stateful]) -> int:
    """Restores trainee, optimizer, random states and `states` from a sound checkpoint; returns its step.

    All ranks call it. Raises BadInput when the checkpoint belongs to another number of processes, another engine, or a
    run that kept other states.
    """
    manifest = read_manifest(folder)
    if manifest["world_size"] != engine.world_size:
        raise BadInput(
            f"{folder}: written by {manifest['world_size']} processes, this run has {engine.world_size}: "
            f"resume with --num-processes {manifest['world_size']}"
        )
    if manifest["zero_stage"] != engine.zero_stage:
        raise BadInput(f"{folder}: written under ZeRO stage {manifest['zero_stage']}, this run has {engine.zero_stage}")
    engine.load(folder)
    own = torch.load(folder / f"rank_{engine.rank}.pt", weights_only=True, map_location="cpu")
    if own["states"].keys() != states.keys():
        raise BadInput(f"{folder}: holds the states of {sorted(own['states'])}, this run needs {sorted(states)}")
    for name, state in states.items():
        state.load_state_dict(own["states"][name])
    restore_rng(own["rng"])
    return manifest["step"]
