"""`--tree auto`: the static tree that this drafter's ranks and this machine's costs favour.

How often the target takes the drafter's first, second, … choice is measured teacher-forced on the target's own answers, or
was measured head by head in training; the best tree of every size follows from that (arXiv:2402.12374, 2401.10774), and the
best size of every depth from what a pass over so many tokens costs. The best of each depth then take turns decoding: what a
step of theirs really takes decides.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..decode.costs import StepCosts, measure_costs
from ..decode.draft import wants
from ..decode.loop import decode_steps
from ..decode.prompts import pad_rows
from ..decode.sampling import Sampling, probabilities
from ..decode.tree import TreeLayout
from ..decode.tree_search import best_tree, expected_accepted, tree_from_accuracies
from ..errors import BadInput
from ..models.head import split
from ..models.target import Target
from .alpha import Answer, forced_batches

_RANKS = 8  # children of a node that are considered
_MOST_NODES = 24  # of a tree: beyond that a pass is no longer one over a few tokens
_CLOSE = 0.97  # of the highest rate: steps are not timed more exactly than this
_ROUNDS, _STEPS = 3, 12  # in which the best shapes take turns, and timed steps of a turn


def choose_tree(
    target: Target, drafter: Any, answers: Sequence[Answer], sampling: Sampling, depth: int
) -> tuple[TreeLayout, str]:
    """A layout of at most `depth` levels, and the choice in words.

    Raises:
        BadInput: the drafter has no branches, or gives no probabilities to rank its choices by.
    """
    if not hasattr(drafter, "set_tree") or not hasattr(drafter, "first_token_logits"):
        raise BadInput("--tree auto: this drafter has no branches to choose from")
    accuracies = getattr(drafter, "accuracies", None)
    if accuracies is not None:  # measured head by head while these were trained, on other texts
        acceptance = [row[:_RANKS] for row in accuracies[:depth]]
    else:
        # One vector for all depths: deeper levels are accepted less often, so the tree is if anything a little too deep.
        acceptance = [rank_acceptance(target, drafter, answers, sampling).tolist()] * depth
    typical = sorted(answers, key=lambda answer: len(answer.prompt))[len(answers) // 2].prompt
    costs = measure_costs(target, drafter, typical, len(acceptance), seconds=6.0, min_rounds=3, num_nodes=_MOST_NODES)
    # Chosen children may leave a rank out, which helps heads whose second guess is another head's first; drawn ones may not.
    search = tree_from_accuracies if accuracies is not None and sampling.temperature == 0 else best_tree
    num_passes = getattr(drafter, "num_passes", None)
    shapes: list[TreeLayout] = []
    for levels in range(1, len(acceptance) + 1):
        layouts = [search(acceptance[:levels], nodes) for nodes in range(1, _MOST_NODES + 1)]
        passes = num_passes(levels) if num_passes is not None else levels
        rates = [_tokens_per_second(layout, acceptance, costs, passes) for layout in layouts]
        best = layouts[_fastest(rates, [expected_accepted(layout, acceptance) for layout in layouts])]
        if best not in shapes:
            shapes.append(best)
    plain, *seconds = step_seconds(target, drafter, [None, *shapes], typical, sampling)
    tokens = [1 + expected_accepted(shape, acceptance) for shape in shapes]
    chosen = _fastest([emitted / time for emitted, time in zip(tokens, seconds, strict=True)], tokens)
    best, gain = shapes[chosen], tokens[chosen] / seconds[chosen] * plain
    shape = f"{len(best.parents)} nodes, {best.depth} deep"
    return best, f"{shape}, expected {tokens[chosen]:.2f} tokens a pass, {gain:.2f} × plain decoding"


def _fastest(rates: Sequence[float], tokens: Sequence[float]) -> int:
    """The index of the highest rate; of those that come as close as measurements tell apart, the one of most tokens a pass."""
    close = [i for i, rate in enumerate(rates) if rate >= _CLOSE * max(rates)]
    return max(close, key=lambda i: tokens[i])


def step_seconds(
    target: Target,
    drafter: Any,
    shapes: Sequence[TreeLayout | None],
    prompt: Sequence[int],
    sampling: Sampling,
) -> list[float]:
    """Median time of a decoding step with each of `shapes` (None: plain decoding, without the drafter), in turns."""
    longest = _STEPS * (1 + max(shape.depth for shape in shapes if shape is not None)) + 2
    if target.context_limit is not None:
        prompt = prompt[: max(1, target.context_limit - longest)]
    times: list[list[float]] = [[] for _ in shapes]
    for _ in range(_ROUNDS):
        for shape, found in zip(shapes, times, strict=True):
            depth = 0 if shape is None else shape.depth
            steps = decode_steps(
                target,
                None if shape is None else drafter,
                pad_rows([list(prompt)], target),
                sampling=sampling,
                max_new_tokens=(depth + 1) * _STEPS + 1,
                num_speculative_tokens=max(depth, 1),
                eos_token_id=[],
                tree=shape,
            )
            next(steps)  # reads the prompt too
            for _ in range(_STEPS):
                start = time.perf_counter()
                if next(steps, None) is None:
                    break
                found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def _tokens_per_second(
    layout: TreeLayout, acceptance: Sequence[Sequence[float]], costs: StepCosts, passes: int
) -> float:
    assert costs.cost_ratio is not None
    drafting = passes * costs.cost_ratio * costs.verification[1]
    return (1 + expected_accepted(layout, acceptance)) / (costs.verification[len(layout.parents) + 1] + drafting)


@torch.no_grad()
def rank_acceptance(
    target: Target, drafter: Any, answers: Sequence[Answer], sampling: Sampling
) -> Float[Tensor, "ranks"]:
    """How often the drafter's r-th most likely token is the one: at temperature 0 the share of positions where it is the
    target's argmax, else the target's mean probability of it after the sampling transforms."""
    head = split(target.model)[1]
    total, positions = torch.zeros(_RANKS), 0
    for batch in forced_batches(target, answers, wants(drafter).get("hidden_states", ())):
        hidden = drafter.teacher_forced_hidden(batch.input_ids, batch.attention_mask, batch.hidden_states)
        hidden = hidden.gather(1, batch.positions[..., None].expand(-1, -1, hidden.shape[-1]))
        for row, count in enumerate(batch.counts):
            probs = probabilities(head(batch.target_hidden[row, :count]), sampling)
            scores = drafter.first_token_logits(hidden[row, :count])
            ranked = scores.topk(min(_RANKS, scores.shape[-1]), dim=-1).indices
            total[: ranked.shape[1]] += probs.gather(1, ranked).sum(0).cpu()
            positions += count
    return total / max(positions, 1)
