"""The store that answers lie in: how large it will be, and what becomes of a damaged shard."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..data.store import ArraySpec, Damage, StoredSequence, bytes_per_row, layer_of
from ..data.store_writer import drop_from, rebuild
from ..progress import say


class _AnotherRound(Exception):
    """A round did not come back with the conversations that it once had."""

    def __init__(self, file: str):
        self.file = file


def mend(folder: Path, fingerprint: Mapping[str, Any], write_again: Callable[[Damage], list[StoredSequence]]) -> None:
    """Write every damaged shard of the store in `folder` again, each named in the log.

    Where other conversations come back (on another machine, say, a text of the target's own may end elsewhere), this shard
    and all after it, whose prompts were compared with what is lost, are dropped: the store is unfinished then.
    """

    def regenerate(damage: Damage) -> list[StoredSequence]:
        say(f"answers: {folder / damage.file} is {damage.reason}; the target writes it again")
        again = write_again(damage)
        if [sequence.source for sequence in again] != damage.sources:
            raise _AnotherRound(damage.file)
        return again

    try:
        rebuild(folder, fingerprint, regenerate)
    except _AnotherRound as other:
        say(f"answers: {folder / other.file} came back different; it and what follows it are written anew")
        drop_from(folder, other.file)


def size_words(arrays: Mapping[str, ArraySpec], answer_tokens: int | None, tokens: int | None) -> str:
    """What the arrays kept with answers take on disk: bytes a token and, where the most there can be of tokens is known
    (`answer_tokens`, and `tokens` with the prompts), of all. Hidden states of layers are kept at all tokens, others at those
    of the answers.
    """
    per_row = bytes_per_row(arrays)
    everywhere = any(layer_of(name) is not None for name in arrays)
    words = f"{per_row:,} bytes {'a token' if everywhere else 'an answer token'}"
    if answer_tokens is None or tokens is None:
        return f"{words}, as many as the minutes allow"
    rows = {name: answer_tokens if layer_of(name) is None else tokens for name in arrays}
    total = sum(spec.row_bytes * rows[name] for name, spec in arrays.items())
    return f"{words}, at most {tokens if everywhere else answer_tokens:,} of them, {total / 2**20:,.0f} MiB"
