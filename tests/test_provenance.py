import json

import pytest
import yaml

from draftsmith.errors import BadInput
from draftsmith.provenance import Provenance, check_unchanged, open_run, versions

RECIPE = {
    "target": {"model": "m", "dtype": "auto"},
    "optimizer": {"learning_rate": 1e-3, "betas": (0.9, 0.95)},
    "engine": {"steps": 10, "checkpoint_every": 5, "deepspeed": None},
    "evaluate": {"every": 200},
    "output": "runs/a",
}


def changed(section: str, **values) -> dict:
    return {**RECIPE, section: {**RECIPE[section], **values}}


def test_the_resolved_recipe_is_written_once_and_compared_on_resume(tmp_path) -> None:
    run = tmp_path / "runs" / "a"
    open_run(run, RECIPE, resume=False)
    written = yaml.safe_load((run / "recipe.yaml").read_text())
    assert written["optimizer"] == {"learning_rate": 1e-3, "betas": [0.9, 0.95]}
    open_run(run, RECIPE, resume=True)
    with pytest.raises(BadInput, match="already holds a run"):
        open_run(run, RECIPE, resume=False)
    with pytest.raises(BadInput, match=r"optimizer.learning_rate: the run was started with 0.001, now it is 0.002"):
        open_run(run, changed("optimizer", learning_rate=2e-3), resume=True)


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        (changed("engine", deepspeed={"zero_optimization": {"stage": 2}}), "engine.deepspeed.zero_optimization.stage"),
        (changed("engine", steps=20), "engine.steps"),
        (changed("optimizer", betas=(0.9, 0.99)), "optimizer.betas"),
        ({key: value for key, value in RECIPE.items() if key != "target"}, "target.model"),
    ],
)
def test_a_change_that_matters_is_refused_by_its_key(tmp_path, recipe, key) -> None:
    open_run(tmp_path, RECIPE, resume=False)
    with pytest.raises(BadInput, match=f"^{key}: "):
        check_unchanged(tmp_path / "recipe.yaml", recipe)


def test_what_moves_no_weight_may_change(tmp_path) -> None:
    open_run(tmp_path, RECIPE, resume=False)
    check_unchanged(tmp_path / "recipe.yaml", {**changed("engine", checkpoint_every=1, threads=2), "output": "b"})
    check_unchanged(tmp_path / "recipe.yaml", changed("evaluate", every=7))


def test_what_steers_a_stream_or_a_search_may_not_change(tmp_path) -> None:
    online = {**changed("evaluate", num_speculative_tokens=4), "objective": {"rollouts": {"source": "online"}}}
    open_run(tmp_path / "online", online, resume=False)
    with pytest.raises(BadInput, match=r"^evaluate\.num_speculative_tokens: the run was started with 4, now it is 2"):
        check_unchanged(
            tmp_path / "online" / "recipe.yaml",
            {**online, "evaluate": {"every": 7, "num_speculative_tokens": 2}},
        )
    searched = {**changed("evaluate", sampling={"temperature": 0.0}), "drafter": {"kind": "layer_skip"}}
    open_run(tmp_path / "searched", searched, resume=False)
    with pytest.raises(BadInput, match=r"^evaluate\.sampling\.temperature: "):
        check_unchanged(
            tmp_path / "searched" / "recipe.yaml", {**searched, "evaluate": {"sampling": {"temperature": 1.0}}}
        )


def test_a_run_that_made_nothing_is_begun_anew_with_another_recipe(tmp_path) -> None:
    open_run(tmp_path, RECIPE, resume=False)
    Provenance(tmp_path)
    for steps, resume in ((20, False), (30, True)):
        open_run(tmp_path, changed("engine", steps=steps), resume=resume)
        assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["engine"]["steps"] == steps
    (tmp_path / "data").mkdir()
    with pytest.raises(BadInput, match="already holds a run"):
        open_run(tmp_path, RECIPE, resume=False)
    with pytest.raises(BadInput, match=r"^engine\.steps: "):
        open_run(tmp_path, RECIPE, resume=True)


def test_a_recipe_alone_is_not_written_over(tmp_path) -> None:
    (tmp_path / "recipe.yaml").write_text("# mine\noutput: runs/a\n")
    with pytest.raises(BadInput, match="already holds a run"):
        open_run(tmp_path, RECIPE, resume=False)
    assert (tmp_path / "recipe.yaml").read_text().startswith("# mine")


def test_an_unwritable_output_is_one_line(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"^output: cannot write to "):
        open_run(tmp_path / "file" / "run", RECIPE, resume=False)


def test_every_session_is_recorded_with_versions_command_host_and_peak_memory(tmp_path) -> None:
    first = Provenance(tmp_path, engine=["engine: one process"], command=["draftsmith", "train", "a b"])
    first.finish(steps=3)
    Provenance(tmp_path)
    sessions = json.loads((tmp_path / "provenance.json").read_text())["sessions"]
    assert sessions[0]["command"] == "draftsmith train 'a b'"
    assert sessions[0]["engine"] == ["engine: one process"]
    assert sessions[0]["peak_memory_gib"]["cpu"] > 0.01
    assert sessions[0]["steps"] == 3
    assert sessions[0]["host"]["cores"] >= 1
    assert "finished" not in sessions[1]


def test_versions_name_what_shapes_a_run() -> None:
    found = versions()
    for name in ("python", "torch", "transformers", "accelerate", "safetensors"):
        assert found[name]
    assert "commit" in found
