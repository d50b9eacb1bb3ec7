"""The report in words: its headline, its caveats, the definition of every figure, and how numbers are written.

All functions read the report's plain data (:mod:`.schema`) and return plain text; the HTML page and the terminal share
it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..decode.rules import LOSSLESS

MISSING = "–"
FEW_PROMPTS = 20

Run = Mapping[str, Any]
Report = Mapping[str, Any]


class Row(NamedTuple):
    """A line of the summary table."""

    key: str
    title: str
    decimals: int
    unit: str = ""


ROWS = (
    Row("speedup", "speed-up, measured", 2, "×"),
    Row("speedup_per_token", "speed-up per token", 2, "×"),
    Row("expected_speedup", "speed-up, expected", 2, "×"),
    Row("tokens_per_second", "tokens/s", 1),
    Row("plain_tokens_per_second", "tokens/s, plain decoding", 1),
    Row("block_efficiency", "block efficiency (τ)", 2),
    Row("acceptance_rate", "acceptance rate", 3),
    Row("alpha", "alpha", 3),
    Row("greedy_agreement", "greedy agreement", 3),
    Row("alpha_at_step_starts", "alpha at step starts", 3),
    Row("greedy_agreement_at_step_starts", "greedy agreement at step starts", 3),
    Row("mbsu", "memory-bound speed-up (mbsu)", 2, "×"),
    Row("cost_ratio", "cost ratio c", 3),
    Row("break_even_alpha", "break-even alpha", 3),
    Row("best_num_speculative_tokens", "best number of draft tokens", 0),
    Row("target_log_probability", "target log-probability per token", 3),
    Row("plain_target_log_probability", "… under plain decoding", 3),
    Row("identical_to_target", "identical to plain decoding", 0),
)

DEFINITIONS = (
    ("target", "The model whose output distribution is preserved."),
    ("drafter", "What proposes draft tokens; the target then verifies them in one forward pass."),
    (
        "alpha",
        "Expected acceptance of one draft token: the overlap Σ min(target probability, draft probability), one "
        "minus their total variation distance (arXiv:2211.17192). Taken teacher-forced over all positions of "
        "answers that the target generated, after the run's sampling transforms; a greedy run states it at "
        "temperature 1.",
    ),
    ("greedy agreement", "Share of those positions where drafter and target have the same most likely token."),
    (
        "… at step starts",
        "The same means over only those positions where the decoder's steps began. Hard passages start more steps, "
        "so they lie below the plain means; they must equal the conditional acceptance of the first draft token.",
    ),
    (
        "acceptance rate",
        "Accepted draft tokens / draft tokens, counted while decoding. For a tree the depth is counted.",
    ),
    (
        "acceptance by position",
        "Steps in which draft token i was accepted / steps in which it was drafted. The conditional acceptance "
        "divides by the steps in which the draft token before it was accepted, so that it was really judged.",
    ),
    (
        "block efficiency (τ)",
        "Tokens emitted / target verification passes. It includes the token that the target itself adds in each "
        "pass and excludes all after the end of the answer. Plain decoding has 1.",
    ),
    (
        "speed-up, measured",
        "Wall time of plain decoding / wall time of speculative decoding: same prompts, same process, runs "
        "interleaved. Per token: the same with each time divided by the tokens it produced, for runs whose answers "
        "differ in length.",
    ),
    (
        "speed-up, expected",
        "Expected tokens of a step / its cost, from the measured conditional acceptance, cost ratio and cost of "
        "verification (arXiv:2211.17192, theorem 3.8, with a measured cost curve in place of a flat one).",
    ),
    ("cost ratio c", "Time of one drafter step / time of one plain target step."),
    ("cost of verification", "Time of a target pass over n tokens / time of a pass over one."),
    (
        "break-even alpha",
        "The acceptance per draft token at which the expected speed-up is 1 for this many draft tokens.",
    ),
    ("best number of draft tokens", "The number with the highest expected speed-up; 0 when none is faster than plain."),
    (
        "memory-bound speed-up (mbsu)",
        "τ / (1 + drafter passes a step × parameters read by the drafter / by the target): what reading the "
        "weights alone would cost (after arXiv:2403.00858). It holds for a machine limited by memory bandwidth, "
        "whatever this one is.",
    ),
    (
        "target log-probability",
        "Mean log-probability (nats) the target gives the emitted tokens: how far a lossy rule drifts.",
    ),
    (
        "pooled, per prompt, interval",
        "Rates are counts summed over all prompts, then divided. The mean of the prompts' own rates differs and stands "
        "beside it. Square brackets are 95 % bootstrap intervals over prompts (percentiles).",
    ),
)


def number(value: Any, decimals: int = 3, unit: str = "") -> str:
    """A number as text; a dash when it was not measured."""
    return MISSING if value is None else f"{value:,.{decimals}f}{unit}"


def percent(share: float) -> str:
    """A share as whole percent."""
    return f"{100 * share:.0f} %"


def interval(ends: Sequence[float] | None, decimals: int = 3) -> str:
    """``[low, high]``; empty when there is none."""
    return "" if ends is None else f"[{ends[0]:.{decimals}f}, {ends[1]:.{decimals}f}]"


def cell(figures: Run, row: Row) -> tuple[str, str]:
    """A row's figure and its interval (may be empty) as text."""
    value = figures.get(row.key)
    if row.key == "identical_to_target" and value is not None:
        return f"{value[0]} of {value[1]}", ""
    return number(value, row.decimals, row.unit), interval(figures.get(f"{row.key}_ci"), row.decimals)


def rows(report: Report) -> list[Row]:
    """The rows of which some run has a figure. Per-token speed-up is shown only where answers differ in length."""
    shown = [row for row in ROWS if any(run.get(row.key) is not None for run in report["runs"])]
    if all(run["emitted"] == run["plain_emitted"] for run in report["runs"] if run["speedup"] is not None):
        shown = [row for row in shown if row.key != "speedup_per_token"]
    greedy = is_greedy(report)
    return [
        row._replace(title=f"{row.title} (temperature 1)") if greedy and row.key == "alpha" else row for row in shown
    ]


def find(report: Report, name: str) -> Run | None:
    """The run of that name, if there is one."""
    return next((run for run in report["runs"] if run["name"] == name), None)


def ordered(report: Report) -> list[Run]:
    """The runs as a reader wants them: before training, after it, then the baselines."""
    rank = {"start": 0, "drafter": 1}
    return sorted(report["runs"], key=lambda run: rank.get(run["name"], 2))


def title(run: Run) -> str:
    """What a run is called in tables and plots."""
    known = {"start": "before training", "drafter": "drafter"}
    if run["name"] in known:
        return known[run["name"]]
    return run["label"] or run["name"]


def is_greedy(report: Report) -> bool:
    """Whether the run decoded at temperature 0."""
    return report["settings"].get("temperature") in (0, 0.0, None)


def speed(run: Run, report: Report) -> tuple[str, float | None, Sequence[float] | None]:
    """The speed-up to quote (its key, value, interval): per token where sampling makes answers of different lengths."""
    key = "speedup" if is_greedy(report) or run["emitted"] == run["plain_emitted"] else "speedup_per_token"
    return key, run[key], run[f"{key}_ci"]


def headline(report: Report) -> list[str]:
    """What was found, in plain sentences, the most important first."""
    run = find(report, "drafter") or ordered(report)[0]
    sentences = [_speed_sentence(run, report), _tokens_sentence(run), _training_sentence(report, run)]
    sentences += [
        _baseline_sentence(other, report) for other in ordered(report) if other["name"] not in ("start", "drafter")
    ]
    sentences.append(_identity_sentence(run, report))
    return [sentence for sentence in sentences if sentence]


def _speed_sentence(run: Run, report: Report) -> str:
    key, value, ends = speed(run, report)
    target, prompts = report["target"], len(run["prompts"])
    if value is None:
        return f"Acceptance of {report['drafter']} by {target} on {prompts} prompts; speed was not measured."
    kind = "per token" if key == "speedup_per_token" else "by the clock"
    between = f", 95 % interval {interval(ends, 2)}" if ends else ""
    if ends and ends[0] <= 1.0 <= ends[1]:
        return f"No measurable change of speed for {target} on {prompts} prompts: {value:.2f}× {kind}{between}."
    word = "faster" if value >= 1.0 else "slower"
    amount = f"{value:.2f}× faster" if word == "faster" else f"{1 / value:.2f}× slower"
    # The interval is of the speed-up itself, so a slow-down names that figure too.
    stated = between if word == "faster" else f", a speed-up of {value:.2f}{between}"
    return f"{target} decodes {amount} with this drafter than without on {prompts} prompts ({kind}{stated})."


def _tokens_sentence(run: Run) -> str:
    if run["block_efficiency"] is None:
        return ""
    length, nodes = run["num_speculative_tokens"], run["tree_nodes"]
    start, accepted = "Every", "of the draft tokens are"
    if length is not None:
        start = f"With {length} draft token{'s' if length != 1 else ''} a step, every"
    if nodes:
        start, accepted = f"With a tree of {nodes} draft tokens, {length} deep, every", "of its levels are"
    share = "" if run["acceptance_rate"] is None else f" {percent(run['acceptance_rate'])} {accepted} accepted."
    ends = interval(run["block_efficiency_ci"], 2)
    value = f"{run['block_efficiency']:.2f} {ends}".strip()
    return f"{start} pass of the target emits {value} tokens on average instead of 1.{share}"


def _training_sentence(report: Report, run: Run) -> str:
    start = find(report, "start")
    if start is None or start is run or start["alpha"] is None or run["alpha"] is None:
        return ""
    verb = "raised" if run["alpha"] >= start["alpha"] else "lowered"
    temperature = " (temperature 1)" if is_greedy(report) else ""
    before = f"{start['alpha']:.2f} {interval(start['alpha_ci'], 2)}".strip()
    after = f"{run['alpha']:.2f} {interval(run['alpha_ci'], 2)}".strip()
    agreement = ""
    if None not in (start["greedy_agreement"], run["greedy_agreement"]):
        shares = f"{percent(start['greedy_agreement'])} to {percent(run['greedy_agreement'])}"
        agreement = f", and agreement on the most likely token from {shares}"
    return f"Training {verb} alpha{temperature} from {before} to {after}{agreement}."


def _baseline_sentence(other: Run, report: Report) -> str:
    _, value, ends = speed(other, report)
    if value is None and other["block_efficiency"] is None:
        return ""
    clock = "" if value is None else f" {value:.2f}× {interval(ends, 2)}".rstrip()
    tokens = "" if other["block_efficiency"] is None else f" {other['block_efficiency']:.2f} tokens a pass"
    return f"The baseline {title(other)} reaches{clock}{',' if clock and tokens else ''}{tokens}."


def _identity_sentence(run: Run, report: Report) -> str:
    compared = run["identical_to_target"]
    if compared is None:
        return ""
    same, total = compared
    if same == total:
        return f"The output is identical to plain decoding, token for token, on all {total} prompts."
    lossy = "" if report["settings"].get("rule", "lossless") in LOSSLESS else " (the rule is a lossy one)"
    return f"The output differs from plain decoding on {total - same} of {total} prompts{lossy}."
