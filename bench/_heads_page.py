"""The table of all kinds of drafters, and what is said around it."""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _common import Bound, Figure
from _kinds import AFTER_A_LOOKUP, LOOKUP, TRAINED, Answers, Comparison

from draftsmith.provenance import host, versions

Figures = Mapping[str, Any]  # of a kind, as `_kind_figures.measure` gives them
HEADER = (
    *("kind", "trained", "minutes", "draft tokens", "right, by position", "right where those before are"),
    *("block efficiency, chain", "tree", "speed-up, chain", "expected", "tree", "audits"),
)


def row(name: str, comparison: Comparison, figures: Figures) -> list[str]:
    """A line of the table."""
    chain, tree, audits = figures["chain"], figures.get("tree"), figures["audits"]
    failed = [what for what, audit in audits.items() if not audit["passed"]]
    trained, minutes = "0", ""
    kind = AFTER_A_LOOKUP[name][0] if name in AFTER_A_LOOKUP else name
    if kind in TRAINED:
        spent = comparison.spent(kind)
        trained = f"{spent.parameters / 1e6:.2f} M" if spent.parameters >= 1e4 else f"{spent.parameters:,}"
        minutes = f"{spent.minutes:.1f} ({spent.steps:,} {'steps' if spent.tokens else 'trials'})"
    return [
        name,
        trained,
        minutes,
        str(figures["num_tokens"]),
        shares(figures["accuracies"]["right"]),
        shares(figures["accuracies"]["given"]),
        with_interval(chain, "block_efficiency"),
        "" if tree is None else with_interval(tree, "block_efficiency"),
        with_interval(chain, "speedup"),
        number(chain["expected_speedup"]),
        "" if tree is None else number(tree["speedup"]),
        f"{len(audits)} passed" if not failed else "FAILED: " + "; ".join(failed),
    ]


def number(value: float | None) -> str:
    """Two digits, or nothing."""
    return "" if value is None else f"{value:.2f}"


def with_interval(figures: Figures, name: str) -> str:
    """A figure and its interval."""
    ends = figures[f"{name}_ci"]
    return number(figures[name]) + ("" if ends is None else f" [{ends[0]:.2f}, {ends[1]:.2f}]")


def shares(counts: Sequence[Sequence[int]]) -> str:
    """Hits over positions, draft position by draft position."""
    return " / ".join("-" if not total else f"{hits / total:.2f}" for hits, total in counts)


def page(
    options: argparse.Namespace, answers: Answers, rows: Sequence[Sequence[str]], figures: Mapping[str, Figures]
) -> list[str]:
    """The section's lines."""
    return [
        "# Every kind of drafter",
        "",
        *_how(options, answers),
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + "---|" * len(HEADER),
        *("| " + " | ".join(cells) + " |" for cells in rows),
        "",
        "- *right, by position*: how often each draft token of a chain is the one of the greedy answer, drafting after "
        "every token of it; then the same where all draft tokens before are right. What was not drafted is not right.",
        *_after_a_lookup(figures),
        *_trees(options.tree_nodes, figures),
        "- *expected*: what the cost model expects of the chain, from acceptance and measured step costs.",
        f"- *audits*: greedy output is plain decoding's, token for token, on {options.audit_prompts} prompts, and "
        f"{options.samples} samples after each of two prompts (temperature {options.temperature:g}) have the target's "
        "distribution, with chains and with trees. Where training changed the target, all of this is about the changed one.",
    ]


def _how(options: argparse.Namespace, answers: Answers) -> list[str]:
    machine, found = host(), versions()
    changed = ", ".join(f"`{item}`" for item in options.override)
    return [
        f"Written by `{shlex.join(['python', 'bench/heads.py', *sys.argv[1:]])}` (`make results-heads`), torch "
        f"{found['torch']}, transformers {found['transformers']}, commit {found['commit']}, on {machine['cpu']}, "
        f"{options.threads} of {machine['cores']} cores.",
        "",
        f"Target {Path(options.target).name}, float32. Every kind as in its recipe `<kind>_smollm2`"
        f"{', changed: ' + changed if changed else ''}, {options.minutes_per_kind:g} minutes of training on the same "
        f"{answers.number:,} answers of the target ({answers.tokens:,} tokens), seed {options.seed}. Measured on "
        f"{options.limit} evaluation prompts ({Path(options.prompts).name}) that no run has seen: greedy answers of at most "
        f"{options.max_new_tokens} tokens, batch 1, plain decoding and drafter in turns. Intervals are 95 % bootstrap "
        "intervals over prompts.",
    ]


def _after_a_lookup(figures: Mapping[str, Figures]) -> list[str]:
    if not any(name in AFTER_A_LOOKUP for name in figures):
        return []
    return [
        f"- *{LOOKUP} +*: the kind as trained in its own row, asked only where the newest two tokens or more do not stand "
        "earlier in the text; what followed them there is the draft elsewhere."
    ]


def _trees(nodes: int, figures: Mapping[str, Figures]) -> list[str]:
    with_tree = {name: one for name, one in figures.items() if one.get("tree")}
    if not with_tree:
        return []
    kinds: dict[str, list[str]] = {}
    for name, one in with_tree.items():
        kinds.setdefault(one["tree_is"], []).append(name)
    slower = [name for name, one in with_tree.items() if (one["tree"]["speedup"] or 0) < (one["chain"]["speedup"] or 0)]
    cost = f" Slower here than the chain: {', '.join(slower)}; a pass over {nodes + 1} tokens costs more than it saves."
    which = "; ".join(f"{words} ({', '.join(names)})" for words, names in kinds.items())
    return [f"- *tree*: of {nodes} nodes, {which}." + (cost if slower else "")]


def marks(figures: Mapping[str, Figures]) -> list[Figure]:
    """What recipes of 15 minutes, data included, should reach on two cores."""
    found = []
    for name, least in (("medusa", 0.42), ("hydra", 0.52)):
        if name in figures:
            hits, total = figures[name]["accuracies"]["right"][0]
            found.append(Figure(f"{name}, first head", hits / total, Bound(least)))
    if "hydra" in figures:
        found.append(Figure("hydra, chain", figures["hydra"]["chain"]["block_efficiency"], Bound(1.9)))
    chains = [one["chain"] for one in figures.values()]
    found.append(Figure("best chain", max(one["block_efficiency"] for one in chains), Bound(2.1)))
    trees = [one["tree"]["block_efficiency"] for one in figures.values() if one.get("tree")]
    if trees:
        found.append(Figure("best tree", max(trees), Bound(2.4)))
    return [*found, Figure("best speed-up of a chain", max(one["speedup"] for one in chains), Bound(1.4))]
