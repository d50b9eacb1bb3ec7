"""What a step costs besides the models' passes: it waits for the device once."""

from collections import Counter

import pytest
import torch

from draftsmith.decode.loop import decode_steps
from draftsmith.decode.prompts import pad_rows
from draftsmith.decode.sampling import Sampling
from draftsmith.models.target import as_target

# What makes the host wait until a tensor's value is known.
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")


@pytest.fixture
def reads(monkeypatch):
    """How often each of these was called."""
    counts = Counter()

    def counted(name, original):
        def call(self, *args, **kwargs):
            counts[name] += 1
            return original(self, *args, **kwargs)

        return call

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, counted(name, getattr(torch.Tensor, name)))
    return counts


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [4, "heuristic"])
def test_a_step_of_a_draft_model_reads_the_device_once(batch, sampling, lengths, tiny_llama, reference, reads):
    target = as_target(tiny_llama(seed=1))
    prompts = pad_rows([reference.prompt_of(n, n) for n in (6, 3, 8)[:batch]], target)
    steps = decode_steps(
        target,
        tiny_llama(seed=2),
        prompts,
        sampling=sampling,
        max_new_tokens=20,
        num_speculative_tokens=lengths,
        eos_token_id=[],
    )
    next(steps)
    before = dict(reads)
    assert before["tolist"] > 0
    count = 0
    for _ in steps:
        found, before = Counter(reads) - Counter(before), dict(reads)
        assert found == Counter(tolist=1)
        count += 1
    assert count > 3
