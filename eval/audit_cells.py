"""The first tokens after a prompt, cut into cells to be counted: by the target's probabilities, or by frequency."""

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from ..decode.sampling import Sampling, probabilities
from ..models.target import Target
from .audit_statistics import Counts, Pair
from .exact import logits_after

IMPOSSIBLE = -1  # a token that the target cannot emit there
ENDED = -2  # nothing, where the target would have gone on
_INNER = -3  # not a leaf: the token after it is looked at too
_ALL_OUTCOMES = 20_000  # up to so many sequences all are enumerated
_LEAST_EXPECTED = 5.0  # samples a cell is made to hold
_LOOK_INTO = 40.0  # expected samples after a prefix that make the tokens after it worth telling apart
_MOST_PREFIXES = 128  # of one length: each costs a forward pass of the target

Tokens = tuple[int, ...]


class ExactCells:
    """Exclusive cells that cover everything the target can say first, with the target's exact probabilities.

    A cell is a sequence of `joint_tokens` tokens, or all sequences with a common start, or several of these that are
    too rare to be counted alone. The choice depends on the target only, never on the samples that are counted.
    """

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        sampling: Sampling,
        joint_tokens: int,
        samples: int,
        eos: Collection[int],
    ):
        self.sampling = sampling
        self.samples = samples
        self.complete = target.vocab_size**joint_tokens <= _ALL_OUTCOMES
        self._logits: dict[Tokens, Tensor] = {}  # after each prefix that was looked into
        self._leaves: dict[Tokens, Int[np.ndarray, " vocab"]] = {}
        self._masses: list[Float[np.ndarray, " leaves"]] = []
        least = 0.0 if self.complete else max(_LOOK_INTO / samples, 1 / _MOST_PREFIXES)
        level: dict[Tokens, float] = {(): 1.0}
        for depth in range(joint_tokens):
            rows = logits_after(target, [[*prompt, *prefix] for prefix in level], sampling)
            following: dict[Tokens, float] = {}
            for (prefix, mass), logits in zip(level.items(), rows, strict=True):
                probs = probabilities(logits, sampling).double().numpy()
                probs *= mass / probs.sum()
                inner = (probs > least) & (depth + 1 < joint_tokens)
                inner[[token for token in eos if token < len(inner)]] = False
                following |= {(*prefix, int(token)): float(probs[token]) for token in np.flatnonzero(inner)}
                self._logits[prefix] = logits
                self._leaves[prefix] = self._new_leaves(probs, inner)
            level = following
            if not level:
                break
        self.probs, self._cell_of_leaf = _pooled(np.concatenate(self._masses), samples)

    def count(
        self, samples: Sequence[Sequence[int]], rounding: float
    ) -> tuple[Counts, list[tuple[Sequence[int], int, int]]]:
        """The samples by cell, and those in none: their tokens, at which of them, and whether IMPOSSIBLE or ENDED."""
        cells, outside = [], []
        for tokens in samples:
            cell, position = self._cell_of(tokens, rounding)
            if cell >= 0:
                cells.append(cell)
            else:
                outside.append((tokens, position, cell))
        return Counts(np.bincount(np.array(cells, dtype=np.int64), minlength=len(self.probs)), self.probs), outside

    def _cell_of(self, tokens: Sequence[int], rounding: float) -> tuple[int, int]:
        """The cell of a sample's first tokens and the position that decided it.

        A token counts as possible where its logit being larger by `rounding` would make it so (at the edge of a top-k
        or a nucleus, rounding decides); it then falls into the cell of the rarest.
        """
        for position, token in enumerate(tokens):
            prefix = tuple(tokens[:position])
            leaves = self._leaves[prefix]
            leaf = int(leaves[token]) if 0 <= token < len(leaves) else IMPOSSIBLE
            if leaf == IMPOSSIBLE:
                edge = 0 <= token < len(leaves) and self._at_the_edge(prefix, token, rounding)
                return (len(self.probs) - 1 if edge else IMPOSSIBLE), position
            if leaf != _INNER:
                return int(self._cell_of_leaf[leaf]), position
        return ENDED, len(tokens)

    def _at_the_edge(self, prefix: Tokens, token: int, rounding: float) -> bool:
        raised = self._logits[prefix].clone()
        raised[token] += rounding
        return bool(probabilities(raised, self.sampling)[token] > 0)

    def _new_leaves(self, probs: Float[np.ndarray, " vocab"], inner: np.ndarray) -> Int[np.ndarray, " vocab"]:
        """Number the leaves below one prefix: likely tokens alone, the others together in order of probability."""
        order = np.argsort(-probs, kind="stable")
        order = order[(probs[order] > 0) & ~inner[order]]
        group, masses = _grouped(probs[order], self.samples)
        leaves = np.where(inner, _INNER, IMPOSSIBLE).astype(np.int32)
        leaves[order] = sum(len(each) for each in self._masses) + group
        self._masses.append(masses)
        return leaves


def _grouped(
    masses: Float[np.ndarray, " n"], samples: int
) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, " groups"]]:
    """Falling masses in groups of as many as it takes to expect enough samples (the last one may fall short).

    Returns every mass's group and the groups' masses.
    """
    ahead = np.concatenate([[0.0], np.cumsum(samples * masses)])
    starts = [0]
    while starts[-1] < len(masses):
        starts.append(int(np.searchsorted(ahead, ahead[starts[-1]] + _LEAST_EXPECTED * (1 - 1e-9))))
    sizes = np.diff(np.minimum(starts, len(masses)))
    group = np.repeat(np.arange(len(sizes)), sizes)
    return group, np.bincount(group, weights=masses, minlength=len(sizes)).astype(np.float64)


def _pooled(
    masses: Float[np.ndarray, " leaves"], samples: int
) -> tuple[Float[np.ndarray, " cells"], Int[np.ndarray, " leaves"]]:
    """Cells from leaves: the cells' probabilities and every leaf's cell.

    What remains too rare for a cell of its own joins the last one: a cell that expects next to nothing would drown the
    others in Pearson's statistic.
    """
    order = np.argsort(-masses, kind="stable")
    group, probs = _grouped(masses[order], samples)
    if len(probs) > 1 and samples * probs[-1] < _LEAST_EXPECTED:
        group = np.minimum(group, len(probs) - 2)
        probs = np.bincount(group, weights=masses[order])
    cells = np.empty(len(masses), dtype=np.int64)
    cells[order] = group
    return probs / probs.sum(), cells


def frequent_cells(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> Pair:
    """Two samples by cell: sequences frequent in both together, and for every frequent start the rest of it."""
    mine, other = Counter(map(tuple, first)), Counter(map(tuple, second))
    for length in range(max(map(len, mine | other)), 0, -1):
        for tokens in [key for key in mine | other if len(key) == length]:
            if mine[tokens] + other[tokens] < 2 * _LEAST_EXPECTED:
                mine[tokens[:-1]] += mine.pop(tokens, 0)
                other[tokens[:-1]] += other.pop(tokens, 0)
    cells = sorted(key for key in mine | other if mine[key] + other[key])
    return Pair(np.array([mine[key] for key in cells]), np.array([other[key] for key in cells]))
