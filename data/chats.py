"""Chats and plain text to token ids and exact loss masks.

The rendered chat is tokenized once, as a whole, exactly as the target sees it when serving. Supervised are the answer's
tokens and the template's end of the turn (``<|im_end|>``, EOS): never a header, never a prompt, never the white space
after the end of a turn. A token that mixes header and answer is not supervised, since serving never asks for it.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from ..errors import BadInput
from .turns import Message, Turn, as_messages, assistant_turns, has_template, marked_spans, render, role_surroundings


class Encoded(NamedTuple):
    """Token ids of one example and which of them are learned."""

    input_ids: list[int]
    loss_mask: list[bool]  # True: a supervised label, predicted from the position before; never True at position 0
    truncated: int = 0  # tokens cut off at the end


class _Token(NamedTuple):
    """A token and the characters it stands for, in a partition of the text (trimmed white space included)."""

    id: int
    start: int
    end: int


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], max_length: int) -> Encoded:
    """Ids and loss mask of a chat, at most `max_length` tokens, cut at the end.

    With a chat template the ids are those of ``tokenizer.apply_chat_template``, plus EOS where the template writes
    nothing after the last answer. Without one the turns are joined to plain text, answers supervised, EOS at the end.
    ``{% generation %}`` markers decide what an answer is where the template has them. Raises BadInput when there is no
    assistant turn, when the template refuses the chat or hides its answers, and when nothing supervised is left.
    """
    encoded = truncate(encode_whole_chat(tokenizer, messages), max_length)
    if not any(encoded.loss_mask):
        raise BadInput(f"nothing supervised is left: the first answer begins after max_length ({max_length}) tokens")
    return encoded


def encode_whole_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Encoded:
    """As `encode_chat`, of any length."""
    messages = as_messages(messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadInput("the chat has no assistant turn, so there is nothing to learn")
    templated = has_template(tokenizer)
    if templated:
        text = render(tokenizer, messages)
        turns = _answers(tokenizer, messages, text)
    else:
        text, turns = _plain_turns(messages)
    tokens = _tokenize(tokenizer, text, special_tokens=not templated)
    mask = _mask(tokenizer, tokens, text, turns)
    if not any(mask):
        raise BadInput("no token holds assistant text alone, so nothing can be supervised (merged with the header?)")
    ids = [token.id for token in tokens]
    if messages[-1]["role"] == "assistant":
        _end_with_eos(tokenizer, ids, mask, tokens, text)
    return Encoded(ids, mask)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int) -> list[Encoded]:
    """Plain text without a prompt: every token but the first is supervised, EOS at the end.

    Longer texts become consecutive pieces of at most `max_length` tokens. Raises BadInput for a text of one token.
    """
    if max_length < 2:
        raise BadInput(f"max_length is {max_length}, expected at least 2")
    ids = _plain_prompt_ids(tokenizer, text)
    ids += [] if (eos := _eos_id(tokenizer)) is None else [eos]
    pieces = [ids[start : start + max_length] for start in range(0, len(ids), max_length)]
    encoded = [Encoded(piece, [False] + [True] * (len(piece) - 1)) for piece in pieces if len(piece) > 1]
    if not encoded:
        raise BadInput(f"the text {text!r} gives {len(ids)} token, expected at least 2")
    return encoded


def encode_response(input_ids: Sequence[int], prompt_length: int) -> Encoded:
    """A prompt's ids and the answer that follows them: the answer is supervised, as the target wrote it."""
    if not 0 < prompt_length < len(input_ids):
        raise BadInput(f"prompt of {prompt_length} tokens in a sequence of {len(input_ids)}: expected both to be there")
    return Encoded(list(input_ids), [False] * prompt_length + [True] * (len(input_ids) - prompt_length))


def truncate(encoded: Encoded, max_length: int) -> Encoded:
    """The first `max_length` tokens; `truncated` says how many were cut. The mask may be all False afterwards."""
    cut = max(0, len(encoded.input_ids) - max_length)
    return Encoded(encoded.input_ids[:max_length], encoded.loss_mask[:max_length], encoded.truncated + cut)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[str] | Sequence[Message]) -> list[int]:
    """Ids after which the target writes its answer.

    `prompt` is a user turn, several of them (nothing between them), or messages. With a chat template this is the
    rendered chat with its generation prompt; without one the turns joined by line ends, BOS in front if there is one.
    """
    turns = [prompt] if isinstance(prompt, str) else list(prompt)
    if not turns:
        raise BadInput("the prompt has no turn")
    messages = as_messages([{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in turns])
    if has_template(tokenizer):
        text = render(tokenizer, messages, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    ids = _plain_prompt_ids(tokenizer, _plain_turns(messages)[0])
    if not ids:
        raise BadInput("the prompt is empty, and the tokenizer has no BOS to begin with")
    return ids


def user_header(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids after which a user would write: a target continues them with a prompt of its own (arXiv:2406.08464).

    A default system prompt is a part of it. Without a chat template this is BOS, else EOS. Raises BadInput without
    either. Spaces at the end are left out, since a word brings its own.
    """
    if has_template(tokenizer):
        header = role_surroundings(tokenizer, "user")[0].rstrip(" ")
        return list(tokenizer(header, add_special_tokens=False).input_ids)
    for token_id in (tokenizer.bos_token_id, _eos_id(tokenizer)):
        if isinstance(token_id, int):
            return [token_id]
    raise BadInput("the tokenizer has neither chat template nor BOS nor EOS: the target cannot write its own prompts")


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase, role: str = "assistant") -> tuple[int, ...]:
    """Ids that each end a turn of `role`: the template's end of the turn, then the tokenizer's EOS."""
    found: list[int] = []
    if has_template(tokenizer):
        tail = role_surroundings(tokenizer, role)[1]
        special = _special_ids(tokenizer, len(tokenizer))
        found = [i for i in tokenizer(tail, add_special_tokens=False).input_ids if i in special][:1]
    if (eos := _eos_id(tokenizer)) is not None and eos not in found:
        found.append(eos)
    return tuple(found)


def _answers(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str) -> list[Turn]:
    """Assistant turns in the rendered text, where the template's markers say so or by comparing renderings."""
    marked = marked_spans(tokenizer, messages)
    if marked is None:
        turns = assistant_turns(tokenizer, messages, text)
        if not turns:
            raise BadInput("the chat template writes none of the chat's assistant turns, so nothing can be supervised")
        return turns
    if not marked:
        raise BadInput("the chat template's {% generation %} markers enclose nothing in this chat")
    try:
        located = assistant_turns(tokenizer, messages, text)
    except BadInput:  # the markers are enough; only the white space around them is then unknown
        located = []
    return [_within_marks(start, end, located) for start, end in marked]


def _within_marks(start: int, end: int, located: Sequence[Turn]) -> Turn:
    """The marked span, with what is known about the turn that it stands in."""
    for turn in located:
        if turn.given_end <= end and start <= turn.tail_end:
            given_end = turn.given_end if turn.start == start else start
            return Turn(given_end, start, end, max(end, turn.tail_end), marked=True)
    return Turn(start, start, end, end, marked=True)


def _plain_turns(messages: Sequence[Message]) -> tuple[str, list[Turn]]:
    """The turns as plain text: line ends between them, a space before an answer where neither side has white space."""
    text, turns = "", []
    for message in messages:
        content, joiner = message["content"], ""
        answer = message["role"] == "assistant"
        if text and content and not text[-1].isspace() and not content[0].isspace():
            joiner = " " if answer else "\n"
        if answer:
            start = len(text) + len(joiner)
            turns.append(Turn(len(text), start, start + len(content), start + len(content)))
        text += joiner + content
    return text, turns


def _plain_prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids = list(tokenizer(text).input_ids)
    return ids[:-1] if len(ids) > 1 and ids[-1] == _eos_id(tokenizer) else ids


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str, special_tokens: bool) -> list[_Token]:
    """Tokens with the characters they stand for. Characters between two offsets belong to the later token."""
    if not tokenizer.is_fast:
        raise BadInput(f"{type(tokenizer).__name__} gives no character offsets: exact loss masks need a fast tokenizer")
    encoding = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=True)
    tokens, covered = [], 0
    for token_id, (start, end) in zip(encoding.input_ids, encoding.offset_mapping, strict=True):
        # Byte-level tokenizers trim white space from offsets, and give every byte of a character the same ones.
        tokens.append(_Token(token_id, min(start, covered), max(end, min(start, covered))))
        covered = max(covered, end)
    return tokens


def _mask(tokenizer: PreTrainedTokenizerBase, tokens: list[_Token], text: str, turns: Sequence[Turn]) -> list[bool]:
    mask = [False] * len(tokens)
    special = _special_ids(tokenizer, len(tokenizer))
    for turn in turns:
        limit = _supervised_end(tokenizer, tokens, text, turn, special)
        for position, token in enumerate(tokens):
            if token.start >= turn.given_end and turn.start < token.end <= limit:
                mask[position] = True
    if mask:
        mask[0] = False  # nothing stands before it to predict it from
    return mask


def _supervised_end(
    tokenizer: PreTrainedTokenizerBase, tokens: list[_Token], text: str, turn: Turn, special: frozenset[int]
) -> int:
    """Where the supervised text of a turn ends: after its first special token, else after its last word."""
    if turn.marked and any(token.id in special and token.end == turn.end for token in tokens):
        return turn.end  # the markers enclose the end of the turn already
    limit = turn.end
    for token in tokens:
        if token.end <= turn.end:
            continue
        if token.id in special and (token.start < turn.tail_end or token.id == _eos_id(tokenizer)):
            return token.end
        if token.end > turn.tail_end:
            break
        if not text[turn.end : token.end].isspace() and not text[token.start : token.end].isspace():
            limit = token.end
    return limit


def _end_with_eos(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[bool], tokens: list[_Token], text: str
) -> None:
    """Make EOS the last, supervised token where nothing but white space follows the last answer. Changes both lists."""
    last = max(position for position, supervised in enumerate(mask) if supervised)
    eos = _eos_id(tokenizer)
    if eos is None or ids[last] in _special_ids(tokenizer, len(tokenizer)):
        return
    following = [token for token in tokens[last + 1 :] if token.end > token.start]
    if all(text[token.start : token.end].isspace() for token in following):
        del ids[last + 1 :], mask[last + 1 :]
        ids.append(eos)
        mask.append(True)


def _eos_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    eos = tokenizer.eos_token_id
    return eos if isinstance(eos, int) else None


@lru_cache(maxsize=4)
def _special_ids(tokenizer: PreTrainedTokenizerBase, size: int) -> frozenset[int]:
    """Ids of special tokens. `size` keeps a tokenizer that has grown from being read out of the cache."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))
