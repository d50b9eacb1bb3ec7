"""What the README shows must work: its drafter, its commands, its make targets, and every key of a recipe."""

import inspect
import re
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import pytest
import torch
import typer
import yaml
from pydantic import BaseModel

from draftsmith.cli import app
from draftsmith.decode.length_names import MOST, POLICIES
from draftsmith.decode.lengths import AutoLength, ConfidenceLength, HeuristicLength
from draftsmith.recipe import Recipe
from draftsmith.recipe_io import load_recipe, shipped_recipes

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def commands() -> list[list[str]]:
    """Every `draftsmith VERB …` of the shell blocks, split at spaces, comments dropped."""
    lines = (line.split("#")[0].split() for text in blocks("bash") for line in text.splitlines())
    return [line[line.index("draftsmith") + 1 :] for line in lines if "draftsmith" in line]


def section_keys(schema: type[BaseModel]) -> set[str]:
    """The keys of a section and of the sections inside it."""
    keys = set(schema.model_fields)
    waiting: list[Any] = [field.annotation for field in schema.model_fields.values()]
    while waiting:
        annotation = waiting.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            keys |= section_keys(annotation)
        elif get_origin(annotation) is not None or isinstance(annotation, UnionType):
            waiting += [argument for argument in get_args(annotation) if argument is not annotation]
    return keys


def test_the_readme_drafter_is_lossless_and_gets_tokens_accepted(tiny_llama: Any) -> None:
    from draftsmith import speculative_generate
    from draftsmith.decode.draft import Drafter

    (code,) = (text for text in blocks("python") if "class LastFollower" in text)
    names: dict[str, Any] = {}
    exec(code, names)
    drafter = names["LastFollower"]()
    assert isinstance(drafter, Drafter)

    target = tiny_llama(layers=1)
    input_ids = torch.tensor([[3, 9, 4, 9, 4], [7, 1, 0, 0, 0]])
    attention_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    settings: dict[str, Any] = {"attention_mask": attention_mask, "max_new_tokens": 48, "eos_token_id": []}
    plain = speculative_generate(target, None, input_ids, **settings)
    out = speculative_generate(target, drafter, input_ids, **settings)
    assert out.tokens.tolist() == plain.tokens.tolist()
    assert out.stats.accepted > 0  # greedy decoding of a small random model soon goes in circles
    assert out.stats.target_calls < plain.stats.emitted


def test_commands_name_verbs_and_options_that_exist() -> None:
    verbs: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    seen = set()
    for verb, *words in commands():
        assert verb in verbs, verb
        seen.add(verb)
        known = {option for parameter in verbs[verb].params for option in parameter.opts}
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        assert used <= known, (verb, used - known)
    assert {"train", "eval", "export", "generate", "recipes"} <= seen


def test_overrides_are_keys_of_the_recipe() -> None:
    for verb, *words in commands():
        overrides = [word for word in words if re.match(r"[a-z_.]+=", word)]
        if verb == "train":
            load_recipe("distill_smollm2", overrides)


def test_every_key_of_a_recipe_is_explained() -> None:
    explained = set(re.findall(r"`([a-z_]+)[`:]|\b([a-z_]+):", README[README.index("### A recipe") :]))
    names = {name for pair in explained for name in pair}
    assert section_keys(Recipe) - names == set()


def test_the_names_that_decide_draft_tokens_are_explained_with_their_options() -> None:
    made: dict[str, Any] = {"heuristic": HeuristicLength, "confidence": ConfidenceLength, "auto": AutoLength}
    assert set(made) == set(POLICIES)
    for name, options in POLICIES.items():
        (row,) = re.findall(rf"^\| `{name}` \|.*\| (.*) \|$", README, flags=re.MULTILINE)
        shown = dict(re.findall(r"`(\w+)=([\d.]+)`", row))
        defaults = {key: value.default for key, value in inspect.signature(made[name]).parameters.items()}
        assert set(shown) == set(options)
        assert {key: options[key](value) for key, value in shown.items()} == {
            key: defaults[key] or MOST[name] for key in options
        }


def test_the_recipe_shown_is_a_valid_one() -> None:
    (shown,) = blocks("yaml")
    assert Recipe.model_validate(yaml.safe_load(shown)).data.responses == "target"


def test_named_recipes_and_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    assert set(re.findall(r"`make (?:[A-Z]+=\S+ )?([a-z-]+)", README)) <= targets
    assert set(re.findall(r"\bdistill_\w+", README)) <= set(shipped_recipes())


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_opens_with_its_launch_command(path: Path) -> None:
    name = path.relative_to(ROOT / "recipes").with_suffix("").as_posix()
    first, *rest = path.read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(rf"# draftsmith train {name}( \S.*)?", first)
    bare = [line for line in rest if line.strip() and "#" not in line and not re.search(r":$|: \S", line)]
    assert not bare, "neither a key nor a comment"
