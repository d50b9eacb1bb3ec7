"""What all kinds of heads on the last hidden state have in common: what they learn is what they then get accepted."""

import hashlib
import itertools
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from draftsmith import load_drafter, speculative_generate
from draftsmith.decode.loop import plain_generate
from draftsmith.decode.sampling import Sampling, probabilities
from draftsmith.errors import BadInput
from draftsmith.heads.make import save_heads
from draftsmith.models.target import as_target

FAMILIES = ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]
TREES = {"chain": None, "widths": [3, 2, 1], "paths": [[0], [1], [0, 0], [0, 2], [0, 0, 1]]}


def ragged(prompts):
    width = max(map(len, prompts))
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)], mask[i, : len(prompt)] = torch.tensor(prompt), 1
    return ids, mask


def rows_of(out):
    return [row[:length] for row, length in zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)]


def weights_hash(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def test_every_head_learns_what_it_alone_is_responsible_for(section, copier, lab):
    """And the decoder then accepts all that it drafts, so no label, token or hidden state is off by one anywhere."""
    target = copier
    section = section.model_copy(update={"vocabulary": None, "output_rank": 8})
    made = lab.prepared(section, target)
    rows = lab.greedy_rows(target, 32, 12)
    before = weights_hash(target.model)
    lab.fit(made, lab.batch_of(rows, length=60), steps=100, rate=5e-3)
    held_out = lab.batch_of(lab.greedy_rows(target, 16, 20, seed=1), prompt=3, length=60)
    found = lab.figures(made, held_out)
    assert [found[f"heads/{k}/top1"] > 0.99 for k in range(3)] == [True] * 3
    assert found["block_efficiency"] > 3.9
    assert weights_hash(target.model) == before, "the target is frozen"
    out = speculative_generate(
        target, made.drafter, torch.tensor(rows)[:2, :5], max_new_tokens=21, num_speculative_tokens=3, eos_token_id=[]
    )
    assert (out.stats.acceptance_rate or 0) > 0.98


@pytest.fixture
def half_trained(section, tiny_llama, lab):
    """Heads that are sometimes right, and the target they are for."""
    target = as_target(tiny_llama(layers=2, seed=3))
    made = lab.prepared(section, target)
    lab.fit(made, lab.batch_of(lab.greedy_rows(target, 24, 24), length=54), steps=40)
    return made, target


def test_the_training_metric_is_what_the_decoder_counts(half_trained, lab):
    made, target = half_trained
    lab.check_metric(made, target)


def test_alpha_at_step_starts_is_the_share_that_is_accepted(half_trained, lab):
    """Sampling: the mean overlap of the two distributions where steps began predicts what is accepted of the first token."""
    from draftsmith.eval.alpha import Answer, teacher_forced

    made, target = half_trained
    ids = torch.tensor(lab.greedy_rows(target, 24, 24)).repeat(8, 1)[:, :6]
    out = speculative_generate(
        target, made.drafter, ids, max_new_tokens=30, num_speculative_tokens=2, temperature=1.0, eos_token_id=[]
    )
    answers = [Answer(row[:6], row[6:]) for row in out.tokens.tolist()]
    scores = teacher_forced(target, made.drafter, answers, Sampling(1.0))
    alphas = torch.cat([one.alpha[stats.step_starts] for one, stats in zip(scores, out.stats.rows, strict=True)])
    error = (alphas * (1 - alphas)).sum().sqrt() / len(alphas)
    assert abs(alphas.mean() - out.stats.conditional_acceptance[0]) < 4 * error


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_greedy_output_is_plain_greedy_output(half_trained, tree):
    made, target = half_trained
    prompts = [[5, 9, 2, 40, 7], [11], [3, 3, 8, 60, 1, 2, 9, 9]]
    for group in ([prompts[1]], prompts):
        ids, mask = ragged(group)
        settings = {"max_new_tokens": 25, "eos_token_id": []}
        plain = plain_generate(target, ids, mask, **settings)
        out = speculative_generate(target, made.drafter, ids, mask, num_speculative_tokens=3, tree=tree, **settings)
        assert rows_of(out) == rows_of(plain)
        assert out.stats.pooled.drafted_nodes >= out.stats.drafted > out.stats.accepted


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_decode_in_chains_and_trees(section, family, request, lab):
    """Tied and untied heads, grouped queries, windows, scaled embeddings, softcaps, learned positions."""
    target = as_target(request.getfixturevalue(family)(layers=2, seed=1))
    made = lab.prepared(section, target, loss="forward_kl")
    rows = lab.greedy_rows(target, 3, 20)
    lab.fit(made, lab.batch_of(rows, length=46), steps=4)
    ids = torch.tensor(rows)[:, :3]
    for tree in (None, [2, 2]):
        out = speculative_generate(
            target, made.drafter, ids, max_new_tokens=20, num_speculative_tokens=3, tree=tree, eos_token_id=[]
        )
        assert out.tokens.tolist() == rows


@pytest.mark.parametrize("tree", [None, [2, 2]], ids=["chain", "tree"])
def test_sampled_output_has_the_targets_joint_distribution(section, tree, tiny_llama, lab):
    """Against exact enumeration of the first three tokens."""
    target = as_target(tiny_llama(vocab_size=6, layers=1, seed=5))
    cut = {"vocabulary": None if section.vocabulary is None else 4}
    made = lab.prepared(section.model_copy(update=cut), target, loss="forward_kl")
    lab.fit(made, lab.batch_of(lab.greedy_rows(target, 8, 12), length=15), steps=20)
    sampling = Sampling(1.1, top_p=0.95)
    prompt = [1, 4, 2]
    out = speculative_generate(
        target, made.drafter, torch.tensor([prompt] * 3000), max_new_tokens=3, num_speculative_tokens=2, tree=tree,
        temperature=1.1, top_p=0.95, eos_token_id=[], seed=11,
    )  # fmt: skip
    exact = torch.zeros(6, 6, 6, dtype=torch.float64)
    for prefix in itertools.product(range(6), repeat=2):
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([[*prompt, *prefix]])).logits[0, 2:]
        probs = probabilities(logits, sampling).double()
        exact[prefix] = probs[0, prefix[0]] * probs[1, prefix[1]] * probs[2]
    counts = torch.zeros_like(exact)
    for sample in out.tokens[:, 3:].tolist():
        counts[tuple(sample)] += 1
    assert counts[exact == 0].sum() == 0
    expected = exact.flatten() * 3000
    common = expected >= 5
    observed = torch.cat([counts.flatten()[common], counts.flatten()[~common].sum()[None]]).numpy()
    wanted = torch.cat([expected[common], expected[~common].sum()[None]]).numpy()
    assert chisquare(observed[wanted > 0], wanted[wanted > 0] * observed.sum() / wanted.sum()).pvalue > 1e-4


def test_a_saved_drafter_drafts_the_same(half_trained, section, lab, tmp_path):
    made, target = half_trained
    save_heads(section, made, target, tmp_path / "final")
    loaded: Any = load_drafter(tmp_path / "final", target)
    ids = torch.tensor(lab.greedy_rows(target, 4, 4))
    settings = {"max_new_tokens": 12, "num_speculative_tokens": 3, "temperature": 1.0, "eos_token_id": [], "seed": 3}
    first = speculative_generate(target, made.drafter, ids, **settings)
    again = speculative_generate(target, loaded, ids, **settings)
    assert again.tokens.tolist() == first.tokens.tolist()
    assert again.stats.pooled == first.stats.pooled
    assert loaded.accuracies == made.objective.accuracies
    assert all(0 <= rate <= 1 for row in loaded.accuracies for rate in row)
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())


def test_another_target_is_refused(section, tiny_llama, lab, tmp_path):
    target = as_target(tiny_llama(seed=0))
    save_heads(section, lab.prepared(section, target), target, tmp_path / "final")
    with pytest.raises(BadInput, match=r"the weights of .* are others"):
        load_drafter(tmp_path / "final", as_target(tiny_llama(seed=1)))
    with pytest.raises(BadInput, match=r"hidden size of 32, .* has 64"):
        load_drafter(tmp_path / "final", as_target(tiny_llama(hidden=64)))


def test_a_bf16_target_decodes_with_bf16_heads(section, tiny_llama, lab, tmp_path):
    target = as_target(tiny_llama(seed=2).bfloat16())
    made = lab.prepared(section, target, loss="forward_kl")
    lab.fit(made, lab.batch_of(lab.greedy_rows(target, 3, 12)), steps=3)
    assert {parameter.dtype for parameter in made.objective.heads.parameters()} == {torch.float32}
    ids = torch.tensor(lab.greedy_rows(target, 2, 2))
    save_heads(section, made, target, tmp_path / "final")
    loaded: Any = load_drafter(tmp_path / "final", target)
    assert {parameter.dtype for parameter in loaded.heads.parameters()} == {torch.bfloat16}
    for drafter in (made.drafter, loaded):
        for temperature in (0.0, 1.0):
            out = speculative_generate(
                target, drafter, ids, max_new_tokens=8, temperature=temperature, tree=[2, 1], eos_token_id=[]
            )
            assert out.tokens.shape[1] == ids.shape[1] + 8


def test_parameters_read_and_passes_are_those_of_the_kind(section, tiny_llama, lab):
    target = as_target(tiny_llama())
    made = lab.prepared(section, target)
    sequential = section.kind == "hydra"
    assert [made.drafter.num_passes(n) for n in (1, 2, 9)] == ([1, 2, 3] if sequential else [1, 1, 1])
    own = sum(parameter.numel() for parameter in made.objective.heads.parameters())
    projection = 0 if section.output == "own" else 64 * 32
    everything = own + projection
    read = made.drafter.num_parameters_read
    assert read == everything if not sequential else everything // 3 <= read < everything
