"""Budgets become numbers of steps once."""

import json
import math

import pytest

from draftsmith.recipe import EngineSection
from draftsmith.train.budget import Budget, Shares, fix_budget, split_minutes, timed


def fix(file, engine, **settings):
    known = {
        "steps_in": lambda epochs: round(10 * epochs),
        "seconds_a_step": lambda: 0.5,
        "seconds_an_evaluation": lambda: 20.0,
        "evaluate_every": 40,
    }
    return fix_budget(EngineSection(**engine), file, **{**known, **settings})


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"steps": 7}, Budget(7, None)),
        ({"epochs": 2.5}, Budget(25, None)),
        ({"epochs": 0.01}, Budget(1, None)),
        # A quarter of ten minutes; a step costs its own half second and its share of an evaluation, another half.
        ({"minutes": 10, "data_share": 0.5, "evaluate_share": 0.25}, Budget(150, 150.0)),
        ({"minutes": 10, "data_share": 0.5, "evaluate_share": 0.25, "max_epochs": 3}, Budget(30, 30.0)),
        ({"minutes": 0.001}, Budget(1, 1.0)),
    ],
)
def test_steps_epochs_and_minutes(engine, expected, tmp_path):
    file = tmp_path / "budget.json"
    assert fix(file, engine) == expected
    assert json.loads(file.read_text()) == {"steps": expected.steps, "seconds": expected.seconds}


def test_what_was_fixed_stays_whatever_the_clock_says_later(tmp_path):
    def broken():
        raise AssertionError("measured again")

    first = fix(tmp_path / "budget.json", {"minutes": 10})
    again = fix(tmp_path / "budget.json", {"minutes": 99}, seconds_a_step=broken, seconds_an_evaluation=broken)
    assert again == first


def test_nothing_is_measured_where_steps_are_given(tmp_path):
    def broken():
        raise AssertionError("measured")

    for engine in ({"steps": 3}, {"epochs": 1.0}):
        fix(tmp_path / str(engine), engine, seconds_a_step=broken, seconds_an_evaluation=broken)


@pytest.mark.parametrize(("elapsed", "steps"), [(100.0, 150), (300.0, 150), (330.0, 120), (900.0, 37)])
def test_what_the_data_took_beyond_its_share_is_training_s_loss(elapsed, steps, tmp_path):
    engine = {"minutes": 10, "data_share": 0.5, "evaluate_share": 0.25}
    assert fix(tmp_path / "budget.json", engine, elapsed=lambda: elapsed).steps == steps


@pytest.mark.parametrize(
    ("evaluation", "data", "training"),
    [(math.inf, 480, 360), (360, 480, 360), (150, 600, 450), (0, 1200 * 4 / 7, 1200 * 3 / 7)],
)
def test_what_the_evaluation_does_not_need_goes_to_data_and_training(evaluation, data, training):
    engine = EngineSection(minutes=20, data_share=0.4, evaluate_share=0.3)
    assert split_minutes(engine, evaluation) == pytest.approx((data, training))


def test_other_budgets_are_not_split():
    assert split_minutes(EngineSection(steps=5)) is None


def test_training_gets_its_part_of_the_split(tmp_path):
    engine = {"minutes": 10, "data_share": 0.5, "evaluate_share": 0.25}
    assert fix(tmp_path / "a", engine, shares=Shares(320.0, 230.0), elapsed=lambda: 310.0).steps == 230
    assert fix(tmp_path / "b", engine, shares=Shares(320.0, 230.0), elapsed=lambda: 330.0).steps == 220


def test_the_shortest_of_several_calls_counts(monkeypatch):
    clock = iter([0.0, 3.0, 10.0, 11.0, 20.0, 25.0])
    monkeypatch.setattr("draftsmith.train.budget.time.monotonic", lambda: next(clock))
    assert timed(lambda: None, repeats=3) == 1.0
