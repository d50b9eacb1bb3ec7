"""Teacher-forced acceptance: alpha and greedy agreement at the positions of given answers.

The training log and the report call the same function with the same transforms, so that the one predicts the other.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..decode.draft import wants
from ..decode.sampling import Sampling, penalise, probabilities
from ..models.head import split
from ..models.target import Target

_TOKENS_PER_BATCH = 2048  # of padded input; the logits of one batch's answers are the largest tensor
_ROWS_PER_CHUNK = 256  # answer positions scored at a time


class Answer(NamedTuple):
    """A prompt and what the target said."""

    prompt: list[int]
    tokens: list[int]


class TeacherForced(NamedTuple):
    """Per position of one answer: the expected acceptance of a draft token, and whether the argmaxes agree."""

    alpha: Float[Tensor, "tokens"]
    agreement: Float[Tensor, "tokens"]


_NOTHING = TeacherForced(torch.zeros(0), torch.zeros(0))  # of an answer without tokens


class ForcedBatch(NamedTuple):
    """Answers side by side, and what the target made of them."""

    numbers: list[int]  # of the answers
    counts: list[int]  # tokens of each answer
    input_ids: Int[Tensor, "rows length"]
    attention_mask: Int[Tensor, "rows length"]
    positions: Int[Tensor, "rows most"]  # where the answers' tokens are predicted; padded with 0
    target_hidden: Float[Tensor, "rows most hidden"]  # the target's last hidden states there
    hidden_states: dict[int, Tensor]  # of the layers that the drafter wants, everywhere


def teacher_forced(target: Target, drafter: Any, answers: Sequence[Answer], sampling: Sampling) -> list[TeacherForced]:
    """Alpha after the sampling transforms (greedy settings: at temperature 1) and greedy agreement, for every position.

    Position i of an answer is where its token i is predicted, from the prompt and the tokens before it.

    `drafter` needs ``teacher_forced_hidden`` and ``first_token_logits`` (see the ``Drafter`` protocol).
    """
    return teacher_forced_each(target, [drafter], answers, sampling)[0]


def teacher_forced_each(
    target: Target,
    drafters: Sequence[Any],
    answers: Sequence[Answer],
    sampling: Sampling,
    done: Callable[[int], object] = lambda answers: None,
) -> list[list[TeacherForced]]:
    """:func:`teacher_forced` of several drafters for one pass of the target; ``done(n)`` is told of n answers scored."""
    layers = [list(wants(drafter).get("hidden_states", ())) for drafter in drafters]
    results = [[_NOTHING] * len(answers) for _ in drafters]
    for batch in forced_batches(target, answers, sorted({layer for some in layers for layer in some})):
        for drafter, wanted, found in zip(drafters, layers, results, strict=True):
            own = batch._replace(hidden_states={layer: batch.hidden_states[layer] for layer in wanted})
            scores = score(target, drafter, [own], len(answers), sampling)
            for number in batch.numbers:
                found[number] = scores[number]
        done(len(batch.numbers))
    return results


@torch.no_grad()
def score(
    target: Target, drafter: Any, batches: Iterable[ForcedBatch], num_answers: int, sampling: Sampling
) -> list[TeacherForced]:
    """:func:`teacher_forced` over batches that exist already (training measures the same ones again and again)."""
    if sampling.temperature == 0:
        sampling = Sampling(temperature=1.0, repetition_penalty=sampling.repetition_penalty)
    head = split(target.model)[1]
    results = [_NOTHING] * num_answers
    for batch in batches:
        hidden = drafter.teacher_forced_hidden(batch.input_ids, batch.attention_mask, batch.hidden_states)
        hidden = hidden.gather(1, batch.positions[..., None].expand(-1, -1, hidden.shape[-1]))
        for row, (number, count) in enumerate(zip(batch.numbers, batch.counts, strict=True)):
            alphas, agreements = [], []
            for part in torch.arange(count).split(_ROWS_PER_CHUNK):
                target_logits = head(batch.target_hidden[row, part]).float()
                draft_logits = drafter.first_token_logits(hidden[row, part])
                if sampling.repetition_penalty != 1.0:  # as in decoding: the target's alone, drafters propose without
                    seen = _seen(batch.input_ids[row], batch.positions[row, part], target_logits.shape[-1])
                    target_logits = penalise(target_logits, seen, sampling.repetition_penalty)
                alphas.append(_overlap(target_logits, draft_logits, sampling).cpu())
                agreements.append((target_logits.argmax(-1) == draft_logits.argmax(-1)).float().cpu())
            results[number] = TeacherForced(torch.cat(alphas), torch.cat(agreements))
    return results


def forced_batches(target: Target, answers: Sequence[Answer], layers: Sequence[int]) -> Iterator[ForcedBatch]:
    """One target pass over every answer, those of like length together. `layers`: hidden states to keep."""
    group: list[int] = []
    for i in sorted((i for i, answer in enumerate(answers) if answer.tokens), key=lambda i: _length(answers[i])):
        if group and (len(group) + 1) * _length(answers[i]) > _TOKENS_PER_BATCH:
            yield _forced(target, [answers[j] for j in group], group, layers)
            group = []
        group.append(i)
    if group:
        yield _forced(target, [answers[j] for j in group], group, layers)


def _length(answer: Answer) -> int:
    return len(answer.prompt) + len(answer.tokens)


@torch.no_grad()
def _forced(target: Target, answers: list[Answer], numbers: list[int], layers: Sequence[int]) -> ForcedBatch:
    width = max(_length(answer) for answer in answers) - 1
    ids = torch.zeros(len(answers), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    positions = torch.zeros(len(answers), max(len(answer.tokens) for answer in answers), dtype=torch.long)
    for row, answer in enumerate(answers):
        fed = (answer.prompt + answer.tokens)[:-1]
        ids[row, : len(fed)], mask[row, : len(fed)] = torch.tensor(fed), 1
        first = len(answer.prompt) - 1
        positions[row, : len(answer.tokens)] = torch.arange(first, first + len(answer.tokens))
    ids, mask, positions = ids.to(target.device), mask.to(target.device), positions.to(target.device)
    backbone = split(target.model)[0]
    out = backbone(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=bool(layers))
    hidden = {layer: out.hidden_states[layer] for layer in layers}
    at = positions[..., None].expand(-1, -1, out.last_hidden_state.shape[-1])
    counts = [len(answer.tokens) for answer in answers]
    return ForcedBatch(numbers, counts, ids, mask, positions, out.last_hidden_state.gather(1, at), hidden)


def _seen(ids: Int[Tensor, "length"], positions: Int[Tensor, "part"], vocab_size: int) -> Bool[Tensor, "part vocab"]:
    """Which ids stand at or before each of these positions, which follow one another: what the penalty is about."""
    seen = torch.zeros(len(positions), vocab_size, dtype=torch.int32, device=ids.device)
    seen[0, ids[: positions[0] + 1]] = 1
    seen[torch.arange(len(positions), device=ids.device), ids[positions]] = 1
    return seen.cumsum(0) > 0


def _overlap(target_logits: Tensor, draft_logits: Tensor, sampling: Sampling) -> Tensor:
    return torch.minimum(probabilities(target_logits, sampling), probabilities(draft_logits, sampling)).sum(-1)
