"""How far a rule that is not lossless drifts: the target's log-probability of its output, and of plain decoding's."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..models.head import split
from ..models.target import Target
from .alpha import Answer, forced_batches
from .records import PromptRecord

_ROWS_PER_CHUNK = 256  # answer positions whose logits are held at a time


@torch.no_grad()
def token_log_probabilities(target: Target, answers: Sequence[Answer]) -> list[Float[Tensor, "tokens"]]:
    """The target's log-probability (nats) of every token of every answer, at temperature 1 and without any filter.

    Filters would make it minus infinity for a token they exclude, and figures at different settings would not compare.
    """
    head = split(target.model)[1]
    results = [torch.zeros(0) for _ in answers]
    for batch in forced_batches(target, answers, ()):
        for row, (number, count) in enumerate(zip(batch.numbers, batch.counts, strict=True)):
            tokens = torch.tensor(answers[number].tokens, device=target.device)
            parts = []
            for part in torch.arange(count).split(_ROWS_PER_CHUNK):
                logs = head(batch.target_hidden[row, part]).float().log_softmax(-1)
                parts.append(logs.gather(1, tokens[part, None])[:, 0].cpu())
            results[number] = torch.cat(parts)
    return results


def add_drift(
    target: Target, records: Sequence[PromptRecord], answers: Sequence[Answer], plain: Sequence[Answer]
) -> None:
    """Fill in the log-probability sums of every record: of the emitted tokens, and of plain decoding's.

    `answers` and `plain` are, record by record, what the rule and plain decoding said to the same prompt. The records'
    `emitted` and `plain_emitted` must count the same tokens.
    """
    sums = [float(logs.sum()) for logs in token_log_probabilities(target, [*answers, *plain])]
    for i, record in enumerate(records):
        record.target_log_probability_sum = sums[i]
        record.plain_target_log_probability_sum = sums[len(answers) + i]
