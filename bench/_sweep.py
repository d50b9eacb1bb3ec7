"""A sweep of recipes: every run in its own folder, skipped when it is finished, and alpha on held-out prompts for each."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from _common import encode

from draftsmith.data.sources import shipped_evaluation
from draftsmith.decode.batched import generate_batched
from draftsmith.decode.packed import use_backend
from draftsmith.decode.sampling import Sampling
from draftsmith.eval.alpha import Answer, ForcedBatch, forced_batches, score
from draftsmith.heads.load import load_drafter
from draftsmith.models.target import Target, load_target


class Row(NamedTuple):
    """One line of a table: a recipe's overrides under a name."""

    name: str
    overrides: tuple[str, ...]


SOURCES = (
    Row("target", ("data.responses=target",)),
    Row("given", ("data.responses=given",)),
    Row("on-policy half", ("data.responses=target", "objective.rollouts={source: drafter, fraction: 0.5}")),
)
LOSSES = (
    Row("cross_entropy", ("objective.loss=cross_entropy",)),
    Row("forward_kl", ("objective.loss=forward_kl",)),
    Row("reverse_kl", ("objective.loss=reverse_kl",)),
    Row("jsd 0.5", ("objective.loss={jsd: {weight: 1.0, beta: 0.5}}",)),
    Row("tvd", ("objective.loss=tvd",)),
    Row("neg_log_acceptance", ("objective.loss=neg_log_acceptance",)),
    Row("lk_hybrid", ("objective.loss=lk_hybrid",)),
)


@dataclass(frozen=True)
class Sweep:
    """What all runs have in common."""

    folder: Path
    target: str
    chats: str
    steps: int  # optimizer steps of every run
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]
    threads: int  # of a run
    jobs: int  # runs side by side

    def run_folder(self, name: str, seed: int) -> Path:
        """Where a run lives."""
        return self.folder / name.replace(" ", "_") / f"seed_{seed}"

    def recipe(self, overrides: Sequence[str], output: Path, seed: int) -> list[str]:
        """The overrides of ``distill_smollm2`` that make a run."""
        common = [
            f"target.model={self.target}",
            f"data.prompts=[{self.chats}]",
            "objective.loss=forward_kl",
            # Measured once the run is finished, on all prompts; here only because a run wants to measure something.
            "evaluate={prompts: shipped, limit: 2, every: 1000000, max_new_tokens: 8}",
            "engine.checkpoint_every=200",
            f"engine.threads={self.threads}",
            "engine.minutes=null",
            f"engine.steps={self.steps}",
        ]
        return [*common, *self.overrides, *overrides, f"seed={seed}", f"output={output}"]


class Outcome(NamedTuple):
    """A run: its folder, or why it has none."""

    folder: Path
    problem: str | None


def train_rows(sweep: Sweep, group: str, rows: Sequence[Row]) -> dict[str, list[Outcome]]:
    """Train what is not finished, `sweep.jobs` runs at a time."""

    def run(row: Row, seed: int) -> Outcome:
        return train(sweep, row.overrides, sweep.run_folder(f"{group}/{row.name}", seed), seed)

    with ThreadPoolExecutor(sweep.jobs) as pool:
        begun = {row.name: [pool.submit(run, row, seed) for seed in sweep.seeds] for row in rows}
        return {name: [one.result() for one in runs] for name, runs in begun.items()}


def train(sweep: Sweep, overrides: Sequence[str], folder: Path, seed: int) -> Outcome:
    """One run, in a process of its own; one that was interrupted goes on."""
    if (folder / "final").exists():
        return Outcome(folder, None)
    if (folder / "recipe.yaml").exists():  # begun: its own budget holds
        written = yaml.safe_load((folder / "recipe.yaml").read_text())["engine"]
        sweep = replace(sweep, steps=written["steps"])
    else:
        _borrow_data(sweep, overrides, folder, seed)
    return run_recipe("distill_smollm2", sweep.recipe(overrides, folder, seed), folder)


def run_recipe(recipe: str, overrides: Sequence[str], folder: Path) -> Outcome:
    """Train `recipe` in a process of its own; a run that was interrupted goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"training {folder}", flush=True)
    command = [sys.executable, "-m", "draftsmith", "train", recipe, *overrides, "--resume"]
    log = folder / "log.txt"
    with log.open("a") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code == 0 and (folder / "final").exists():
        return Outcome(folder, None)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Outcome(folder, lines[-1] if lines else f"exit code {code}")


def _borrow_data(sweep: Sweep, overrides: Sequence[str], folder: Path, seed: int) -> None:
    """Copy what the target wrote or read for a run with the same data and target: it would write the same again."""
    wanted = [override for override in overrides if override.startswith("data.")]
    drawn_by = None if "data.responses=given" in wanted else seed  # the target's reading of given answers has no chance
    note = json.dumps(
        {"target": sweep.target, "chats": sweep.chats, "seed": drawn_by, "data": wanted, "all": sweep.overrides}
    )
    for other in sweep.folder.glob("*/*/seed_*/borrowed_as.json"):
        if other.read_text() == note and (other.parent / "final").exists():
            shutil.copytree(other.parent / "data", folder / "data", dirs_exist_ok=True)
            break
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "borrowed_as.json").write_text(note)


class HeldOut:
    """The target's answers to our evaluation prompts, made once a sweep, and its states over them."""

    def __init__(self, sweep: Sweep, limit: int, max_new_tokens: int, temperature: float):
        self.sampling = Sampling(temperature)
        self.target: Target = load_target(sweep.target, "float32")
        self.settings = {"limit": limit, "max_new_tokens": max_new_tokens, "temperature": temperature}
        self.answers = [Answer(*both) for both in self._answers(sweep.folder / "held_out.json")]
        self._batches: list[ForcedBatch] = []

    def _answers(self, file: Path) -> Iterator[tuple[list[int], list[int]]]:
        prompts = encode(self.target, shipped_evaluation(self.settings["limit"]))  # type: ignore[arg-type]
        known = json.loads(file.read_text()) if file.exists() else {}
        if known.get("settings") != self.settings or known.get("prompts") != prompts:
            use_backend(self.target.model, "auto")
            rows = generate_batched(
                self.target, prompts, max_new_tokens=int(self.settings["max_new_tokens"]), sampling=self.sampling
            )
            tokens = {row.index: row.tokens for row in rows}
            known = {"settings": self.settings, "prompts": prompts, "tokens": [tokens[i] for i in range(len(prompts))]}
            write_json(file, known)
        return zip(known["prompts"], known["tokens"], strict=True)

    def measure(self, run: Path) -> dict[str, Any]:
        """Sums of alpha and of greedy agreement, and positions, prompt by prompt; kept beside the run."""
        file = run / "alpha.json"
        if file.exists() and (known := json.loads(file.read_text()))["settings"] == self.settings:
            return known
        if not self._batches:
            self._batches = list(forced_batches(self.target, self.answers, ()))
        drafter = load_drafter(run / "final", self.target)
        scores = score(self.target, drafter, self._batches, len(self.answers), self.sampling)
        known = {
            "settings": self.settings,
            "alpha": [float(one.alpha.sum()) for one in scores],
            "agreement": [float(one.agreement.sum()) for one in scores],
            "positions": [len(one.alpha) for one in scores],
        }
        write_json(file, known)
        return known


def write_json(file: Path, data: Any) -> None:
    """Write beside the file and rename."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(data))
    os.replace(partial, file)
