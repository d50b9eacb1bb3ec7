"""Loading a drafter of any kind from its folder, or by name where it needs no training."""

from pathlib import Path
from typing import Any

import torch

from ..checks import two_in_turn
from ..decode.draft import Drafter
from ..decode.draft_model import DraftModel
from ..decode.drafters import drafter_without_training, is_without_training, lookup_first
from ..decode.packed import use_backend_of
from ..decode.quick import quick_dtype, quickest_weights
from ..errors import BadInput, nearest
from ..models.draft_lm import load_draft_lm
from ..models.folder import read_manifest
from ..models.loading import check_dtype
from ..models.target import Target, as_target
from .eagle import KIND as EAGLE
from .eagle import load_eagle
from .exit_training import KIND as EARLY_EXIT
from .exit_training import load_exit
from .layer_skip import KIND as LAYER_SKIP
from .layer_skip import load_layer_skip
from .lookahead_tokens import KIND as LOOKAHEAD_TOKENS
from .lookahead_tokens import load_lookahead_tokens
from .make import KINDS as HEADS
from .make import load_heads

KINDS = ("model", EAGLE, EARLY_EXIT, LAYER_SKIP, LOOKAHEAD_TOKENS, *HEADS)


def load_drafter(folder_or_name: str | Path, target: Any, dtype: str | torch.dtype = "target") -> Drafter:
    """A drafter for `target` (a ``Target`` or a transformers causal LM).

    `folder_or_name` is a checkpoint (a run's ``final/``), any causal LM (a folder or a hub id) with the target's tokenizer,
    the name of a drafter that needs no training, or a lookup and another drafter, ``prompt_lookup:min_ngram=3+FOLDER``: a
    :class:`LookupFirst`. A draft model is loaded in `dtype`: the target's (``"target"``), one by
    name, or ``"auto"``: bfloat16 beside a target in float32 on a CPU whose passes over one token are faster in it, else the
    target's. No rule depends on it: draft tokens are drawn from the probabilities that the rules are given.

    Raises:
        BadInput: not found, trained for another target, another tokenizer, a kind that is not known, or a `dtype` for a kind
            that computes in the target's; the line says which.
    """
    target = as_target(target)
    name = str(folder_or_name)
    if (both := two_in_turn(name)) is not None:
        lookup, other = both
        return lookup_first(lookup, load_drafter(other, target, dtype), target)
    if is_without_training(name):
        return drafter_without_training(name, target)
    manifest = read_manifest(Path(name).expanduser())
    kind = "model" if manifest is None else manifest["kind"]
    if kind != "model":
        _refuse(name, dtype, target)
    match kind:
        case "model":
            return DraftModel(load_draft_lm(name, target, _resolved(dtype, target)), target.vocab_size)
        case _ if kind == EAGLE:
            return load_eagle(name, target)
        case _ if kind == EARLY_EXIT:
            return load_exit(name, target)
        case _ if kind == LAYER_SKIP:
            return load_layer_skip(name, target)
        case _ if kind == LOOKAHEAD_TOKENS:
            return load_lookahead_tokens(name, target)
        case _ if kind in HEADS:
            return load_heads(name, target)
        case _:
            raise BadInput(f"{name}: a drafter of kind {kind!r} is not known here{nearest(kind, KINDS)}")


def load_served(name: str | Path, target: Any, dtype: str | torch.dtype = "target") -> Drafter:
    """:func:`load_drafter`, with its products on the backend that `target` uses: what serves and is measured.

    `dtype` ``"auto"`` also lets a drafter of any kind keep weights of its own in float16 for these products, in the place of
    another dtype, where this CPU is fastest with that; all else stays in float32.
    """
    target = as_target(target)
    half = dtype == "auto" and quickest_weights(target.dtype, target.device) is torch.float16
    drafter = load_drafter(name, target, "target" if half else dtype)
    module = getattr(drafter, "module", None)
    if module is not None:
        use_backend_of(target.model, module, half=half)
    return drafter


def _resolved(dtype: str | torch.dtype, target: Target) -> torch.dtype:
    if dtype == "target":
        return target.dtype
    if dtype == "auto":
        return quick_dtype(target.dtype, target.device, rows=1)
    named = check_dtype(dtype)
    assert isinstance(named, torch.dtype)
    return named


def _refuse(name: str, dtype: str | torch.dtype, target: Target) -> None:
    if dtype != "auto" and _resolved(dtype, target) is not target.dtype:
        kept = str(target.dtype).removeprefix("torch.")
        raise BadInput(f"{name}: computes in the target's dtype, {kept}; only a draft model may have another")
