"""What the decoder counts, per row. Rates are derived from these and never stored (definitions: DESIGN, section 2)."""

from dataclasses import dataclass, field


@dataclass
class RowStats:
    """Counts of one sequence."""

    target_calls: int = 0  # verification passes; a prefill that verifies nothing is none
    drafted: int = 0  # draft tokens; for a tree its depth
    drafted_nodes: int = 0
    accepted: int = 0
    emitted: int = 0
    drafted_at: list[int] = field(default_factory=list)  # [i]: steps in which draft token i was drafted
    tested_at: list[int] = field(default_factory=list)  # [i]: of these, steps in which all before it were accepted
    accepted_at: list[int] = field(default_factory=list)  # [i]: steps in which draft token i was accepted
    step_starts: list[int] = field(default_factory=list)  # tokens emitted before each step that drafted something

    def count_step(self, drafted: int, nodes: int, accepted: int, emitted: int) -> None:
        """Add one verification pass that drafted a depth of `drafted` and emitted `emitted` tokens."""
        if drafted:
            self.step_starts.append(self.emitted)
        self.target_calls += 1
        self.drafted += drafted
        self.drafted_nodes += nodes
        self.accepted += accepted
        self.emitted += emitted
        missing = [0] * (drafted - len(self.drafted_at))
        for counts in (self.drafted_at, self.tested_at, self.accepted_at):
            counts.extend(missing)
        for i in range(drafted):
            self.drafted_at[i] += 1
            self.tested_at[i] += i <= accepted
            self.accepted_at[i] += i < accepted


@dataclass
class Stats:
    """Counts of a batch: per row, and pooled on demand."""

    rows: list[RowStats]

    @property
    def pooled(self) -> RowStats:
        """The rows' counts added up (`step_starts` is per row and stays empty)."""
        total = RowStats()
        for name in ("target_calls", "drafted", "drafted_nodes", "accepted", "emitted"):
            setattr(total, name, sum(getattr(row, name) for row in self.rows))
        for name in ("drafted_at", "tested_at", "accepted_at"):
            setattr(total, name, add_up([getattr(row, name) for row in self.rows]))
        return total

    @property
    def target_calls(self) -> int:
        """Verification passes, counted per row."""
        return self.pooled.target_calls

    @property
    def drafted(self) -> int:
        """Draft tokens verified (depth, for trees)."""
        return self.pooled.drafted

    @property
    def accepted(self) -> int:
        """Draft tokens accepted."""
        return self.pooled.accepted

    @property
    def emitted(self) -> int:
        """Tokens emitted, recovered and bonus tokens included."""
        return self.pooled.emitted

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None when nothing was drafted."""
        total = self.pooled
        return total.accepted / total.drafted if total.drafted else None

    @property
    def block_efficiency(self) -> float | None:
        """emitted / verification passes (τ); None before the first pass."""
        total = self.pooled
        return total.emitted / total.target_calls if total.target_calls else None

    @property
    def per_position_acceptance(self) -> list[float]:
        """Share of the steps that drafted token i in which it was accepted."""
        total = self.pooled
        return [a / d for a, d in zip(total.accepted_at, total.drafted_at, strict=True) if d]

    @property
    def conditional_acceptance(self) -> list[float]:
        """Share of the steps that drafted token i and accepted all before it in which token i was accepted too."""
        total = self.pooled
        return [a / r for a, r in zip(total.accepted_at, total.tested_at, strict=True) if r]


def add_up(lists: list[list[int]]) -> list[int]:
    """Element-wise sum of lists of different lengths."""
    width = max((len(values) for values in lists), default=0)
    return [sum(values[i] for values in lists if i < len(values)) for i in range(width)]
