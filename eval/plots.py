"""The report's plots, from the report's plain data: what is drawn. How it is drawn is :mod:`.svg`."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .svg import CARD, INK, SERIES, SIZE, STYLE, VARIABLES, error_arms, new_axes, to_svg
from .wording import Report, Run, is_greedy, ordered, title

MAX_CATEGORIES = 16


class Plot(NamedTuple):
    """A plot for the page. Its key, (CSS colour, name) pairs, is for the page to set: there it wraps as text does."""

    title: str
    caption: str
    svg: str
    key: list[tuple[str, str]]


def plots(report: Report) -> list[Plot]:
    """All plots for which the report has data, in reading order."""
    makers: tuple[Callable[[Report], Plot | None], ...] = (
        acceptance_by_position,
        before_and_after,
        block_efficiency_by_category,
        per_prompt,
        expected_speedup,
        verification_cost,
        training,
        stream,
    )
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # Text is laid out in matplotlib's own font but shown in the reader's, which has the glyph.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        made = [make(report) for make in makers]
    return [plot for plot in made if plot is not None]


def acceptance_by_position(report: Report) -> Plot | None:
    """Conditional acceptance of each draft token, a line a run; a run that decoded nothing is a hollow first point."""
    runs = [run for run in ordered(report) if any(rate is not None for rate in run["conditional_acceptance"] or [])]
    if not runs:
        return None
    figure, axes = new_axes("draft token", "accepted, given the one before")
    for i, run in enumerate(runs):
        rates, ends = run["conditional_acceptance"], run["conditional_acceptance_ci"]
        x = np.array([position for position, rate in enumerate(rates, start=1) if rate is not None])
        y = np.array([rate for rate in rates if rate is not None])
        ends = np.array([end or (rate, rate) for rate, end in zip(rates, ends, strict=True) if rate is not None])
        shifted = x + 0.08 * (i - (len(runs) - 1) / 2)  # so that intervals of several runs do not hide each other
        style: dict[str, Any] = {"color": _colour(report, run), "marker": "o", "ms": 4, "capsize": 2.5}
        axes.errorbar(shifted, y, yerr=error_arms(y, ends), **style)
    key = "greedy_agreement" if is_greedy(report) else "alpha"
    forced = [run for run in ordered(report) if not run["conditional_acceptance"] and run[key] is not None]
    for run in forced:
        value = np.array([run[key]])
        arms = error_arms(value, np.array([run[f"{key}_ci"] or (run[key],) * 2]))
        axes.errorbar([1], value, arms, fmt="o", ms=5, mfc=CARD, color=_colour(report, run), capsize=2.5)
    axes.set(ylim=(0, 1), xlim=(0.5, max(len(run["conditional_acceptance"]) for run in runs) + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = "Bars are 95 % intervals over prompts."
    if forced:
        caption += f" Hollow: {key.replace('_', ' ')} over all positions, for a run that decoded nothing."
    return _plot("Acceptance by position", caption, figure, report, [*forced, *runs])


def before_and_after(report: Report) -> Plot | None:
    """Alpha and greedy agreement of every run, as bars."""
    runs = [run for run in ordered(report) if run["alpha"] is not None or run["greedy_agreement"] is not None]
    if not runs:
        return None
    figure, axes = new_axes("", "share")
    names = {
        "alpha": "alpha" + (" (temperature 1)" if is_greedy(report) else ""),
        "greedy_agreement": "greedy agreement",
    }
    width = 0.8 / len(runs)
    for i, run in enumerate(runs):
        at = np.arange(len(names)) + (i - (len(runs) - 1) / 2) * width
        values = np.array([np.nan if run[key] is None else run[key] for key in names], dtype=float)
        ends = np.array(
            [run[f"{key}_ci"] or (value, value) for key, value in zip(names, values, strict=True)], dtype=float
        )
        axes.bar(at, values, width * 0.9, color=_colour(report, run))
        axes.errorbar(at, values, yerr=error_arms(values, ends), fmt="none", ecolor=INK, capsize=2.5, elinewidth=1)
        for x, value, top in zip(at, values, ends[:, 1], strict=True):
            if np.isfinite(value) and len(runs) <= 4:  # more would run into each other
                axes.annotate(f"{value:.2f}", (x, top), (0, 2), textcoords="offset points", ha="center", va="bottom")
    axes.set_xticks(range(len(names)), list(names.values()))
    axes.set_ylim(0, 1)
    axes.grid(axis="x", visible=False)
    return _plot("Teacher-forced acceptance", "Over all positions of the target's own answers.", figure, report, runs)


def block_efficiency_by_category(report: Report) -> Plot | None:
    """Tokens a target pass for every category, a dot a run."""
    runs = [run for run in ordered(report) if run["block_efficiency"] is not None]
    names = list(dict.fromkeys(name for run in runs for name in run["categories"]))[:MAX_CATEGORIES]
    if not runs or not names:
        return None
    figure, axes = new_axes("tokens emitted a target pass (τ)", "", height=max(SIZE[1], 1.0 + 0.3 * len(names)))
    for i, run in enumerate(runs):
        found = [(row, run["categories"].get(name)) for row, name in enumerate(names)]
        points = [
            (
                row + min(0.16, 0.7 / len(runs)) * (i - (len(runs) - 1) / 2),
                f["block_efficiency"],
                f["block_efficiency_ci"],
            )
            for row, f in found
            if f is not None and f["block_efficiency"] is not None
        ]
        if not points:
            continue
        y, x = (np.array(column, dtype=float) for column in list(zip(*points, strict=True))[:2])
        ends = np.array([point[2] or (point[1], point[1]) for point in points], dtype=float)
        axes.errorbar(x, y, xerr=error_arms(x, ends), fmt="o", ms=4.5, color=_colour(report, run), capsize=2)
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.axvline(1, color=INK, lw=0.8, ls=":")
    caption = "Dotted: plain decoding. Bars are 95 % intervals over prompts."
    return _plot("Block efficiency by category", caption, figure, report, runs)


def per_prompt(report: Report) -> Plot | None:
    """How the prompts are spread: measured speed-up per token where times were taken, else block efficiency."""
    drawn = ("measured speed-up of a prompt", "Speed-up, prompt by prompt")
    spread = _spread(report, ("plain_seconds", "plain_emitted", "emitted", "seconds"))
    if not spread:
        drawn = ("tokens a target pass, of a prompt", "Block efficiency, prompt by prompt")
        spread = _spread(report, ("emitted", "target_calls"))
    if not spread:
        return None
    figure, axes = new_axes(drawn[0], "prompts")
    everything = np.concatenate([values for _, values in spread])
    edges = np.histogram_bin_edges(everything, bins=min(24, max(5, len(everything) // 4))).tolist()
    for run, values in spread:
        colour = _colour(report, run)
        axes.hist(values, edges, histtype="stepfilled", alpha=0.25, color=colour)
        axes.hist(values, edges, histtype="step", lw=1.5, color=colour)
    axes.axvline(1, color=INK, lw=0.8, ls=":")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.08)
    return _plot(drawn[1], "Dotted: plain decoding.", figure, report, [run for run, _ in spread])


def _spread(report: Report, names: tuple[str, ...]) -> list[tuple[Run, list[float]]]:
    """For every run its prompts' a / b, or (a / b) · (c / d), over the prompts that have all these counts."""
    spread = []
    for run in ordered(report):
        counts = [[prompt[name] for name in names] for prompt in run["prompts"]]
        kept = [values for values in counts if all(values)]
        if kept:
            ratios = np.array(kept, dtype=float)
            spread.append((run, (ratios[:, ::2] / ratios[:, 1::2]).prod(axis=1).tolist()))
    return spread


def expected_speedup(report: Report) -> Plot | None:
    """What the cost model expects of 1, 2, … draft tokens, with the measured speed-up where there is one."""
    runs = [run for run in ordered(report) if any(run["expected_speedup_by_length"] or [])]
    if not runs:
        return None
    figure, axes = new_axes("draft tokens a step", "speed-up")
    for run in runs:
        colour, curve = _colour(report, run), np.array(run["expected_speedup_by_length"], dtype=float)
        known = sum(rate is not None for rate in run["conditional_acceptance"])
        x = np.arange(1, len(curve) + 1)
        axes.plot(x[:known], curve[:known], color=colour, marker="o", ms=3.5)
        axes.plot(x[max(known - 1, 0) :], curve[max(known - 1, 0) :], color=colour, ls="--", lw=1.2)
        if run["speedup"] is not None and run["num_speculative_tokens"]:
            at, value = run["num_speculative_tokens"], np.array([run["speedup"]])
            arms = error_arms(value, np.array([run["speedup_ci"] or (run["speedup"],) * 2]))
            axes.errorbar([at], value, yerr=arms, fmt="D", ms=6, mfc=CARD, color=colour, capsize=3)
    axes.axhline(1, color=INK, lw=0.8, ls=":")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.12)
    caption = "By measured acceptance and costs; dashed: acceptance extrapolated. Diamonds: measured. Dotted: plain."
    return _plot("Expected speed-up by number of draft tokens", caption, figure, report, runs)


def verification_cost(report: Report) -> Plot | None:
    """The measured cost of a target pass over n tokens: the runs share the target, one curve says it."""
    run = next((run for run in ordered(report) if len(run["verification_cost"] or []) > 1), None)
    if run is None:
        return None
    figure, axes = new_axes("tokens in the pass, n", "t(n) / t(1)")
    curve = np.array(run["verification_cost"], dtype=float)
    axes.plot(np.arange(1, len(curve) + 1), curve, color=SERIES[0], marker="o", ms=4)
    axes.axhline(1, color=INK, lw=0.8, ls=":")
    axes.set_ylim(bottom=0, top=1.15 * float(curve.max()))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _plot(
        "Cost of verification",
        "Time of a target pass over n tokens against one token. Dotted: free.",
        figure,
        report,
        [],
    )


def training(report: Report) -> Plot | None:
    """Loss and alpha over the steps of training."""
    curve: dict[str, Any] | None = report.get("training")
    if not curve or not curve["steps"]:
        return None
    figure, axes = new_axes("training step", "loss")
    right = axes.twinx()
    for name, side, colour in (("loss", axes, SERIES[2]), ("alpha", right, SERIES[0])):
        points = [(step, value) for step, value in zip(curve["steps"], curve[name], strict=True) if value is not None]
        if points:
            side.plot(*zip(*points, strict=True), color=colour, lw=1.4, marker="o" if len(points) < 40 else "", ms=3)
    axes.set_ylim(bottom=0)
    right.set(ylabel="alpha", ylim=(0, 1))
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    svg = to_svg(figure, "training")
    return Plot(
        "Training", "As logged while training.", svg, [(VARIABLES[SERIES[2]], "loss"), (VARIABLES[SERIES[0]], "alpha")]
    )


def stream(report: Report) -> Plot | None:
    """Block efficiency of what an online run served while it trained: batch by batch, and a running mean."""
    curve: dict[str, Any] = report.get("training") or {}
    pairs = zip(curve.get("steps", []), curve.get("stream_block_efficiency") or [], strict=False)
    points = [(step, value) for step, value in pairs if value is not None]
    if len(points) < 2:
        return None
    steps, served = np.array(points, dtype=float).T
    width = max(1, len(points) // 10)
    figure, axes = new_axes("training step", "tokens a target pass (τ)")
    axes.plot(steps, served, ls="", marker="o", ms=2.5, alpha=0.4, color=SERIES[0])
    axes.plot(steps[width - 1 :], np.convolve(served, np.full(width, 1 / width), "valid"), color=SERIES[0], lw=1.6)
    axes.margins(y=0.12)
    caption = f"Dots: the batches of prompts that were served while training. Line: the mean of {width} batches."
    return Plot("Block efficiency over the stream", caption, to_svg(figure, "stream"), [])


def _plot(heading: str, caption: str, figure: Figure, report: Report, runs: list[Run]) -> Plot:
    """The finished plot; its key names the runs that were drawn."""
    key = [(VARIABLES[_colour(report, run)], title(run)) for run in ordered(report) if run in runs]
    return Plot(heading, caption, to_svg(figure, heading), key)


def _colour(report: Report, run: Run) -> str:
    """A run's colour, the same in every plot: grey before training, blue after it."""
    if run["name"] in ("drafter", "start"):
        return SERIES[0 if run["name"] == "drafter" else 1]
    others = [other["name"] for other in ordered(report) if other["name"] not in ("drafter", "start")]
    return SERIES[2 + others.index(run["name"]) % (len(SERIES) - 2)]


def _short(name: str, limit: int = 22) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"
