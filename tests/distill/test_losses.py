"""The plain losses: formulas, conventions and limits, and a recipe's mixture of them."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.distill import losses
from draftsmith.distill.mixture import OPTIONS, Mixture, Term, parse_mixture
from draftsmith.errors import BadInput

DIVERGENCES = [name for name in OPTIONS if name != "cross_entropy"]
SEEDS = st.integers(0, 2**31 - 1)


def default_term(name: str) -> Term:
    return parse_mixture(name).terms[0]


def random_logits(seed: int, *shape: int, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * scale


def kl(first: Tensor, second: Tensor) -> Tensor:
    return (first * (first / second).log()).sum(-1)


REFERENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": lambda d, t: kl(t, d),
    "reverse_kl": lambda d, t: kl(d, t),
    "jsd": lambda d, t: 0.5 * kl(t, (t + d) / 2) + 0.5 * kl(d, (t + d) / 2),
    "tvd": lambda d, t: 1 - torch.minimum(d, t).sum(-1),
    "skew_forward_kl": lambda d, t: kl(t, 0.1 * t + 0.9 * d),
    "skew_reverse_kl": lambda d, t: kl(d, 0.1 * d + 0.9 * t),
    "neg_log_acceptance": lambda d, t: -torch.minimum(d, t).sum(-1).log(),
    "lk_hybrid": lambda d, t: (
        (share := torch.exp(-3 * torch.minimum(d, t).sum(-1))) * kl(t, d)
        + (1 - share) * (1 - torch.minimum(d, t).sum(-1))
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
@given(seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_value_is_the_formula_on_probabilities(name: str, seed: int) -> None:
    draft, target = random_logits(seed, 2, 3, 11), random_logits(seed + 1, 2, 3, 11)
    expected = REFERENCES[name](draft.double().softmax(-1), target.double().softmax(-1))
    found = default_term(name)(draft, target)
    assert found.shape == (2, 3)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", DIVERGENCES)
@given(seed=SEEDS, vocab=st.integers(2, 12), masked=st.integers(0, 2**24 - 1))
@settings(max_examples=40, deadline=None)
def test_zeros_and_masked_logits_never_give_nan(name: str, seed: int, vocab: int, masked: int) -> None:
    draft, target = random_logits(seed, vocab), random_logits(seed + 1, vocab)
    for logits, bits in ((draft, masked), (target, masked >> 12)):
        for index in range(1, vocab):  # one outcome stays possible
            if bits >> index & 1:
                logits[index] = [-math.inf, torch.finfo(torch.float32).min, -300.0][index % 3]
    draft.requires_grad_()
    value = default_term(name)(draft, target)
    value.backward()
    assert draft.grad is not None
    assert value.isfinite()
    assert value >= -1e-5
    assert draft.grad.isfinite().all()
    assert (draft.grad[draft == -math.inf] == 0).all()


# The weights of adaptive_kl and lk_hybrid are constants for the gradient, by definition: tested below.
@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name not in ("adaptive_kl", "lk_hybrid")])
def test_gradient_is_that_of_the_value(name: str) -> None:
    draft, target = (random_logits(seed, 2, 7, dtype=torch.float64) for seed in (1, 2))
    assert torch.autograd.gradcheck(lambda logits: default_term(name)(logits, target), draft.requires_grad_())


@pytest.mark.parametrize("name", DIVERGENCES)
@given(seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_equal_distributions_cost_nothing(name: str, seed: int) -> None:
    logits = random_logits(seed, 9)
    same, shifted = logits.clone().requires_grad_(), (logits + 5.0).requires_grad_()
    default_term(name)(same, logits).backward()
    value = default_term(name)(shifted, logits)
    value.backward()
    assert value.abs() < 1e-5
    assert same.grad is not None
    assert same.grad.abs().max() < 1e-6
    assert shifted.grad is not None
    if name not in ("tvd", "neg_log_acceptance", "lk_hybrid"):  # these have a corner there, which rounding steps off
        assert shifted.grad.abs().max() < 1e-5


@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_tvd_is_one_minus_alpha(seed: int) -> None:
    draft, target = random_logits(seed, 4, 9), random_logits(seed + 1, 4, 9)
    draft[:, 3] = -math.inf
    torch.testing.assert_close(losses.tvd(draft, target), 1 - losses.alpha(draft, target), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        losses.neg_log_acceptance(draft, target), -losses.alpha(draft, target).log(), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(("beta", "end"), [(0.0, losses.forward_kl), (1.0, losses.reverse_kl)])
def test_jsd_ends_are_the_two_kl_divergences_and_train(beta: float, end: Callable[[Tensor, Tensor], Tensor]) -> None:
    draft, target = random_logits(1, 5, 9).requires_grad_(), random_logits(2, 5, 9)
    torch.testing.assert_close(losses.jsd(draft, target, beta=beta), end(draft, target))
    losses.jsd(draft, target, beta=beta).sum().backward()
    assert draft.grad is not None
    assert draft.grad.abs().max() > 0.01
    # Divided by its vanishing share, the formula tends to the same divergence.
    wide, inside = (draft.detach().double(), target.double()), abs(beta - 1e-6)
    torch.testing.assert_close(losses.jsd(*wide, inside) / 1e-6, end(*wide), atol=0.01, rtol=0.01)


@given(seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_jsd_at_half_is_symmetric_and_bounded(seed: int) -> None:
    draft, target = random_logits(seed, 9, scale=10.0), random_logits(seed + 1, 9, scale=10.0)
    torch.testing.assert_close(losses.jsd(draft, target, 0.5), losses.jsd(target, draft, 0.5))
    assert losses.jsd(draft, target, 0.5) <= math.log(2) + 1e-6


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
def test_shares_outside_their_range_are_refused(bad: float) -> None:
    logits = torch.zeros(3)
    with pytest.raises(ValueError, match="beta must be at least 0"):
        losses.jsd(logits, logits, bad)
    with pytest.raises(ValueError, match="below 1"):
        losses.skew_forward_kl(logits, logits, 1.0)


def test_skew_zero_is_the_plain_divergence() -> None:
    draft, target = random_logits(1, 9), random_logits(2, 9)
    torch.testing.assert_close(losses.skew_forward_kl(draft, target, 0.0), losses.forward_kl(draft, target))
    torch.testing.assert_close(losses.skew_reverse_kl(draft, target, 0.0), losses.reverse_kl(draft, target))


def test_adaptive_kl_weighs_by_the_gaps_over_head_and_tail() -> None:
    target, draft = torch.tensor([0.3, 0.1, 0.4, 0.2]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    # Ranked 0.4, 0.3, …: 0.4 fits below 0.5, 0.7 does not, so the head is token 2 and its gap 0.1; the tail's is 0.5.
    expected = (0.1 * kl(target, draft) + 0.5 * kl(draft, target)) / 0.6
    torch.testing.assert_close(losses.adaptive_kl(draft.log(), target.log()), expected)
    # The first token is head even where it alone exceeds the mass.
    expected = (0.1 * kl(target, draft) + 0.5 * kl(draft, target)) / 0.6
    torch.testing.assert_close(losses.adaptive_kl(draft.log(), target.log(), head_mass=0.01), expected)
    everything = losses.adaptive_kl(draft.log(), target.log(), head_mass=1.0)
    torch.testing.assert_close(everything, kl(target, draft))


def test_adaptive_kl_finds_a_long_head() -> None:
    draft, target = random_logits(1, 3, 5000, scale=0.1), random_logits(2, 3, 5000, scale=0.1)
    head, tail = losses.head_tail_shares(draft.softmax(-1), target.softmax(-1), 0.5)
    order = target.argsort(dim=-1, descending=True)
    in_head = target.softmax(-1).gather(-1, order).cumsum(-1) <= 0.5
    gap = (target.softmax(-1) - draft.softmax(-1)).abs()
    expected = (gap.gather(-1, order) * in_head).sum(-1) / gap.sum(-1)
    torch.testing.assert_close(head, expected, atol=2e-3, rtol=0)  # one token at the border is 1/2500 of the head
    torch.testing.assert_close(head + tail, torch.ones(3))


@pytest.mark.parametrize("name", ["adaptive_kl", "lk_hybrid"])
def test_adaptive_weights_are_constants_for_the_gradient(name: str) -> None:
    draft, target = random_logits(1, 9, dtype=torch.float64).requires_grad_(), random_logits(2, 9, dtype=torch.float64)
    if name == "lk_hybrid":
        first = torch.exp(-3 * losses.alpha(draft, target)).item()
        parts = (first, losses.forward_kl), (1 - first, losses.tvd)
    else:
        head, tail = losses.head_tail_shares(draft.detach().softmax(-1), target.softmax(-1), 0.5)
        parts = (head.item(), losses.forward_kl), (tail.item(), losses.reverse_kl)
    expected = torch.autograd.grad(torch.stack([share * part(draft, target) for share, part in parts]).sum(), draft)
    found = torch.autograd.grad(default_term(name)(draft, target), draft)
    torch.testing.assert_close(found, expected)


def test_neg_log_acceptance_trains_where_alpha_is_too_small_for_float32() -> None:
    draft, target = torch.tensor([0.0, 200.0]).requires_grad_(), torch.tensor([200.0, 0.0])
    losses.neg_log_acceptance(draft, target).backward()
    assert losses.alpha(draft, target) == 0
    torch.testing.assert_close(draft.grad, torch.tensor([-0.5, 0.5]), atol=1e-4, rtol=0)


def test_cross_entropy_is_torchs_and_leaves_out_unknown_tokens() -> None:
    logits, tokens = random_logits(1, 2, 4, 9), torch.tensor([[0, 3, 8, 1], [2, 2, 7, 5]])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    torch.testing.assert_close(losses.cross_entropy(logits, tokens), expected.view(2, 4))
    assert (losses.cross_entropy(logits, torch.full((2, 4), -1)) == 0).all()


def test_half_precision_logits_are_worked_on_in_float32() -> None:
    draft, target = random_logits(1, 9).bfloat16(), random_logits(2, 9).bfloat16()
    for name in DIVERGENCES:
        value = parse_mixture(name, temperature=1.7)(draft, target)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, parse_mixture(name, temperature=1.7)(draft.float(), target.float()))


@given(seed=SEEDS, temperature=st.floats(0.3, 4.0))
@settings(max_examples=20, deadline=None)
def test_temperature_softens_both_sides_and_multiplies_by_its_square(seed: int, temperature: float) -> None:
    draft, target = random_logits(seed, 9), random_logits(seed + 1, 9)
    tokens = torch.tensor(4)
    mixture = parse_mixture({"reverse_kl": 0.3, "cross_entropy": 0.7}, temperature)
    soft = temperature**2 * losses.reverse_kl(draft / temperature, target / temperature)
    expected = 0.3 * soft + 0.7 * losses.cross_entropy(draft, tokens)
    torch.testing.assert_close(mixture(draft, target, tokens), expected, atol=1e-5, rtol=1e-5)


def test_gradients_keep_their_size_at_a_high_temperature() -> None:
    draft, target = random_logits(1, 9, dtype=torch.float64).requires_grad_(), random_logits(2, 9, dtype=torch.float64)
    parse_mixture("forward_kl", 1000.0)(draft, target).backward()
    difference = draft.detach() - target  # the limit, arXiv:1503.02531 (4), for logits that need not be centred
    torch.testing.assert_close(draft.grad, (difference - difference.mean()) / 9, atol=1e-2, rtol=1e-2)


def test_a_recipe_names_losses_weights_and_options() -> None:
    assert parse_mixture("tvd") == Mixture((Term("tvd", 1.0, 0.0),), 1.0)
    assert parse_mixture("jsd").terms[0].option == 0.5
    mixture = parse_mixture({"forward_kl": 0.7, "jsd": {"weight": 2, "beta": 0.1}, "lk_hybrid": {"eta": 1}}, 2.0)
    assert mixture.terms == (Term("forward_kl", 0.7), Term("jsd", 2.0, 0.1), Term("lk_hybrid", 1.0, 1.0))
    assert mixture.temperature == 2.0
    assert str(mixture) == "0.7 forward_kl + 2 jsd + 1 lk_hybrid"
    assert (mixture.needs_target, mixture.needs_tokens) == (True, False)
    with pytest.raises(ValueError, match="needs target logits"):
        mixture(torch.zeros(3))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("foward_kl", "unknown loss 'foward_kl' .did you mean 'forward_kl'"),
        ({"jsd": {"bta": 0.1}}, "objective.loss.jsd: unknown option 'bta' .did you mean 'beta'"),
        ({"tvd": {"beta": 0.1}}, "objective.loss.tvd: unknown option 'beta'"),
        ({"jsd": {"beta": 1.5}}, "objective.loss.jsd.beta: must be at most 1"),
        ({"skew_forward_kl": {"skew": 1.0}}, "objective.loss.skew_forward_kl.skew: must be below 1"),
        ({"lk_hybrid": {"eta": -1.0}}, "objective.loss.lk_hybrid.eta: must not be negative"),
        ({"tvd": 0.0}, "objective.loss.tvd.weight: must be above 0"),
        ({"tvd": math.nan}, "objective.loss.tvd.weight: must be a number"),
        ({"tvd": True}, "objective.loss.tvd.weight: must be a number"),
        ({}, "objective.loss: is empty"),
    ],
)
def test_a_wrong_recipe_is_one_clear_line(loss: str | dict, message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        parse_mixture(loss)
    assert "\n" not in str(error.value)
    with pytest.raises(BadInput, match=r"objective\.temperature"):
        parse_mixture("tvd", 0.0)
