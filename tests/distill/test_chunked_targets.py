"""The chunked loss and the target: metrics over its full vocabulary, cut and padded vocabularies, top-k caches."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.distill import losses
from draftsmith.distill.chunked import DraftHead, chunked_loss
from draftsmith.distill.chunked_targets import TargetHidden, TargetTopK, draft_bucket_log_probs
from draftsmith.distill.mixture import OPTIONS, parse_mixture
from draftsmith.errors import BadInput

MakeCase = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("small_blocks")


@given(seed=st.integers(0, 2**31 - 1), temperature=st.sampled_from([1.0, 2.0]))
@settings(max_examples=20, deadline=None)
def test_metrics_are_alpha_and_greedy_agreement_at_temperature_one(
    make_case: MakeCase, seed: int, temperature: float
) -> None:
    case = make_case(seed)
    case.weights[2] = 0.0
    found = case.chunked(parse_mixture("forward_kl", temperature), metrics=True, chunk_tokens=4)
    draft, target = case.draft_logits().detach(), case.target_logits()
    counted = case.weights != 0
    torch.testing.assert_close(found.alpha_sum, losses.alpha(draft, target)[counted].sum(), atol=1e-5, rtol=1e-5)
    assert found.greedy_agreement_sum == (draft.argmax(-1) == target.argmax(-1))[counted].sum()
    assert case.chunked(parse_mixture("forward_kl")).alpha_sum is None


def test_metrics_use_the_served_sampling_transforms(make_case: MakeCase) -> None:
    case = make_case(1)

    def cold(logits: Tensor) -> Tensor:
        return (logits.float() / 0.3).softmax(-1)

    found = case.chunked(parse_mixture("forward_kl"), metrics=True, probabilities=cold)
    both = cold(case.draft_logits()), cold(case.target_logits())
    torch.testing.assert_close(found.alpha_sum, torch.minimum(*both).sum().detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("metrics", [False, True])
@pytest.mark.parametrize("with_kept_head", [False, True])
def test_a_cut_vocabulary_renormalises_the_loss_and_counts_alpha_over_all_ids(
    make_case: MakeCase, metrics: bool, with_kept_head: bool
) -> None:
    case, mixture = make_case(1, vocab=11), parse_mixture({"forward_kl": 0.5, "tvd": 0.5}, 2.0)
    kept = torch.tensor([0, 3, 4, 8, 10])
    case.weight, case.bias = case.weight.detach()[:5].requires_grad_(), None
    full_logits = case.target_logits()
    expected = (mixture(case.draft_logits(), full_logits[:, kept]) * case.weights).sum()
    head = (lambda hidden: hidden @ case.target_weight[kept].t()) if with_kept_head else None
    target = TargetHidden(case.target_hidden, case.target_logits, kept, head)
    found = chunked_loss(mixture, case.hidden, case.head, target, weights=case.weights, metrics=metrics, chunk_tokens=3)
    case.assert_same(found.sum, expected)
    if metrics:
        draft = case.draft_logits().detach()
        alpha = torch.minimum(draft.softmax(-1), full_logits.softmax(-1)[:, kept]).sum()
        torch.testing.assert_close(found.alpha_sum, alpha)
        assert found.greedy_agreement_sum == (kept[draft.argmax(-1)] == full_logits.argmax(-1)).sum()


@pytest.mark.parametrize(("draft_rows", "target_rows"), [(11, 8), (8, 11)])
def test_heads_that_differ_by_padding_compare_on_the_ids_both_score(
    make_case: MakeCase, draft_rows: int, target_rows: int
) -> None:
    case, mixture = make_case(1, vocab=11), parse_mixture("jsd")
    assert case.bias is not None
    case.weight = case.weight.detach()[:draft_rows].requires_grad_()
    case.bias = case.bias.detach()[:draft_rows].requires_grad_()
    case.target_weight = case.target_weight[:target_rows]
    target_logits = case.target_logits()
    expected = (mixture(case.draft_logits()[:, :8], target_logits[:, :8]) * case.weights).sum()
    found = case.chunked(mixture, metrics=True)
    case.assert_same(found.sum, expected)
    alpha = torch.minimum(case.draft_logits()[:, :8].softmax(-1), target_logits.softmax(-1)[:, :8]).sum().detach()
    torch.testing.assert_close(found.alpha_sum, alpha)


def top_k_of(logits: Tensor, k: int) -> TargetTopK:
    best = logits.log_softmax(-1).topk(k)
    rest = logits.log_softmax(-1).scatter(-1, best.indices, -math.inf).logsumexp(-1)
    return TargetTopK(best.indices, best.values, rest)


@pytest.mark.parametrize("loss", [*OPTIONS, {"forward_kl": 0.7, "tvd": 0.3, "cross_entropy": 1.0}], ids=str)
@given(seed=st.integers(0, 2**31 - 1), k=st.integers(1, 11), missing=st.integers(0, 12))
@settings(max_examples=15, deadline=None)
def test_top_k_target_treats_the_rest_as_one_bucket(
    make_case: MakeCase, loss: Any, seed: int, k: int, missing: int
) -> None:
    case, mixture = make_case(seed), parse_mixture(loss)
    target = top_k_of(case.target_logits(), k)
    if k > 1:  # the rest must not be all that a cut vocabulary keeps
        target = TargetTopK(target.ids.masked_fill(target.ids == missing, -1), target.log_probs, target.log_rest)
    found = chunked_loss(
        mixture, case.hidden, case.head, target, case.tokens, case.weights, chunk_tokens=3, metrics=True
    )
    logits = case.draft_logits()
    buckets, _ = draft_bucket_log_probs(losses.log_probs(logits), target.ids)
    expected = torch.zeros(7)
    for term in mixture.terms:
        if term.name == "cross_entropy":
            expected = expected + term.weight * losses.cross_entropy(logits, case.tokens)
        else:
            expected = expected + term.weight * term(buckets, target.bucket_log_probs())
    case.assert_same(found.sum, (expected * case.weights).sum())
    exact = losses.alpha(logits, case.target_logits()).sum()
    assert found.alpha_sum is not None
    assert found.alpha_sum <= exact + 1e-4


def test_top_k_of_everything_is_the_full_divergence_and_less_is_a_lower_bound(make_case: MakeCase) -> None:
    case, mixture = make_case(5, vocab=30), parse_mixture("forward_kl")
    full, logits = case.plain(mixture), case.target_logits()
    values = [
        chunked_loss(mixture, case.hidden, case.head, top_k_of(logits, k), weights=case.weights).sum.item()
        for k in (1, 4, 16, 30)
    ]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(full.item(), rel=1e-5)
    assert values[0] < 0.9 * full.item()


def test_top_k_renormalises_over_what_a_cut_vocabulary_keeps() -> None:
    hidden, weight = torch.eye(1, 3), torch.tensor([[0.5, 0.3, 0.2]]).log().t().contiguous()
    head = DraftHead(torch.cat([weight, torch.zeros(3, 2)], dim=1))
    target = TargetTopK(torch.tensor([[0, -1]]), torch.tensor([[0.3, 0.4]]).log(), torch.tensor([0.3]).log())
    found = chunked_loss(parse_mixture("tvd"), hidden, head, target, metrics=True)
    torch.testing.assert_close(found.sum, torch.tensor(0.0), atol=1e-6, rtol=0)  # (0.3, 0.3) / 0.6 against (0.5, 0.5)
    torch.testing.assert_close(found.alpha_sum, torch.tensor(0.3))
    assert found.greedy_agreement_sum == 0  # the target's choice is an id that the drafter lacks


def test_top_k_needs_temperature_one_and_losses_need_what_they_compare_with(make_case: MakeCase) -> None:
    case = make_case(1)
    with pytest.raises(BadInput, match=r"objective\.temperature: must be 1"):
        chunked_loss(parse_mixture("tvd", 2.0), case.hidden, case.head, top_k_of(case.target_logits(), 3))
    with pytest.raises(ValueError, match="lacks its target or its tokens"):
        chunked_loss(parse_mixture("tvd"), case.hidden, case.head)
    with pytest.raises(ValueError, match="lacks its target or its tokens"):
        chunked_loss(parse_mixture("cross_entropy"), case.hidden, case.head, case.target)


def test_cross_entropy_alone_asks_for_no_target_head(make_case: MakeCase) -> None:
    case, mixture = make_case(1), parse_mixture("cross_entropy")

    def head(hidden: Tensor) -> Tensor:
        raise AssertionError("the target's head was called")

    found = chunked_loss(
        mixture, case.hidden, case.head, TargetHidden(case.target_hidden, head), case.tokens, case.weights
    )
    case.assert_same(found.sum, case.plain(mixture))
    measured = case.chunked(mixture, metrics=True)
    draft, target = case.draft_logits(), case.target_logits()
    torch.testing.assert_close(measured.alpha_sum, losses.alpha(draft, target).sum().detach(), atol=1e-5, rtol=1e-5)
