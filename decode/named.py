"""Names with options, as people write them: ``prompt_lookup:max_ngram=4,min_ngram=2``."""

from collections.abc import Mapping
from typing import Any

from ..errors import BadInput, nearest

Options = Mapping[str, type]  # each option's type: int, float or str


def parse_named(text: str, known: Mapping[str, Options], what: str, more: str = "") -> tuple[str, dict[str, Any]]:
    """The name and its options. `known` maps names to the options they take; `what` says what is named.

    Raises:
        BadInput: an unknown name or option, or a value of another type. `more` is added to what is said of a name.
    """
    name, colon, rest = text.partition(":")
    if name not in known:
        raise BadInput(f"{what}: unknown {name!r}{nearest(name, known)}, expected {more}one of {', '.join(known)}")
    options: dict[str, Any] = {}
    for item in rest.split(",") if colon else []:
        option, equals, value = (part.strip() for part in item.partition("="))
        if option not in known[name] or not equals:
            takes = ", ".join(f"{taken}={'TEXT' if kind is str else 'NUMBER'}" for taken, kind in known[name].items())
            raise BadInput(f"{what}: {name!r} has no option {item!r}{nearest(option, known[name])}, it takes: {takes}")
        kind = known[name][option]
        try:
            options[option] = kind(value)
        except ValueError:
            number = "a whole number" if kind is int else "a number"
            raise BadInput(f"{what}: {option} of {name!r} is {value!r}, expected {number}") from None
    return name, options


def check_whole(what: str, least: int = 1, **values: int) -> None:
    """Raise BadInput unless all values are at least `least`."""
    for name, value in values.items():
        if value < least:
            raise BadInput(f"{what}: {name} is {value!r}, expected a whole number of at least {least}")


def check_share(what: str, **values: float) -> None:
    """Raise BadInput unless all values are from 0 to 1."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise BadInput(f"{what}: {name} is {value!r}, expected a number from 0 to 1")
