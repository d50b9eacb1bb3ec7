"""From what a user calls a drafter to an object that satisfies the protocol."""

from typing import Any

from transformers import PreTrainedModel

from ..errors import BadInput, nearest
from ..models.draft_lm import DraftLM
from ..models.target import Target
from .draft import Drafter
from .draft_model import DraftModel
from .prompt_lookup import PromptLookup
from .tree import TreeLayout

WITHOUT_TRAINING = ("prompt_lookup",)


def as_drafter(drafter: Any, target: Target, layout: TreeLayout | None = None) -> Drafter | None:
    """A drafter from: None (plain decoding), a causal LM, a name from `WITHOUT_TRAINING`, or a drafter.

    Raises:
        BadInput: an unknown name, something that does not propose, or a tree for a drafter that has no branches.
    """
    made = _made(drafter, target)
    if made is None:
        return None
    set_tree = getattr(made, "set_tree", None)
    if set_tree is not None:
        set_tree(layout)
    elif layout is not None:
        raise BadInput(f"{type(made).__name__} drafts chains only: it takes no tree")
    return made


def _made(drafter: Any, target: Target) -> Drafter | None:
    if drafter is None:
        return None
    if isinstance(drafter, str):
        return drafter_without_training(drafter)
    if isinstance(drafter, PreTrainedModel | DraftLM):
        return DraftModel(drafter, target.vocab_size)
    if isinstance(drafter, Target):
        return DraftModel(drafter.model, target.vocab_size)
    if isinstance(drafter, Drafter):
        return drafter
    raise BadInput(f"{type(drafter).__name__} is no drafter: it lacks start, propose or observe")


def drafter_without_training(name: str) -> Drafter:
    """A drafter that needs no training, by name."""
    match name:
        case "prompt_lookup":
            return PromptLookup()
        case _:
            raise BadInput(
                f"unknown drafter {name!r}{nearest(name, WITHOUT_TRAINING)}; without training there are: "
                + ", ".join(WITHOUT_TRAINING)
            )
