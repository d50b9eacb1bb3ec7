"""The verification rules that are not lossless, for one sequence, written to be read.

They ask of every draft token whether it is good enough, without reference to how it was drafted, and accept the
longest path of a tree on which all are. The next token is the target's own. Judged by ``judge_probs``: the target's
probabilities, at temperature 1 where decoding is greedy, since the one-hot limit would leave nothing to be tolerant
about. (`verify.lossless` and `verify.multi` take the lenience of the remaining lossy rule under sampling.)
"""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from .verify import Decision, pick

Judgement = Callable[[int, Tensor], bool]


def typical(epsilon: float, delta: float) -> Judgement:
    """Medusa's typical acceptance (arXiv:2401.10774): target(x) > min(epsilon, delta * exp(-entropy of the target))."""

    def passes(token: int, judge: Tensor) -> bool:
        entropy = float(torch.special.entr(judge).sum())
        return float(judge[token]) > min(epsilon, delta * math.exp(-entropy))

    return passes


def tolerant(top: int, tolerance: float) -> Judgement:
    """SpecDec's (arXiv:2203.16487): among the target's `top` ids and within `tolerance` nats of the best one."""

    def passes(token: int, judge: Tensor) -> bool:
        better = int((judge > judge[token]).sum())
        return better < top and float(judge[token]) >= float(judge.max()) * math.exp(-tolerance)

    return passes


def rollback(rollback_threshold: float) -> Judgement:
    """BiLD's (arXiv:2302.07863): the token's cross-entropy under the target is at most the threshold, in nats."""

    def passes(token: int, judge: Tensor) -> bool:
        return float(judge[token]) >= math.exp(-rollback_threshold)

    return passes


def lenient_greedy(lenience: float) -> Judgement:
    """Lenience at temperature 0 (arXiv:2211.17192, appendix): at least `lenience` times the best id's probability."""

    def passes(token: int, judge: Tensor) -> bool:
        return float(judge[token]) >= float(judge.max()) * lenience

    return passes


def longest(
    passes: Judgement,
    tokens: Sequence[int],
    parents: Sequence[int],
    judge_probs: Float[Tensor, "nodes_and_one vocab"],
    target_probs: Float[Tensor, "nodes_and_one vocab"],
    uniform: float,
) -> Decision:
    """Accept the longest path from the root whose tokens all pass; of several the likeliest, then the first.

    A likelihood is the product of the path's target probabilities. The next token is the target's own, after the path.
    """
    paths: list[list[int] | None] = []  # to each node, where all on it pass
    likelihoods: list[float] = []
    best: list[int] = []
    best_likelihood = 0.0
    for i, token in enumerate(tokens):
        parent = parents[i]
        judge = judge_probs[1 + parent].double()
        before = [] if parent < 0 else paths[parent]
        path = None if before is None or not passes(token, judge) else [*before, i]
        paths.append(path)
        likelihoods.append((1.0 if parent < 0 else likelihoods[parent]) * float(judge[token]))
        if path is not None and (len(path), likelihoods[i]) > (len(best), best_likelihood):
            best, best_likelihood = path, likelihoods[i]
    last = best[-1] if best else -1
    return Decision(len(best), best, pick(target_probs[1 + last], uniform))
