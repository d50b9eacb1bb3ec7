"""The `drafter` section of a recipe: one schema a kind, told apart by ``kind``. Imports no torch."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from .recipe_section import FreeMapping, Name, Section


class DrafterInit(Section):
    """Where an independent draft model's weights come from. Exactly one of the three is given."""

    # these layers of the target, in this order
    layers: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, min_length=1)
    num_layers: int | None = Field(default=None, ge=1)  # this many, chosen by measured block influence (2403.03853)
    config: FreeMapping | None = None  # the target's config with these keys changed, weights from scratch
    embeddings: Literal["copy", "project", "random"] = "copy"  # for `config`: what becomes of the target's embeddings
    # fit a head of its own (untied, or a cut vocabulary) first; None: yes, of layers, not of weights from scratch
    fit_head: bool | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "DrafterInit":
        if sum(value is not None for value in (self.layers, self.num_layers, self.config)) != 1:
            raise ValueError("give exactly one of layers, num_layers, config")
        if self.config is None and self.embeddings != "copy":
            raise ValueError("embeddings is for config: layers of the target keep its embeddings")
        if self.config is not None and self.fit_head:
            raise ValueError("fit_head is for layers and num_layers: weights from scratch say nothing to fit a head to")
        return self


class LoraSection(Section):
    """Low-rank adapters (peft): saved as an adapter, merged at export."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: list[str] | Literal["all-linear"] = "all-linear"


class ModelDrafter(Section):
    """A draft model: a standalone causal LM that shares the target's tokenizer."""

    kind: Literal["model"] = "model"
    model: Name | None = None  # hub id, folder or .gguf
    init: DrafterInit | None = None
    vocabulary: int | None = Field(default=None, ge=1)  # score only this many ids, the most frequent in the answers
    train_embeddings: bool | None = None  # None: yes, unless the vocabulary is cut
    lora: LoraSection | None = None
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> "ModelDrafter":
        if (self.model is None) == (self.init is None):
            raise ValueError("give exactly one of model (a hub id or folder) and init (cut from the target)")
        if self.lora is not None and self.train_embeddings:
            raise ValueError("train_embeddings does not go with lora, which trains its adapters alone")
        return self


class HeadsSection(Section):
    """What drafters with one small network a draft position have in common."""

    num_heads: int = Field(default=4, ge=1)  # draft tokens a pass gives
    # of each head: the target's own projection (frozen), one of its own (starts as the target's), the target's with a
    # trained low-rank update
    output: Literal["shared", "own", "low_rank"] = "shared"
    output_rank: int | None = Field(default=None, ge=1)  # of `low_rank`; None: 64
    vocabulary: int | None = Field(default=None, ge=1)  # score only this many ids, the most frequent in the answers
    head_decay: float = Field(default=0.8, gt=0, le=1)  # head k's loss weighs this to the power of k

    @property
    def rank(self) -> int:
        """Of a low-rank update."""
        return self.output_rank or 64

    @model_validator(mode="after")
    def _rank_of_an_update(self) -> "HeadsSection":
        if self.output_rank is not None and self.output != "low_rank":
            raise ValueError(f"output_rank is for output low_rank, and output is {self.output}")
        return self


class MedusaDrafter(HeadsSection):
    """Heads that each predict one further token from the target's last hidden state (2401.10774)."""

    kind: Literal["medusa"] = "medusa"
    num_layers: int = Field(default=1, ge=1)  # residual SiLU blocks a head


class Medusa2Drafter(HeadsSection):
    """Medusa heads and a low-rank adapter on the target, which is changed (2401.10774, section 2.2)."""

    kind: Literal["medusa2"] = "medusa2"
    num_layers: int = Field(default=1, ge=1)
    lora: LoraSection = LoraSection()
    lora_learning_rate: float = Field(default=0.25, gt=0)  # of the adapter, as a share of the heads'
    heads_first: float = Field(default=0.4, ge=0, lt=1)  # share of the steps in which the heads train alone
    target_weight: float = Field(default=2.0, ge=0)  # of KL(original target || adapted target) beside the heads' loss


class BlockwiseDrafter(HeadsSection):
    """One feed-forward layer from the target's hidden state to those of all heads (1811.03115)."""

    kind: Literal["blockwise"] = "blockwise"
    inner_size: int | None = Field(default=None, ge=1)  # a head's share of the hidden layer; None: the hidden size
    train_layers: int = Field(default=0, ge=0)  # the target's last layers to fine-tune too: the target is changed
    # of these layers, as a share of the heads'; None: 0.1
    target_learning_rate: float | None = Field(default=None, gt=0)
    # of KL(original target || changed target) beside the heads' loss; None: 2
    target_weight: float | None = Field(default=None, ge=0)

    @property
    def share_for_target(self) -> float:
        """Of the learning rate, for the target's layers."""
        return 0.1 if self.target_learning_rate is None else self.target_learning_rate

    @property
    def weight_for_target(self) -> float:
        """Of what holds the target where it was."""
        return 2.0 if self.target_weight is None else self.target_weight

    @model_validator(mode="after")
    def _of_trained_layers(self) -> "BlockwiseDrafter":
        for key in ("target_learning_rate", "target_weight"):
            if getattr(self, key) is not None and not self.train_layers:
                raise ValueError(f"{key} is of the target's layers that are trained too, and train_layers is 0")
        return self


class HydraDrafter(HeadsSection):
    """Heads that also see the embeddings of the draft tokens before them (2402.05109)."""

    kind: Literal["hydra"] = "hydra"
    num_layers: int = Field(default=2, ge=1)  # SiLU layers a head
    prefix_attention: bool = False  # one decoder layer over the target's hidden states first


class EagleDrafter(Section):
    """One decoder layer that goes on from the target's features (version 1: 2401.15077, version 3: 2503.01840)."""

    kind: Literal["eagle"] = "eagle"
    version: Literal[1, 3] = 3
    # the target's hidden states that make a feature; None: the last (version 1), a low, a middle and a high one (3)
    layers: list[int] | None = Field(default=None, min_length=1)
    vocabulary: int | None = Field(default=None, ge=1)  # score only this many ids, the most frequent in the answers
    intermediate_size: int | None = Field(default=None, ge=1)  # of the layer's MLP; None: the target's
    # None: the target's; "all": one for every attention head
    num_key_value_heads: Annotated[int, Field(ge=1)] | Literal["all"] | None = None
    train_output: bool = True  # the output head too, which starts as the target's (version 1 has none of its own)
    unroll: int | None = Field(default=None, ge=1)  # steps on its own outputs in training; None: 1 (version 1), 5 (3)
    step_decay: float = Field(default=0.8, gt=0, le=1)  # step j's loss weighs this to the power of j
    first_alone: float = Field(default=0.0, ge=0, le=1)  # share of the training that takes the first of them alone
    feature_weight: float | None = Field(default=None, ge=0)  # of the smooth L1 on features; None: 1 (version 1), 0 (3)
    noise: float = Field(default=0.0, ge=0)  # half-width of the uniform noise on the target's features (version 1)

    @property
    def num_unrolled(self) -> int:
        """Steps of the unrolling."""
        return self.unroll or (1 if self.version == 1 else 5)

    @property
    def weight_of_features(self) -> float:
        """Of the smooth L1 distance between features."""
        default = 1.0 if self.version == 1 else 0.0
        return default if self.feature_weight is None else self.feature_weight

    @model_validator(mode="after")
    def _of_its_version(self) -> "EagleDrafter":
        if self.version == 1 and self.layers is not None and self.layers != [-1]:
            raise ValueError("version 1 reads the target's last hidden states alone: leave layers out")
        if self.version == 3 and (self.weight_of_features or self.noise):
            raise ValueError("version 3 has no loss on features and no noise: leave feature_weight and noise out")
        if self.version == 1 and not self.train_output:
            raise ValueError("version 1 has no output head of its own to train: leave train_output out")
        return self


class EarlyExitDrafter(Section):
    """The target's first layers, their norm and head the target's own (2404.16710, 2404.18911)."""

    kind: Literal["early_exit"] = "early_exit"
    exit_layer: int = Field(ge=1)  # layers that draft; their keys and values are shared with verification
    # between exit and output head: nothing, a norm and attention (as Kangaroo), or a whole decoder layer
    adapter: Literal["none", "attention", "block"] = "block"
    intermediate_size: int | None = Field(default=None, ge=1)  # of a block's MLP; None: the target's
    vocabulary: int | None = Field(default=None, ge=1)  # score only this many ids, the most frequent in the answers

    @model_validator(mode="after")
    def _of_its_adapter(self) -> "EarlyExitDrafter":
        if self.intermediate_size is not None and self.adapter != "block":
            raise ValueError(f"intermediate_size is of a block's MLP, and adapter is {self.adapter}")
        return self


class DraftExitSection(Section):
    """Where drafting stops: after a token less probable than a threshold that follows acceptance (2309.08168, 3.3)."""

    threshold: float = Field(default=0.6, ge=0, le=1)  # at first
    target_acceptance: float = Field(default=0.85, ge=0, le=1)  # share of draft tokens accepted that is aimed at
    step: float = Field(default=0.01, ge=0)  # by which the threshold moves
    rate_memory: float = Field(default=0.5, ge=0, lt=1)  # weight of the past in the smoothed acceptance rate
    threshold_memory: float = Field(default=0.9, ge=0, lt=1)  # and in the smoothed threshold


class LayerSkipDrafter(Section):
    """The target without some attention and MLP blocks, found by a search: nothing is trained (2309.08168)."""

    kind: Literal["layer_skip"] = "layer_skip"
    num_speculative_tokens: int = Field(default=6, ge=1)  # draft tokens a step that the search reckons with, at most
    draft_exit: DraftExitSection | None = DraftExitSection()  # null: chains as long as asked for
    calibration_tokens: int = Field(default=1024, ge=1)  # answer tokens that every set of blocks is weighed on
    finalists: int = Field(default=3, ge=1)  # sets that decode at the end, of which the fastest is taken
    calibration_prompts: int = Field(default=4, ge=1)  # that they decode
    calibration_new_tokens: int = Field(default=48, ge=1)  # tokens of each


class LookaheadTokensDrafter(Section):
    """Trained embeddings that the target reads in the place of tokens to come (2311.13581)."""

    kind: Literal["lookahead_tokens"] = "lookahead_tokens"
    num_tokens: int = Field(default=3, ge=1)  # look-ahead embeddings: draft tokens a step
    anchors: float = Field(default=0.25, gt=0, le=1)  # share of the labels that embeddings follow in training
    token_decay: float = Field(default=0.8, gt=0, le=1)  # the loss of embedding k weighs this to the power of k


def kind_of(section: Any) -> str:
    """The tag of a drafter section: draft models need not name their kind."""
    return section.get("kind", "model") if isinstance(section, dict) else getattr(section, "kind", "model")


DrafterSection = Annotated[
    Annotated[ModelDrafter, Tag("model")]
    | Annotated[MedusaDrafter, Tag("medusa")]
    | Annotated[Medusa2Drafter, Tag("medusa2")]
    | Annotated[BlockwiseDrafter, Tag("blockwise")]
    | Annotated[HydraDrafter, Tag("hydra")]
    | Annotated[EarlyExitDrafter, Tag("early_exit")]
    | Annotated[LayerSkipDrafter, Tag("layer_skip")]
    | Annotated[LookaheadTokensDrafter, Tag("lookahead_tokens")]
    | Annotated[EagleDrafter, Tag("eagle")],
    Discriminator(kind_of),
]


def trains(drafter: DrafterSection) -> bool:
    """Whether a drafter has anything that optimizer steps train; the others are searched for, or are there already."""
    return not (
        isinstance(drafter, LayerSkipDrafter) or (isinstance(drafter, EarlyExitDrafter) and drafter.adapter == "none")
    )
