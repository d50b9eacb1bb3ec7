"""Every shipped recipe is valid and says how it is launched."""

from pathlib import Path

import pytest

from draftsmith import recipes
from draftsmith.recipe_io import described_recipes, load_recipe, recipe_text, shipped_recipes

FOLDER = Path(str(recipes.__file__)).parent
FILES = sorted(FOLDER.rglob("*.yaml"))


def test_every_file_is_shipped_under_its_name():
    assert set(shipped_recipes()) == {str(file.relative_to(FOLDER).with_suffix("")) for file in FILES}
    assert "distill_smollm2" in shipped_recipes()


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_shipped_recipe_is_valid_without_a_warning(name):
    said: list[str] = []
    recipe = load_recipe(name, warn=said.append)
    assert not said
    assert recipe.output == f"runs/{name}"


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_shipped_recipe_opens_with_its_launch_command(name):
    text, _ = recipe_text(name)
    assert text.splitlines()[0].startswith(f"# draftsmith train {name}")
    assert described_recipes()[name], "it says in a sentence what it is for"
