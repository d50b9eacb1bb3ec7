"""The verification rules by name: which are lossless, which options they take, and the checking of both."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import BadInput, nearest


class Option(NamedTuple):
    """A number a rule can be tuned by, with the range it makes sense in."""

    default: float
    low: float
    high: float


_ANY = float("inf")

# Defaults are the papers' own where a paper names one setting; lenience 0.5 and the two BiLD thresholds are middle
# values.
RULES: dict[str, dict[str, Option]] = {
    "lossless": {},  # speculative sampling (arXiv:2211.17192, arXiv:2302.01318); on a tree the same as multi
    "block": {},  # block verification (arXiv:2403.10444)
    "multi": {},  # recursive rejection over a tree (arXiv:2305.09781, arXiv:2402.14160)
    "typical": {"epsilon": Option(0.09, 0, 1), "delta": Option(0.3, 0, _ANY)},  # arXiv:2401.10774
    "lenient": {"lenience": Option(0.5, 0, 1)},  # arXiv:2211.17192, arXiv:2310.08461
    "tolerant": {"top": Option(3, 1, _ANY), "tolerance": Option(1.0, 0, _ANY)},  # arXiv:2203.16487
    "fallback_rollback": {  # arXiv:2302.07863; fallback_threshold is the drafting length's, not the rule's
        "rollback_threshold": Option(2.0, 0, _ANY),
        "fallback_threshold": Option(0.6, 0, 1),
    },
}
LOSSLESS = frozenset({"lossless", "block", "multi"})


def rule_options(rule: str, options: Mapping[str, Any] | None = None) -> dict[str, float]:
    """All options of `rule`: those given, and defaults for the others.

    Raises:
        BadInput: an unknown rule or option (with the nearest name), or a value that is no number in its range.
    """
    if rule not in RULES:
        raise BadInput(f"rule: unknown {rule!r}{nearest(rule, RULES)}, expected one of {', '.join(RULES)}")
    known = RULES[rule]
    for name, value in (options or {}).items():
        if name not in known:
            expected = ", ".join(known) or "none"
            raise BadInput(f"rule_options: {rule!r} has no {name!r}{nearest(name, known)}, it takes: {expected}")
        _, low, high = known[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            limits = f"of at least {low:g}" if high == _ANY else f"from {low:g} to {high:g}"
            raise BadInput(f"rule_options: {name} of rule {rule!r} is {value!r}, expected a number {limits}")
        if name == "top" and not float(value).is_integer():
            raise BadInput(f"rule_options: {name} of rule {rule!r} is {value!r}, expected a whole number")
    given = {name: float(value) for name, value in (options or {}).items()}
    return {name: float(option.default) for name, option in known.items()} | given
