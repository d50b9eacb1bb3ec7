"""The verb: models from folders, prompts from files, lines that say what was done, and a verdict."""

import json

import pytest

from draftsmith.decode.tree import as_layout
from draftsmith.errors import BadInput
from draftsmith.eval.audit import audit
from draftsmith.eval.options import AuditOptions


@pytest.fixture(scope="module")
def folders(tiny_llama, tiny_tokenizer, tmp_path_factory):
    """A target and a drafter, saved with their tokenizer, and a file of prompts."""
    root = tmp_path_factory.mktemp("audit")
    for name, seed in (("target", 1), ("drafter", 2)):
        tiny_llama(vocab_size=320, layers=1, hidden=16, seed=seed, eos_token_id=2).save_pretrained(root / name)
        tiny_tokenizer.save_pretrained(root / name)
    turns = [["How many apples are left?"], ["What is the capital?"], ["Please write a letter."]]
    rows = [{"question_id": f"q{i}", "category": "all", "turns": turn} for i, turn in enumerate(turns)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def options(folders, **settings):
    known = {"target": str(folders / "target"), "drafter": str(folders / "drafter"), "num_speculative_tokens": 2}
    return AuditOptions(**{**known, "prompts": str(folders / "prompts.jsonl"), "backend": "plain", **settings})


def test_greedy(folders):
    result = audit(options(folders, max_new_tokens=12, batch_size=3))
    assert result.passed
    assert result.lines[0].startswith(
        f"audit of draftsmith, {folders / 'drafter'} for {folders / 'target'}: rule lossless"
    )
    assert "float32, backend plain" in result.lines[0]
    assert any("3 of 3 answers" in line for line in result.lines)


@pytest.mark.parametrize("drafter", ["drafter", "prompt_lookup"])
def test_sampling_against_exact_cells_and_plain_samples(folders, drafter):
    drafter = drafter if drafter == "prompt_lookup" else str(folders / drafter)
    result = audit(options(folders, drafter=drafter, temperature=0.8, samples=150, limit=2, significance=1e-3))
    assert result.passed, result.lines
    kinds = ["first token, exact", "first 2 tokens, exact", "first 2 tokens, against plain samples"]
    assert [test.name for test in result.tests] == [
        f"{where}: {kind}" for where in ("prompt q0", "prompt q1", "all prompts together") for kind in kinds
    ]
    assert any("likely outcomes enumerated" in line for line in result.lines)
    assert sum("would be found with 90 % power" in line for line in result.lines) == 3
    assert any("150 samples after each of 2 prompts of " in line for line in result.lines)


@pytest.mark.parametrize("lengths", ["heuristic:first=1,most=3", "confidence:threshold=0.1,most=3", "auto:most=2"])
def test_draft_tokens_decided_step_by_step(folders, lengths):
    """Sampled answers are long enough for the longest step to begin among the tokens compared."""
    assert audit(options(folders, num_speculative_tokens=lengths, max_new_tokens=12, batch_size=3)).passed
    settings = {"temperature": 0.8, "samples": 100, "limit": 1, "significance": 1e-3}
    result = audit(options(folders, num_speculative_tokens=lengths, **settings))
    assert result.passed, result.lines


def test_auto_takes_the_tree_that_eval_would_choose(folders, monkeypatch):
    def choose(target, drafter, answers, sampling, depth):
        assert all(len(answer.tokens) == 32 or answer.tokens[-1] in target.eos_token_ids for answer in answers)
        return as_layout([2, 1]), f"4 nodes, {depth} deep"

    monkeypatch.setattr("draftsmith.eval.audit.choose_tree", choose)
    result = audit(options(folders, tree="auto", max_new_tokens=8))
    assert result.passed, result.lines
    assert result.lines[0].endswith("tree of 4 nodes, 2 deep")


def test_transformers_engine(folders):
    result = audit(options(folders, engine="transformers", max_new_tokens=8, limit=2))
    assert result.passed, result.lines
    assert result.lines[0].startswith("audit of transformers generate")
    result = audit(options(folders, engine="transformers", temperature=1.0, samples=6, limit=1, significance=1e-3))
    assert any("1 side by side" in line for line in result.lines)


def test_lossy_rules_exit_with_their_drift(folders):
    result = audit(options(folders, rule="typical", max_new_tokens=8))
    assert not result.passed
    assert any("drift" in line for line in result.lines)


def test_bad_input_is_one_line(folders):
    with pytest.raises(BadInput, match="transformers drafts chains only"):
        audit(options(folders, engine="transformers", tree=[2]))
    with pytest.raises(BadInput, match="got 'confidence', transformers is audited with a number"):
        audit(options(folders, engine="transformers", num_speculative_tokens="confidence"))
    with pytest.raises(BadInput, match="defined on a chain"):
        audit(options(folders, rule="block", tree=[2], temperature=1.0, samples=4))
