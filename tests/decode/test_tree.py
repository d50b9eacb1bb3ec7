"""Trees: layouts, masks, drawn children, and the searches for the best one."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.decode.draft import Draft
from draftsmith.decode.tree import (
    TreeLayout,
    ancestors,
    as_layout,
    compact,
    depths,
    draw_children,
)
from draftsmith.decode.tree_search import best_tree, expected_accepted, grow_layer, select_nodes, tree_from_accuracies
from draftsmith.errors import BadInput


def test_widths_and_paths_give_the_same_layout() -> None:
    layout = as_layout([2, 2, 1])
    assert layout.parents == (-1, -1, 0, 0, 1, 1, 2, 3, 4, 5)
    assert layout.depths == (1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
    assert layout.num_children == (2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0)
    assert layout.depth == 3
    assert not layout.is_chain
    assert as_layout(layout.paths) == as_layout(layout) == layout
    assert as_layout(list(reversed(layout.paths))) == layout
    assert as_layout([1, 1, 1]).is_chain
    assert layout.truncated(2) == as_layout([2, 2])
    assert layout.truncated(5) == layout


def test_paths_may_leave_out_ranks_but_not_parents() -> None:
    layout = as_layout([[0], [2], [2, 1]])
    assert (layout.parents, layout.ranks) == ((-1, -1, 1), (0, 2, 1))
    assert layout.num_children == (3, 0, 2, 0)
    assert layout.without_gaps() == as_layout([[0], [1], [1, 0]])
    with pytest.raises(BadInput, match=r"\[1, 0\] needs its parent \[1\]"):
        as_layout([[0], [1, 0]])


@pytest.mark.parametrize(
    "tree",
    [[], [0], [3, 0], [2, -1], [True], "3,2", [[0], [0]], [[]], [[0], 1], [[-1]], [[0.5]], [100, 100], 3],
)
def test_malformed_trees_are_named(tree: object) -> None:
    with pytest.raises(BadInput, match=r"^tree: "):
        as_layout(tree)


@given(seed=st.integers(0, 2**31), nodes=st.integers(0, 12))
@settings(max_examples=30, deadline=None)
def test_ancestors_and_depths_follow_the_parents(seed: int, nodes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents = torch.zeros(3, nodes).long()
    for i in range(nodes):
        parents[:, i] = torch.randint(-1, i, (3,), generator=generator)
    lengths = torch.randint(0, nodes + 1, (3,), generator=generator)
    mask = ancestors(parents)
    deepest = depths(parents, lengths)
    for row in range(3):
        paths: list[set[int]] = []
        for i, parent in enumerate(parents[row].tolist()):
            paths.append({i} | (paths[parent] if parent >= 0 else set()))
            assert set(mask[row, i].nonzero().flatten().tolist()) == paths[i]
        assert int(deepest[row]) == max((len(path) for path in paths[: int(lengths[row])]), default=0)
        assert torch.equal(ancestors(parents[row]), mask[row])


def test_children_without_replacement_are_distinct_and_end_with_the_support() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2]]).expand(4000, -1)
    uniforms = torch.rand(4000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, exist = draw_children(probs, 4, uniforms, "without_replacement")
    assert exist.tolist() == [[True, True, True, False]] * 4000
    assert (tokens[:, :3].sort(1).values == torch.tensor([1, 3, 4])).all()
    # The order is that of draws renormalised after each removal.
    share = ((tokens[:, 0] == 1) & (tokens[:, 1] == 3)).double().mean()
    assert float(share) == pytest.approx(0.5 * 0.3 / 0.5, abs=0.03)


def test_chosen_children_are_the_likeliest_that_have_probability() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2], [0.0, 1.0, 0.0, 0.0, 0.0]])
    tokens, exist = draw_children(probs, 6, None, "chosen")
    assert tokens[0, :3].tolist() == [1, 3, 4]
    assert exist.tolist() == [[True] * 3 + [False] * 3, [True] + [False] * 5]


def test_children_with_replacement_may_repeat() -> None:
    tokens, exist = draw_children(
        torch.tensor([[0.5, 0.5]]), 3, torch.tensor([[0.1, 0.2, 0.7]]).double(), "with_replacement"
    )
    assert tokens.tolist() == [[0, 0, 1]]
    assert exist.all()


def test_compact_drops_missing_nodes_with_their_descendants() -> None:
    layout = as_layout([2, 2])
    tokens = torch.arange(10, 16).expand(2, -1)
    probs = torch.arange(12).reshape(2, 6, 1).float()
    draft = Draft(tokens, torch.tensor(layout.parents).expand(2, -1), probs, lengths=torch.tensor([6, 5]))
    exist = torch.tensor([[True, False, True, True, True, True], [True, True, False, True, True, True]])
    small = compact(draft, exist)
    assert small.lengths is not None
    assert small.draft_probs is not None
    assert small.lengths.tolist() == [3, 4]
    assert small.tokens[0, :3].tolist() == [10, 12, 13]
    assert small.parents[0].tolist() == [-1, 0, 0, -1, -1, -1]
    assert small.tokens[1, :4].tolist() == [10, 11, 13, 14]
    assert small.parents[1].tolist() == [-1, -1, 0, 1, -1, -1]
    assert small.draft_probs[1, :4, 0].tolist() == [6, 7, 9, 10]


def all_trees(ranks: list[int], budget: int, in_order: bool) -> list[list[tuple[int, ...]]]:
    """Every tree of `budget` nodes at most: sets of paths closed under parents (and under lower ranks, if in order)."""
    paths = [path for d in range(1, len(ranks) + 1) for path in itertools.product(*(range(r) for r in ranks[:d]))]
    trees = []
    for size in range(1, budget + 1):
        for tree in itertools.combinations(paths, size):
            members = set(tree)
            closed = all(path[:-1] in members for path in tree if len(path) > 1)
            if in_order:
                closed &= all((*path[:-1], path[-1] - 1) in members for path in tree if path[-1] > 0)
            if closed:
                trees.append(list(tree))
    return trees


def value(paths: list[tuple[int, ...]], rates: list[list[float]]) -> float:
    return sum(math.prod(rates[depth][rank] for depth, rank in enumerate(path)) for path in paths)


@given(
    rates=st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=2), min_size=2, max_size=3),
    budget=st.integers(1, 4),
)
@settings(max_examples=25, deadline=None)
def test_best_tree_beats_every_other(rates: list[list[float]], budget: int) -> None:
    ranks = [len(row) for row in rates]
    layout = best_tree(rates, budget)
    best = max(value(tree, rates) for tree in all_trees(ranks, budget, in_order=True))
    assert len(layout.parents) <= budget
    assert expected_accepted(layout, rates) == pytest.approx(best)
    for node, rank in enumerate(layout.ranks):  # lower ranks come first
        siblings = {layout.ranks[i] for i, parent in enumerate(layout.parents) if parent == layout.parents[node]}
        assert set(range(rank)) <= siblings
    chosen = tree_from_accuracies(rates, budget)
    assert len(chosen.parents) <= budget
    best = max(value(tree, rates) for tree in all_trees(ranks, budget, in_order=False))
    assert expected_accepted(chosen, rates) == pytest.approx(best)


def test_best_tree_goes_deep_or_wide_as_the_rates_say() -> None:
    assert best_tree([[0.9, 0.05]] * 4, 4).is_chain
    assert best_tree([[0.4, 0.35, 0.2], [0.1]], 3) == as_layout([3])
    assert tree_from_accuracies([[0.1, 0.0, 0.6]], 5) == as_layout([[0], [2]])
    # A chain as deep as was measured: unmeasured depths count nothing, so the rest of the budget stays unused.
    assert best_tree([[0.9], [0.8]], 10) == as_layout([1, 1])


@pytest.mark.parametrize(("rates", "budget"), [([], 3), ([[]], 3), ([[1.5]], 3), ([[0.5]], 0), ([[0.5]], 10**6)])
def test_bad_statistics_are_named(rates: list[list[float]], budget: int) -> None:
    for search in (best_tree, tree_from_accuracies):
        with pytest.raises(BadInput, match=r"^tree: "):
            search(rates, budget)


def test_large_budgets_are_searched_in_a_second() -> None:
    rates = [[0.6 * 0.5**rank for rank in range(10)] for _ in range(8)]
    layout = best_tree(rates, 128)
    assert len(layout.parents) == 128
    assert expected_accepted(layout, rates) >= expected_accepted(as_layout([4, 2, 2, 1, 1, 1, 1, 1]), rates)


def grown(generator: torch.Generator, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and parents of a tree grown two layers deep by joint confidence."""
    first = torch.randn(batch, 1, 4, generator=generator).log_softmax(-1)
    top = grow_layer(torch.zeros(batch, 1), first, 3)
    second = torch.randn(batch, 3, 4, generator=generator).log_softmax(-1)
    below = grow_layer(top.scores, second, 5)
    parents = torch.cat([torch.full((batch, 3), -1), below.parents], 1)
    return torch.cat([top.scores, below.scores], 1), parents


def test_a_grown_layer_keeps_the_children_of_highest_joint_confidence() -> None:
    scores = torch.tensor([[0.5, 0.4]]).log()
    children = torch.tensor([[[0.7, 0.2], [0.6, 0.4]]]).log()
    layer = grow_layer(scores, children, 3)
    torch.testing.assert_close(layer.scores.exp(), torch.tensor([[0.35, 0.24, 0.16]]))
    assert layer.parents.tolist() == [[0, 1, 1]]
    assert layer.ranks.tolist() == [[0, 0, 1]]


@given(seed=st.integers(0, 2**31), budget=st.integers(1, 10))
@settings(max_examples=25, deadline=None)
def test_selected_nodes_are_the_most_confident_and_stay_connected(seed: int, budget: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, parents = grown(generator, 3)
    scores[1, 6:] = -torch.inf  # a row whose drafter had fewer children to offer
    chosen = select_nodes(scores, parents, budget)
    for row, count in enumerate(chosen.lengths.tolist()):
        nodes = chosen.nodes[row, :count].tolist()
        exist = int((scores[row] > -torch.inf).sum())
        assert count == min(budget, exist)
        assert nodes == sorted(set(nodes))
        least = scores[row, nodes].min()
        assert sum(float(score) > float(least) for score in scores[row]) < count
        for i, node in enumerate(nodes):
            parent = int(chosen.parents[row, i])
            assert parent < i
            assert (nodes[parent] if parent >= 0 else -1) == int(parents[row, node])
        assert (chosen.parents[row, count:] == -1).all()


def test_ties_keep_parents_before_children() -> None:
    scores = torch.zeros(1, 4)  # a certain drafter: every joint probability is one
    chosen = select_nodes(scores, torch.tensor([[-1, 0, 1, 2]]), 2)
    assert chosen.nodes.tolist() == [[0, 1]]
    assert chosen.parents.tolist() == [[-1, 0]]


def test_an_empty_layout_is_a_tree_of_depth_zero() -> None:
    assert TreeLayout((), (), ()).depth == 0
    assert depths(torch.zeros(2, 0).long(), torch.zeros(2).long()).tolist() == [0, 0]
