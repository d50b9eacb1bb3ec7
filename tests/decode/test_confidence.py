"""Stopping by confidence: it biases nothing, and it is bias that the same test finds where unsure tokens are dropped."""

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.decode.draft_model import DraftModel
from draftsmith.decode.lengths import ConfidenceLength
from draftsmith.decode.sampling import Sampling
from draftsmith.errors import BadInput


class Recording(DraftModel):
    """Keeps its drafts and the number of its passes."""

    def start(self, *args):
        super().start(*args)
        self.drafts, self.passes = [], []

    def propose(self, *args):
        draft = super().propose(*args)
        self.drafts.append(draft)
        self.passes.append(self.depth_fed + 1)
        return draft


class Pruning(DraftModel):
    """The fault: an unsure token is not the last one drafted but the first one dropped."""

    def propose(self, *args):
        draft = super().propose(*args)
        assert draft.draft_probs is not None
        own = draft.draft_probs.gather(-1, draft.tokens.unsqueeze(-1)).squeeze(-1)
        return draft._replace(lengths=(own >= 0.3).long().cumprod(1).sum(1))


class TestConfidence:
    THRESHOLD = 0.3

    def sampled(self, tiny_llama, drafter_class, policy, rows=2000, **settings):
        target, drafter = tiny_llama(vocab_size=6, layers=1, seed=5), tiny_llama(vocab_size=6, layers=1, seed=6)
        drafter = drafter_class(drafter, 6)
        out = speculative_generate(
            target,
            drafter,
            torch.tensor([[1, 4, 2]] * rows),
            max_new_tokens=3,
            num_speculative_tokens=policy,
            eos_token_id=[],
            seed=11,
            **settings,
        )
        return target, drafter, out

    @pytest.mark.parametrize("rule", ["lossless", "block"])
    @pytest.mark.parametrize(
        "settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}], ids=["T=1", "top-p"]
    )
    def test_sampled_output_has_the_targets_joint_distribution(self, rule, settings, tiny_llama, reference):
        policy = ConfidenceLength(self.THRESHOLD, most=2)
        target, drafter, out = self.sampled(tiny_llama, Recording, policy, rule=rule, **settings)
        assert 200 < int((drafter.drafts[0].lengths == 1).sum()) < 1800  # rows stopped, and rows went on
        exact = reference.joint_distribution(target, [1, 4, 2], 3, Sampling(**settings))
        reference.check_joint(out.tokens[:, 3:].tolist(), exact)

    def test_the_same_test_catches_a_drafter_that_drops_unsure_tokens(self, tiny_llama, reference):
        target, _, out = self.sampled(tiny_llama, Pruning, 2, temperature=1.0)
        exact = reference.joint_distribution(target, [1, 4, 2], 3, Sampling(1.0))
        with pytest.raises(AssertionError):
            reference.check_joint(out.tokens[:, 3:].tolist(), exact)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_row_stops_after_its_first_unsure_token(self, temperature, tiny_llama, reference):
        drafter = Recording(tiny_llama(vocab_size=6, layers=1, seed=6), 6)
        prompts = [reference.prompt_of(n, n, 6) for n in (5, 8, 3)]
        speculative_generate(
            tiny_llama(vocab_size=6, layers=1, seed=5),
            drafter,
            *reference.batch_of(prompts),
            max_new_tokens=30,
            num_speculative_tokens=f"confidence:threshold={self.THRESHOLD},most=4",
            temperature=temperature,
            eos_token_id=[],
        )
        stopped = 0
        for draft, passes in zip(drafter.drafts, drafter.passes, strict=True):
            assert passes == draft.tokens.shape[1] <= 4  # nobody drafts on when all have stopped
            if draft.draft_probs is None:
                continue
            own = draft.draft_probs.gather(-1, draft.tokens.unsqueeze(-1)).squeeze(-1)
            unsure = own < self.THRESHOLD
            for row, length in enumerate(draft.lengths.tolist()):
                assert not unsure[row, : max(length - 1, 0)].any()
                stopped += 0 < length < 4
                assert length in (0, draft.tokens.shape[1]) or unsure[row, length - 1]
        assert stopped > 3 or temperature == 0
        assert len({draft.tokens.shape[1] for draft in drafter.drafts}) > 1

    def test_drafters_without_probabilities_and_trees_are_refused(self, tiny_llama):
        target, ids = tiny_llama(), torch.tensor([[1, 2]])
        with pytest.raises(BadInput, match="PromptLookup has no probabilities to stop by"):
            speculative_generate(target, "prompt_lookup", ids, num_speculative_tokens="confidence")
        with pytest.raises(BadInput, match="a tree has a depth of its own"):
            speculative_generate(target, tiny_llama(), ids, num_speculative_tokens="confidence", tree=[2, 1])


class TestFallback:
    """BiLD: drafting stops before a token that the drafter is not sure of, whichever it would have been."""

    def decode(self, tiny_llama, drafter, **options):
        return speculative_generate(
            tiny_llama(vocab_size=6, layers=1, seed=5),
            drafter,
            torch.tensor([[1, 4, 2], [3, 3, 1]]),
            max_new_tokens=24,
            rule="fallback_rollback",
            rule_options=options,
            eos_token_id=[],
            temperature=1.0,
        )

    def test_the_threshold_decides_before_the_token(self, tiny_llama):
        drafter = Recording(tiny_llama(vocab_size=6, layers=1, seed=6), 6)
        out = self.decode(tiny_llama, drafter, fallback_threshold=0.5)
        for draft in drafter.drafts:
            if not draft.tokens.shape[1]:
                continue
            for row, length in enumerate(draft.lengths.tolist()):
                assert (draft.draft_probs[row, :length].amax(-1) >= 0.5).all()
                if 0 < length < draft.tokens.shape[1]:
                    assert draft.draft_probs[row, length].amax() < 0.5
        assert 0 < out.stats.drafted < 4 * out.stats.target_calls

    def test_its_ends(self, tiny_llama):
        drafter = tiny_llama(vocab_size=6, layers=1, seed=6)
        assert self.decode(tiny_llama, drafter, fallback_threshold=1.0).stats.drafted == 0
        always = self.decode(tiny_llama, drafter, fallback_threshold=0.0).stats
        assert always.drafted > 3 * (always.target_calls - 2)
        # The rule's own threshold applies where none is given.
        assert 0 < self.decode(tiny_llama, drafter).stats.drafted < always.drafted

    def test_drafters_without_probabilities_do_not_fall_back(self, tiny_llama):
        assert self.decode(tiny_llama, "prompt_lookup").stats.drafted > 0
        with pytest.raises(BadInput, match="no probabilities"):
            self.decode(tiny_llama, "prompt_lookup", fallback_threshold=0.5)

    def test_it_is_forgotten_with_the_rule(self, tiny_llama):
        drafter = Recording(tiny_llama(vocab_size=6, layers=1, seed=6), 6)
        self.decode(tiny_llama, drafter, fallback_threshold=1.0)
        target = tiny_llama(vocab_size=6, layers=1, seed=5)
        assert speculative_generate(target, drafter, torch.tensor([[1, 2]]), eos_token_id=[]).stats.drafted > 0
