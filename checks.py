"""What can be checked before any model is loaded: that files are there and folders can be written. Imports no torch."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from .errors import BadInput, nearest
from .recipe import Recipe

_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".txt", ".gguf", ".yaml", ".safetensors")
WITHOUT_TRAINING = ("prompt_lookup", "lookahead", "jacobi", "suffix")  # drafters by name
# What can stand in front of another drafter, and with which options if none are given: a single token that occurred before
# says less than a trained drafter knows.
LOOKUPS: Mapping[str, Mapping[str, int]] = {
    "prompt_lookup": {"min_ngram": 2, "max_ngram": 8},
    "suffix": {"min_match": 2},
}


def looks_local(name: str) -> bool:
    """True for what can only be a path on this machine: neither ``name`` nor ``owner/name`` on a hub."""
    return name.startswith(("/", ".", "~")) or name.endswith(_FILE_SUFFIXES) or name.count("/") > 1


def check_exists(name: str, what: str) -> None:
    """Raise BadInput when `name` looks like a local path and is not there. `what` says where it was given."""
    path = Path(name).expanduser()
    if not looks_local(name) or path.exists():
        return
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    kind = "file" if name.endswith(_FILE_SUFFIXES) else "file or folder"
    raise BadInput(f"{what}: no such {kind}: {name}{nearest(path.name, siblings)}")


def two_in_turn(name: str) -> tuple[str, str] | None:
    """The two drafters of ``LOOKUP+OTHER``, such as ``prompt_lookup:min_ngram=3+FOLDER``; None: it names one alone.

    Raises BadInput where nothing follows the ``+``.
    """
    lookup, plus, other = name.partition("+")
    if not plus or lookup.partition(":")[0] not in LOOKUPS:
        return None
    corpus = name.partition("corpus=")[2].split(",")[0]
    if "+" in corpus and Path(corpus).expanduser().exists():
        return None
    if not other:
        raise BadInput(f"{name}: expected a drafter after the +, a folder or a hub id")
    return lookup, other


def check_drafter(name: str, what: str) -> None:
    """:func:`check_exists` for a drafter: of one that needs no training only the corpus that it names can be missing."""
    if (both := two_in_turn(name)) is not None:
        for one in both:
            check_drafter(one, what)
        return
    kind, _, options = name.partition(":")
    if kind not in WITHOUT_TRAINING:
        check_exists(name, what)
        return
    for option in options.split(","):
        key, _, value = (part.strip() for part in option.partition("="))
        if key == "corpus":
            check_exists(value, f"{what}: corpus")


def check_writable(folder: Path, what: str) -> None:
    """Make `folder` and prove that it can be written in. Raises BadInput when it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise BadInput(f"{what}: cannot write to {folder} ({problem.strerror or problem})") from problem


def check_new_folder(folder: Path, what: str) -> None:
    """Raise BadInput unless `folder` is absent or empty and can be made."""
    if folder.is_dir() and any(folder.iterdir()):
        raise BadInput(f"{what}: {folder} is not empty, expected a new folder")
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{what}: {folder} is a file, expected a new folder")
    check_writable(folder.parent, what)


def check_recipe_files(recipe: Recipe) -> None:
    """Raise BadInput when a file or folder that the recipe names is missing."""
    check_exists(recipe.target.model, "target.model")
    if model := getattr(recipe.drafter, "model", None):
        check_exists(model, "drafter.model")
    for source in recipe.data.sources:
        check_exists(source, "data.prompts")
    check_exists(recipe.evaluate.prompts, "evaluate.prompts")
