"""How often a target means to say every id: its probabilities, summed over positions of its answers.

A count of the answers' tokens knows nothing of ids that were likely and not drawn. A cut vocabulary chosen by expected
counts keeps more of the target's probability, the more so the fewer the answers and the larger the vocabulary.
"""

from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..data.store import Store, StoredSequence, state_array
from ..decode.packed import fast_products
from ..errors_disk import disk_errors
from ..models.head import split
from ..models.target import Target
from ..progress import say

_ROWS_AT_ONCE = 256  # positions whose logits exist at a time


@torch.no_grad()
def expected_counts(target: Target, store: Store, max_rows: int = 32768) -> Float[Tensor, "vocab"]:
    """The target's probabilities (temperature 1) summed over positions, float64.

    `store` holds the last hidden states of the answers, alone or with those of all positions and other layers; of more
    than `max_rows` an even selection is read.
    """
    total = sum(len(_answer_states(target, sequence)) for sequence in store)
    stride = max(1, -(-total // max_rows))
    head = split(target.model)[1]
    counts = torch.zeros(target.vocab_size, dtype=torch.float64, device=target.device)
    offset = 0  # so that the selection runs on from one answer into the next
    with fast_products(target.device):
        for sequence in store:
            hidden = _answer_states(target, sequence)
            for rows in hidden[offset::stride].split(_ROWS_AT_ONCE):
                logits = head(rows.to(target.device, target.dtype)).float()
                counts += logits[:, : target.vocab_size].softmax(-1).sum(0, dtype=torch.float64)
            offset = (offset - len(hidden)) % stride
    return counts


def _answer_states(target: Target, sequence: StoredSequence) -> Float[Tensor, "tokens hidden"]:
    """The last hidden states that the answer's tokens were predicted from."""
    if "hidden" in sequence.arrays:
        return sequence.arrays["hidden"]
    everywhere = sequence.arrays[state_array(target.num_layers)]
    return everywhere[sequence.prompt_length - 1 : len(sequence.input_ids) - 1]


def expected_counts_in(file: Path, target: Target, store: Store) -> Float[Tensor, "vocab"]:
    """:func:`expected_counts`, computed once and kept in `file`."""
    if not file.exists():
        say("counting the ids that the target means to say")
        partial = file.with_name(f".{file.name}.partial")
        counts = expected_counts(target, store).cpu()
        with disk_errors(f"{file}: cannot be written"):
            save_file({"expected_counts": counts}, partial)
            partial.replace(file)
    return load_file(file)["expected_counts"]
