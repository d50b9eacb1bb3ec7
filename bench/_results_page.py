"""Alpha by row with intervals, and the page that says so."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftsmith.eval.stats import estimate, ratio, resampling_weights


@dataclass
class Measured:
    """One row of a table: sums by seed and prompt."""

    name: str
    alpha: np.ndarray  # [seeds, prompts]
    agreement: np.ndarray  # [seeds, prompts]
    positions: np.ndarray  # [seeds, prompts]

    @classmethod
    def of(cls, name: str, runs: Sequence[Mapping[str, Any]]) -> "Measured":
        """From what the runs of all seeds measured."""
        return cls(name, *(np.array([run[key] for run in runs], float) for key in ("alpha", "agreement", "positions")))

    @property
    def by_seed(self) -> np.ndarray:
        """Alpha of every seed's run, pooled over prompts."""
        return self.alpha.sum(1) / self.positions.sum(1)

    @property
    def pooled(self) -> float:
        """Alpha over all seeds and prompts."""
        return float(self.alpha.sum() / self.positions.sum())


class Interval(NamedTuple):
    """A figure and its 95 % bootstrap interval over prompts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"

    @property
    def signed(self) -> str:
        """As a difference."""
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def share(sums: np.ndarray, positions: np.ndarray) -> Interval:
    """Sums over positions, pooled over seeds, prompts resampled."""
    found = estimate(ratio, resampling_weights(sums.shape[1]), sums.sum(0), positions.sum(0))
    return Interval(float(found.pooled), float(found.low), float(found.high))


def difference(one: Measured, other: Measured) -> Interval:
    """Alpha of `one` minus alpha of `other`, prompt by prompt on the same prompts."""

    def minus(mine: np.ndarray, my_positions: np.ndarray, its: np.ndarray, its_positions: np.ndarray) -> np.ndarray:
        return ratio(mine, my_positions) - ratio(its, its_positions)

    counts = (one.alpha.sum(0), one.positions.sum(0), other.alpha.sum(0), other.positions.sum(0))
    found = estimate(minus, resampling_weights(one.alpha.shape[1]), *counts)
    return Interval(float(found.pooled), float(found.low), float(found.high))


def best_of(rows: Sequence[Measured]) -> Measured:
    """The row with the highest alpha."""
    return max(rows, key=lambda row: row.pooled)


def table(rows: Sequence[Measured], base: str) -> list[str]:
    """Rows by alpha, highest first, with the difference to the row called `base`."""
    reference = next((row for row in rows if row.name == base), None)
    lines = [f"| | alpha | by seed | minus {base} | greedy agreement |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: -row.pooled):
        minus = "" if reference is None or row is reference else difference(row, reference).signed
        seeds = ", ".join(f"{alpha:.3f}" for alpha in row.by_seed)
        agreement = share(row.agreement, row.positions)
        lines.append(f"| {row.name} | {share(row.alpha, row.positions)} | {seeds} | {minus} | {agreement} |")
    return lines


def winner(rows: Sequence[Measured]) -> str:
    """Which row won, and whether the next one is apart from it."""
    if len(rows) < 2:
        return "There is nothing to compare."
    first, second = sorted(rows, key=lambda row: -row.pooled)[:2]
    ahead = difference(first, second)
    apart = "" if ahead.low > 0 else ", which is within the interval: the two are not told apart"
    return f"Highest: **{first.name}**, ahead of {second.name} by {ahead.signed}{apart}."


def ordering(claim: str, better: Sequence[str], worse: str, rows: Sequence[Measured]) -> str:
    """Whether `claim`, that one of `better` beats `worse`, holds here: in the interval and for every seed."""
    by_name = {row.name: row for row in rows}
    candidates = [by_name[name] for name in better if name in by_name]
    if not candidates or worse not in by_name:
        return f"- {claim}: not measured."
    mine, other = best_of(candidates), by_name[worse]
    ahead, every = difference(mine, other), mine.by_seed - other.by_seed
    if ahead.low > 0 and (every > 0).all():
        verdict = "holds here"
    elif ahead.high < 0 and (every < 0).all():
        verdict = "does not hold here; the opposite does"
    else:
        verdict = "neither shown nor refuted here"
    return f"- {claim}: **{verdict}** ({mine.name} minus {other.name}: {ahead.signed})."


def write_section(path: Path, lines: Sequence[str]) -> None:
    """Write a section of the page, in the place of the one with the same heading: `lines` begin with it (``# …``).

    The file is written beside the page and renamed.
    """
    assert lines[0].startswith("# ")
    page = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    starts = [i for i, line in enumerate(page) if line.startswith("# ")]
    sections = [page[start:end] for start, end in pairwise([*starts, len(page)])]
    headings = [section[0] for section in sections]
    new = [*lines, ""]
    if lines[0] in headings:
        sections[headings.index(lines[0])] = new
    else:
        sections.append(new)
    text = "\n".join([*page[: starts[0] if starts else 0], *(line for section in sections for line in section)])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    os.replace(partial, path)
