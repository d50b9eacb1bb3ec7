"""Losslessness, exactly: what the lossless rules emit is distributed as the target, whatever was drafted.

Nothing is sampled here. Drafts are enumerated with their probabilities; every uniform number that a rule is given is
integrated out by finding, with the rule itself, where its decision flips.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.decode.draft import Draft, Verdict
from draftsmith.decode.tree import TreeLayout, as_layout, compact
from draftsmith.decode.verify_batched import verify

TOP = 1 - 2.0**-53  # the largest uniform number
VOCAB = 3

CHAIN = as_layout([1, 1])
TREES = {
    "two children": as_layout([2]),
    "three children": as_layout([3]),
    "two chains": as_layout([[0], [1], [0, 0], [1, 0]]),
    "bushy": as_layout([[0], [1], [0, 0], [0, 1]]),
}


class Process(NamedTuple):
    """Next-token distributions after every context: ``tables[d]`` has d context dimensions and a last one of ids."""

    tables: list[torch.Tensor]

    def after(self, context: tuple[int, ...]) -> torch.Tensor:
        return self.tables[len(context)][context]

    def joint(self, length: int) -> torch.Tensor:
        """Probability of every sequence of `length` tokens."""
        probs = torch.ones((), dtype=torch.float64)
        for table in self.tables[:length]:
            probs = probs.unsqueeze(-1) * table
        return probs


@st.composite
def processes(draw: st.DrawFn, depth: int) -> Process:
    """Small whole weights: zeros and ties are frequent."""
    tables = []
    for d in range(depth):
        count = VOCAB ** (d + 1)
        weights = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)), dtype=torch.float64)
        weights = weights.reshape((VOCAB,) * (d + 1))
        weights += (weights.sum(-1, keepdim=True) == 0).double()
        tables.append(weights / weights.sum(-1, keepdim=True))
    return Process(tables)


class Drafts(NamedTuple):
    """Every draft that can occur, a row each."""

    draft: Draft
    weights: torch.Tensor
    target_probs: torch.Tensor


def contexts(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """The tokens on the way to each node of a row, its own last."""
    out: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True):
        out.append((*(out[parent] if parent >= 0 else ()), token))
    return out


def enumerate_drafts(layout: TreeLayout, drafters: Sequence[Process], target: Process, how: str) -> Drafts:
    """All outcomes of drawing `layout`, with their probabilities. Branches of the root take turns at `drafters`."""
    drafter_of = [drafters[path[0] % len(drafters)] for path in layout.paths]
    found: list[tuple[float, list[int], list[bool]]] = []

    def extend(weight: float, tokens: list[int], exist: list[bool], context: list[tuple[int, ...]]) -> None:
        node = len(tokens)
        if node == len(layout.parents):
            found.append((weight, tokens, exist))
            return
        parent = layout.parents[node]
        before = context[parent] if parent >= 0 else ()
        probs = drafter_of[node].after(before).clone()
        siblings = [tokens[i] for i in range(node) if layout.parents[i] == parent]
        if how == "chosen":
            token = int(probs.argsort(descending=True, stable=True)[layout.ranks[node]])
            extend(weight, [*tokens, token], [*exist, True], [*context, (*before, token)])
            return
        if how == "without_replacement":
            probs[siblings] = 0
        if probs.sum() == 0 or (parent >= 0 and not exist[parent]):
            extend(weight, [*tokens, 0], [*exist, False], [*context, (*before, 0)])
            return
        for token, prob in enumerate((probs / probs.sum()).tolist()):
            if prob > 0:
                extend(weight * prob, [*tokens, token], [*exist, True], [*context, (*before, token)])

    extend(1.0, [], [], [])
    rows = len(found)
    tokens = torch.tensor([tokens for _, tokens, _ in found])
    parents = torch.tensor(layout.parents).expand(rows, -1)
    draft = Draft(tokens, parents, with_replacement=how != "without_replacement", is_chain=layout.is_chain)
    draft = compact(draft, torch.tensor([exist for *_, exist in found]))
    paths = [contexts(draft, row) for row in range(rows)]
    if how != "chosen":
        draft_probs = torch.stack(
            [torch.stack([drafter_of[i].after(path[:-1]) for i, path in enumerate(row)]) for row in paths]
        )
        draft = draft._replace(draft_probs=draft_probs)
    after = torch.stack([torch.stack([target.after(path) for path in [(), *row]]) for row in paths])
    return Drafts(draft, torch.tensor([weight for weight, *_ in found], dtype=torch.float64), after)


def take(draft: Draft, rows: torch.Tensor) -> Draft:
    """Rows of a draft."""
    probs = None if draft.draft_probs is None else draft.draft_probs[rows]
    assert draft.lengths is not None
    return draft._replace(
        tokens=draft.tokens[rows], parents=draft.parents[rows], draft_probs=probs, lengths=draft.lengths[rows]
    )


def measure_below(decide: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], size: int) -> torch.Tensor:
    """For `size` decisions that hold for uniforms below some number and not from there on: that number.

    ``decide(rows, uniforms)``: whether the decisions of these rows hold at these numbers.
    """
    rows = torch.arange(size)
    never, always = ~decide(rows, torch.zeros(size).double()), decide(rows, torch.full((size,), TOP).double())
    low, step = torch.zeros(size, dtype=torch.float64), 1.0
    for _ in range(8):  # sixteen parts at a time: 2^-32 in the end
        step /= 16
        inner = low.unsqueeze(1) + step * torch.arange(1, 16)
        holds = decide(rows.repeat_interleave(15), inner.flatten()).reshape(size, 15)
        low = low + step * holds.sum(1)
    return torch.where(never, 0.0, torch.where(always, 1.0, low + step / 2))


def replaced(numbers: torch.Tensor, column: int, values: torch.Tensor) -> torch.Tensor:
    """`numbers` with one column exchanged."""
    numbers = numbers.clone()
    numbers[:, column] = values
    return numbers


class Emitted(NamedTuple):
    joint: torch.Tensor  # probability of every sequence, continued by the target where less was emitted
    num_accepted: float  # expected


def emitted(rule: str, drafts: Drafts, target: Process, length: int, options: dict | None = None) -> Emitted:
    """Exactly what `rule` emits, over all drafts and all uniform numbers."""

    def verdict(rows: torch.Tensor, uniforms: torch.Tensor) -> Verdict:
        return verify(rule, take(drafts.draft, rows), drafts.target_probs[rows], uniforms, options)

    # Node by node, the numbers split into those that accept it if asked and those that do not. One of each stands for
    # them, with the measured share of the range as probability. Later numbers wait at "reject".
    nodes = drafts.draft.tokens.shape[1]
    rows, weights = torch.arange(len(drafts.weights)), drafts.weights
    uniforms = torch.full((len(rows), nodes + 1), TOP, dtype=torch.float64)
    for node in range(nodes):

        def accepts(at: torch.Tensor, u: torch.Tensor, node=node, rows=rows, uniforms=uniforms) -> torch.Tensor:
            return (verdict(rows[at], replaced(uniforms[at], node, u)).path == node).any(1)

        chance = measure_below(accepts, len(rows))
        both = torch.cat([weights * chance, weights * (1 - chance)])
        rows, uniforms = rows.repeat(2), uniforms.repeat(2, 1)
        uniforms[:, node] = torch.tensor([0.0, TOP], dtype=torch.float64).repeat_interleave(len(rows) // 2)
        likely = both > 0
        rows, uniforms, weights = rows[likely], uniforms[likely], both[likely]

    limit = torch.arange(VOCAB - 1)

    def at_most(at: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        row = at // len(limit)
        return verdict(rows[row], replaced(uniforms[row], nodes, u)).next_tokens <= limit[at % len(limit)]

    below = measure_below(at_most, len(rows) * len(limit)).reshape(len(rows), len(limit))
    following = torch.nn.functional.pad(below, (0, 1), value=1.0).diff(dim=1, prepend=torch.zeros(len(rows), 1))
    final = verdict(rows, uniforms)

    joint = torch.zeros((VOCAB,) * length, dtype=torch.float64)
    for i, row in enumerate(rows.tolist()):
        path = [node for node in final.path[i].tolist() if node >= 0]
        context = tuple(drafts.draft.tokens[row, path].tolist())
        probs = (weights[i] * following[i])[(...,) + (None,) * (length - len(context) - 1)]
        for d in range(len(context) + 1, length):
            table = target.tables[d][context]
            probs = probs * table[(...,) + (None,) * (length - d - 1)]
        joint[context] += probs
    return Emitted(joint, float((weights * final.num_accepted).sum()))


def check(rule: str, layout: TreeLayout, drafters: Sequence[Process], target: Process, how: str) -> Emitted:
    out = emitted(rule, enumerate_drafts(layout, drafters, target, how), target, layout.depth + 1)
    torch.testing.assert_close(out.joint, target.joint(layout.depth + 1), rtol=0, atol=1e-8)
    return out


@pytest.mark.parametrize("how", ["with_replacement", "chosen"])
@pytest.mark.parametrize("rule", ["lossless", "block", "multi"])
@settings(max_examples=8, deadline=None)
@given(drafter=processes(2), target=processes(3))
def test_chain_emits_the_targets_distribution(rule: str, how: str, drafter: Process, target: Process) -> None:
    check(rule, CHAIN, [drafter], target, how)


@pytest.mark.parametrize("how", ["with_replacement", "without_replacement", "chosen"])
@pytest.mark.parametrize("shape", list(TREES))
@settings(max_examples=4, deadline=None)
@given(drafter=processes(2), target=processes(3))
def test_tree_emits_the_targets_distribution(shape: str, how: str, drafter: Process, target: Process) -> None:
    check("lossless", TREES[shape], [drafter], target, how)


@settings(max_examples=4, deadline=None)
@given(first=processes(2), second=processes(2), target=processes(3))
def test_chains_of_several_drafters_emit_the_targets_distribution(
    first: Process, second: Process, target: Process
) -> None:
    check("multi", TREES["two chains"], [first, second], target, "with_replacement")


@settings(max_examples=8, deadline=None)
@given(drafter=processes(2), target=processes(3))
def test_block_accepts_at_least_as_much_as_token_by_token(drafter: Process, target: Process) -> None:
    block = check("block", CHAIN, [drafter], target, "with_replacement")
    token = check("lossless", CHAIN, [drafter], target, "with_replacement")
    assert block.num_accepted >= token.num_accepted - 1e-8


def fixed(probs: list[float], depth: int) -> Process:
    """The same distribution after every context."""
    row = torch.tensor(probs, dtype=torch.float64)
    return Process([row.expand((VOCAB,) * d + (VOCAB,)) for d in range(depth)])


def test_block_gains_what_the_paper_computes() -> None:
    # The example of arXiv:2403.10444, section 2: 10/9 tokens accepted one by one, 11/9 as a block.
    drafter, target = fixed([2 / 3, 1 / 3, 0], 2), fixed([1 / 3, 2 / 3, 0], 3)
    assert check("lossless", CHAIN, [drafter], target, "with_replacement").num_accepted == pytest.approx(
        10 / 9, abs=1e-7
    )
    assert check("block", CHAIN, [drafter], target, "with_replacement").num_accepted == pytest.approx(11 / 9, abs=1e-7)


def test_greedy_drafts_reported_as_drawn_are_caught() -> None:
    # The measurement has teeth: chosen tokens judged by the distribution they were not drawn from are biased.
    drafter, target = fixed([0.7, 0.2, 0.1], 2), fixed([0.2, 0.5, 0.3], 3)
    drafts = enumerate_drafts(CHAIN, [drafter], target, "chosen")
    wrong = drafts._replace(draft=drafts.draft._replace(draft_probs=drafter.after(()).expand(1, 2, -1)))
    joint = emitted("lossless", wrong, target, 3).joint
    assert float((joint - target.joint(3)).abs().sum()) / 2 > 0.05


def test_lenience_is_measured_as_a_bias_with_a_bound() -> None:
    # With lenience l no token becomes more than 1 / l times as likely (arXiv:2211.17192, appendix), and it does drift.
    drafter, target = fixed([0.8, 0.1, 0.1], 2), fixed([0.3, 0.3, 0.4], 3)
    drafts = enumerate_drafts(CHAIN, [drafter], target, "with_replacement")
    first = emitted("lenient", drafts, target, 3, {"lenience": 0.5}).joint.sum((1, 2))
    assert (first <= target.after(()) / 0.5 + 1e-9).all()
    assert float((first - target.after(())).abs().sum()) / 2 > 0.05
