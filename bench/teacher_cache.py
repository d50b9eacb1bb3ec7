"""What an epoch costs with the target's outputs cached on disk, against one that asks the target at every step.

    python bench/teacher_cache.py                                 SmolLM2 and the demo's drafter, which the mark is for
    python bench/teacher_cache.py --override drafter.vocabulary=null    its full vocabulary: the heads outweigh the target
    python bench/teacher_cache.py --limit 24 --rounds 1           a quick look

Steps of all forms take turns: reading the batch and what is cached for it, forward, backward, optimizer. The answers
are our own prompts put to another use: what they say costs nothing, only their number of tokens.
"""

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _common import DEMO_TARGET, Bound, Figure, Timings, arguments, begin, print_figures, print_table, synchronise

from draftsmith.data.sources import read_examples
from draftsmith.heads.build import build_trainable
from draftsmith.models.target import Target, load_target
from draftsmith.recipe import Recipe
from draftsmith.recipe_io import load_recipe
from draftsmith.train.data import TrainingData, prepare_data, served_sampling
from draftsmith.train.engine import Engine, start_engine
from draftsmith.train.steps import build_steps

FORMS = ("none", "hidden", "topk")
REQUIRED = 0.35


def write_chats(folder: Path, number: int) -> Path:
    """Chats whose answers are the prompts that follow."""
    texts = [example.turns[0] for example in read_examples("shipped", limit=number + 1)]
    path = folder / "chats.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for question, answer in pairwise(texts):
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


def recipe_for(form: str, chats: Path, folder: Path, options: argparse.Namespace) -> Recipe:
    """The demo's recipe on these chats under forward KL, with this cache."""
    overrides = [
        f"target.model={options.target}",
        f"data.prompts={chats}",
        "data.responses=given",
        f"data.cache={form}",
        "objective.loss=forward_kl",
        f"engine.threads={options.threads}",
        f"output={folder}",
    ]
    return load_recipe("distill_smollm2", [*overrides, *options.override])


def prepare(
    recipes: dict[str, Recipe], target: Target, folder: Path
) -> tuple[dict[str, TrainingData], dict[str, float]]:
    """The data of every form, and the seconds that its cache took to write."""
    data, seconds = {}, {}
    for form, recipe in recipes.items():
        start = time.perf_counter()
        data[form] = prepare_data(recipe, target, folder / form, None)
        seconds[form] = time.perf_counter() - start
    return data, {form: passed - seconds["none"] for form, passed in seconds.items()}


def epochs(recipes: dict[str, Recipe], data: dict[str, TrainingData], target: Target, engine: Engine, rounds: int):
    """Timings of whole epochs, one a round; the steps of the forms take turns. Also the steps an epoch has."""
    recipe = recipes["none"]
    served = served_sampling(recipe.evaluate.sampling)
    built = build_trainable(recipe.drafter, recipe.objective, target, data["none"].encoded, served)
    objective = built.objective.to(engine.device).train()
    settings = recipe.optimizer
    engine.prepare(objective, betas=settings.betas, epsilon=settings.epsilon, weight_decay=settings.weight_decay)
    sources: dict[str, Any] = {form: build_steps(recipes[form], target, data[form], engine, built) for form in recipes}
    number = sources["none"].batches.num_steps(1)

    def step(form: str) -> int:
        batches = next(sources[form])
        total = sum(batch.supervised for batch in batches)
        for i, batch in enumerate(batches):
            engine.forward_backward(batch, 1 / total, last=i == len(batches) - 1)
        engine.step(settings.learning_rate)
        return sum(batch.tokens for batch in batches)

    timings = Timings()
    for form in recipes:
        step(form)
    for _ in range(rounds):
        seconds, tokens = dict.fromkeys(recipes, 0.0), dict.fromkeys(recipes, 0)
        for _ in range(number):
            for form in recipes:
                synchronise()
                start = time.perf_counter()
                tokens[form] += step(form)
                synchronise()
                seconds[form] += time.perf_counter() - start
        for form in recipes:
            timings.add(form, seconds[form], tokens[form])
    return timings, number


def main() -> None:
    parser = arguments(__doc__, rounds=2, limit=120)
    parser.add_argument("--target", default=DEMO_TARGET, help="hub id, folder or .gguf")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="of distill_smollm2")
    options = parser.parse_args()
    begin(options)
    torch.manual_seed(0)
    engine = start_engine(threads=options.threads)
    target = load_target(options.target, "float32")
    with tempfile.TemporaryDirectory(prefix="draftsmith-bench-") as scratch:
        folder = Path(scratch)
        chats = write_chats(folder, options.limit)
        recipes = {form: recipe_for(form, chats, folder, options) for form in FORMS}
        data, writing = prepare(recipes, target, folder)
        timings, number = epochs(recipes, data, target, engine, options.rounds)
    encoded = data["none"].encoded
    what = f"{len(encoded)} examples, {encoded.num_supervised} labels, {number} steps an epoch, {options.rounds} rounds"
    rows = [
        (
            form,
            f"{timings.seconds(form):.1f}",
            f"{timings.rate(form):.0f}",
            f"{writing[form]:.1f}" if writing[form] else "",
        )
        for form in FORMS
    ]
    print_table(f"{options.target}: {what}", ["cache", "s an epoch", "tokens/s", "s to write, once"], rows)
    figures = [
        Figure(f"epoch with cache: {form} / epoch without", 1 / timings.ratio(form, "none"), Bound(REQUIRED, False))
        for form in FORMS[1:]
    ]
    print_figures("after the first epoch", figures)


if __name__ == "__main__":
    main()
