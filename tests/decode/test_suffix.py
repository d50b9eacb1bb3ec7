"""Suffix lookup: the longest match, its most frequent continuation, own text and corpus, chains and trees."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith import speculative_generate
from draftsmith.data.chats import encode_prompt, encode_whole_chat
from draftsmith.decode.confidence import Confidence
from draftsmith.decode.drafters import drafter_without_training
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.suffix import Suffix
from draftsmith.decode.tree import as_layout
from draftsmith.errors import BadInput
from draftsmith.models.target import Target


def most_frequent(text, longest):
    """By search: the token that followed the longest repeated suffix most often, of equals the latest; None: no match."""
    for n in range(min(longest, len(text) - 1), 0, -1):
        starts = [i for i in range(len(text) - n) if text[i : i + n] == text[-n:]]
        if starts:
            followed = [text[i + n] for i in starts]
            return max(followed, key=lambda token: (followed.count(token), len(followed) - followed[::-1].index(token)))
    return None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(0, 23), st.integers(1, 5))
def test_the_first_token_is_what_followed_the_longest_match_most_often(reference, text, at, longest):
    prompt = text[: max(1, min(at, len(text)))]
    drafter = reference.started(Suffix(max_match=longest), [prompt])
    drafter.observe(reference.emitted([text[len(prompt) :]]), None)
    expected = most_frequent(text, longest)
    assert [row[:1] for row in reference.proposed(drafter, 3)] == [[] if expected is None else [expected]]


def test_frequency_decides_where_prompt_lookup_takes_the_latest(reference):
    drafter = reference.started(Suffix(), [[9, 1, 2, 8, 1, 2, 7, 1, 3, 6, 1]])
    assert reference.proposed(drafter, 1) == [[2]]
    assert reference.proposed(reference.started(Suffix(min_match=2), [[9, 1, 2, 8, 1]]), 1) == [[]]


def test_a_text_that_repeats_itself_is_drafted_on(reference):
    drafter = reference.started(Suffix(), [[1, 2, 3, 1, 2, 3, 1]])
    assert reference.proposed(drafter, 7) == [[2, 3, 1, 2, 3, 1, 2]]


def test_the_corpus_helps_where_its_match_is_longer(reference):
    corpus = [[1, 2, 3, 4, 5], [6, 2, 3, 9]]
    drafter = reference.started(Suffix(corpus=corpus), [[1, 2, 3], [3, 7, 3], [2, 3, 8, 6, 2, 3], [5, 5, 5], [9]])
    # Found in the corpus; own text, as both match one token; own match of 2, the corpus's of 3; own; at a text's end.
    assert reference.proposed(drafter, 2) == [[4, 5], [7, 3], [9], [5, 5], []]


def test_a_tree_holds_the_most_frequent_continuations(reference):
    drafter = Suffix()
    drafter.set_tree(as_layout([2, 1]))
    reference.started(drafter, [[1, 2, 5, 1, 2, 6, 1, 3, 7, 1], [4, 8]])
    draft = drafter.propose(2, Sampling(), [])
    assert draft.lengths is not None
    assert draft.lengths.tolist() == [4, 0]
    assert draft.tokens[0].tolist() == [2, 3, 6, 7]  # after 1: twice 2, once 3; after 1 2 the later of 5 and 6
    assert draft.parents[0].tolist() == [-1, -1, 0, 1]


@pytest.mark.parametrize(("before", "expected"), [(False, [2, 5]), (True, [2])])
def test_confidence_is_the_share_of_the_most_frequent_continuation(before, expected, reference):
    """After 1 always came 2, but after 1 2 came 4 or 5."""
    drafter = reference.started(Suffix(), [[1, 2, 4, 1, 2, 5, 0, 1]])
    drafter.set_confidence(Confidence(0.6, before))
    assert reference.proposed(drafter, 4) == [expected]
    drafter.set_confidence(None)
    assert reference.proposed(drafter, 4) == [[2, 5, 0, 1]]


def test_a_corpus_of_the_targets_own_text_is_accepted(tiny_llama, reference):
    target, prompt = tiny_llama(seed=1), reference.prompt_of(5, 2)
    text = reference.naive_greedy(target, prompt, 24)
    out = speculative_generate(
        target, Suffix(corpus=[text]), torch.tensor([prompt]), max_new_tokens=24, eos_token_id=[]
    )
    assert out.tokens[0].tolist() == text
    assert out.stats.accepted == out.stats.drafted > 0


def test_options_out_of_range_are_one_line():
    with pytest.raises(BadInput, match="min_match is 0"):
        Suffix(min_match=0)


def test_a_corpus_is_read_from_a_file_by_name(tmp_path, tiny_llama, tiny_tokenizer):
    tokenizer = tiny_tokenizer
    target = Target(tiny_llama(vocab_size=len(tokenizer)), tokenizer, "tiny", ())
    chats = [
        {"messages": [{"role": "user", "content": "name a color"}, {"role": "assistant", "content": "blue and green"}]},
        {"prompt": "and another one"},
        {"text": "a plain text"},
    ]
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(map(json.dumps, chats)))
    drafter = drafter_without_training(f"suffix:corpus={file},max_match=8", target)
    assert isinstance(drafter, Suffix)
    assert drafter.max_match == 8
    expected = [
        encode_whole_chat(tokenizer, chats[0]["messages"]).input_ids,
        encode_prompt(tokenizer, ["and another one"]),
        tokenizer("a plain text", add_special_tokens=False)["input_ids"],
    ]
    assert drafter.corpus.num_tokens == sum(len(ids) + 1 for ids in expected)
    # What stands in the corpus is drafted after its own beginning, wherever the prompt came from.
    beginning, rest = expected[0][:-4], expected[0][-4:]
    ids = torch.tensor([beginning])
    drafter.start(ids, torch.ones_like(ids))
    assert drafter.propose(4, Sampling(), [torch.Generator()]).tokens.tolist() == [rest]
    for name, says in ((f"suffix:corpus={tmp_path / 'none.jsonl'}", "none.jsonl"), ("suffix:korpus=x", "corpus=TEXT")):
        with pytest.raises(BadInput, match=says):
            drafter_without_training(name, target)
    with pytest.raises(BadInput, match="no tokenizer"):
        drafter_without_training(f"suffix:corpus={file}", replace(target, tokenizer=None))
