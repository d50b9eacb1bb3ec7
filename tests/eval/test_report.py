"""The report: its keys, its agreement with the records, its validation, and how it is written."""

import copy
import json
import os

import numpy as np
import pytest
from pydantic import ValidationError

from draftsmith.errors import BadInput
from draftsmith.eval import cost_model
from draftsmith.eval.report import build_report, read_report, without_nan, write_report
from draftsmith.eval.schema import Report

FIGURES = {
    "alpha", "greedy_agreement", "alpha_at_step_starts", "acceptance_rate", "per_position_acceptance",
    "conditional_acceptance", "block_efficiency", "block_efficiency_ci", "block_efficiency_mean_per_prompt",
    "target_calls", "drafted", "accepted", "emitted", "tokens_per_second", "plain_tokens_per_second", "speedup",
    "speedup_ci", "cost_ratio", "expected_speedup", "best_num_speculative_tokens", "break_even_alpha", "mbsu",
    "identical_to_target",
}  # fmt: skip


@pytest.fixture
def no_page(monkeypatch):
    """Drawing the page takes a while and is tested elsewhere."""
    monkeypatch.setattr("draftsmith.eval.report.render", lambda report: "<!DOCTYPE html>")


def run_named(report, name):
    return next(run for run in report["runs"] if run["name"] == name)


def test_every_key_of_schema_1_is_there(make_report):
    report = make_report()
    assert report["schema"] == 1
    assert {"target", "drafter", "settings", "environment", "runs"} <= report.keys()
    for run in report["runs"]:
        assert FIGURES | {"name", "categories", "prompts"} <= run.keys()
        for figures in run["categories"].values():
            assert figures.keys() >= FIGURES
        assert {"question_id", "target_calls"} <= run["prompts"][0].keys()


def test_every_rate_has_an_interval_around_it(make_report):
    run = run_named(make_report(), "drafter")
    names = ("alpha", "acceptance_rate", "block_efficiency", "tokens_per_second", "speedup", "expected_speedup", "mbsu")
    for name in names:
        low, high = run[f"{name}_ci"]
        assert low <= run[name] <= high, name
    for rate, (low, high) in zip(run["conditional_acceptance"], run["conditional_acceptance_ci"], strict=True):
        assert low < rate < high


def test_counts_of_categories_add_up_to_the_run(make_report):
    run = run_named(make_report(), "drafter")
    for name in ("target_calls", "drafted", "accepted", "emitted"):
        assert sum(figures[name] for figures in run["categories"].values()) == run[name]
        assert sum(prompt[name] for prompt in run["prompts"]) == run[name]
    assert run["block_efficiency"] == pytest.approx(run["emitted"] / run["target_calls"])
    assert run["identical_to_target"] == [30, 30]


def test_cost_model_figures_follow_from_the_others(make_report):
    run = run_named(make_report(), "drafter")
    conditional, curve = np.array(run["conditional_acceptance"]), run["verification_cost"]
    assert run["expected_speedup"] == pytest.approx(
        float(cost_model.expected_speedup(conditional, 2, run["cost_ratio"], curve))
    )
    assert run["expected_speedup_by_length"][1] == pytest.approx(run["expected_speedup"])
    best = run["best_num_speculative_tokens"]
    assert run["expected_speedup_by_length"][best - 1] == max(run["expected_speedup_by_length"])
    assert run["mbsu"] == pytest.approx(run["block_efficiency"] / 1.2)
    assert run["block_efficiency"] == pytest.approx(float(cost_model.expected_tokens(conditional)))


def test_a_teacher_forced_run_has_null_where_nothing_was_decoded(make_report):
    run = run_named(make_report(), "start")
    assert run["alpha"] == pytest.approx(0.1)
    for name in FIGURES - {"alpha", "greedy_agreement"}:
        assert run[name] is None, name


def test_a_tree_gets_an_expectation_but_no_best_length(make_report, decoded_run):
    record = decoded_run(tree_nodes=4)
    for prompt in record.prompts:
        prompt.drafted_nodes = 4 * prompt.target_calls
    run = make_report(runs=[record])["runs"][0]
    expected = cost_model.expected_speedup(
        np.array(run["conditional_acceptance"]), 2, 0.1, run["verification_cost"], verified_tokens=5
    )
    assert run["expected_speedup"] == pytest.approx(float(expected))
    assert run["best_num_speculative_tokens"] is None
    assert run["break_even_alpha"] is None


def test_parallel_heads_make_one_pass(make_report, decoded_run):
    run = make_report(runs=[decoded_run(sequential=False)])["runs"][0]
    assert run["passes_per_step"] == 1
    assert run["mbsu"] == pytest.approx(run["block_efficiency"] / 1.1)


def test_a_curve_that_is_too_short_gives_no_expectation(make_report, decoded_run):
    run = make_report(runs=[decoded_run(verification_cost=[1.0, 1.1])])["runs"][0]
    assert run["expected_speedup"] is None
    assert run["break_even_alpha"] is None
    assert run["best_num_speculative_tokens"] == 1


def test_written_json_is_read_back_equal_and_holds_no_nan(make_report, tmp_path):
    report = make_report(settings={"odd": float("nan"), "path": tmp_path}, training={
        "steps": [1, 2], "loss": [3.0, float("nan")], "alpha": [None, np.float64(0.2)],
    })  # fmt: skip
    json_path, html_path = write_report(report, tmp_path / "new" / "folder")
    text = json_path.read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the JSON")) == report
    assert report["settings"]["odd"] is None
    assert report["training"]["loss"] == [3.0, None]
    assert read_report(json_path.parent) == report
    assert html_path.read_text().startswith("<!DOCTYPE html>")
    assert sorted(os.listdir(json_path.parent)) == ["report.html", "report.json"]


def test_a_failed_write_leaves_the_old_report_and_no_rubbish(make_report, tmp_path, monkeypatch, no_page):
    report = make_report()
    write_report(report, tmp_path)
    before = (tmp_path / "report.json").read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(BadInput, match="No space left"):
        write_report({**report, "target": "another"}, tmp_path)
    assert (tmp_path / "report.json").read_text() == before
    assert sorted(os.listdir(tmp_path)) == ["report.html", "report.json"]


def test_an_output_folder_that_is_a_file_is_one_line(make_report, tmp_path, no_page):
    (tmp_path / "taken").write_text("")
    with pytest.raises(BadInput, match="taken: cannot write"):
        write_report(make_report(), tmp_path / "taken")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: run.update(alpha=1.5), "less than or equal"),
        (lambda run: run.update(alpha=float("nan")), "finite|greater than"),
        (lambda run: run.update(speedup_ci=[2.0, 1.0]), "upside down"),
        (lambda run: run.update(alhpa=0.5), "Extra inputs"),
        (lambda run: run.pop("mbsu"), "Field required"),
        (lambda run: run.update(accepted=run["drafted"] + 1), "accepted"),
        (lambda run: run.update(identical_to_target=[5, 4]), "more than were compared"),
        (lambda run: run.update(conditional_acceptance=[0.5]), "differ in length"),
        (lambda run: run.update(name="baseline"), "distinct names"),
    ],
)
def test_validation_refuses(make_report, spoil, message):
    report = copy.deepcopy(make_report())
    spoil(run_named(report, "drafter"))
    with pytest.raises(ValidationError, match=message):
        Report.model_validate(report)


def test_runs_need_distinct_names_and_prompts(decoded_run):
    known = {"target": "t", "drafter": "d", "settings": {}, "environment": {}}
    with pytest.raises(ValueError, match="distinct names"):
        build_report(**known, runs=[decoded_run(), decoded_run()])
    with pytest.raises(ValueError, match="no prompts"):
        build_report(**known, runs=[decoded_run(prompts=0)])


def test_reading_says_what_is_wrong(make_report, tmp_path):
    path = tmp_path / "report.json"
    with pytest.raises(BadInput, match="cannot read the report"):
        read_report(tmp_path)
    path.write_text("{")
    with pytest.raises(BadInput, match="not JSON"):
        read_report(path)
    path.write_text(json.dumps({**make_report(), "schema": 2}))
    with pytest.raises(BadInput, match="not a report of schema 1, schema"):
        read_report(path)


def test_without_nan_makes_plain_data():
    assert without_nan({1: (np.int64(2), float("inf")), "a": np.array([0.5, np.nan])}) == {
        "1": [2, None],
        "a": [0.5, None],
    }
