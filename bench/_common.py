"""What the benchmark scripts share: flags, the machine in a line, timing in turns, figures beside what is required of them.

Nothing here fails on a slow machine. Times are compared only with times of the same process, taken in turns.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from draftsmith.data.chats import encode_prompt
from draftsmith.data.sources import Example
from draftsmith.models.target import Target, load_target
from draftsmith.provenance import host, versions

DEMO_TARGET = "smollm2-135m-instruct"


def arguments(description: str | None, *, rounds: int, limit: int) -> argparse.ArgumentParser:
    """A parser with the flags that every script has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="times that everything is measured, in turns")
    parser.add_argument("--limit", type=int, default=limit, help="prompts, examples or products that are measured on")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    return parser


def begin(options: argparse.Namespace) -> None:
    """Set the threads and print what the figures depend on."""
    torch.set_num_threads(options.threads)
    machine, found = host(), versions()
    where = ", ".join(machine["gpus"]) or f"{machine['cpu']}, {machine['cores']} cores"
    print(f"machine: {where}, {options.threads} threads, {machine['memory_gib']} GiB")
    print(
        f"versions: torch {found['torch']}, transformers {found['transformers']}, commit {found['commit']}", flush=True
    )


def load(name: str) -> Target:
    """A target in float32, which makes greedy answers comparable token by token."""
    return load_target(name, "float32")


def encode(target: Target, examples: Sequence[Example]) -> list[list[int]]:
    """The first turn of every example as a prompt."""
    return [encode_prompt(target.tokenizer, example.turns[:1]) for example in examples]  # type: ignore[arg-type]


class Work(NamedTuple):
    """One turn of one contestant."""

    seconds: float
    units: float  # tokens, steps, …


@dataclass
class Timings:
    """What contestants did, turn by turn; all of them took the same turns in the same order."""

    turns: dict[str, list[Work]] = field(default_factory=dict)

    def add(self, name: str, seconds: float, units: float) -> None:
        """One more turn."""
        self.turns.setdefault(name, []).append(Work(seconds, units))

    def rate(self, name: str) -> float:
        """Units a second, median over turns."""
        return statistics.median(work.units / work.seconds for work in self.turns[name])

    def seconds(self, name: str) -> float:
        """Seconds a turn, median."""
        return statistics.median(work.seconds for work in self.turns[name])

    def ratios(self, name: str, base: str) -> list[float]:
        """Rate over the rate of `base`, turn by turn."""
        pairs = zip(self.turns[name], self.turns[base], strict=True)
        return [(mine.units / mine.seconds) / (other.units / other.seconds) for mine, other in pairs]

    def ratio(self, name: str, base: str) -> float:
        """Median of the ratios of turns that followed each other: what slows the machine down slows both."""
        return statistics.median(self.ratios(name, base))


def take_turns(
    contestants: Mapping[str, Callable[[Any], float]], items: Sequence[Any], rounds: int, warm_up: bool = True
) -> Timings:
    """Let every contestant work on every item, `rounds` times. They return the units of work they did.

    Who goes first changes from item to item. `warm_up`: each has one unmeasured turn before.
    """
    timings = Timings()
    for work in contestants.values() if warm_up else ():
        work(items[0])
    names = list(contestants)
    for turn, item in enumerate([item for _ in range(rounds) for item in items]):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            synchronise()
            start = time.perf_counter()
            units = contestants[name](item)
            synchronise()
            timings.add(name, time.perf_counter() - start, units)
    return timings


def synchronise() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Bound(NamedTuple):
    """What a figure should reach."""

    value: float
    at_least: bool = True

    def words(self, value: float) -> str:
        """The requirement and whether `value` meets it."""
        met = value >= self.value if self.at_least else value <= self.value
        return f"{'at least' if self.at_least else 'at most'} {self.value:g}: {'met' if met else 'MISSED'}"


class Figure(NamedTuple):
    """One line of the result."""

    name: str
    value: float
    bound: Bound | None = None
    unit: str = ""


def print_figures(title: str, figures: Sequence[Figure]) -> None:
    """Figures, and beside them what is required."""
    cells = [
        (figure.name, f"{figure.value:.3g}{figure.unit}", figure.bound.words(figure.value) if figure.bound else "")
        for figure in figures
    ]
    print_table(title, ["", "measured", "required"], cells)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "") -> None:
    """A table as aligned text. `align`: l or r a column; else the first to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    align = align or "l" + "r" * (len(header) - 1)
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    print(f"\n{title}")
    for line in lines:
        cells = zip(line, widths, align, strict=True)
        print("  ".join(c.ljust(width) if side == "l" else c.rjust(width) for c, width, side in cells).rstrip())
    sys.stdout.flush()
