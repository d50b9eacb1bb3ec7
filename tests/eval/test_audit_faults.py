"""The audit has teeth: faults that engines have shipped with are planted one by one, and every one must fail it."""

import copy

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.decode import verify_batched
from draftsmith.decode.draft import Accepted, Draft, chain
from draftsmith.decode.sampling import Sampling, draw, probabilities
from draftsmith.decode.verify_batched_tree import counted
from draftsmith.eval.audit import AuditResult, audit_drafter

PROMPTS = [[1, 4, 2], [3, 3, 0, 1, 5]]
AT_ONE = Sampling(temperature=1.0)
FILTERED = Sampling(temperature=0.7, top_p=0.9)


class WithoutCache:
    """A drafter that runs its model over everything for every draft token: nothing in it but what a test plants."""

    def __init__(self, model, offset: float = 0.0):
        self.model, self.offset = model, offset

    def start(self, input_ids, attention_mask):
        lengths = attention_mask.sum(1).tolist()
        self.rows = [row[:length] for row, length in zip(input_ids.tolist(), lengths, strict=True)]

    def observe(self, accepted: Accepted, target_outputs):
        for row, tokens in zip(self.rows, accepted.host_tokens, strict=True):
            row.extend(tokens)

    def propose(self, num_tokens, sampling, generators) -> Draft:
        rows = [list(row) for row in self.rows]
        tokens, probs = [], []
        for _ in range(num_tokens):
            logits = self.logits(rows)
            uniforms = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
            tokens.append(draw(self.drawn_from(logits, sampling), uniforms))
            probs.append(self.reported(logits, sampling))
            for row, token in zip(rows, tokens[-1].tolist(), strict=True):
                row.append(token)
        return chain(torch.stack(tokens, 1), torch.stack(probs, 1))

    def logits(self, rows):
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        ends = torch.tensor([len(row) - 1 for row in rows])
        mask = (torch.arange(width) <= ends[:, None]).long()
        with torch.no_grad():
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits[torch.arange(len(rows)), ends] + self.offset

    def drawn_from(self, logits, sampling):
        return probabilities(logits, sampling)

    def reported(self, logits, sampling):
        return probabilities(logits, sampling)


@pytest.fixture(scope="module")
def pair(tiny_llama):
    """A target and a drafter's model over six ids, not much alike."""
    return tuple(tiny_llama(vocab_size=6, layers=1, hidden=16, seed=seed) for seed in (5, 6))


def run(pair, drafter, sampling=AT_ONE, samples=1000, **settings) -> AuditResult:
    return audit_drafter(
        pair[0],
        drafter,
        PROMPTS,
        sampling=sampling,
        samples=samples,
        batch_size=1000,
        **{"num_speculative_tokens": 2, **settings},
    )


def assert_caught(result: AuditResult) -> None:
    assert not result.passed
    assert result.lines[-1].startswith("FAILED")
    assert any(line.startswith("FAILED") and "total variation" in line for line in result.lines[:-1]), result.lines


@pytest.mark.parametrize("sampling", [AT_ONE, FILTERED], ids=["T=1", "T=0.7 top-p"])
def test_the_drafter_the_faults_are_planted_in_is_sound(pair, sampling):
    result = run(pair, WithoutCache(pair[1]), sampling)
    assert result.passed, result.lines
    assert max(test.detectable for test in result.tests) < 0.12


class DraftedGreedily(WithoutCache):
    def drawn_from(self, logits, sampling):
        return probabilities(logits, Sampling(temperature=0.0))


class RawLogitsReported(WithoutCache):
    def reported(self, logits, sampling):
        return logits.softmax(-1)


class DrawnUntempered(WithoutCache):
    def drawn_from(self, logits, sampling):
        return probabilities(logits, sampling._replace(temperature=1.0))


@pytest.mark.parametrize(
    ("fault", "sampling"),
    [
        (DraftedGreedily, AT_ONE),
        (DraftedGreedily, FILTERED),
        (RawLogitsReported, FILTERED),
        (RawLogitsReported, Sampling(temperature=1.0, top_k=3)),
        (DrawnUntempered, Sampling(temperature=0.6)),
        (DrawnUntempered, Sampling(temperature=1.6)),
    ],
)
def test_a_draft_that_is_not_what_it_says_is_caught(pair, fault, sampling):
    assert_caught(run(pair, fault(pair[1]), sampling))


class DrawnFromOneRounding(WithoutCache):
    """Drawn from bfloat16 logits, judged by float32 ones. At 64, where many models' logits are, bfloat16 steps by 1/2."""

    def drawn_from(self, logits, sampling):
        return probabilities(logits.bfloat16(), sampling)


def test_drawn_from_one_rounding_and_judged_by_another_is_caught_with_its_variation(pair):
    drafter = DrawnFromOneRounding(pair[1], offset=64.0)
    result = run(pair, drafter, samples=6000)
    assert_caught(result)
    for i, prompt in enumerate(PROMPTS):  # what is said of the first token is what the fault does to it
        with torch.no_grad():
            target = pair[0](input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
        logits = drafter.logits([prompt])[0]
        drawn, judged = logits.bfloat16().float().softmax(-1), logits.softmax(-1)
        kept = drawn * (target / judged).clamp(max=1)
        residual = (target - judged).clamp(min=0)
        emitted = kept + (1 - kept.sum()) * residual / residual.sum()
        variation = float((emitted - target).abs().sum()) / 2
        test = next(test for test in result.tests if test.name == f"prompt {i}: first token, exact")
        assert test.variation == pytest.approx(variation, abs=3 * test.by_chance)
        assert variation > 0.015


class PrunedByConfidence(WithoutCache):
    """Drawn tokens that turn out to be unlikely are thrown away: what remains is no longer a draw."""

    def propose(self, num_tokens, sampling, generators):
        draft = super().propose(num_tokens, sampling, generators)
        assert draft.draft_probs is not None
        confident = draft.draft_probs.gather(-1, draft.tokens[..., None])[..., 0] > 0.3
        return draft._replace(lengths=confident.long().cumprod(1).sum(1))


class StoppedAfterDoubt(WithoutCache):
    """The same threshold, used rightly: the unlikely token is kept, and drafting stops after it."""

    def propose(self, num_tokens, sampling, generators):
        draft = super().propose(num_tokens, sampling, generators)
        assert draft.draft_probs is not None
        confident = draft.draft_probs.gather(-1, draft.tokens[..., None])[..., 0] > 0.3
        return draft._replace(lengths=(confident.long().cumprod(1).sum(1) + 1).clamp(max=draft.tokens.shape[1]))


def test_pruning_drawn_tokens_by_their_confidence_is_caught_and_stopping_after_them_passes(pair):
    assert_caught(run(pair, PrunedByConfidence(pair[1])))
    result = run(pair, StoppedAfterDoubt(pair[1]))
    assert result.passed, result.lines


class TestRules:
    """Faults of the rule itself."""

    def test_counting_all_accepted_tokens_instead_of_the_prefix(self, pair, monkeypatch):
        def total(passes, draft):
            return (passes & counted(draft)).long().sum(1)

        monkeypatch.setattr(verify_batched, "prefix", total)
        assert_caught(run(pair, pair[1]))
        alike = copy.deepcopy(pair[0])
        with torch.no_grad():
            for parameter in alike.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
        greedy = run(pair, alike, Sampling(), num_speculative_tokens=4)
        assert not greedy.passed
        assert any("REAL" in line for line in greedy.lines)

    def test_a_recovered_token_drawn_from_the_target_instead_of_the_residual(self, pair, monkeypatch):
        sound = verify_batched.lossless_chain

        def without_residual(draft, target_probs, uniforms, lenience=1.0):
            verdict = sound(draft, target_probs, uniforms, lenience)
            rows = torch.arange(len(uniforms))
            following = draw(target_probs[rows, verdict.num_accepted], uniforms[:, -1])
            return verdict._replace(next_tokens=following)

        monkeypatch.setattr(verify_batched, "lossless_chain", without_residual)
        assert_caught(run(pair, pair[1]))

    def test_a_ratio_with_draft_probability_one_for_a_drawn_token(self, pair, monkeypatch):
        sound = verify_batched.probs_of_tokens

        def as_if_chosen(draft, target_probs):
            of_target, of_draft = sound(draft, target_probs)
            return of_target, torch.ones_like(of_draft)

        monkeypatch.setattr(verify_batched, "probs_of_tokens", as_if_chosen)
        assert_caught(run(pair, pair[1]))


class TopTwo(WithoutCache):
    """The two likeliest tokens after every node but the last, chosen without chance: one-hot distributions."""

    def __init__(self, model, explicit: bool):
        super().__init__(model)
        self.explicit = explicit

    def propose(self, num_tokens, sampling, generators):
        rows = [list(row) for row in self.rows]
        best = self.logits(rows).topk(2).indices
        after = [[*row, int(token)] for row, tokens in zip(rows, best, strict=True) for token in tokens]
        below = self.logits(after).topk(2).indices.reshape(len(rows), 4)
        tokens = torch.cat([best, below], 1)
        parents = torch.tensor([-1, -1, 0, 0, 1, 1]).expand(len(rows), -1)
        probs = torch.nn.functional.one_hot(tokens, 6).float() if self.explicit else None
        return Draft(tokens, parents, probs)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("sampling", [AT_ONE, FILTERED], ids=["T=1", "T=0.7 top-p"])
def test_chosen_drafts_with_one_hot_probabilities_pass(pair, sampling, explicit):
    """Odd but right: each is accepted with the target's remaining mass, else that is zeroed and the rest renormalised."""
    result = run(pair, TopTwo(pair[1], explicit), sampling, rule="multi", num_speculative_tokens=2)
    assert result.passed, result.lines
    assert "draft tokens a step" in result.lines[1]


def test_a_weak_alarm_says_how_often_chance_gives_it(pair):
    """A deviation at the edge of what so few samples can show."""
    drafter = DrawnUntempered(pair[1])
    results = [run(pair, drafter, Sampling(temperature=0.9), samples=300, significance=0.3, seed=s) for s in range(4)]
    weak = [result for result in results if any("another seed will tell" in line for line in result.lines)]
    assert weak
    assert all(not result.passed for result in weak)


def test_rounding_that_samples_could_show_is_stated(pair):
    coarse = (copy.deepcopy(pair[0]).bfloat16(), pair[1])
    result = run(coarse, pair[1], samples=50)
    assert any("move the target's logits" in line and "bfloat16" in line for line in result.lines)
    assert not any("move the target's logits" in line for line in run(pair, pair[1], samples=50).lines)


def test_a_token_outside_the_support_fails_by_itself(pair):
    def unfiltered(*args, top_k=None, **settings):
        return speculative_generate(*args, **settings)

    result = run(pair, pair[1], Sampling(temperature=1.0, top_k=3), samples=60, decode=unfiltered)
    assert not result.passed
    assert any("which the target cannot emit there" in line for line in result.lines)


def test_an_answer_that_ends_early_fails_by_itself(pair):
    def cut(*args, **settings):
        out = speculative_generate(*args, **settings)
        return out._replace(lengths=torch.minimum(out.lengths, out.lengths.min() - settings["max_new_tokens"] + 1))

    result = run(pair, pair[1], samples=40, decode=cut)
    assert not result.passed
    assert any("without an end-of-sequence token" in line for line in result.lines)
