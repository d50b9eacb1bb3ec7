"""Which data and which loss give the best drafter: a sweep of recipes with three seeds, written to docs/results.md.

    python bench/results.py                             `make results`: 27 runs of about three minutes, and the answers
    python bench/results.py --threads 1 --jobs 2        two runs side by side: quicker in all
    python bench/results.py --steps 20 --seeds 0        a first look
    python bench/results.py --dry-run                   list the runs

All runs are SmolLM2's demo drafter on the same chats with equally many optimizer steps of equally many tokens.
Interrupted, the same command goes on: a finished run is not run again (delete its folder for that). "given" are the
chats' own answers, "target" the target's answers to the same turns, "on-policy half" has the drafter write half of each
step's tokens. Alpha is teacher-forced on the target's answers to the shipped evaluation prompts, which no training run
sees.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from _common import DEMO_TARGET, begin
from _results_page import Measured, best_of, ordering, table, winner, write_section
from _sweep import LOSSES, SOURCES, HeldOut, Outcome, Row, Sweep, train_rows

from draftsmith.errors import BadInput
from draftsmith.provenance import host, versions

ROOT = Path(__file__).resolve().parents[1]
CHATS = ROOT.parent / "shared" / "data" / "corpora" / "oasst_en_chat.jsonl"
ON_POLICY = "on-policy half"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps a run, of about a thousand tokens")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--chats", default=str(CHATS), help="training chats with answers: a file or a `datasets` id")
    parser.add_argument("--limit", type=int, default=240, help="training chats")
    parser.add_argument("--held-out", type=int, default=72, help="evaluation prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an evaluation answer")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the evaluation answers and of alpha")
    parser.add_argument("--target", default=DEMO_TARGET, help="hub id, folder or .gguf")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="of every run's recipe")
    parser.add_argument("--folder", type=Path, default=Path("runs/results"), help="the runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results.md")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of a run")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument(
        "--losses-on",
        choices=[row.name for row in SOURCES],
        help="the source that the losses are compared on; default: the best one",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs, train nothing")
    return parser.parse_args()


def measured(outcomes: Mapping[str, Sequence[Outcome]], held_out: HeldOut) -> list[Measured]:
    """The rows whose runs all finished."""
    whole = {name: runs for name, runs in outcomes.items() if all(run.problem is None for run in runs)}
    return [Measured.of(name, [held_out.measure(run.folder) for run in runs]) for name, runs in whole.items()]


def problems(outcomes: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """A line for every run that failed."""
    return [f"- {run.folder}: {run.problem}" for runs in outcomes.values() for run in runs if run.problem is not None]


def losses_on(source: Row, fixed: Row) -> list[Row]:
    """The losses on the best source, but forward_kl, whose runs are the source's own. Tokens that the drafter wrote itself
    are no labels: cross-entropy keeps to `fixed`.
    """
    return [
        Row(loss.name, (*(fixed if loss.name == "cross_entropy" else source).overrides, *loss.overrides))
        for loss in LOSSES
        if loss.name != "forward_kl"
    ]


def page(sweep: Sweep, options: argparse.Namespace, sources: list[Measured], losses: list[Measured]) -> list[str]:
    """The page's lines."""
    machine, found = host(), versions()
    best = options.losses_on or best_of(sources).name
    fixed = best_of([row for row in sources if row.name != ON_POLICY]).name
    kept = f" (cross_entropy, which needs tokens of others: {fixed})" if best == ON_POLICY else ""
    return [
        "# Which data, which loss",
        "",
        f"Written by `{shlex.join(['python', 'bench/results.py', *sys.argv[1:]])}` (`make results`), torch "
        f"{found['torch']}, transformers {found['transformers']}, commit {found['commit']}, on {machine['cpu']}.",
        "",
        f"Target {sweep.target}; the drafter, its start and everything else as in the recipe `distill_smollm2`"
        f"{', changed: ' + ', '.join(f'`{item}`' for item in options.override) if options.override else ''}. Every run "
        f"takes {sweep.steps} optimizer steps of the same number of tokens on {options.limit} chats of "
        f"`{Path(sweep.chats).name}`, seeds {', '.join(map(str, sweep.seeds))}. Alpha is teacher-forced on the target's "
        f"answers (at most {options.max_new_tokens} tokens, temperature {options.temperature:g}) to {options.held_out} "
        "evaluation prompts, pooled over prompts and seeds; intervals are 95 % bootstrap intervals over prompts, "
        "differences are taken on the same prompts.",
        "",
        "## Where the answers come from (forward_kl)",
        "",
        *table(sources, "target"),
        "",
        winner(sources),
        "",
        ordering("DistillSpec (arXiv:2310.08461): data that the drafter writes help", [ON_POLICY], "target", sources),
        ordering("the target's own answers beat given ones", ["target"], "given", sources),
        "",
        f"## The loss, on: {best}{kept}",
        "",
        *table(losses, "forward_kl"),
        "",
        winner(losses) if losses else "Not measured.",
        "",
        ordering(
            "LK losses (arXiv:2602.23881): a loss made from acceptance beats forward KL",
            ["neg_log_acceptance", "lk_hybrid"],
            "forward_kl",
            losses,
        ),
        ordering("total variation, which is 1 - alpha, beats forward KL", ["tvd"], "forward_kl", losses),
    ]


def run(sweep: Sweep, options: argparse.Namespace) -> int:
    """Train, measure, write; the exit code."""
    outcomes = train_rows(sweep, "sources", SOURCES)
    held_out = HeldOut(sweep, options.held_out, options.max_new_tokens, options.temperature)
    sources = measured(outcomes, held_out)
    failed = problems(outcomes)
    if not any(row.name != ON_POLICY for row in sources):
        print("\n".join(["no run on fixed data finished:", *failed]), file=sys.stderr)
        return 1
    rows = {row.name: row for row in SOURCES}
    best = rows[options.losses_on or best_of(sources).name]
    fixed = rows[best_of([row for row in sources if row.name != ON_POLICY]).name]
    # A folder a source: with more seeds or chats another one may win, and its runs are others.
    others = train_rows(sweep, f"losses on {best.name}", losses_on(best, fixed if best.name == ON_POLICY else best))
    losses = measured({"forward_kl": outcomes[best.name], **others}, held_out)
    failed += problems(others)
    lines = page(sweep, options, sources, losses)
    if failed:
        lines += ["", "Runs that failed:", "", *failed]
    write_section(options.out, lines)
    print("\n".join(lines))
    return 1 if failed else 0


def main() -> int:
    options = parse()
    begin(options)
    sweep = Sweep(
        options.folder,
        options.target,
        options.chats,
        options.steps,
        tuple(options.seeds),
        (f"data.limit={options.limit}", *options.override),
        options.threads,
        options.jobs,
    )
    if options.dry_run:
        for row in (*SOURCES, *LOSSES):
            print(f"{row.name} (seeds {', '.join(map(str, sweep.seeds))}): {shlex.join(row.overrides)}")
        return 0
    sweep.folder.mkdir(parents=True, exist_ok=True)
    try:
        return run(sweep, options)
    except BadInput as error:
        print(f"results: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
