"""Lookahead decoding: draft n-grams that the target itself generated in a window of guesses beside the draft."""

import random
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import BadInput
from .draft import Accepted, Companions, Draft, TargetOutputs, from_lists
from .named import check_whole
from .sampling import Sampling


class Lookahead:
    """Lookahead decoding (arXiv:2402.02057) as a drafter.

    Every verification pass also carries a window of guesses: ``ngram - 1`` levels of `window` positions each. A level
    holds the target's predictions from the level before it, one position further on, so that a column is a piece of text
    which the target wrote in successive passes, and its newest prediction completes an n-gram. N-grams go to the row's
    pool, under their first token. The draft is a tree of the latest `candidates` n-grams that begin with the newest token.
    The window is fed as companions of the draft: no rule sees it, nothing counts it.

    In the first passes the window is one level of tokens taken from the prompt at random, wider by the positions it loses
    on the way; a level is added in each pass. Draft tokens are chosen without chance, so their ``draft_probs`` are
    one-hot.
    """

    num_parameters_read = 0

    def __init__(self, window: int = 5, ngram: int = 4, candidates: int = 4, pool_from_prompt: bool = True):
        """`pool_from_prompt`: begin with the prompt's own n-grams."""
        check_whole("lookahead", 2, window=window, ngram=ngram)
        check_whole("lookahead", 1, candidates=candidates)
        if window > 512:
            raise BadInput(f"lookahead: a window of {window} positions is a mistake, expected at most 512")
        if window * (ngram - 1) > 2**14:
            raise BadInput(f"lookahead: {ngram - 1} levels of {window} positions, expected at most {2**14:,} together")
        self.window, self.ngram, self.candidates = window, ngram, candidates
        self.pool_from_prompt = pool_from_prompt
        self.wants = {"logits": True}

    @property
    def num_companions(self) -> int:
        """Tokens that a verification pass is fed beside the draft."""
        return self.window * (self.ngram - 1) - 1

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Take new prompts."""
        lengths = attention_mask.sum(1).tolist()
        prompts = [row[:length] for row, length in zip(input_ids.tolist(), lengths, strict=True)]
        self.device = input_ids.device
        self.newest = [prompt[-1] for prompt in prompts]
        self.pools = [_Pool(self.candidates) for _ in prompts]
        if self.pool_from_prompt:
            for pool, prompt in zip(self.pools, prompts, strict=True):
                for end in range(self.ngram, len(prompt) + 1):
                    pool.add(prompt[end - self.ngram : end])
        columns = self.window + self.ngram - 2
        guesses = [random.Random(0).choices(prompt, k=columns) for prompt in prompts]
        # [batch, levels, columns]; the first of all is the newest token itself, whatever it holds here.
        self.grid = torch.tensor(guesses, dtype=torch.long).to(self.device)[:, None]
        self.fed = False  # whether the window was part of the last pass

    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """The candidates of every row, cut to `num_tokens`, and the window."""
        trees = [_tree(pool.after(newest), num_tokens) for pool, newest in zip(self.pools, self.newest, strict=True)]
        draft = from_lists([tokens for tokens, _ in trees], self.device, [parents for _, parents in trees])
        batch, levels, columns = self.grid.shape
        parents = torch.tensor(_window_parents(levels, columns), device=self.device).expand(batch, -1)
        self.fed = True
        return draft._replace(companions=Companions(self.grid.flatten(1)[:, 1:], parents))

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Collect the n-grams that the window completed, and move it on."""
        for row, tokens in enumerate(accepted.host_tokens):
            self.newest[row] = tokens[-1] if tokens else self.newest[row]
        if not self.fed or target_outputs is None or target_outputs.logits is None:
            return
        self.fed = False
        _, levels, columns = self.grid.shape
        logits = target_outputs.logits
        last = logits[:, -columns:]  # after the last level
        if levels == 1:  # whose first token is the newest one, the first that was fed
            last = torch.cat([logits[:, :1], last[:, 1:]], 1)
        grid = torch.cat([self.grid, last.argmax(-1)[:, None]], 1)
        grid[:, 0, 0] = target_outputs.tokens[:, 0]
        if levels + 1 < self.ngram:
            self.grid = grid[:, :, 1:]
            return
        for pool, ngrams in zip(self.pools, grid.transpose(1, 2).tolist(), strict=True):
            for ngram in ngrams:
                pool.add(ngram)
        self.grid = grid[:, 1:]


class _Pool:
    """N-grams by their first token, the latest few of each."""

    def __init__(self, most: int):
        self.most = most
        self.known: dict[int, dict[tuple[int, ...], None]] = {}  # in the order in which they were seen last

    def add(self, ngram: Sequence[int]) -> None:
        kept = self.known.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        kept.pop(rest, None)
        kept[rest] = None
        if len(kept) > self.most:
            del kept[next(iter(kept))]

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed `token`, the latest first."""
        return list(self.known.get(token, ()))[::-1]


def _tree(candidates: Sequence[Sequence[int]], depth: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of the candidates' common tree, level by level, their shared beginnings once."""
    tokens: list[int] = []
    parents: list[int] = []
    at = [-1] * len(candidates)
    for level in range(min(depth, max(map(len, candidates), default=0))):
        children: dict[tuple[int, int], int] = {}
        for i, candidate in enumerate(candidates):
            edge = at[i], candidate[level]
            if edge not in children:
                children[edge] = len(tokens)
                tokens.append(candidate[level])
                parents.append(at[i])
            at[i] = children[edge]
    return tokens, parents


def _window_parents(levels: int, columns: int) -> list[int]:
    """Parents within a window without its first token, level after level: the first level is a chain, and a token of
    another level follows the one in its own column."""
    return [*range(-1, columns - 2), *(at - columns for at in range(columns - 1, levels * columns - 1))]
