"""Length policies that draft nothing in some steps: drafters that keep a cache lack more than one token's entries then."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.decode.draft import Accepted, Draft, TargetOutputs
from draftsmith.decode.dynamic_tree import DynamicTree
from draftsmith.decode.loop import plain_generate
from draftsmith.decode.sampling import Sampling
from draftsmith.heads.eagle import eagle_in_training
from draftsmith.heads.early_exit import EarlyExit
from draftsmith.heads.exit_head import ExitHead
from draftsmith.heads.layer_skip import AdaptiveExit, LayerSkip, Skipped
from draftsmith.heads.lookahead_tokens import LookaheadEmbeddings, LookaheadTokens
from draftsmith.heads.make import heads_in_training
from draftsmith.models.target import Target, as_target
from draftsmith.recipe import DraftExitSection, EagleDrafter, HydraDrafter, ObjectiveSection


def moved(drafter: Any) -> Any:
    """Its own parameters away from where they begin, where much adds zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return drafter


def eagle(target: Target, version: int) -> Any:
    config = EagleDrafter(version=version)  # pyright: ignore[reportArgumentType]
    return moved(eagle_in_training(config, ObjectiveSection(), target, None, Sampling()).drafter)


def hydra(target: Target) -> Any:
    config = HydraDrafter(num_heads=3, prefix_attention=True)
    return moved(heads_in_training(config, ObjectiveSection(), target, None, Sampling()).drafter)


SKIPPED = Skipped(attention=(1,), mlp=(1, 2))
KINDS: dict[str, Callable[[Target], Any]] = {
    "eagle 1": lambda target: eagle(target, 1),
    "eagle 3": lambda target: eagle(target, 3),
    "eagle 3, trees": lambda target: eagle(target, 3),
    "hydra": hydra,
    "early exit": lambda target: EarlyExit(ExitHead(target, 2, "none")),
    "early exit, attention": lambda target: moved(EarlyExit(ExitHead(target, 2, "attention"))),
    "early exit, block": lambda target: moved(EarlyExit(ExitHead(target, 2, "block"))),
    "layer skip": lambda target: LayerSkip(target, SKIPPED, None),
    "layer skip that stops": lambda target: LayerSkip(target, SKIPPED, AdaptiveExit(DraftExitSection(threshold=0.1))),
    "lookahead tokens": lambda target: LookaheadTokens(LookaheadEmbeddings(target, 3), target),
}
TREES = {"eagle 3, trees": DynamicTree(num_nodes=6, width=2)}
# [step][row], over and over: nobody drafts in some steps, or there is always somebody who does.
PATTERNS = {"together": [[0] * 3, [3] * 3, [3] * 3], "in turns": [[0, 3, 2], [3, 0, 0], [3, 3, 0]]}


class Noted:
    """A drafter whose first draft tokens are written down, with the text that they follow."""

    def __init__(self, drafter: Any, prompts: list[list[int]]):
        self.drafter = drafter
        self.texts = [list(prompt) for prompt in prompts]
        self.first: list[list[tuple[int, int]]] = [[] for _ in prompts]  # of each row: length of the text, token
        self.finished = [False] * len(prompts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def start(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> None:
        self.drafter.start(input_ids, attention_mask)

    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        draft = self.drafter.propose(num_tokens, sampling, generators)
        nodes = draft.tokens.shape[1]
        lengths = [nodes] * len(self.texts) if draft.lengths is None else draft.lengths.tolist()
        for row, length in enumerate(lengths):
            if length and not self.finished[row]:
                self.first[row].append((len(self.texts[row]), int(draft.tokens[row, 0])))
        return draft

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        self.drafter.observe(accepted, target_outputs)
        for row, tokens in enumerate(accepted.host_tokens):
            self.texts[row].extend(tokens)
            self.finished[row] = not tokens and (target_outputs is None or target_outputs.logits is not None)


@torch.no_grad()
def check_first_tokens(target: Target, noted: Noted) -> int:
    """Each is what the drafter predicts from the whole text before it, without a cache. How many there are."""
    for text, first in zip(noted.texts, noted.first, strict=True):
        ids = torch.tensor([text])
        states: Any = target.model(input_ids=ids, output_hidden_states=True).hidden_states
        layers = {layer: states[layer] for layer in noted.drafter.wants.get("hidden_states", ())}
        hidden = noted.drafter.teacher_forced_hidden(ids, torch.ones_like(ids), layers)[0]
        logits = noted.drafter.first_token_logits(hidden)
        for length, token in first:
            assert logits[length - 1].max() - logits[length - 1, token] < 1e-3, (length, token)
    return sum(map(len, noted.first))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_drafts_are_those_of_the_text_alone(kind, family, pattern, request, checks):
    """Alone and in a ragged batch with a prompt of one token: the tokens are plain decoding's, and no draft depends on how
    many steps have passed since the one before it.
    """
    torch.manual_seed(0)
    target = as_target(request.getfixturevalue(family)(layers=4, seed=1))
    drafter = KINDS[kind](target)
    for prompts in ([9], [9, 1, 6]):
        ids, mask = checks.ragged(prompts)
        noted = Noted(drafter, [row[seen].tolist() for row, seen in zip(ids, mask.bool(), strict=True)])
        settings = {"max_new_tokens": 18, "eos_token_id": []}
        plain = plain_generate(target, ids, mask, **settings)
        policy = checks.Lengths(PATTERNS[pattern])
        out = speculative_generate(
            target, noted, ids, mask, num_speculative_tokens=policy, tree=TREES.get(kind), **settings
        )
        assert out.tokens.tolist() == plain.tokens.tolist()
        for row in out.stats.rows:
            assert 0 < len(row.step_starts) < row.target_calls, "some steps draft and some do not"
        assert check_first_tokens(target, noted) >= sum(len(row.step_starts) for row in out.stats.rows)
