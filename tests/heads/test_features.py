"""Hidden states for a batch: from the cache or from a pass, the same, and of the layers that were asked for."""

from typing import Any

import pytest
import torch

from draftsmith.data.chats import Encoded
from draftsmith.data.encoded_set import EncodedSet
from draftsmith.data.packing import pack
from draftsmith.distill.batch import distill_batch
from draftsmith.distill.steps import CachedTeacher
from draftsmith.distill.teacher_cache import cache_teacher
from draftsmith.heads.features import TargetFeatures
from draftsmith.models.target import as_target

CPU = torch.device("cpu")
EXAMPLES = [
    Encoded([5, 9, 2, 7, 1, 3], [False, False, True, True, True, True]),
    Encoded([4, 8, 6], [False, True, True]),
]


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen3", "tiny_gemma3", "tiny_gpt2"])
def test_features_are_the_hidden_states_that_transformers_counts(family, request):
    target = as_target(request.getfixturevalue(family)(layers=3))
    batch = distill_batch(pack(EXAMPLES, 6, packing=False), CPU)
    features = TargetFeatures(target, (1, -1))
    out = target.model(input_ids=torch.tensor([EXAMPLES[0].input_ids]), output_hidden_states=True)
    states = features(batch)
    torch.testing.assert_close(states[1][0], out.hidden_states[1][0])
    torch.testing.assert_close(states[-1][0], out.hidden_states[-1][0])
    torch.testing.assert_close(features.at_labels(batch)[:4], out.hidden_states[-1][0, 1:5])


@pytest.mark.parametrize(("form", "layers"), [("states", (1, 3)), ("hidden", ())])
def test_features_come_from_the_cache_where_it_has_them(form, layers, tiny_llama, tmp_path):
    target = as_target(tiny_llama(layers=3))
    encoded = EncodedSet.collect(enumerate(EXAMPLES))
    store = cache_teacher(target, encoded, form, 0, tmp_path / form, "data", layers)
    packed = pack(EXAMPLES, 9, numbers=[0, 1])
    plain = distill_batch(packed, CPU)
    cached = distill_batch(packed, CPU, CachedTeacher(store, encoded).outputs(packed, CPU))
    features = TargetFeatures(target, (1, -1))
    close: dict[str, Any] = {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(features.at_labels(cached), features.at_labels(plain), **close)
    for layer, states in features(plain).items():
        torch.testing.assert_close(features(cached)[layer], states, **close)
    passes = []
    target.model.model.register_forward_hook(lambda *_: passes.append(1))
    features.at_labels(cached)
    if form == "states":
        features(cached)
    assert not passes, "the target ran although the cache had what was needed"
