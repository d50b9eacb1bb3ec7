"""From what a user calls a drafter to an object that satisfies the protocol."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from ..checks import LOOKUPS
from ..errors import BadInput
from ..models.draft_lm import DraftLM
from ..models.target import Target
from .draft import Drafter
from .draft_model import DraftModel
from .dynamic_tree import DynamicTree
from .jacobi import Jacobi
from .lookahead import Lookahead
from .lookup_first import LookupFirst
from .named import Options, parse_named
from .prompt_lookup import PromptLookup
from .suffix import Suffix
from .suffix_corpus import read_corpus
from .tree import TreeLayout

# Names and the options they take.
WITHOUT_TRAINING: dict[str, Options] = {
    "prompt_lookup": {"max_ngram": int, "min_ngram": int},
    "lookahead": {"window": int, "ngram": int, "candidates": int},  # arXiv:2402.02057
    "jacobi": {"pad_id": int},  # arXiv:2305.10427
    "suffix": {"max_match": int, "min_match": int, "corpus": str},  # after arXiv:2311.08252
}


# By the kind of a tree: how a drafter that has such branches is given it, and what one drafts that has none.
_TREES = {
    TreeLayout: ("set_tree", "chains only: it takes no tree"),
    DynamicTree: ("set_dynamic_tree", "no trees by its confidence"),
}


def lacks_branches(drafter: Any, tree: TreeLayout | DynamicTree | None) -> str | None:
    """What a drafter that cannot draft `tree` drafts instead, in words; None: it can, or there is no tree."""
    if tree is None:
        return None
    setter, instead = _TREES[type(tree)]
    return None if hasattr(drafter, setter) else instead


def as_drafter(drafter: Any, target: Target, tree: TreeLayout | DynamicTree | None = None) -> Drafter | None:
    """A drafter from: None (plain decoding), a causal LM, a name from `WITHOUT_TRAINING`, or a drafter.

    Raises:
        BadInput: an unknown name, something that does not propose, or a tree for a drafter that has no branches.
    """
    made = _made(drafter, target)
    if made is None:
        return None
    if (instead := lacks_branches(made, tree)) is not None:
        raise BadInput(f"{type(made).__name__} drafts {instead}")
    for kind, (setter, _) in _TREES.items():
        if (set_shape := getattr(made, setter, None)) is not None:
            set_shape(tree if isinstance(tree, kind) else None)
    return made


def _made(drafter: Any, target: Target) -> Drafter | None:
    if drafter is None:
        return None
    if isinstance(drafter, str):
        return drafter_without_training(drafter, target)
    if isinstance(drafter, PreTrainedModel | DraftLM):
        return DraftModel(drafter, target.vocab_size)
    if isinstance(drafter, Target):
        return DraftModel(drafter.model, target.vocab_size)
    if isinstance(drafter, Drafter):
        return drafter
    raise BadInput(f"{type(drafter).__name__} is no drafter: it lacks start, propose or observe")


def lookup_first(lookup: str, then: Drafter, target: Target | None = None) -> LookupFirst:
    """`then` behind a lookup by name, which drafts wherever it finds something.

    Raises:
        BadInput: no such lookup, a bad option, or a drafter that cannot follow one.
    """
    found = drafter_without_training(lookup, target, LOOKUPS.get(lookup.partition(":")[0]))
    if not isinstance(found, PromptLookup | Suffix):
        raise BadInput(f"{lookup} cannot stand in front of another drafter: {' and '.join(LOOKUPS)} can")
    return LookupFirst(found, then)


def is_without_training(name: str) -> bool:
    """Whether `name` (with options or without) is that of a drafter that needs no training."""
    return name.partition(":")[0] in WITHOUT_TRAINING


def drafter_without_training(
    name: str, target: Target | None = None, defaults: Mapping[str, Any] | None = None
) -> Drafter:
    """A drafter that needs no training, by name, with options after a colon: ``prompt_lookup:max_ngram=4,min_ngram=2``.

    `target` names the padding token that ``jacobi`` begins with (None: id 0), and encodes the corpus of ``suffix``:
    ``suffix:corpus=FILE`` looks up in its texts and chats too. `defaults`: options where the name gives none.

    Raises:
        BadInput: an unknown name or option, or a value out of range.
    """
    kind, options = parse_named(name, WITHOUT_TRAINING, "drafter", more="a model or, without training, ")
    options = {**(defaults or {}), **options}
    match kind:
        case "prompt_lookup":
            return PromptLookup(**options)
        case "lookahead":
            return Lookahead(**options)
        case "jacobi":
            jacobi = Jacobi(**({"pad_id": _pad_id(target)} | options))
            if target is not None and jacobi.pad_id >= target.vocab_size:
                raise BadInput(
                    f"jacobi: pad_id is {jacobi.pad_id}, the target's vocabulary has {target.vocab_size} ids"
                )
            return jacobi
        case _:
            source = options.pop("corpus", None)
            tokenizer = None if target is None else target.tokenizer
            return Suffix(**options, corpus=() if source is None else read_corpus(source, tokenizer))


def _pad_id(target: Target | None) -> int:
    if target is None:
        return 0
    sources = (target.tokenizer, target.model.generation_config, target.model.config.get_text_config())
    known = [getattr(source, "pad_token_id", None) for source in sources] + list(target.eos_token_ids)
    return next((token for token in known if token is not None and 0 <= token < target.vocab_size), 0)
