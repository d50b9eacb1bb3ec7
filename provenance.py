"""What a run was: its resolved recipe, the versions of everything, the command, the machine, the memory it took."""

import json
import os
import platform
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from .errors import BadInput

_PACKAGES = (
    "draftsmith", "torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "safetensors", "tokenizers",
    "numpy", "tensorboard", "gguf",
)  # fmt: skip
# Keys that may differ between a start and its resumption: they move no weight (but see `_held`).
_FREE = ("output", "evaluate", "engine.threads", "engine.checkpoint_every", "engine.keep_checkpoints")
_GIB = 2**30


def open_run(folder: Path, recipe: Mapping[str, Any], *, resume: bool) -> None:
    """Begins or goes on with the run in `folder`: writes ``recipe.yaml``, or compares with the one that is there.

    A run that made nothing but its records may be begun anew, with another recipe too. Raises BadInput when the folder
    cannot be written, when it already holds a run and `resume` is off, or when a recipe key that matters has changed since
    the start. Call it on rank 0 only.
    """
    path = folder / "recipe.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() or _has_only_records(folder):
            _write(path, yaml.safe_dump(_plain(recipe), sort_keys=False, allow_unicode=True))
            return
    except OSError as error:
        raise BadInput(f"output: cannot write to {folder}: {error.strerror or error}") from error
    if not resume:
        raise BadInput(f"output: {folder} already holds a run: add --resume, or choose another output")
    check_unchanged(path, recipe)


def _has_only_records(folder: Path) -> bool:
    """Whether a run began here and made nothing. A recipe alone may be one that its author keeps there."""
    names = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}
    return names == {"recipe.yaml", "provenance.json"}


def check_unchanged(recipe_file: Path, recipe: Mapping[str, Any]) -> None:
    """Raises BadInput naming the first key whose value is not the one the run was started with."""
    before = dict(_flat(yaml.safe_load(recipe_file.read_text())))
    now = dict(_flat(_plain(recipe)))
    held = _held(before)
    for key in [*before, *(key for key in now if key not in before)]:
        free = _within(key, _FREE) and not _within(key, held)
        if before.get(key) != now.get(key) and not free:
            raise BadInput(
                f"{key}: the run was started with {before.get(key)!r}, now it is {now.get(key)!r}: "
                "set it back to resume, or choose another output"
            )


def _held(recipe: Mapping[str, Any]) -> list[str]:
    """Keys among the free ones that move what this run makes after all."""
    held = []
    if recipe.get("objective.rollouts.source") == "online":
        held.append("evaluate.num_speculative_tokens")  # the stream is drafted with as many
    if recipe.get("drafter.kind") == "layer_skip":
        held.append("evaluate.sampling")  # trials are weighed by the acceptance under it
    return held


def _within(key: str, names: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _plain(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe as YAML can hold it: tuples become lists."""
    return json.loads(json.dumps(recipe))


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; None counts as absent, so that a section left out equals one of Nones."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif value is not None:
        yield prefix, value


class Provenance:
    """The record of one session of a run (a start or a resumption) in ``provenance.json``."""

    def __init__(self, folder: Path, *, engine: list[str] | None = None, command: list[str] | None = None) -> None:
        """`engine`: the log's first lines; `command`: this process's own unless given. Use it on rank 0 only."""
        self._path = folder / "provenance.json"
        self._earlier = json.loads(self._path.read_text())["sessions"] if self._path.exists() else []
        self.session: dict[str, Any] = {
            "started": _now(),
            "command": shlex.join(sys.orig_argv if command is None else command),
            "engine": engine or [],
            "versions": versions(),
            "host": host(),
        }
        self._save()

    def finish(self, **values: Any) -> None:
        """Adds the end of the session: the time, the peak memory in GiB, and `values`."""
        self.session |= {"finished": _now(), "peak_memory_gib": peak_memory_gib(), **values}
        self._save()

    def _save(self) -> None:
        _write(self._path, json.dumps({"sessions": [*self._earlier, self.session]}, indent=1))


def versions() -> dict[str, str | None]:
    """Versions of Python and of every library that shapes a run (None: not installed), and the commit in a checkout."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found | {"commit": commit()}


def environment() -> dict[str, Any]:
    """What a measurement depends on besides its settings: the machine, the versions, the command."""
    facts = host()
    gpus = f", {', '.join(facts['gpus'])}" if facts["gpus"] else ""
    machine = f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads, {facts['memory_gib']} GiB{gpus}"
    command = shlex.join(["draftsmith", *sys.argv[1:]])
    return {"machine": f"{machine}; {facts['system']}", "versions": versions(), "command": command}


def commit() -> str | None:
    """The git commit this package is checked out at, with ``-dirty`` when files differ; None outside a checkout."""
    root = Path(__file__).parent
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def host() -> dict[str, Any]:
    """What the machine is: processor, cores, memory, GPUs."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory / _GIB, 1),
        "gpus": gpus,
    }


def peak_memory_gib() -> dict[str, float]:
    """Peak resident memory of this process and peak memory on its GPU, in GiB."""
    peak = {"cpu": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB, 3)}
    if torch.cuda.is_available():
        peak["gpu"] = round(torch.cuda.max_memory_allocated() / _GIB, 3)
    return peak


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write(path: Path, text: str) -> None:
    """Writes beside the file and renames, so that a kill leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text)
    os.replace(temporary, path)
