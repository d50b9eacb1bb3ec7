"""The rules that trade exactness for length: at their limits, and batched against the references."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.decode import verify_lossy as reference
from draftsmith.decode.draft import Draft, Verdict, chain
from draftsmith.decode.verify_batched import verify

VOCAB = 6
PROBS = [0.5, 0.3, 0.15, 0.05]


def on_one_token(rule: str, token: int, options: dict[str, float], judge: list[float] | None = None) -> bool:
    """Whether a draft of this token alone is accepted; the target greedily prefers id 0, and judges by `judge`."""
    target_probs = torch.tensor([[1.0, 0, 0, 0]]).expand(1, 2, -1)
    judge_probs = torch.tensor(judge or PROBS).expand(1, 2, -1)
    draft = chain(torch.tensor([[token]]))
    verdict = verify(rule, draft, target_probs, torch.full((1, 2), 0.999).double(), options, judge_probs)
    assert int(verdict.next_tokens) == 0  # always the target's own
    return bool(verdict.num_accepted)


def test_typical_compares_with_the_smaller_of_its_two_limits() -> None:
    entropy = -sum(p * math.log(p) for p in PROBS)
    assert [on_one_token("typical", t, {"epsilon": 0.2, "delta": 10.0}) for t in range(4)] == [True, True, False, False]
    limit = 0.6 * math.exp(-entropy)  # 0.19
    assert [on_one_token("typical", t, {"epsilon": 1.0, "delta": 0.6}) for t in range(4)] == [p > limit for p in PROBS]
    # A flat target is tolerant, a sharp one is not: the same probability passes under the one only.
    flat, sharp = [0.28, 0.26, 0.26, 0.2], [0.8, 0.2, 0.0, 0.0]
    settings_ = {"epsilon": 1.0, "delta": 0.5}
    assert on_one_token("typical", 3, settings_, flat)
    assert not on_one_token("typical", 1, settings_, sharp)


def test_tolerant_wants_a_high_rank_and_a_probability_near_the_best() -> None:
    wide = {"top": 2, "tolerance": 10.0}
    assert [on_one_token("tolerant", t, wide) for t in range(4)] == [True, True, False, False]
    near = {"top": 4, "tolerance": math.log(0.5 / 0.15) + 1e-6}
    assert [on_one_token("tolerant", t, near) for t in range(4)] == [True, True, True, False]
    assert on_one_token("tolerant", 1, {"top": 1, "tolerance": 0.0}, [0.4, 0.4, 0.1, 0.1])  # a tie for the best


def test_rollback_limits_the_cross_entropy() -> None:
    options = {"rollback_threshold": -math.log(0.15) + 1e-6}
    assert [on_one_token("fallback_rollback", t, options) for t in range(4)] == [True, True, True, False]


def test_lenience_at_temperature_0_compares_with_the_best_id() -> None:
    assert [on_one_token("lenient", t, {"lenience": 0.29}) for t in range(4)] == [True, True, True, False]
    assert [on_one_token("lenient", t, {"lenience": 1.0}) for t in range(4)] == [True, False, False, False]


def test_lenience_under_sampling_shrinks_the_draft_probability() -> None:
    probs = torch.tensor([0.9, 0.1])
    draft = chain(torch.zeros(2, 1).long(), probs.expand(2, 1, -1))
    target_probs = torch.tensor([0.36, 0.64]).expand(2, 2, -1)
    uniforms = torch.tensor([[0.39, 0.5], [0.41, 0.5]]).double()  # 0.36 / 0.9 = 0.4
    assert verify("lossless", draft, target_probs, uniforms).num_accepted.tolist() == [1, 0]
    assert verify("lenient", draft, target_probs, uniforms, {"lenience": 1.0}).num_accepted.tolist() == [1, 0]
    assert verify("lenient", draft, target_probs, uniforms, {"lenience": 0.9}).num_accepted.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("rule", "accept_all", "strictest"),
    [
        ("typical", {"epsilon": 0.0}, {"epsilon": 1.0, "delta": 1e9}),
        ("tolerant", {"top": VOCAB, "tolerance": 1e9}, {"top": 1, "tolerance": 0.0}),
        ("fallback_rollback", {"rollback_threshold": 1e9}, {"rollback_threshold": 0.0}),
        ("lenient", {"lenience": 0.0}, {"lenience": 1.0}),
    ],
)
def test_limits_accept_everything_or_greedy_matches_only(rule: str, accept_all: dict, strictest: dict) -> None:
    generator = torch.Generator().manual_seed(5)
    judge = torch.rand(50, 4, VOCAB, generator=generator).softmax(-1)
    greedy = torch.nn.functional.one_hot(judge.argmax(-1), VOCAB).float()
    tokens = torch.where(torch.rand(50, 3, generator=generator) < 0.6, judge.argmax(-1)[:, :3], 0)
    draft = chain(tokens)
    uniforms = torch.rand(50, 4, dtype=torch.float64, generator=generator)
    everything = verify(rule, draft, greedy, uniforms, accept_all, judge)
    assert everything.num_accepted.tolist() == [3] * 50
    matches = verify("lossless", draft, greedy, uniforms)
    strict = verify(rule, draft, greedy, uniforms, strictest, judge)
    assert (strict.num_accepted <= matches.num_accepted).all()
    if rule in ("tolerant", "lenient"):
        assert torch.equal(strict.path, matches.path)
        assert torch.equal(strict.next_tokens, matches.next_tokens)


def test_the_longest_passing_path_wins_then_the_likeliest() -> None:
    #        0 -> 2, 3    1 -> 4: paths of two nodes; node 3 is more likely than node 2, node 4 fails.
    parents = torch.tensor([[-1, -1, 0, 0, 1]])
    draft = Draft(torch.tensor([[0, 1, 1, 0, 3]]), parents)
    judge = torch.tensor(PROBS).expand(1, 6, -1)
    options = {"rollback_threshold": -math.log(0.1)}
    uniforms = torch.zeros(1, 6).double()
    verdict = verify("fallback_rollback", draft, judge, uniforms, options)
    assert verdict.path[0, :3].tolist() == [0, 3, -1]
    assert int(verdict.num_accepted) == 2
    short = verify("fallback_rollback", draft._replace(lengths=torch.tensor([2])), judge, uniforms, options)
    assert short.path[0, :2].tolist() == [0, -1]


def as_reference(rule: str) -> reference.Judgement:
    """With the default options."""
    match rule:
        case "typical":
            return reference.typical(0.09, 0.3)
        case "tolerant":
            return reference.tolerant(3, 1.0)
        case "fallback_rollback":
            return reference.rollback(2.0)
        case _:
            return reference.lenient_greedy(0.5)


@pytest.mark.parametrize("rule", ["typical", "tolerant", "fallback_rollback", "lenient"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), nodes=st.integers(0, 6))
def test_batched_rules_equal_their_references(rule: str, seed: int, nodes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents = torch.zeros(4, nodes).long()
    for i in range(nodes):
        parents[:, i] = torch.randint(-1, i, (4,), generator=generator)
    draft = Draft(
        torch.randint(0, VOCAB, (4, nodes), generator=generator),
        parents,
        lengths=torch.randint(0, nodes + 1, (4,), generator=generator),
    )
    weights = torch.randint(0, 5, (4, nodes + 1, VOCAB), generator=generator).double()
    weights[..., 0] += (weights.sum(-1) == 0).double()
    judge = weights / weights.sum(-1, keepdim=True)
    target_probs = judge**2 / (judge**2).sum(-1, keepdim=True)
    uniforms = torch.rand(4, nodes + 1, dtype=torch.float64, generator=generator)
    verdict: Verdict = verify(rule, draft, target_probs, uniforms, None, judge)
    assert draft.lengths is not None
    for row, count in enumerate(draft.lengths.tolist()):
        tokens, of = draft.tokens[row, :count].tolist(), draft.parents[row, :count].tolist()
        expected = reference.longest(
            as_reference(rule), tokens, of, judge[row], target_probs[row], float(uniforms[row, -1])
        )
        path = verdict.path[row][verdict.path[row] >= 0].tolist()
        assert (int(verdict.num_accepted[row]), path, int(verdict.next_tokens[row])) == tuple(expected)
