"""What an evaluation counted, per prompt and per run: the raw material every figure of the report is derived from.

Counts are kept and rates are derived, so any subset of prompts (a category, one prompt) can be pooled again. What was
not measured is None, never zero: a run that was only looked at teacher-forced has no decoding counts and no times.
"""

from dataclasses import dataclass, field


@dataclass
class PromptRecord:
    """Counts of one prompt in one run.

    Per-position lists are indexed by draft position, 0 for a step's first draft token (for a tree: by depth).
    ``tested_at[i]``: steps that drafted token i and accepted every token before it, so that the target judged it.
    Without it the steps that reached position i are taken to be those that accepted i - 1 and drafted i, which is exact
    when all steps draft equally many.
    """

    question_id: int | str
    category: str = "all"

    # Counted while decoding.
    target_calls: int | None = None  # target verification passes
    drafted: int | None = None  # draft tokens; for a tree its depth
    drafted_nodes: int | None = None  # draft tokens, all branches
    accepted: int | None = None
    emitted: int | None = None  # tokens, nothing after EOS or past the length limit
    drafted_at: list[int] | None = None
    accepted_at: list[int] | None = None
    tested_at: list[int] | None = None
    seconds: float | None = None  # wall time of speculative decoding
    plain_seconds: float | None = None  # wall time of plain decoding of the same prompt
    plain_emitted: int | None = None

    # Teacher-forced over the answer's positions.
    alpha_sum: float | None = None  # sum over positions of sum_v min(target, draft)
    agreement_sum: float | None = None  # positions with the same argmax
    alpha_positions: int | None = None
    step_start_alpha_sum: float | None = None  # the same sums over positions where the decoder's steps began
    step_start_agreement_sum: float | None = None
    step_starts: int | None = None

    # How far a lossy rule drifts: summed target log-probabilities (nats) of the emitted tokens.
    target_log_probability_sum: float | None = None
    plain_target_log_probability_sum: float | None = None

    identical: bool | None = (
        None  # the emitted tokens are plain decoding's; None where that is not expected or unchecked
    )
    first_mismatch: int | None = None  # offset of the first differing new token


@dataclass
class RunRecord:
    """One drafter measured on a set of prompts.

    ``name`` is "drafter" (what the report is about), "start" (the same drafter before training) or anything else for a
    baseline; names are unique within a report. ``verification_cost[i]`` is t(i + 1) / t(1): the time of a target pass
    over i + 1 tokens over that of one token, so its first entry is 1.
    """

    name: str
    prompts: list[PromptRecord] = field(default_factory=list)
    label: str | None = None  # what it is, for people: "prompt_lookup", "layers [0, 1], untrained"
    num_speculative_tokens: int | None = None  # draft tokens a step; for a tree its depth
    tree_nodes: int | None = None  # nodes of a step's tree; None: a chain
    cost_ratio: float | None = None  # time of one drafter step / time of one target step
    verification_cost: list[float] | None = None
    sequential: bool = True  # one drafter pass a draft token; False: passes do not grow with the draft (parallel heads)
    passes_per_step: int | float | None = None  # None: num_speculative_tokens where sequential, else 1
    drafter_parameters_read: int | None = None  # in one pass
    target_parameters_read: int | None = None

    @property
    def decoded(self) -> bool:
        """Whether anything was decoded; otherwise the run is teacher-forced only."""
        return any(prompt.target_calls is not None for prompt in self.prompts)

    @property
    def passes(self) -> int | float | None:
        """Drafter passes in one step."""
        if self.passes_per_step is not None:
            return self.passes_per_step
        return self.num_speculative_tokens if self.sequential else 1
