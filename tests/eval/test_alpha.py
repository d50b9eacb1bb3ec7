"""Teacher-forced acceptance: equal to brute force, and what the decoder then counts."""

import pytest
import torch

from draftsmith.decode.draft_model import DraftModel
from draftsmith.decode.loop import speculative_generate
from draftsmith.decode.sampling import Sampling, probabilities
from draftsmith.eval import alpha as module
from draftsmith.eval.alpha import Answer, forced_batches, score, teacher_forced
from draftsmith.models.cut import cut_layers
from draftsmith.models.draft_lm import cut_vocabulary
from draftsmith.models.target import as_target

FAMILIES = ["tiny_llama", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]
SETTINGS = {
    "greedy": Sampling(0.0, top_k=3),
    "T=1": Sampling(1.0),
    "T=0.7, top-k, top-p": Sampling(0.7, top_k=9, top_p=0.9),
    "min-p": Sampling(1.2, min_p=0.1),
    "repetition penalty": Sampling(0.9, repetition_penalty=1.4),
}


def ids_of(length, seed, vocab_size=64):
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def some_answers(vocab_size=64):
    lengths = [(5, 9), (1, 14), (12, 1), (3, 20), (8, 0), (2, 6)]
    return [Answer(ids_of(p, p, vocab_size), ids_of(a, 100 + a, vocab_size)) for p, a in lengths]


def pair(make, seed=1, noise=0.05, **config):
    target = as_target(make(layers=3, seed=seed, **config))
    draft = cut_layers(target.model, [0, 1, 2])
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return target, draft


def brute_force(target, draft, answer, sampling, kept=None):
    """Position by position, from the whole sequence alone."""
    if sampling.temperature == 0:
        sampling = sampling._replace(temperature=1.0, top_k=None)
    alphas, agreements = [], []
    for i in range(len(answer.tokens)):
        ids = torch.tensor([answer.prompt + answer.tokens[:i]])
        said, proposed = (model(input_ids=ids, use_cache=False).logits[0, -1:] for model in (target.model, draft))
        seen = torch.zeros_like(said, dtype=torch.bool).scatter_(1, ids, True)
        proposed = probabilities(proposed if kept is None else proposed[:, kept], sampling)
        if kept is not None:
            proposed = torch.zeros_like(said).index_copy_(1, kept, proposed)
        judged = probabilities(said, sampling, seen)
        alphas.append(torch.minimum(judged, proposed).sum().item())
        agreements.append(float(judged.argmax() == proposed.argmax()))
    return alphas, agreements


@pytest.mark.parametrize("settings", SETTINGS)
def test_alpha_is_what_brute_force_gives(settings, tiny_llama, monkeypatch):
    """Over right-padded rows of all lengths, in several batches and chunks; an empty answer has no position."""
    monkeypatch.setattr(module, "_TOKENS_PER_BATCH", 40)
    monkeypatch.setattr(module, "_ROWS_PER_CHUNK", 6)
    target, draft = pair(tiny_llama)
    answers = some_answers()
    found = teacher_forced(target, DraftModel(draft, 64), answers, SETTINGS[settings])
    assert len(list(forced_batches(target, answers, ()))) > 1
    for answer, scores in zip(answers, found, strict=True):
        alphas, agreements = brute_force(target, draft, answer, SETTINGS[settings])
        assert scores.alpha.tolist() == pytest.approx(alphas, abs=1e-5)
        assert scores.agreement.tolist() == agreements


@pytest.mark.parametrize("family", FAMILIES)
def test_alpha_past_the_windows_and_in_other_families(family, request):
    target, draft = pair(request.getfixturevalue(family))
    for answer, scores in zip(
        some_answers(), teacher_forced(target, DraftModel(draft, 64), some_answers(), Sampling(1.0)), strict=True
    ):
        assert scores.alpha.tolist() == pytest.approx(brute_force(target, draft, answer, Sampling(1.0))[0], abs=1e-5)


def test_a_cut_vocabulary_is_judged_over_the_target_s_full_one(tiny_llama):
    target, draft = pair(tiny_llama)
    kept = torch.arange(0, 64, 2)
    drafter = DraftModel(cut_vocabulary(draft, kept), 64)
    for answer, scores in zip(
        some_answers(), teacher_forced(target, drafter, some_answers(), Sampling(0.8, top_k=9)), strict=True
    ):
        alphas, agreements = brute_force(target, draft, answer, Sampling(0.8, top_k=9), kept)
        assert scores.alpha.tolist() == pytest.approx(alphas, abs=1e-5)
        assert scores.agreement.tolist() == agreements


def test_batches_can_be_scored_again_for_another_drafter(tiny_llama):
    target, draft = pair(tiny_llama)
    batches = list(forced_batches(target, some_answers(), ()))
    own = score(target, DraftModel(target.model, 64), batches, 6, Sampling(1.0))
    assert all(one.alpha.tolist() == pytest.approx([1.0] * len(one.alpha), abs=1e-5) for one in own)
    assert all(bool(one.agreement.all()) for one in own)
    other = score(target, DraftModel(draft, 64), batches, 6, Sampling(1.0))
    assert sum(float(one.alpha.sum()) for one in other) < sum(float(one.alpha.sum()) for one in own) - 1


def decoded(target, drafter, sampling, rows, new, prompt=4, num_speculative_tokens=3, seed=0):
    """Prompts and answers of a speculative run, with the decoder's counts."""
    ids = torch.tensor([ids_of(prompt, row, target.vocab_size) for row in range(rows)])
    out = speculative_generate(
        target,
        drafter,
        ids,
        max_new_tokens=new,
        num_speculative_tokens=num_speculative_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=[],
        seed=seed,
    )
    lengths = out.lengths.tolist()
    answers = [Answer(row[:prompt], row[prompt:end]) for row, end in zip(out.tokens.tolist(), lengths, strict=True)]
    return answers, out.stats


def at_step_starts(scores, stats):
    return [value for one, row in zip(scores, stats.rows, strict=True) for value in one[row.step_starts].tolist()]


@pytest.mark.parametrize("settings", [name for name in SETTINGS if name != "greedy"])
def test_alpha_at_step_starts_is_what_the_decoder_then_accepts(settings, tiny_llama):
    """The mean over the positions where steps began predicts ``conditional_acceptance[0]``: 4.5 standard errors at most."""
    target, draft = pair(tiny_llama, noise=0.08)
    drafter = DraftModel(draft, 64)
    answers, stats = decoded(target, drafter, SETTINGS[settings], rows=60, new=40)
    scores = [one.alpha for one in teacher_forced(target, drafter, answers, SETTINGS[settings])]
    alphas = torch.tensor(at_step_starts(scores, stats))
    accepted = stats.conditional_acceptance[0]
    assert len(alphas) == stats.pooled.tested_at[0] > 500
    error = (alphas * (1 - alphas)).sum().sqrt().item() / len(alphas)  # each step accepts with its own alpha
    assert abs(alphas.mean().item() - accepted) < 4.5 * error
    assert 0.1 < accepted < 0.95


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_agreement_at_step_starts_is_what_the_decoder_counts_exactly(penalty, tiny_llama):
    target, draft = pair(tiny_llama, noise=0.08)
    drafter = DraftModel(draft, 64)
    sampling = Sampling(0.0, repetition_penalty=penalty)
    answers, stats = decoded(target, drafter, sampling, rows=20, new=30)
    agreements = at_step_starts([one.agreement for one in teacher_forced(target, drafter, answers, sampling)], stats)
    assert sum(agreements) == stats.pooled.accepted_at[0]
    assert len(agreements) == stats.pooled.drafted_at[0]
    assert sum(agreements) / len(agreements) == stats.conditional_acceptance[0]
