"""Texts that :class:`~.suffix.Suffix` looks up in beside prompt and output, read from where training data may come from."""

from typing import Any

from ..data.chats import encode_prompt, encode_whole_chat
from ..data.sources import Example, read_examples
from ..errors import BadInput


def read_corpus(source: str, tokenizer: Any) -> list[list[int]]:
    """The token ids of every text or chat of `source`: a file, a folder or a data set id, as ``data.prompts`` takes it.

    Chats are rendered by the template that they are served with, prompts without an answer as they are asked.

    Raises:
        BadInput: nothing to read there, or nobody to encode it.
    """
    if tokenizer is None:
        raise BadInput(f"suffix: the target has no tokenizer, so the corpus {source} cannot be encoded")
    return [_ids(example, tokenizer) for example in read_examples(source)]


def _ids(example: Example, tokenizer: Any) -> list[int]:
    if example.text is not None:
        return list(tokenizer(example.text, add_special_tokens=False)["input_ids"])
    if example.has_answer:
        return encode_whole_chat(tokenizer, example.messages).input_ids
    return encode_prompt(tokenizer, example.opening)
