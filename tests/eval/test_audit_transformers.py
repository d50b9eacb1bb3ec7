"""transformers' own assisted generation under audit, and what it cannot do."""

import pytest
import torch
from transformers.generation import candidate_generator, utils

from draftsmith.decode.draft_model import DraftModel
from draftsmith.decode.prompt_lookup import PromptLookup
from draftsmith.decode.sampling import Sampling
from draftsmith.errors import BadInput
from draftsmith.eval.audit import audit_drafter
from draftsmith.eval.audit_transformers import check_transformers_can, transformers_generate
from draftsmith.eval.options import AuditOptions
from draftsmith.models.draft_lm import cut_vocabulary
from draftsmith.models.target import as_target

PROMPTS = [[1, 4, 2, 1, 4], [3, 3, 0]]


@pytest.fixture
def pair(tiny_llama):
    """A target, and a draft model not much like it, over six ids."""
    models = (tiny_llama(vocab_size=6, layers=1, hidden=16, seed=seed) for seed in (5, 6))
    return next(models), DraftModel(next(models), 6)


def test_greedy_assisted_generation_is_greedy(tiny_llama):
    drafter = DraftModel(tiny_llama(seed=1), 64)
    with torch.no_grad():
        for parameter in drafter.lm.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    for each in (drafter, PromptLookup()):
        result = audit_drafter(
            tiny_llama(seed=1), each, PROMPTS, max_new_tokens=16, batch_size=2, decode=transformers_generate(each)
        )
        assert result.passed, result.lines
        assert "draft tokens a step" in result.lines[1]


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_p=0.9)], ids=["T=1", "T=0.7 top-p"])
def test_sampled_assisted_generation_has_the_targets_distribution(pair, sampling):
    target, drafter = pair
    result = audit_drafter(
        target,
        drafter,
        PROMPTS,
        sampling=sampling,
        samples=40,
        num_speculative_tokens=2,
        significance=1e-3,
        decode=transformers_generate(drafter),
    )
    assert result.passed, result.lines
    assert "draft tokens a step" in result.lines[1]


def test_a_fault_in_transformers_would_be_found(pair, monkeypatch):
    """Its candidates drafted greedily, its rule told that they were sampled: the fault it once had."""
    target, drafter = pair
    sound = candidate_generator.AssistedCandidateGenerator._generate_candidates

    def greedily(self, arguments):
        self.generation_config.do_sample = False
        return sound(self, arguments)

    monkeypatch.setattr(candidate_generator.AssistedCandidateGenerator, "_generate_candidates", greedily)
    result = audit_drafter(
        target,
        drafter,
        PROMPTS,
        sampling=Sampling(1.0),
        samples=120,
        num_speculative_tokens=2,
        decode=transformers_generate(drafter),
    )
    assert not result.passed
    assert hasattr(utils, "_speculative_sampling"), "the rule that was told so"


def test_seeds_reproduce_and_settings_are_left_as_they_were(pair):
    target, drafter = pair
    before = drafter.lm.model.generation_config.num_assistant_tokens
    state = torch.random.get_rng_state()
    generate = transformers_generate(drafter)
    ids = torch.tensor([PROMPTS[0]] * 3)
    settings = {"max_new_tokens": 8, "temperature": 1.0, "num_speculative_tokens": 3}
    first, again, other = (
        generate(as_target(target), drafter, ids, seed=seeds, **settings) for seeds in ([1, 2, 3], [1, 2, 3], [4, 5, 6])
    )
    assert first.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()
    assert first.lengths.tolist() == [len(PROMPTS[0]) + 8] * 3
    assert first.stats.emitted == 24
    assert 0 < first.stats.accepted <= first.stats.drafted
    assert drafter.lm.model.generation_config.num_assistant_tokens == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_transformers_cannot_do_is_one_line(pair):
    with pytest.raises(BadInput, match="cut vocabulary"):
        transformers_generate(DraftModel(cut_vocabulary(pair[1].lm.model, torch.tensor([0, 2])), 6))
    with pytest.raises(BadInput, match="no counterpart"):
        transformers_generate(object())
    with pytest.raises(BadInput, match="--rule block"):
        check_transformers_can(AuditOptions(target="t", drafter="d", rule="block", engine="transformers"))
    with pytest.raises(BadInput, match="chains only"):
        check_transformers_can(AuditOptions(target="t", drafter="d", tree=[2, 1], engine="transformers"))
