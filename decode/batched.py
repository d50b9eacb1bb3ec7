"""Plain sampling of many prompts: the slots of a batch are refilled as rows finish.

For the data stages, where throughput is all that counts. Prompts are taken in the given order (sort them by length to keep
the padding small); every prompt has a random stream of its own, so its answer does not depend on which slot it got. What all
prompts begin with (a chat template's system prompt) is read once, and stays in every slot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..models.draft_lm import DraftLM
from ..models.target import Target
from .forward import CachedLM
from .sampling import Sampling, draw, probabilities
from .streams import mix

_LOGITS_AT_ONCE = 2**19
# Tokens that could be read in the time that a pass takes whatever it reads: for the weights, and for starting kernels.
_PASS_IN_TOKENS = {"cpu": 64}
_PASS_IN_TOKENS_ELSEWHERE = 4096


class Generated(NamedTuple):
    """One finished row."""

    index: int  # of the prompt
    tokens: list[int]  # new ones, EOS included
    # Hidden states that the new tokens were predicted from: of the prompt's last token to the last but one new token.
    hidden: Float[Tensor, "tokens hidden"] | None
    ended: bool  # at an EOS id rather than at the limit
    # Of the layers asked for, at every position but that of the last new token, which is never read.
    states: dict[int, Float[Tensor, "positions hidden"]] = {}  # noqa: RUF012 - a NamedTuple's default


@dataclass
class _Row:
    index: int
    limit: int  # new tokens, at most
    tokens: list[int]
    uniforms: Tensor  # one per token it may emit
    hidden: list[Tensor]
    states: dict[int, list[Tensor]]  # by layer, in order of position


class _Rules(NamedTuple):
    """What holds for every row."""

    sampling: Sampling
    eos: frozenset[int]
    keep_hidden: bool
    kept_ids: Tensor | None
    num_shared: int  # tokens that all prompts begin with


@torch.no_grad()
def generate_batched(
    target: Target | DraftLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling,
    eos_token_ids: Sequence[int] | None = None,
    batch_size: int = 32,
    seed: int = 0,
    keep_hidden: bool = False,
    keep_states: Sequence[int] = (),
    indices: Sequence[int] | None = None,
) -> Iterator[Generated]:
    """Answer every prompt; rows are yielded as they finish.

    Args:
        target: what answers; a draft model writes with the ids that it scores.
        prompts: token ids, at least one each; their own length plus the answer must fit the target's context.
        max_new_tokens: of every answer, or of each prompt's.
        eos_token_ids: None: the target's own (a draft model has none).
        keep_hidden: also return the last hidden states (after the final norm) that the tokens were predicted from.
        keep_states: layers whose hidden states are returned too, at all positions (as transformers counts them).
        indices: numbers of the prompts, which their random streams and ``Generated.index`` go by; None: 0, 1, 2, …
    """
    model, kept_ids, ends = target, None, eos_token_ids
    if isinstance(target, Target):
        model, ends = target.model, target.eos_token_ids if eos_token_ids is None else eos_token_ids
    else:
        kept_ids = target.kept_ids
    shared = _num_shared(prompts)
    rules = _Rules(sampling, frozenset(ends or ()), keep_hidden, kept_ids, shared)
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    numbers = list(range(len(prompts))) if indices is None else list(indices)
    waiting = list(range(len(prompts)))[::-1]
    slots: list[_Row | None] = [None] * min(batch_size, len(prompts))
    lm = CachedLM(model, len(slots), (*((-1,) if keep_hidden else ()), *keep_states))
    newest = torch.zeros(len(slots), 1, dtype=torch.long, device=target.device)
    beginning = _read_beginning(lm, prompts[0][:shared]) if shared else {}
    while waiting or any(slots):
        free = [i for i, row in enumerate(slots) if row is None]
        if waiting and (len(free) >= _refill_at(len(slots)) or len(free) == len(slots)):
            taken = [waiting.pop() for _ in free[: len(waiting)]]
            chosen = free[: len(taken)]
            read = _fill(lm, newest, [prompts[i][shared:] for i in taken], chosen, shared, keep_states)
            for slot, i, own in zip(chosen, taken, read, strict=True):
                generator = torch.Generator().manual_seed(mix(seed, numbers[i]))
                uniforms = torch.rand(limits[i], generator=generator, dtype=torch.float64)
                states = {layer: [*beginning.get(layer, ()), own[layer]] for layer in keep_states}
                slots[slot] = _Row(numbers[i], limits[i], [], uniforms, [], states)
        elif not waiting and len(free) > len(slots) // 4:
            slots, newest = _shrink(lm, slots, newest)
        yield from _step(lm, slots, newest, rules)


def _refill_at(slots: int) -> int:
    """Free slots worth a prefill: prompts side by side prefill cheaper than one by one."""
    return max(1, slots // 8)


def _num_shared(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all prompts begin with; of every prompt at least the last token is left, which the first step is fed."""
    most = min(map(len, prompts), default=1) - 1
    for i in range(most):
        if any(prompt[i] != prompts[0][i] for prompt in prompts):
            return i
    return most


def _read_beginning(lm: CachedLM, tokens: Sequence[int]) -> dict[int, list[Tensor]]:
    """Read what all prompts begin with, once, into every slot; the hidden states that `lm` keeps, ``[tokens, hidden]``."""
    ids, slot = torch.tensor([list(tokens)]), torch.tensor([0])
    read = lm.prefill(ids.to(lm.lengths.device), [len(tokens)], slot.to(lm.lengths.device))
    lm.repeat_row(0)
    return {layer: [states[0]] for layer, states in read.hidden_states.items()}


def _fill(
    lm: CachedLM,
    newest: Tensor,
    prompts: list[Sequence[int]],
    slots: list[int],
    start: int,
    keep_states: Sequence[int],
) -> list[dict[int, Tensor]]:
    """Read all but the prompts' last tokens into `slots`, which hold what goes before them (`start` tokens).

    Returns every prompt's hidden states, ``[tokens, hidden]`` by layer.
    """
    states: list[dict[int, Tensor]] = [{} for _ in prompts]
    at, device = torch.tensor(slots), newest.device
    for group in _of_similar_length([len(prompt) - 1 for prompt in prompts], device):
        lengths = [len(prompts[i]) - 1 for i in group]
        ids = torch.zeros(len(group), lengths[-1], dtype=torch.long)
        for row, i in enumerate(group):
            ids[row, : lengths[row]] = torch.tensor(prompts[i][:-1], dtype=torch.long)
        read = lm.prefill(ids.to(device), lengths, at[group].to(device), start).hidden_states
        for row, i in enumerate(group):
            states[i] = {layer: read[layer][row, : lengths[row]].clone() for layer in keep_states}
    newest[at, 0] = torch.tensor([prompt[-1] for prompt in prompts], device=device)
    return states


def _of_similar_length(lengths: Sequence[int], device: torch.device) -> list[list[int]]:
    """Which of the prompts are read in one pass, the shortest first: a new pass begins where padding would cost more."""
    most = _PASS_IN_TOKENS.get(device.type, _PASS_IN_TOKENS_ELSEWHERE)
    groups: list[list[int]] = []
    padding = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        more = len(groups[-1]) * (lengths[i] - lengths[groups[-1][-1]]) if groups else 0
        if not groups or padding + more > most:
            groups.append([])
            padding = more = 0
        padding += more
        groups[-1].append(i)
    return groups


def _shrink(lm: CachedLM, slots: list[_Row | None], newest: Tensor) -> tuple[list[_Row | None], Tensor]:
    """Drop the finished rows once nothing waits for their slots."""
    busy = [i for i, row in enumerate(slots) if row is not None]
    rows = torch.tensor(busy, device=newest.device)
    lm.select_rows(rows, [lm.host_lengths[i] for i in busy])
    return [slots[i] for i in busy], newest.index_select(0, rows)


def _drawn(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """One sampled id a row."""
    # On a CPU a few rows at a time: getting the memory for all rows' temporaries from the system, tens of megabytes, can
    # take several times as long as the arithmetic (25 ms against 4.5 for 64 rows of 49,152 logits).
    rows = max(1, _LOGITS_AT_ONCE // logits.shape[-1]) if logits.device.type == "cpu" else len(logits)
    parts = zip(logits.split(rows), uniforms.split(rows), strict=True)
    return torch.cat([draw(probabilities(some, sampling), theirs) for some, theirs in parts])


def _step(lm: CachedLM, slots: list[_Row | None], newest: Tensor, rules: _Rules) -> Iterator[Generated]:
    """One token for every busy slot; free slots are fed along and forgotten."""
    out = lm.feed(newest)
    assert out.logits is not None
    counts = [int(row is not None) for row in slots]
    lm.keep(torch.tensor(counts, device=newest.device), counts)
    if rules.sampling.temperature == 0:
        chosen = out.logits[:, 0].argmax(-1)
    else:
        zero = torch.zeros((), dtype=torch.float64)
        uniforms = torch.stack([zero if row is None else row.uniforms[len(row.tokens)] for row in slots])
        chosen = _drawn(out.logits[:, 0], uniforms.to(newest.device), rules.sampling)
    chosen = chosen if rules.kept_ids is None else rules.kept_ids[chosen]
    newest[:, 0] = chosen
    for slot, (row, token) in enumerate(zip(slots, chosen.tolist(), strict=True)):
        if row is None:
            continue
        row.tokens.append(token)
        if rules.keep_hidden:
            row.hidden.append(out.hidden_states[-1][slot, 0].clone())
        for layer, kept in row.states.items():
            kept.append(out.hidden_states[layer][slot, :1].clone())
        ended = token in rules.eos
        if ended or len(row.tokens) == row.limit:
            slots[slot] = None
            lm.clear_row(slot, rules.num_shared)
            states = {layer: torch.cat(kept) for layer, kept in row.states.items()}
            hidden = torch.stack(row.hidden) if rules.keep_hidden else None
            yield Generated(row.index, row.tokens, hidden, ended, states)
