"""The report's data model (``report.json``, schema 1): every key, its range, and what must agree with what.

None means not measured. Next to every rate stand ``…_ci``, its 95 % bootstrap interval over prompts (None from a single
prompt), and ``…_mean_per_prompt``. The tables of the HTML page define the figures in words (:mod:`.wording`).
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Sums of float32 probabilities may leave [0, 1] by a rounding error.
Rate = Annotated[float, Field(ge=-1e-4, le=1 + 1e-4, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


def _ordered(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise ValueError(f"interval {list(ends)} is upside down")
    return ends


Interval = Annotated[tuple[Finite, Finite], AfterValidator(_ordered)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class PromptFigures(_Strict):
    """One prompt's counts, as :class:`~draftsmith.eval.records.PromptRecord` has them."""

    question_id: int | str
    category: str
    target_calls: Count | None
    drafted: Count | None
    drafted_nodes: Count | None
    accepted: Count | None
    emitted: Count | None
    drafted_at: list[Count] | None
    accepted_at: list[Count] | None
    tested_at: list[Count] | None
    seconds: Positive | None
    plain_seconds: Positive | None
    plain_emitted: Count | None
    alpha_sum: Finite | None
    agreement_sum: Finite | None
    alpha_positions: Count | None
    step_start_alpha_sum: Finite | None
    step_start_agreement_sum: Finite | None
    step_starts: Count | None
    target_log_probability_sum: Finite | None
    plain_target_log_probability_sum: Finite | None
    identical: bool | None
    first_mismatch: Count | None


class Figures(_Strict):
    """What is said of any set of prompts: a whole run, or one category of it."""

    alpha: Rate | None
    alpha_ci: Interval | None
    alpha_mean_per_prompt: Rate | None
    greedy_agreement: Rate | None
    greedy_agreement_ci: Interval | None
    greedy_agreement_mean_per_prompt: Rate | None
    alpha_at_step_starts: Rate | None
    alpha_at_step_starts_ci: Interval | None
    alpha_at_step_starts_mean_per_prompt: Rate | None
    greedy_agreement_at_step_starts: Rate | None
    greedy_agreement_at_step_starts_ci: Interval | None
    greedy_agreement_at_step_starts_mean_per_prompt: Rate | None
    acceptance_rate: Rate | None
    acceptance_rate_ci: Interval | None
    acceptance_rate_mean_per_prompt: Rate | None
    per_position_acceptance: list[Rate | None] | None
    per_position_acceptance_ci: list[Interval | None] | None
    per_position_acceptance_mean_per_prompt: list[Rate | None] | None
    conditional_acceptance: list[Rate | None] | None
    conditional_acceptance_ci: list[Interval | None] | None
    conditional_acceptance_mean_per_prompt: list[Rate | None] | None
    block_efficiency: Positive | None
    block_efficiency_ci: Interval | None
    block_efficiency_mean_per_prompt: Positive | None
    tokens_per_second: Positive | None
    tokens_per_second_ci: Interval | None
    tokens_per_second_mean_per_prompt: Positive | None
    plain_tokens_per_second: Positive | None
    plain_tokens_per_second_ci: Interval | None
    plain_tokens_per_second_mean_per_prompt: Positive | None
    speedup: Positive | None
    speedup_ci: Interval | None
    speedup_mean_per_prompt: Positive | None
    speedup_per_token: Positive | None
    speedup_per_token_ci: Interval | None
    speedup_per_token_mean_per_prompt: Positive | None
    target_log_probability: Finite | None
    target_log_probability_ci: Interval | None
    target_log_probability_mean_per_prompt: Finite | None
    plain_target_log_probability: Finite | None
    plain_target_log_probability_ci: Interval | None
    plain_target_log_probability_mean_per_prompt: Finite | None

    target_calls: Count | None
    drafted: Count | None
    drafted_nodes: Count | None
    accepted: Count | None
    emitted: Count | None
    seconds: Positive | None
    plain_seconds: Positive | None
    plain_emitted: Count | None
    alpha_positions: Count | None
    step_starts: Count | None
    drafted_at: list[Count] | None
    accepted_at: list[Count] | None
    tested_at: list[Count] | None
    identical_to_target: tuple[Count, Count] | None

    cost_ratio: Positive | None
    expected_speedup: Positive | None
    expected_speedup_ci: Interval | None
    expected_speedup_by_length: list[Positive | None] | None  # for 1, 2, … draft tokens
    best_num_speculative_tokens: Count | None  # 0: no draft is faster than plain decoding
    break_even_alpha: Rate | None
    mbsu: Positive | None
    mbsu_ci: Interval | None

    @model_validator(mode="after")
    def _consistent(self) -> "Figures":
        if self.accepted is not None and self.drafted is not None and self.accepted > self.drafted:
            raise ValueError(f"accepted {self.accepted} of {self.drafted} drafted tokens")
        if self.identical_to_target and self.identical_to_target[0] > self.identical_to_target[1]:
            raise ValueError(f"identical_to_target {list(self.identical_to_target)}: more than were compared")
        lists = (self.per_position_acceptance, self.conditional_acceptance, self.drafted_at, self.accepted_at)
        if len({None if values is None else len(values) for values in lists}) > 1:
            raise ValueError("the lists by position differ in length")
        return self


class Run(Figures):
    """One run: its drafter, its figures over all prompts, then by category and by prompt."""

    name: str
    label: str | None
    num_speculative_tokens: Count | None
    tree_nodes: Count | None
    verification_cost: list[Positive] | None  # t(1)/t(1), t(2)/t(1), …
    passes_per_step: Positive | None
    drafter_parameters_read: Count | None
    target_parameters_read: Count | None
    categories: dict[str, Figures]
    prompts: list[PromptFigures]


class TrainingCurve(_Strict):
    """How training went: loss and alpha (None where it was not measured) after each of `steps`; of a run that served prompts
    while it trained also the block efficiency of what was served for that step.
    """

    steps: list[Count]
    loss: list[Finite | None]
    alpha: list[Rate | None]
    stream_block_efficiency: list[Finite | None] | None = None

    @model_validator(mode="after")
    def _same_length(self) -> "TrainingCurve":
        served = self.steps if self.stream_block_efficiency is None else self.stream_block_efficiency
        if not len(self.steps) == len(self.loss) == len(self.alpha) == len(served):
            raise ValueError("the figures of the steps differ in length")
        return self


class Report(_Strict):
    """The whole of ``report.json``.

    ``settings`` says what was asked (num_speculative_tokens, temperature, rule, prompts, max_new_tokens, seed, …),
    ``environment`` where and how (command, machine, threads, versions: {name: version}, date, …).
    """

    schema_version: Literal[1] = Field(alias="schema")
    target: str
    drafter: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    runs: list[Run]
    training: TrainingCurve | None = None

    @model_validator(mode="after")
    def _names_differ(self) -> "Report":
        names = [run.name for run in self.runs]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"runs need distinct names, got {names}")
        return self
