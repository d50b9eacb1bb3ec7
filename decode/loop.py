"""Draft, verify, keep: the decoding loop. Plain decoding is the same loop without a drafter."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from ..models.target import Target, as_target
from .confidence import set_confidence
from .drafters import as_drafter
from .dynamic_tree import as_tree
from .lengths import LengthPolicy, as_length_policy, stop_by
from .prompts import Prompts, right_padded
from .sampling import Sampling
from .stats import RowStats, Stats
from .step import Decoding, Ends, Step
from .stop import StopStrings
from .streams import RowStreams, row_seeds
from .tree import TreeLayout


class SpeculativeOutput(NamedTuple):
    """The result of decoding a batch."""

    tokens: Int[Tensor, "batch length"]  # prompt and new tokens, right-padded
    lengths: Int[Tensor, "batch"]
    stats: Stats


def speculative_generate(
    target: Any,
    drafter: Any,
    input_ids: Int[Tensor, "batch prompt"],
    attention_mask: Int[Tensor, "batch prompt"] | None = None,
    max_new_tokens: int = 64,
    num_speculative_tokens: int | str | LengthPolicy = 4,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    rule: str = "lossless",
    rule_options: dict[str, Any] | None = None,
    tree: Any = None,
    seed: int | Sequence[int] = 0,
    repetition_penalty: float = 1.0,
    stop_strings: Sequence[str] | None = None,
) -> SpeculativeOutput:
    """Decode with `drafter` proposing and `target` verifying (arXiv:2211.17192, 2302.01318).

    Args:
        target: what ``load_target`` returned, or a transformers causal LM.
        drafter: what ``load_drafter`` returned, a transformers causal LM with the same tokenizer, the name of a drafter
            that needs no training, any object that satisfies the ``Drafter`` protocol, or None for plain decoding.
        input_ids: prompts; padding (on either side) is where `attention_mask` is 0. An empty row starts from BOS.
        max_new_tokens: tokens to emit at most, per row. Rows also end at the target's context limit.
        num_speculative_tokens: draft tokens a step (a tree has its own depth), or what decides them for each row and
            step: ``"heuristic"``, ``"confidence"``, ``"auto"`` (with options, ``"confidence:threshold=0.3"``), or a
            ``LengthPolicy``. ``"auto"`` first measures the pair, once, which takes a second or more. What it measured
            decides which numbers a sample is drawn with: give an ``AutoLength`` its costs to reproduce one elsewhere.
        temperature, top_k, top_p, min_p, repetition_penalty: the sampling transforms; temperature 0 is greedy.
        eos_token_id: ids that end a row; None: the target's own; an empty list: none.
        rule: the verification rule; with a tree, ``lossless`` means ``multi``.
        tree: None (a chain), widths per depth, root-to-node paths, or ``"dynamic"`` (a ``DynamicTree``, with options
            ``"dynamic:num_nodes=16,width=4"``): grown by the drafter's confidence, `num_speculative_tokens` deep.
        seed: of the batch (each row then has its own stream), or one per row.
        stop_strings: a row ends with the token that completes one of these (needs the target's tokenizer).

    Raises:
        BadInput: a prompt longer than the context, an unknown rule, drafter or length policy, a tree for a drafter that
            has no branches, confidence for one that has no probabilities.
    """
    target = as_target(target)
    prompts = right_padded(input_ids, attention_mask, target)
    steps = decode_steps(
        target,
        drafter,
        prompts,
        sampling=Sampling(temperature, top_k, top_p, min_p, repetition_penalty),
        max_new_tokens=max_new_tokens,
        num_speculative_tokens=num_speculative_tokens,
        eos_token_id=eos_token_id,
        rule=rule,
        rule_options=rule_options,
        tree=tree,
        seed=seed,
        stop_strings=stop_strings,
    )
    emitted: list[list[int]] = [[] for _ in prompts.lengths]
    stats = Stats([RowStats() for _ in prompts.lengths])  # of rows that have no room to begin
    for step in steps:
        stats = step.stats
        for row, tokens in zip(emitted, step.tokens, strict=True):
            row.extend(tokens)
    return _output(prompts, emitted, stats)


def decode_steps(
    target: Target,
    drafter: Any,
    prompts: Prompts,
    *,
    sampling: Sampling,
    max_new_tokens: int,
    num_speculative_tokens: int | str | LengthPolicy = 4,
    eos_token_id: int | Sequence[int] | None = None,
    rule: str = "lossless",
    rule_options: dict[str, Any] | None = None,
    tree: Any = None,
    seed: int | Sequence[int] = 0,
    stop_strings: Sequence[str] | None = None,
) -> Iterator[Step]:
    """The steps of :func:`speculative_generate`, one by one as they are decoded (to stream, and to train online)."""
    shape = as_tree(tree)
    made = as_drafter(drafter, target, shape)
    layout = shape if isinstance(shape, TreeLayout) else None
    policy = as_length_policy(num_speculative_tokens, target, made, prompts, layout)
    if made is not None:
        confidence, needed = stop_by(policy, rule, rule_options or {})
        set_confidence(made, confidence, shape is not None, needed)
    decoding = Decoding(
        target,
        made,
        prompts,
        sampling=sampling,
        rule="multi" if shape is not None and rule == "lossless" else rule,
        options=dict(rule_options or {}),
        streams=RowStreams(row_seeds(seed, len(prompts.lengths))),
        ends=Ends(_eos_ids(eos_token_id, target), StopStrings.of(target, stop_strings)),
        policy=policy,
        max_new_tokens=max_new_tokens,
    )
    while decoding.unfinished():
        draft = decoding.draft()
        outputs = decoding.verification_pass(draft)
        verdict = decoding.judge(draft, outputs.logits)
        yield decoding.emit(draft, outputs, verdict)


def plain_generate(
    target: Any, input_ids: Tensor, attention_mask: Tensor | None = None, **settings: Any
) -> SpeculativeOutput:
    """Plain decoding: :func:`speculative_generate` without a drafter, one token a pass. Same settings, same cache."""
    return speculative_generate(target, None, input_ids, attention_mask, **settings)


def _output(prompts: Prompts, emitted: list[list[int]], stats: Stats) -> SpeculativeOutput:
    rows = [prompt + new for prompt, new in zip(prompts.rows(), emitted, strict=True)]
    lengths = [len(row) for row in rows]
    tokens = torch.full((len(rows), max(lengths)), prompts.pad_id, dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    device = prompts.ids.device
    return SpeculativeOutput(tokens.to(device), torch.tensor(lengths, device=device), stats)


def _eos_ids(eos_token_id: int | Sequence[int] | None, target: Target) -> frozenset[int]:
    if eos_token_id is None:
        return frozenset(target.eos_token_ids)
    return frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id)
