"""Decoding prompts plainly and with drafters, in turns, and counting: the part of an evaluation that runs the clock."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..decode.confidence import set_confidence
from ..decode.costs import measure_costs
from ..decode.lookup_first import LookupFirst
from ..decode.loop import SpeculativeOutput, plain_generate, speculative_generate
from ..decode.prompts import Prompts, pad_rows
from ..decode.sampling import Sampling
from ..decode.stats import RowStats, add_up
from ..decode.streams import mix
from ..models.target import Target
from ..progress import stage
from . import cost_model
from .alpha import Answer, TeacherForced, teacher_forced_each
from .options import EvalOptions
from .records import PromptRecord, RunRecord

_WARM_UP_TOKENS = 8


@dataclass
class Contestant:
    """One drafter under measurement, with what it decoded."""

    drafter: Any
    record: RunRecord
    tree: Any = None  # what it drafts: widths per depth or paths; None: chains
    answers: list[list[int]] = field(default_factory=list)
    step_starts: list[list[int]] = field(default_factory=list)  # tokens emitted before each step that drafted

    def clear(self, prompts: int) -> None:
        """Make room for the answers to this many prompts."""
        self.answers, self.step_starts = [[] for _ in range(prompts)], [[] for _ in range(prompts)]


def decode_in_turns(
    options: EvalOptions, target: Target, prompts: Sequence[list[int]], contestants: Sequence[Contestant]
) -> list[list[int]]:
    """Decode every prompt plainly and with every contestant; fill in their records; return the plain answers.

    Plain decoding and the contestants take turns on each group of prompts, and who goes first changes from group to group:
    a machine that speeds up or slows down favours nobody.
    """
    plain: list[list[int]] = [[] for _ in prompts]
    for contestant in contestants:
        contestant.clear(len(prompts))
    full, rest = divmod(len(prompts), options.batch_size)
    _warm_up(options, target, prompts[0], contestants, [options.batch_size] * (full > 0) + [rest] * (rest > 0))
    title = "decoding, plain and speculative in turns" if contestants else "the target's answers"
    with stage(title, total=len(prompts), unit="prompts") as progress:
        for number, first in enumerate(range(0, len(prompts), options.batch_size)):
            rows = list(range(first, min(first + options.batch_size, len(prompts))))
            group = pad_rows([prompts[row] for row in rows], target)
            takers: list[Contestant | None] = [None, *contestants]
            shift = number % len(takers)
            for taker in takers[shift:] + takers[:shift]:
                _take_turn(options, target, taker, contestants, rows, group, plain)
            for contestant in contestants:
                for row in rows:
                    _compare(options, contestant, row, plain[row])
            progress.advance(len(rows))
    for contestant in contestants:
        _correct_length(contestant)
    return plain


def _correct_length(contestant: Contestant) -> None:
    """Say of chains how long they were: some drafters have fewer tokens than they are asked for, some decide by step."""
    record, num_passes = contestant.record, getattr(contestant.drafter, "num_passes", None)
    longest = max((len(prompt.drafted_at or []) for prompt in record.prompts), default=0)
    if isinstance(contestant.drafter, LookupFirst):  # few of its steps take a pass
        record.passes_per_step = contestant.drafter.mean_passes
    elif record.tree_nodes is None and (num_passes is not None or record.num_speculative_tokens is None):
        record.passes_per_step = _mean_passes(contestant)
    if record.tree_nodes is None and 0 < longest < (record.num_speculative_tokens or 0):
        record.num_speculative_tokens = longest


def _mean_passes(contestant: Contestant) -> float:
    """The drafter's passes in a step, over steps of different lengths. ``drafted_at[i]`` counts those beyond i tokens."""
    passes = getattr(contestant.drafter, "num_passes", None) or (lambda num_tokens: num_tokens)
    records = contestant.record.prompts
    beyond = add_up([record.drafted_at or [] for record in records])
    total = sum((more - less) * passes(i + 1) for i, (more, less) in enumerate(pairwise([*beyond, 0])))
    return total / max(1, sum(record.target_calls or 0 for record in records))


def _take_turn(
    options: EvalOptions,
    target: Target,
    taker: Contestant | None,
    contestants: Sequence[Contestant],
    rows: list[int],
    group: Prompts,
    plain: list[list[int]],
) -> None:
    seeds = [mix(options.seed, row) for row in rows]
    start = time.perf_counter()
    out = _decode(options, target, taker, group, options.max_new_tokens, seeds)
    seconds = (time.perf_counter() - start) / len(rows)
    answers = _new_tokens(group, out)
    for i, row in enumerate(rows):
        if taker is None:
            plain[row] = answers[i]
            for contestant in contestants:
                record = contestant.record.prompts[row]
                record.plain_seconds, record.plain_emitted = seconds, len(answers[i])
        else:
            taker.answers[row], taker.step_starts[row] = answers[i], out.stats.rows[i].step_starts
            _take_counts(taker.record.prompts[row], out.stats.rows[i], seconds)


def _decode(
    options: EvalOptions,
    target: Target,
    taker: Contestant | None,
    group: Prompts,
    max_new_tokens: int,
    seeds: Sequence[int],
) -> SpeculativeOutput:
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "seed": seeds,
    }
    if taker is None:
        return plain_generate(target, group.ids, group.attention_mask, **settings)
    return speculative_generate(
        target,
        taker.drafter,
        group.ids,
        group.attention_mask,
        num_speculative_tokens=options.num_speculative_tokens,
        rule=options.rule,
        rule_options=options.rule_options,
        tree=taker.tree,
        **settings,
    )


def _new_tokens(group: Prompts, out: SpeculativeOutput) -> list[list[int]]:
    ends = out.lengths.tolist()
    return [row[start:end] for row, start, end in zip(out.tokens.tolist(), group.lengths, ends, strict=True)]


def _take_counts(record: PromptRecord, counts: RowStats, seconds: float) -> None:
    record.target_calls, record.emitted, record.seconds = counts.target_calls, counts.emitted, seconds
    record.drafted, record.drafted_nodes, record.accepted = counts.drafted, counts.drafted_nodes, counts.accepted
    record.drafted_at, record.tested_at, record.accepted_at = counts.drafted_at, counts.tested_at, counts.accepted_at


def _compare(options: EvalOptions, contestant: Contestant, row: int, plain: list[int]) -> None:
    """Greedy output must be plain decoding's under a lossless rule, and is worth knowing under the others."""
    if options.temperature != 0:
        return
    answer, record = contestant.answers[row], contestant.record.prompts[row]
    record.identical = answer == plain
    if not record.identical:
        pairs = enumerate(zip(answer, plain, strict=False))
        record.first_mismatch = next((i for i, (a, b) in pairs if a != b), min(len(answer), len(plain)))


def _warm_up(
    options: EvalOptions, target: Target, prompt: list[int], contestants: Sequence[Contestant], sizes: Sequence[int]
) -> None:
    """Whatever is done once for a pair and a batch size, such as the measuring of ``auto``, is done off the clock."""
    for size in sizes:
        group = pad_rows([prompt] * size, target)
        for taker in (None, *contestants):
            _decode(options, target, taker, group, _WARM_UP_TOKENS, [0] * size)


def teacher_force(
    options: EvalOptions, target: Target, contestants: Sequence[Contestant], answers: Sequence[Answer]
) -> None:
    """Alpha over `answers` (plain decoding's) and, where a contestant decoded, at its own step starts."""
    able = [contestant for contestant in contestants if hasattr(contestant.drafter, "first_token_logits")]
    sampling = served_sampling(options)
    others = [_other_answers(contestant, answers) for contestant in able]
    total = len(answers) + sum(map(len, others))
    with stage("alpha and agreement on the answers", total, unit="answers") as progress:
        drafters = [contestant.drafter for contestant in able]
        found = teacher_forced_each(target, drafters, answers, sampling, progress.advance) if able else []
        for contestant, scores, other in zip(able, found, others, strict=True):
            for record, score in zip(contestant.record.prompts, scores, strict=True):
                record.alpha_sum = score.alpha.sum().item()
                record.agreement_sum = score.agreement.sum().item()
                record.alpha_positions = len(score.alpha)
            if contestant.answers:
                drafter = [contestant.drafter]
                own = teacher_forced_each(target, drafter, list(other.values()), sampling, progress.advance)[0]
                _take_step_starts(contestant, {**dict(enumerate(scores)), **dict(zip(other, own, strict=True))})


def _other_answers(contestant: Contestant, answers: Sequence[Answer]) -> dict[int, Answer]:
    """The contestant's own answers that are not plain decoding's, by the number of the prompt."""
    pairs = enumerate(zip(answers, contestant.answers, strict=False))
    return {i: Answer(answer.prompt, own) for i, (answer, own) in pairs if own != answer.tokens}


def _take_step_starts(contestant: Contestant, scores: dict[int, TeacherForced]) -> None:
    for i, (record, starts) in enumerate(zip(contestant.record.prompts, contestant.step_starts, strict=True)):
        record.step_start_alpha_sum = scores[i].alpha[starts].sum().item()
        record.step_start_agreement_sum = scores[i].agreement[starts].sum().item()
        record.step_starts = len(starts)


def served_sampling(options: EvalOptions) -> Sampling:
    """The sampling transforms that the run decodes with."""
    return Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty)


def time_steps(
    options: EvalOptions, target: Target, prompts: Sequence[list[int]], contestants: Sequence[Contestant]
) -> None:
    """Measure what a verification pass and a drafter step cost, after a prompt of median length.

    Takes six seconds a contestant, less where decoding took less.
    """
    typical = sorted(prompts, key=len)[len(prompts) // 2]
    with stage("measuring step costs", total=len(contestants), unit="drafters") as progress:
        for contestant in contestants:
            set_confidence(contestant.drafter, None)  # a step is to be timed, not how soon drafting stops
            longest = max(len(prompt.drafted_at or []) for prompt in contestant.record.prompts)
            costs = measure_costs(
                target,
                contestant.drafter,
                typical,
                contestant.record.num_speculative_tokens or max(1, longest),
                options.batch_size,
                seconds=min(6.0, sum(prompt.seconds or 0.0 for prompt in contestant.record.prompts)),
                num_nodes=contestant.record.tree_nodes,
            )
            contestant.record.cost_ratio = costs.cost_ratio
            contestant.record.verification_cost = cost_model.verification_curve(costs.verification)
            progress.advance(1)
