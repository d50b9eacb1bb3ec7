"""What is measured of a trained drafter of any kind: accuracy by draft position, chains and trees in turns, audits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.data.sources import Example
from draftsmith.decode.draft import Accepted, Draft, TargetOutputs
from draftsmith.decode.draft_model import DraftModel
from draftsmith.decode.loop import speculative_generate
from draftsmith.decode.packed import use_backend
from draftsmith.decode.prompts import pad_rows
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.tree_search import best_tree, tree_from_accuracies
from draftsmith.eval.alpha import Answer
from draftsmith.eval.audit import audit_drafter
from draftsmith.eval.auto_tree import rank_acceptance
from draftsmith.eval.measure import Contestant, decode_in_turns, teacher_force, time_steps
from draftsmith.eval.options import EvalOptions
from draftsmith.eval.records import PromptRecord, RunRecord
from draftsmith.eval.report import run_figures, without_nan
from draftsmith.eval.run import encode_openings, parameters_read
from draftsmith.heads.load import load_served
from draftsmith.models.target import Target

_CONTEXT_TOKENS = 32  # of a prompt that is sampled after: its end
_TREE_LEVELS = 5  # of a tree, where the kind does not limit it
_RANK_PROMPTS, _RANK_TOKENS = 8, 32  # that the tree of a drafter without branches of its own is chosen by


@dataclass(frozen=True)
class Settings:
    """How every kind is measured."""

    max_new_tokens: int  # of an answer
    tree_nodes: int
    audit_prompts: int
    audit_tokens: int  # of an answer that is compared token by token
    samples: int  # after each of two prompts
    temperature: float  # of the samples
    seed: int = 0


class EveryPosition:
    """A drafter that is asked after every token of the answer: nothing of its drafts is verified, all of them are kept."""

    def __init__(self, drafter: Any, rows: int):
        self.drafter = drafter
        self.emitted = [0] * rows
        # By row and the number of tokens before them: how many were asked for, and which were given.
        self.drafts: list[dict[int, tuple[int, list[int]]]] = [{} for _ in range(rows)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def start(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> None:
        """Take prompts."""
        self.drafter.start(input_ids, attention_mask)

    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """Note what the drafter says, and have none of it verified."""
        draft = self.drafter.propose(num_tokens, sampling, generators)
        nodes = draft.tokens.shape[1]
        lengths = [nodes] * len(self.emitted) if draft.lengths is None else draft.lengths.tolist()
        for row, (tokens, length) in enumerate(zip(draft.tokens.tolist(), lengths, strict=True)):
            self.drafts[row].setdefault(self.emitted[row], (num_tokens, tokens[:length]))
        return draft._replace(lengths=torch.zeros(len(lengths), dtype=torch.long, device=draft.tokens.device))

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Count what was emitted."""
        self.drafter.observe(accepted, target_outputs)
        for row, tokens in enumerate(accepted.host_tokens):
            self.emitted[row] += len(tokens)


def accuracies(
    target: Target, drafter: Any, prompts: Sequence[list[int]], num_tokens: int, max_new_tokens: int, batch: int = 8
) -> dict[str, list[list[int]]]:
    """Per draft position: how often the drafted token is the one of the greedy answer, drafting after every token of it.

    ``right``: [hits, positions] of each; ``given``: the same where all draft tokens before were right. A token that was not
    drafted is not right.
    """
    right, given = ([[0, 0] for _ in range(num_tokens)] for _ in range(2))
    stop_by_itself = getattr(drafter, "exit", None)
    if stop_by_itself is not None:  # what it learns from being refused would end every draft
        drafter.exit = None
    for first in range(0, len(prompts), batch):
        group = pad_rows(list(prompts[first : first + batch]), target)
        noted = EveryPosition(drafter, len(group.lengths))
        out = speculative_generate(
            target,
            noted,
            group.ids,
            group.attention_mask,
            max_new_tokens=max_new_tokens,
            num_speculative_tokens=num_tokens,
        )
        for row, (start, end) in enumerate(zip(group.lengths, out.lengths.tolist(), strict=True)):
            answer = out.tokens[row, start:end].tolist()
            for before, (asked, draft) in noted.drafts[row].items():
                _count(answer[before : before + asked], draft, right, given)
    if stop_by_itself is not None:
        drafter.exit = stop_by_itself
    return {"right": right, "given": given}


def _count(answer: list[int], draft: list[int], right: list[list[int]], given: list[list[int]]) -> None:
    all_right = True
    for i, token in enumerate(answer):
        hit = i < len(draft) and draft[i] == token
        right[i][0] += hit
        right[i][1] += 1
        if all_right:
            given[i][0] += hit
            given[i][1] += 1
        all_right &= hit


def measure(
    target: Target, name: str, num_tokens: int, examples: Sequence[Example], settings: Settings
) -> dict[str, Any]:
    """All figures of the drafter `name` (a folder, or one that needs no training) with chains of `num_tokens`."""
    backend = use_backend(target.model, "auto")
    drafter: Any = load_served(name, target, "auto")
    prompts = encode_openings(target, examples, where="shipped")
    found: dict[str, Any] = {"num_tokens": num_tokens, "backend": backend}
    found["accuracies"] = accuracies(target, drafter, prompts, num_tokens, settings.max_new_tokens)
    found["chain"] = _decoded(target, drafter, name, prompts, examples, settings, num_tokens, None, None)
    tree, depth, words = _tree(target, drafter, prompts, num_tokens, settings)
    if words:
        nodes = len(tree) if isinstance(tree, list) else settings.tree_nodes
        found["tree"] = _decoded(target, drafter, name, prompts, examples, settings, depth, tree, nodes)
        found["tree_is"] = words
    found["audits"] = _audits(target, drafter, prompts, num_tokens, tree, settings)
    return found


def _tree(
    target: Target, drafter: Any, prompts: Sequence[list[int]], num_tokens: int, settings: Settings
) -> tuple[list[list[int]] | str | None, int, str]:
    """The tree of the settings' nodes that suits the kind: itself, its levels, and which it is ("": there is none).

    Heads that do not wait for each other get the tree of the highest joint accuracies, kinds that are trained to see their
    own draft follow their confidence, others take that of the acceptance by rank.
    """
    one_pass = getattr(drafter, "num_passes", lambda num_tokens: num_tokens)(2) == 1
    measured = getattr(drafter, "accuracies", None)
    if one_pass and measured is not None:
        layout = tree_from_accuracies(measured, settings.tree_nodes)
        return [list(path) for path in layout.paths], layout.depth, "of the highest joint accuracies"
    if hasattr(drafter, "set_dynamic_tree") and not isinstance(drafter, DraftModel):
        depth = num_tokens if measured is not None else _TREE_LEVELS
        return f"dynamic:num_nodes={settings.tree_nodes}", depth, "by confidence"
    if not hasattr(drafter, "set_tree") or not hasattr(drafter, "first_token_logits"):
        return None, 0, ""
    some = list(prompts[:: max(1, len(prompts) // _RANK_PROMPTS)])
    plain = decode_in_turns(_options("", settings, 1, None, _RANK_TOKENS), target, some, [])
    said = [Answer(prompt, tokens) for prompt, tokens in zip(some, plain, strict=True)]
    by_rank = rank_acceptance(target, drafter, said, Sampling()).clamp(0, 1).tolist()
    layout = best_tree([by_rank] * _TREE_LEVELS, settings.tree_nodes)
    return [list(path) for path in layout.paths], layout.depth, "of acceptance by rank"


def _options(name: str, settings: Settings, num_tokens: int, tree: Any, max_new_tokens: int) -> EvalOptions:
    return EvalOptions(
        target="",
        drafter=name,
        num_speculative_tokens=num_tokens,
        tree=tree,
        max_new_tokens=max_new_tokens,
        seed=settings.seed,
    )


def _decoded(
    target: Target,
    drafter: Any,
    name: str,
    prompts: list[list[int]],
    examples: Sequence[Example],
    settings: Settings,
    num_tokens: int,
    tree: list[list[int]] | str | None,
    nodes: int | None,
) -> dict[str, Any]:
    """What an evaluation says of plain decoding and the drafter in turns."""
    options = _options(name, settings, num_tokens, tree, settings.max_new_tokens)
    passes = getattr(drafter, "num_passes", None)
    record = RunRecord(
        "drafter",
        [PromptRecord(example.id, example.category or "all") for example in examples],
        label=name,
        num_speculative_tokens=num_tokens,
        tree_nodes=nodes,
        sequential=passes is None or passes(2) > passes(1),
        passes_per_step=None if passes is None else passes(num_tokens),
        drafter_parameters_read=getattr(drafter, "num_parameters_read", None),
        target_parameters_read=parameters_read(target),
    )
    contestant = Contestant(drafter, record, tree)
    plain = decode_in_turns(options, target, prompts, [contestant])
    time_steps(options, target, prompts, [contestant])
    if nodes is None:
        said = [Answer(prompt, tokens) for prompt, tokens in zip(prompts, plain, strict=True)]
        teacher_force(options, target, [contestant], said)
    figures = without_nan(run_figures(record, settings.seed))
    return {key: value for key, value in figures.items() if key not in ("categories", "prompts")}


def _audits(
    target: Target,
    drafter: Any,
    prompts: Sequence[list[int]],
    num_tokens: int,
    tree: list[list[int]] | str | None,
    settings: Settings,
) -> dict[str, Any]:
    """Greedy identity and the test of sampled output, of chains and, where there is one, of the tree."""
    found = {}
    forms = [("chain", None)] + ([("tree", tree)] if tree is not None else [])
    for form, shape in forms:
        for how, sampling in (("greedy", Sampling()), ("sampled", Sampling(settings.temperature))):
            some = [list(prompt) for prompt in prompts[: settings.audit_prompts]]
            result = audit_drafter(
                target,
                drafter,
                some if how == "greedy" else [prompt[-_CONTEXT_TOKENS:] for prompt in some[:2]],
                sampling=sampling,
                tree=shape,
                num_speculative_tokens=num_tokens,
                batch_size=4 if how == "greedy" else 64,
                max_new_tokens=settings.audit_tokens,
                samples=settings.samples,
                seed=settings.seed,
            )
            found[f"{form}, {how}"] = {"passed": result.passed, "says": result.lines}
    return found
