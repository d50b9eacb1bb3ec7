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

    @model_validator(mode="after")
    def _one_source(self) -> "DrafterInit":
        if sum(value is not None for value in (self.layers, self.num_layers, self.config)) != 1:
            raise ValueError("give exactly one of layers, num_layers, config")
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
        return self


class HeadsSection(Section):
    """What drafters with one small network a draft position have in common."""

    num_heads: int = Field(default=4, ge=1)  # draft tokens a pass gives
    # of each head: the target's own projection (frozen), one of its own (starts as the target's), the target's with a
    # trained low-rank update
    output: Literal["shared", "own", "low_rank"] = "shared"
    output_rank: int = Field(default=64, ge=1)  # for `low_rank`
    vocabulary: int | None = Field(default=None, ge=1)  # score only this many ids, the most frequent in the answers
    head_decay: float = Field(default=0.8, gt=0, le=1)  # head k's loss weighs this to the power of k


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
    target_learning_rate: float = Field(default=0.1, gt=0)  # of these layers, as a share of the heads'
    target_weight: float = Field(default=2.0, ge=0)  # of KL(original target || changed target) beside the heads' loss


class HydraDrafter(HeadsSection):
    """Heads that also see the embeddings of the draft tokens before them (2402.05109)."""

    kind: Literal["hydra"] = "hydra"
    num_layers: int = Field(default=2, ge=1)  # SiLU layers a head
    prefix_attention: bool = False  # one decoder layer over the target's hidden states first


def _kind_of(section: Any) -> str:
    """The tag of a drafter section: draft models need not name their kind."""
    return section.get("kind", "model") if isinstance(section, dict) else getattr(section, "kind", "model")


DrafterSection = Annotated[
    Annotated[ModelDrafter, Tag("model")]
    | Annotated[MedusaDrafter, Tag("medusa")]
    | Annotated[Medusa2Drafter, Tag("medusa2")]
    | Annotated[BlockwiseDrafter, Tag("blockwise")]
    | Annotated[HydraDrafter, Tag("hydra")],
    Discriminator(_kind_of),
]
