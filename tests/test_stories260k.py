"""A real, tiny target (stories260K, a TinyStories Llama): a smaller drafter is trained for seconds and measured."""

from typing import Any

import pytest
from accelerate.state import AcceleratorState

from draftsmith.eval.options import EvalOptions
from draftsmith.eval.run import evaluate
from draftsmith.recipe import Recipe
from draftsmith.train.logs import read_metrics
from draftsmith.train.run import train

EVALUATION: dict[str, Any] = {"max_new_tokens": 48, "limit": 24}


@pytest.fixture(scope="module")
def stories(shared_data, tmp_path_factory):
    """A run on what the target writes itself, from its first token on."""
    target = shared_data / "models" / "stories260K"
    openings = shared_data / "prompts" / "tinystories_openings.jsonl"
    if not (target.is_dir() and openings.is_file()):
        pytest.skip(f"no {target} or no {openings}")
    recipe = {
        "target": {"model": str(target), "dtype": "float32"},
        "drafter": {"kind": "model", "init": {"layers": [0]}},
        "data": {
            "prompts": "self",
            "num_self_prompts": 192,
            "responses": "target",
            "max_length": 144,
            "max_prompt_length": 32,
            "max_new_tokens": 96,
            "sampling": {"temperature": 0.8},
            "generation_batch": 48,
            "cache": "hidden",
        },
        "optimizer": {"learning_rate": 1e-2},
        "engine": {"steps": 60, "tokens_per_step": 2048, "checkpoint_every": 60},
        "evaluate": {"prompts": str(openings), "every": 30, "sampling": {"temperature": 0}, **EVALUATION},
        "output": str(tmp_path_factory.mktemp("stories") / "run"),
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = train(Recipe.model_validate(recipe), resume=False, command=["draftsmith", "train", "stories.yaml"]).parent
    AcceleratorState._reset_state(reset_partial_state=True)
    options = EvalOptions(
        target=str(target),
        drafter=str(folder / "final"),
        untrained=str(folder / "start"),
        prompts=str(openings),
        num_speculative_tokens=2,
        **EVALUATION,
    )
    return folder, {run["name"]: run for run in evaluate(options)["runs"]}


def test_alpha_on_openings_that_training_never_saw_rises(stories):
    folder, runs = stories
    assert runs["start"]["alpha"] < 0.1
    assert runs["drafter"]["alpha"] > 0.35
    assert runs["start"]["alpha_ci"][1] < runs["drafter"]["alpha_ci"][0]
    losses = [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert losses[-1] < losses[0] / 2


def test_greedy_output_is_the_target_s_own(stories):
    _, runs = stories
    assert runs["drafter"]["identical_to_target"] == [24, 24]
    assert runs["drafter"]["block_efficiency"] > 1.4


def test_what_the_log_says_is_what_the_report_says(stories):
    folder, runs = stories
    last = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "evaluation"][-1]
    assert last["alpha"] == pytest.approx(runs["drafter"]["alpha"], abs=1e-4)
    assert last["greedy_agreement"] == pytest.approx(runs["drafter"]["greedy_agreement"], abs=1e-3)


def test_acceptance_at_step_starts_is_what_decoding_counted(stories):
    _, runs = stories
    drafter = runs["drafter"]
    assert drafter["greedy_agreement_at_step_starts"] == pytest.approx(drafter["conditional_acceptance"][0], abs=1e-9)
