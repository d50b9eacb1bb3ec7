from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.train.schedule import learning_rate, warmup_steps


def test_warm_up_is_a_share_below_one_and_a_number_of_steps_from_one_on() -> None:
    assert warmup_steps(0.03, 200) == 6
    assert warmup_steps(10, 200) == 10
    assert warmup_steps(10, 4) == 4
    assert warmup_steps(0, 200) == 0


def test_warm_up_rises_linearly_to_the_peak() -> None:
    rates = [learning_rate(step, 100, peak=2.0, warmup=4) for step in range(5)]
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates[4] == pytest.approx(2.0)


def test_decays_reach_the_final_fraction_at_the_end_and_half_way_in_the_middle() -> None:
    for schedule in ("cosine", "linear"):
        assert learning_rate(100, 100, peak=1.0, schedule=schedule, final_fraction=0.1) == pytest.approx(0.1)
        assert learning_rate(50, 100, peak=1.0, schedule=schedule, final_fraction=0.1) == pytest.approx(0.55)
    assert learning_rate(99, 100, peak=1.0, schedule="constant") == 1.0
    assert learning_rate(25, 100, peak=1.0, schedule="cosine") > learning_rate(25, 100, peak=1.0, schedule="linear")


@given(
    total=st.integers(1, 300),
    warmup=st.one_of(st.floats(0, 0.99), st.integers(1, 400)),
    final=st.floats(0, 1),
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
)
def test_rates_are_positive_until_the_last_step_and_never_rise_after_the_warm_up(
    total, warmup, final, schedule
) -> None:
    settings = {"peak": 3.0, "schedule": schedule, "warmup": warmup, "final_fraction": final}
    rates = [learning_rate(step, total, **settings) for step in range(total)]
    assert all(0 < rate <= 3.0 + 1e-12 for rate in rates)
    decay = rates[warmup_steps(warmup, total) :]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(decay))
