"""The chunked loss: equal to the plain one in value and gradient, whatever the shapes, and what it adds to it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from draftsmith.distill import chunked
from draftsmith.distill.chunked import chunked_loss
from draftsmith.distill.chunked_targets import TargetHidden
from draftsmith.distill.mixture import OPTIONS, parse_mixture

MakeCase = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("small_blocks")

LOSSES: list[Any] = [
    *OPTIONS,
    {"jsd": {"beta": 0.0}},
    {"jsd": {"beta": 1.0}},
    {"jsd": {"beta": 0.9}},
    {"skew_forward_kl": {"skew": 0.0}},
    {"skew_reverse_kl": {"skew": 0.7}},
    {"adaptive_kl": {"head_mass": 0.8}},
    {"forward_kl": 0.7, "tvd": 0.3},
    {"cross_entropy": 0.5, "reverse_kl": 2.0, "neg_log_acceptance": 0.1},
]


def softcap(logits: Tensor) -> Tensor:
    return 4.0 * torch.tanh(logits / 4.0)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_equals_the_plain_loss(make_case: MakeCase, loss: Any, data: st.DataObject) -> None:
    draw = data.draw
    tokens, vocab = draw(st.integers(1, 9), "tokens"), draw(st.integers(2, 20), "vocab")
    case = make_case(draw(st.integers(0, 2**31 - 1), "seed"), tokens, vocab, draw(st.integers(1, 8), "width"))
    case.post = softcap if draw(st.booleans(), "softcap") else None
    case.weights *= torch.tensor(draw(st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=tokens, max_size=tokens)))
    if draw(st.booleans(), "masked logits"):
        masked = torch.tensor(draw(st.lists(st.booleans(), min_size=vocab, max_size=vocab)))
        masked[0] = False
        assert case.bias is not None
        case.bias = case.bias.detach().masked_fill(masked, -math.inf).requires_grad_()
        hidden_ids = torch.tensor(draw(st.lists(st.booleans(), min_size=vocab, max_size=vocab)))
        hidden_ids[-1] = False
        target = TargetHidden(case.target_hidden, lambda h: case.target_logits(h).masked_fill(hidden_ids, -math.inf))
    else:
        hidden_ids, target = torch.zeros(vocab, dtype=torch.bool), case.target
    if draw(st.booleans(), "equal distributions at one position"):
        case.hidden = case.hidden.detach().index_fill(0, torch.tensor(0), 0.0).requires_grad_()
    mixture = parse_mixture(loss, draw(st.sampled_from([1.0, 0.5, 3.0]), "temperature"))
    found = chunked_loss(
        mixture, case.hidden, case.head, target, case.tokens, case.weights, chunk_tokens=draw(st.integers(1, 10))
    )
    target_logits = target.head(case.target_hidden)
    expected = (mixture(case.draft_logits(), target_logits, case.tokens) * case.weights).sum()
    case.assert_same(found.sum, expected)
    torch.testing.assert_close(found.count, case.weights.sum())
    assert found.positions == int((case.weights != 0).sum())


@pytest.mark.parametrize("name", ["forward_kl", "jsd", "tvd"])
def test_equals_the_plain_loss_to_within_bfloat16(make_case: MakeCase, name: str) -> None:
    case = make_case(3, tokens=40, vocab=60, width=16, dtype=torch.bfloat16)
    mixture = parse_mixture(name)
    found = case.chunked(mixture, chunk_tokens=16).sum
    assert found.dtype == torch.float32
    case.assert_same(found, case.plain(mixture), tolerance=2e-2)


def test_autocast_decides_the_dtype_of_the_products_as_it_does_for_the_plain_loss(make_case: MakeCase) -> None:
    case = make_case(3, tokens=40, vocab=60, width=16)
    mixture = parse_mixture("forward_kl")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = case.chunked(mixture, chunk_tokens=16).sum, case.plain(mixture)
    case.assert_same(found, expected, tolerance=2e-2)
    exact = case.chunked(mixture).sum
    assert found != exact


def test_scaling_after_the_fact_scales_the_gradients(make_case: MakeCase) -> None:
    case, mixture = make_case(1), parse_mixture("jsd")
    whole = case.chunked(mixture)
    again = case.chunked(mixture)
    total = (whole.sum / whole.count + 3.0 * again.sum) * 2.0
    expected = case.plain(mixture)
    case.assert_same(total, (expected / case.weights.sum() + 3.0 * expected) * 2.0)


def test_a_second_backward_is_refused_rather_than_wrong(make_case: MakeCase) -> None:
    case = make_case(1)
    loss = case.chunked(parse_mixture("forward_kl")).sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()


def test_without_gradients_it_evaluates(make_case: MakeCase) -> None:
    case, mixture = make_case(1), parse_mixture({"forward_kl": 1.0, "cross_entropy": 1.0})
    with torch.no_grad():
        found = case.chunked(mixture, metrics=True)
    assert not found.sum.requires_grad
    torch.testing.assert_close(found.sum, case.plain(mixture).detach())


@pytest.mark.parametrize("frozen", ["weight", "bias", "hidden"])
def test_what_is_frozen_gets_no_gradient(make_case: MakeCase, frozen: str) -> None:
    case, mixture = make_case(1), parse_mixture("reverse_kl")
    getattr(case, frozen).requires_grad_(False)
    found = case.chunked(mixture).sum
    case.assert_same(found, case.plain(mixture))
    case.chunked(mixture).sum.backward()
    assert getattr(case, frozen).grad is None


def test_a_head_tied_to_the_embedding_gets_both_gradients(make_case: MakeCase) -> None:
    case, mixture = make_case(1, bias=False), parse_mixture("forward_kl")
    embedding = nn.Embedding(11, 5)
    ids = torch.randint(0, 11, (7,))

    def gradient(chunk: bool) -> Tensor:
        embedding.zero_grad()
        tied = replace(case, hidden=embedding(ids), weight=embedding.weight)
        (tied.chunked(mixture, chunk_tokens=3).sum if chunk else tied.plain(mixture)).backward()
        assert embedding.weight.grad is not None
        return embedding.weight.grad

    torch.testing.assert_close(gradient(True).clone(), gradient(False), atol=1e-5, rtol=1e-5)


def test_unsupervised_positions_reach_no_head(make_case: MakeCase) -> None:
    case, mixture = make_case(1), parse_mixture("forward_kl")
    seen: list[Tensor] = []

    def head(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return case.target_logits(hidden)

    case.weights[[0, 4, 5]] = 0.0
    expected = case.plain(mixture)
    broken = case.hidden.detach().clone()
    broken[[0, 4, 5]] = math.nan
    target = TargetHidden(case.target_hidden, head)
    found = chunked_loss(mixture, broken.requires_grad_(), case.head, target, weights=case.weights, chunk_tokens=3)
    torch.testing.assert_close(found.sum, expected)
    torch.testing.assert_close(torch.cat(seen), case.target_hidden[[1, 2, 3, 6]])
    found.sum.backward()
    assert broken.grad is not None
    assert (broken.grad[[0, 4, 5]] == 0).all()


@pytest.mark.parametrize("chunk_tokens", [4, 6, 8, 64])
def test_a_last_chunk_that_is_filled_up_adds_nothing(
    make_case: MakeCase, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "CHUNK_SIZES", 4)
    case, mixture = make_case(1), parse_mixture("forward_kl")
    sizes = []

    def head(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return case.target_logits(hidden)

    case.weights[0] = 0.0
    case.hidden.requires_grad_()
    target = TargetHidden(case.target_hidden, head)
    expected = case.plain(mixture)
    (wanted,) = torch.autograd.grad(expected, case.hidden)
    found = chunked_loss(
        mixture, case.hidden, case.head, target, weights=case.weights, chunk_tokens=chunk_tokens, metrics=True
    )
    assert set(sizes) <= {4, 8}
    assert sum(sizes) == 8
    assert found.positions == 6
    torch.testing.assert_close(found.sum, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum, case.hidden)[0], wanted)
    monkeypatch.setattr(chunked, "CHUNK_SIZES", 1000)
    unfilled = chunked_loss(
        mixture, case.hidden, case.head, target, weights=case.weights, chunk_tokens=chunk_tokens, metrics=True
    )
    torch.testing.assert_close(found.alpha_sum, unfilled.alpha_sum)
    torch.testing.assert_close(found.greedy_agreement_sum, unfilled.greedy_agreement_sum)


def test_no_supervised_position_gives_zeros_that_still_reach_every_parameter(make_case: MakeCase) -> None:
    case = make_case(1)
    case.weights.zero_()
    found = case.chunked(parse_mixture("forward_kl"), metrics=True)
    assert (found.sum, found.count, found.positions, found.alpha_sum) == (0, 0, 0, 0)
    assert all((gradient == 0).all() for gradient in case.gradients(found.sum))


def test_nothing_of_size_positions_times_vocabulary_is_kept_or_made(make_case: MakeCase) -> None:
    case, kept = make_case(1, tokens=64, vocab=50), []
    rows: list[int] = []
    target = TargetHidden(case.target_hidden, lambda hidden: rows.append(len(hidden)) or case.target_logits(hidden))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: kept.append(saved.numel()) or saved, lambda saved: saved
    ):
        chunked_loss(parse_mixture("jsd"), case.hidden, case.head, target, chunk_tokens=8)
    assert rows == [8] * 8
    assert max(kept) <= max(case.hidden.numel(), case.weight.numel())


def test_large_vocabularies_shorten_chunks(make_case: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "MAX_CHUNK_LOGITS", 25)
    case, rows = make_case(1), []
    target = TargetHidden(case.target_hidden, lambda hidden: rows.append(len(hidden)) or case.target_logits(hidden))
    chunked_loss(parse_mixture("tvd"), case.hidden, case.head, target)
    assert rows == [2, 2, 2, 1]


class Drafter(nn.Module):
    """An embedding, a layer and a head, tied or not, whose forward is the loss."""

    def __init__(self, case: Any, tied: bool) -> None:
        super().__init__()
        self.case = case
        self.embedding, self.layer, self.head = nn.Embedding(11, 5), nn.Linear(5, 5), nn.Linear(5, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, chunk: bool) -> Tensor:
        here = replace(self.case, hidden=self.layer(self.embedding(ids)), weight=self.head.weight, bias=None)
        mixture = parse_mixture("forward_kl")
        return here.chunked(mixture, chunk_tokens=3).sum if chunk else here.plain(mixture)


@pytest.mark.parametrize("tied", [False, True])
def test_distributed_data_parallel_sees_every_gradient_accumulated_over_two_passes(
    make_case: MakeCase, tied: bool, tmp_path: Any
) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        drafter = Drafter(make_case(1), tied)
        wrapped = nn.parallel.DistributedDataParallel(drafter)
        ids = torch.randint(0, 11, (7,))
        found: dict[bool, list[Tensor]] = {}
        for chunk in (True, False):
            drafter.zero_grad(set_to_none=True)
            with wrapped.no_sync():
                (wrapped(ids, chunk) / 2).backward()
            (wrapped(ids.flip(0), chunk) / 2).backward()
            found[chunk] = [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]
        assert len(found[True]) == len(list(drafter.parameters()))
        torch.testing.assert_close(found[True], found[False], atol=1e-5, rtol=1e-5)
    finally:
        torch.distributed.destroy_process_group()
