"""Training every kind of drafter for the same minutes on the same answers, which the target writes once."""

import json
import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from _sweep import Outcome, run_recipe

from draftsmith.data.store import Store
from draftsmith.data.turns import role_surroundings
from draftsmith.decode.packed import unpack, use_backend
from draftsmith.heads.build import cached_layers
from draftsmith.models.target import Target
from draftsmith.recipe import Recipe
from draftsmith.recipe_io import load_recipe
from draftsmith.train.data import prepare_data
from draftsmith.train.dry_run import count_parameters, read_config
from draftsmith.train.logs import read_metrics

# By row of the table: the shipped recipe, or the drafter that needs no training. Recipes of kinds that read the same of the
# target follow each other.
TRAINED = {
    "model": "distill_smollm2",
    "blockwise": "blockwise_smollm2",
    "medusa": "medusa_smollm2",
    "medusa2": "medusa2_smollm2",
    "hydra": "hydra_smollm2",
    "eagle": "eagle_smollm2",
    "eagle 3": "eagle3_smollm2",
    "early_exit": "early_exit_smollm2",
    "layer_skip": "layer_skip_smollm2",
    "lookahead_tokens": "lookahead_tokens_smollm2",
}
UNTRAINED = {"prompt_lookup": 3}  # and draft tokens a step
# Trained kinds once more, where a lookup finds nothing: the kind, and draft tokens a step (a lookup is right many times over).
LOOKUP = "prompt_lookup"
AFTER_A_LOOKUP = {f"{LOOKUP} + {kind}": (kind, 5) for kind in ("medusa", "hydra", "eagle 3")}
NAMES = (*TRAINED, *UNTRAINED, *AFTER_A_LOOKUP)
_ANSWERED_BY = "medusa_smollm2"  # the recipe whose data section says how prompts and answers are written


class Answers(NamedTuple):
    """What all kinds learn on."""

    file: Path  # chats
    number: int
    tokens: int  # of the answers


class Trained(NamedTuple):
    """What it took to train a kind."""

    parameters: int
    minutes: float  # in optimizer steps, or in a search
    steps: int
    tokens: int  # of texts, repeated ones counted again


@dataclass(frozen=True)
class Comparison:
    """What all kinds have in common."""

    folder: Path
    target: str
    minutes: float  # of training, each
    answer_minutes: float
    threads: int
    seed: int
    overrides: tuple[str, ...] = ()

    def run_folder(self, name: str) -> Path:
        """Where a kind's run lives."""
        return self.folder / name.replace(" ", "_")

    def recipe(self, name: str) -> Recipe:
        """A kind's recipe."""
        return load_recipe(TRAINED[name], self._changes(name, self.answers_file))

    @property
    def answers_file(self) -> Path:
        """Where the chats are."""
        return self.folder / "answers.jsonl"

    @cached_property
    def _config(self) -> Any:
        return read_config(self.target, trust_remote_code=False)

    def write_answers(self, target: Target) -> Answers:
        """Have the target write prompts and answers, once, and put them down as chats; go on where it was stopped."""
        file = self.answers_file
        if not file.exists():
            changes = ["data.cache=none", f"seed={self.seed}", f"engine.minutes={self.answer_minutes}"]
            recipe = load_recipe(_ANSWERED_BY, [f"target.model={self.target}", *changes, *self._overrides_of(None)])
            use_backend(target.model, "auto")
            prepare_data(recipe, target, self.folder, 60 * self.answer_minutes)
            unpack(target.model)
            _write_chats(target, Store(self.folder / "answers"), file)
        store = Store(self.folder / "answers")
        tokens = sum(len(sequence.input_ids) - sequence.prompt_length for sequence in store)
        return Answers(file, len(store), tokens)

    def train(self, name: str) -> Outcome:
        """Train a kind, unless it is trained; one that was interrupted goes on."""
        if name in AFTER_A_LOOKUP:
            return self.train(AFTER_A_LOOKUP[name][0])
        folder = self.run_folder(name)
        if (folder / "final").exists():
            return Outcome(folder, None)
        kept = self.folder / "caches" / self._what_is_read(name)
        if kept.exists() and not (folder / "data").exists():
            shutil.copytree(kept, folder / "data", copy_function=os.link)
        outcome = run_recipe(TRAINED[name], self._changes(name, self.answers_file), folder)
        if outcome.problem is None and (folder / "data").exists() and not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            shutil.copytree(folder / "data", kept, copy_function=os.link)
        return outcome

    def drafter(self, name: str) -> tuple[str, int]:
        """How a trained kind is named to be loaded, and draft tokens a step."""
        if name in AFTER_A_LOOKUP:
            kind, num_tokens = AFTER_A_LOOKUP[name]
            return f"{LOOKUP}+{self.drafter(kind)[0]}", num_tokens
        return str(self.run_folder(name) / "final"), self.recipe(name).evaluate.num_speculative_tokens

    def spent(self, name: str) -> Trained:
        """What a finished run took, by its own log."""
        folder = self.run_folder(name)
        records = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        steps = [record for record in records if record["kind"] == "train"]
        seconds = sum(record["seconds"] for record in steps)
        if not steps and (folder / "budget.json").exists():  # trials of a search are not timed one by one
            seconds = json.loads((folder / "budget.json").read_text())["seconds"] or 0.0
        return Trained(
            count_parameters(self.recipe(name), self._config).trained,
            seconds / 60,
            max((record["step"] for record in records if record["kind"] in ("train", "trial")), default=0),
            sum(record["tokens"] for record in steps),
        )

    def _changes(self, name: str, chats: Path) -> list[str]:
        """The overrides of a kind's recipe. The minutes are all for training: reading the target's states, however long it
        takes, is within a share of its own.
        """
        training, evaluation = 0.1, 0.001
        shares = [f"engine.data_share={1 - training - evaluation}", f"engine.evaluate_share={evaluation}"]
        budget = [f"engine.minutes={self.minutes / training}", *shares]
        measured_later = ["evaluate.limit=2", "evaluate.every=1000000", "evaluate.max_new_tokens=8"]
        data = [f"data.prompts=[{chats}]", "data.responses=given"]
        run = [f"engine.threads={self.threads}", f"seed={self.seed}", f"output={self.run_folder(name)}"]
        return [f"target.model={self.target}", *data, *budget, *measured_later, *run, *self._overrides_of(name)]

    def _overrides_of(self, name: str | None) -> list[str]:
        """Those of every recipe, and those that begin with the kind's name."""
        found = []
        for override in self.overrides:
            kind, colon, rest = override.partition(":")
            if not (colon and kind in NAMES):
                found.append(override)
            elif kind == name:
                found.append(rest)
        return found

    def _what_is_read(self, name: str) -> str:
        """Of the target's states, as a folder's name: kinds that read the same share a cache."""
        recipe = self.recipe(name)
        layers = cached_layers(recipe.drafter, self._config.num_hidden_layers)
        return recipe.data.cache if layers is None else "states_" + "_".join(map(str, layers))


def _write_chats(target: Target, store: Store, file: Path) -> None:
    """The store's conversations of one turn as chats with an answer; an answer's end is the template's."""
    assert target.tokenizer is not None
    before, after = role_surroundings(target.tokenizer, "user")
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w", encoding="utf-8") as lines:
        for number, sequence in enumerate(store):
            asked = str(target.tokenizer.decode(sequence.input_ids[: sequence.prompt_length]))
            ids = sequence.input_ids[sequence.prompt_length :]
            said = str(target.tokenizer.decode(ids, skip_special_tokens=True))
            asked = asked.removeprefix(before.rstrip(" ")).split(after)[0].strip()
            if asked and said.strip():
                messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
                lines.write(json.dumps({"id": number, "messages": messages}, ensure_ascii=False) + "\n")
    os.replace(partial, file)
