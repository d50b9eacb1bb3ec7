"""A recipe's loss: a weighted sum of divergences, at a distillation temperature."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import BadInput, nearest
from . import losses

# Every loss by the name a recipe gives it, with its options and their defaults.
OPTIONS: dict[str, dict[str, float]] = {
    "forward_kl": {},
    "reverse_kl": {},
    "jsd": {"beta": 0.5},
    "tvd": {},
    "skew_forward_kl": {"skew": 0.1},
    "skew_reverse_kl": {"skew": 0.1},
    "adaptive_kl": {"head_mass": 0.5},
    "neg_log_acceptance": {},
    "lk_hybrid": {"eta": 3.0},
    "cross_entropy": {},
}


@dataclass(frozen=True)
class Term:
    """One loss of a mixture. `option` is the value of the one option it has, 0 where it has none."""

    name: str
    weight: float = 1.0
    option: float = 0.0

    def __call__(
        self, draft_logits: Float[Tensor, "*batch vocab"], target_logits: Float[Tensor, "*batch vocab"]
    ) -> Float[Tensor, "*batch"]:
        """The unweighted divergence (any but cross_entropy, which takes tokens instead of target logits)."""
        match self.name:
            case "forward_kl":
                return losses.forward_kl(draft_logits, target_logits)
            case "reverse_kl":
                return losses.reverse_kl(draft_logits, target_logits)
            case "jsd":
                return losses.jsd(draft_logits, target_logits, beta=self.option)
            case "tvd":
                return losses.tvd(draft_logits, target_logits)
            case "skew_forward_kl":
                return losses.skew_forward_kl(draft_logits, target_logits, skew=self.option)
            case "skew_reverse_kl":
                return losses.skew_reverse_kl(draft_logits, target_logits, skew=self.option)
            case "adaptive_kl":
                return losses.adaptive_kl(draft_logits, target_logits, head_mass=self.option)
            case "neg_log_acceptance":
                return losses.neg_log_acceptance(draft_logits, target_logits)
            case "lk_hybrid":
                return losses.lk_hybrid(draft_logits, target_logits, eta=self.option)
        raise ValueError(f"{self.name} is not a divergence between two distributions")


@dataclass(frozen=True)
class Mixture:
    """A weighted sum of losses at a distillation temperature T.

    Divergences compare softmax(logits / T) of both sides and are multiplied by T², so that their gradients keep their
    size as T grows (arXiv:1503.02531, section 2). cross_entropy on tokens stays at temperature 1, without a factor.
    """

    terms: tuple[Term, ...]
    temperature: float = 1.0

    @property
    def needs_target(self) -> bool:
        """Whether a term compares with the target's distribution."""
        return any(term.name != "cross_entropy" for term in self.terms)

    @property
    def needs_tokens(self) -> bool:
        """Whether a term scores the tokens themselves."""
        return any(term.name == "cross_entropy" for term in self.terms)

    def __call__(
        self,
        draft_logits: Float[Tensor, "*batch vocab"],
        target_logits: Float[Tensor, "*batch vocab"] | None = None,
        tokens: Int[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "*batch"]:
        """The unreduced loss a position. Raises ValueError when a term lacks its target logits or tokens."""
        if (self.needs_target and target_logits is None) or (self.needs_tokens and tokens is None):
            raise ValueError(f"the loss {self} needs target logits for divergences and tokens for cross_entropy")
        parts: list[Tensor] = []
        for term in self.terms:
            if tokens is not None and term.name == "cross_entropy":
                parts.append(term.weight * losses.cross_entropy(draft_logits, tokens))
            elif target_logits is not None:
                divergence = term(self.tempered(draft_logits), self.tempered(target_logits))
                parts.append(term.weight * self.temperature**2 * divergence)
        return torch.stack(parts).sum(0)

    def tempered(self, logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
        """logits / T, in float32 at least."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return wide if self.temperature == 1 else wide / self.temperature

    def __str__(self) -> str:
        return " + ".join(f"{term.weight:g} {term.name}" for term in self.terms)


def parse_mixture(loss: str | dict[str, Any], temperature: float | int = 1.0) -> Mixture:
    """The mixture a recipe's ``objective.loss`` and ``objective.temperature`` ask for.

    `loss` is a name, ``{name: weight}`` or ``{name: {weight: w, option: value}}`` (weight 1 when left out). Raises
    BadInput naming the key: an unknown loss or option, a weight that is not above 0, an option out of its range.
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise BadInput(f"objective.temperature: must be above 0, got {temperature}")
    entries = {loss: 1.0} if isinstance(loss, str) else loss
    if not entries:
        raise BadInput(f"objective.loss: is empty, expected one or more of {', '.join(OPTIONS)}")
    return Mixture(tuple(_term(name, value) for name, value in entries.items()), float(temperature))


def _term(name: str, value: Any) -> Term:
    if name not in OPTIONS:
        raise BadInput(
            f"objective.loss: unknown loss {name!r}{nearest(name, OPTIONS)}, expected one of {', '.join(OPTIONS)}"
        )
    given = dict(value) if isinstance(value, dict) else {"weight": value}
    known = {"weight": 1.0, **OPTIONS[name]}
    for key, number in given.items():
        if key not in known:
            raise BadInput(
                f"objective.loss.{name}: unknown option {key!r}{nearest(key, known)}, expected {', '.join(known)}"
            )
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise BadInput(f"objective.loss.{name}.{key}: must be a number, got {number!r}")
    settings = {key: float(number) for key, number in (known | given).items()}
    weight = settings.pop("weight")
    if weight <= 0:
        raise BadInput(f"objective.loss.{name}.weight: must be above 0, got {weight}")
    for key, number in settings.items():
        _check_range(f"objective.loss.{name}.{key}", key, number)
    return Term(name, weight, next(iter(settings.values()), 0.0))


def _check_range(where: str, option: str, number: float) -> None:
    if number < 0:
        raise BadInput(f"{where}: must not be negative, got {number}")
    if option in ("beta", "head_mass") and number > 1:
        raise BadInput(f"{where}: must be at most 1, got {number}")
    if option == "skew" and number >= 1:
        raise BadInput(f"{where}: must be below 1, got {number}")
