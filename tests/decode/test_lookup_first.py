"""A lookup in front of a draft model: each drafts its own rows, caches stay exact, the output is the target's."""

from typing import Any

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.checks import two_in_turn
from draftsmith.decode.costs import measure_costs
from draftsmith.decode.draft_model import DraftModel
from draftsmith.decode.drafters import as_drafter, lookup_first
from draftsmith.decode.dynamic_tree import DynamicTree
from draftsmith.decode.jacobi import Jacobi
from draftsmith.decode.prompt_lookup import PromptLookup
from draftsmith.decode.sampling import Sampling
from draftsmith.errors import BadInput
from draftsmith.eval.alpha import Answer, teacher_forced
from draftsmith.models.target import as_target

SHAPES = {"chain": None, "widths": [3, 2, 1], "dynamic": DynamicTree(num_nodes=6, width=3)}
LOOKUPS = ["prompt_lookup:min_ngram=1", "suffix"]


class Watched(DraftModel):
    """A draft model that is compared, before every draft, with itself without a cache."""

    def start(self, input_ids, attention_mask):
        super().start(input_ids, attention_mask)
        self.rows = [row[:n] for row, n in zip(input_ids.tolist(), attention_mask.sum(1).tolist(), strict=True)]
        self.proposals, self.withdrawals = 0, 0

    def _catch_up(self):
        fresh = list(self.newest_host)
        logits = super()._catch_up()
        self.proposals += 1
        for row, tokens in enumerate(self.rows):
            if not fresh[row]:  # finished
                continue
            expected = self.lm.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(logits[row], expected, atol=2e-4, rtol=1e-3)
        return logits

    def withdraw(self, rows):
        super().withdraw(rows)
        self.withdrawals += int(rows.any())

    def observe(self, accepted, target_outputs):
        super().observe(accepted, target_outputs)
        for row, tokens in zip(self.rows, accepted.host_tokens, strict=True):
            row.extend(tokens)


def in_turn(lookup, drafter, target) -> Any:
    return lookup_first(lookup, Watched(drafter, target.config.vocab_size), as_target(target))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3"])
def test_greedy_output_is_plain_greedy_output_and_both_draft(family, shape, request, reference):
    """Rows that repeat themselves beside rows that do not, past the sliding window."""
    make = request.getfixturevalue(family)
    target = make(layers=2, seed=1, vocab_size=24, tie_word_embeddings=False)
    drafter = reference.disturbed(make(layers=2, seed=1, vocab_size=24, tie_word_embeddings=False))
    prompts = [reference.prompt_of(6, 1, 24) * 3, reference.prompt_of(3, 2, 24), reference.prompt_of(7, 3, 24)]
    expected = [reference.naive_greedy(target, prompt, 24) for prompt in prompts]
    for lookup in LOOKUPS:
        both = in_turn(lookup, drafter, target)
        ids, mask = reference.batch_of(prompts)
        out = speculative_generate(
            target, both, ids, mask, max_new_tokens=24, num_speculative_tokens=3, tree=shape, eos_token_id=[]
        )
        assert [row[:n] for row, n in zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)] == expected
        assert 0 < both.then.withdrawals <= both.then.proposals <= both.steps
        assert 0 < out.stats.accepted < out.stats.drafted


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_sampled_output_has_the_targets_joint_distribution(shape, tiny_llama, reference):
    """In one batch, whose rows come to have matches at different steps."""
    target, drafter = tiny_llama(vocab_size=5, layers=1, seed=5), tiny_llama(vocab_size=5, layers=1, seed=6)
    prompt = [1, 4, 2, 1]
    both = lookup_first("prompt_lookup:max_ngram=2", DraftModel(drafter, 5))
    out = speculative_generate(
        target,
        both,
        torch.tensor([prompt] * 1500),
        max_new_tokens=3,
        num_speculative_tokens=2,
        tree=shape,
        eos_token_id=[],
        seed=11,
        temperature=0.9,
        top_p=0.95,
    )
    exact = reference.joint_distribution(target, prompt, 3, Sampling(0.9, top_p=0.95))
    reference.check_joint(out.tokens[:, len(prompt) :].tolist(), exact)


def test_a_rows_sample_does_not_depend_on_its_neighbours(tiny_llama, reference):
    target, drafter = tiny_llama(vocab_size=12, seed=1), tiny_llama(vocab_size=12, seed=2)
    prompts = [reference.prompt_of(n, seed=n, vocab_size=12) for n in (5, 8, 3)]
    settings = {"max_new_tokens": 20, "temperature": 1.0, "eos_token_id": []}
    both = lookup_first("prompt_lookup:min_ngram=1", DraftModel(drafter, 12))
    together = speculative_generate(target, both, *reference.batch_of(prompts), seed=[7, 8, 9], **settings)
    assert 0 < both.passes < both.steps * 4
    for row, prompt in enumerate(prompts):
        alone = speculative_generate(target, both, torch.tensor([prompt]), seed=[7 + row], **settings)
        assert alone.tokens[0, : len(prompt) + 20].tolist() == together.tokens[row, : len(prompt) + 20].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_alpha_at_step_starts_is_the_share_that_is_accepted(temperature, tiny_llama, reference):
    target = as_target(tiny_llama(vocab_size=16, layers=2, seed=1))
    both = lookup_first("prompt_lookup:min_ngram=1", DraftModel(reference.disturbed(tiny_llama(16, 2, seed=1)), 16))
    prompts = [reference.prompt_of(6, seed, 16) for seed in range(48)]
    ids, mask = reference.batch_of(prompts)
    out = speculative_generate(
        target,
        both,
        ids,
        mask,
        max_new_tokens=40,
        num_speculative_tokens=2,
        eos_token_id=[],
        temperature=temperature,
        seed=5,
    )
    answers = [
        Answer(prompt, row[6:n]) for prompt, row, n in zip(prompts, out.tokens.tolist(), out.lengths, strict=True)
    ]
    scores = teacher_forced(target, both, answers, Sampling(temperature))
    values = [score.alpha if temperature else score.agreement for score in scores]
    starts = [row.step_starts for row in out.stats.rows]
    expected = torch.cat([value[at] for value, at in zip(values, starts, strict=True)])
    counted = (out.stats.conditional_acceptance or [0.0])[0]
    error = 0.0 if temperature == 0 else 4 * float((expected * (1 - expected)).sum().sqrt()) / len(expected)
    assert abs(float(expected.mean()) - counted) <= error + 1e-6


def test_where_the_lookup_drafts_its_token_has_all_the_probability(tiny_llama):
    target = as_target(tiny_llama(vocab_size=16))
    model = DraftModel(tiny_llama(vocab_size=16, seed=2), 16)
    both = lookup_first("prompt_lookup", model)
    ids = torch.tensor([[3, 4, 5, 3, 4, 9], [7, 8, 1, 2, 0, 0]])
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    hidden = both.teacher_forced_hidden(ids, mask, {})
    assert hidden[:, :, -1].tolist()[0] == [-1, -1, -1, -1, 5, -1]
    assert hidden[1, :4, -1].tolist() == [-1] * 4
    logits = both.first_token_logits(hidden[0])
    own = model.first_token_logits(model.teacher_forced_hidden(ids, mask, {})[0])
    assert torch.equal(logits[[0, 1, 2, 3, 5]], own[[0, 1, 2, 3, 5]])
    assert logits[4].softmax(-1).tolist() == [float(i == 5) for i in range(16)]
    assert target.vocab_size == logits.shape[-1]


def test_where_every_row_has_a_match_the_other_drafter_runs_no_pass(tiny_llama):
    """All four ids stand in the prompt, so that one of them always did before."""
    target = tiny_llama(vocab_size=4, seed=1)
    both = lookup_first("prompt_lookup:min_ngram=1", DraftModel(tiny_llama(vocab_size=4, seed=2), 4))
    prompt = torch.tensor([[0, 1, 2, 3] * 2])
    out = speculative_generate(target, both, prompt, max_new_tokens=9, num_speculative_tokens=4)
    assert both.passes == 0 < both.steps
    assert out.stats.drafted > 0


def test_passes_are_counted_and_the_drafter_that_runs_them_is_timed(tiny_llama):
    target = as_target(tiny_llama(vocab_size=16))
    model = DraftModel(tiny_llama(vocab_size=16, seed=2), 16)
    both = lookup_first("prompt_lookup", model)
    speculative_generate(target, both, torch.tensor([[1, 2, 3]]), max_new_tokens=12, num_speculative_tokens=3)
    assert 0 < both.mean_passes <= 3
    asked = both.passes
    costs = measure_costs(target, both, [1, 2, 3, 1, 2, 3], 3, seconds=0.0, min_rounds=1)
    assert costs.draft
    assert both.passes == asked


class TestNames:
    def test_a_lookup_and_another_drafter_are_told_apart(self, tmp_path, monkeypatch):
        assert two_in_turn("prompt_lookup+runs/a+b/final") == ("prompt_lookup", "runs/a+b/final")
        assert two_in_turn("suffix:min_match=3+org/model") == ("suffix:min_match=3", "org/model")
        assert two_in_turn("runs/c++/final") is None
        assert two_in_turn("prompt_lookup:min_ngram=2") is None
        with pytest.raises(BadInput, match=r"expected a drafter after the \+"):
            two_in_turn("prompt_lookup+")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "c++.txt").write_text("text")
        assert two_in_turn("suffix:corpus=c++.txt") is None

    def test_in_front_of_another_a_single_token_is_no_match_unless_asked_for(self, tiny_llama):
        model = DraftModel(tiny_llama(), 64)
        lookup = lookup_first("prompt_lookup", model).lookup
        assert isinstance(lookup, PromptLookup)
        assert (lookup.min_ngram, lookup.max_ngram) == (2, 8)
        given = lookup_first("prompt_lookup:min_ngram=1,max_ngram=3", model).lookup
        assert isinstance(given, PromptLookup)
        assert (given.min_ngram, given.max_ngram) == (1, 3)

    def test_what_cannot_stand_in_front_or_follow_is_one_line(self, tiny_llama):
        with pytest.raises(BadInput, match="Jacobi cannot follow a lookup"):
            lookup_first("prompt_lookup", Jacobi(0))
        with pytest.raises(BadInput, match="jacobi cannot stand in front of another drafter: prompt_lookup and suffix"):
            lookup_first("jacobi", DraftModel(tiny_llama(), 64))

    def test_it_takes_the_trees_of_the_other(self, tiny_llama):
        both = lookup_first("prompt_lookup", DraftModel(tiny_llama(), 64))
        assert as_drafter(both, as_target(tiny_llama()), DynamicTree(num_nodes=4)) is both
