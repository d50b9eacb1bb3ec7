"""Building what a run trains from a recipe's `drafter` section: every kind of drafter behind the same few attributes."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..data.encoded_set import EncodedSet
from ..decode.draft import Drafter
from ..decode.draft_model import DraftModel
from ..decode.sampling import Sampling
from ..distill.batch import DistillBatch
from ..distill.mixture import parse_mixture
from ..distill.objective import DraftModelObjective
from ..distill.teacher import Teacher, absolute_layer
from ..errors import BadInput
from ..models.cut import choose_layers, cut_layers, from_config
from ..models.draft_lm import DraftLM, cut_vocabulary, load_draft_lm, save_draft_lm
from ..models.lora import add_lora
from ..models.target import Target
from ..models.vocabulary import choose_vocabulary, count_tokens
from ..recipe import (
    BlockwiseDrafter,
    DrafterInit,
    DrafterSection,
    EagleDrafter,
    EarlyExitDrafter,
    HydraDrafter,
    LayerSkipDrafter,
    LookaheadTokensDrafter,
    Medusa2Drafter,
    MedusaDrafter,
    ModelDrafter,
    ObjectiveSection,
)
from .eagle import eagle_in_training, feature_layers, save_eagle
from .exit_training import exit_in_training, save_exit
from .layer_skip import save_layer_skip
from .layer_skip_search import LayerSkipSearch
from .lookahead_objective import LookaheadObjective
from .lookahead_tokens import LookaheadEmbeddings, LookaheadTokens, save_lookahead_tokens
from .make import heads_in_training, save_heads
from .search import NothingToSearch, Search


class Trainable(NamedTuple):
    """What the training loop needs of a drafter, whatever its kind."""

    objective: nn.Module  # forward(DistillBatch) -> LossSums; its trainable parameters are the drafter's
    drafter: Drafter  # decodes with the very modules that are trained
    save: Callable[[Path], None]  # writes the drafter's checkpoint, which load_drafter reads
    num_scored: int  # ids that it can propose
    rank_of: Int[Tensor, "vocab"] | None = None  # the drafter's row of every id (-1: none); None: all ids, in order
    search: Search | None = None  # for drafters that are searched for: the objective trains nothing
    # What is solved, not trained, before the first step; the share of the variance of the target's hidden states that it
    # explains.
    fit: Callable[[Iterable[DistillBatch]], float] | None = None


def build_trainable(
    config: DrafterSection,
    objective: ObjectiveSection,
    target: Target,
    encoded: EncodedSet,
    served: Sampling,
    seed: int = 0,
) -> Trainable:
    """The drafter as it is before the first step, with its objective.

    `encoded` is the training set: its labels say which ids a cut vocabulary keeps, its longest texts calibrate the choice of
    layers. `served`: the sampling transforms that decoding will use, for the alpha in the log. `seed`: of a search.

    Raises:
        BadInput: the drafter does not fit the target, or a key asks for more than the target has.
    """
    match config:
        case ModelDrafter():
            lm = _draft_model(config, target, encoded)
            mixture = parse_mixture(objective.loss, objective.temperature)
            distilled = DraftModelObjective(lm, Teacher(target, lm.kept_ids), mixture, served, objective.chunk_tokens)
            save = partial(save_draft_lm, lm, target_name=target.name, tokenizer=target.tokenizer)
            drafter = DraftModel(lm, target.vocab_size)
            return Trainable(distilled, drafter, save, lm.num_scored, distilled.rank_of)
        case MedusaDrafter() | Medusa2Drafter() | BlockwiseDrafter() | HydraDrafter():
            kept = None if config.vocabulary is None else kept_ids(config.vocabulary, target, encoded)
            made = heads_in_training(config, objective, target, kept, served)
            outputs = made.objective.heads.outputs
            write = partial(save_heads, config, made, target)
            fit = made.objective.fit if made.objective.can_be_fitted else None
            return Trainable(made.objective, made.drafter, write, outputs.num_scored, outputs.rows_of_ids(), fit=fit)
        case EagleDrafter():
            kept = None if config.vocabulary is None else kept_ids(config.vocabulary, target, encoded)
            eagle = eagle_in_training(config, objective, target, kept, served)
            model = eagle.drafter.model
            write = partial(save_eagle, config, model, target)
            return Trainable(eagle.objective, eagle.drafter, write, model.outputs.num_scored, fit=eagle.objective.fit)
        case EarlyExitDrafter():
            kept = None if config.vocabulary is None else kept_ids(config.vocabulary, target, encoded)
            objective_, drafter = exit_in_training(config, objective, target, kept, served)
            outputs, write = drafter.head.outputs, partial(save_exit, drafter.head, target)
            search = NothingToSearch() if config.adapter == "none" else None
            return Trainable(objective_, drafter, write, outputs.num_scored, outputs.rows_of_ids(), search)
        case LayerSkipDrafter():
            searched = LayerSkipSearch(config, target, encoded, served, seed)
            write = partial(save_layer_skip, searched.drafter, target, searched.found)
            return Trainable(nn.Module(), searched.drafter, write, target.vocab_size, search=searched)
        case LookaheadTokensDrafter():
            embeddings = LookaheadEmbeddings(target, config.num_tokens)
            mixture = parse_mixture(objective.loss, objective.temperature)
            ahead = LookaheadObjective(
                embeddings, target, mixture, served, config.anchors, config.token_decay, objective.chunk_tokens
            )
            write = partial(save_lookahead_tokens, embeddings, target)
            return Trainable(ahead, LookaheadTokens(embeddings, target), write, target.vocab_size)


def cached_layers(config: DrafterSection, num_layers: int) -> tuple[int, ...] | None:
    """Hidden states that a cache must hold at every position, by layer (negative: from the end), of a target with
    `num_layers`; None: the last ones where labels are predicted, which the target's answers come with, are enough.
    """
    match config:
        case HydraDrafter() if config.prefix_attention:
            return (-1,)
        case EagleDrafter():
            return tuple(dict.fromkeys((*feature_layers(config, num_layers), num_layers)))
        case _:
            return None


def recorded_layers(config: DrafterSection, num_layers: int) -> tuple[int, ...] | None:
    """The same of what decoding online must record, counted from 0; none of them where nothing recorded is of use: training
    reads the target itself, or the original of a changed one, which the one that verifies is not.
    """
    match config:
        case Medusa2Drafter() | LookaheadTokensDrafter():
            return ()
        case BlockwiseDrafter() if config.train_layers:
            return ()
        case _:
            layers = cached_layers(config, num_layers)
            return None if layers is None else tuple(dict.fromkeys(absolute_layer(i, num_layers) for i in layers))


def _draft_model(config: ModelDrafter, target: Target, encoded: EncodedSet) -> DraftLM:
    if config.model is not None:
        lm = load_draft_lm(config.model, target, trust_remote_code=config.trust_remote_code)
    else:
        assert config.init is not None
        lm = DraftLM(_from_target(config.init, target, encoded))
    if config.vocabulary is not None:
        lm = cut_vocabulary(lm.model, kept_ids(config.vocabulary, target, encoded))
    lm.requires_grad_(True)
    if config.lora is not None:
        lora = config.lora
        add_lora(lm.model, lora.rank, lora.alpha, lora.dropout, lora.target_modules)
        return lm
    train_embeddings = config.train_embeddings if config.train_embeddings is not None else config.vocabulary is None
    if not train_embeddings:
        table = lm.model.get_input_embeddings().weight
        if table is lm.head.weight:
            raise BadInput(
                "drafter.train_embeddings: the output head is tied to the embeddings, so both train or neither"
            )
        table.requires_grad_(False)
    return lm


def _from_target(init: DrafterInit, target: Target, encoded: EncodedSet):
    if init.layers is not None:
        return cut_layers(target.model, init.layers)
    if init.num_layers is not None:
        return cut_layers(target.model, choose_layers(target, init.num_layers, _calibration_texts(target, encoded)))
    assert init.config is not None
    return from_config(target.model, init.config, init.embeddings)


def kept_ids(size: int, target: Target, encoded: EncodedSet) -> Int[Tensor, "kept"]:
    """The ids of a cut vocabulary: the most frequent ones, and those that end an answer.

    Frequencies are the target's expected counts where the set knows them, else the labels' counts.

    Raises:
        BadInput: the target has fewer ids, or more that end an answer.
    """
    if size > target.vocab_size:
        raise BadInput(f"drafter.vocabulary: {size} ids, the target has {target.vocab_size}")
    if size < (least := len(set(target.eos_token_ids))):
        raise BadInput(f"drafter.vocabulary: {size} ids, the target ends an answer with any of {least}")
    if target.device.type == "meta":  # nothing is computed there: as many ids, whichever they will be
        return torch.arange(size, device="meta")
    counts = encoded.expected_counts
    if counts is None:
        counts = count_tokens([encoded.ids[encoded.mask].tolist()], target.vocab_size)
    return choose_vocabulary(counts, size, always=target.eos_token_ids)


def _calibration_texts(target: Target, encoded: EncodedSet, number: int = 16) -> list[Int[Tensor, "one length"]]:
    """The longest training texts, one a batch, so that nothing is padded."""
    longest = sorted(range(len(encoded)), key=lambda i: -int(encoded.lengths[i]))[:number]
    return [torch.tensor([encoded[i].input_ids], device=target.device) for i in longest]
