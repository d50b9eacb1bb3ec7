"""A suffix automaton: every substring of a growing text, where it occurred last, and how often."""

from array import array

_NONE = -1


class SuffixAutomaton:
    """The smallest automaton of all suffixes of a text (Blumer et al., 1985), built token by token.

    A state stands for substrings that end at the same positions: of lengths ``length[link] + 1`` to ``length``, each a
    suffix of the next. State 0 is the empty string. Adding a token takes amortised constant time, and at most `longest`
    more steps to count it: numbers of occurrences are kept for strings of at most ``longest + 1`` tokens, so that
    continuations of strings of up to `longest` tokens can be compared. Some 130 to 310 bytes a token.
    """

    def __init__(self, longest: int = 32):
        self.longest = longest
        self.length, self.link = array("i", [0]), array("i", [_NONE])
        self.count, self.latest = array("i", [0]), array("i", [_NONE])  # occurrences; end of the last one
        # Most states have one transition; the others are in `branches`.
        self._token, self._target = array("i", [_NONE]), array("i", [_NONE])
        self._branches: dict[int, dict[int, int]] = {}
        self._whole = 0  # the state of the text as a whole
        self._counted, self._counted_length = 0, 0  # the state of its last `longest` + 1 tokens, and how many there are
        self.num_tokens = 0

    def extend(self, token: int) -> None:
        """Add a token to the text."""
        new = self._add_state(self.length[self._whole] + 1)
        at = self._whole
        while at != _NONE and self.follow(at, token) == _NONE:
            self._connect(at, token, new)
            at = self.link[at]
        if at == _NONE:
            self.link[new] = 0
        else:
            there = self.follow(at, token)
            self.link[new] = there if self.length[there] == self.length[at] + 1 else self._split(at, token, there)
        self._whole = new
        self._count(token)

    def follow(self, state: int, token: int) -> int:
        """The state of a string with `token` appended, -1 when the text does not hold it."""
        if self._token[state] == token and self._target[state] != _NONE:
            return self._target[state]
        branches = self._branches.get(state)
        return _NONE if branches is None else branches.get(token, _NONE)

    def shortened(self, state: int) -> int:
        """The state of the longest suffix of at most `longest` tokens."""
        while state and self.length[self.link[state]] >= self.longest:
            state = self.link[state]
        return state

    def suffix_before(self) -> int:
        """The state of the text's longest suffix, of at most `longest` tokens, that also occurred earlier; 0: none."""
        state = self.shortened(self._counted)
        return state if self.count[state] > 1 else max(self.link[state], 0)

    def continuations(self, state: int) -> list[tuple[int, int]]:
        """Tokens that followed the state's strings and the states they lead to: the most frequent first, of equally
        frequent ones the latest."""
        branches = self._branches.get(state)
        if branches is None:
            return [] if self._target[state] == _NONE else [(self._token[state], self._target[state])]
        return sorted(branches.items(), key=lambda edge: (self.count[edge[1]], self.latest[edge[1]]), reverse=True)

    def _add_state(self, length: int) -> int:
        for values, value in (
            (self.length, length),
            (self.link, _NONE),
            (self.count, 0),
            (self.latest, _NONE),
            (self._token, _NONE),
            (self._target, _NONE),
        ):
            values.append(value)
        return len(self.length) - 1

    def _connect(self, state: int, token: int, target: int) -> None:
        branches = self._branches.get(state)
        if branches is not None:
            branches[token] = target
        elif self._target[state] == _NONE or self._token[state] == token:
            self._token[state], self._target[state] = token, target
        else:
            self._branches[state] = {self._token[state]: self._target[state], token: target}
            self._target[state] = _NONE

    def _split(self, at: int, token: int, there: int) -> int:
        """A state of its own for the strings of `there` that also end here."""
        new = self._add_state(self.length[at] + 1)
        for values in (self.link, self.count, self.latest, self._token, self._target):
            values[new] = values[there]
        if there in self._branches:
            self._branches[new] = dict(self._branches[there])
        self.link[there] = new
        while at != _NONE and self.follow(at, token) == there:
            self._connect(at, token, new)
            at = self.link[at]
        if self._counted == there and self._counted_length <= self.length[new]:
            self._counted = new
        return new

    def _count(self, token: int) -> None:
        """One more occurrence for every suffix of at most `longest` + 1 tokens."""
        state, length = self.follow(self._counted, token), min(self._counted_length + 1, self.longest + 1)
        while self.length[self.link[state]] >= length:
            state = self.link[state]
        self._counted, self._counted_length = state, length
        while state:
            self.count[state] += 1
            self.latest[state] = self.num_tokens
            state = self.link[state]
        self.num_tokens += 1
