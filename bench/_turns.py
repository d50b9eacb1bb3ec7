"""Contenders that are processes of their own and take turns: the word to take one, and what became of it.

Imports nothing but the standard library, since contenders may live in other environments.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """One optimizer step of one contender."""

    seconds: float
    cpu_seconds: float  # of all threads: what a busy machine does not lengthen
    supervised: float  # tokens under the loss
    loss: float  # a supervised token, before the step


class Contender:
    """A process that waits for its turns. What it prints goes to `log`."""

    def __init__(
        self, name: str, command: Sequence[str], settings: dict[str, Any], log: Path, environment: Mapping[str, str]
    ):
        self.name, self.log = name, log
        self.turns: list[Turn] = []
        with log.open("w", encoding="utf-8") as stream:
            self.process = subprocess.Popen(
                [*command, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env={**os.environ, **environment},
            )
        self.facts: dict[str, Any] = self._answer()  # what it says about itself when it is ready

    def take(self, number: int, *, count: bool = True) -> Turn:
        """Let it take step `number`, kept where it counts."""
        turn = Turn(**self._ask(str(number)))
        if count:
            self.turns.append(turn)
        return turn

    def stop(self) -> float:
        """End the process; its peak memory in MiB."""
        peak = float(self._ask("stop")["peak_mib"])
        self.process.wait()
        return peak

    def kill(self) -> None:
        """End the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _ask(self, word: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone: the answer that does not come says so
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has failed; what it said is in {self.log}")
        return json.loads(line)


class Clock:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """What has passed, as a turn has it."""
        return {"seconds": time.perf_counter() - self._wall, "cpu_seconds": time.process_time() - self._cpu}


class Stopped(Exception):
    """There are no more turns."""


class Referee:
    """A contender's side of it. Whatever is printed from now on goes to stderr: stdout carries the answers."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, **facts: Any) -> None:
        """An answer."""
        self._out.write(json.dumps(facts) + "\n")
        self._out.flush()

    def wait(self) -> int:
        """The number of the step to take now. Raises Stopped, its peak memory told, when there is none."""
        word = sys.stdin.readline().strip()
        if word.isdigit():
            return int(word)
        if word == "stop":
            self.say(peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)  # Linux counts in KiB
        raise Stopped


def read_batches(path: str, size: int) -> list[list[dict[str, Any]]]:
    """The examples of every step: ``{"prompt", "input_ids", "prompt_length"}`` each."""
    with Path(path).open(encoding="utf-8") as file:
        examples = [json.loads(line) for line in file]
    return [examples[start : start + size] for start in range(0, len(examples), size)]
