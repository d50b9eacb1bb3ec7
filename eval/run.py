"""`draftsmith eval`: decode the same prompts plainly and with each drafter, interleaved, and report what was counted."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.chats import encode_prompt
from ..data.sources import Example, read_examples, shipped_evaluation
from ..decode.batched import generate_batched
from ..decode.drafters import lacks_branches
from ..decode.dynamic_tree import DynamicTree, as_tree
from ..decode.length_names import longest
from ..decode.packed import use_backend
from ..decode.rules import LOSSLESS
from ..decode.tree import TreeLayout
from ..errors import BadInput
from ..heads import load_served
from ..models.target import Target, load_target
from ..progress import say
from ..provenance import environment
from .alpha import Answer
from .auto_tree import choose_tree
from .drift import add_drift
from .measure import Contestant, decode_in_turns, served_sampling, teacher_force, time_steps
from .options import EvalOptions
from .records import PromptRecord, RunRecord
from .report import build_report, write_report
from .table import print_report

# What a tree is chosen on. Drawn answers where greedy ones are measured, or they would be the same ones.
_CALIBRATION_PROMPTS, _CALIBRATION_TOKENS, _CALIBRATION_TEMPERATURE = 12, 32, 0.5


def evaluate(options: EvalOptions) -> dict[str, Any]:
    """Measure `options.drafter` (and a baseline, and the untrained start) against plain decoding; print, write, return it.

    Raises:
        BadInput: unreadable prompts, an unwritable output folder, models that do not fit each other.
    """
    examples = evaluation_prompts(options.prompts, options.limit)
    target = load_target(options.target, options.dtype, options.device, options.trust_remote_code)
    if target.tokenizer is None:
        raise BadInput(f"{options.target}: has no tokenizer, so prompts cannot be encoded")
    prompts = encode_openings(target, examples, where=options.prompts)
    backend = use_backend(target.model, options.backend)  # type: ignore[arg-type]
    contestants = [_contestant("drafter", options.drafter, options, target, examples)]
    if options.baseline is not None:
        contestants.append(_contestant("baseline", options.baseline, options, target, examples))
    start = [] if options.untrained is None else [_contestant("start", options.untrained, options, target, examples)]
    settings = options.settings()
    if options.tree == "auto":
        options, settings["tree_chosen"] = _with_chosen_tree(options, target, prompts, contestants[0])
    plain = decode_in_turns(options, target, prompts, contestants if options.speed else [])
    if options.speed:
        time_steps(options, target, prompts, contestants)
    contestants += start
    answers = [Answer(prompt, tokens) for prompt, tokens in zip(prompts, plain, strict=True)]
    teacher_force(options, target, contestants, answers)
    for contestant in contestants:
        if options.rule not in LOSSLESS and contestant.answers:
            own = [Answer(prompt, tokens) for prompt, tokens in zip(prompts, contestant.answers, strict=True)]
            add_drift(target, contestant.record.prompts, own, answers)
    report = build_report(
        target=options.target,
        drafter=options.drafter,
        settings={**settings, "backend": backend, "turns": "first"},
        environment=environment(),
        runs=[contestant.record for contestant in contestants],
        training=training_curve(Path(options.drafter).expanduser()),
        seed=options.seed,
    )
    print_report(report)
    if options.out is not None:
        _, page = write_report(report, options.out)
        print(f"report: {page}", file=sys.stderr)
    return report


def _with_chosen_tree(
    options: EvalOptions, target: Target, prompts: list[list[int]], contestant: Contestant
) -> tuple[EvalOptions, str]:
    """The options with the tree that measurement favours, chosen on other answers than those that are measured."""
    some = prompts[:: max(1, len(prompts) // _CALIBRATION_PROMPTS)]
    limit = target.context_limit or sys.maxsize
    say("choosing a tree")
    served = served_sampling(options)
    sampling = served._replace(temperature=served.temperature or _CALIBRATION_TEMPERATURE, repetition_penalty=1.0)
    rows = generate_batched(
        target,
        some,
        max_new_tokens=[min(_CALIBRATION_TOKENS, limit - len(prompt)) for prompt in some],
        sampling=sampling,
        seed=options.seed + 1,
    )
    answers = [Answer(some[row.index], row.tokens) for row in rows]
    depth = longest(options.num_speculative_tokens)
    layout, words = choose_tree(target, contestant.drafter, answers, served_sampling(options), depth)
    say(f"tree: {words}")
    contestant.record.tree_nodes = layout.num_nodes
    contestant.record.num_speculative_tokens = layout.depth
    contestant.record.passes_per_step = _passes(contestant.drafter, layout.depth)
    contestant.tree = layout.paths
    return dataclasses.replace(options, tree=layout.paths), words


def evaluation_prompts(source: str, limit: int | None) -> list[Example]:
    """``shipped``: the evaluation prompts of the package, which no training prompt repeats; else a file or data set id."""
    return shipped_evaluation(limit) if source == "shipped" else read_examples(source, limit=limit)


def encode_openings(target: Target, examples: Sequence[Example], where: str) -> list[list[int]]:
    """The first user turns (after a system prompt where there is one) as the target reads them when serving.

    Raises:
        BadInput: one cannot be rendered or leaves no room for an answer; `where` and its id name it.
    """
    assert target.tokenizer is not None
    limit = target.context_limit
    prompts = []
    for example in examples:
        try:
            prompts.append(encode_prompt(target.tokenizer, example.opening))
        except BadInput as error:
            raise BadInput(f"{where}: prompt {example.id!r}: {error}") from error
        if limit is not None and len(prompts[-1]) >= limit:
            raise BadInput(
                f"{where}: prompt {example.id!r} has {len(prompts[-1])} tokens, the target's context is {limit}"
            )
    return prompts


def _contestant(
    name: str, source: str, options: EvalOptions, target: Target, examples: Sequence[Example]
) -> Contestant:
    drafter: Any = load_served(source, target, options.drafter_dtype)
    num_passes = getattr(drafter, "num_passes", None)
    shape = None if options.tree == "auto" else as_tree(options.tree)
    if (instead := lacks_branches(drafter, shape)) is not None:
        if name != "baseline":
            raise BadInput(f"--tree {options.tree}: {source} drafts {instead}")
        say(f"{source} drafts {instead}; beside the tree it is measured with chains")
        shape = None
    fixed = shape.depth if isinstance(shape, TreeLayout) else options.num_speculative_tokens
    depth = fixed if isinstance(fixed, int) else None
    record = RunRecord(
        name,
        [PromptRecord(example.id, example.category or "all") for example in examples],
        label=str(source),
        num_speculative_tokens=depth,
        tree_nodes=None if shape is None else _most_nodes(shape, depth),
        sequential=num_passes is None or num_passes(2) > num_passes(1),
        passes_per_step=_passes(drafter, depth),
        drafter_parameters_read=getattr(drafter, "num_parameters_read", None),
        target_parameters_read=parameters_read(target),
    )
    return Contestant(drafter, record, None if shape is None else options.tree)


def _most_nodes(shape: TreeLayout | DynamicTree, depth: int | None) -> int:
    """Nodes of a draft, at most: a tree that grows offers ``width`` children of each of ``width`` nodes a level."""
    if isinstance(shape, TreeLayout) or depth is None:
        return shape.num_nodes
    return min(shape.num_nodes, shape.width + (depth - 1) * shape.width**2)


def _passes(drafter: Any, depth: int | None) -> int | None:
    """The drafter's own passes for a draft of this depth; None where it makes none, or the depth changes."""
    num_passes = getattr(drafter, "num_passes", None)
    return None if num_passes is None or depth is None else num_passes(depth)


def parameters_read(target: Target) -> int:
    """Parameters a target pass reads: all, but of an untied embedding table only a row."""
    model: Any = target.model
    total = sum(parameter.numel() for parameter in model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if table is head else total - table.numel()


def training_curve(checkpoint: Path) -> dict[str, list[Any]] | None:
    """Loss and held-out alpha by step, where the drafter's run lies around it; None elsewhere. Of an online run also the
    block efficiency of its stream.
    """
    file = checkpoint.parent / "metrics.jsonl"
    if not checkpoint.is_dir() or not file.is_file():
        return None
    losses: dict[int, float] = {}
    alphas: dict[int, float] = {}
    served: dict[int, float] = {}
    for line in file.read_text("utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the last line of a run that was killed
            break
        if record.get("kind") == "train":
            losses[record["step"]] = record["loss"]
            if "stream_block_efficiency" in record:
                served[record["step"]] = record["stream_block_efficiency"]
        elif record.get("kind") == "evaluation" and "alpha" in record:
            alphas[record["step"]] = record["alpha"]
    steps = sorted(losses)
    if not steps:
        return None
    curve = {"steps": steps, "loss": [losses[s] for s in steps], "alpha": [alphas.get(s) for s in steps]}
    return {**curve, "stream_block_efficiency": [served.get(s) for s in steps]} if served else curve
