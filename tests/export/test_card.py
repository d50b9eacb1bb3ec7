"""Model cards: measured figures of this drafter, or the statement that there are none."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import GenerationConfig

from draftsmith.errors import BadInput
from draftsmith.eval.records import PromptRecord, RunRecord
from draftsmith.eval.report import build_report
from draftsmith.export import export
from draftsmith.export.card import Facts, find_report, model_card, served_length
from draftsmith.models.draft_lm import DraftLM, save_draft_lm

FACTS = Facts("some/target", "LlamaForCausalLM", 12345, 2, "float32")


def record(index: int) -> PromptRecord:
    """A prompt: 10 steps of two draft tokens, of which 6 and 3 are accepted."""
    counts = {"target_calls": 10, "drafted": 20, "drafted_nodes": 20, "accepted": 9, "emitted": 19}
    by_position = {"drafted_at": [10, 10], "accepted_at": [6, 3], "tested_at": [10, 6]}
    alpha = {"alpha_sum": 11.4 + index, "agreement_sum": 12.0, "alpha_positions": 19}
    return PromptRecord(index, identical=True, **counts, **by_position, **alpha)


def make_report(drafter: str = "final", **run: Any) -> dict[str, Any]:
    runs = [RunRecord("drafter", [record(0), record(1)], num_speculative_tokens=2, **run)]
    settings = {"prompts": "shipped", "num_speculative_tokens": 2, "temperature": 0.0, "rule": "lossless"}
    environment = {"machine": {"cpu": "two cores", "threads": 2}}
    return build_report(target="some/target", drafter=drafter, settings=settings, environment=environment, runs=runs)


@pytest.fixture
def final(tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any) -> Path:
    """A run's ``final/``."""
    draft_lm = DraftLM(tiny_llama(vocab_size=320, layers=1))
    save_draft_lm(draft_lm, tmp_path / "run" / "final", target_name="some/target", tokenizer=tiny_tokenizer)
    return tmp_path / "run" / "final"


def write(path: Path, report: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report))
    return path


def test_without_a_report_nothing_is_claimed():
    text = model_card(FACTS, None, None)
    assert "Not measured." in text
    acceptance = text.split("## Acceptance")[1]
    assert not any(character.isdigit() for character in acceptance)
    assert "Training" not in text


def test_the_front_matter_is_yaml_and_names_a_base_only_from_the_hub():
    front = yaml.safe_load(model_card(FACTS, None, None).split("---")[1])
    assert front["base_model"] == "some/target"
    assert front["library_name"] == "transformers"
    for elsewhere in ("/data/target", "smollm2-135m-instruct", "./a/b", "a/b/c"):
        assert "base_model" not in yaml.safe_load(
            model_card(FACTS._replace(target=elsewhere), None, None).split("---")[1]
        )


def test_the_figures_are_the_reports():
    text = model_card(FACTS, make_report(), "seed: 0\n")
    table = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("|") for line in text.splitlines())
        if len(cells) > 2
    }
    assert table["acceptance rate"].startswith("0.450 [")
    assert table["block efficiency (τ)"].startswith("1.90 [")
    assert table["alpha (temperature 1)"].startswith("0.626 [")
    assert table["identical to plain decoding"] == "2 of 2"
    assert "speed-up, measured" not in table, "it was not measured"
    assert "Acceptance by position (drafter): 0.60, 0.30." in text
    assert "draft tokens a step 2" in text
    assert "cpu two cores, threads 2" in text
    assert "```yaml\nseed: 0\n```" in text


def test_a_report_with_another_target_says_so():
    assert "Measured with some/target as the target." in model_card(FACTS._replace(target="x/y"), make_report(), None)


@pytest.mark.parametrize("place", ["report.json", "final/report.json", "report/report.json"])
def test_a_report_beside_the_checkpoint_is_found(final, place):
    write(final.parent / place, make_report("run/final"))
    assert find_report(final) is not None


def test_a_report_of_another_drafter_or_an_older_one_is_left_out(final, capsys):
    path = write(final.parent / "report.json", make_report("other/final"))
    assert find_report(final) is None
    write(path, make_report(str(final)))
    os.utime(path, (1, 1))
    assert find_report(final) is None
    assert "older than the drafter" in capsys.readouterr().err
    path.write_text("{")
    assert find_report(final) is None
    assert "not JSON" in capsys.readouterr().err


def test_the_export_carries_what_was_measured_and_serves_as_measured(final, tmp_path, capsys):
    report = write(tmp_path / "elsewhere" / "report.json", make_report("old/place"))
    (final.parent / "recipe.yaml").write_text("seed: 7\n")
    out = export(final, "hf", tmp_path / "out", report=report)
    text = (out / "README.md").read_text()
    assert "identical to plain decoding | 2 of 2" in text
    assert "seed: 7" in text
    # The folder may have moved since, or the report be of another drafter: whoever reads card or terminal can tell.
    assert "What was measured is another drafter, old/place." in text
    assert "is about old/place, not" in capsys.readouterr().err
    config = GenerationConfig.from_pretrained(out)
    assert (config.num_assistant_tokens, config.assistant_confidence_threshold) == (2, 0.0)
    with pytest.raises(BadInput, match="not a report of schema 1"):
        export(final, "hf", tmp_path / "again", report=write(tmp_path / "bad.json", {"schema": 2}))


def test_the_served_length_is_the_best_one_of_a_chain():
    curve = {"cost_ratio": 0.01, "verification_cost": [1.0, 1.01, 1.02, 1.03, 1.04]}
    best = make_report(**curve)
    assert served_length(best) == best["runs"][0]["best_num_speculative_tokens"] > 2
    assert served_length(make_report()) == 2
    assert served_length(make_report(tree_nodes=6)) is None
    assert served_length(None) is None
