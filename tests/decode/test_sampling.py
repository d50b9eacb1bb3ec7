"""Sampling transforms give what transformers' own processors give; drawing is exact and never impossible."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.decode.sampling import Sampling, apply, check_sampling, draw, probabilities
from draftsmith.errors import BadInput


def as_transformers(logits: torch.Tensor, sampling: Sampling, context: torch.Tensor | None = None) -> torch.Tensor:
    """What ``generate(do_sample=True)`` would sample from, its processors built in its own order."""
    chain = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    chain.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        chain.append(MinPLogitsWarper(sampling.min_p))
    context = torch.zeros(len(logits), 1).long() if context is None else context
    return chain(context, logits.float())  # pyright: ignore[reportArgumentType]  (it asks for LongTensor)


@pytest.fixture
def stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers sorts without asking for stability, which leaves open which of several equals it drops."""
    plain = torch.sort
    monkeypatch.setattr(torch, "sort", lambda scores, descending: plain(scores, descending=descending, stable=True))


SETTINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([None, 0, 1, 3, 20, 1000]),
    top_p=st.sampled_from([None, 0.1, 0.5, 0.9, 0.95, 1.0]),
    min_p=st.sampled_from([None, 0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
)


@settings(max_examples=60, deadline=None)
@given(
    sampling=SETTINGS, seed=st.integers(0, 2**31), vocab=st.sampled_from([5, 40, 700]), levels=st.sampled_from([0, 4])
)
@pytest.mark.usefixtures("stable_sort")
def test_transforms_equal_transformers(sampling: Sampling, seed: int, vocab: int, levels: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, vocab, generator=generator) * 3
    if levels:  # few distinct values: ties everywhere
        logits = (logits / 3).round()
    context = torch.randint(0, vocab, (4, 6), generator=generator)
    seen = torch.zeros(4, vocab, dtype=torch.bool).scatter(1, context, True)
    torch.testing.assert_close(
        apply(logits, sampling, seen), as_transformers(logits, sampling, context), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("spread", [1.0, 3.0, 6.0])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0, top_p=0.9), Sampling(0.7, top_k=50, top_p=0.95), Sampling(1.0, top_p=0.4)],
)
def test_large_vocabularies_equal_transformers(sampling: Sampling, spread: float) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(6, 20_000, generator=generator) * spread
    logits[0, 100:] -= 30  # a small nucleus in one row, a wide one in its neighbours
    assert torch.equal(apply(logits, sampling), as_transformers(logits, sampling))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(8, 9000, generator=generator) * 4).to(torch.bfloat16)  # rounded: ties at the limit
    for sampling in (Sampling(1.0, top_p=0.9), Sampling(0.5, top_k=40, top_p=0.8, min_p=0.1)):
        together = apply(logits, sampling)
        assert together.dtype == torch.float32
        for row in range(8):
            assert torch.equal(apply(logits[row], sampling), together[row])


def test_equals_at_the_nucleus_limit_are_as_many_as_transformers_keeps() -> None:
    logits = torch.zeros(1, 600)
    logits[0, :100] = 2.0
    sampling = Sampling(1.0, top_p=0.3)
    mine, theirs = apply(logits, sampling), as_transformers(logits, sampling)
    assert torch.equal(mine.sort().values, theirs.sort().values)
    kept = (mine[0] > -torch.inf).nonzero().flatten()
    assert kept.tolist() == list(range(100 - len(kept), 100))  # the highest ids


def test_temperature_0_is_one_hot_at_the_lowest_best_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, -1.0, 0.5, 2.0]])
    sampling = Sampling(0.0, top_k=1, top_p=0.1, min_p=0.9)
    assert probabilities(logits, sampling).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert apply(logits, sampling)[0].tolist() == [-torch.inf, 0, -torch.inf, -torch.inf]
    seen = torch.tensor([[False, True, True, False], [True, False, False, False]])
    penalised = sampling._replace(repetition_penalty=4.0)
    assert probabilities(logits, penalised, seen).tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]


def test_probabilities_tend_to_temperature_0() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    cold = probabilities(logits, Sampling(1e-3))
    torch.testing.assert_close(cold, probabilities(logits, Sampling(0.0)))


@given(
    weights=st.lists(st.integers(0, 3), min_size=1, max_size=8).filter(any),
    uniform=st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 0.5, 1 - 2.0**-53]),
    scale=st.sampled_from([1e-30, 1 / 3, 1.0, 1e4]),
)
@settings(max_examples=200, deadline=None)
def test_draw_inverts_the_cumulative_distribution(weights: list[int], uniform: float, scale: float) -> None:
    probs = torch.tensor(weights).double() * scale  # need not be normalised
    token = int(draw(probs, torch.tensor(uniform, dtype=torch.float64)))
    assert weights[token] > 0
    total = sum(weights)
    assert sum(weights[:token]) / total <= uniform + 1e-12
    assert sum(weights[: token + 1]) / total >= uniform - 1e-12


def test_draw_never_returns_an_impossible_id_at_the_ends() -> None:
    probs = torch.full((3, 5000), 0.0)
    probs[:, 17:4000] = torch.rand(3, 3983, generator=torch.Generator().manual_seed(0))
    for uniform in (0.0, 1 - 2.0**-53, 1.0):  # a float32 uniform may round to one
        tokens = draw(probs, torch.full((3,), uniform, dtype=torch.float64))
        assert (probs.gather(1, tokens.unsqueeze(1)) > 0).all()


def test_draw_follows_the_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.tensor([0.05, 0.0, 0.4, 0.3, 0.25])
    uniforms = torch.rand(50_000, dtype=torch.float64, generator=generator)
    counts = torch.bincount(draw(probs.expand(50_000, -1), uniforms), minlength=5)
    assert counts[1] == 0
    kept = [0, 2, 3, 4]
    expected = probs[kept].double() / probs[kept].double().sum() * 50_000
    assert chisquare(counts[kept].numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        (Sampling(-0.1), "temperature"),
        (Sampling(1.0, top_k=-1), "top_k"),
        (Sampling(1.0, top_p=0.0), "top_p"),
        (Sampling(1.0, top_p=1.1), "top_p"),
        (Sampling(1.0, min_p=2.0), "min_p"),
        (Sampling(1.0, repetition_penalty=0.0), "repetition_penalty"),
    ],
)
def test_settings_out_of_range_are_named(sampling: Sampling, name: str) -> None:
    with pytest.raises(BadInput, match=name):
        check_sampling(sampling)


def test_settings_in_range_pass() -> None:
    for sampling in (Sampling(), Sampling(1.0, top_k=50, top_p=1.0, min_p=0.0, repetition_penalty=1.2)):
        assert check_sampling(sampling) is sampling
