"""Which ids a row has seen, for the repetition penalty, draft tokens on the path to each node included."""

import torch
from jaxtyping import Float
from torch import Tensor

from .draft import Draft
from .prompts import Prompts
from .sampling import Sampling, penalise
from .tree import ancestors


class SeenTokens:
    """Ids in a row's prompt and output."""

    def __init__(self, seen: Tensor, penalty: float):
        self.seen = seen  # bool [batch, vocab]
        self.penalty = penalty

    @classmethod
    def of(cls, prompts: Prompts, vocab_size: int, sampling: Sampling) -> "SeenTokens | None":
        """None when the settings hold no penalty."""
        if sampling.repetition_penalty == 1.0:
            return None
        seen = torch.zeros(len(prompts.lengths), vocab_size, dtype=torch.bool, device=prompts.ids.device)
        tracker = cls(seen, sampling.repetition_penalty)
        tracker.add(torch.where(prompts.attention_mask.bool(), prompts.ids, -1))
        return tracker

    def add(self, tokens: Tensor) -> None:
        """Mark ``tokens [batch, n]``; -1 is skipped."""
        hits = torch.zeros(self.seen.shape, dtype=torch.int32, device=self.seen.device)
        hits.scatter_add_(1, tokens.clamp(min=0), (tokens >= 0).int())
        self.seen = self.seen | (hits > 0)

    def penalised(
        self, logits: Float[Tensor, "batch fed vocab"], draft: Draft | None
    ) -> Float[Tensor, "batch fed vocab"]:
        """Logits after the penalty. Position 0 follows the newest token, position 1 + i follows node i of the draft."""
        seen = self.seen[:, None].expand(-1, logits.shape[1], -1)
        if draft is not None:
            on_path = ancestors(draft.parents)  # [batch, nodes, nodes], itself included
            ids = draft.tokens.clamp(min=0)[:, None].expand_as(on_path)
            hits = torch.zeros(*on_path.shape[:2], logits.shape[-1], dtype=torch.int32, device=logits.device)
            hits.scatter_add_(2, ids, on_path.int())
            seen = seen | torch.nn.functional.pad(hits > 0, (0, 0, 1, 0))
        return penalise(logits, seen, self.penalty)
