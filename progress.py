"""What is going on and for how long: a bar on a terminal, plain lines elsewhere, silence on every rank but 0.

with stage("writing answers", total=12_000, unit="tokens", expected_seconds=90) as bar:
    bar.advance(512, alpha=0.41)
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

Amount = int | float


def is_main_process() -> bool:
    """Whether this is rank 0 of its launcher, or a process on its own."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Prints one line on rank 0, above a bar that is running."""
    if is_main_process():
        print(text, flush=True)


def duration(seconds: int | float) -> str:
    """``45 s``, ``4 min 10 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Stage:
    """Counts of one stage and the words for them. `advance` is all that work has to call."""

    def __init__(
        self, name: str, total: Amount | None, unit: str, done: Amount, expected_seconds: Amount | None
    ) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = done
        self.values: dict[str, Amount] = {}
        self.tokens = 0
        self._expected_seconds = expected_seconds
        self._done_before = done
        self._start = time.monotonic()

    def advance(self, amount: Amount = 1, *, tokens: int = 0, **values: Amount) -> None:
        """`amount` more of the stage's unit is done; `values` replace those that are shown, `tokens` make tokens/s."""
        self.done += amount
        self.tokens += tokens
        self.values |= values
        self._show()

    def _show(self) -> None:
        """Nothing is shown on ranks other than 0."""

    @property
    def elapsed(self) -> float:
        """Seconds since the stage began."""
        return time.monotonic() - self._start

    @property
    def seconds_left(self) -> Amount | None:
        """By the mean pace of this stage so far; by what was expected before anything is done; None when unknown."""
        if self.total is None or self.done <= self._done_before:
            expected = self._expected_seconds
            return None if expected is None else max(0.0, expected - self.elapsed)
        return (self.total - self.done) * self.elapsed / (self.done - self._done_before)

    @property
    def details(self) -> str:
        """``loss 2.310, alpha 0.412, 1,520 tokens/s``."""
        parts = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in self.values.items()]
        amount = self.tokens or (self.done - self._done_before if self.unit == "tokens" else 0)
        if amount and self.elapsed > 0:
            parts.append(f"{amount / self.elapsed:,.0f} tokens/s")
        return ", ".join(parts)

    @property
    def opening(self) -> str:
        """The line that announces the stage."""
        amount = "" if self.total is None else f": {self.total:,.0f} {self.unit}"
        resumed = f", {self.done:,.0f} done before" if self.done else ""
        expected = f", about {duration(self._expected_seconds)}" if self._expected_seconds else ""
        return f"{self.name}{amount}{resumed}{expected}"

    @property
    def line(self) -> str:
        """The line that says where the stage is."""
        amount = f"{self.done:,.0f}"
        if self.total:
            amount += f"/{self.total:,.0f} {self.unit} ({self.done / self.total:.0%})"
        else:
            amount += f" {self.unit}"
        left = "" if self.seconds_left is None else f"{duration(self.seconds_left)} left"
        return f"{self.name}: " + ", ".join(part for part in (amount, self.details, left) if part)

    @property
    def closing(self) -> str:
        """The line that remains when the stage is over (or was left early)."""
        of = "" if self.total is None or self.done >= self.total else f" of {self.total:,.0f}"
        before = f" ({self._done_before:,.0f} of them before)" if self._done_before else ""
        amount = f"{self.done:,.0f}{of} {self.unit}{before} in {duration(self.elapsed)}"
        return f"{self.name}: " + ", ".join(part for part in (amount, self.details) if part)


class _PlainStage(Stage):
    """Lines at a cadence: the first soon, to say how long it will take, then one every `every` seconds."""

    def __init__(self, *args, every: Amount) -> None:
        super().__init__(*args)
        self._every = every
        self._next = min(2.0, every)
        say(self.opening)

    def _show(self) -> None:
        if self.elapsed >= self._next:
            say(self.line)
            self._next = self.elapsed + self._every


class _BarStage(Stage):
    """One bar of the terminal's live display, which stages inside one another share."""

    def __init__(self, *args, bars: Progress) -> None:
        super().__init__(*args)
        self._bars = bars
        self._task = bars.add_task(self.name, total=self.total, completed=int(self.done), words=self.opening)

    def _show(self) -> None:
        left = "" if self.seconds_left is None else f"{duration(self.seconds_left)} left"
        words = ", ".join(part for part in (self.details, left) if part)
        self._bars.update(self._task, completed=self.done, words=words)

    def remove(self) -> None:
        self._bars.remove_task(self._task)


_live: list[Progress] = []  # the display on the terminal, while there is one: rich allows one at a time


@contextmanager
def stage(
    name: str,
    total: Amount | None = None,
    *,
    unit: str = "steps",
    done: Amount = 0,
    expected_seconds: Amount | None = None,
    every: Amount = 15.0,
) -> Iterator[Stage]:
    """Shows a stage of work from its announcement to its closing line.

    `total` and `done` (what an earlier run has done) are in `unit`; `expected_seconds` is an estimate known beforehand;
    `every` is the cadence of plain lines in seconds. Stages may be nested.
    """
    counts = (name, total, unit, done, expected_seconds)
    if not is_main_process():
        yield Stage(*counts)
        return
    if not sys.stdout.isatty():
        plain = _PlainStage(*counts, every=every)
        try:
            yield plain
        finally:
            say(plain.closing)
        return
    with _bars() as bars:
        bar = _BarStage(*counts, bars=bars)
        try:
            yield bar
        finally:
            bar.remove()
            bars.console.print(bar.closing, highlight=False)


@contextmanager
def _bars() -> Iterator[Progress]:
    if _live:
        yield _live[-1]
        return
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[words]}")]
    with Progress(*columns, console=Console(), transient=True) as bars:
        _live.append(bars)
        try:
            yield bars
        finally:
            _live.pop()
