"""Pooled rates, per-prompt means and bootstrap intervals over prompts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.eval import stats
from draftsmith.eval.records import PromptRecord


def prompt(accepted: int, drafted: int, **fields) -> PromptRecord:
    return PromptRecord("a", accepted=accepted, drafted=drafted, **fields)


def test_pooled_figure_and_per_prompt_mean_differ():
    figures = stats.summarise([prompt(1, 2), prompt(1, 8)])
    assert figures["acceptance_rate"] == pytest.approx(2 / 10)
    assert figures["acceptance_rate_mean_per_prompt"] == pytest.approx((1 / 2 + 1 / 8) / 2)


def test_conditional_and_per_position_acceptance_by_hand():
    # Three steps that draft three tokens and accept 2, 1 and 0 of them; a last one that drafts one and accepts it.
    record = prompt(4, 10, drafted_at=[4, 3, 3], accepted_at=[3, 1, 0], tested_at=[4, 2, 1])
    figures = stats.summarise([record])
    assert figures["per_position_acceptance"] == pytest.approx([3 / 4, 1 / 3, 0])
    assert figures["conditional_acceptance"] == pytest.approx([3 / 4, 1 / 2, 0])


def test_tested_counts_default_to_what_equal_drafts_imply():
    figures = stats.summarise([prompt(3, 6, drafted_at=[3, 3], accepted_at=[2, 1])])
    assert figures["tested_at"] == [3, 2]
    assert figures["conditional_acceptance"] == pytest.approx([2 / 3, 1 / 2])


def test_positions_of_different_depth_are_padded():
    shallow = prompt(1, 2, drafted_at=[2], accepted_at=[1])
    deep = prompt(3, 4, drafted_at=[2, 2], accepted_at=[2, 1])
    figures = stats.summarise([shallow, deep])
    assert figures["per_position_acceptance"] == pytest.approx([3 / 4, 1 / 2])
    assert figures["per_position_acceptance_mean_per_prompt"] == pytest.approx([3 / 4, 1 / 2])
    assert figures["per_position_acceptance_ci"][1] is None  # one prompt only reached that position


def test_position_that_was_never_reached_is_none():
    figures = stats.summarise([prompt(0, 4, drafted_at=[2, 2], accepted_at=[0, 0])] * 2)
    assert figures["per_position_acceptance"] == [0.0, 0.0]
    assert figures["conditional_acceptance"] == [0.0, None]


def test_contradicting_positions_are_refused():
    with pytest.raises(ValueError, match="more accepted than tested"):
        stats.summarise([prompt(3, 2, drafted_at=[2], accepted_at=[3])])


def test_teacher_forced_prompts_have_no_decoding_figures():
    figures = stats.summarise([PromptRecord(i, alpha_sum=2.0, agreement_sum=1.0, alpha_positions=4) for i in range(3)])
    assert figures["alpha"] == pytest.approx(0.5)
    assert figures["greedy_agreement"] == pytest.approx(0.25)
    for name in ("acceptance_rate", "block_efficiency", "speedup", "target_calls", "seconds", "emitted"):
        assert figures[name] is None
    assert figures["per_position_acceptance"] is None
    assert figures["identical_to_target"] is None


def test_prompts_without_a_count_are_left_out_of_its_rate_only():
    timed = PromptRecord(1, emitted=10, target_calls=5, seconds=1.0, plain_seconds=2.0)
    untimed = PromptRecord(2, emitted=30, target_calls=10)
    figures = stats.summarise([timed, untimed])
    assert figures["block_efficiency"] == pytest.approx(40 / 15)
    assert figures["tokens_per_second"] == pytest.approx(10.0)
    assert figures["speedup"] == pytest.approx(2.0)


def test_speedup_is_the_ratio_of_wall_times_and_per_token_corrects_for_length():
    record = PromptRecord(1, emitted=50, plain_emitted=100, seconds=2.0, plain_seconds=6.0, target_calls=25)
    figures = stats.summarise([record])
    assert figures["speedup"] == pytest.approx(3.0)
    assert figures["speedup_per_token"] == pytest.approx(1.5)


def test_identical_counts_only_compared_prompts():
    records = [PromptRecord(i, identical=same) for i, same in enumerate([True, False, None, True])]
    assert stats.summarise(records)["identical_to_target"] == [2, 3]


def test_interval_equals_a_plain_bootstrap_written_out():
    rng = np.random.default_rng(3)
    drafted = rng.integers(5, 40, size=12)
    accepted = rng.binomial(drafted, 0.4)
    weights = stats.resampling_weights(12, resamples=400, seed=5)
    found = stats.estimate(stats.ratio, weights, accepted.astype(float), drafted.astype(float))
    resampled = []
    for times in weights.astype(int):
        chosen = np.repeat(np.arange(12), times)
        assert len(chosen) == 12
        resampled.append(accepted[chosen].sum() / drafted[chosen].sum())
    assert [found.low, found.high] == pytest.approx(np.quantile(resampled, [0.025, 0.975]))


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        rates = rng.beta(4, 6, size=40)  # prompts differ: the mean rate is 0.4
        drafted = np.full(40, 50.0)
        accepted = rng.binomial(50, rates).astype(float)
        found = stats.estimate(stats.ratio, stats.resampling_weights(40, 500, seed=trial), accepted, drafted)
        covered += bool(found.low <= 0.4 <= found.high)
    assert 0.90 <= covered / 300 <= 0.985


def test_same_seed_same_interval_and_other_seed_another():
    records = [prompt(i % 7, 10) for i in range(20)]
    one, same, other = (stats.summarise(records, seed=seed)["acceptance_rate_ci"] for seed in (1, 1, 2))
    assert one == same != other


def test_no_interval_from_a_single_prompt():
    figures = stats.summarise([prompt(3, 10)])
    assert figures["acceptance_rate"] == pytest.approx(0.3)
    assert figures["acceptance_rate_ci"] is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=12))
def test_pooled_rate_and_interval_stay_within_the_prompts_rates(pairs):
    records = [prompt(accepted, accepted + rejected) for accepted, rejected in pairs]
    figures = stats.summarise(records, stats.resampling_weights(len(records), 200))
    rates = [accepted / (accepted + rejected) for accepted, rejected in pairs if accepted + rejected]
    if not rates:
        assert figures["acceptance_rate"] is None
        return
    assert min(rates) - 1e-9 <= figures["acceptance_rate"] <= max(rates) + 1e-9
    assert figures["acceptance_rate_mean_per_prompt"] == pytest.approx(np.mean(rates))
    if len(rates) > 1:
        low, high = figures["acceptance_rate_ci"]
        assert min(rates) - 1e-9 <= low <= high <= max(rates) + 1e-9
