"""Vocabularies: whether two tokenizers are the same, which ids both models score, which ids a draft model may keep."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import BadInput
from .loading import load_tokenizer


def tokenizer_hash(tokenizer: Any) -> str:
    """A sha256 over what decides which ids a text becomes: vocabulary, merges, added tokens, normalizer, pre-tokenizer.

    Padding rows of the embeddings, the chat template, truncation and padding settings do not count.
    """
    content = {"vocabulary": _id_to_token(tokenizer), **_splitting(tokenizer)}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def check_same_tokenizer(target_tokenizer: Any, drafter_tokenizer: Any) -> None:
    """Raise unless the same ids mean the same tokens, by the same merges.

    The sizes of the embeddings are not compared (padding), nor are normalizer and pre-tokenizer: a draft model only
    sees ids that the target's tokenizer made.

    Raises:
        BadInput: says how many ids differ and shows the first one.
    """
    target, drafter = _id_to_token(target_tokenizer), _id_to_token(drafter_tokenizer)
    differing = sorted(i for i in target.keys() | drafter.keys() if target.get(i) != drafter.get(i))
    if differing:
        first = differing[0]
        raise BadInput(
            f"target and drafter have different tokenizers: {len(differing)} of {max(len(target), len(drafter))} ids "
            f"differ, the first is {first}: target {_shown(target, first)}, drafter {_shown(drafter, first)}"
        )
    target_merges, drafter_merges = (_splitting(t).get("merges") for t in (target_tokenizer, drafter_tokenizer))
    if target_merges is not None and drafter_merges is not None and target_merges != drafter_merges:
        pairs = zip(target_merges, drafter_merges, strict=False)
        rank = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(target_merges), len(drafter_merges)))
        raise BadInput(
            f"target and drafter have different tokenizers: the same ids, but other merges from number {rank} on"
        )


def check_saved_tokenizer(folder: str | Path, expected_hash: str | None, target_tokenizer: Any) -> None:
    """Raise unless a drafter saved in `folder` with a tokenizer of `expected_hash` shares the target's tokenizer.

    Nothing is compared where one of them has none. Another normalizer or pre-tokenizer alone is no reason to refuse.

    Raises:
        BadInput: they differ (the line says in what), or the folder's tokenizer is not the recorded one.
    """
    if target_tokenizer is None or expected_hash is None or tokenizer_hash(target_tokenizer) == expected_hash:
        return
    saved = load_tokenizer(str(folder))
    if tokenizer_hash(saved) != expected_hash:
        raise BadInput(f"{folder}: its tokenizer is not the one that its draftsmith.json records")
    _compare(str(folder), target_tokenizer, saved)


def check_model_tokenizer(
    name: str, target_tokenizer: Any, trust_remote_code: bool = False, optional: bool = False
) -> None:
    """Raise unless the model called `name` comes with the target's tokenizer; `optional`: it may come without any.

    Raises:
        BadInput: they differ (the line says in what), or there is none.
    """
    if target_tokenizer is None:
        return
    try:
        tokenizer = load_tokenizer(name, trust_remote_code)
    except BadInput:
        if optional:
            return
        raise
    _compare(name, target_tokenizer, tokenizer)


def _compare(name: str, target_tokenizer: Any, tokenizer: Any) -> None:
    try:
        check_same_tokenizer(target_tokenizer, tokenizer)
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from None


def _shown(tokens: dict[int, str], token_id: int) -> str:
    return repr(tokens[token_id]) if token_id in tokens else "none"


def _id_to_token(tokenizer: Any) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _splitting(tokenizer: Any) -> dict[str, Any]:
    """Merges, normalizer and pre-tokenizer of a fast tokenizer; a slow one is told apart by its class alone."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"class": type(tokenizer).__name__}
    description = json.loads(backend.to_str())
    # Merges are pairs in newer files and "left right" strings in older ones.
    merges = [m.split(" ") if isinstance(m, str) else m for m in description["model"].get("merges") or []]
    return {
        "merges": merges,
        "normalizer": description["normalizer"],
        "pre_tokenizer": description["pre_tokenizer"],
        "added": sorted((token["id"], token["content"]) for token in description["added_tokens"]),
    }


def count_tokens(token_lists: Iterable[Sequence[int]], vocab_size: int) -> Int[Tensor, "vocab"]:
    """How often every id occurs in the given token sequences."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for tokens in token_lists:
        counts += torch.bincount(torch.as_tensor(list(tokens), dtype=torch.int64), minlength=vocab_size)
    return counts


def choose_vocabulary(
    counts: Int[Tensor, "vocab"] | Float[Tensor, "vocab"], size: int, always: Iterable[int] = ()
) -> Int[Tensor, "kept"]:
    """The `size` ids that a draft model shall score: `always` (end-of-sequence, special ids), then the most frequent.

    Ties go to the lower id, and so do places that ids seen at least once cannot fill: in merge-based vocabularies lower
    ids are the more frequent ones. ``counts[i]`` says how often id i occurs, see :func:`count_tokens`, or how often
    it is expected to.

    Returns:
        The kept ids in increasing order.

    Raises:
        BadInput: `size` exceeds the vocabulary, or does not even hold `always`.
    """
    forced = sorted({int(i) for i in always if 0 <= int(i) < len(counts)})
    if size > len(counts):
        raise BadInput(f"vocabulary: {size} is more than the {len(counts)} ids there are; leave it out to keep all")
    if len(forced) > size:
        raise BadInput(f"vocabulary: {size} is less than the {len(forced)} special ids that must be kept")
    priority = counts.clone()
    priority[forced] = int(counts.max()) + 1
    order = torch.argsort(priority, descending=True, stable=True)
    return order[:size].sort().values


def d2t(kept_ids: Int[Tensor, "kept"]) -> Int[Tensor, "kept"]:
    """Offsets from draft ids to target ids: ``target id = draft id + d2t[draft id]`` (EAGLE-3's convention)."""
    return kept_ids - torch.arange(len(kept_ids), device=kept_ids.device)


def kept_ids_of(offsets: Int[Tensor, "kept"], vocab_size: int) -> Int[Tensor, "kept"]:
    """The kept ids that :func:`d2t` gave these offsets for. Raises BadInput when they are no cut vocabulary."""
    kept_ids = offsets + torch.arange(len(offsets), device=offsets.device)
    check_kept_ids(kept_ids, vocab_size)
    return kept_ids


def t2d(kept_ids: Int[Tensor, "kept"], vocab_size: int) -> Bool[Tensor, "vocab"]:
    """Which target ids the draft model scores."""
    kept = torch.zeros(vocab_size, dtype=torch.bool, device=kept_ids.device)
    kept[kept_ids] = True
    return kept


def check_kept_ids(kept_ids: Int[Tensor, "kept"], vocab_size: int) -> None:
    """Raise BadInput unless `kept_ids` are increasing ids below `vocab_size`, at least one."""
    increasing = len(kept_ids) > 0 and bool((kept_ids[1:] > kept_ids[:-1]).all())
    if not increasing or int(kept_ids[0]) < 0 or int(kept_ids[-1]) >= vocab_size:
        raise BadInput(f"a cut vocabulary must be increasing ids from 0 to {vocab_size - 1}, without repetition")
