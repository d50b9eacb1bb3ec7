"""Does a drafter that learns from what it serves get better while it serves? A section of docs/results.md.

    python bench/online.py                              `make results-online`: about twelve minutes on one CPU core
    python bench/online.py --drafter runs/distill_smollm2/final        go on from a trained drafter
    python bench/online.py --steps 12 --prompts-limit 24               a first look

The recipe distill_smollm2 with `objective.rollouts: {source: online}`: the decoder answers the shipped training prompts, each
pass over them in an order of its own, and the drafter learns from the hidden states that verification computed. Compared is
the block efficiency of the stream's last quarter with that of its first; intervals are over batches of prompts. The start is
the recipe's own (layers cut out of the target, their head fitted) or a trained drafter. Interrupted, the same command goes
on; a finished run is not run again (delete its folder for that).
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _common import DEMO_TARGET, Bound, Figure, begin, print_figures
from _results_page import Interval, write_section
from _sweep import run_recipe

from draftsmith.errors import BadInput
from draftsmith.eval.stats import resampling_weights
from draftsmith.provenance import host, versions
from draftsmith.train.logs import read_metrics

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "distill_smollm2"
HEADING = "# Learning online: acceptance over the stream"


class Quarters(NamedTuple):
    """Means over the batches of the stream's first and last quarter, and what the last has more."""

    first: Interval
    last: Interval
    gain: Interval
    batches: int  # of a quarter


def quarters(values: Sequence[float]) -> Quarters:
    """First and last quarter of a stream, batch by batch; 95 % bootstrap intervals over the batches.

    Raises:
        BadInput: fewer than 8 batches.
    """
    size = len(values) // 4
    if size < 2:
        raise BadInput(f"{len(values)} batches were served, expected 8 at least: take more steps")
    ends = [np.array(values[:size]), np.array(values[-size:])]
    resampled = [resampling_weights(size, seed=seed) @ end / size for seed, end in enumerate(ends)]

    def interval(value: float, draws: np.ndarray) -> Interval:
        low, high = np.quantile(draws, [0.025, 0.975])
        return Interval(float(value), float(low), float(high))

    (first, last), (first_draws, last_draws) = [end.mean() for end in ends], resampled
    gain = interval(last - first, last_draws - first_draws)
    return Quarters(interval(first, first_draws), interval(last, last_draws), gain, size)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", metavar="FOLDER", help="a draft model to go on from; else the recipe's own start")
    parser.add_argument("--prompts", default="shipped", help="prompts: shipped, a file or a `datasets` id")
    parser.add_argument("--prompts-limit", type=int, default=960)
    parser.add_argument("--steps", type=int, default=72, help="optimizer steps")
    parser.add_argument("--tokens-per-step", type=int, default=1536)
    parser.add_argument("--staleness", type=int, default=1, help="steps that pass before more prompts are served")
    parser.add_argument("--buffer", type=int, default=512, help="served sequences that are learned from again")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="of what is served")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--target", default=DEMO_TARGET, help="hub id, folder or .gguf")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/online"), help="the run")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results.md")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    return parser.parse_args()


def overrides(options: argparse.Namespace) -> list[str]:
    """What the run changes of the recipe."""
    sampling = f"{{temperature: {options.temperature}}}"
    rollouts = (
        f"{{source: online, fraction: 1.0, max_new_tokens: {options.max_new_tokens}, staleness: {options.staleness}, "
        f"buffer: {options.buffer}, sampling: {sampling}}}"
    )
    start = [] if options.drafter is None else [f"drafter={{kind: model, model: {options.drafter}}}"]
    return [
        f"target.model={options.target}",
        *start,
        f"data.prompts=[{options.prompts}]",
        f"data.limit={options.prompts_limit}",
        # Rollouts are all there is to learn from. The target's short answers tell which ids a cut vocabulary keeps, and the
        # head is fitted to them.
        *("data.max_new_tokens=8", "data.generation_batch=32"),
        f"objective.rollouts={rollouts}",
        f"optimizer.learning_rate={options.learning_rate}",
        "optimizer.schedule=constant",
        "engine.minutes=null",
        f"engine.steps={options.steps}",
        f"engine.tokens_per_step={options.tokens_per_step}",
        "engine.precision=fp32",
        f"engine.threads={options.threads}",
        "evaluate.limit=2",
        "evaluate.every=1000000",
        "evaluate.max_new_tokens=8",
        *options.override,
        f"seed={options.seed}",
        f"output={options.folder}",
    ]


def page(
    options: argparse.Namespace, tokens: Quarters, acceptance: Quarters, records: list[dict[str, Any]]
) -> list[str]:
    """The section's lines."""
    machine, found = host(), versions()
    minutes = sum(record["seconds"] for record in records) / 60
    start = "the recipe's own start" if options.drafter is None else f"`{Path(options.drafter).name}`"
    higher = "above" if tokens.gain.low > 0 else "not shown to be above"
    return [
        HEADING,
        "",
        f"Written by `{shlex.join(['python', 'bench/online.py', *sys.argv[1:]])}` (`make results-online`), torch "
        f"{found['torch']}, transformers {found['transformers']}, commit {found['commit']}, on {machine['cpu']}, "
        f"{options.threads} threads.",
        "",
        f"Target {options.target}; the drafter begins as {start}, and learns from the hidden states of the verification "
        f"passes with which its own drafts were served (temperature {options.temperature:g}, answers of at most "
        f"{options.max_new_tokens} tokens). {len(records)} optimizer steps of about {options.tokens_per_step} tokens, "
        f"learning rate {options.learning_rate:g}, in {minutes:.1f} minutes, serving included; prompts in random order. A "
        f"quarter of the stream are {tokens.batches} batches; intervals are 95 % bootstrap intervals over batches.",
        "",
        "| | block efficiency | acceptance rate |",
        "|---|---|---|",
        f"| first quarter | {tokens.first} | {acceptance.first} |",
        f"| last quarter | {tokens.last} | {acceptance.last} |",
        f"| difference | {tokens.gain.signed} | {acceptance.gain.signed} |",
        "",
        f"The last quarter's block efficiency is {higher} the first's.",
    ]


def run(options: argparse.Namespace) -> int:
    """Train, compare, write; the exit code."""
    outcome = run_recipe(RECIPE, overrides(options), options.folder)
    if outcome.problem is not None:
        print(f"the run failed: {outcome.problem}", file=sys.stderr)
        return 1
    records = [record for record in read_metrics(options.folder / "metrics.jsonl") if record["kind"] == "train"]
    served = [record for record in records if "stream_block_efficiency" in record]
    tokens = quarters([record["stream_block_efficiency"] for record in served])
    acceptance = quarters([record["stream_acceptance_rate"] for record in served])
    lines = page(options, tokens, acceptance, records)
    write_section(options.out, lines)
    print("\n".join(lines))
    figures = [
        Figure("block efficiency, first quarter", tokens.first.value),
        Figure("block efficiency, last quarter", tokens.last.value),
        Figure("the difference's lower end", tokens.gain.low, Bound(0.0)),
    ]
    print_figures("learning online", figures)
    return 0


def main() -> int:
    options = parse()
    begin(options)
    try:
        return run(options)
    except BadInput as error:
        print(f"online: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
