"""Length policies by name, as people write them (``confidence:threshold=0.3``). Imports no torch."""

from typing import Any

from .named import Options, check_share, check_whole, parse_named

# Names and the options they take.
POLICIES: dict[str, Options] = {
    "heuristic": {"first": int, "most": int},
    "confidence": {"threshold": float, "most": int},
    "auto": {"most": int, "acceptance": float, "memory": int},
}
# Draft tokens a step at most, where the name does not say otherwise.
MOST = {"heuristic": 16, "confidence": 8, "auto": 8}


def parse_policy(text: str, what: str) -> tuple[str, dict[str, Any]]:
    """A policy's name and options.

    Raises:
        BadInput: an unknown name or option, or a value out of range; `what` is the key or option that holds it.
    """
    name, options = parse_named(text, POLICIES, what, more="a number or ")
    check_whole(what, **{key: value for key, value in options.items() if isinstance(value, int)})
    check_share(what, **{key: value for key, value in options.items() if isinstance(value, float)})
    return name, options


def longest(lengths: int | str) -> int:
    """Draft tokens of a step at most: the number itself, or what the policy of this name goes up to."""
    if isinstance(lengths, int):
        return lengths
    name, options = parse_policy(lengths, "num_speculative_tokens")
    return options.get("most", MOST[name])
