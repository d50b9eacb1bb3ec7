"""The audit of sampling: is what an engine says first distributed as what the target says?

Three tests after every prompt, and each again over all prompts together: the first token against the target's exact
probabilities; the first few tokens jointly against exact probabilities of as many cells as there are samples for; and,
where not every outcome has been enumerated, the first few tokens against samples of plain decoding. A token that the
target cannot emit fails the audit by itself.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..decode.streams import mix
from .audit_cells import ENDED, ExactCells, frequent_cells
from .audit_engine import Answers, Engine
from .audit_statistics import Counts, Pair, Test, holm, run_test, simulations_for
from .exact import rounding

_ROUNDING_MARGIN = 4.0  # rounding was measured on one context; the tokens after it may have more
_ROUNDING_SEEN = 0.005  # of logits after temperature: total variation that samples by the thousand begin to show
_SURELY = 1e-4  # a corrected p-value below this is no accident


class Finding(NamedTuple):
    """What one part of the audit found."""

    passed: bool
    lines: list[str]
    tests: list[Test]


class _Prompt(NamedTuple):
    """What was counted after one prompt."""

    name: str
    first: Counts
    joint: Counts
    pair: Pair | None
    outside: list[str]


def audit_sampled(
    engine: Engine,
    prompts: Sequence[list[int]],
    names: Sequence[str],
    *,
    samples: int,
    joint_tokens: int,
    length: int,
    significance: float,
    seed: int,
) -> Finding:
    """Draw `samples` answers of `length` tokens after every prompt and test their first `joint_tokens` tokens."""
    cells = [
        tuple(ExactCells(engine.target, prompt, engine.sampling, n, samples, engine.eos) for n in (1, joint_tokens))
        for prompt in prompts
    ]
    complete = cells[0][1].complete
    jobs = list(prompts) * samples  # prompts take turns, so that the rows of a batch have different lengths
    number = len(jobs)
    answers = engine.answers(jobs, length, [mix(seed, i) for i in range(number)], "sampling the engine")
    plain = None
    if not complete:
        seeds = [mix(seed, number + i) for i in range(number)]
        plain = engine.plain(jobs, joint_tokens, seeds, "sampling plain decoding").tokens
    counted, moved = [], []
    for i, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        heads = [tokens[:joint_tokens] for tokens in answers.tokens[i :: len(prompts)]]
        moved.append(rounding(engine.target, prompt))
        first, joint = cells[i]
        first_counts, _ = first.count([tokens[:1] for tokens in heads], _ROUNDING_MARGIN * moved[-1])
        joint_counts, outside = joint.count(heads, _ROUNDING_MARGIN * moved[-1])
        words = _outside(name, outside, samples)
        pair = None if plain is None else frequent_cells(heads, plain[i :: len(prompts)])
        counted.append(_Prompt(name, first_counts, joint_counts, pair, words))
    tests = _tests(counted, joint_tokens, significance, np.random.default_rng(seed))
    finding = _finding(counted, tests, answers, significance, joint_tokens, complete)
    if max(moved) / engine.sampling.temperature > _ROUNDING_SEEN:
        finding.lines.append(
            f"passes of different shapes move the target's logits by up to {max(moved):.2g} ({engine.target.dtype}): "
            "a total variation of that order may be rounding, not the rule"
        )
    return finding


def _outside(name: str, outside: list, samples: int) -> list[str]:
    if not outside:
        return []
    tokens, position, why = outside[0]
    what = f"ends after {position} tokens, without an end-of-sequence token"
    if why != ENDED:
        what = f"has token {tokens[position]} at position {position}, which the target cannot emit there"
    return [f"FAILED {name}: {len(outside)} of {samples} samples are impossible; the first, {list(tokens)}, {what}"]


def _tests(prompts: Sequence[_Prompt], joint_tokens: int, significance: float, rng: np.random.Generator) -> list[Test]:
    """All tests, of every prompt and of all prompts together."""
    kinds = ["first token, exact"]
    if joint_tokens > 1:
        kinds.append(f"first {joint_tokens} tokens, exact")
    if prompts[0].pair is not None:
        kinds.append(f"first {joint_tokens} tokens, against plain samples")
    groups = [[prompt] for prompt in prompts] + ([list(prompts)] if len(prompts) > 1 else [])
    number = len(kinds) * len(groups)
    level, most = significance / number, simulations_for(number, significance)
    tests = []
    for group in groups:
        where = group[0].name if len(group) == 1 else "all prompts together"
        for kind in kinds:
            name = f"{where}: {kind}"
            if "plain" in kind:
                pairs = [prompt.pair for prompt in group if prompt.pair is not None]
                tests.append(run_test(name, pairs, rng, level, most))
                continue
            parts = [prompt.first if kind == kinds[0] else prompt.joint for prompt in group]
            parts = [part for part in parts if part.counts.sum()]
            if parts:  # else every sample was impossible, which is said already
                tests.append(run_test(name, parts, rng, level, most))
    return tests


def _finding(
    prompts: Sequence[_Prompt],
    tests: list[Test],
    answers: Answers,
    significance: float,
    joint_tokens: int,
    complete: bool,
) -> Finding:
    corrected = holm([test.pvalue for test in tests])
    failed = [line for prompt in prompts for line in prompt.outside]
    for test, pvalue in zip(tests, corrected, strict=True):
        if pvalue <= significance:
            failed.append(
                f"FAILED {test.name}: p = {test.pvalue:.1g}, {pvalue:.1g} after Holm; "
                f"total variation {test.variation:.3f} over {test.cells} cells, {test.by_chance:.3f} expected by chance"
            )
    if failed and not any(prompt.outside for prompt in prompts) and min(corrected) > _SURELY:
        failed.append(f"one sound engine in {1 / min(corrected):.0f} looks as bad as this: another seed will tell")
    how = "all outcomes enumerated" if complete else "likely outcomes enumerated, the rest pooled"
    lines = [answers.line, f"cells of the first {joint_tokens} tokens: {how}"]
    for kind in dict.fromkeys(test.name.partition(": ")[2] for test in tests):
        lines.append(_summary(kind, [test for test in tests if test.name.endswith(f": {kind}")]))
    lines.append(f"{len(tests)} tests, the chance of a false alarm over all of them at most {significance:g} (Holm)")
    return Finding(not failed and answers.tell_something, [*failed, *lines], tests)


def _summary(kind: str, tests: Sequence[Test]) -> str:
    """One kind of test over the prompts: its smallest p-value, and what it would have found."""
    alone = [test for test in tests if not test.name.startswith("all prompts together")]
    worst = min(tests, key=lambda test: test.pvalue)
    seen = f"total variation {worst.variation:.3f}, {worst.by_chance:.3f} by chance"
    found = f"{max(test.detectable for test in alone):.3f} would be found with 90 % power"
    if len(alone) < len(tests):
        found += f", {tests[-1].detectable:.3f} on average over all prompts"
    return f"{kind}: smallest p {worst.pvalue:.2g} ({worst.name.partition(': ')[0]}; {seen}); {found}"
