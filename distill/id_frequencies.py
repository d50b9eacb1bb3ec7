"""How often a target means to say every id: its probabilities, summed over positions of its answers.

A count of the answers' tokens knows nothing of ids that were likely and not drawn. A cut vocabulary chosen by expected
counts keeps more of the target's probability, the more so the fewer the answers and the larger the vocabulary.
"""

from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..data.store import Store
from ..decode.packed import fast_products
from ..models.head import split
from ..models.target import Target
from ..progress import say

_ROWS_AT_ONCE = 256  # positions whose logits exist at a time


@torch.no_grad()
def expected_counts(target: Target, store: Store, max_rows: int = 32768) -> Float[Tensor, "vocab"]:
    """The target's probabilities (temperature 1) summed over positions, float64.

    `store` holds the last hidden states of the answers as ``hidden``; of more than `max_rows` an even selection is read.
    """
    total = sum(len(sequence.arrays["hidden"]) for sequence in store)
    stride = max(1, -(-total // max_rows))
    head = split(target.model)[1]
    counts = torch.zeros(target.vocab_size, dtype=torch.float64, device=target.device)
    offset = 0  # so that the selection runs on from one answer into the next
    with fast_products(target.device):
        for sequence in store:
            hidden = sequence.arrays["hidden"]
            for rows in hidden[offset::stride].split(_ROWS_AT_ONCE):
                logits = head(rows.to(target.device, target.dtype)).float()
                counts += logits[:, : target.vocab_size].softmax(-1).sum(0, dtype=torch.float64)
            offset = (offset - len(hidden)) % stride
    return counts


def expected_counts_in(file: Path, target: Target, store: Store) -> Float[Tensor, "vocab"]:
    """:func:`expected_counts`, computed once and kept in `file`."""
    if not file.exists():
        say("counting the ids that the target means to say")
        partial = file.with_name(f".{file.name}.partial")
        save_file({"expected_counts": expected_counts(target, store).cpu()}, partial)
        partial.replace(file)
    return load_file(file)["expected_counts"]
