"""The cost model against closed forms and against a simulated decoder with a clock."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.eval import cost_model

FLAT = [1.0] * 12
CURVE = [1.0, 1.15, 1.25, 1.3, 1.65, 1.9]


def simulate(conditional, cost_ratio, curve, steps, seed=0):
    """Tokens a step and speed-up of a decoder that accepts, step by step, and adds up the time of its passes."""
    rng = np.random.default_rng(seed)
    tokens, time = 0, 0.0
    for _ in range(steps):
        accepted = 0
        while accepted < len(conditional) and rng.random() < conditional[accepted]:
            accepted += 1
        tokens += accepted + 1
        time += len(conditional) * cost_ratio + curve[len(conditional)]
    return tokens / steps, tokens / time


def test_steps_without_a_draft_count_as_plain_ones():
    """A look-up that finds something in a fifth of the steps."""
    accepted, drafted = np.full(4, 20.0), np.full(4, 20.0)
    found = cost_model.counted_speedup(accepted, drafted, np.asarray(100.0), 0.1, FLAT)
    assert float(found) == pytest.approx((100 + 80) / (80 + 20 * 1.4))
    (_, _, _, by_length, *_) = cost_model.speedup_by_length(np.ones(4), 0.1, FLAT, drafting=0.2)
    assert by_length == pytest.approx(float(found))
    assert by_length < cost_model.speedup_by_length(np.ones(4), 0.1, FLAT)[3] / 2
    # Drafts of different lengths: 40 steps of one token, 20 of three.
    mixed = cost_model.counted_speedup(
        np.array([30.0, 10.0, 5.0]), np.array([60.0, 20.0, 20.0]), np.asarray(100.0), 0.1, CURVE
    )
    cost = 40 + 40 * (0.1 + CURVE[1]) + 20 * (0.3 + CURVE[3])
    assert float(mixed) == pytest.approx(145 / cost)
    # Trees: 150 nodes in the 50 steps that draft.
    tree = cost_model.counted_speedup(
        np.array([25.0]), np.array([50.0]), np.asarray(100.0), 0.1, CURVE, passes=1, nodes=np.asarray(150.0)
    )
    assert float(tree) == pytest.approx(125 / (50 + 50 * (0.1 + CURVE[3])))


def test_expected_tokens_and_speedup_equal_a_simulation():
    conditional = np.array([0.7, 0.55, 0.8])
    tokens, speedup = simulate(conditional, 0.12, CURVE, steps=40_000)
    assert float(cost_model.expected_tokens(conditional)) == pytest.approx(tokens, rel=0.01)
    assert float(cost_model.expected_speedup(conditional, 3, 0.12, CURVE)) == pytest.approx(speedup, rel=0.01)


@given(st.floats(0, 1), st.integers(1, 10))
def test_constant_acceptance_gives_the_geometric_sum(alpha, n):
    by_position = float(cost_model.expected_tokens(np.full(n, alpha)))
    assert cost_model.constant_acceptance_tokens(alpha, n) == pytest.approx(by_position, rel=1e-6)


def test_extremes_of_acceptance():
    assert cost_model.constant_acceptance_tokens(1.0, 5) == 6
    assert cost_model.constant_acceptance_tokens(0.0, 5) == 1
    assert float(cost_model.expected_tokens(np.zeros(3))) == 1


@given(st.floats(0.05, 0.95), st.floats(0.01, 0.5), st.integers(1, 8))
def test_flat_verification_is_theorem_3_8(alpha, c, n):
    closed = (1 - alpha ** (n + 1)) / ((1 - alpha) * (n * c + 1))
    assert float(cost_model.expected_speedup(np.full(n, alpha), n, c, FLAT)) == pytest.approx(closed)


@given(st.floats(0.02, 0.9))
def test_break_even_of_one_token_on_a_flat_curve_is_the_cost_ratio(c):
    assert cost_model.break_even_alpha(1, c, FLAT) == pytest.approx(c, abs=1e-9)


@given(st.floats(0.01, 0.3), st.integers(1, 5))
def test_expected_speedup_is_one_at_break_even(c, n):
    alpha = cost_model.break_even_alpha(n, c, CURVE)
    assert alpha is not None
    assert float(cost_model.expected_speedup(np.full(n, alpha), n, c, CURVE)) == pytest.approx(1.0)


def test_break_even_is_none_where_even_full_acceptance_loses():
    assert cost_model.break_even_alpha(2, 0.9, [1.0, 1.5, 2.0]) is None
    assert cost_model.break_even_alpha(6, 0.1, CURVE) is None  # seven tokens were not measured


def test_best_number_is_the_maximum_over_all_lengths():
    conditional = np.array([0.8, 0.75, 0.7])
    speedups = [float(cost_model.expected_speedup(conditional, n, 0.1, CURVE)) for n in range(1, 6)]
    assert cost_model.speedup_by_length(conditional, 0.1, CURVE) == pytest.approx(speedups)
    assert cost_model.best_num_speculative_tokens(conditional, 0.1, CURVE) == 1 + int(np.argmax(speedups)) == 3


def test_best_number_is_zero_where_no_draft_pays():
    assert cost_model.best_num_speculative_tokens(np.array([0.1, 0.1]), 0.3, CURVE) == 0


def test_flat_curve_and_free_drafter_make_longer_drafts_better():
    assert cost_model.best_num_speculative_tokens(np.array([0.6]), 0.0, FLAT) == len(FLAT) - 1


def test_parallel_heads_pay_for_one_pass():
    conditional = np.array([0.6, 0.5, 0.4])
    expected = float(cost_model.expected_tokens(conditional)) / (0.1 + CURVE[3])
    assert float(cost_model.expected_speedup(conditional, 3, 0.1, CURVE, passes=1)) == pytest.approx(expected)


def test_tree_pays_for_its_nodes():
    conditional = np.array([0.6, 0.5])
    expected = float(cost_model.expected_tokens(conditional)) / (2 * 0.1 + CURVE[5])
    found = cost_model.expected_speedup(conditional, 2, 0.1, CURVE, verified_tokens=6)
    assert float(found) == pytest.approx(expected)


def test_unmeasured_positions_hold_the_last_rate():
    extended = cost_model.extend(np.array([0.7, 0.5, np.nan]), 5)
    assert extended.tolist() == [0.7, 0.5, 0.5, 0.5, 0.5]
    assert np.isnan(cost_model.extend(np.array([np.nan, np.nan]), 3)).all()


def test_cost_beyond_the_curve_is_unknown():
    assert math.isnan(cost_model.step_cost(1, 7, 0.1, CURVE))
    assert cost_model.step_cost(1, 2.5, 0.1, CURVE) == pytest.approx(0.1 + 1.2)


def test_verification_curve_is_relative_and_interpolated():
    assert cost_model.verification_curve({1: 0.05, 2: 0.06, 4: 0.08}) == pytest.approx([1.0, 1.2, 1.4, 1.6])
    with pytest.raises(ValueError, match="one token"):
        cost_model.verification_curve({2: 0.1})


def test_mbsu_by_hand():
    assert cost_model.mbsu(2.4, passes=2, drafter_parameters=10, target_parameters=100) == pytest.approx(2.0)
    assert cost_model.mbsu(2.4, passes=1, drafter_parameters=0, target_parameters=100) == pytest.approx(2.4)
