"""How many tokens to draft: fixed, or decided for every row before each step.

A row's lengths depend on nothing but what that row drafted and accepted before. So they do not bias what it emits, and
its sample does not depend on its neighbours.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import BadInput
from ..models.target import Target
from .confidence import Confidence, set_confidence
from .costs import StepCosts, measure_costs
from .draft import Drafter
from .draft_model import DraftModel
from .length_names import MOST, parse_policy
from .lookahead import Lookahead
from .named import check_share, check_whole
from .prompts import Prompts
from .rules import rule_options
from .tree import TreeLayout

WHAT = "num_speculative_tokens"


@runtime_checkable
class LengthPolicy(Protocol):
    """Decides lengths. An optional attribute ``confidence`` (a ``Confidence``) lets drafters stop earlier."""

    def start(self, batch: int) -> None:
        """Forget everything: `batch` new rows follow."""
        ...

    def lengths(self) -> Sequence[int]:
        """Draft tokens for the coming step, at most, per row. Rows that have finished count for nothing."""
        ...

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from a step: draft tokens verified and accepted, per row. 0 and 0: the row drafted nothing."""
        ...


class FixedLength:
    """Always the same number."""

    def __init__(self, num_tokens: int):
        check_whole(WHAT, 0, length=num_tokens)
        self.num_tokens, self.batch = num_tokens, 0

    def start(self, batch: int) -> None:
        """Take a batch."""
        self.batch = batch

    def lengths(self) -> list[int]:
        """The number, for every row."""
        return [self.num_tokens] * self.batch

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Nothing to learn."""


class ConfidenceLength(FixedLength):
    """Up to `most` tokens, but a row stops after a token whose own probability under the drafter is below `threshold`.

    The defaults are those of transformers' assisted generation (``assistant_confidence_threshold``), with a limit that
    keeps verification passes narrow.
    """

    def __init__(self, threshold: float = 0.4, most: int = MOST["confidence"]):
        super().__init__(most)
        check_share(WHAT, threshold=threshold)
        self.confidence = Confidence(threshold)


class HeuristicLength:
    """Two tokens more after all were accepted, one fewer otherwise, at least one.

    The schedule ``heuristic`` of transformers' assisted generation, with a limit.
    """

    def __init__(self, first: int = 4, most: int = MOST["heuristic"]):
        check_whole(WHAT, first=first, most=most)
        self.first, self.most = first, most
        self.current: list[int] = []

    def start(self, batch: int) -> None:
        """Every row starts with the same number."""
        self.current = [min(self.first, self.most)] * batch

    def lengths(self) -> list[int]:
        """Each row's number."""
        return self.current

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Grow or shrink the rows that drafted something."""
        self.current = [
            now if not tried else min(now + 2, self.most) if kept == tried else max(now - 1, 1)
            for now, tried, kept in zip(self.current, drafted, accepted, strict=True)
        ]


class AutoLength:
    """The number that emits most tokens per second, by measured costs and each row's own acceptance so far.

    With conditional acceptance a_i of draft token i, a step that drafts n emits 1 + Σ_k≤n Π_i≤k a_i tokens
    (arXiv:2211.17192, equation 1, without the assumption of one rate). Each a_i is a mean over a fading `memory` of the
    row's steps, with as much weight as two observations on the estimate for the token before it (for the first: on
    `acceptance`). The first step and every 16th after it explore: they draft one token more, which is how a row that
    gave up drafting finds out when it pays again.
    """

    _PRIOR_WEIGHT = 2.0
    _EXPLORE_EVERY = 16

    def __init__(
        self,
        costs: StepCosts,
        most: int | None = None,
        acceptance: float = 0.7,
        memory: int = 32,
        num_passes: Any = None,
    ):
        """`costs` are a pair's, at the batch size to come; `num_passes` is the drafter's (None: one pass a token)."""
        check_whole(WHAT, memory=memory, **({} if most is None else {"most": most}))
        check_share(WHAT, acceptance=acceptance)
        self.seconds = step_seconds(costs, most, num_passes)
        self.acceptance, self.fade = acceptance, 1 - 1 / memory
        self.tested: list[list[float]] = []
        self.accepted: list[list[float]] = []
        self.step = 0

    def start(self, batch: int) -> None:
        """Forget what earlier rows accepted: a sample is to depend on its own seed only."""
        most, self.step = len(self.seconds) - 1, 0
        self.tested, self.accepted = ([[0.0] * most for _ in range(batch)] for _ in range(2))

    def lengths(self) -> list[int]:
        """Each row's best number, 0 where drafting does not pay."""
        more = int(self.step % self._EXPLORE_EVERY == 0)
        best = [self._best(tested, accepted) for tested, accepted in zip(self.tested, self.accepted, strict=True)]
        return [min(length + more, len(self.seconds) - 1) for length in best]

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Count the tests of each row's step."""
        self.step += 1
        for row, (tried, kept) in enumerate(zip(drafted, accepted, strict=True)):
            self.tested[row] = [
                count * self.fade + (i < tried and i <= kept) for i, count in enumerate(self.tested[row])
            ]
            self.accepted[row] = [count * self.fade + (i < kept) for i, count in enumerate(self.accepted[row])]

    def _best(self, tested: Sequence[float], accepted: Sequence[float]) -> int:
        rate, reach, emitted = self.acceptance, 1.0, 1.0
        best, most_per_second = 0, 1.0 / self.seconds[0]
        for i, (tests, passes) in enumerate(zip(tested, accepted, strict=True)):
            rate = (passes + self._PRIOR_WEIGHT * rate) / (tests + self._PRIOR_WEIGHT)
            reach *= rate
            emitted += reach
            if emitted > most_per_second * self.seconds[i + 1]:
                best, most_per_second = i + 1, emitted / self.seconds[i + 1]
        return best


def step_seconds(costs: StepCosts, most: int | None = None, num_passes: Any = None) -> list[float]:
    """``[n]``: seconds of a step that drafts n tokens, 0 first: the proposal and a pass over n + 1 tokens.

    Proposals that were not measured are interpolated by their number of passes. More tokens are never taken to cost
    less than fewer: that is noise.

    Raises:
        BadInput: no costs of a plain step, or none of as many tokens as `most`.
    """
    passes = num_passes or (lambda n: n)
    largest = max(costs.verification, default=0) - 1
    if 1 not in costs.verification or largest < (most or 1):
        measured = ", ".join(map(str, costs.verification)) or "none"
        raise BadInput(
            f"{WHAT}: needs the costs of passes over 1 to {(most or 1) + 1} tokens, measured are: {measured}"
        )
    sizes = range(1, (largest if most is None else most) + 2)
    known_sizes = sorted(costs.verification)
    verification = np.interp(sizes, known_sizes, [costs.verification[size] for size in known_sizes])
    known = {0: 0.0} | {passes(n): seconds for n, seconds in sorted(costs.draft.items())}
    per_pass = max(seconds / n for n, seconds in known.items() if n) if len(known) > 1 else 0.0
    last = max(known)
    draft = [
        np.interp(passes(n), list(known), list(known.values())) + per_pass * max(passes(n) - last, 0) if n else 0.0
        for n in range(len(sizes))
    ]
    return (np.maximum.accumulate(verification) + np.maximum.accumulate(draft)).tolist()


def as_length_policy(
    lengths: int | str | LengthPolicy,
    target: Target,
    drafter: Drafter | None,
    prompts: Prompts,
    layout: TreeLayout | None = None,
) -> LengthPolicy:
    """A policy from a number, a name (``"confidence:threshold=0.3"``) or a policy. A tree has its own depth.

    Raises:
        BadInput: an unknown name, an option out of range, something that is no policy, or a policy for a tree.
    """
    if layout is not None:
        if not isinstance(lengths, int):
            raise BadInput(f"{WHAT}: a tree has a depth of its own, expected a number, which it replaces")
        return FixedLength(layout.depth)
    if isinstance(lengths, int):
        return FixedLength(lengths)
    if not isinstance(lengths, str):
        if isinstance(lengths, LengthPolicy):
            return lengths
        raise BadInput(f"{WHAT}: {type(lengths).__name__} is neither a number nor a length policy")
    name, options = parse_policy(lengths, WHAT)
    if name == "heuristic":
        return HeuristicLength(**options)
    if name == "confidence":
        return ConfidenceLength(**options)
    if drafter is None:
        return FixedLength(0)
    return _auto(target, drafter, prompts, **options)


def stop_by(policy: LengthPolicy, rule: str, options: Mapping[str, Any]) -> tuple[Confidence | None, bool]:
    """When the drafter is to stop by itself, and whether it must be able to.

    BiLD's fallback (arXiv:2302.07863) comes with its rule. Drafters that have no probabilities never fall back, unless
    the threshold was asked for: then they are refused.
    """
    own: Confidence | None = getattr(policy, "confidence", None)
    if own is not None or rule != "fallback_rollback":
        return own, True
    threshold = rule_options(rule, options)["fallback_threshold"]
    return Confidence(threshold, before=True), "fallback_threshold" in options


# Costs per target model, drafter and batch size: measuring for every prompt would take longer than decoding it.
_measured: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[tuple[int, int], StepCosts]]] = WeakKeyDictionary()


def _auto(target: Target, drafter: Drafter, prompts: Prompts, most: int = MOST["auto"], **options: Any) -> AutoLength:
    if isinstance(drafter, Lookahead):
        raise BadInput(
            f"{WHAT}: 'auto' weighs chains, and lookahead drafts trees of as many nodes as it has candidates"
        )
    key = len(prompts.lengths), most
    known = _measured.setdefault(target.model, WeakKeyDictionary()).setdefault(identity(drafter), {})
    if key not in known:
        set_confidence(drafter, None)  # an earlier call's must not shorten what is measured
        known[key] = measure_costs(target, drafter, prompts.rows()[0], most, key[0], seconds=1.0, min_rounds=2)
    return AutoLength(known[key], most, num_passes=getattr(drafter, "num_passes", None), **options)


def identity(drafter: Drafter) -> Any:
    """What stays the same between calls, where a user's causal LM or a name is made a drafter anew for each."""
    if isinstance(drafter, DraftModel):
        return drafter.lm.model
    # Without parameters, all of a kind cost the same. The others must be known again by a weak reference.
    lasting = isinstance(drafter, Hashable) and type(drafter).__weakrefoffset__ != 0
    return drafter if lasting and getattr(drafter, "num_parameters_read", None) != 0 else type(drafter)
