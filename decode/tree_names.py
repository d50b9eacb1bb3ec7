"""Trees by name, as people write them (``dynamic:num_nodes=16,width=4``). Imports no torch."""

from .named import Options, check_whole, parse_named

# Names and the options they take.
TREES: dict[str, Options] = {"dynamic": {"num_nodes": int, "width": int}}


def parse_tree_name(text: str, what: str) -> tuple[str, dict[str, int]]:
    """A named tree's name and options.

    Raises:
        BadInput: an unknown name or option, or a value out of range; `what` is the key or option that holds it.
    """
    name, options = parse_named(text, TREES, what, more="widths per depth ([3, 2, 1]), paths ([[0], [1], [0, 0]]) or ")
    check_whole(what, **options)
    return name, options
