"""Sets of encoded examples: content, counts, and what was dropped."""

import pytest

from draftsmith.data.chats import Encoded, encode_chat, encode_text
from draftsmith.data.encoded_set import EncodedSet, encode_examples
from draftsmith.data.sources import Example
from draftsmith.errors import BadInput


def chat(prompt: str, answer: str, name: int = 0) -> Example:
    return Example(name, [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}])


def test_set_gives_back_what_was_encoded(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    examples = [chat("a", "b"), Example(1, [], "The market opens."), chat("Line one.", "Line two.")]
    encoded = encode_examples(tokenizer, examples, 100)
    expected = [
        encode_chat(tokenizer, examples[0].messages, 100),
        *encode_text(tokenizer, "The market opens.", 100),
        encode_chat(tokenizer, examples[2].messages, 100),
    ]
    assert list(encoded) == expected
    assert encoded[-1] == expected[-1]
    assert encoded.sources.tolist() == [0, 1, 2]
    assert encoded.num_supervised == sum(sum(item.loss_mask) for item in expected)
    assert encoded.supervised.tolist() == [sum(item.loss_mask) for item in expected]


def test_cut_and_dropped_examples_are_counted_and_said(make_tokenizer):
    tokenizer = make_tokenizer("gemma")
    examples = [chat("a", "b" * 40), chat("c " * 60, "b"), chat("a", "b")]
    encoded = encode_examples(tokenizer, examples, 20)
    assert (len(encoded), encoded.num_truncated, encoded.num_dropped) == (2, 1, 1)
    assert encoded.sources.tolist() == [0, 2]
    assert "1 cut to max_length 20" in encoded.describe()
    assert "1 dropped" in encoded.describe()


def test_nothing_left_is_an_error_with_the_name_of_the_data(make_tokenizer):
    with pytest.raises(BadInput, match=r"x\.jsonl: none of the 1 examples"):
        encode_examples(make_tokenizer("chatml"), [chat("a", "b")], 3, where="x.jsonl")
    with pytest.raises(BadInput, match=r"x\.jsonl is empty"):
        encode_examples(make_tokenizer("chatml"), [], 3, where="x.jsonl")


def test_error_names_the_example(make_tokenizer):
    examples = [chat("a", "b"), Example("bad-one", [{"role": "user", "content": "a"}])]
    with pytest.raises(BadInput, match="example bad-one: the chat has no assistant turn"):
        encode_examples(make_tokenizer("chatml"), examples, 100)


def test_collect_takes_answers_of_the_target():
    encoded = EncodedSet.collect([(4, Encoded([1, 2, 3], [False, True, True])), (7, Encoded([1, 2], [False, False]))])
    assert len(encoded) == 1
    assert encoded.sources.tolist() == [4]
    assert encoded.num_dropped == 1


def test_real_chats(make_tokenizer, shared_data):
    from draftsmith.data.sources import read_examples

    tokenizer = make_tokenizer("chatml")
    examples = read_examples(shared_data / "corpora" / "oasst_en_chat.jsonl", limit=60, require_answers=True)
    encoded = encode_examples(tokenizer, examples, 100_000)
    for item, source in zip(encoded, examples, strict=True):
        learned = tokenizer.decode([i for i, m in zip(item.input_ids, item.loss_mask, strict=True) if m])
        answers = [m["content"] + "<|im_end|>" for m in source.messages if m["role"] == "assistant"]
        assert learned == "".join(answers)
