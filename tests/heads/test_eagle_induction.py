"""Induction heads of an EAGLE drafter, before any training: they find what followed the like of the newest token."""

import pytest
import torch

from draftsmith.data.chats import Encoded
from draftsmith.data.packing import pack
from draftsmith.decode.sampling import Sampling
from draftsmith.distill.batch import distill_batch
from draftsmith.heads.eagle import eagle_in_training
from draftsmith.heads.eagle_induction import num_induction_heads, slow_channels
from draftsmith.heads.eagle_unroll import features_before
from draftsmith.models.target import as_target
from draftsmith.recipe import EagleDrafter, ObjectiveSection

PERIOD = 20
SLOW = {"rope_type": "default", "rope_theta": 1e6}


def made(target, key_value_heads, **options):
    torch.manual_seed(0)
    config = EagleDrafter(num_key_value_heads=key_value_heads, **options)
    return eagle_in_training(config, ObjectiveSection(), target, None, Sampling())


def target_of(tiny_llama, rope=SLOW, heads=6):
    size = {"hidden": 32 * heads, "head_dim": 32, "num_attention_heads": heads, "num_key_value_heads": heads}
    model = tiny_llama(layers=3, vocab_size=96, rope_parameters=rope, **size)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():  # as in a trained model, a state still tells its token
            if parameter.dim() > 1:
                parameter.mul_(0.1)
    return as_target(model)


def texts(count, length=2 * PERIOD, seed=0):
    """Random ids that begin again after a period; no id twice in it."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [torch.randperm(96, generator=generator)[:PERIOD] for _ in range(count)]
    return torch.stack([block.repeat(1 + length // PERIOD)[:length] for block in blocks])


def fitted(tiny_llama, key_value_heads, **options):
    training = made(target_of(tiny_llama), key_value_heads, **options)
    rows = [Encoded(row.tolist(), [False] * 2 + [True] * (len(row) - 2)) for row in texts(60)]
    # Two texts a row: they see only themselves.
    pairs = [pack(rows[i : i + 2], 4 * PERIOD) for i in range(0, len(rows), 2)]
    training.objective.fit([distill_batch(pair, torch.device("cpu")) for pair in pairs])
    return training.drafter


@torch.no_grad()
def attention_weights(drafter, target, ids):
    """``[rows, query heads, queries, keys]`` of the layer, where entry s stands for token s and the feature before it."""
    model = drafter.model
    states = target.model(ids, output_hidden_states=True).hidden_states
    fused = model.fuse([states[layer] for layer in drafter.wants["hidden_states"]])
    _, read = model.inputs(target.model.get_input_embeddings()(ids), features_before(fused))
    rotation = model.rotation(torch.arange(ids.shape[1]).expand_as(ids))
    keys, _ = model.keys_values(read, rotation)
    keys = keys.repeat_interleave(model.layer.self_attn.groups, 1)
    scores = model.queries(read, rotation) @ keys.transpose(2, 3) / model.layer.self_attn.head_dim**0.5
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    unseen[:, 0] = True  # the first token has no feature before it, and no entry
    unseen[0, 0] = False
    return scores.masked_fill(unseen, -torch.inf).softmax(-1)


@pytest.mark.parametrize("key_value_heads", [6, 3])
def test_they_attend_to_what_came_after_the_same_token(key_value_heads, tiny_llama):
    """At entry s of the second round, the entry of the token that followed token s in the first. Other heads: to themselves."""
    drafter, target = fitted(tiny_llama, key_value_heads), target_of(tiny_llama)
    number, groups = num_induction_heads(drafter.model), 6 // key_value_heads
    assert number == key_value_heads // 3
    weights = attention_weights(drafter, target, texts(8, seed=1))
    later = torch.arange(PERIOD + 2, 2 * PERIOD - 1)
    followed = weights[:, :, later, later - PERIOD + 1].mean((0, 2))
    itself = weights[:, :, later, later].mean((0, 2))
    sharp = followed.unflatten(0, (key_value_heads, groups))[:, 0]
    assert (sharp[-number:] > 0.5).all(), followed
    assert (followed[: -number * groups] < 0.1).all(), followed
    assert (itself[: -number * groups] > 0.5).all(), itself


def test_a_repeated_text_is_continued_before_any_training(tiny_llama):
    """The target is random: what follows in a text, only the text itself can tell."""
    drafter, target = fitted(tiny_llama, 6), target_of(tiny_llama)
    ids = texts(8, seed=2)
    states = dict(enumerate(target.model(ids, output_hidden_states=True).hidden_states))
    model = drafter.model
    with torch.no_grad():
        mixed = attention_weights(drafter, target, ids)[:, -2:]
        fused = model.fuse([states[layer] for layer in drafter.wants["hidden_states"]])
        _, read = model.inputs(target.model.get_input_embeddings()(ids), features_before(fused))
        values = model.layer.self_attn.project(read, model.layer.self_attn.v_proj)[:, -2:]
        brought = (mixed @ values)[:, :, PERIOD + 2 : -1]
        own = values[:, :, PERIOD + 2 : -1]
        after = values[:, :, PERIOD + 3 :]  # the value of the entry whose token comes next

    def likeness(one, other):
        return torch.nn.functional.cosine_similarity(one, other, dim=-1).mean()

    assert likeness(brought, after) > 0.5
    assert likeness(brought, own) < 0.3


def test_without_slow_channels_or_heads_to_spare_there_are_none(tiny_llama):
    fast = {"rope_type": "default", "rope_theta": 2.0}
    model = made(target_of(tiny_llama, fast), 6).drafter.model
    assert len(slow_channels(model)) == 0
    assert num_induction_heads(model) == 0
    assert num_induction_heads(made(target_of(tiny_llama), 2).drafter.model) == 0
    slow = slow_channels(made(target_of(tiny_llama), 6).drafter.model)
    assert slow.tolist() == [15, 31, 14, 30, 13, 29, 12, 28, 11, 27, 10, 26, 9, 25, 8, 24]


def test_version_1_has_none(tiny_llama):
    """What version 1 reads is one vector: no entry keeps the feature apart from the token."""
    drafter = fitted(tiny_llama, 6, version=1)
    assert drafter.model.layer.self_attn.o_proj.weight.abs().max() == 0
