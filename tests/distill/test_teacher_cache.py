"""Caches of the target's outputs: what is read back is what the target computes, for the right example."""

import pytest
import torch

from draftsmith.data.chats import Encoded
from draftsmith.data.encoded_set import EncodedSet
from draftsmith.data.packing import pack
from draftsmith.data.store import hidden_arrays
from draftsmith.data.store_writer import StoreWriter
from draftsmith.distill.batch import distill_batch
from draftsmith.distill.chunked_targets import TargetHidden, TargetTopK
from draftsmith.distill.steps import CachedTeacher
from draftsmith.distill.teacher import Teacher, all_hidden
from draftsmith.distill.teacher_cache import cache_teacher
from draftsmith.errors import BadInput
from draftsmith.models.target import as_target


def encoded_set(seed=0):
    """Five examples out of seven: two were dropped on the way, so numbers and sources differ."""
    generator = torch.Generator().manual_seed(seed)
    items = []
    for source, length in [(0, 7), (2, 5), (2, 9), (3, 4), (6, 8)]:
        ids = torch.randint(64, (length,), generator=generator).tolist()
        items.append((source, Encoded(ids, [False] * 2 + [True] * (length - 2))))
    return EncodedSet.collect(items)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3", "tiny_gpt2"])
def test_cached_states_are_the_targets_at_every_position(family, tmp_path, request):
    target = as_target(request.getfixturevalue(family)(layers=3))
    encoded = encoded_set()
    store = cache_teacher(target, encoded, "states", 0, tmp_path / "states", "data", layers=(0, 2, -1))
    numbers = [4, 1, 2]
    packed = pack([encoded[i] for i in numbers], 14, numbers=numbers)
    cached = CachedTeacher(store, encoded).outputs(packed, torch.device("cpu"))
    batch = distill_batch(packed, torch.device("cpu"))
    expected = all_hidden(Teacher(target), batch, (0, 2, 3))
    assert isinstance(cached, dict)
    inside = packed.segment_ids >= 0
    assert set(cached) == {0, 2, 3}
    for layer, states in expected.items():
        torch.testing.assert_close(cached[layer][inside].float(), states[inside], rtol=2e-3, atol=2e-3)
        assert not cached[layer][~inside].any()
    served = distill_batch(packed, torch.device("cpu"), cached)
    outputs = Teacher(target).outputs(served)
    assert isinstance(outputs, TargetHidden)
    torch.testing.assert_close(outputs.hidden, Teacher(target).hidden(batch), rtol=2e-3, atol=2e-3)


def test_states_of_packed_documents_are_those_of_each_alone(tiny_mistral, tmp_path):
    target = as_target(tiny_mistral(layers=2))
    encoded = encoded_set()
    store = cache_teacher(target, encoded, "states", 0, tmp_path / "states", "data", layers=(1, -1))
    for i in range(len(encoded)):
        out = target.model(input_ids=torch.tensor([encoded[i].input_ids]), output_hidden_states=True)
        for layer in (1, 2):
            torch.testing.assert_close(
                store[i].arrays[f"states_{layer}"].float(), out.hidden_states[layer][0], rtol=2e-3, atol=2e-3
            )


@pytest.mark.parametrize("form", ["hidden", "topk"])
def test_items_of_a_set_with_gaps_find_their_own_rows(form, tiny_llama, tmp_path):
    target = as_target(tiny_llama())
    encoded = encoded_set()
    store = cache_teacher(target, encoded, form, 64, tmp_path / form, "data")
    teacher = Teacher(target)
    for i in range(len(encoded)):
        packed = pack([encoded[i]], 16, numbers=[i])
        cached = CachedTeacher(store, encoded).outputs(packed, torch.device("cpu"))
        hidden = teacher.hidden(distill_batch(packed, torch.device("cpu")))
        if form == "hidden":
            assert isinstance(cached, torch.Tensor)
            torch.testing.assert_close(cached.float(), hidden, rtol=2e-3, atol=2e-3)
        else:
            assert isinstance(cached, TargetTopK)
            assert cached.ids[:, 0].tolist() == teacher.head(hidden).argmax(-1).tolist()


def test_states_of_a_bf16_target_are_kept_as_they_are(tiny_llama, tmp_path):
    target = as_target(tiny_llama().bfloat16())
    encoded = encoded_set()
    store = cache_teacher(target, encoded, "states", 0, tmp_path / "states", "data", layers=(1,))
    out = target.model(input_ids=torch.tensor([encoded[0].input_ids]), output_hidden_states=True)
    assert store.arrays["states_1"].dtype == torch.bfloat16
    torch.testing.assert_close(store[0].arrays["states_1"], out.hidden_states[1][0], rtol=0.05, atol=0.05)


def test_a_finished_cache_is_read_while_somebody_writes_to_it(tiny_llama, tmp_path):
    """Ranks open it side by side: none may lock the others out."""
    target, encoded = as_target(tiny_llama()), encoded_set()
    made = cache_teacher(target, encoded, "hidden", 0, tmp_path / "cache", "data")
    with StoreWriter(made.folder, made.fingerprint, hidden_arrays(target.hidden_size)):
        again = cache_teacher(target, encoded, "hidden", 0, tmp_path / "cache", "data")
    assert torch.equal(again[2].arrays["hidden"], made[2].arrays["hidden"])


def test_more_ids_than_there_are_is_all_of_them(tiny_llama, tmp_path):
    target, encoded = as_target(tiny_llama(vocab_size=40)), encoded_set()
    encoded = EncodedSet.collect(
        [(i, Encoded([n % 40 for n in encoded[i].input_ids], encoded[i].loss_mask)) for i in range(5)]
    )
    store = cache_teacher(target, encoded, "topk", 64, tmp_path / "cache", "data")
    arrays = store[1].arrays
    assert arrays["top_ids"].shape == (3, 40)
    torch.testing.assert_close(arrays["top_log_probs"].exp().sum(-1), torch.ones(3))


def test_other_layers_and_layers_that_do_not_exist_are_refused(tiny_llama, tmp_path):
    target, encoded = as_target(tiny_llama()), encoded_set()
    cache_teacher(target, encoded, "states", 0, tmp_path / "states", "data", layers=(1,))
    with pytest.raises(BadInput, match="another form"):
        cache_teacher(target, encoded, "states", 0, tmp_path / "states", "data", layers=(2,))
    with pytest.raises(BadInput, match="layer 3 do not exist: the target has 2 layers"):
        cache_teacher(target, encoded, "states", 0, tmp_path / "other", "data", layers=(3,))


def test_a_cache_of_other_weights_under_the_same_name_is_refused(tiny_llama, tmp_path):
    encoded = encoded_set()
    target, other = (as_target(tiny_llama(seed=seed)) for seed in (0, 1))
    assert target.name == other.name
    cache_teacher(target, encoded, "hidden", 0, tmp_path / "hidden", "data")
    with pytest.raises(BadInput, match="was made with another weights"):
        cache_teacher(other, encoded, "hidden", 0, tmp_path / "hidden", "data")
