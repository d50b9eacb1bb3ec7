"""Names with options, as people write them: ``prompt_lookup:max_ngram=4,min_ngram=2``."""

from collections.abc import Mapping, Sequence

from ..errors import BadInput, nearest


def parse_named(
    text: str, known: Mapping[str, Sequence[str]], what: str, more: str = ""
) -> tuple[str, dict[str, int | float]]:
    """The name and its options. `known` maps names to the options they take; `what` says what is named.

    Raises:
        BadInput: an unknown name or option, or a value that is no number. `more` is added to what is said of a name.
    """
    name, colon, rest = text.partition(":")
    if name not in known:
        raise BadInput(f"{what}: unknown {name!r}{nearest(name, known)}, expected {more}one of {', '.join(known)}")
    options: dict[str, int | float] = {}
    for item in rest.split(",") if colon else []:
        option, equals, value = (part.strip() for part in item.partition("="))
        if option not in known[name] or not equals:
            takes = ", ".join(f"{taken}=NUMBER" for taken in known[name]) or "none"
            raise BadInput(f"{what}: {name!r} has no option {item!r}{nearest(option, known[name])}, it takes: {takes}")
        try:
            options[option] = int(value) if value.lstrip("+-").isdigit() else float(value)
        except ValueError:
            raise BadInput(f"{what}: {option} of {name!r} is {value!r}, expected a number") from None
    return name, options


def check_whole(what: str, least: int = 1, **values: int | float) -> None:
    """Raise BadInput unless all values are whole numbers of at least `least`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadInput(f"{what}: {name} is {value!r}, expected a whole number of at least {least}")


def check_share(what: str, **values: int | float) -> None:
    """Raise BadInput unless all values are numbers from 0 to 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise BadInput(f"{what}: {name} is {value!r}, expected a number from 0 to 1")
