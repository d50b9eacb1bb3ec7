"""From pydantic's validation errors to one line each: where, which key, what it got, what was expected.

Imports no torch and knows no recipe in particular: the schema is an argument.
"""

import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from .errors import nearest

Path = tuple[str, ...]  # a dotted key, in parts; list items by their index
Origin = Callable[[Path], str]  # where a key was written, such as "a.yaml line 3"

_KINDS = {str: ("a string", "strings"), bool: ("true or false", "true or false")}
_KINDS |= {int: ("a whole number", "whole numbers"), float: ("a number", "numbers")}
_BOUNDS = {"greater_than": ("gt", ">"), "greater_than_equal": ("ge", ">=")}
_BOUNDS |= {"less_than": ("lt", "<"), "less_than_equal": ("le", "<=")}


class Place(NamedTuple):
    """Where in the data an error is, and what the schema wants there."""

    path: Path
    annotation: Any
    value: Any


def dotted(path: Iterable[str]) -> str:
    """``drafter.init.layers[0]`` for ``("drafter", "init", "layers", "0")``."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join(path))


def shown(value: Any) -> str:
    """`value` as it would be written in YAML, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def plain(annotation: Any) -> Any:
    """`annotation` without ``Annotated`` and without ``None`` among its alternatives."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    options = [option for option in alternatives(annotation) if option is not type(None)]
    return plain(options[0]) if len(options) == 1 and options[0] is not annotation else annotation


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def is_section(annotation: Any) -> bool:
    """True for a pydantic model."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def described(annotation: Any, many: bool = False) -> str:
    """What a value of `annotation` is, in words."""
    annotation = plain(annotation)
    arguments = [argument for argument in get_args(annotation) if argument is not Ellipsis]
    match get_origin(annotation):
        case origin if origin is Literal:
            return (f"one of {', '.join(map(str, arguments))}") if len(arguments) > 1 else repr(arguments[0])
        case origin if origin in (Union, types.UnionType):
            words = (described(option, many) for option in arguments if option is not type(None))
            return " or ".join(dict.fromkeys(words))
        case origin if origin is list:
            return f"{'lists' if many else 'a list'} of {described(arguments[0], many=True)}"
        case origin if origin is tuple:
            return f"a list of {len(arguments)} {described(arguments[0], many=True)}"
    return _KINDS[annotation][many] if annotation in _KINDS else ("mappings" if many else "a mapping")


def dotted_keys(schema: type[BaseModel], prefix: Path = ()) -> Iterator[Path]:
    """Every key that `schema` knows, sections before what they hold."""
    for name, field in schema.model_fields.items():
        yield (*prefix, name)
        for option in alternatives(plain(field.annotation)):
            if is_section(plain(option)):
                yield from dotted_keys(plain(option), (*prefix, name))


def _member(options: Iterable[Any], tag: str, value: Any) -> Any | None:
    """The member of a union that an error with `tag` is about; None when `value` was never meant to be that one."""
    for option in map(plain, options):
        if is_section(option):
            kind = option.model_fields.get("kind")
            if tag == option.__name__ or (kind is not None and kind.default == tag):
                return option
        name = getattr(get_origin(option) or option, "__name__", "")
        if re.match(rf"(constrained-|function-\w+\[.*)?{name}\b", tag):
            wanted = {list: list, tuple: list, dict: Mapping, str: str}.get(get_origin(option) or option, (int, float))
            return option if isinstance(value, wanted) else None
    return None


def find(schema: type[BaseModel], data: Any, location: tuple[int | str, ...]) -> Place:
    """Walk pydantic's `location`, leaving out its tags for the members of a union.

    Stops at a union when none of its members was meant: the error is then about the whole value.
    """
    path: Path = ()
    annotation: Any = schema
    for part in location:
        annotation = plain(annotation)
        options = alternatives(annotation)
        if len(options) > 1:
            member = _member(options, str(part), data)
            if member is None:
                return Place(path, annotation, data)
            annotation = member
            continue
        if part == "[key]":  # the key itself is wrong, not its value
            return Place(path, str, dotted(path[-1:]))
        path = (*path, str(part))
        annotation = _inside(annotation, part)
        data = _item(data, part)
    return Place(path, annotation, data)


def _inside(annotation: Any, part: int | str) -> Any:
    """The annotation of one key or item."""
    if is_section(annotation):
        field = annotation.model_fields.get(str(part))
        return Any if field is None else field.annotation
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1]
    return arguments[0] if arguments else Any


def _item(data: Any, part: int | str) -> Any:
    if isinstance(data, Mapping):
        return data.get(part)
    return data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else None


def _unknown(schema: type[BaseModel], place: Place, section: Any) -> str:
    """What to say about a key that the section does not have."""
    name = place.path[-1]
    known = list(section.model_fields) if is_section(section) else []
    hint = nearest(name, known)
    if not hint:
        elsewhere = [dotted(key) for key in dotted_keys(schema) if key[-1] == name and key != place.path]
        hint = f" (did you mean {elsewhere[0]!r}?)" if elsewhere else f"; expected one of {', '.join(known)}"
    return f"unknown key{hint}"


def _complaint(schema: type[BaseModel], kind: str, context: Mapping[str, Any], place: Place, section: Any) -> str:
    """What is wrong at `place`, and what was expected."""
    got = f"got {shown(place.value)}, expected "
    match kind:
        case "extra_forbidden":
            return _unknown(schema, place, section)
        case "invalid_key":
            return "got a key that is not a name, expected a section's name"
        case "missing":
            return f"missing, expected {described(place.annotation)}"
        case "value_error":
            return str(context["error"])
        case "union_tag_invalid":
            tags = re.findall(r"'([^']*)'", context["expected_tags"])
            return f"unknown kind {context['tag']!r}{nearest(context['tag'], tags)}; expected one of {', '.join(tags)}"
        case "literal_error":
            options = [str(option) for option in get_args(plain(place.annotation))]
            return got + described(place.annotation) + nearest(str(place.value), options)
        case "too_short" if isinstance(place.value, list | dict) and not place.value:
            return got + ("at least one item" if isinstance(place.value, list) else "at least one key")
        case "string_too_short":
            return got + "a string that is not empty"
        case "finite_number":
            return got + "a finite number"
        case _ if kind in _BOUNDS:
            name, sign = _BOUNDS[kind]
            return got + f"{described(place.annotation)} {sign} {context[name]:g}"
    return got + described(place.annotation)


def error_lines(error: ValidationError, schema: type[BaseModel], data: Any, origin: Origin) -> list[str]:
    """One line an error, in the schema's order. What pydantic reports for every member of a union is said once."""
    found: list[tuple[Path, bool, str]] = []
    for item in error.errors():
        location, kind = item["loc"], item["type"]
        if kind == "missing" and isinstance(location[-1], int):
            location, kind = location[:-1], "tuple_type"  # a pair with one number: the pair is what is wrong
        place = find(schema, data, location)
        section = plain(find(schema, data, location[:-1]).annotation)
        line = f"{dotted(place.path)}: {_complaint(schema, kind, item.get('ctx', {}), place, section)}".removeprefix(
            ": "
        )
        found.append((place.path, len(alternatives(plain(place.annotation))) > 1, f"{origin(place.path)}: {line}"))
    lines = [
        line
        for path, of_union, line in found
        if not of_union or not any(_within(other, path, or_at=not other_union) for other, other_union, _ in found)
    ]
    return list(dict.fromkeys(lines))


def _within(inner: Path, outer: Path, or_at: bool) -> bool:
    """True when `inner` is below `outer`, or (`or_at`) the same."""
    return inner[: len(outer)] == outer and (or_at or len(inner) > len(outer))


def changed_types(raw: Any, read: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """Scalars that validation turned into another type: (path, as written, as read). A whole 2.0 for 2 is none."""
    if isinstance(raw, Mapping) and isinstance(read, Mapping):
        for key, value in raw.items():
            yield from changed_types(value, read.get(key), (*path, str(key)))
    elif isinstance(raw, list | tuple) and isinstance(read, list | tuple):
        for index, (value, other) in enumerate(zip(raw, read, strict=False)):
            yield from changed_types(value, other, (*path, str(index)))
    elif isinstance(raw, str | bool | int | float) and {type(raw), type(read)} not in ({type(raw)}, {int, float}):
        yield path, raw, read
