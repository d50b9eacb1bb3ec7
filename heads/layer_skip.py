"""Draft & Verify: the target drafts for itself, some of its attention and MLP blocks skipped (arXiv:2309.08168).

Nothing is trained and nothing is copied: which blocks are skipped is all there is to know. The drafter has a cache of its
own, since hidden states beyond a skipped block are not the target's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..decode.confidence import Confidence
from ..decode.draft import Accepted, Draft, TargetOutputs
from ..decode.draft_model import DraftModel
from ..decode.fused import fuse_as
from ..decode.sampling import Sampling
from ..decode.tree import TreeLayout
from ..models.draft_lm import DraftLM
from ..models.quiet import one_line_errors
from ..models.target import Target
from ..models.views import BlockSkipper
from ..recipe import DraftExitSection
from .checkpoint import load_head, save_head

KIND = "layer_skip"


class Skipped(NamedTuple):
    """The layers whose attention and whose MLP block are skipped, in increasing order."""

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()


class AdaptiveExit:
    """Where rows stop drafting: after a token whose own probability is below the row's threshold.

    The threshold follows what the row accepts (arXiv:2309.08168, section 3.3). With its smoothed acceptance rate
    A ← β₁ A + (1 − β₁) accepted / drafted, the threshold moves by ε, up where A is at most the wanted rate and else down,
    smoothed too: γ ← β₂ γ + (1 − β₂)(γ ± ε). A token that was drawn is never discarded, and the threshold depends on
    earlier steps only: what is emitted keeps its distribution.
    """

    def __init__(self, options: DraftExitSection):
        self.options = options

    def start(self, batch: int, device: torch.device) -> None:
        """Every row begins with the first threshold, and as if it accepted as wanted."""
        self.thresholds = torch.full((batch,), self.options.threshold, device=device)
        self.rates = torch.full((batch,), self.options.target_acceptance, device=device)

    def observe(self, drafted: Int[Tensor, "batch"], accepted: Int[Tensor, "batch"]) -> None:
        """Learn from a step; rows that drafted nothing stay as they are."""
        options, tried = self.options, drafted > 0
        rates = options.rate_memory * self.rates + (1 - options.rate_memory) * accepted / drafted.clamp(min=1)
        self.rates = torch.where(tried, rates, self.rates)
        step = torch.where(self.rates <= options.target_acceptance, options.step, -options.step)
        moved = self.thresholds + (1 - options.threshold_memory) * step
        self.thresholds = torch.where(tried, moved, self.thresholds).clamp(0.0, 1.0)


class LayerSkip:
    """The target without some of its blocks as a drafter: chains that stop by themselves, or trees."""

    def __init__(
        self, target: Target, skipped: Skipped, exit_: AdaptiveExit | None, skipper: BlockSkipper | None = None
    ):
        """`exit_` None: chains are as long as asked for. `skipper`: the target's, where there is one already.

        Raises:
            BadInput: a layer that is not there, or a family whose blocks cannot be skipped.
        """
        self.exit, self.vocab_size, self.whole = exit_, target.vocab_size, target.model
        self.skipper = skipper or BlockSkipper(target.model)
        self.skip(skipped)
        self.vocabulary: Tensor | None = None
        # With the pass comes how many of a row's draft tokens were verified: fewer than proposed, where its length was cut.
        self.wants = {"logits": True}
        self.given: Confidence | None = None
        self.is_tree = False

    def skip(self, skipped: Skipped) -> None:
        """Skip these blocks from the next `start` on."""
        self.skipped = skipped
        lm = DraftLM(self.skipper.view(skipped.attention, skipped.mlp))
        fuse_as(lm, self.whole)
        self.inner = DraftModel(lm, self.vocab_size)

    @property
    def module(self) -> nn.Module:
        """What the packed backend packs: a part of the target."""
        return self.inner.module

    @property
    def num_parameters_read(self) -> int:
        """Parameters that one pass reads: those of the blocks that are not skipped, and the output head."""
        return self.inner.num_parameters_read

    def num_passes(self, num_tokens: int) -> int:
        """One pass a draft token."""
        return num_tokens

    def set_tree(self, layout: TreeLayout | None) -> None:
        """Draft this tree from now on; None: chains."""
        self.is_tree = layout is not None
        self.inner.set_tree(layout)

    def set_confidence(self, confidence: Confidence | None) -> None:
        """End chains by this in the stead of the threshold of its own; None: by its own again."""
        self.given = confidence

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Take right-padded prompts."""
        self.inner.start(input_ids, attention_mask)
        if self.exit is not None:
            self.exit.start(len(input_ids), input_ids.device)

    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """A chain of at most `num_tokens`, or the tree that was set."""
        confidence = self.given
        if confidence is None and self.exit is not None and not self.is_tree:
            confidence = Confidence(self.exit.thresholds)
        self.inner.set_confidence(confidence)
        return self.inner.propose(num_tokens, sampling, generators)

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Roll back to what was accepted, and move the thresholds."""
        assert target_outputs is not None
        if target_outputs.logits is None:  # the prompts, which `start` has taken
            return
        if self.exit is not None and self.given is None and not self.is_tree:
            drafted = target_outputs.valid.sum(1) - 1
            self.exit.observe(drafted * (accepted.lengths > 0), (accepted.lengths - 1).clamp(min=0))
        self.inner.observe(accepted, None)

    def teacher_forced_hidden(
        self, input_ids: Int[Tensor, "batch length"], attention_mask: Tensor, hidden_states: dict[int, Tensor]
    ) -> Float[Tensor, "batch length hidden"]:
        """Its own last hidden states, for every position of right-padded rows."""
        return self.inner.teacher_forced_hidden(input_ids, attention_mask, hidden_states)

    def first_token_logits(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n vocab"]:
        """Logits over the target's vocabulary."""
        return self.inner.first_token_logits(hidden)


def save_layer_skip(drafter: LayerSkip, target: Target, found: dict[str, Any], folder: str | Path) -> None:
    """Write which blocks are skipped, how drafting stops, and what the search has found out (`found`)."""
    options = None if drafter.exit is None else drafter.exit.options.model_dump(mode="json")
    config = {
        "model_type": KIND,
        "hidden_size": target.hidden_size,
        "skip_attention": list(drafter.skipped.attention),
        "skip_mlp": list(drafter.skipped.mlp),
        "draft_exit": options,
        "search": found,
    }
    save_head(folder, KIND, {}, config, target)


def load_layer_skip(folder: str | Path, target: Target) -> LayerSkip:
    """The drafter that :func:`save_layer_skip` wrote.

    Raises:
        BadInput: it belongs to another target, or its config is not sound.
    """
    folder = Path(folder).expanduser()
    known, _ = load_head(folder, target)
    with one_line_errors(str(folder)):
        skipped = Skipped(tuple(map(int, known["skip_attention"])), tuple(map(int, known["skip_mlp"])))
        options = known["draft_exit"]
        exit_ = None if options is None else AdaptiveExit(DraftExitSection(**options))
    return LayerSkip(target, skipped, exit_)
