"""Two drafters in turn: what followed in the text before, and where nothing did, a drafter that was trained."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..errors import BadInput
from .confidence import Confidence
from .draft import Accepted, Draft, Drafter, TargetOutputs, chain, wants
from .dynamic_tree import DynamicTree
from .prompt_lookup import PromptLookup
from .sampling import Sampling
from .suffix import Suffix
from .tree import TreeLayout


@runtime_checkable
class Follower(Drafter, Protocol):
    """A drafter that can be asked for some rows only: draft models, heads on the last hidden state, and EAGLE."""

    def withdraw(self, rows: Bool[Tensor, "batch"]) -> None:
        """What was just proposed for `rows` will not be verified: another draft takes its place. The next `observe` says
        what was emitted, with the path in the draft that was verified.
        """
        ...

    def num_passes(self, num_tokens: int) -> int:
        """Passes to draft that many."""
        ...

    def set_tree(self, layout: TreeLayout | None) -> None:
        """Draft this tree from now on; None: chains."""
        ...

    def set_dynamic_tree(self, shape: DynamicTree | None) -> None:
        """Draft trees by confidence from now on; None: not any more."""
        ...

    def set_confidence(self, confidence: Confidence | None) -> None:
        """End chains by its own probabilities from now on; None: never."""
        ...

    def teacher_forced_hidden(
        self, input_ids: Tensor, attention_mask: Tensor, hidden_states: dict[int, Tensor]
    ) -> Tensor:
        """What its first draft token is predicted from after every position."""
        ...

    def first_token_logits(self, hidden: Tensor) -> Tensor:
        """Logits over the target's vocabulary."""
        ...


class LookupFirst:
    """Drafts what a lookup finds; rows where it finds nothing are drafted by another drafter (after the hybrid of suffix
    decoding with a model, arXiv:2411.04975).

    Which of the two drafts a row depends on what that row has emitted, never on what was drawn for the step, so every
    lossless rule stays lossless: the lookup's tokens are chosen without chance, the other's keep their distribution. Where
    no row is left to it the other drafter runs no pass at all.
    """

    vocabulary: Tensor | None = None  # a lookup proposes whatever stands in the text

    def __init__(self, lookup: PromptLookup | Suffix, then: Drafter):
        """Raises BadInput for a drafter that cannot be asked for some rows only."""
        if not isinstance(then, Follower):
            raise BadInput(
                f"{type(then).__name__} cannot follow a lookup, which leaves it some rows of a batch and some steps only: "
                "draft models, heads and EAGLE can"
            )
        self.lookup, self.then = lookup, then
        self.wants = wants(then)
        self.steps = self.passes = 0

    @property
    def module(self) -> nn.Module | None:
        """What the packed backend packs: the other drafter's."""
        return getattr(self.then, "module", None)

    @property
    def num_parameters_read(self) -> int | None:
        """Parameters that one pass of the other drafter reads."""
        return getattr(self.then, "num_parameters_read", None)

    @property
    def accuracies(self) -> Any:
        """The other drafter's calibration, of the trees that it drafts."""
        return getattr(self.then, "accuracies", None)

    @property
    def mean_passes(self) -> float:
        """Passes that the other drafter made in a step, so far."""
        return self.passes / max(1, self.steps)

    def num_passes(self, num_tokens: int) -> int:
        """Passes for a draft of this length where the lookup finds nothing; a step takes `mean_passes`."""
        return self.then.num_passes(num_tokens)

    def set_tree(self, layout: TreeLayout | None) -> None:
        """The other drafter drafts this tree from now on, a lookup chains as deep."""
        self.then.set_tree(layout)

    def set_dynamic_tree(self, shape: DynamicTree | None) -> None:
        """The other drafter grows trees by confidence from now on."""
        self.then.set_dynamic_tree(shape)

    def set_confidence(self, confidence: Confidence | None) -> None:
        """The other drafter's chains end by its own probabilities, those of a lookup do not."""
        self.then.set_confidence(confidence)

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Take right-padded prompts."""
        self.finished = [False] * len(input_ids)
        self.lookup.start(input_ids, attention_mask)
        self.then.start(input_ids, attention_mask)

    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """The lookup's chain where it found one, else the other drafter's draft."""
        found = self.lookup.propose(num_tokens, sampling, generators)
        assert found.lengths is not None
        took = [count > 0 for count in found.lengths.tolist()]
        if all(there or done for there, done in zip(took, self.finished, strict=True)):
            return found
        rest = self.then.propose(num_tokens, sampling, generators)
        self.passes += self.then.num_passes(rest.tokens.shape[1] if rest.is_chain else num_tokens)
        if not any(took):
            return rest
        rows = torch.tensor(took, device=rest.tokens.device)
        self.then.withdraw(rows)
        return _in_rows(found, rest, rows)

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Both learn what was emitted."""
        if target_outputs is None or target_outputs.logits is not None:  # not the call after the prefill
            self.steps += 1
            self.finished = [not count for count in accepted.host_lengths]
        self.lookup.observe(accepted, target_outputs)
        self.then.observe(accepted, target_outputs)

    @torch.no_grad()
    def teacher_forced_hidden(
        self, input_ids: Int[Tensor, "batch length"], attention_mask: Tensor, hidden_states: dict[int, Tensor]
    ) -> Float[Tensor, "batch length size"]:
        """The other drafter's, and as a last column the id that the lookup drafts there; -1: none. In float32, which holds
        every id exactly.
        """
        hidden = self.then.teacher_forced_hidden(input_ids, attention_mask, hidden_states)
        self.dtype = hidden.dtype
        looked_up = self._looked_up(input_ids, attention_mask).to(hidden.device)
        return torch.cat([hidden.float(), looked_up[..., None].float()], -1)

    @torch.no_grad()
    def first_token_logits(self, hidden: Float[Tensor, "n size"]) -> Float[Tensor, "n vocab"]:
        """The other drafter's logits; all on one id where the lookup drafts it."""
        logits = self.then.first_token_logits(hidden[:, :-1].to(self.dtype))
        ids = hidden[:, -1].long()
        certain = torch.full_like(logits, -torch.inf).scatter_(-1, ids.clamp(min=0)[:, None], 0.0)
        return torch.where(ids[:, None] >= 0, certain, logits)

    def _looked_up(self, input_ids: Tensor, attention_mask: Tensor) -> Int[Tensor, "batch length"]:
        """What the lookup drafts first after every position of right-padded rows."""
        lengths, rows = attention_mask.sum(1).tolist(), input_ids.tolist()
        self.lookup.start(input_ids[:, :1], attention_mask[:, :1])
        columns = []
        for position in range(input_ids.shape[1]):
            found = self.lookup.propose(1, Sampling(), [])
            assert found.lengths is not None
            first = found.tokens[:, :1] if found.tokens.shape[1] else found.tokens.new_zeros(len(rows), 1)
            columns.append(torch.where(found.lengths > 0, first[:, 0], -1))
            after = position + 1
            new = [row[after : after + 1] if after < length else [] for row, length in zip(rows, lengths, strict=True)]
            nothing = input_ids[:, :0]
            self.lookup.observe(Accepted(nothing, torch.tensor([len(one) for one in new]), nothing, new), None)
        return torch.stack(columns, 1)


def _in_rows(found: Draft, rest: Draft, rows: Bool[Tensor, "batch"]) -> Draft:
    """`found` (chains, chosen without chance) in `rows`, `rest` in the others."""
    assert found.lengths is not None
    width = max(found.tokens.shape[1], rest.tokens.shape[1])
    own, other = _widened(found, width), _widened(rest, width)
    assert own.lengths is not None
    assert other.lengths is not None
    here = rows[:, None]
    probs = other.draft_probs
    if probs is not None:
        certain = torch.zeros_like(probs).scatter_(-1, own.tokens[..., None], 1.0)
        probs = torch.where(here[..., None], certain, probs)
    return rest._replace(
        tokens=torch.where(here, own.tokens, other.tokens),
        parents=torch.where(here, own.parents, other.parents),
        draft_probs=probs,
        lengths=torch.where(rows, own.lengths, other.lengths),
    )


def _widened(draft: Draft, width: int) -> Draft:
    """With padding up to `width` nodes a row, which do not count."""
    batch, nodes = draft.tokens.shape
    more = width - nodes
    lengths = torch.full((batch,), nodes, device=draft.tokens.device) if draft.lengths is None else draft.lengths
    tokens, probs = torch.nn.functional.pad(draft.tokens, (0, more)), draft.draft_probs
    if probs is not None:
        probs = torch.nn.functional.pad(probs, (0, 0, 0, more))
    if draft.is_chain:
        return chain(tokens, probs, lengths)
    parents = torch.nn.functional.pad(draft.parents, (0, more), value=-1)
    return draft._replace(tokens=tokens, parents=parents, draft_probs=probs, lengths=lengths)
