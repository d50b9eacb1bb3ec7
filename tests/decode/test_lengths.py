"""Length policies: what they decide, and that every row decides for itself."""

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.decode import lengths as lengths_module
from draftsmith.decode.costs import StepCosts
from draftsmith.decode.lengths import (
    AutoLength,
    ConfidenceLength,
    FixedLength,
    HeuristicLength,
    LengthPolicy,
    step_seconds,
)
from draftsmith.errors import BadInput

# A draft token costs a tenth of a step. A pass over 1 to 9 tokens costs the same, or more for each.
FLAT = StepCosts(dict.fromkeys(range(1, 10), 1.0), {8: 0.8})
STEEP = StepCosts({n: 1.0 + 0.6 * (n - 1) for n in range(1, 10)}, {8: 0.8})


def rows_of(out):
    return [row[:n] for row, n in zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)]


class Alternating:
    """Drafts in every third step only."""

    def start(self, batch):
        self.batch, self.step = batch, 0

    def lengths(self):
        self.step += 1
        return [3 if (self.step + row) % 3 == 0 else 0 for row in range(self.batch)]

    def observe(self, drafted, accepted):
        pass


POLICIES = {
    "fixed": FixedLength(3),
    "heuristic": HeuristicLength(first=2, most=6),
    "confidence": ConfidenceLength(0.3, most=5),
    "auto": AutoLength(FLAT, most=5, memory=8),
    "alternating": Alternating(),
}


class TestAnyPolicy:
    @pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
    def test_greedy_output_is_plain_greedy_output(self, policy, tiny_llama, reference):
        assert isinstance(policy, LengthPolicy)
        target = tiny_llama(seed=1, tie_word_embeddings=False)
        drafter = reference.disturbed(tiny_llama(seed=1, tie_word_embeddings=False))
        prompts = [reference.prompt_of(n, seed=n) for n in (9, 3, 6)]
        expected = [reference.naive_greedy(target, prompt, 24) for prompt in prompts]
        for group in ([0], [0, 1, 2]):
            ids, mask = reference.batch_of([prompts[i] for i in group])
            out = speculative_generate(
                target, drafter, ids, mask, max_new_tokens=24, num_speculative_tokens=policy, eos_token_id=[]
            )
            assert rows_of(out) == [expected[i] for i in group]
            assert 0 < out.stats.accepted < out.stats.drafted

    @pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
    def test_a_rows_sample_does_not_depend_on_its_neighbours(self, policy, tiny_llama, reference):
        target, drafter = tiny_llama(vocab_size=8, seed=1), tiny_llama(vocab_size=8, seed=2)
        prompts = [reference.prompt_of(n, n, 8) for n in (5, 8, 3)]
        settings = {"temperature": 0.8, "eos_token_id": [], "num_speculative_tokens": policy, "max_new_tokens": 24}
        together = speculative_generate(target, drafter, *reference.batch_of(prompts), seed=[7, 8, 9], **settings)
        for row, prompt in enumerate(prompts):
            if isinstance(policy, Alternating) and row:
                continue  # it goes by the row's number
            alone = speculative_generate(target, drafter, torch.tensor([prompt]), seed=[7 + row], **settings)
            assert rows_of(alone)[0] == rows_of(together)[row]
            assert alone.stats.rows[0] == together.stats.rows[row]

    def test_steps_without_a_draft_leave_the_drafters_cache_whole(self, tiny_gemma3, reference):
        """A drafter that is the target is right whenever it is asked, however long it was not."""
        prompts = [reference.prompt_of(n, seed=n) for n in (9, 3, 6)]
        out = speculative_generate(
            tiny_gemma3(seed=1),
            tiny_gemma3(seed=1),
            *reference.batch_of(prompts),
            max_new_tokens=30,
            num_speculative_tokens=Alternating(),
            eos_token_id=[],
        )
        assert out.stats.accepted == out.stats.drafted > 20
        assert out.stats.target_calls > 40


class TestHeuristic:
    def test_two_more_after_full_acceptance_one_fewer_otherwise(self):
        policy = HeuristicLength(first=2, most=5)
        policy.start(3)
        seen = []
        for drafted, accepted in [([2, 2, 2], [2, 1, 0]), ([4, 1, 0], [4, 0, 0]), ([5, 1, 1], [4, 1, 1])]:
            seen.append(list(policy.lengths()))
            policy.observe(drafted, accepted)
        seen.append(list(policy.lengths()))
        # Never below one, never above the limit; a step that drafted nothing says nothing.
        assert seen == [[2, 2, 2], [4, 1, 1], [5, 1, 1], [4, 3, 3]]

    def test_it_follows_a_drafter_that_is_always_right(self, tiny_llama, reference):
        out = speculative_generate(
            tiny_llama(seed=1),
            tiny_llama(seed=1),
            torch.tensor([reference.prompt_of(5, 1)]),
            max_new_tokens=40,
            num_speculative_tokens="heuristic:first=1,most=7",
            eos_token_id=[],
        )
        assert out.stats.rows[0].step_starts == [0, 2, 6, 12, 20, 28, 36]


class TestAuto:
    def best(self, costs, acceptance, steps=60):
        """What it settles on where every draft token is accepted with this probability, given those before it."""
        policy = AutoLength(costs, memory=200)
        policy.start(1)
        rng = torch.Generator().manual_seed(0)
        chosen = []
        for _ in range(steps):
            (length,) = policy.lengths()
            passes = (torch.rand(length, generator=rng) < acceptance).tolist()
            accepted = passes.index(False) if False in passes else length
            policy.observe([length], [accepted])
            chosen.append(length)
        return sum(chosen[-10:]) / 10

    def test_it_settles_near_the_best_length(self):
        def optimum(costs, alpha):
            rates = [sum(alpha**k for k in range(n + 1)) / seconds for n, seconds in enumerate(step_seconds(costs))]
            return max(range(len(rates)), key=rates.__getitem__)

        for costs in (FLAT, STEEP):
            for alpha in (0.05, 0.5, 0.9, 1.0):
                assert abs(self.best(costs, alpha) - optimum(costs, alpha)) <= 1.5
        assert optimum(STEEP, 0.5) == 0
        assert optimum(FLAT, 1.0) == 8

    def test_it_tries_again_what_it_gave_up(self):
        policy = AutoLength(STEEP, memory=16)
        policy.start(1)
        lengths = []
        for step in range(200):
            (length,) = policy.lengths()
            lengths.append(length)
            policy.observe([length], [length if step >= 100 else 0])  # the drafter becomes good
        assert max(lengths[20:100]) == 1
        assert 0 < sum(lengths[20:100]) < 10
        assert min(lengths[-20:]) == 8

    def test_seconds_of_a_step(self):
        costs = StepCosts({1: 1.0, 2: 1.2, 3: 1.1, 4: 1.5}, {1: 0.2, 3: 0.4})
        assert step_seconds(costs) == pytest.approx([1.0, 1.2 + 0.2, 1.2 + 0.3, 1.5 + 0.4])
        parallel = StepCosts({1: 1.0, 2: 1.0, 3: 1.0}, {2: 0.1})
        assert step_seconds(parallel, num_passes=lambda n: 1) == pytest.approx([1.0, 1.1, 1.1])
        assert step_seconds(StepCosts({1: 1.0, 2: 1.0}, {})) == [1.0, 1.0]
        with pytest.raises(BadInput, match="passes over 1 to 6 tokens, measured are: 1, 2, 3"):
            step_seconds(parallel, most=5)

    def test_by_name_it_measures_a_pair_once(self, tiny_llama, reference, monkeypatch):
        calls = []

        def measured(*args, **kwargs):
            calls.append(args)
            return FLAT

        monkeypatch.setattr(lengths_module, "measure_costs", measured)
        target, drafter = tiny_llama(seed=1), tiny_llama(seed=1)
        prompt = reference.prompt_of(5, 1)
        for _ in range(2):
            out = speculative_generate(
                target, drafter, torch.tensor([prompt]), num_speculative_tokens="auto:most=3", eos_token_id=[]
            )
            assert out.tokens[0].tolist() == reference.naive_greedy(target, prompt, 64)
            assert out.stats.acceptance_rate == 1.0
        assert len(calls) == 1
        for _ in range(2):
            speculative_generate(target, "suffix", torch.tensor([prompt]), num_speculative_tokens="auto:most=3")
        assert len(calls) == 2
        plain = speculative_generate(
            target, None, torch.tensor([prompt]), num_speculative_tokens="auto", eos_token_id=[]
        )
        assert (plain.stats.drafted, len(calls)) == (0, 2)

    def test_measured_for_real(self, tiny_llama, reference):
        target, prompt = tiny_llama(layers=1, seed=1), reference.prompt_of(5, 1)
        out = speculative_generate(
            target, tiny_llama(layers=1, seed=1), torch.tensor([prompt]), num_speculative_tokens="auto", eos_token_id=[]
        )
        assert out.tokens[0].tolist() == reference.naive_greedy(target, prompt, 64)

    def test_lookahead_is_refused(self, tiny_llama):
        with pytest.raises(BadInput, match="lookahead drafts trees"):
            speculative_generate(tiny_llama(), "lookahead", torch.tensor([[1, 2]]), num_speculative_tokens="auto")


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ("heuristics", "unknown 'heuristics' .did you mean 'heuristic'"),
        ("confidence:threshold=1.5", "threshold is 1.5, expected a number from 0 to 1"),
        ("heuristic:most=0", "most is 0"),
        ("auto:memory=x", "memory of 'auto' is 'x', expected a whole number"),
        (-1, "length is -1, expected a whole number of at least 0"),
    ],
)
def test_mistakes_are_one_line(lengths, says, tiny_llama):
    with pytest.raises(BadInput, match=says):
        speculative_generate(tiny_llama(), tiny_llama(), torch.tensor([[1, 2]]), num_speculative_tokens=lengths)


def test_no_draft_tokens_are_plain_decoding(tiny_llama, reference):
    target, prompt = tiny_llama(seed=1), reference.prompt_of(5, 2)
    out = speculative_generate(target, tiny_llama(seed=2), torch.tensor([prompt]), None, 12, 0, eos_token_id=[])
    assert out.tokens[0].tolist() == reference.naive_greedy(target, prompt, 12)
    assert out.stats.drafted == 0
