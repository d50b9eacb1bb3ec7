"""Decoding speed, greedy, against transformers on the same models, prompts and number of draft tokens.

    python bench/decoding.py                                      SmolLM2 and its first four layers
    python bench/decoding.py --drafter runs/demo-20min/final      a trained drafter, against plain decoding
    python bench/decoding.py --limit 2 --rounds 1                 a quick look

Without --drafter the cut is measured, and after it the newest demo's drafter where runs/ holds one. "plain" and "packed"
are the backends of the linear layers (packed: from as many rows on as a measurement says); our passes are fused on either,
transformers' never are, and run on plain modules unless they say packed. Beside a packed target a drafter's weights are
kept as ``--drafter-dtype auto`` keeps them. All take turns on every prompt, in one process; a ratio is the median over turns.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import DEMO_TARGET as DEMO
from _common import Bound, Figure, Timings, arguments, begin, encode, load, print_figures, print_table, take_turns
from _steps import count_reads, median_rows, time_steps

from draftsmith.data.sources import shipped_evaluation
from draftsmith.decode.costs import measure_costs
from draftsmith.decode.draft_model import DraftModel
from draftsmith.decode.length_names import POLICIES
from draftsmith.decode.loop import SpeculativeOutput, speculative_generate
from draftsmith.decode.packed import use_backend, use_backend_of
from draftsmith.decode.prompts import pad_rows
from draftsmith.decode.quick import quickest_weights
from draftsmith.decode.stats import RowStats, Stats
from draftsmith.decode.tree import as_layout
from draftsmith.eval.cost_model import expected_speedup, verification_curve
from draftsmith.eval.options import parse_tree
from draftsmith.heads import load_served
from draftsmith.models.cut import cut_layers
from draftsmith.models.quiet import quiet
from draftsmith.models.target import Target

BATCH = 8
TREES = ["[[0],[1],[0,0]]", "[[0],[1],[0,0],[2],[0,1],[0,0,0]]"]


@dataclass
class Pair:
    """A target and a drafter on one backend, and what they decoded."""

    backend: str
    target: Target
    drafter: Any
    counts: list[RowStats] = field(default_factory=list)  # of the measured number of draft tokens, batch 1
    answers: dict[str, dict[tuple[int, ...], list[int]]] = field(default_factory=dict)  # by contestant and prompt

    def decode(self, rows: list[list[int]], max_new_tokens: int, drafter: Any, length: Any) -> SpeculativeOutput:
        """Decode a batch greedily; `drafter` None: plainly."""
        prompts = pad_rows(rows, self.target)
        tree = None
        if isinstance(length, list):
            tree, length = length, as_layout(length).depth
        return speculative_generate(
            self.target,
            drafter,
            prompts.ids,
            prompts.attention_mask,
            max_new_tokens=max_new_tokens,
            num_speculative_tokens=length,
            tree=tree,
        )

    @property
    def stats(self) -> Stats:
        """Counts of all turns."""
        return Stats(self.counts)


def make_pairs(target: Target, drafter: str | None) -> dict[str, Pair]:
    """The same weights on both backends. `drafter`: a folder; None: the target's first four layers."""
    pairs = {}
    for backend in ("plain", "packed"):
        own = target if backend == "plain" else replace(target, model=copy.deepcopy(target.model))
        # Cut before the target is packed: the cut is a copy with products of its own.
        made: Any = DraftModel(cut_layers(own.model, range(4)), own.vocab_size) if drafter is None else None
        used = use_backend(own.model, "plain" if backend == "plain" else "auto")
        if used != backend:
            continue
        quick = backend == "packed"
        if drafter is not None:
            made = load_served(drafter, own, "auto" if quick else "target")
        else:
            half = quick and quickest_weights(own.dtype, own.device) is torch.float16
            use_backend_of(own.model, made.module, half=half)
        pairs[backend] = Pair(backend, own, made)
    return pairs


def ours(pair: Pair, name: str, options: argparse.Namespace, length: Any, prompt: list[int]) -> float:
    """Decode one prompt; the number of new tokens."""
    drafter = None if length is None else pair.drafter
    out = pair.decode([prompt], options.max_new_tokens, drafter, length or 0)
    if length == options.num_speculative_tokens:
        pair.counts.append(out.stats.rows[0])
    answer = out.tokens[0, len(prompt) : int(out.lengths[0])].tolist()
    pair.answers.setdefault(name, {})[tuple(prompt)] = answer
    return len(answer)


def theirs(pair: Pair, name: str, options: argparse.Namespace, assisted: bool, prompt: list[int]) -> float:
    """The same by transformers."""
    extra: dict[str, Any] = {}
    if assisted:
        assistant: Any = pair.drafter.lm.model
        assistant.generation_config.num_assistant_tokens = options.num_speculative_tokens
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        extra["assistant_model"] = assistant
    ids = torch.tensor([prompt], device=pair.target.device)
    eos = list(pair.target.eos_token_ids)
    with quiet():
        out: Any = pair.target.model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.max_new_tokens,
            do_sample=False,
            pad_token_id=eos[0] if eos else 0,
            eos_token_id=eos or None,
            **extra,
        )
    answer = out[0, len(prompt) :].tolist()
    pair.answers.setdefault(name, {})[tuple(prompt)] = answer
    return len(answer)


def batch_of(pair: Pair, options: argparse.Namespace, size: int, prompts: list[list[int]]) -> float:
    """Decode all `prompts`, `size` rows at a time."""
    groups = [prompts[first : first + size] for first in range(0, len(prompts), size)]
    length = options.num_speculative_tokens
    return sum(pair.decode(group, options.max_new_tokens, pair.drafter, length).stats.emitted for group in groups)


def contestants(pairs: dict[str, Pair], options: argparse.Namespace) -> dict[str, Callable[[list[int]], float]]:
    """Everything that decodes one prompt after the other."""
    rows: dict[str, tuple[Callable[..., float], Pair, Any]] = {}
    for backend, pair in pairs.items():
        rows[f"transformers, {backend}"] = theirs, pair, False
        if isinstance(pair.drafter, DraftModel) and pair.drafter.vocabulary is None:  # else transformers cannot
            rows[f"transformers assisted, {backend}"] = theirs, pair, True
        rows[f"plain decoding, {backend}"] = ours, pair, None
        rows[f"speculative, {backend}"] = ours, pair, options.num_speculative_tokens
    best = pairs.get("packed", pairs["plain"])
    for policy in options.policies:
        rows[f"speculative, {best.backend}, {policy}"] = ours, best, int(policy) if policy.isdigit() else policy
    for text in options.trees if isinstance(best.drafter, DraftModel) else ():
        rows[f"speculative, {best.backend}, tree {text}"] = ours, best, parse_tree(text)
    return {name: partial(work, pair, name, options, what) for name, (work, pair, what) in rows.items()}


def compare(pairs: dict[str, Pair], timings: Timings) -> list[Figure]:
    """The ratios, with what is required of them."""
    plain = "transformers, plain"
    figures = [
        Figure("plain decoding / transformers.generate", timings.ratio("plain decoding, plain", plain), Bound(1.0))
    ]
    both = ("transformers, packed", "transformers assisted, plain", "transformers assisted, packed")
    if both[0] in timings.turns:
        name = "plain decoding / transformers.generate, both packed"
        figures.append(Figure(name, timings.ratio("plain decoding, packed", both[0]), Bound(1.0)))
    if both[1] in timings.turns:
        name = "speculative / generate(assistant_model), both plain"
        figures.append(Figure(name, timings.ratio("speculative, plain", both[1]), Bound(1.25)))
    if both[2] in timings.turns:
        name = "speculative, packed / generate(assistant_model), plain"
        figures.append(Figure(name, timings.ratio("speculative, packed", both[1]), Bound(2.0)))
        name = "speculative / generate(assistant_model), both packed"
        figures.append(Figure(name, timings.ratio("speculative, packed", both[2])))
    return figures


def cost_figures(pairs: dict[str, Pair], timings: Timings, prompts: list[list[int]], options: Any) -> list[Figure]:
    """Speed-up over plain decoding, measured and as the cost model has it, and the decoder's own time in a step."""
    figures, length = [], options.num_speculative_tokens
    typical = sorted(prompts, key=len)[len(prompts) // 2]
    for backend, pair in pairs.items():
        costs = measure_costs(pair.target, pair.drafter, typical, length, seconds=options.cost_seconds)
        rates, ratio = pair.stats.conditional_acceptance, costs.cost_ratio
        assert ratio is not None
        expected = float(
            expected_speedup(torch.tensor(rates).numpy(), length, ratio, verification_curve(costs.verification))
        )
        measured = timings.ratio(f"speculative, {backend}", f"plain decoding, {backend}")
        settings = {"max_new_tokens": options.max_new_tokens, "num_speculative_tokens": length}
        steps = time_steps(pair.target, pair.drafter, typical, **settings)
        plain = time_steps(pair.target, None, typical, **settings)
        outside, outside_plain = (
            sorted(step.share_outside for step in some)[len(some) // 2] for some in (steps, plain)
        )
        reads = count_reads(pair.target, pair.drafter, typical, **settings)
        figures += [
            Figure(f"speed-up over plain decoding, {backend}", measured),
            Figure(f"measured / predicted speed-up ({expected:.2f}), {backend}", measured / expected, Bound(0.9)),
            Figure(f"time outside of forwards, speculative step, {backend}", 100 * outside, Bound(8, False), " %"),
            Figure(f"time outside of forwards, plain step, {backend}", 100 * outside_plain, Bound(8, False), " %"),
            Figure(f"reads of tensors by the host a step, {backend}", reads, Bound(1, False)),
        ]
        rows = [(name, f"{milliseconds:.2f}") for name, milliseconds in median_rows(steps)]
        print_table(f"a speculative step, {backend} (c = {ratio:.3f})", ["", "ms"], rows)
    return figures


def identical(pairs: dict[str, Pair]) -> dict[str, str]:
    """In how many prompts a contestant's tokens are those of our plain decoding on plain modules."""
    expected = pairs["plain"].answers["plain decoding, plain"]
    found = {name: answers for pair in pairs.values() for name, answers in pair.answers.items()}
    return {
        name: f"{sum(answers[prompt] == expected[prompt] for prompt in expected)}/{len(expected)}"
        for name, answers in found.items()
    }


def measure(target: Target, drafter: str | None, prompts: list[list[int]], options: argparse.Namespace) -> None:
    """Measure one drafter and print its tables."""
    pairs = make_pairs(target, drafter)
    timings = take_turns(contestants(pairs, options), prompts, options.rounds)
    best = pairs.get("packed", pairs["plain"])
    sizes = {f"batch {size}": partial(batch_of, best, options, size) for size in (1, BATCH)}
    whole = prompts[: len(prompts) // BATCH * BATCH] or prompts
    batches = take_turns(sizes, [whole], options.rounds, warm_up=False)  # the models are warm
    drafted = f"{options.num_speculative_tokens} draft tokens, {options.max_new_tokens} new tokens, greedy"
    what = "first 4 layers" if drafter is None else drafter
    title = f"{options.target}, drafter: {what}, {drafted}, {len(prompts)} prompts x {options.rounds}"
    base, same = "plain decoding, plain", identical(pairs)
    rows = [
        (name, f"{timings.rate(name):.1f}", f"{timings.ratio(name, base):.2f}", same[name]) for name in timings.turns
    ]
    rows += [(f"speculative, {best.backend}, {name}", f"{batches.rate(name):.1f}", "", "") for name in batches.turns]
    costs = cost_figures(pairs, timings, prompts, options)
    print_table(title, ["batch 1 unless it says so", "tokens/s", f"of {base}", "same tokens"], rows)
    figures = compare(pairs, timings) + costs
    figures.append(Figure(f"batch {BATCH} / batch 1", batches.ratio(f"batch {BATCH}", "batch 1"), Bound(1.0)))
    if drafter is not None:
        policies = [name for name in timings.turns if name.startswith(f"speculative, {best.backend}")]
        name = max(policies, key=lambda name: timings.ratio(name, f"plain decoding, {best.backend}"))
        figures.append(Figure(f"best: {name}", timings.ratio(name, f"plain decoding, {best.backend}"), Bound(1.4)))
    print_figures(f"acceptance rate {best.stats.acceptance_rate or 0:.3f}", figures)


def drafters(options: argparse.Namespace) -> Sequence[str | None]:
    """What to measure: as asked, else the cut and the newest demo's drafter."""
    if options.drafter:
        return options.drafter
    demos = sorted(Path("runs").glob("demo-*/final"), key=lambda path: path.stat().st_mtime)
    return [None, *map(str, demos[-1:])]


def main() -> None:
    parser = arguments(__doc__, rounds=2, limit=8)
    parser.add_argument("--target", default=DEMO, help="hub id, folder or .gguf")
    parser.add_argument("--drafter", action="append", help="a trained drafter's folder; may be repeated")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument(
        "--policies", nargs="*", default=["1", "2", *POLICIES], help="further numbers or length policies"
    )
    parser.add_argument("--trees", nargs="*", default=TREES, help="widths per depth or lists of paths")
    parser.add_argument("--cost-seconds", type=float, default=8.0, help="for the cost model's measurements, a backend")
    options = parser.parse_args()
    begin(options)
    target = load(options.target)
    prompts = encode(target, shipped_evaluation(options.limit))
    for drafter in drafters(options):
        measure(target, drafter, prompts, options)


if __name__ == "__main__":
    main()
