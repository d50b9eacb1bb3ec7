"""Caches of the target's outputs over a training set: written once, resumable, read in every epoch.

Three forms: the last hidden states, from which the frozen head rebuilds every logit (2 bytes · hidden a label instead of
2 bytes · vocabulary), the k most likely ids with the exact log of the mass that all others share, or the hidden states of
some layers at every position, which drafters that live on the target are computed from.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..data.encoded_set import EncodedSet
from ..data.packing import Packed, pack
from ..data.store import (
    ArraySpec,
    Damage,
    Store,
    StoredSequence,
    bytes_per_row,
    hidden_arrays,
    open_complete,
    state_array,
    state_arrays,
    top_k_arrays,
)
from ..data.store_writer import StoreWriter, rebuild
from ..data.turns import template_hash
from ..models.target import Target
from ..models.vocabulary import tokenizer_hash
from ..models.weights_sample import weights_hash
from ..progress import say, stage
from .attention import reads_by_document
from .batch import distill_batch
from .teacher import Teacher, absolute_layer, all_hidden

Form = Literal["hidden", "topk", "states"]
_ROWS_AT_ONCE = 256  # labels whose logits exist at a time
_TOKENS_AT_ONCE = 4096


class CacheForm(NamedTuple):
    """What is kept: a form, with the number of ids of `topk` and the layers of `states`."""

    form: Form
    top_k: int
    layers: tuple[int, ...] = ()  # as transformers counts hidden states, or from the last back

    @property
    def unit(self) -> str:
        """What has a row."""
        return "token" if self.form == "states" else "label"

    def of(self, target: Target) -> "CacheForm":
        """As `target` can give it: no more ids than it has, its layers counted from the first."""
        layers = tuple(absolute_layer(layer, target.num_layers) for layer in self.layers)
        return self._replace(top_k=min(self.top_k, target.vocab_size), layers=layers)

    def arrays(self, target: Target) -> dict[str, ArraySpec]:
        """What a row holds."""
        match self.form:
            case "hidden":
                return hidden_arrays(target.hidden_size)
            case "topk":
                return top_k_arrays(self.top_k)
            case "states":
                return state_arrays(self.layers, target.hidden_size, target.dtype)

    def size_words(self, target: Target, rows: int | None, at_most: bool = False) -> str:
        """What `rows` of them (None: unknown as yet) take on disk."""
        per_row, unit = bytes_per_row(self.arrays(target)), self.unit
        if rows is None:
            return f"teacher cache: {per_row:,} bytes a {unit}, as many as the minutes allow"
        most = "at most " if at_most else ""
        return f"teacher cache: {per_row:,} bytes a {unit}, {most}{rows:,} {unit}s, {per_row * rows / 2**20:,.0f} MiB"

    @property
    def name(self) -> str:
        """For the fingerprint."""
        match self.form:
            case "hidden":
                return "hidden"
            case "topk":
                return f"top {self.top_k}"
            case "states":
                return f"states of layers {', '.join(map(str, self.layers))}"


def is_teacher_cache(store: Store) -> bool:
    """Whether `store` was made by :func:`cache_teacher`: its sequences are then numbered as the set's items are."""
    return "form" in store.fingerprint


def cache_teacher(
    target: Target,
    encoded: EncodedSet,
    form: Form,
    top_k: int,
    folder: Path,
    data_hash: str,
    layers: Sequence[int] = (),
) -> Store:
    """The target's outputs at every supervised label of `encoded` (of the form `states`: at every token, of `layers`),
    in `folder`; what is missing or damaged is made (again). Sequence i belongs to item i of `encoded`.

    Raises:
        BadInput: the folder holds a cache of another target, tokenizer, template, data or form; the line names which.
    """
    cached = CacheForm(form, top_k, tuple(layers)).of(target)
    arrays, unit = cached.arrays(target), cached.unit
    counts = encoded.lengths if cached.form == "states" else encoded.supervised
    rows = int(counts.sum())
    fingerprint = _fingerprint(target, encoded, cached, data_hash)
    made = open_complete(folder, fingerprint)
    if made is not None and not made.damaged():
        return made  # without the lock, which other ranks would be refused
    with StoreWriter(folder, fingerprint, arrays) as writer:
        missing = [i for i in range(len(encoded)) if i not in writer.done]
        if missing:
            say(cached.size_words(target, rows))
            with stage("the target reads the training set", rows, unit=f"{unit}s") as bar:
                bar.advance(rows - sum(int(counts[i]) for i in missing))
                for sequence in _sequences(target, encoded, missing, cached):
                    writer.append(sequence)
                    bar.advance(len(next(iter(sequence.arrays.values()))))
        if not writer.complete:
            writer.finish()

    def again(damage: Damage) -> Iterable[StoredSequence]:
        say(f"teacher cache: {folder / damage.file} is {damage.reason}; making it again")
        return _sequences(target, encoded, damage.sources, cached)

    rebuild(folder, fingerprint, again)
    return Store(folder, fingerprint)


def _fingerprint(target: Target, encoded: EncodedSet, cached: CacheForm, data_hash: str) -> dict[str, Any]:
    return {
        "target": target.name,
        "weights": weights_hash(target),
        "dtype": str(target.dtype),
        "tokenizer": tokenizer_hash(target.tokenizer) if target.tokenizer is not None else None,
        "chat_template": template_hash(target.tokenizer) if target.tokenizer is not None else None,
        "data": data_hash,
        "max_length": encoded.max_length,
        "form": cached.name,
    }


@torch.no_grad()
def _sequences(
    target: Target, encoded: EncodedSet, numbers: Sequence[int], cached: CacheForm
) -> Iterator[StoredSequence]:
    """Run the target over the examples `numbers` and yield their outputs in that order."""
    teacher = Teacher(target)
    for group in _groups(encoded, numbers):
        longest = max(int(encoded.lengths[i]) for i in group)
        length = sys.maxsize if reads_by_document(teacher.backbone, longest) else longest
        packed = pack([encoded[i] for i in group], length, numbers=group)
        batch = distill_batch(packed, target.device)
        if cached.form == "states":
            by_example = _split_states(packed, all_hidden(teacher, batch, cached.layers))
        else:
            by_example = _split(packed, _outputs(teacher, teacher.hidden(batch), cached), encoded)
        for number in group:
            ids = torch.tensor(encoded[number].input_ids)
            yield StoredSequence(ids, 0, by_example[number], number)


def _groups(encoded: EncodedSet, numbers: Sequence[int]) -> Iterator[list[int]]:
    group: list[int] = []
    tokens = 0
    for number in numbers:
        length = int(encoded.lengths[number])
        if group and tokens + length > _TOKENS_AT_ONCE:
            yield group
            group, tokens = [], 0
        group.append(number)
        tokens += length
    if group:
        yield group


def _outputs(teacher: Teacher, hidden: Tensor, cached: CacheForm) -> dict[str, Tensor]:
    if cached.form == "hidden":
        return {"hidden": hidden}
    parts = [_top_k(teacher.head(chunk).float(), cached.top_k) for chunk in hidden.split(_ROWS_AT_ONCE)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _top_k(logits: Tensor, top_k: int) -> dict[str, Tensor]:
    """The k most likely ids and the log of what all others weigh, summed over them (1 minus the rest would cancel)."""
    log_total = logits.logsumexp(-1)
    values, ids = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    rest = logits.scatter(-1, ids, float("-inf")).logsumexp(-1) - log_total
    return {
        "top_ids": ids,
        "top_log_probs": values - log_total[:, None],
        # A rest of exactly nothing (k spans the vocabulary) must stay finite on disk.
        "rest_log_mass": rest.clamp(min=-1.0e4),
    }


def _split(packed: Packed, rows: dict[str, Tensor], encoded: EncodedSet) -> dict[int, dict[str, Tensor]]:
    """Rows of a packed batch by example; labels are in row order."""
    found: dict[int, dict[str, Tensor]] = {}
    start = 0
    for placed in sorted(packed.placed, key=lambda p: (p.row, p.start)):
        end = start + int(encoded.supervised[placed.example])
        found[placed.example] = {name: values[start:end] for name, values in rows.items()}
        start = end
    return found


def _split_states(packed: Packed, states: dict[int, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Every position's rows of a packed batch by example."""
    return {
        placed.example: {
            state_array(layer): rows[placed.row, placed.start : placed.start + placed.length]
            for layer, rows in states.items()
        }
        for placed in packed.placed
    }
