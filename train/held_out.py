"""The served metric while training: alpha on the target's answers to prompts that training never sees."""

from typing import Any

import torch

from ..decode.batched import generate_batched
from ..decode.draft import wants
from ..decode.packed import fast_products
from ..decode.sampling import Sampling
from ..eval.alpha import Answer, ForcedBatch, forced_batches, score
from ..eval.drift import token_log_probabilities
from ..eval.run import encode_openings, evaluation_prompts
from ..heads.adapted import AdaptedTarget
from ..models.target import Target
from ..progress import stage
from ..recipe import EvaluateSection


class HeldOut:
    """The target's answers to the evaluation prompts, decoded once with the served settings, and its states over them."""

    def __init__(self, section: EvaluateSection, target: Target, sampling: Sampling, batch_size: int, seed: int):
        self.target, self.sampling = target, sampling
        examples = evaluation_prompts(section.prompts, section.limit)
        prompts = encode_openings(target, examples, where="evaluate.prompts")
        limit = target.context_limit
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        tokens: dict[int, list[int]] = {}
        with stage("the target answers the evaluation prompts", len(prompts), unit="prompts") as bar:
            for row in generate_batched(
                target,
                [prompts[i] for i in order],
                max_new_tokens=[min(section.max_new_tokens, (limit or 2**62) - len(prompts[i])) for i in order],
                sampling=sampling,
                batch_size=batch_size,
                seed=seed,
                indices=order,
            ):
                tokens[row.index] = row.tokens
                bar.advance(1, tokens=len(row.tokens))
        self.answers = [Answer(prompt, tokens[i]) for i, prompt in enumerate(prompts)]
        self._batches: list[ForcedBatch] | None = None
        self._perplexity_before: float | None = None

    def measure(self, drafter: Any) -> dict[str, float]:
        """``alpha`` and ``greedy_agreement`` over all positions; of a drafter that changes the target also the target's own
        perplexity on its earlier answers, as it is now and as it was.
        """
        adapted: AdaptedTarget | None = getattr(drafter, "adapted", None)
        batches = self.read(drafter)
        with fast_products(self.target.device):
            scores = score(self.target, drafter, batches, len(self.answers), self.sampling)
            perplexities = {} if adapted is None else self._perplexities(adapted)
        positions = sum(len(one.alpha) for one in scores)
        return {
            "alpha": float(sum(one.alpha.sum() for one in scores)) / positions,
            "greedy_agreement": float(sum(one.agreement.sum() for one in scores)) / positions,
            **perplexities,
        }

    def read(self, drafter: Any) -> list[ForcedBatch]:
        """The target's states over the answers: read once, but anew each time for a drafter that changes the target."""
        if self._batches is None or getattr(drafter, "adapted", None) is not None:
            with fast_products(self.target.device):
                layers = wants(drafter).get("hidden_states", ())
                self._batches = list(forced_batches(self.target, self.answers, layers))
        return self._batches

    def _perplexities(self, adapted: AdaptedTarget) -> dict[str, float]:
        if self._perplexity_before is None:
            with adapted.original():
                self._perplexity_before = self._perplexity()
        return {"target_perplexity": self._perplexity(), "target_perplexity_before": self._perplexity_before}

    def _perplexity(self) -> float:
        logs = torch.cat(token_log_probabilities(self.target, self.answers))
        return float((-logs.mean()).exp())
