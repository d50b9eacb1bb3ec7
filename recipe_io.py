"""Reading recipes: a shipped name or a file, dotted overrides, and errors that say where. Imports no torch."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from .errors import BadInput, nearest
from .recipe import Recipe
from .recipe_errors import changed_types, dotted, error_lines, shown

_LAUNCHERS = ("draftsmith ", "torchrun ", "deepspeed ", "accelerate ", "python ", "make ")
Key = tuple[str, ...]
At = Callable[[int], str]  # "a.yaml line 3" for 3


def shipped_recipes() -> dict[str, Traversable]:
    """The recipes that come with the package, by name; one in a folder is called ``folder/name``."""

    def walk(folder: Traversable, prefix: str) -> Iterable[tuple[str, Traversable]]:
        for entry in sorted(folder.iterdir(), key=lambda item: item.name):
            if entry.is_dir():
                yield from walk(entry, f"{prefix}{entry.name}/")
            elif entry.name.endswith(".yaml"):
                yield prefix + entry.name.removesuffix(".yaml"), entry

    return dict(walk(resources.files(f"{__package__}.recipes"), ""))


def described_recipes() -> dict[str, str]:
    """What each shipped recipe is for, by name: what its opening comment says first, after the launch command."""
    described = {}
    for name, entry in shipped_recipes().items():
        comment = takewhile(lambda line: line.startswith("#"), entry.read_text("utf-8").splitlines())
        words = [line.strip("# ") for line in comment if not line.strip("# ").startswith(_LAUNCHERS)]
        described[name] = re.split(r"[.:](?: |$)", " ".join(filter(None, words)), maxsplit=1)[0]
    return described


def recipe_text(name_or_path: str) -> tuple[str, str]:
    """The text of a shipped recipe or of a file, and how errors should call it.

    Raises:
        BadInput: there is no such file and no such name, or it cannot be read.
    """
    shipped = shipped_recipes()
    if name_or_path in shipped:
        return shipped[name_or_path].read_text("utf-8"), f"recipe {name_or_path}"
    path = Path(name_or_path).expanduser()
    if not path.exists():
        hint = nearest(name_or_path, shipped) or "; `draftsmith recipes` lists the names"
        raise BadInput(f"recipe {name_or_path!r}: no such file, and no shipped recipe has this name{hint}")
    if path.is_dir():
        raise BadInput(f"recipe {name_or_path!r}: this is a folder, expected a YAML file")
    try:
        return path.read_text("utf-8"), name_or_path
    except (OSError, UnicodeDecodeError) as problem:
        raise BadInput(f"recipe {name_or_path!r}: cannot be read as text ({problem})") from problem


class Written:
    """The data of a recipe and, for every key, where it was written."""

    def __init__(self, text: str, label: str):
        self.label = label
        node, data = parse_yaml(text, lambda line: f"{label} line {line}")
        if not isinstance(data, dict):
            got = "is empty" if data is None else f"holds {shown(data)}"
            raise BadInput(f"{label}: {got}, expected a mapping with the sections {', '.join(Recipe.model_fields)}")
        self.data: dict[str, Any] = data
        self.origins = dict(places_of(node, lambda line: f"{label} line {line}"))

    def origin(self, key: Key) -> str:
        """Where `key` was written, or what holds it; the file's name for the whole."""
        while key and key not in self.origins:
            key = key[:-1]
        return self.origins.get(key, self.label)

    def override(self, text: str) -> None:
        """Apply ``section.key=value``, the value read as YAML; a mapping replaces the whole mapping."""
        name, equals, value_text = text.partition("=")
        key = tuple(name.strip().split("."))
        label = f"override {text!r}"
        if not equals or not all(key):
            raise BadInput(f"{label}: expected section.key=value")
        _, value = parse_yaml(value_text, lambda _: label)
        self.data = _with(self.data, key, value, label)
        self.origins = {old: where for old, where in self.origins.items() if old[: len(key)] != key}
        self.origins[key] = label


def _with(data: Mapping[str, Any], key: Key, value: Any, label: str, above: Key = ()) -> dict[str, Any]:
    """A copy of `data` with `value` at `key`; sections that are missing on the way are made."""
    first, rest = key[0], key[1:]
    if not rest:
        return {**data, first: value}
    inner = {} if data.get(first) is None else data[first]
    if not isinstance(inner, Mapping):
        raise BadInput(
            f"{label}: {dotted((*above, first))} is {shown(inner)}, expected a mapping to set {rest[0]!r} in"
        )
    return {**data, first: _with(inner, rest, value, label, (*above, first))}


def parse_yaml(text: str, at: At) -> tuple[yaml.Node | None, Any]:
    """The node tree and the data of a YAML text.

    Args:
        text: one document.
        at: what errors call a line, counted from 1.

    Raises:
        BadInput: not YAML, more than one document, a duplicate key, a tag that would build an object.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        list(places_of(node, at))  # refuses duplicate keys, of which YAML would keep the last
        return node, loader.construct_document(node)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = at(mark.line + 1 if mark else 1)
        raise BadInput(f"{where}: not valid YAML: {problem.problem or problem.context}") from problem
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise BadInput(f"{at(1)}: not valid YAML: {' '.join(str(problem).split())}") from problem


def places_of(root: yaml.Node | None, at: At) -> Iterator[tuple[Key, str]]:
    """Every key of the document and where it is, by `at` of its line. Raises BadInput at a duplicate key."""
    seen: set[int] = set()

    def walk(node: yaml.Node | None, key: Key) -> Iterator[tuple[Key, str]]:
        if id(node) in seen:  # an alias, perhaps to what holds it
            return
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                yield (*key, str(index)), at(item.start_mark.line + 1)
                yield from walk(item, (*key, str(index)))
        elif isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for name, value in node.value:
                if isinstance(name, yaml.ScalarNode) and name.tag != "tag:yaml.org,2002:merge":
                    here = (*key, name.value)
                    if name.value in names:
                        raise BadInput(f"{at(name.start_mark.line + 1)}: {dotted(here)}: this key is given twice")
                    names.add(name.value)
                    yield here, at(name.start_mark.line + 1)
                    yield from walk(value, here)

    return walk(root, ())


def print_warning(line: str) -> None:
    """One line on stderr."""
    print(f"warning: {line}", file=sys.stderr)


def load_recipe(
    name_or_path: str, overrides: Iterable[str] = (), warn: Callable[[str], None] = print_warning
) -> Recipe:
    """Read and validate a recipe.

    Args:
        name_or_path: the name of a shipped recipe, or a YAML file.
        overrides: ``section.key=value``, each value read as YAML; applied in order.
        warn: hears one line for every value that had to be read as another type (``1e-4`` is a string to PyYAML).

    Raises:
        BadInput: with one line for every error, each naming file and line (or override), key, and what was expected.
    """
    written = Written(*recipe_text(name_or_path))
    for override in overrides:
        written.override(override)
    return validate(written, warn)


def validate(written: Written, warn: Callable[[str], None] = print_warning) -> Recipe:
    """The recipe that `written` means; see :func:`load_recipe`."""
    try:
        recipe = Recipe.model_validate(written.data)
    except ValidationError as error:
        raise BadInput("\n".join(error_lines(error, Recipe, written.data, written.origin))) from None
    refused = []
    for key, raw, read in changed_types(written.data, recipe.model_dump()):
        where = f"{written.origin(key)}: {dotted(key)}"
        if isinstance(raw, str):
            warn(f"{where}: {raw!r} is a string to YAML, read as {shown(read)}")
        else:  # `yes` for 1 or 1 for `yes` is a slip, not a spelling
            expected = "true or false" if isinstance(read, bool) else "a number"
            refused.append(f"{where}: got {shown(raw)}, expected {expected}")
    if refused:
        raise BadInput("\n".join(refused))
    return recipe


def resolved_yaml(recipe: Recipe) -> str:
    """The recipe with every default written out; :func:`load_recipe` reads it back to an equal one."""
    data = recipe.model_dump(mode="json")
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None)
