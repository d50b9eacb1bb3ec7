"""Caches of the target's outputs over a training set: written once, resumable, read in every epoch.

Two forms: the last hidden states, from which the frozen head rebuilds every logit (2 bytes · hidden a label instead of
2 bytes · vocabulary), or the k most likely ids with the exact log of the mass that all others share.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..data.encoded_set import EncodedSet
from ..data.packing import Packed, pack
from ..data.store import Damage, Store, StoredSequence, bytes_per_row, hidden_arrays, top_k_arrays
from ..data.store_writer import StoreWriter, rebuild
from ..data.turns import template_hash
from ..models.target import Target
from ..models.vocabulary import tokenizer_hash
from ..progress import say, stage
from .batch import distill_batch
from .teacher import Teacher

Form = Literal["hidden", "topk"]
_ROWS_AT_ONCE = 256  # labels whose logits exist at a time
_TOKENS_AT_ONCE = 4096


def cache_teacher(target: Target, encoded: EncodedSet, form: Form, top_k: int, folder: Path, data_hash: str) -> Store:
    """The target's outputs at every supervised label of `encoded`, in `folder`; what is missing or damaged is made (again).

    Raises:
        BadInput: the folder holds a cache of another target, tokenizer, template, data or form; the line names which.
    """
    arrays = hidden_arrays(target.hidden_size) if form == "hidden" else top_k_arrays(top_k)
    per_label = bytes_per_row(arrays)
    labels = encoded.num_supervised
    fingerprint = _fingerprint(target, encoded, form, top_k, data_hash)
    with StoreWriter(folder, fingerprint, arrays) as writer:
        missing = [i for i in range(len(encoded)) if i not in writer.done]
        if missing:
            say(f"teacher cache: {per_label:,} bytes a label, {labels:,} labels, {per_label * labels / 2**20:,.0f} MiB")
            with stage("the target reads the training set", labels, unit="labels") as bar:
                bar.advance(labels - sum(int(encoded.supervised[i]) for i in missing))
                for sequence in _sequences(target, encoded, missing, form, top_k):
                    writer.append(sequence)
                    bar.advance(len(next(iter(sequence.arrays.values()))))
        if not writer.complete:
            writer.finish()

    def again(damage: Damage) -> Iterable[StoredSequence]:
        say(f"teacher cache: {folder / damage.file} is {damage.reason}; making it again")
        return _sequences(target, encoded, damage.sources, form, top_k)

    rebuild(folder, fingerprint, again)
    return Store(folder, fingerprint)


def _fingerprint(target: Target, encoded: EncodedSet, form: Form, top_k: int, data_hash: str) -> dict[str, Any]:
    return {
        "target": target.name,
        "dtype": str(target.dtype),
        "tokenizer": tokenizer_hash(target.tokenizer) if target.tokenizer is not None else None,
        "chat_template": template_hash(target.tokenizer) if target.tokenizer is not None else None,
        "data": data_hash,
        "max_length": encoded.max_length,
        "form": form if form == "hidden" else f"top {top_k}",
    }


@torch.no_grad()
def _sequences(
    target: Target, encoded: EncodedSet, numbers: Sequence[int], form: Form, top_k: int
) -> Iterator[StoredSequence]:
    """Run the target over the examples `numbers` and yield their outputs in that order."""
    teacher = Teacher(target)
    for group in _groups(encoded, numbers):
        packed = pack([encoded[i] for i in group], max(int(encoded.lengths[i]) for i in group), numbers=group)
        batch = distill_batch(packed, target.device)
        rows = _outputs(teacher, teacher.hidden(batch), form, top_k)
        by_example = _split(packed, rows, encoded)
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


def _outputs(teacher: Teacher, hidden: Tensor, form: Form, top_k: int) -> dict[str, Tensor]:
    if form == "hidden":
        return {"hidden": hidden}
    parts = [_top_k(teacher.head(chunk).float(), top_k) for chunk in hidden.split(_ROWS_AT_ONCE)]
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
