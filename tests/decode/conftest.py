"""What decoding is held against: full passes without a cache, and the exact joint distribution of the first tokens."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from draftsmith.decode.draft import Accepted
from draftsmith.decode.sampling import Sampling, probabilities


def naive_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Prompt and greedy continuation, one full forward pass a token, without any cache."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens


def prompt_of(length: int, seed: int, vocab_size: int = 64) -> list[int]:
    """Random ids."""
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch_of(prompts: list[list[int]], side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    """Padded ids and their mask."""
    width = max(map(len, prompts))
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        at = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[i, at], mask[i, at] = torch.tensor(prompt), 1
    return ids, mask


def joint_distribution(model: Any, prompt: list[int], count: int, sampling: Sampling) -> torch.Tensor:
    """Exact probabilities of the first `count` tokens, by enumeration."""
    vocab = model.config.vocab_size
    joint = torch.zeros([vocab] * count, dtype=torch.float64)
    for prefix in itertools.product(range(vocab), repeat=count - 1):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *prefix]]), use_cache=False).logits[0]
        probs = probabilities(logits[len(prompt) - 1 :], sampling).double()
        weight = 1.0
        for i, token in enumerate(prefix):
            weight *= float(probs[i, token])
        joint[prefix] = weight * probs[-1]
    return joint


def check_joint(samples: list[list[int]], exact: torch.Tensor, smallest: float = 1e-4) -> None:
    """Chi-square of sampled token tuples against exact probabilities; rare outcomes are pooled."""
    counts = torch.zeros_like(exact)
    for sample in samples:
        counts[tuple(sample)] += 1
    assert counts[exact == 0].sum() == 0, "a token that the target cannot emit"
    expected = exact.flatten() * len(samples)
    common = expected >= 5
    observed = torch.cat([counts.flatten()[common], counts.flatten()[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert chisquare(observed.numpy(), (wanted * observed.sum() / wanted.sum()).numpy()).pvalue > smallest


def disturbed(model: Any, scale: float = 0.05, seed: int = 3) -> Any:
    """`model` itself with noise on its weights: as a drafter it agrees with the undisturbed one now and then."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return model


def started(drafter: Any, prompts: list[list[int]]) -> Any:
    """`drafter` itself, given these prompts."""
    drafter.start(*batch_of(prompts, side="right"))
    return drafter


def proposed(drafter: Any, num_tokens: int) -> list[list[int]]:
    """The rows of its next greedy draft, without padding."""
    rows = drafter.propose(num_tokens, Sampling(), [])
    lengths = [rows.tokens.shape[1]] * len(rows.tokens) if rows.lengths is None else rows.lengths.tolist()
    return [tokens[:length] for tokens, length in zip(rows.tokens.tolist(), lengths, strict=True)]


def emitted(tokens: list[list[int]]) -> Accepted:
    """What a drafter hears after a step that emitted these tokens, whatever was drafted."""
    lengths = torch.tensor([len(row) for row in tokens])
    padded = torch.full((len(tokens), int(lengths.max())), -1)
    for row, new in enumerate(tokens):
        padded[row, : len(new)] = torch.tensor(new, dtype=torch.long)
    return Accepted(padded, lengths, torch.full((len(tokens), 0), -1), tokens)


@pytest.fixture(scope="session")
def reference() -> SimpleNamespace:
    """The functions of this file."""
    functions: tuple[Callable[..., Any], ...] = (
        naive_greedy,
        prompt_of,
        batch_of,
        joint_distribution,
        check_joint,
        disturbed,
        started,
        proposed,
        emitted,
    )
    return SimpleNamespace(**{function.__name__: function for function in functions})
