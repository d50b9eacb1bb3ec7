"""draftsmith's distillation as a contender of bench/trl_gkd.py: the loop's own steps, on the batches that are given."""

import contextlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _turns import Clock, Referee, Stopped, read_batches

from draftsmith.data.batches import Step, TokenBatches
from draftsmith.data.chats import Encoded, encode_response
from draftsmith.data.encoded_set import EncodedSet
from draftsmith.data.packing import pack
from draftsmith.data.store import Store
from draftsmith.distill.rollouts import DrafterAnswers, Rollout, RolloutBuffer, Source
from draftsmith.distill.steps import CachedTeacher, DistillSteps, RolloutSteps
from draftsmith.distill.teacher_cache import cache_teacher
from draftsmith.heads.build import build_trainable
from draftsmith.models.target import load_target
from draftsmith.recipe import Recipe
from draftsmith.recipe_io import load_recipe
from draftsmith.train.data import served_sampling
from draftsmith.train.engine import start_engine
from draftsmith.train.interrupt import StopRequest
from draftsmith.train.loop import accumulate


class GivenBatches(TokenBatches):
    """The batches that all contenders take, instead of what fits into a budget of tokens in an order of our own."""

    def __init__(self, encoded: EncodedSet, size: int, length: int) -> None:
        super().__init__(encoded, size * length, length=length)
        self.size, self.taken = size, 0

    def __next__(self) -> Step:
        first = self.taken % len(self.encoded)
        self.taken += self.size
        numbers = list(range(first, first + self.size))
        packed = pack([self.encoded[i] for i in numbers], self.size * self.length, numbers)
        tokens = sum(int(self.lengths[i]) for i in numbers)
        return Step([packed], packed.num_supervised, tokens, numbers, numbers, 0)


class GivenPrompts(RolloutBuffer):
    """Every step answers the prompts of its batch."""

    def __init__(self, source: Source, batches: list[list[list[int]]]) -> None:
        prompts = [prompt for batch in batches for prompt in batch]
        super().__init__(source, prompts, tokens_per_step=1, staleness=0, size=len(prompts), replay=False, seed=0)
        self.batches = batches

    def take(self, step: int) -> list[Rollout]:
        return self.source(self.batches[step % len(self.batches)], step, step)


def make_recipe(settings: dict[str, Any]) -> Recipe:
    overrides = [
        f"target.model={settings['target']}",
        f"drafter={{kind: model, model: {settings['drafter']}}}",
        "objective.loss=forward_kl",
        f"data.max_length={settings['length']}",
        f"engine.threads={settings['threads']}",
        f"optimizer.betas={settings['betas']}",
        f"output={settings['scratch']}",
    ]
    if settings["rollouts"]:
        rollouts = f"{{source: drafter, fraction: 1.0, max_new_tokens: {settings['max_new_tokens']}}}"
        overrides.append(f"objective.rollouts={rollouts}")
    return load_recipe("distill_smollm2", overrides)


def examples_of(batches: list[list[dict[str, Any]]]) -> list[Encoded]:
    return [encode_response(each["input_ids"], each["prompt_length"]) for batch in batches for each in batch]


def main() -> None:
    settings = json.loads(sys.argv[1])
    referee = Referee()
    recipe = make_recipe(settings)
    engine = start_engine(threads=settings["threads"], clip=recipe.optimizer.clip)
    torch.manual_seed(0)
    target = load_target(recipe.target.model, "float32")
    batches = read_batches(settings["data"], settings["batch_size"])
    encoded = EncodedSet.collect(enumerate(examples_of(batches)))
    served = served_sampling(recipe.evaluate.sampling)
    built = build_trainable(recipe.drafter, recipe.objective, target, encoded, served)
    objective: Any = built.objective.to(engine.device).train()
    engine.prepare(objective, betas=recipe.optimizer.betas, epsilon=recipe.optimizer.epsilon, weight_decay=0.0)
    start, store = time.perf_counter(), None
    if settings["cache"]:
        store = cache_teacher(target, encoded, "hidden", 1, Path(settings["scratch"]) / "cache", "given")
    caching = time.perf_counter() - start
    steps = make_steps(
        settings, recipe, encoded, engine.device, store, batches, partial(DrafterAnswers, objective.lm, target)
    )
    referee.say(seconds_to_cache=caching)
    with contextlib.suppress(Stopped):
        while True:
            number = referee.wait()
            clock = Clock()
            objective.begin_step(number, sys.maxsize)
            totals = accumulate(engine, next(steps), StopRequest())
            engine.step(settings["learning_rate"])
            referee.say(**clock.read(), supervised=totals.supervised, loss=totals.loss)


def make_steps(
    settings: dict[str, Any],
    recipe: Recipe,
    encoded: EncodedSet,
    device: torch.device,
    store: Store | None,
    batches: list[list[dict[str, Any]]],
    answers: partial[DrafterAnswers],
) -> DistillSteps | RolloutSteps:
    """The run's steps, as ``draftsmith.train.steps`` makes them but for who is in a batch."""
    rollouts = recipe.objective.rollouts
    if rollouts is None:
        given = GivenBatches(encoded, settings["batch_size"], settings["length"])
        return DistillSteps(given, device, None if store is None else CachedTeacher(store, encoded))
    source = answers(served_sampling(rollouts.sampling), rollouts.max_new_tokens, recipe.data.generation_batch)
    prompts = [[each["input_ids"][: each["prompt_length"]] for each in batch] for batch in batches]
    whole = settings["batch_size"] * settings["length"]
    buffer = GivenPrompts(source, prompts)
    return RolloutSteps(None, buffer, length=settings["length"], tokens_per_forward=whole, device=device)


if __name__ == "__main__":
    main()
