"""The loop on tiny random models: greedy output is plain greedy output, sampled output has the target's distribution."""

import inspect
from typing import Any

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.decode.loop import plain_generate
from draftsmith.decode.sampling import Sampling
from draftsmith.errors import BadInput
from draftsmith.models.draft_lm import cut_vocabulary

FAMILIES = ["tiny_llama", "tiny_qwen2", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", [None, [3, 2, 1], [[0], [1], [0, 0], [0, 0, 1]]], ids=["chain", "widths", "paths"])
def test_greedy_output_is_plain_greedy_output(family, tree, request, reference):
    """Past the sliding windows, in a ragged batch, with a drafter that is often right and often wrong."""
    make = request.getfixturevalue(family)
    target, drafter = make(layers=3, seed=1), make(layers=3, seed=1)
    with torch.no_grad():  # a drafter that agrees now and then
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    prompts = [reference.prompt_of(n, seed=n) for n in (9, 3, 6)]
    expected = [reference.naive_greedy(target, prompt, 20) for prompt in prompts]
    for group in ([0], [0, 1, 2]):
        ids, mask = reference.batch_of([prompts[i] for i in group])
        out = speculative_generate(
            target, drafter, ids, mask, max_new_tokens=20, num_speculative_tokens=4, tree=tree, eos_token_id=[]
        )
        rows = [row[:n] for row, n in zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)]
        assert rows == [expected[i] for i in group]
        assert 0 < out.stats.accepted < out.stats.drafted
        for row in out.stats.rows:
            # A tree's last step may be cut by the limit within the accepted path: it then emits no token of the target's.
            assert row.emitted == 20
            assert row.accepted + row.target_calls - row.emitted in ((0,) if tree is None else (0, 1))


def test_a_drafter_that_is_the_target_is_always_accepted(tiny_gemma3, reference):
    target = tiny_gemma3()
    out = speculative_generate(
        target, tiny_gemma3(), torch.tensor([reference.prompt_of(5, 1)]), max_new_tokens=25, eos_token_id=[]
    )
    assert out.stats.accepted == out.stats.drafted == 20
    assert out.stats.target_calls == 5
    assert out.stats.block_efficiency == 5.0


SAMPLINGS = {
    "T=1": {"temperature": 1.0},
    "T=0.7 top-p": {"temperature": 0.7, "top_p": 0.9},
    "top-k": {"temperature": 1.0, "top_k": 4},
    "min-p": {"temperature": 1.3, "min_p": 0.1},
}


@pytest.mark.parametrize("settings", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("shape", ["chain", "tree", "block", "cut"])
def test_sampled_output_has_the_targets_joint_distribution(settings, shape, tiny_llama, reference):
    """3,000 rows in one ragged batch against exact enumeration over the first three tokens."""
    target, drafter = tiny_llama(vocab_size=6, layers=1, seed=5), tiny_llama(vocab_size=6, layers=1, seed=6)
    if shape == "cut":
        drafter = cut_vocabulary(drafter, torch.tensor([0, 2, 3, 5]))
    prompt = [1, 4, 2]
    options: dict[str, Any] = (
        {"tree": [2, 2]} if shape == "tree" else {"rule": "block" if shape == "block" else "lossless"}
    )
    out = speculative_generate(
        target,
        drafter,
        torch.tensor([prompt] * 3000),
        max_new_tokens=3,
        num_speculative_tokens=2,
        eos_token_id=[],
        seed=11,
        **settings,
        **options,
    )
    reference.check_joint(
        out.tokens[:, 3:].tolist(), reference.joint_distribution(target, prompt, 3, Sampling(**settings))
    )


@pytest.mark.parametrize("batch", [1, 4])
def test_small_batches_have_the_same_distribution(batch, tiny_llama, reference):
    target, drafter = tiny_llama(vocab_size=4, layers=1, seed=5), tiny_llama(vocab_size=4, layers=1, seed=6)
    samples = []
    for run in range(240 if batch == 1 else 200):
        out = speculative_generate(
            target,
            drafter,
            torch.tensor([[1, 3, 2]] * batch),
            max_new_tokens=2,
            num_speculative_tokens=2,
            temperature=1.0,
            top_p=0.95,
            eos_token_id=[],
            seed=run,
        )
        samples.extend(out.tokens[:, 3:].tolist())
    reference.check_joint(samples, reference.joint_distribution(target, [1, 3, 2], 2, Sampling(1.0, top_p=0.95)))


def test_a_rows_sample_does_not_depend_on_its_neighbours(tiny_llama, reference):
    target, drafter = tiny_llama(seed=1), tiny_llama(seed=2)
    prompts = [reference.prompt_of(n, seed=n) for n in (5, 8, 3)]
    settings = {"max_new_tokens": 20, "temperature": 1.0, "eos_token_id": []}
    together = speculative_generate(target, drafter, *reference.batch_of(prompts), seed=[7, 8, 9], **settings)
    for row, prompt in enumerate(prompts):
        alone = speculative_generate(target, drafter, torch.tensor([prompt]), seed=[7 + row], **settings)
        assert alone.tokens[0, : len(prompt) + 20].tolist() == together.tokens[row, : len(prompt) + 20].tolist()


def test_seeds_reproduce_and_differ(tiny_llama, reference):
    target, drafter, ids = tiny_llama(seed=1), tiny_llama(seed=2), torch.tensor([reference.prompt_of(4, 1)] * 2)
    first, again, other = (
        speculative_generate(target, drafter, ids, temperature=1.0, seed=seed, eos_token_id=[]).tokens.tolist()
        for seed in (3, 3, 4)
    )
    assert first == again != other
    assert first[0] != first[1]


class TestEnds:
    """EOS, limits and stop strings."""

    def emitted(self, out, row, prompt):
        return out.tokens[row, len(prompt) : out.lengths[row]].tolist()

    def test_nothing_after_eos_is_emitted_or_counted(self, tiny_llama, reference):
        target, prompt = tiny_llama(seed=1), reference.prompt_of(5, 2)
        free = reference.naive_greedy(target, prompt, 20)[5:]
        eos = free[2]
        first = free.index(eos) + 1
        out = speculative_generate(
            target,
            tiny_llama(seed=1),
            torch.tensor([prompt]),
            max_new_tokens=20,
            num_speculative_tokens=7,
            eos_token_id=eos,
        )
        assert self.emitted(out, 0, prompt) == free[:first]
        stats = out.stats.rows[0]
        assert stats.emitted == first == stats.accepted == stats.drafted
        assert stats.target_calls == 1
        assert out.stats.conditional_acceptance == [1.0] * first

    def test_several_eos_ids_end_rows_on_their_own(self, tiny_llama, reference):
        target = tiny_llama(seed=1)
        prompts = [reference.prompt_of(5, 2), reference.prompt_of(7, 3)]
        free = [reference.naive_greedy(target, prompt, 20)[len(prompt) :] for prompt in prompts]
        eos = [free[0][3], free[1][6]]
        out = speculative_generate(
            target, tiny_llama(seed=4), *reference.batch_of(prompts), max_new_tokens=20, eos_token_id=eos
        )
        for row, prompt in enumerate(prompts):
            end = min(free[row].index(token) for token in eos if token in free[row]) + 1
            assert self.emitted(out, row, prompt) == free[row][:end]

    @pytest.mark.parametrize("most", [0, 1, 2, 3, 5])
    def test_a_limit_below_the_draft_is_exact(self, most, tiny_llama, reference):
        target, prompt = tiny_llama(seed=1), reference.prompt_of(5, 2)
        out = speculative_generate(
            target,
            tiny_llama(seed=1),
            torch.tensor([prompt]),
            max_new_tokens=most,
            num_speculative_tokens=4,
            eos_token_id=[],
        )
        assert out.tokens[0].tolist() == reference.naive_greedy(target, prompt, most)
        assert out.stats.emitted == most

    @pytest.mark.parametrize("tree", [None, [2, 2]])
    def test_the_context_limit_ends_rows_cleanly(self, tree, tiny_gpt2, reference):
        target = tiny_gpt2(seed=1, n_positions=24)
        prompts = [reference.prompt_of(24, 1), reference.prompt_of(22, 2), reference.prompt_of(10, 3)]
        out = speculative_generate(
            target,
            tiny_gpt2(seed=2, n_positions=24),
            *reference.batch_of(prompts),
            max_new_tokens=50,
            tree=tree,
            eos_token_id=[],
        )
        assert out.lengths.tolist() == [24, 24, 24]
        for row, prompt in enumerate(prompts):
            assert out.tokens[row].tolist() == reference.naive_greedy(target, prompt, 24 - len(prompt))
        with pytest.raises(BadInput, match="context of 24"):
            speculative_generate(target, None, torch.tensor([reference.prompt_of(25, 1)]))

    def test_an_empty_prompt_starts_from_bos(self, tiny_llama, reference):
        target = tiny_llama(seed=1, bos_token_id=3)
        nothing = torch.zeros(1, 4, dtype=torch.long)
        out = speculative_generate(target, tiny_llama(seed=2), nothing, nothing, eos_token_id=[])
        assert out.tokens[0].tolist() == reference.naive_greedy(target, [3], 64)
        with pytest.raises(BadInput, match="BOS"):
            speculative_generate(tiny_llama(seed=1), None, torch.zeros(1, 0, dtype=torch.long))


def test_prompt_lookup_drafts_what_followed_before_and_stays_exact(tiny_llama, reference):
    target = tiny_llama(seed=1)
    prompts = [reference.prompt_of(6, 1) * 4, reference.prompt_of(5, 2)]
    out = speculative_generate(
        target, "prompt_lookup", *reference.batch_of(prompts), max_new_tokens=60, eos_token_id=[]
    )
    for row, prompt in enumerate(prompts):
        assert out.tokens[row, : out.lengths[row]].tolist() == reference.naive_greedy(target, prompt, 60)
    assert out.stats.accepted > 0


def test_plain_decoding_is_the_loop_without_a_drafter(tiny_qwen2, reference):
    target, prompt = tiny_qwen2(seed=1), reference.prompt_of(5, 2)
    out = plain_generate(target, torch.tensor([prompt]), max_new_tokens=12, eos_token_id=[])
    assert out.tokens[0].tolist() == reference.naive_greedy(target, prompt, 12)
    assert (out.stats.target_calls, out.stats.drafted, out.stats.emitted) == (12, 0, 12)
    assert out.stats.acceptance_rate is None


def test_repetition_penalty_follows_the_draft(tiny_llama, reference):
    """With the penalty, greedy speculative output equals transformers' own greedy search."""
    target, prompt = tiny_llama(seed=1), reference.prompt_of(5, 2)
    expected = target.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, repetition_penalty=1.3, pad_token_id=0
    )[0].tolist()
    for tree in (None, [2, 1, 1]):
        out = speculative_generate(
            target,
            tiny_llama(seed=1),
            torch.tensor([prompt]),
            max_new_tokens=20,
            repetition_penalty=1.3,
            tree=tree,
            eos_token_id=[],
        )
        assert out.tokens[0].tolist() == expected


def test_wrong_names_are_one_line(tiny_llama):
    target, ids = tiny_llama(), torch.tensor([[1, 2]])
    with pytest.raises(BadInput, match="prompt_lookup"):
        speculative_generate(target, "promt_lookup", ids)
    with pytest.raises(BadInput, match="lossless"):
        speculative_generate(target, tiny_llama(), ids, rule="losless")
    with pytest.raises(BadInput, match="no drafter"):
        speculative_generate(target, object(), ids)
    with pytest.raises(BadInput, match="takes no tree"):
        speculative_generate(target, "prompt_lookup", ids, tree=[2, 1])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temperature": -1.0}, "temperature: -1.0 is out of range"),
        ({"temperature": 1.0, "top_k": -1}, "top_k: -1 is out of range"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p: 0.0 is out of range"),
        ({"max_new_tokens": -1}, "max_new_tokens: -1 is out of range"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, says, tiny_llama):
    with pytest.raises(BadInput, match=says):
        speculative_generate(tiny_llama(), None, torch.tensor([[1, 2]]), **settings)


def test_the_first_verification_pass_reads_the_prompt_too(tiny_llama, monkeypatch):
    """Rows of one length: one pass over prompt and draft. A drafter that wants something of the target has it read before."""
    target, passes = tiny_llama(), []
    inside = target.forward

    def noted(**inputs):
        passes.append(inputs["input_ids"].shape[1])
        return inside(**inputs)

    noted.__signature__ = inspect.signature(inside)
    monkeypatch.setattr(target, "forward", noted)
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    speculative_generate(target, None, ids, max_new_tokens=2, eos_token_id=[])
    assert passes == [4, 1]
    passes.clear()
    speculative_generate(target, "prompt_lookup", ids, max_new_tokens=1, eos_token_id=[])
    assert passes == [4]
    passes.clear()
    speculative_generate(target, "lookahead", ids, max_new_tokens=1, eos_token_id=[])
    assert passes[0] == 3
