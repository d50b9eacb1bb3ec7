"""Every lossless rule, chain and tree, greedy and sampled, alone and in batches, with drafters of every kind: audited."""

import itertools
from typing import NamedTuple

import pytest
import torch
from scipy.stats import binom

from draftsmith import speculative_generate
from draftsmith.decode.sampling import Sampling
from draftsmith.errors import BadInput
from draftsmith.eval.audit import audit_drafter
from draftsmith.models.draft_lm import cut_vocabulary

VOCAB = 5
SIGNIFICANCE = 1e-3  # of each of the audits below, of which there are a hundred
TREE = [2, 1]
SHAPES = [("lossless", None), ("block", None), ("multi", None), ("lossless", TREE), ("multi", TREE)]
SHAPE_NAMES = ["lossless-chain", "block-chain", "multi-chain", "lossless-tree", "multi-tree"]
SAMPLINGS = {
    "T=1": Sampling(1.0),
    "T=0.7 top-p": Sampling(0.7, top_p=0.9),
    "top-k": Sampling(1.0, top_k=3),
}
DRAFTERS = ["independent", "cut", "prompt_lookup"]
PROMPTS = [[1, 4, 2, 1, 4], [4, 4, 1, 4]]  # with repetitions, for prompt lookup to draft from


@pytest.fixture(scope="module")
def target(tiny_llama):
    return tiny_llama(vocab_size=VOCAB, layers=1, hidden=16, seed=8)


@pytest.fixture(scope="module")
def make_drafter(tiny_llama):
    def make(name):
        model = tiny_llama(vocab_size=VOCAB, layers=1, hidden=16, seed=7)
        return {
            "independent": model,
            "cut": cut_vocabulary(model, torch.tensor([0, 1, 2, 4])),
            "prompt_lookup": "prompt_lookup",
        }[name]

    return make


def settings_of(rule, tree):
    return {"rule": rule, "tree": tree, "num_speculative_tokens": 2}


def drafts_trees(drafter):
    return drafter != "prompt_lookup"


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("rule", "tree"), SHAPES, ids=SHAPE_NAMES)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_sampling(target, make_drafter, drafter, rule, tree, sampling):
    """Two prompts, 300 samples each, all in one batch; and rows alone, or four together, say what they say there."""
    if tree and not drafts_trees(drafter):
        pytest.skip("prompt lookup drafts chains only, as another test asserts")
    made, settings = make_drafter(drafter), settings_of(rule, tree)
    result = audit_drafter(
        target, made, PROMPTS, sampling=sampling, samples=300, significance=SIGNIFICANCE, batch_size=600, **settings
    )
    assert result.passed, result.lines
    assert not any("NOTHING WAS DRAFTED" in line for line in result.lines)
    assert max(test.detectable for test in result.tests) < 0.21

    def tokens(rows):
        ids = torch.tensor([PROMPTS[0]] * len(rows))
        out = speculative_generate(
            target, made, ids, max_new_tokens=6, seed=rows, eos_token_id=[], **settings, **sampling._asdict()
        )
        return out.tokens.tolist()

    together = tokens(list(range(16)))
    assert tokens([0]) + tokens([1]) + tokens([2, 3, 4, 5]) == together[:6]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("batch_size", "samples", "detectable"), [(1, 15, 0.6), (4, 40, 0.4)])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_sampling_in_small_batches(target, make_drafter, drafter, batch_size, samples, detectable, sampling):
    """Small batches are slow, so rules and shapes take turns in one audit: few samples each, and their joint power."""
    made = make_drafter(drafter)
    turns = itertools.cycle([shape for shape in SHAPES if drafts_trees(drafter) or not shape[1]])

    def in_turns(*args, rule, tree, **settings):
        rule, tree = next(turns)
        return speculative_generate(*args, rule=rule, tree=tree, **settings)

    result = audit_drafter(
        target,
        made,
        PROMPTS,
        sampling=sampling,
        samples=samples,
        significance=SIGNIFICANCE,
        batch_size=batch_size,
        num_speculative_tokens=2,
        decode=in_turns,
    )
    assert result.passed, result.lines
    assert result.tests[-1].name == "all prompts together: first 2 tokens, exact"
    assert result.tests[-1].detectable < detectable


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("rule", "tree"), SHAPES, ids=SHAPE_NAMES)
def test_greedy(tiny_llama, drafter, rule, tree, batch_size):
    if tree and not drafts_trees(drafter):
        pytest.skip("prompt lookup drafts chains only, as another test asserts")
    target, model = tiny_llama(seed=1), tiny_llama(seed=1)
    with torch.no_grad():  # a drafter that is often right and often wrong
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    made = {
        "independent": model,
        "cut": cut_vocabulary(model, torch.arange(0, 64, 2)),
        "prompt_lookup": "prompt_lookup",
    }[drafter]
    prompts = [[5, 6, 7, 5, 6], [9, 9], [20, 30, 40, 20], [1, 2, 1, 2, 1, 2]]
    result = audit_drafter(
        target, made, prompts, batch_size=batch_size, max_new_tokens=12, eos_token_id=[], **settings_of(rule, tree)
    )
    assert result.passed, result.lines
    assert "4 of 4 answers (48 tokens in all)" in result.lines[-2]


def test_what_cannot_be_combined_is_refused(target, make_drafter):
    with pytest.raises(BadInput, match="block verification is defined on a chain"):
        audit_drafter(target, make_drafter("independent"), PROMPTS, sampling=Sampling(1.0), rule="block", tree=TREE)
    with pytest.raises(BadInput, match="drafts chains only"):
        audit_drafter(target, "prompt_lookup", PROMPTS, sampling=Sampling(1.0), tree=TREE)


class Answers(NamedTuple):
    """All that an engine has to return."""

    tokens: torch.Tensor
    lengths: torch.Tensor


def test_false_alarms_are_no_more_frequent_than_asked(target):
    """An engine that draws from the target's exact joint distribution, audited again and again."""
    joint = {}
    for prompt in PROMPTS:
        with torch.no_grad():
            after = target(input_ids=torch.tensor([[*prompt, token] for token in range(VOCAB)])).logits
        first, second = after[0, -2].softmax(-1), after[:, -1].softmax(-1)
        joint[tuple(prompt)] = (first[:, None] * second).flatten().double()

    def exact(target, drafter, input_ids, attention_mask, *, seed, **settings):
        rows = []
        for ids, mask, row_seed in zip(input_ids, attention_mask, seed, strict=True):
            prompt = ids[mask.bool()].tolist()
            generator = torch.Generator().manual_seed(row_seed)
            outcome = int(torch.multinomial(joint[tuple(prompt)], 1, generator=generator))
            rows.append([*prompt, outcome // VOCAB, outcome % VOCAB])
        width = max(map(len, rows))
        return Answers(
            torch.tensor([row + [0] * (width - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])
        )

    runs, significance = 40, 0.2
    results = [
        audit_drafter(
            target,
            None,
            PROMPTS,
            sampling=Sampling(1.0),
            samples=40,
            batch_size=80,
            significance=significance,
            seed=seed,
            decode=exact,
        )
        for seed in range(runs)
    ]
    alarms = sum(not result.passed for result in results)
    assert alarms <= binom.ppf(0.999, runs, significance)
    assert "the engine does not say how much it drafted" in results[0].lines
