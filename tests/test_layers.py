"""Imports point down only, and the command line starts without torch."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "draftsmith"
# Higher stands on lower. Rooms of the same rank do not know each other.
RANKS = {
    "errors": 0,
    "paths": 0,
    "progress": 1,
    "provenance": 1,
    "recipe": 2,
    "recipes": 2,
    "checks": 3,
    "data": 4,
    "models": 4,
    "decode": 5,
    "distill": 6,
    "heads": 7,
    "eval": 8,
    "train": 9,
    "export": 9,
    "cli": 10,
}
ENTRY_POINTS = {"__init__", "__main__"}  # of the root: lazy names and the command line, above everything


def room_of(module: str) -> str:
    """The room of ``draftsmith.<room>…``. A helper beside a root module belongs to it: recipe_io to recipe."""
    name = module.split(".")[1]
    return name if name in RANKS else name.split("_")[0]


def sources() -> list[Path]:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [ROOT.joinpath(*package.split(".")[1:]) for package in packages]
    return sorted(path for folder in folders for path in folder.glob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute module, was it written relatively) for every import, those inside functions included."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, False
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            absolute = ".".join(base + (node.module.split(".") if node.module else []))
            for alias in node.names:
                yield node.lineno, f"{absolute}.{alias.name}", node.level > 0


def violations(source: str, module: str, is_package: bool) -> list[str]:
    """What `source`, standing at `module`, imports from above, from beside, or by an absolute name."""
    own = room_of(module)
    found = []
    for line, target, relative in imported_modules(ast.parse(source), module, is_package):
        if target.split(".")[0] != PACKAGE or target == f"{PACKAGE}.__version__":
            continue
        if not relative:
            found.append(f"{module}:{line}: {target} is imported by its absolute name")
            continue
        room = room_of(target)
        if room not in RANKS:
            found.append(f"{module}:{line}: {target} has no rank")
        elif room != own and RANKS[room] >= RANKS[own]:
            found.append(f"{module}:{line}: {own} must not import {room}")
    return found


def test_imports_point_down_only() -> None:
    found: list[str] = []
    for path in sources():
        if path.parent == ROOT and path.stem in ENTRY_POINTS:
            continue
        module = module_name(path)
        assert room_of(module) in RANKS, f"{path} belongs to no room"
        found += violations(path.read_text(encoding="utf-8"), module, path.stem == "__init__")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "module", "is_package", "expected"),
    [
        ("from ..train import loop", "draftsmith.eval.report", False, "eval must not import train"),
        ("from .. import cli", "draftsmith.heads.medusa", False, "heads must not import cli"),
        (
            "def f():\n    from ..models.cut import cut_layers",
            "draftsmith.data.chats",
            False,
            "data must not import models",
        ),
        ("from ..export import hf", "draftsmith.train.loop", False, "train must not import export"),
        ("from ..heads import build_drafter", "draftsmith.distill", True, "distill must not import"),
        ("from .heads import build_drafter", "draftsmith.recipe", False, "recipe must not import heads"),
        ("import draftsmith.errors", "draftsmith.data.chats", False, "absolute name"),
        ("from ..attic import old", "draftsmith.eval.report", False, "no rank"),
    ],
)
def test_a_wrong_import_is_seen(source: str, module: str, is_package: bool, expected: str) -> None:
    if is_package:  # in a package's __init__ one dot is the package itself, two are its parent
        assert not violations("from .losses import tvd", module, is_package)
    (found,) = violations(source, module, is_package)
    assert expected in found


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from ..decode.verify import verify\nfrom ..errors import BadInput\nimport torch", "draftsmith.heads.medusa"),
        ("from .report import build\nfrom . import html", "draftsmith.eval.plots"),
        ("from .. import __version__", "draftsmith.train.provenance"),
        ("from .recipe_io import load_recipe\nfrom .errors import BadInput", "draftsmith.recipe"),
    ],
)
def test_a_right_import_passes(source: str, module: str) -> None:
    assert violations(source, module, is_package=False) == []


def test_every_folder_of_code_is_packaged() -> None:
    packaged = {path.parent for path in sources()}
    rooms = {path.parent for name in RANKS for path in (ROOT / name).rglob("*.py")}
    assert rooms <= packaged, f"missing from pyproject.toml: {rooms - packaged}"


@pytest.mark.parametrize("module", ["draftsmith", "draftsmith.recipe", "draftsmith.cli"])
def test_starting_up_imports_no_torch(module: str) -> None:
    program = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'datasets'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
