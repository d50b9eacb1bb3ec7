"""Writing stores: append-only, one shard at a time, safe against being killed at any moment.

A shard is written under a temporary name and renamed, then the index is. What the index does not list does not exist: a
process killed in between loses at most the sequences since the last flush, and the next writer goes on behind them.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import BadInput
from ..errors_disk import disk_errors
from .store import (
    FORMAT,
    INDEX,
    ArraySpec,
    Damage,
    Store,
    StoredSequence,
    as_stored,
    check_fingerprint,
    file_hash,
    parse_arrays,
    read_index,
)

_TEMPORARY = ".writing-"


class StoreWriter:
    """Appends sequences to the store in `folder`, which it makes, or goes on with when it has the same fingerprint.

    Sequences are flushed when `shard_bytes` or `flush_seconds` are reached, by `flush` and on leaving the ``with``
    block, with an exception too. ``done`` holds the sources that are in the store already: a resumed job skips them.
    Raises BadInput for another fingerprint, other arrays, a folder in use by another writer and one that cannot be
    written.
    """

    def __init__(
        self,
        folder: str | Path,
        fingerprint: Mapping[str, Any],
        arrays: Mapping[str, ArraySpec] | None = None,
        shard_bytes: int = 64 * 2**20,
        flush_seconds: float = 30.0,
    ) -> None:
        self.folder = Path(folder)
        self.arrays = dict(arrays or {})
        self.shard_bytes, self.flush_seconds = shard_bytes, flush_seconds
        self._pending: list[StoredSequence] = []
        self._pending_bytes, self._last_flush = 0, time.monotonic()
        self._lock = _lock(self.folder)
        try:
            self._index = self._open_index(dict(fingerprint))
            _remove_leftovers(self.folder, {shard["file"] for shard in self._index["shards"]})
        except BaseException:
            self._lock.close()
            raise
        stored = Store(self.folder)
        self._count, self.done = len(stored), set(stored.sources())

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return self._count

    @property
    def complete(self) -> bool:
        """Whether `finish` was called: nothing is missing."""
        return self._index["complete"]

    def append(self, sequence: StoredSequence) -> int:
        """Add a sequence; its number in the store. Arrays are cast to the store's types.

        Raises BadInput for arrays of other names or shapes, and for values too large for the store's type.
        """
        number = self._take(sequence)
        if self._pending_bytes >= self.shard_bytes or time.monotonic() - self._last_flush >= self.flush_seconds:
            self.flush()
        return number

    def _take(self, sequence: StoredSequence) -> int:
        number = self._count
        source = number if sequence.source < 0 else sequence.source
        checked = _checked(self.folder, sequence, self.arrays)._replace(source=source)
        self._pending.append(checked)
        self._pending_bytes += checked.input_ids.nbytes + sum(tensor.nbytes for tensor in checked.arrays.values())
        self._count += 1
        self.done.add(source)
        return number

    def append_all(self, sequences: Sequence[StoredSequence]) -> None:
        """Add sequences and write them as one shard: after an exception or an interrupt all of them are there, or none.

        Raises as `append` does.
        """
        self.flush()
        count, done = self._count, set(self.done)
        try:
            for sequence in sequences:
                self._take(sequence)
        except BaseException:
            self._pending, self._pending_bytes, self._count, self.done = [], 0, count, done
            raise
        self.flush()

    def flush(self) -> None:
        """Write what is pending as a shard, then the index that lists it."""
        self._last_flush = time.monotonic()
        if not self._pending:
            return
        first = self._count - len(self._pending)
        file = f"shard-{len(self._index['shards']):05d}.safetensors"
        entry = _write_shard(self.folder, file, self._pending, self.arrays, first)
        self._index["shards"].append(entry)
        _write_index(self.folder, self._index)
        self._pending, self._pending_bytes = [], 0

    def finish(self) -> None:
        """Flush, and note in the index that nothing is missing."""
        self.flush()
        self._index["complete"] = True
        _write_index(self.folder, self._index)

    def close(self) -> None:
        """Flush, and let other writers in."""
        if not self._lock.closed:
            try:
                self.flush()
            finally:
                self._lock.close()

    def _open_index(self, fingerprint: dict[str, Any]) -> dict[str, Any]:
        if not (self.folder / INDEX).exists():
            arrays = {name: {"dtype": str(a.dtype)[6:], "shape": list(a.shape)} for name, a in self.arrays.items()}
            index = {"format": FORMAT, "complete": False, "fingerprint": fingerprint, "arrays": arrays, "shards": []}
            _write_index(self.folder, index)
        index = read_index(self.folder)
        check_fingerprint(self.folder, index["fingerprint"], fingerprint)
        if parse_arrays(index) != self.arrays:
            raise BadInput(f"{self.folder} holds the arrays {index['arrays']}: delete it or use another folder")
        return index


def rebuild(
    folder: str | Path,
    fingerprint: Mapping[str, Any],
    regenerate: Callable[[Damage], Iterable[StoredSequence]],
) -> list[Damage]:
    """Replace every damaged shard; what was replaced.

    ``regenerate(damage)`` gives the sequences ``damage.indices`` again, in that order (``damage.sources`` says which
    examples they were made from). Each shard is replaced as soon as its sequences are there, so that a killed rebuild
    goes on where it was. Raises BadInput when another number of sequences comes back.
    """
    folder = Path(folder)
    store = Store(folder, fingerprint)
    damages = store.damaged()
    if not damages:
        return []
    with _lock(folder):
        for damage in damages:
            again = [_checked(folder, sequence, store.arrays) for sequence in regenerate(damage)]
            if len(again) != len(damage.indices):
                raise BadInput(
                    f"{folder / damage.file}: {len(again)} sequences came back, expected {len(damage.indices)}"
                )
            sequences = [s._replace(source=source) for s, source in zip(again, damage.sources, strict=True)]
            index = read_index(folder)
            number = next(n for n, shard in enumerate(index["shards"]) if shard["file"] == damage.file)
            index["shards"][number] = _write_shard(folder, damage.file, sequences, store.arrays, damage.indices[0])
            _write_index(folder, index)
    return damages


def drop_from(folder: str | Path, file: str) -> None:
    """Forget the shard `file` and all behind it: the store ends before it, unfinished."""
    folder = Path(folder)
    with _lock(folder):
        index = read_index(folder)
        number = next(n for n, shard in enumerate(index["shards"]) if shard["file"] == file)
        index["shards"], index["complete"] = index["shards"][:number], False
        _write_index(folder, index)


def _checked(folder: Path, sequence: StoredSequence, arrays: Mapping[str, ArraySpec]) -> StoredSequence:
    """A copy on the CPU in the store's types. Raises BadInput for what does not fit `arrays`."""
    if set(sequence.arrays) != set(arrays):
        raise BadInput(f"{folder}: arrays {sorted(sequence.arrays)}, expected {sorted(arrays)}")
    ids = sequence.input_ids.detach().to("cpu", torch.int32, copy=True)
    if not 0 <= sequence.prompt_length <= len(ids):
        raise BadInput(f"{folder}: prompt of {sequence.prompt_length} tokens in a sequence of {len(ids)}")
    cast = {name: _cast(folder, name, tensor, arrays[name]) for name, tensor in sequence.arrays.items()}
    return StoredSequence(ids, sequence.prompt_length, cast, sequence.source)


def _cast(folder: Path, name: str, tensor: Tensor, spec: ArraySpec) -> Tensor:
    if tensor.dim() != len(spec.shape) + 1 or tuple(tensor.shape[1:]) != spec.shape:
        raise BadInput(f"{folder}: {name} is {list(tensor.shape)}, expected {['rows', *spec.shape]}")
    return as_stored(f"{folder}: {name}", tensor, spec.dtype)


def _write_shard(
    folder: Path, file: str, sequences: list[StoredSequence], arrays: Mapping[str, ArraySpec], first: int
) -> dict[str, Any]:
    """Write a shard in place of whatever has its name; its entry for the index."""
    ids = [sequence.input_ids for sequence in sequences]
    sources = [sequence.source for sequence in sequences]
    tensors = {
        "tokens": torch.cat(ids),
        "lengths": torch.tensor([len(i) for i in ids], dtype=torch.int32),
        "prompt_lengths": torch.tensor([sequence.prompt_length for sequence in sequences], dtype=torch.int32),
        "sources": torch.tensor(sources, dtype=torch.int64),
    }
    for name in arrays:
        rows = [sequence.arrays[name] for sequence in sequences]
        tensors[name] = torch.cat(rows)
        tensors[f"{name}.rows"] = torch.tensor([len(r) for r in rows], dtype=torch.int32)
    temporary, path = folder / f"{_TEMPORARY}{file}", folder / file
    with disk_errors(f"{path}: cannot be written"):
        save_file(tensors, temporary)
        _replace(temporary, path)
    entry = {
        "file": file,
        "sequences": len(sequences),
        "tokens": len(tensors["tokens"]),
        "bytes": path.stat().st_size,
        "sha256": file_hash(path),
    }
    if sources != list(range(first, first + len(sources))):
        entry["sources"] = sources
    return entry


def _write_index(folder: Path, index: Mapping[str, Any]) -> None:
    temporary, path = folder / f"{_TEMPORARY}{INDEX}", folder / INDEX
    with disk_errors(f"{path}: cannot be written"):
        temporary.write_text(json.dumps(index, indent=1), "utf-8")
        _replace(temporary, path)


def _replace(temporary: Path, path: Path) -> None:
    """Rename, with content and name on disk before anything that relies on them."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(folder: Path) -> Any:
    """An exclusive lock on the store, released by closing it or by the process's end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise BadInput(f"{folder}: cannot be written ({error.strerror})") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise BadInput(f"{folder}: another process is writing to it") from error
    return lock


def _remove_leftovers(folder: Path, listed: set[str]) -> None:
    """Remove what a killed writer left behind: temporary files, and a shard that no index lists."""
    for path in [*folder.glob(f"{_TEMPORARY}*"), *folder.glob("shard-*.safetensors")]:
        if path.name not in listed:
            path.unlink()
