"""What a reader of the report must be told: figures that are missing, doubtful, or easily misread."""

from collections.abc import Iterator
from typing import Any

from .wording import FEW_PROMPTS, LOSSLESS, Report, Run, find, interval, is_greedy, ordered, title


def caveats(report: Report) -> list[str]:
    """One sentence a caveat, in order of weight; empty when there is nothing to say."""
    run = find(report, "drafter") or ordered(report)[0]
    found = [*_output(run, report), *_time(run, report), *_self_check(run, report), *_model(run, report)]
    return [*found, *_reach(report, run), *_provenance(report)]


def _output(run: Run, report: Report) -> Iterator[str]:
    rule, compared = report["settings"].get("rule", "lossless"), run["identical_to_target"]
    if rule not in LOSSLESS:
        yield f"The verification rule “{rule}” does not preserve the target's distribution."
    elif compared and compared[0] < compared[1] and is_greedy(report):
        yield (
            f"Greedy output differed on {compared[1] - compared[0]} of {compared[1]} prompts although the rule is "
            "lossless: rounding where two tokens are nearly tied, or a fault. `draftsmith audit` tells them apart."
        )
    if run["block_efficiency"] is not None and compared is None:
        if is_greedy(report):
            yield "Whether the output is identical to plain decoding was not checked."
        else:
            yield (
                "Sampled answers cannot be compared token by token; that their distribution is the target's is what "
                "`draftsmith audit` tests."
            )


def _time(run: Run, report: Report) -> Iterator[str]:
    if run["block_efficiency"] is None:
        yield "Measured teacher-forced only: nothing was decoded, so there is no block efficiency and no speed."
    elif run["speedup"] is None:
        yield "Wall time was not measured, so the report has no measured speed-up."
    elif run["speedup_ci"] and run["speedup_ci"][0] <= 1 <= run["speedup_ci"][1]:
        yield f"The measured speed-up may be no gain at all: its interval {interval(run['speedup_ci'], 2)} contains 1."
    if run["speedup"] is not None and run["emitted"] != run["plain_emitted"]:
        yield (
            f"Speculative decoding emitted {run['emitted']:,} tokens and plain decoding "
            f"{run['plain_emitted'] or 0:,}: compare their speed per token, not by total time."
        )


def _self_check(run: Run, report: Report) -> Iterator[str]:
    first = (run["conditional_acceptance"] or [None])[0]
    prefix = "greedy_agreement" if is_greedy(report) else "alpha"
    forced = run[f"{prefix}_at_step_starts"]
    if first is None or forced is None or run["tree_nodes"]:  # a tree's first level holds several tries
        return
    ends = (run["conditional_acceptance_ci"] or [None])[0]
    if ends and not ends[0] <= forced <= ends[1] and report["settings"].get("rule", "lossless") in LOSSLESS:
        yield (
            f"Self-check failed: {prefix.replace('_', ' ')} at step starts is {forced:.3f}, but the decoder accepted "
            f"{first:.3f} {interval(ends)} of the first draft tokens. The two should agree."
        )


def _model(run: Run, report: Report) -> Iterator[str]:
    measured, expected, n = run["speedup"], run["expected_speedup"], run["num_speculative_tokens"]
    asked = report["settings"].get("num_speculative_tokens")
    if run["block_efficiency"] is not None and n is None and isinstance(asked, str):
        yield f"“{asked}” decided the number of draft tokens step by step: the cost model knows fixed numbers only."
    elif run["block_efficiency"] is not None and expected is None:
        yield "The costs of drafting and of verification were not measured (far enough) to say what to expect."
    if measured is not None and expected is not None and measured < 0.9 * expected:
        yield (
            f"Measured speed-up ({measured:.2f}×) is more than 10 % below the expected one ({expected:.2f}×): time "
            "is lost outside the models' passes, or the machine was busy."
        )
    by_length, best = run["expected_speedup_by_length"], run["best_num_speculative_tokens"]
    if best == 0:
        yield "By the measured costs and acceptance no number of draft tokens beats plain decoding on this machine."
    elif best and n and best != n and by_length and expected and by_length[best - 1] > 1.02 * expected:
        beyond = best > len(run["conditional_acceptance"] or [])
        guess = " (acceptance beyond the drafted positions is extrapolated)" if beyond else ""
        gain = f"{by_length[best - 1]:.2f}× expected{guess}"
        yield f"{best} draft tokens a step should be faster than the {n} used: {gain}."


def _reach(report: Report, run: Run) -> Iterator[str]:
    prompts = len(run["prompts"])
    if prompts < FEW_PROMPTS:
        yield f"Only {prompts} prompt{'s were' if prompts != 1 else ' was'} measured; intervals from so few mislead."
    small = [name for name in run["categories"] if _size(run, name) < 10]
    if small and len(run["categories"]) > 1:
        which = ", ".join(small) if len(small) <= 3 else f"{len(small)} of {len(run['categories'])}"
        yield f"Categories with fewer than 10 prompts ({which}): read their figures with the intervals."
    for other in ordered(report):
        if other is not run and other["block_efficiency"] is None:
            yield f"“{title(other)}” was measured teacher-forced only: what it lacks is unknown, not zero."
    if is_greedy(report) and run["alpha"] is not None:
        yield (
            "Decoding was greedy, alpha is stated at temperature 1: what greedy decoding accepts follows from the "
            "greedy agreement, not from alpha."
        )


def _size(run: Run, category: str) -> int:
    return sum(prompt["category"] == category for prompt in run["prompts"])


def _provenance(report: Report) -> Iterator[str]:
    wanted: dict[str, Any] = {
        "the command": report["environment"].get("command"),
        "the machine": report["environment"].get("machine"),
        "library versions": report["environment"].get("versions"),
        "the seed": report["settings"].get("seed", report["environment"].get("seed")),
    }
    if missing := [name for name, value in wanted.items() if value is None]:
        yield f"Not recorded: {', '.join(missing)}. Without it the figures cannot be reproduced exactly."
