"""Jacobi decoding: draft what the target itself predicted for these positions in its last pass."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from .draft import Accepted, Draft, TargetOutputs, chain
from .named import check_whole
from .sampling import Sampling


class Jacobi:
    """Parallel decoding by fixed-point iteration (arXiv:2305.10427), as a drafter.

    A pass over guesses for the coming positions gives the target's predictions for all of them. Those up to the first
    guess that was wrong are right and are emitted; the ones after it were made after wrong tokens, but are better guesses
    than none: the next draft. Positions that no pass has reached yet hold the padding token, as all do in the beginning.
    The block of guesses moves on with the output, instead of waiting until all of it has converged.

    Guesses are chosen without chance (predictions are argmaxes under sampling too), so their ``draft_probs`` are one-hot.
    """

    num_parameters_read = 0

    def __init__(self, pad_id: int = 0):
        check_whole("jacobi", 0, pad_id=pad_id)
        self.pad_id = pad_id
        self.wants = {"logits": True}

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Begin with no guesses."""
        self.guesses = input_ids[:, :0]

    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """The guesses, padded to `num_tokens`."""
        guesses = self.guesses[:, :num_tokens]
        return chain(torch.nn.functional.pad(guesses, (0, num_tokens - guesses.shape[1]), value=self.pad_id))

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Take the predictions for the positions after what was emitted."""
        assert target_outputs is not None
        if target_outputs.logits is None:  # the prefill predicts nothing of what is to come
            return
        predictions = target_outputs.logits.argmax(-1)  # [batch, fed]: of the token after each fed one
        fed = predictions.shape[1]
        at = accepted.lengths[:, None] + torch.arange(fed - 1, device=predictions.device)
        inside = at.clamp(max=fed - 1)
        known = (at < fed) & target_outputs.valid.gather(1, inside)
        self.guesses = torch.where(known, predictions.gather(1, inside), self.pad_id)
