"""Stop strings: where in a row's new tokens the first of them is complete."""

from collections.abc import Sequence
from typing import Any

from ..errors import BadInput
from ..models.target import Target


class StopStrings:
    """Finds the token that completes a stop string. Strings may straddle tokens in any way."""

    def __init__(self, tokenizer: Any, strings: Sequence[str]):
        self.tokenizer = tokenizer
        self.strings = [string for string in strings if string]
        # No token is shorter than one byte of text, so this many tokens always hold a string's last characters.
        self.tail = max((len(string.encode()) for string in self.strings), default=0) + 8

    @classmethod
    def of(cls, target: Target, strings: Sequence[str] | None) -> "StopStrings | None":
        """None when there are no strings.

        Raises:
            BadInput: the target has no tokenizer.
        """
        if not strings:
            return None
        if target.tokenizer is None:
            raise BadInput("stop strings need the target's tokenizer: load the target with load_target")
        return cls(target.tokenizer, strings)

    def cut(self, before: Sequence[int], new: Sequence[int]) -> int | None:
        """How many of the `new` tokens to emit so that a string is just complete; None: no string is.

        `before` are the tokens emitted earlier.
        """
        context = list(before[-self.tail :])
        already = self._text(context)
        for count in range(1, len(new) + 1):
            text = self._text(context + list(new[:count]))
            # Only occurrences that the new tokens complete: an earlier one would have ended the row.
            if any(text.count(string) > already.count(string) for string in self.strings):
                return count
        return None

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)
