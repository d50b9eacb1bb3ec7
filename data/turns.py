"""Where a chat template writes each assistant turn, as character positions in the rendered text.

No template is parsed and no header is guessed. The chat is rendered once more with the answer replaced by a marker
word: what stands before and after the marker is the template's own text around that turn, so the answer is whatever
fills the same place in the real text. This holds for templates that add a system prompt, trim content or strip earlier
thinking, because the marker stands in the same conversation. Where the two renderings disagree, the chat is refused.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ..errors import BadInput

Message = Mapping[str, str]
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Turn(NamedTuple):
    """One assistant turn in the rendered text: character positions, ends exclusive."""

    given_end: int  # end of what is given when serving (the generation prompt); the same as `start` but for white space
    start: int  # first character of the answer
    end: int  # end of the answer
    tail_end: int  # end of what the template writes after this answer because the turn is over
    marked: bool = False  # `end` was set by the template's markers, and may stand behind the end of the turn


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer renders chats; one that does not continues plain text."""
    return bool(getattr(tokenizer, "chat_template", None))


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of the chat template's text; of the empty text when there is none."""
    text = str(tokenizer.get_chat_template()) if has_template(tokenizer) else ""
    return hashlib.sha256(text.encode()).hexdigest()


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
    """The chat as text. Raises BadInput with the template's own reason when it refuses the chat."""
    conversation = [dict(message) for message in messages]
    try:
        return str(
            tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=add_generation_prompt)
        )
    except Exception as error:  # a template is a programme of its own
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise BadInput(f"the chat template refuses a chat with the roles {roles}: {_one_line(error)}") from error


def marked_spans(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[tuple[int, int]] | None:
    """What the template's ``{% generation %}`` markers enclose, as (start, end); None when it has no such markers."""
    template = tokenizer.get_chat_template()
    if not GENERATION_MARKER.search(template):
        return None
    special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)
    spans: Any = render_jinja_template(
        conversations=[[dict(message) for message in messages]],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **special_tokens,
    )[1]
    return [(start, end) for start, end in spans[0] if start < end]


def assistant_turns(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str) -> list[Turn]:
    """Every assistant turn that the template writes, in order. `text` is ``render(tokenizer, messages)``.

    A turn whose content leaves no trace in `text` (a template may drop old turns) is left out. Raises BadInput when the
    place of a turn cannot be established.
    """
    marker = _marker(messages, text)
    turns: list[Turn] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn = _locate(tokenizer, messages, index, text, marker)
        if turn is None:
            continue
        if turns and turn.given_end < turns[-1].end:
            raise BadInput(f"message {index}: the chat template writes this assistant turn before the one before it")
        turns.append(turn)
    return turns


def role_surroundings(tokenizer: PreTrainedTokenizerBase, role: str) -> tuple[str, str]:
    """What the template writes before and after one turn of `role` ("user" or "assistant"): (header, tail).

    The header starts at the beginning of the text (a default system prompt included); the tail is what ends the turn
    whatever follows.
    """
    marker = _marker([], "")
    user, assistant = {"role": "user", "content": marker}, {"role": "assistant", "content": "b"}
    if role == "user":
        before, tail = _around(render(tokenizer, [user]), marker, 0)
        _, longer = _around(render(tokenizer, [user, assistant]), marker, 0)
    else:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}]
        before, tail = _around(render(tokenizer, chat), marker, 1)
        _, longer = _around(render(tokenizer, [*chat, {"role": "user", "content": "c"}]), marker, 1)
    return before, _tail(longer, tail)


def _locate(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], index: int, text: str, marker: str
) -> Turn | None:
    """The turn of ``messages[index]``, or None when its content leaves no trace in `text`."""
    marked = {**messages[index], "content": marker}
    around = render(tokenizer, [*messages[:index], marked, *messages[index + 1 :]])
    if around == text and marker not in around:
        return None
    before, after = _around(around, marker, index)
    # The same turn as the newest message: what follows the marker there belongs to the turn, not to the next message.
    before_last, after_last = _around(render(tokenizer, [*messages[:index], marked]), marker, index)
    prompt, without_header = _generation_prompt(tokenizer, messages[:index])
    joiner = before_last[len(prompt) :] if prompt and before_last.startswith(prompt) else ""
    if not before.endswith(joiner):
        joiner = ""  # only the newest turn has it
    header_end = len(before) - len(joiner)

    end = len(text) - len(after)
    if not text.endswith(after):
        raise BadInput(f"message {index}: what the chat template writes after an assistant turn depends on its content")
    if text.startswith(before) and len(before) <= end:
        start = len(before)
    elif prompt != without_header and text.startswith(before[:header_end]) and header_end <= end:
        start = header_end  # the template writes a part of the content (thinking) in a form of its own
    else:
        raise BadInput(
            f"message {index}: what the chat template writes before an assistant turn depends on its content"
        )
    given_end = header_end if joiner.isspace() else start
    return Turn(min(given_end, start), start, end, end + len(_tail(after, after_last)))


def _generation_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[str, str]:
    """The text given when serving this turn, and the same without the generation prompt; empty when there is none."""
    if not messages:
        return "", ""
    try:
        return render(tokenizer, messages, add_generation_prompt=True), render(tokenizer, messages)
    except BadInput:  # a template may refuse to end here; then nothing is known about what serving would give
        return "", ""


def _around(text: str, marker: str, index: int) -> tuple[str, str]:
    parts = text.split(marker)
    if len(parts) != 2:
        how = "does not write the content" if len(parts) == 1 else "writes the content more than once"
        raise BadInput(f"message {index}: the chat template {how} of this turn, so its tokens cannot be told apart")
    return parts[0], parts[1]


def _marker(messages: Sequence[Message], text: str) -> str:
    """A word without white space that stands nowhere in the chat."""
    marker, everything = "ANSWERMARK", text + "".join(message["content"] for message in messages)
    while marker in everything:
        marker += "X"
    return marker


def _tail(after: str, after_last: str) -> str:
    """What is written because the turn is over: the part of `after` that is the same when nothing follows the turn."""
    shorter = min(len(after), len(after_last))
    common = after[: next((i for i in range(shorter) if after[i] != after_last[i]), shorter)]
    if common == after_last:
        return common
    # Two different words may begin alike ("<|user|>", "<|endoftext|>"): keep what both share up to white space.
    return common[: len(common) - len(re.split(r"\s", common)[-1])]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def as_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Checked copies with role and content only. Lists of text parts are joined; anything else raises BadInput."""
    checked = []
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise BadInput(f"message {index} has no role (expected role and content)")
        for key in ("tool_calls", "reasoning_content", "thinking"):
            if message.get(key):
                raise BadInput(f"message {index} has {key!r}, which is not supported: write it into the content")
        if isinstance(content, list):
            if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
                raise BadInput(f"message {index}: a content part is not text")
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise BadInput(f"message {index} ({role}) has no text content, but {type(content).__name__}")
        checked.append({"role": role, "content": content})
    return checked
