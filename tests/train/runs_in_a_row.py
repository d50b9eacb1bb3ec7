"""Executed under torchrun: trains the recipes of a JSON file one after the other, in the same processes."""

import json
import sys
from pathlib import Path

from accelerate.state import AcceleratorState

from draftsmith.recipe import Recipe
from draftsmith.train.engine import Engine
from draftsmith.train.run import train


def leave_the_group_alone(engine: Engine) -> None:
    """In place of `Engine.close`: the next run goes on with the group, which DeepSpeed cannot make twice."""
    engine.model = None
    AcceleratorState._reset_state(reset_partial_state=True)


if __name__ == "__main__":
    recipes = json.loads(Path(sys.argv[1]).read_text())
    close, Engine.close = Engine.close, leave_the_group_alone  # type: ignore[method-assign]
    for number, recipe in enumerate(recipes, 1):
        if number == len(recipes):
            Engine.close = close  # type: ignore[method-assign]
        print(f"begins: {recipe['output']}", flush=True)
        train(Recipe.model_validate(recipe), resume=False, command=["draftsmith", "train", "x"])
