"""Many encoded examples in little memory, and what became of every example on the way."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import BadInput
from .chats import Encoded, encode_text, encode_whole_chat, truncate
from .sources import Example


@dataclass
class EncodedSet(Sequence[Encoded]):
    """Encoded examples, stored flat (5 bytes a token). A sequence: ``encoded[i]`` is an :class:`Encoded`.

    ``sources[i]`` is the position, in what was given, of the example that item i came from: dropped examples leave
    gaps, and long plain texts give several items.
    """

    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # int32 [tokens]
    mask: np.ndarray = field(default_factory=lambda: np.empty(0, np.bool_))  # bool [tokens]
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # int64 [items]
    sources: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # int64 [items]
    num_truncated: int = 0  # items that were cut
    num_dropped: int = 0  # examples without a supervised token after cutting
    max_length: int | None = None
    # float64 [vocab]: how often the target means to say every id, where that is known; None: count the labels
    expected_counts: Tensor | None = None

    def __post_init__(self) -> None:
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        counts = np.concatenate([[0], np.cumsum(self.mask)])
        self.supervised = counts[self._starts[1:]] - counts[self._starts[:-1]]  # int64 [items]

    @classmethod
    def collect(
        cls, items: Iterable[tuple[int, Encoded]], max_length: int | None = None, where: str = "the data"
    ) -> "EncodedSet":
        """The set of (source, encoded) pairs, cut to `max_length`. Raises BadInput when nothing supervised is left."""
        ids, masks, lengths, sources, truncated, dropped = [], [], [], [], 0, 0
        for source, whole in items:
            encoded = whole if max_length is None else truncate(whole, max_length)
            if not any(encoded.loss_mask):
                dropped += 1
                continue
            truncated += encoded.truncated > 0
            ids.append(np.asarray(encoded.input_ids, np.int32))
            masks.append(np.asarray(encoded.loss_mask, np.bool_))
            lengths.append(len(encoded.input_ids))
            sources.append(source)
        if not lengths:
            raise BadInput(_all_dropped(where, dropped, max_length))
        return cls(
            np.concatenate(ids),
            np.concatenate(masks),
            np.asarray(lengths, np.int64),
            np.asarray(sources, np.int64),
            truncated,
            dropped,
            max_length,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Encoded:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        start, end = self._starts[index % len(self)], self._starts[index % len(self) + 1]
        return Encoded(self.ids[start:end].tolist(), self.mask[start:end].tolist())

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return int(self.lengths.sum())

    @property
    def num_supervised(self) -> int:
        """Tokens that are learned."""
        return int(self.mask.sum())

    def content_hash(self) -> str:
        """sha256 of what is read and what is supervised."""
        digest = hashlib.sha256()
        for array in (self.ids, self.mask, self.lengths):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """One line for the log: counts, and what was cut or dropped."""
        line = f"{len(self):,} examples, {self.num_tokens:,} tokens, {self.num_supervised:,} supervised"
        if self.num_truncated:
            line += f"; {self.num_truncated:,} cut to max_length {self.max_length}"
        if self.num_dropped:
            line += f"; {self.num_dropped:,} dropped: no supervised token in the first {self.max_length}"
        return line


def encode_examples(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], max_length: int, where: str = "the data"
) -> EncodedSet:
    """Chats and plain texts to one set. `where` names the data in errors.

    An example that has no supervised token among its first `max_length` is dropped and counted. Raises BadInput, naming
    the example, when one cannot be encoded, and when none is left.
    """
    if not examples:
        raise BadInput(f"{where} is empty")

    def encode_all() -> Iterable[tuple[int, Encoded]]:
        for position, example in enumerate(examples):
            try:
                if example.text is not None:
                    items = encode_text(tokenizer, example.text, max_length)
                else:
                    items = [encode_whole_chat(tokenizer, example.messages)]
            except BadInput as error:
                raise BadInput(f"{where}, example {example.id}: {error}") from error
            yield from ((position, item) for item in items)

    return EncodedSet.collect(encode_all(), max_length, where)


def _all_dropped(where: str, dropped: int, max_length: int | None) -> str:
    if not dropped:
        return f"{where} is empty"
    cut = f" among the first {max_length} tokens" if max_length is not None else ""
    return (
        f"{where}: none of the {dropped} examples has a supervised token{cut}; raise max_length or shorten the prompts"
    )
