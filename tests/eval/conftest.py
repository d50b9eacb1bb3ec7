"""Records of pretend runs: what a decoder with given acceptance would have counted."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from draftsmith.eval.records import PromptRecord, RunRecord
from draftsmith.eval.report import build_report

CATEGORIES = ("writing", "coding", "reasoning")
CURVE = [1.0, 1.1, 1.2, 1.3, 1.6, 1.9]


def decoded_prompt(index: int, rates: Sequence[float], rng: np.random.Generator, steps: int = 30) -> PromptRecord:
    """A prompt decoded in `steps` full steps, draft token i accepted with probability rates[i] once i - 1 was."""
    passed = rng.random((steps, len(rates))) < np.asarray(rates)
    accepted = np.cumprod(passed, axis=1).astype(int)
    accepted_at = accepted.sum(axis=0)
    emitted = int(accepted.sum()) + steps
    return PromptRecord(
        question_id=index,
        category=CATEGORIES[index % len(CATEGORIES)],
        target_calls=steps,
        drafted=steps * len(rates),
        drafted_nodes=steps * len(rates),
        accepted=int(accepted.sum()),
        emitted=emitted,
        drafted_at=[steps] * len(rates),
        accepted_at=accepted_at.tolist(),
        tested_at=[steps, *accepted_at[:-1].tolist()],
        seconds=0.05 * steps * 1.3,
        plain_seconds=0.05 * emitted,
        plain_emitted=emitted,
        alpha_sum=rates[0] * emitted,
        agreement_sum=float(round(rates[0] * emitted)),
        alpha_positions=emitted,
        step_start_alpha_sum=float(accepted_at[0]),
        step_start_agreement_sum=float(accepted_at[0]),
        step_starts=steps,
        identical=True,
    )


@pytest.fixture
def decoded_run() -> Callable[..., RunRecord]:
    """Factory of a run with two draft tokens a step and all costs measured."""

    def make(name: str = "drafter", rates: Sequence[float] = (0.6, 0.5), prompts: int = 30, **fields: Any) -> RunRecord:
        rng = np.random.default_rng(len(name))
        known = {
            "num_speculative_tokens": len(rates),
            "cost_ratio": 0.1,
            "verification_cost": CURVE,
            "drafter_parameters_read": 10,
            "target_parameters_read": 100,
        }
        return RunRecord(name, [decoded_prompt(i, rates, rng) for i in range(prompts)], **{**known, **fields})

    return make


@pytest.fixture
def forced_run() -> Callable[..., RunRecord]:
    """Factory of a run that was only looked at teacher-forced."""

    def make(name: str = "start", prompts: int = 30) -> RunRecord:
        records = [
            PromptRecord(i, CATEGORIES[i % 3], alpha_sum=4.0 + i % 3, agreement_sum=3.0, alpha_positions=50)
            for i in range(prompts)
        ]
        return RunRecord(name, records, label="untrained")

    return make


@pytest.fixture
def make_report(decoded_run, forced_run) -> Callable[..., dict[str, Any]]:
    """Factory of a report on a drafter, a baseline and the untrained start; what is given replaces the defaults."""

    def make(**fields: Any) -> dict[str, Any]:
        settings = {"num_speculative_tokens": 2, "temperature": 0.0, "rule": "lossless", "seed": 0}
        known = {
            "target": "tiny-target",
            "drafter": "runs/tiny/final",
            "environment": {"command": "draftsmith eval tiny", "machine": "two cores", "versions": {"torch": "2.13.0"}},
            "runs": [decoded_run(), decoded_run("baseline", (0.3, 0.3), label="prompt_lookup"), forced_run()],
        }
        return build_report(**{**known, **fields, "settings": {**settings, **fields.get("settings", {})}})

    return make
