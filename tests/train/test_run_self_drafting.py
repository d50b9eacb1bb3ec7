"""From a recipe to drafters that are a part of the target: trained or searched for, resumed, evaluated as they are."""

import json
import signal

import pytest

from draftsmith.eval.options import EvalOptions
from draftsmith.eval.run import evaluate
from draftsmith.heads import load_drafter
from draftsmith.heads.layer_skip_search import LayerSkipSearch
from draftsmith.models.target import load_target
from draftsmith.recipe import Recipe
from draftsmith.train.logs import read_metrics
from draftsmith.train.run import train

ANSWERED = {"responses": "target", "max_new_tokens": 12}
SKIPPING = {
    "kind": "layer_skip",
    "num_speculative_tokens": 2,
    "calibration_tokens": 64,
    "calibration_prompts": 1,
    "calibration_new_tokens": 4,
}
CASES = {
    "exit": ({"kind": "early_exit", "exit_layer": 1}, {**ANSWERED, "cache": "hidden"}),
    "exit streamed": (
        {"kind": "early_exit", "exit_layer": 2, "adapter": "attention", "vocabulary": 150},
        {"cache": "none"},
    ),
    "exit untrained": ({"kind": "early_exit", "exit_layer": 1, "adapter": "none"}, {"cache": "none"}),
    "skip": (SKIPPING, ANSWERED),
    "lookahead": ({"kind": "lookahead_tokens", "num_tokens": 2, "anchors": 0.5}, ANSWERED),
}


def a_recipe(drafter, data, folder, chat_folder, **engine):
    return Recipe.model_validate(
        {
            "target": {"model": str(chat_folder / "model"), "dtype": "float32"},
            "drafter": drafter,
            "data": {"prompts": str(chat_folder / "chats.jsonl"), "responses": "given", "max_length": 64, **data},
            "optimizer": {"learning_rate": 1e-2},
            "engine": {"steps": 8, "tokens_per_step": 512, "checkpoint_every": 5, **engine},
            "evaluate": {
                "prompts": str(chat_folder / "prompts.jsonl"),
                "every": 4,
                "max_new_tokens": 10,
                "sampling": {"temperature": 0},
            },
            "output": str(folder),
        }
    )


@pytest.fixture
def start(chat_folder, tmp_path, toy):
    def begin(drafter, data, name="run", resume=False, **engine):
        toy.reset()
        recipe = a_recipe(drafter, data, tmp_path / name, chat_folder, **engine)
        train(recipe, resume=resume, command=["draftsmith", "train", "x"])
        return tmp_path / name

    return begin


@pytest.fixture(autouse=True)
def quick_costs(monkeypatch):
    """Searches that do not measure for seconds."""
    real = LayerSkipSearch.__init__
    monkeypatch.setattr(LayerSkipSearch, "__init__", lambda *args: real(*args, seconds=0.02))


def records(folder, kind):
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == kind]


@pytest.mark.parametrize("case", CASES)
def test_a_run_leaves_a_drafter_that_evaluation_takes_as_it_is(case, start, chat_folder):
    drafter, data = CASES[case]
    folder = start(drafter, data)
    curve = records(folder, "trial" if case == "skip" else "train")
    if case in ("exit", "exit streamed", "lookahead"):
        assert curve[-1]["loss"] < curve[0]["loss"]
        assert any("alpha" in record and "block_efficiency" in record for record in curve)
    elif case == "skip":
        assert len(curve) == 8
        assert curve[-1]["best_expected_speedup"] == max(record["expected_speedup"] for record in curve)
    else:
        assert not curve
    last = records(folder, "evaluation")[-1]
    options = EvalOptions(
        target=str(chat_folder / "model"),
        drafter=str(folder / "final"),
        prompts=str(chat_folder / "prompts.jsonl"),
        limit=6,
        max_new_tokens=10,
        num_speculative_tokens=2,
    )
    (run,) = (run for run in evaluate(options)["runs"] if run["name"] == "drafter")
    assert run["identical_to_target"] == [6, 6]
    assert run["greedy_agreement_at_step_starts"] == pytest.approx(run["conditional_acceptance"][0])
    assert last["greedy_agreement"] == pytest.approx(run["greedy_agreement"], abs=0.25)  # over more prompts
    assert run["mbsu"] is not None
    assert run["expected_speedup"] is not None


def test_a_search_that_was_stopped_goes_on_where_it_was(start, monkeypatch, capsys):
    whole = start(SKIPPING, ANSWERED, "whole")
    taken, real = [], LayerSkipSearch.trial

    def stopped(search):
        taken.append(1)
        if len(taken) == 3:
            signal.raise_signal(signal.SIGTERM)
        return real(search)

    monkeypatch.setattr(LayerSkipSearch, "trial", stopped)
    with pytest.raises(SystemExit) as error:
        start(SKIPPING, ANSWERED, "broken")
    assert error.value.code == 128 + signal.SIGTERM
    assert "stopped after 3 trials" in capsys.readouterr().out
    monkeypatch.setattr(LayerSkipSearch, "trial", real)
    # The costs that trials are weighed by were measured in each of the two runs.
    state = json.loads((tmp := whole.parent / "broken" / "search.json").read_text())
    costs = json.loads((whole / "search.json").read_text())["search"]["costs"]
    tmp.write_text(json.dumps({**state, "search": {"costs": costs, "trials": []}, "trials": 0}))
    broken = start(SKIPPING, ANSWERED, "broken", resume=True)
    found = [[record["acceptance"] for record in records(folder, "trial")] for folder in (whole, broken)]
    assert found[0] == found[1]
    assert "resuming the search" in capsys.readouterr().out


def test_a_budget_in_minutes_becomes_trials(start, capsys):
    folder = start(SKIPPING, ANSWERED, "timed", steps=None, minutes=0.05, data_share=0.2, evaluate_share=0.2)
    trials = json.loads((folder / "budget.json").read_text())["steps"]
    assert trials >= 1
    assert 1 <= len(records(folder, "trial")) <= trials
    assert "the search chose" in capsys.readouterr().out


def test_what_a_search_found_is_loaded_again(start, chat_folder):
    folder = start(SKIPPING, ANSWERED)
    target = load_target(str(chat_folder / "model"))
    drafter = load_drafter(folder / "final", target)
    config = json.loads((folder / "final" / "config.json").read_text())
    assert list(drafter.skipped.attention) == config["skip_attention"]  # type: ignore[attr-defined]
    assert config["search"]["trials"] == 8
    assert config["search"]["finalists"]
