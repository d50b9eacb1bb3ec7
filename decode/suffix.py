"""Suffix lookup: draft the most frequent continuation of the longest suffix that occurred before.

In the prompt and the output, and in an optional corpus (after arXiv:2311.08252, REST).
"""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from .confidence import Confidence
from .draft import Accepted, Draft, TargetOutputs, from_lists
from .named import check_whole
from .sampling import Sampling
from .suffix_automaton import SuffixAutomaton
from .tree import TreeLayout

_BETWEEN = -1  # stands between the texts of a corpus, so that no match spans two of them


class Suffix:
    """Looks up the newest tokens in suffix automata, one for each row's prompt and output, one for the corpus.

    The longer match drafts, the row's own where both are equally long. It is extended by its most frequent continuation
    (the latest of equally frequent ones) token by token; where nothing followed the match, it is shortened. In a tree,
    the children of a node are its most frequent continuations. A row without a match drafts nothing. Draft tokens are
    chosen without chance, so their ``draft_probs`` are one-hot.
    """

    num_parameters_read = 0

    def __init__(self, max_match: int = 32, min_match: int = 1, corpus: Iterable[Sequence[int]] = ()):
        """`corpus`: token ids of texts to look up in as well; building its automaton takes some 5 µs a token."""
        check_whole("suffix", max_match=max_match, min_match=min_match)
        self.max_match, self.min_match = max_match, min_match
        self.corpus = SuffixAutomaton(max_match)
        for text in corpus:
            for token in (*text, _BETWEEN):
                self.corpus.extend(token)
        self.layout: TreeLayout | None = None
        self.threshold = 0.0

    def set_tree(self, layout: TreeLayout | None) -> None:
        """Draft this tree from now on; None: chains."""
        self.layout = layout

    def set_confidence(self, confidence: Confidence | None) -> None:
        """End chains where the share of the most frequent continuation falls below a threshold; None: never."""
        self.threshold = 0.0 if confidence is None else confidence.threshold
        self.stop_before = confidence is not None and confidence.before

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Take new prompts."""
        self.device = input_ids.device
        lengths = attention_mask.sum(1).tolist()
        self.rows = [SuffixAutomaton(self.max_match) for _ in lengths]
        self.in_corpus = [_Match(self.corpus) for _ in lengths]
        for row, (tokens, length) in enumerate(zip(input_ids.tolist(), lengths, strict=True)):
            self._add(row, tokens[:length])

    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """Continuations of the longest matches."""
        matches = [self._longest_match(row) for row in range(len(self.rows))]
        if self.layout is None:
            return from_lists([self._chain(*match, num_tokens) for match in matches], self.device)
        layout = self.layout.truncated(num_tokens)
        trees = [_tree(*match, layout) for match in matches]
        return from_lists([tokens for tokens, _ in trees], self.device, [parents for _, parents in trees])

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Append what was emitted."""
        for row, tokens in enumerate(accepted.host_tokens):
            self._add(row, tokens)

    def _add(self, row: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.rows[row].extend(token)
        if self.corpus.num_tokens:
            for token in tokens[-self.max_match :]:
                self.in_corpus[row].advance(token)

    def _longest_match(self, row: int) -> tuple[SuffixAutomaton, int]:
        own, elsewhere = self.rows[row], self.in_corpus[row]
        state = own.suffix_before()
        length = min(own.length[state], self.max_match)
        automaton = own
        if elsewhere.length > length:
            automaton, state, length = self.corpus, elsewhere.state, elsewhere.length
        return automaton, state if length >= self.min_match else 0

    def _chain(self, automaton: SuffixAutomaton, state: int, num_tokens: int) -> list[int]:
        tokens: list[int] = []
        while state and len(tokens) < num_tokens:
            found = _continuations(automaton, state)
            if not found:
                state = automaton.link[state]
                continue
            token, following = found[0]
            sure = True
            if self.threshold:
                sure = automaton.count[following] >= self.threshold * sum(automaton.count[to] for _, to in found)
                if not sure and self.stop_before:
                    break
            tokens.append(token)
            if not sure:
                break
            state = automaton.shortened(following)
        return tokens


class _Match:
    """The longest suffix of what was read, of at most ``longest`` tokens, that a finished text holds."""

    def __init__(self, automaton: SuffixAutomaton):
        self.automaton, self.state, self.length = automaton, 0, 0

    def advance(self, token: int) -> None:
        text = self.automaton
        while self.state and text.follow(self.state, token) < 0:
            self.state = text.link[self.state]
            self.length = text.length[self.state]
        following = text.follow(self.state, token)
        if following >= 0:
            self.length = min(self.length + 1, text.longest)
            self.state = text.shortened(following)


def _continuations(automaton: SuffixAutomaton, state: int) -> list[tuple[int, int]]:
    return [edge for edge in automaton.continuations(state) if edge[0] != _BETWEEN]


def _tree(automaton: SuffixAutomaton, state: int, layout: TreeLayout) -> tuple[list[int], list[int]]:
    """Tokens and parents of `layout`'s nodes, without those that have too few continuations before them."""
    tokens: list[int] = []
    parents: list[int] = []
    places: dict[int, tuple[int, list[tuple[int, int]]]] = {-1: (-1, _nonempty(automaton, state))}
    for node, (parent, rank) in enumerate(zip(layout.parents, layout.ranks, strict=True)):
        if parent not in places or rank >= len(places[parent][1]):
            continue
        index, found = places[parent]
        token, following = found[rank]
        places[node] = len(tokens), _nonempty(automaton, automaton.shortened(following))
        tokens.append(token)
        parents.append(index)
    return tokens, parents


def _nonempty(automaton: SuffixAutomaton, state: int) -> list[tuple[int, int]]:
    """Continuations of the longest suffix of a state's strings that has any."""
    found: list[tuple[int, int]] = []
    while state and not found:
        found = _continuations(automaton, state)
        state = automaton.link[state]
    return found
