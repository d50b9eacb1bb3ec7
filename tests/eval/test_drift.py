"""Drift: log-probabilities are the target's own, and the audit of a lossy rule fails by design and says how far it is off."""

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.decode.sampling import Sampling
from draftsmith.eval import stats
from draftsmith.eval.alpha import Answer
from draftsmith.eval.audit import audit_drafter
from draftsmith.eval.drift import add_drift, token_log_probabilities
from draftsmith.eval.records import PromptRecord
from draftsmith.models.target import as_target

PROMPTS = [[1, 4, 2], [3, 3, 0, 1, 5], [7]]


def by_hand(model, prompt, answer):
    with torch.no_grad():
        logs = model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    return [float(logs[len(prompt) + i - 1, token]) for i, token in enumerate(answer)]


def test_log_probabilities_are_the_targets_at_temperature_one(tiny_gemma3):
    model = tiny_gemma3(seed=1)
    answers = [Answer(PROMPTS[0], [5, 9, 9, 60]), Answer(PROMPTS[1], []), Answer(PROMPTS[2], [8] * 20)]
    found = token_log_probabilities(as_target(model), answers)
    for answer, logs in zip(answers, found, strict=True):
        assert logs.tolist() == pytest.approx(by_hand(model, answer.prompt, answer.tokens), abs=1e-4)


def test_records_get_the_sums_that_the_report_divides(tiny_llama):
    model = tiny_llama(seed=1)
    mine, plain = [[5, 6], [7, 8, 9], [1]], [[2], [3, 4], [5, 6]]
    records = [
        PromptRecord(i, emitted=len(a), plain_emitted=len(b)) for i, (a, b) in enumerate(zip(mine, plain, strict=True))
    ]
    add_drift(
        as_target(model),
        records,
        *([Answer(p, t) for p, t in zip(PROMPTS, each, strict=True)] for each in (mine, plain)),
    )
    figures = stats.summarise(records)
    for name, each in (("target_log_probability", mine), ("plain_target_log_probability", plain)):
        logs = [log for prompt, tokens in zip(PROMPTS, each, strict=True) for log in by_hand(model, prompt, tokens)]
        assert figures[name] == pytest.approx(sum(logs) / len(logs), abs=1e-4)


@pytest.mark.parametrize("rule", ["typical", "lenient", "tolerant", "fallback_rollback"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lossy_rule_fails_by_design_with_its_drift(tiny_llama, rule, temperature):
    target, drafter = tiny_llama(seed=1, vocab_size=12), tiny_llama(seed=2, vocab_size=12)
    result = audit_drafter(
        target, drafter, PROMPTS, rule=rule, sampling=Sampling(temperature), max_new_tokens=16, batch_size=3
    )
    assert not result.passed
    assert result.lines[-1] == f"FAILED: the rule {rule} is not lossless by design, so the output is not the target's"
    (drift,) = [line for line in result.lines if "mean target log-probability per token" in line]
    assert "95 % interval" in drift
    assert any("at temperature 0, " in line and "of 3 answers" in line for line in result.lines)


def test_leniency_to_a_poor_drafter_drifts_to_less_likely_tokens(tiny_llama):
    """The figure moves with the lenience, and is what the answers give."""
    target, drafter = tiny_llama(seed=1, vocab_size=12), tiny_llama(seed=2, vocab_size=12)
    prompts = [[i, 3, 5] for i in range(12)]
    drifts = []
    for lenience in (1.0, 0.5, 0.05):
        result = audit_drafter(
            target,
            drafter,
            prompts,
            rule="lenient",
            rule_options={"lenience": lenience},
            sampling=Sampling(1.0),
            max_new_tokens=24,
            batch_size=12,
        )
        (line,) = [line for line in result.lines if "drift" in line]
        drifts.append(float(line.split("drift ")[1].split(" ")[0]))
    assert abs(drifts[0]) < 0.3
    assert drifts[0] > drifts[1] > drifts[2]
    assert drifts[2] < -0.5


def test_lossy_greedy_identity_counts_answers(tiny_llama):
    """Perfect agreement with a drafter that is the target, whatever the rule tolerates."""
    target = tiny_llama(seed=1)
    result = audit_drafter(target, tiny_llama(seed=1), PROMPTS, rule="typical", max_new_tokens=8, batch_size=3)
    assert "at temperature 0, 3 of 3 answers are plain decoding's token for token" in result.lines
    assert "drift +0.000" in result.lines[1]
    out = speculative_generate(target, tiny_llama(seed=1), torch.tensor([PROMPTS[0]]), max_new_tokens=8, rule="typical")
    assert out.stats.accepted > 0
