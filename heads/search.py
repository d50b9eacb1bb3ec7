"""Drafters that are searched for instead of trained: what the run asks of a search."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Search(Protocol):
    """Tries one candidate after another; its drafter always is the best one so far."""

    exhausted: bool  # nothing is left to try

    def prepare(self) -> None:
        """Measure what all trials need. Called once, before the first."""
        ...

    def trial(self) -> dict[str, float]:
        """Try one candidate more; figures for the log."""
        ...

    def finish(self) -> dict[str, Any]:
        """Choose. Called once, after the last trial; what was found out."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What an interrupted search goes on from, in JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...


class NothingToSearch:
    """For a drafter that needs neither training nor a search."""

    exhausted = True

    def prepare(self) -> None:
        """Nothing."""

    def trial(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def finish(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""
