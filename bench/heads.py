"""Every kind of drafter at an equal training budget, in a table of docs/results.md.

    python bench/heads.py                               `make results-heads`: about two hours on two CPU cores
    python bench/heads.py --minutes-per-kind 0.3 --answer-minutes 0.5 --limit 2 --kinds medusa "eagle 3"      a first look

The target writes prompts and answers once. Each kind, as its shipped recipe has it, trains on them for the same number of
minutes, and is measured on the shipped evaluation prompts, which no training run sees: greedy answers, batch 1, plain
decoding and drafter in turns. States of the target that a kind learns from are kept on disk and shared by kinds that read
the same ones; writing them is no part of a kind's minutes. Interrupted, the same command goes on: what is trained or
measured is not done again (delete its folder for that).
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _common import DEMO_TARGET, begin, load, print_figures
from _heads_page import marks, page, row
from _kind_figures import Settings, measure
from _kinds import NAMES, UNTRAINED, Comparison
from _results_page import write_section
from _sweep import write_json

from draftsmith.errors import BadInput
from draftsmith.eval.run import evaluation_prompts

ROOT = Path(__file__).resolve().parents[1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes-per-kind", type=float, default=5.0, help="of training")
    parser.add_argument("--answer-minutes", type=float, default=7.0, help="of the target writing prompts and answers")
    parser.add_argument("--kinds", nargs="+", default=list(NAMES), choices=NAMES, metavar="KIND", help=", ".join(NAMES))
    parser.add_argument("--limit", type=int, default=24, help="evaluation prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an evaluation answer")
    parser.add_argument("--tree-nodes", type=int, default=16)
    parser.add_argument("--audit-prompts", type=int, default=6, help="whose greedy answers are compared token by token")
    parser.add_argument("--samples", type=int, default=400, help="after each of two prompts, to test the distribution")
    parser.add_argument("--temperature", type=float, default=0.8, help="of these samples")
    parser.add_argument("--target", default=DEMO_TARGET, help="hub id, folder or .gguf")
    parser.add_argument("--prompts", default="shipped", help="evaluation prompts: shipped, a file or a `datasets` id")
    parser.add_argument(
        "--override", action="append", default=[], metavar="[KIND:]KEY=VALUE", help="of every recipe, or a kind's"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/heads"), help="answers and runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results.md")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    return parser.parse_args()


def figures_of(
    comparison: Comparison, name: str, settings: Settings, prompts: tuple[str, int], drafter: str, num_tokens: int
) -> dict[str, Any]:
    """What is measured of a kind; kept beside its run."""
    file = comparison.run_folder(name) / "figures.json"
    asked = {**asdict(settings), "prompts": list(prompts), "num_tokens": num_tokens, "threads": comparison.threads}
    if file.exists() and (known := json.loads(file.read_text()))["asked"] == asked:
        return known
    print(f"measuring {name}", flush=True)
    # A target of its own: some kinds change it.
    found = measure(load(comparison.target), drafter, num_tokens, evaluation_prompts(*prompts), settings)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"asked": asked, **found})
    return found


def run(options: argparse.Namespace) -> int:
    """Train, measure, write; the exit code."""
    comparison = Comparison(
        options.folder,
        options.target,
        options.minutes_per_kind,
        options.answer_minutes,
        options.threads,
        options.seed,
        tuple(options.override),
    )
    settings = Settings(
        options.max_new_tokens,
        options.tree_nodes,
        options.audit_prompts,
        options.max_new_tokens,
        options.samples,
        options.temperature,
        options.seed,
    )
    answers = comparison.write_answers(load(options.target))
    prompts = (options.prompts, options.limit)
    rows, figures, failed = [], {}, []
    for name in options.kinds:
        if name in UNTRAINED:
            drafter, num_tokens = name, UNTRAINED[name]
        else:
            outcome = comparison.train(name)
            if outcome.problem is not None:
                failed.append(f"- {name}: {outcome.problem}")
                continue
            drafter, num_tokens = comparison.drafter(name)
        figures[name] = figures_of(comparison, name, settings, prompts, drafter, num_tokens)
        rows.append(row(name, comparison, figures[name]))
    if not rows:
        print("\n".join(["no kind was trained:", *failed]), file=sys.stderr)
        return 1
    lines = page(options, answers, rows, figures) + (["", "Runs that failed:", "", *failed] if failed else [])
    write_section(options.out, lines)
    print("\n".join(lines))
    print_figures("marks (15 minutes a recipe, data included, two cores)", marks(figures))
    return (
        1 if failed or any(not audit["passed"] for one in figures.values() for audit in one["audits"].values()) else 0
    )


def main() -> int:
    options = parse()
    begin(options)
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        return run(options)
    except BadInput as error:
        print(f"heads: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
