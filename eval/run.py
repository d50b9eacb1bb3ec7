"""`draftsmith eval`: decode the same prompts plainly and with each drafter, interleaved, and report what was counted."""

import sys
from collections.abc import Sequence
from typing import Any

from ..data.chats import encode_prompt
from ..data.sources import Example, read_examples, shipped_evaluation
from ..decode.packed import Backend, use_backend
from ..errors import BadInput
from ..heads import load_drafter
from ..models.target import Target, load_target
from ..provenance import environment
from .alpha import Answer
from .measure import Contestant, decode_in_turns, teacher_force, time_steps
from .options import EvalOptions
from .records import PromptRecord, RunRecord
from .report import build_report, write_report
from .table import print_report


def evaluate(options: EvalOptions) -> dict[str, Any]:
    """Measure `options.drafter` (and a baseline, and the untrained start) against plain decoding; print, write, return it.

    Raises:
        BadInput: unreadable prompts, an unwritable output folder, models that do not fit each other.
    """
    examples = evaluation_prompts(options.prompts, options.limit)
    target = load_target(options.target, options.dtype, options.device, options.trust_remote_code)
    prompts = [encode_prompt(target.tokenizer, example.turns[:1]) for example in examples]
    _check_lengths(prompts, examples, target, options)
    backend = use_backend(target.model, options.backend)  # type: ignore[arg-type]
    contestants = [_contestant("drafter", options.drafter, options, target, examples, backend)]
    if options.baseline is not None:
        contestants.append(_contestant("baseline", options.baseline, options, target, examples, backend))
    plain = decode_in_turns(options, target, prompts, contestants if options.speed else [])
    if options.speed:
        time_steps(options, target, prompts, contestants)
    if options.untrained is not None:
        contestants.append(_contestant("start", options.untrained, options, target, examples, backend))
    answers = [Answer(prompt, tokens) for prompt, tokens in zip(prompts, plain, strict=True)]
    for contestant in contestants:
        teacher_force(options, target, contestant, answers)
    report = build_report(
        target=options.target,
        drafter=options.drafter,
        settings={**options.settings(), "backend": backend, "turns": "first"},
        environment=environment(),
        runs=[contestant.record for contestant in contestants],
        seed=options.seed,
    )
    print_report(report)
    if options.out is not None:
        _, page = write_report(report, options.out)
        print(f"report: {page}", file=sys.stderr)
    return report


def evaluation_prompts(source: str, limit: int | None) -> list[Example]:
    """``shipped``: the evaluation prompts of the package, which no training prompt repeats; else a file or data set id."""
    return shipped_evaluation(limit) if source == "shipped" else read_examples(source, limit=limit)


def _check_lengths(prompts: list[list[int]], examples: Sequence[Example], target: Target, options: EvalOptions) -> None:
    limit = target.context_limit
    for prompt, example in zip(prompts, examples, strict=True):
        if limit is not None and len(prompt) >= limit:
            raise BadInput(
                f"{options.prompts}: prompt {example.id!r} has {len(prompt)} tokens, the target's context is {limit}"
            )


def _contestant(
    name: str, source: str, options: EvalOptions, target: Target, examples: Sequence[Example], backend: Backend
) -> Contestant:
    drafter = load_drafter(source, target)
    module = getattr(drafter, "module", None)
    if module is not None:
        use_backend(module, backend)
    num_passes = getattr(drafter, "num_passes", None)
    record = RunRecord(
        name,
        [PromptRecord(example.id, example.category or "all") for example in examples],
        label=str(source),
        num_speculative_tokens=options.num_speculative_tokens,
        sequential=num_passes is None or num_passes(2) > num_passes(1),
        passes_per_step=None if num_passes is None else num_passes(options.num_speculative_tokens),
        drafter_parameters_read=getattr(drafter, "num_parameters_read", None),
        target_parameters_read=parameters_read(target),
    )
    return Contestant(drafter, record)


def parameters_read(target: Target) -> int:
    """Parameters a target pass reads: all, but of an untied embedding table only a row."""
    model = target.model
    total = sum(parameter.numel() for parameter in model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if table is head else total - table.numel()
