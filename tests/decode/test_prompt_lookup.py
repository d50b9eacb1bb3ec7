"""Prompt lookup: longest n-gram first, latest match, never itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.decode.prompt_lookup import PromptLookup
from draftsmith.errors import BadInput


def by_search(text, num_tokens, max_ngram, min_ngram):
    """The definition: the longest n-gram that ends the text and also occurs before, where it occurs last."""
    for n in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                drafted = list(text)
                for i in range(num_tokens):  # a copy that runs into its own source goes on copying
                    drafted.append(drafted[start + n + i])
                return drafted[len(text) :]
    return []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 8, 7, 3, 5, 5, 1, 2, 3], [9, 8]),  # 1 2 3 was followed by 9 8, a single 3 later by 5 5
        ([5, 1, 5, 2, 5], [2, 5]),  # the later of two matches
        ([1, 2, 3], []),  # the newest n-gram is not its own match
        ([3], []),
        ([4, 4], [4, 4]),  # text that repeats itself goes on
        ([7, 1, 2, 1, 2], [1, 2]),
    ],
)
def test_the_longest_ngram_wins_then_the_latest_match(text, expected, reference):
    drafter = reference.started(PromptLookup(), [text])
    assert reference.proposed(drafter, 2) == [expected]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(0, 19), st.integers(1, 4), st.integers(1, 4))
def test_it_finds_what_a_search_finds_however_the_text_arrived(reference, text, at, longest, shortest):
    longest, shortest = max(longest, shortest), min(longest, shortest)
    prompt = text[: max(1, min(at, len(text)))]
    drafter = reference.started(PromptLookup(longest, shortest), [prompt])
    drafter.observe(reference.emitted([text[len(prompt) :]]), None)
    assert reference.proposed(drafter, 5) == [by_search(text, 5, longest, shortest)]


def test_rows_look_up_in_their_own_text(reference):
    drafter = reference.started(PromptLookup(), [[1, 2, 1], [1, 5, 1], [1, 7]])
    assert reference.proposed(drafter, 1) == [[2], [5], []]
    drafter.observe(reference.emitted([[2, 3], [], [1]]), None)
    assert reference.proposed(drafter, 1) == [[], [5], [7]]


def test_options_out_of_range_are_one_line():
    with pytest.raises(BadInput, match="max_ngram is 0"):
        PromptLookup(max_ngram=0)
    with pytest.raises(BadInput, match="min_ngram 4 is above max_ngram 3"):
        PromptLookup(min_ngram=4)
