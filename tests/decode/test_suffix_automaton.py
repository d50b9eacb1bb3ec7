"""The automaton against a search through the text."""

import time

from hypothesis import given
from hypothesis import strategies as st

from draftsmith.decode.suffix_automaton import SuffixAutomaton


def ends(text, part):
    """Where `part` ends in `text`."""
    return [i + len(part) - 1 for i in range(len(text) - len(part) + 1) if text[i : i + len(part)] == part]


def built(text, longest):
    automaton = SuffixAutomaton(longest)
    for token in text:
        automaton.extend(token)
    return automaton


texts = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@given(texts, st.integers(1, 6))
def test_it_knows_every_substring_and_counts_the_short_ones(text, longest):
    automaton = built(text, longest)
    for length in range(1, len(text) + 1):
        for part in {tuple(text[i : i + length]) for i in range(len(text) - length + 1)}:
            state = 0
            for token in part:
                state = automaton.follow(state, token)
                assert state > 0
            assert automaton.length[automaton.link[state]] < length <= automaton.length[state]
            if length <= longest + 1:
                found = ends(text, list(part))
                assert (automaton.count[state], automaton.latest[state]) == (len(found), found[-1])
    assert automaton.follow(0, 3) < 0


@given(texts, st.integers(1, 6))
def test_it_finds_the_longest_suffix_that_occurred_before_and_what_followed_it(text, longest):
    automaton = built(text, longest)
    expected = next((n for n in range(min(longest, len(text)), 0, -1) if len(ends(text, text[-n:])) > 1), 0)
    state = automaton.suffix_before()
    assert min(automaton.length[state], longest) == expected
    if not expected:
        return
    followed = [text[end + 1] for end in ends(text, text[-expected:])[:-1]]
    tokens = [token for token, _ in automaton.continuations(state)]
    assert set(tokens) == set(followed)
    rank = {token: (followed.count(token), len(followed) - followed[::-1].index(token)) for token in tokens}
    assert tokens == sorted(tokens, key=rank.__getitem__, reverse=True)


def test_a_text_that_repeats_itself_costs_no_more_a_token_than_another():
    """Quadratic work would take minutes."""
    start = time.process_time()
    automaton = built([7] * 20_000 + [0, 1] * 10_000, 8)
    assert time.process_time() - start < 10
    assert len(automaton.length) <= 2 * automaton.num_tokens
