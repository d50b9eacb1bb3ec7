"""Folders that are written whole or not at all, and the ``draftsmith.json`` that says what a drafter's folder holds."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import BadInput
from ..errors_disk import disk_errors

MANIFEST = "draftsmith.json"
FORMAT = 1


@contextlib.contextmanager
def written_whole(folder: str | Path) -> Iterator[Path]:
    """Write a folder under a temporary name beside it; rename it when the block ends without an error.

    A process killed in between leaves the old folder, or none, never half of one. What an earlier kill left is removed.

    Raises:
        BadInput: the place cannot be written to, or the disk takes no more.
    """
    folder = Path(folder).absolute()
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder}: cannot be written: there is a file of that name")
    partial, replaced = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.replaced")
    with disk_errors(f"{folder}: cannot be written"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if replaced.exists() and not folder.exists():  # killed between the two renames below
            replaced.rename(folder)
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if folder.exists():
            folder.rename(replaced)
        os.replace(partial, folder)
    shutil.rmtree(replaced, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Hold `folder` against other processes (ranks of one run, say) that would make it too; they wait.

    Raises:
        BadInput: the place cannot be written to.
    """
    folder = Path(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise BadInput(f"{folder}: cannot be written: {error.strerror or error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def write_manifest(folder: Path, kind: str, **facts: Any) -> None:
    """Write ``draftsmith.json``: the format's number, the drafter's kind and whatever else identifies it."""
    text = json.dumps({"format": FORMAT, "kind": kind, **facts}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: str | Path) -> dict[str, Any] | None:
    """The content of a folder's ``draftsmith.json``, or None where there is none (a plain transformers folder).

    Raises:
        BadInput: it is not valid, or of a later format.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not valid JSON: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("kind"), str):
        raise BadInput(f"{path}: expected an object with the keys format and kind")
    if manifest.get("format") != FORMAT:
        raise BadInput(f"{path}: format {manifest.get('format')!r}, this version reads format {FORMAT}")
    return manifest


def hash_files(folder: Path) -> dict[str, str]:
    """The sha256 of every safetensors file under `folder`, by its path there."""
    hashes = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with path.open("rb") as file:
            hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def check_files(folder: Path, expected: dict[str, str]) -> None:
    """Raise BadInput, naming the file, unless the safetensors files under `folder` are the `expected` ones."""
    found = hash_files(folder)
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise BadInput(f"{folder / name}: the file is missing")
        if expected.get(name) != found[name]:
            raise BadInput(f"{folder / name}: damaged or changed since it was saved ({MANIFEST} has another sha256)")
