"""Sequences on disk: target answers, self-written prompts, teacher outputs. Reading; `store_writer` writes.

A store is a folder of safetensors shards and ``index.json``, which lists the shards with their sha256 and holds the
fingerprint: named hashes of everything the content depends on (target, tokenizer, template, data, settings). A store
with another fingerprint is refused with the name of what differs. A shard is checked once before its first use, so a
truncated or corrupted one is named, never trained on. Shards are mapped, few at a time, and single sequences read.

Layout of a shard: ``tokens`` int32 [tokens], ``lengths``, ``prompt_lengths`` int32 [sequences], ``sources`` int64
[sequences]; per array its rows end to end [rows, …] and ``NAME.rows`` int32 [sequences].
"""

import hashlib
import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import BadInput

FORMAT = 1
INDEX = "index.json"
_STATES = "states_"  # and the layer's number


class StoredSequence(NamedTuple):
    """One sequence and what was computed for it."""

    input_ids: Int[Tensor, "length"]
    prompt_length: int  # leading ids that were given; the rest was written by the target (0: no such split)
    arrays: dict[str, Tensor] = {}  # noqa: RUF012  # [rows, …]; which positions the rows belong to is the caller's rule
    source: int = -1  # number of the example it was made from; -1: its own number in the store


class ArraySpec(NamedTuple):
    """What a row of an array is."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


class Damage(NamedTuple):
    """A shard that cannot be used, and the sequences that were in it."""

    file: str
    reason: str
    indices: list[int]  # numbers in the store
    sources: list[int]  # the examples they were made from


def hidden_arrays(hidden_size: int, dtype: torch.dtype = torch.float16) -> dict[str, ArraySpec]:
    """Last hidden states: ``hidden`` [rows, hidden_size]."""
    return {"hidden": ArraySpec(dtype, (hidden_size,))}


def state_arrays(layers: Iterable[int], hidden_size: int, target_dtype: torch.dtype) -> dict[str, ArraySpec]:
    """Hidden states of `layers` at every position: ``states_N`` [rows, hidden_size]."""
    return {state_array(layer): ArraySpec(state_dtype(target_dtype), (hidden_size,)) for layer in layers}


def state_dtype(target_dtype: torch.dtype) -> torch.dtype:
    """What hidden states are stored as. Those of a bf16 target stay bf16: some layers exceed the range of float16."""
    return torch.bfloat16 if target_dtype == torch.bfloat16 else torch.float16


def as_stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy on the CPU in the type that it is stored as. Raises BadInput, naming `name`, where that cannot hold it."""
    cast = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    if dtype.is_floating_point and not torch.equal(torch.isfinite(cast), torch.isfinite(tensor).cpu()):
        kind = str(dtype).removeprefix("torch.")
        raise BadInput(
            f"{name}: values beyond the range of {kind}: set target.dtype (and data.dtype) to bfloat16, "
            "or, without rollouts, data.cache to none"
        )
    return cast


def state_array(layer: int) -> str:
    """The array that holds the hidden states of `layer` at all positions."""
    return f"{_STATES}{layer}"


def layer_of(array: str) -> int | None:
    """The layer whose hidden states at all positions `array` holds; None for other arrays."""
    return int(array.removeprefix(_STATES)) if array.startswith(_STATES) else None


def top_k_arrays(top_k: int) -> dict[str, ArraySpec]:
    """The most likely ids, their log-probabilities (nats) and the log of the mass that all others share."""
    return {
        "top_ids": ArraySpec(torch.int32, (top_k,)),
        "top_log_probs": ArraySpec(torch.float32, (top_k,)),
        "rest_log_mass": ArraySpec(torch.float32),
    }


def bytes_per_row(arrays: Mapping[str, ArraySpec]) -> int:
    """Bytes on disk for one row of every array; a token's id costs 4 more."""
    return sum(spec.row_bytes for spec in arrays.values())


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_fingerprint(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises BadInput that names the fields in which a store differs from what is needed."""
    wanted = json.loads(json.dumps(dict(wanted)))  # as it would be read back: tuples are lists
    differing = [key for key in sorted({*found, *wanted}) if found.get(key) != wanted.get(key)]
    if differing:
        details = "; ".join(
            f"{key}: {_short(found.get(key))} there, {_short(wanted.get(key))} here" for key in differing
        )
        raise BadInput(
            f"{folder} was made with another {', '.join(differing)} ({details}): delete it or use another folder"
        )


def read_index(folder: Path) -> dict[str, Any]:
    """The store's index. Raises BadInput when there is none, and when it cannot be read."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise BadInput(f"{folder}: no store here (no {INDEX})") from error
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: damaged index ({error}): delete the folder and make it again") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise BadInput(f"{path}: not a store of format {FORMAT}")
    return index


def parse_arrays(index: Mapping[str, Any]) -> dict[str, ArraySpec]:
    """The array specifications an index holds."""
    return {
        name: ArraySpec(getattr(torch, spec["dtype"]), tuple(spec["shape"])) for name, spec in index["arrays"].items()
    }


def open_complete(folder: Path, fingerprint: Mapping[str, Any]) -> "Store | None":
    """The store in `folder` if its writer said that nothing is missing; None when there is none or it is unfinished.

    Takes no lock: any number of processes may read. Raises BadInput for another fingerprint and a damaged index.
    """
    if not (folder / INDEX).exists():
        return None
    store = Store(folder, fingerprint)
    return store if store.complete else None


class Store(Sequence[StoredSequence]):
    """A store opened for reading: a sequence of :class:`StoredSequence`.

    `fingerprint` is what the content must have been made with (None: not checked). At most `open_shards` shards are
    mapped at a time. Raises BadInput for a folder without a store, another fingerprint, and, when one of its sequences
    is read, a shard that is missing, truncated or corrupted.
    """

    def __init__(self, folder: str | Path, fingerprint: Mapping[str, Any] | None = None, open_shards: int = 8) -> None:
        self.folder = Path(folder)
        self._index = read_index(self.folder)
        self.fingerprint: dict[str, Any] = self._index["fingerprint"]
        if fingerprint is not None:
            check_fingerprint(self.folder, self.fingerprint, fingerprint)
        self.arrays = parse_arrays(self._index)
        self.complete: bool = self._index["complete"]  # the writer said that nothing is missing
        self._shards: list[dict[str, Any]] = self._index["shards"]
        self._ends: list[int] = []
        for shard in self._shards:
            self._ends.append((self._ends[-1] if self._ends else 0) + shard["sequences"])
        self._checked: set[int] = set()
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        self._open_shards = open_shards

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> StoredSequence:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        number = bisect_right(self._ends, index)
        return self._shard(number).read(index - self._first(number), self.arrays, index)

    def lengths(self) -> list[int]:
        """Tokens of every sequence."""
        return [length for number in range(len(self._shards)) for length in self._shard(number).lengths]

    def sources(self) -> list[int]:
        """For every sequence the example it was made from."""
        return [source for number in range(len(self._shards)) for source in self._sources(number)]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(shard["tokens"] for shard in self._shards)

    @property
    def num_bytes(self) -> int:
        """Size of all shards on disk."""
        return sum(shard["bytes"] for shard in self._shards)

    def damaged(self) -> list[Damage]:
        """Every shard that is missing, truncated or corrupted. Reads all of them once; sound ones are not checked again."""
        found = []
        for number, shard in enumerate(self._shards):
            if reason := self._damage(number):
                first, end = self._first(number), self._ends[number]
                found.append(Damage(shard["file"], reason, list(range(first, end)), self._sources(number)))
            else:
                self._checked.add(number)
        return found

    def _first(self, number: int) -> int:
        return self._ends[number - 1] if number else 0

    def _sources(self, number: int) -> list[int]:
        kept = self._shards[number].get("sources")
        return kept if kept is not None else list(range(self._first(number), self._ends[number]))

    def _damage(self, number: int) -> str | None:
        shard = self._shards[number]
        path = self.folder / shard["file"]
        if not path.is_file():
            return "missing"
        if (size := path.stat().st_size) != shard["bytes"]:
            return f"{'truncated' if size < shard['bytes'] else 'too long'}: {size} bytes, expected {shard['bytes']}"
        return None if file_hash(path) == shard["sha256"] else "corrupted: its sha256 is not the one in the index"

    def _shard(self, number: int) -> "_Shard":
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        path = self.folder / self._shards[number]["file"]
        if number not in self._checked:
            if reason := self._damage(number):
                lost = f"sequences {self._first(number)} to {self._ends[number] - 1}"
                raise BadInput(f"{path}: {reason}; {lost} must be made again")
            self._checked.add(number)
        self._open[number] = _Shard(path, self.arrays)
        if len(self._open) > self._open_shards:
            self._open.popitem(last=False)
        return self._open[number]


class _Shard:
    """One mapped shard: its lengths in memory, the rest read where asked."""

    def __init__(self, path: Path, arrays: Mapping[str, ArraySpec]) -> None:
        try:
            self._file = safe_open(path, framework="pt")
            self.lengths: list[int] = self._file.get_tensor("lengths").tolist()
            self._prompt_lengths: list[int] = self._file.get_tensor("prompt_lengths").tolist()
            self._sources: list[int] = self._file.get_tensor("sources").tolist()
            rows = {name: self._file.get_tensor(f"{name}.rows").tolist() for name in arrays}
        except (OSError, SafetensorError) as error:
            raise BadInput(f"{path}: not a readable shard ({error})") from error
        self._starts = {name: _starts(counts) for name, counts in {"tokens": self.lengths, **rows}.items()}

    def read(self, index: int, arrays: Mapping[str, ArraySpec], number: int) -> StoredSequence:
        parts = {name: self._slice(name, index) for name in ("tokens", *arrays)}
        source = self._sources[index]
        ids = parts.pop("tokens").long()
        return StoredSequence(ids, self._prompt_lengths[index], parts, number if source < 0 else source)

    def _slice(self, name: str, index: int) -> Tensor:
        start, end = self._starts[name][index : index + 2]
        return self._file.get_slice(name)[start:end].clone()  # a copy, so that no mapping outlives its shard


def _starts(counts: Sequence[int]) -> list[int]:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
