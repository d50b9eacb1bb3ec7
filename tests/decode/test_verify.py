"""The batched rules equal their references, number for number, and larger vocabularies stay lossless under sampling."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from draftsmith.decode import verify as reference
from draftsmith.decode.draft import Draft, chain
from draftsmith.decode.rules import RULES, rule_options
from draftsmith.decode.sampling import Sampling, draw, probabilities
from draftsmith.decode.tree import Drawing, TreeLayout, as_layout, compact, draw_children
from draftsmith.decode.verify_batched import verify, verify_greedy
from draftsmith.errors import BadInput

VOCAB = 7


def distributions(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Random distributions with zeros and ties."""
    weights = torch.randint(0, 4, (*shape, VOCAB), generator=generator).double()
    weights[..., 0] += (weights.sum(-1) == 0).double()
    return weights / weights.sum(-1, keepdim=True)


def random_draft(generator: torch.Generator, batch: int, nodes: int, kind: str, is_chain: bool) -> Draft:
    """A ragged batch of random trees (or chains); siblings are distinct where they were drawn without replacement."""

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    parents = torch.tensor([[i - 1 if is_chain else whole(-1, i) for i in range(nodes)] for _ in range(batch)])
    parents = parents.reshape(batch, nodes).long()
    tokens = torch.randint(0, VOCAB, (batch, nodes), generator=generator)
    probs = None if kind == "chosen" else distributions(generator, batch, nodes)
    if probs is not None:  # what was drawn has probability
        probs = probs.scatter_add(2, tokens.unsqueeze(2), torch.full((batch, nodes, 1), 0.5).double())
        if kind == "without_replacement":
            probs = probs + 0.01
        probs = probs / probs.sum(-1, keepdim=True)
    if kind == "without_replacement":
        for row in range(batch):
            for parent in range(-1, nodes):
                children = (parents[row] == parent).nonzero().squeeze(1)
                tokens[row, children] = torch.randperm(VOCAB, generator=generator)[: len(children)]
                if probs is not None and len(children):
                    probs[row, children] = probs[row, children[0]].clone()
    lengths = torch.randint(0, nodes + 1, (batch,), generator=generator)
    return Draft(tokens, parents, probs, lengths, kind != "without_replacement", is_chain)


def one_row(draft: Draft, row: int) -> tuple[list[int], list[int], torch.Tensor | None]:
    assert draft.lengths is not None
    count = int(draft.lengths[row])
    probs = None if draft.draft_probs is None else draft.draft_probs[row, :count]
    return draft.tokens[row, :count].tolist(), draft.parents[row, :count].tolist(), probs


@pytest.mark.parametrize("kind", ["with_replacement", "without_replacement", "chosen"])
@pytest.mark.parametrize("rule", ["lossless", "block", "multi", "lenient"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), nodes=st.integers(0, 6), is_chain=st.booleans())
def test_batched_rules_equal_their_references(rule: str, kind: str, seed: int, nodes: int, is_chain: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    is_chain = is_chain or rule == "block"
    draft = random_draft(generator, 4, nodes, kind, is_chain)
    target_probs = distributions(generator, 4, nodes + 1)
    uniforms = torch.rand(4, nodes + 1, dtype=torch.float64, generator=generator)
    verdict = verify(rule, draft, target_probs, uniforms)
    lenience = 0.5 if rule == "lenient" else 1.0
    for row in range(4):
        tokens, parents, probs = one_row(draft, row)
        numbers = [*uniforms[row, : len(tokens)].tolist(), float(uniforms[row, -1])]
        if rule == "block":
            expected = reference.block(tokens, probs, target_probs[row], numbers)
        else:
            expected = reference.multi(
                tokens, parents, probs, target_probs[row], numbers, draft.with_replacement, lenience
            )
            if is_chain:
                assert expected == reference.lossless(tokens, probs, target_probs[row], numbers, lenience)
        path = verdict.path[row]
        got = (int(verdict.num_accepted[row]), path[path >= 0].tolist(), int(verdict.next_tokens[row]))
        assert got == tuple(expected)
        assert (path[got[0] :] == -1).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), nodes=st.integers(0, 6), is_chain=st.booleans())
def test_greedy_is_the_lossless_rule_on_one_hot_targets(seed: int, nodes: int, is_chain: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    draft = random_draft(generator, 5, nodes, "with_replacement", is_chain)
    logits = torch.randn(5, nodes + 1, VOCAB, generator=generator)
    guided = torch.rand(5, nodes, generator=generator) < 0.7  # else hardly anything is ever accepted
    best = logits.argmax(-1)
    draft = draft._replace(tokens=torch.where(guided, best.gather(1, draft.parents + 1), draft.tokens))
    greedy = verify_greedy(draft, best)
    one_hot = probabilities(logits, Sampling(temperature=0.0))
    uniforms = torch.rand(5, nodes + 1, dtype=torch.float64, generator=generator)
    for probs in (draft.draft_probs, None):
        general = verify("lossless", draft._replace(draft_probs=probs), one_hot, uniforms)
        assert all(torch.equal(mine, other) for mine, other in zip(greedy, general, strict=True))


def test_a_known_depth_only_narrows_the_path() -> None:
    generator = torch.Generator().manual_seed(3)
    layout = as_layout([2, 2])
    probs = distributions(generator, 64, len(layout.parents))
    tokens = draw(probs, torch.rand(64, len(layout.parents), dtype=torch.float64, generator=generator))
    draft = Draft(tokens, torch.tensor(layout.parents).expand(64, -1), probs)
    target_probs = distributions(generator, 64, len(layout.parents) + 1)
    uniforms = torch.rand(64, len(layout.parents) + 1, dtype=torch.float64, generator=generator)
    for rule in ("multi", "typical"):
        wide, narrow = (verify(rule, draft, target_probs, uniforms, depth=depth) for depth in (None, layout.depth))
        assert narrow.path.shape == (64, 2)
        assert torch.equal(wide.path[:, :2], narrow.path)
        assert torch.equal(wide.next_tokens, narrow.next_tokens)


def test_a_residual_lost_to_rounding_falls_back_to_the_target() -> None:
    probs = torch.tensor([0.5, 0.5, 0.0])
    drafted = (probs * (1 + 2e-7))[None]  # a hair above the target everywhere
    draft = chain(torch.tensor([[0]]), drafted[None])
    uniforms = torch.tensor([[1 - 2.0**-53, 0.75]], dtype=torch.float64)
    target_probs = probs.expand(1, 2, 3)
    for rule in ("lossless", "multi", "block"):
        verdict = verify(rule, draft, target_probs, uniforms)
        assert (int(verdict.num_accepted), int(verdict.next_tokens)) == (0, 1)
    assert reference.lossless([0], drafted, target_probs[0], uniforms[0].tolist()) == (0, [], 1)


def test_padding_may_hold_anything() -> None:
    draft = chain(torch.tensor([[2, -1], [1, 2]]), lengths=torch.tensor([1, 2]))
    one_hot = torch.nn.functional.one_hot(torch.tensor([[2, 0, 1], [1, 2, 0]]), 3).float()
    verdict = verify("lossless", draft, one_hot, torch.full((2, 3), 0.5, dtype=torch.float64))
    assert verdict.num_accepted.tolist() == [1, 2]
    assert verdict.next_tokens.tolist() == [0, 0]
    assert verdict.path.tolist() == [[0, -1], [0, 1]]


def test_rules_and_options_are_checked_by_name() -> None:
    assert rule_options("typical", {"delta": 0.5}) == {"epsilon": 0.09, "delta": 0.5}
    assert all(rule_options(rule) is not None for rule in RULES)
    for rule, options, part in [
        ("losless", {}, "did you mean 'lossless'"),
        ("typical", {"epsilom": 1}, "did you mean 'epsilon'"),
        ("lossless", {"lenience": 1}, "it takes: none"),
        ("lenient", {"lenience": 1.5}, "from 0 to 1"),
        ("lenient", {"lenience": True}, "expected a number"),
        ("tolerant", {"top": 2.5}, "whole number"),
        ("tolerant", {"tolerance": -1.0}, "at least 0"),
    ]:
        with pytest.raises(BadInput, match=part):
            rule_options(rule, options)
    tree = Draft(torch.zeros(1, 2).long(), torch.tensor([[-1, -1]]))
    with pytest.raises(BadInput, match="chain"):
        verify("block", tree, torch.ones(1, 3, 2) / 2, torch.zeros(1, 3).double())
    unmarked = tree._replace(parents=torch.tensor([[-1, 0]]))
    assert int(verify("block", unmarked, torch.ones(1, 3, 2) / 2, torch.zeros(1, 3).double()).num_accepted) == 2


def sampled(layout: TreeLayout, how: Drawing, rows: int, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts of the first two tokens over many steps, drawn end to end, and the expected counts of the target's own."""
    vocab = 12
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(2, vocab + 1, vocab, generator=generator) * 1.5  # after each id; the last: at the start
    drafter, target = (probabilities(logits[i], sampling) for i in range(2))
    nodes = len(layout.parents)
    tokens = torch.zeros(rows, nodes, dtype=torch.long)
    exist = torch.ones(rows, nodes, dtype=torch.bool)
    context = torch.full((rows, nodes + 1), vocab)
    for parent in range(-1, nodes):
        children = [i for i in range(nodes) if layout.parents[i] == parent]
        if children:
            uniforms = torch.rand(rows, len(children), dtype=torch.float64, generator=generator)
            drawn = draw_children(drafter[context[:, parent + 1]], len(children), uniforms, how)
            tokens[:, children], exist[:, children] = drawn
            context[:, [child + 1 for child in children]] = drawn[0]
    parents = torch.tensor(layout.parents).expand(rows, -1)
    probs = None if how == "chosen" else drafter[context.gather(1, parents + 1)]
    draft = compact(Draft(tokens, parents, probs, None, how != "without_replacement", layout.is_chain), exist)
    after = target[torch.nn.functional.pad(draft.tokens, (1, 0), value=vocab)]
    uniforms = torch.rand(rows, nodes + 1, dtype=torch.float64, generator=generator)
    verdict = verify("lossless", draft, after, uniforms)
    first = draft.tokens.gather(1, verdict.path[:, :1].clamp(min=0)).squeeze(1)
    first = torch.where(verdict.num_accepted > 0, first, verdict.next_tokens)
    second = draft.tokens.gather(1, verdict.path[:, 1:2].clamp(min=0)).squeeze(1)
    second = torch.where(verdict.num_accepted > 1, second, verdict.next_tokens)
    further = draw(target[first], torch.rand(rows, dtype=torch.float64, generator=generator))
    second = torch.where(verdict.num_accepted > 0, second, further)
    counts = torch.bincount(first * vocab + second, minlength=vocab * vocab)
    return counts, (target[vocab].unsqueeze(1).double() * target[:vocab].double()).flatten() * rows


@pytest.mark.parametrize("how", ["with_replacement", "without_replacement", "chosen"])
@pytest.mark.parametrize("widths", [[1, 1], [3, 2]])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_p=0.9), Sampling(1.0, top_k=4)])
def test_two_tokens_are_jointly_the_targets(how: Drawing, widths: list[int], sampling: Sampling) -> None:
    counts, expected = sampled(as_layout(widths), how, 25_000, sampling)
    assert (counts[expected == 0] == 0).all()
    rare = expected < 10
    observed = torch.cat([counts[~rare], counts[rare].sum().unsqueeze(0)]).double()
    wanted = torch.cat([expected[~rare], expected[rare].sum().unsqueeze(0)])
    possible = wanted > 0
    wanted = wanted[possible] * observed.sum() / wanted[possible].sum()
    assert chisquare(observed[possible].numpy(), wanted.numpy()).pvalue > 1e-4
