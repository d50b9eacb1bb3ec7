"""The recipe schema: what a training run is, as validated data. Imports no torch.

Every section is a pydantic model with ``extra="forbid"``: an unknown key is an error. The drafters' sections are in
``recipe_drafters.py``; reading a file, overrides and the one-line errors in ``recipe_io.py`` and ``recipe_errors.py``.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from .recipe_drafters import (
    BlockwiseDrafter,
    DrafterInit,
    DrafterSection,
    DraftExitSection,
    EagleDrafter,
    EarlyExitDrafter,
    HydraDrafter,
    LayerSkipDrafter,
    LookaheadTokensDrafter,
    LoraSection,
    Medusa2Drafter,
    MedusaDrafter,
    ModelDrafter,
    kind_of,
    trains,
)
from .recipe_section import FreeMapping, Name, Section, read_numbers

__all__ = [
    "BlockwiseDrafter",
    "DraftExitSection",
    "DrafterInit",
    "DrafterSection",
    "EagleDrafter",
    "EarlyExitDrafter",
    "HydraDrafter",
    "LayerSkipDrafter",
    "LookaheadTokensDrafter",
    "LoraSection",
    "Medusa2Drafter",
    "MedusaDrafter",
    "ModelDrafter",
    "Recipe",
    "Section",
    "read_numbers",
]


class TargetSection(Section):
    """The model whose output distribution is preserved."""

    model: Name
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    trust_remote_code: bool = False


class SamplingSection(Section):
    """Sampling transforms, applied in this order. Temperature 0 is greedy."""

    temperature: float = Field(default=1.0, ge=0)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)


class DataSection(Section):
    """What the drafter learns on: prompts or chats, and whose answers to them."""

    # "self": the target writes them; "shipped": ours; else files (.jsonl, .parquet, .txt) or `datasets` ids
    prompts: Name | Annotated[list[Name], Field(min_length=1)]
    responses: Literal["given", "target"] = "given"  # of drafters that live on the target: "target" (`Recipe`)
    split: str = "train"  # for dataset ids
    limit: int | None = Field(default=None, ge=1)  # at most this many examples
    self_share: float = Field(default=0.5, gt=0, lt=1)  # of the prompts, while given ones last beside "self"
    num_self_prompts: int | None = Field(default=None, ge=1)  # for "self" under a budget in steps
    max_length: int = Field(default=1024, ge=2)  # tokens an example, prompt and answer together
    max_prompt_length: int | None = Field(default=None, ge=1)  # longer prompts are dropped; None: half of max_length
    max_new_tokens: int = Field(default=128, ge=1)  # for target answers
    sampling: SamplingSection = SamplingSection()  # for target answers
    prompt_sampling: SamplingSection | None = None  # for self-written prompts; None: as the answers
    generation_batch: int = Field(default=32, ge=1)
    # in which the target writes prompts and answers; "auto": bfloat16 where that is faster; None: as it is loaded
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    packing: bool = True
    cache: Literal["none", "hidden", "topk"] = "none"  # teacher outputs kept on disk
    cache_top_k: int = Field(default=64, ge=1)

    @property
    def sources(self) -> list[str]:
        """The prompt sources as a list."""
        return [self.prompts] if isinstance(self.prompts, str) else list(self.prompts)

    @model_validator(mode="after")
    def _answers_exist(self) -> "DataSection":
        for source in self.sources:
            if self.responses == "given" and source in ("self", "shipped"):
                raise ValueError(f"prompts from {source!r} come without answers: set data.responses to target")
        return self

    @model_validator(mode="after")
    def _room_for_an_answer(self) -> "DataSection":
        if self.max_prompt_length is not None and self.max_prompt_length >= self.max_length:
            raise ValueError("max_prompt_length must be below max_length, which counts the answer too")
        return self


class RolloutSection(Section):
    """Data made while training: the drafter's own answers, or the served decoder's."""

    source: Literal["drafter", "online"]
    fraction: float = Field(default=1.0, ge=0, le=1)  # of a step's tokens; 0: as if there were no rollouts
    max_new_tokens: int = Field(default=64, ge=1)
    staleness: int = Field(default=0, ge=0)  # steps a rollout may be reused for; 0: fresh every step
    buffer: int = Field(default=1024, ge=1)  # sequences kept, of online ones with what the target said
    sampling: SamplingSection = SamplingSection()


class ObjectiveSection(Section):
    """The loss: a divergence by name, or a weighted sum of several."""

    loss: Name | Annotated[dict[str, float | dict[str, float]], Field(min_length=1)] = "forward_kl"
    temperature: float = Field(default=1.0, gt=0)
    rollouts: RolloutSection | None = None
    chunk_tokens: int = Field(default=512, ge=1)  # supervised positions a chunk of the loss

    @field_validator("rollouts")
    @classmethod
    def _none_of_no_share(cls, rollouts: RolloutSection | None) -> RolloutSection | None:
        return None if rollouts is not None and rollouts.fraction == 0 else rollouts


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """AdamW with a warm-up and a decay."""

    learning_rate: float = Field(default=1.0e-4, gt=0)
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    epsilon: float = Field(default=1.0e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = Field(default=0.03, ge=0)  # below 1: a share of the steps; else a number of steps
    final_fraction: float = Field(default=0.0, ge=0, le=1)  # learning rate at the end, as a share of the peak
    clip: float | None = Field(default=1.0, gt=0)


class EngineSection(Section):
    """How the run is executed."""

    precision: Literal["fp32", "bf16", "auto"] = "fp32"  # "auto": bf16 where the device is faster in it
    tokens_per_step: int = Field(default=8192, ge=1)  # tokens an optimizer step, all ranks together
    tokens_per_forward: int | None = Field(default=None, ge=1)  # per rank; None: tokens_per_step / ranks
    steps: int | None = Field(default=None, ge=1)
    epochs: float | None = Field(default=None, gt=0)
    minutes: float | None = Field(default=None, gt=0)  # for the whole run, data and evaluation included
    data_share: float = Field(default=0.45, gt=0, lt=1)  # of minutes: writing prompts and answers
    evaluate_share: float = Field(default=0.25, gt=0, lt=1)  # of minutes: kept for the final evaluation, at most
    max_epochs: float | None = Field(default=None, gt=0)  # a cap under a budget in minutes
    checkpoint_every: int = Field(default=200, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    gradient_checkpointing: bool = False
    threads: int | None = Field(default=None, ge=1)
    deepspeed: FreeMapping | None = None

    @property
    def shards_parameters(self) -> bool:
        """Whether DeepSpeed is asked for ZeRO-3."""
        zero = (self.deepspeed or {}).get("zero_optimization")
        return isinstance(zero, dict) and zero.get("stage") == 3

    @model_validator(mode="after")
    def _one_budget(self) -> "EngineSection":
        if sum(value is not None for value in (self.steps, self.epochs, self.minutes)) != 1:
            raise ValueError("give exactly one of steps, epochs, minutes")
        return self

    @model_validator(mode="after")
    def _time_left_to_train(self) -> "EngineSection":
        if self.minutes is not None and self.data_share + self.evaluate_share >= 1:
            raise ValueError("data_share and evaluate_share leave no time to train: their sum must be below 1")
        return self


class EvaluateSection(Section):
    """Evaluation while training and at its end, on prompts that training never sees."""

    prompts: Name = "shipped"
    limit: int | None = Field(default=None, ge=1)
    every: int = Field(default=200, ge=1)
    max_new_tokens: int = Field(default=64, ge=1)
    num_speculative_tokens: int = Field(default=4, ge=1)
    sampling: SamplingSection = SamplingSection()


class Recipe(Section):
    """One training run."""

    target: TargetSection
    drafter: DrafterSection
    data: DataSection
    objective: ObjectiveSection = ObjectiveSection()
    optimizer: OptimizerSection = OptimizerSection()
    engine: EngineSection
    evaluate: EvaluateSection = EvaluateSection()
    output: Name  # folder of the run
    seed: int = Field(default=0, ge=0, lt=2**62)

    @model_validator(mode="before")
    @classmethod
    def _self_distillation(cls, given: Any) -> Any:
        """What lives on the target learns what the target says, unless told otherwise."""
        if not isinstance(given, dict) or not isinstance(data := given.get("data"), dict) or "responses" in data:
            return given
        if kind_of(given.get("drafter")) == "model":
            return given
        return {**given, "data": {**data, "responses": "target"}}

    @model_validator(mode="after")
    def _trials_are_no_epochs(self) -> "Recipe":
        for key in ("epochs", "max_epochs"):
            if not trains(self.drafter) and getattr(self.engine, key) is not None:
                raise ValueError(
                    f"engine.{key}: a search has no epochs: give minutes, or steps for the number of trials"
                )
        return self

    @model_validator(mode="after")
    def _layers_to_recompute(self) -> "Recipe":
        if self.engine.gradient_checkpointing and self.drafter.kind != "model":
            raise ValueError(
                f"engine.gradient_checkpointing: a {self.drafter.kind} drafter has no stack of layers to recompute: "
                "set it off"
            )
        return self

    @model_validator(mode="after")
    def _heads_read_hidden_states(self) -> "Recipe":
        if self.data.cache == "topk" and self.drafter.kind != "model":
            raise ValueError(
                f"data.cache: topk keeps no hidden states, which a drafter of kind {self.drafter.kind} reads: "
                "set hidden or none"
            )
        if self.data.cache != "none" and self.drafter.kind in ("lookahead_tokens", "layer_skip"):
            raise ValueError(
                f"data.cache: a drafter of kind {self.drafter.kind} runs the target itself and reads nothing cached: set none"
            )
        return self

    @model_validator(mode="after")
    def _rollouts_can_be_made(self) -> "Recipe":
        rollouts, kind = self.objective.rollouts, self.drafter.kind
        if rollouts is None:
            return self
        if not trains(self.drafter):
            raise ValueError(f"objective.rollouts: nothing of this {kind} drafter is trained: leave rollouts out")
        if rollouts.source == "drafter" and kind != "model":
            raise ValueError(
                f"objective.rollouts.source: drafters of kind {kind} write no text of their own: set online, or leave it out"
            )
        if self.engine.shards_parameters:
            raise ValueError("objective.rollouts: a drafter sharded by ZeRO-3 cannot decode: set stage 2 or less")
        if self.data.cache == "topk" and rollouts.fraction < 1:
            raise ValueError(
                "objective.rollouts: fixed data with a top-k cache cannot be mixed with rollouts: set data.cache to hidden"
            )
        return self
