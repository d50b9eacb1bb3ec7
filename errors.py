"""The one exception that means "the user's input is wrong": the command line prints its line and exits with 2."""

import difflib
from collections.abc import Iterable


class BadInput(Exception):
    """Bad input from the user. The message is one line: which file or key, what is wrong, what was expected."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the closest of `known`, or an empty string when nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
