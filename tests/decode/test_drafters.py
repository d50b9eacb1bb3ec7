"""Drafters by name: all of them lossless, greedy and sampled, alone and in ragged batches."""

import pytest
import torch

from draftsmith import checks, speculative_generate
from draftsmith.decode.drafters import WITHOUT_TRAINING, as_drafter, drafter_without_training, is_without_training
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.tree import as_layout
from draftsmith.errors import BadInput
from draftsmith.models.target import as_target

NAMES = ["prompt_lookup:max_ngram=2", "lookahead:window=3,ngram=3,candidates=2", "jacobi", "suffix"]
TREES = [(name, None) for name in NAMES] + [("suffix", [2, 2, 1])]
IDS = [name.partition(":")[0] for name in NAMES] + ["suffix tree"]


def rows_of(out):
    return [row[:n] for row, n in zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)]


@pytest.mark.parametrize(("name", "tree"), TREES, ids=IDS)
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3"])
def test_greedy_output_is_plain_greedy_output(name, tree, family, request, reference):
    """Past the sliding window; some prompts repeat themselves; rows are alone and beside others."""
    target = request.getfixturevalue(family)(seed=1, vocab_size=24, tie_word_embeddings=False)
    prompts = [reference.prompt_of(6, 1, 24) * 3, reference.prompt_of(3, 2, 24), reference.prompt_of(7, 3, 24)]
    expected = [reference.naive_greedy(target, prompt, 24) for prompt in prompts]
    assert min(len(set(tokens[-24:])) for tokens in expected) > 3
    for group in ([0], [0, 1, 2]):
        ids, mask = reference.batch_of([prompts[i] for i in group])
        out = speculative_generate(target, name, ids, mask, max_new_tokens=24, tree=tree, eos_token_id=[])
        assert rows_of(out) == [expected[i] for i in group]
        for row in out.stats.rows:
            assert row.emitted == 24 == row.accepted + row.target_calls
    assert 0 < out.stats.accepted < out.stats.drafted


@pytest.mark.parametrize(("name", "tree"), TREES, ids=IDS)
def test_sampled_output_has_the_targets_joint_distribution(name, tree, tiny_llama, reference):
    """Against exact enumeration over the first three tokens, in one batch whose rows draft what they have seen."""
    target, prompt = tiny_llama(vocab_size=5, layers=1, seed=5), [1, 4, 2, 1, 4, 3, 1, 4]
    out = speculative_generate(
        target,
        name,
        torch.tensor([prompt] * 1200),
        max_new_tokens=3,
        num_speculative_tokens=2,
        tree=tree,
        eos_token_id=[],
        seed=11,
        temperature=0.9,
        top_p=0.95,
    )
    assert out.stats.accepted > 0
    exact = reference.joint_distribution(target, prompt, 3, Sampling(0.9, top_p=0.95))
    reference.check_joint(out.tokens[:, len(prompt) :].tolist(), exact)


@pytest.mark.parametrize(
    ("name", "tree", "policy"), [(*case, 4) for case in TREES] + [(name, None, "heuristic:first=1") for name in NAMES]
)
def test_a_rows_sample_does_not_depend_on_its_neighbours(name, tree, policy, tiny_llama, reference):
    target = tiny_llama(vocab_size=8, seed=1, max_position_embeddings=32)
    prompts = [reference.prompt_of(n, n, 8) for n in (9, 14, 4)]
    settings = {"temperature": 0.8, "eos_token_id": [], "tree": tree, "num_speculative_tokens": policy}
    # Rows end in different steps, some of them at the context limit.
    together = speculative_generate(
        target, name, *reference.batch_of(prompts), seed=[7, 8, 9], max_new_tokens=24, **settings
    )
    for row, prompt in enumerate(prompts):
        alone = speculative_generate(
            target, name, torch.tensor([prompt]), seed=[7 + row], max_new_tokens=24, **settings
        )
        assert rows_of(alone)[0] == rows_of(together)[row]
        assert alone.stats.rows[0] == together.stats.rows[row]


@pytest.mark.parametrize("name", NAMES, ids=IDS[:4])
def test_rows_end_cleanly_at_the_context_limit(name, tiny_gpt2, reference):
    """Learned positions: one that does not exist is an error, were it only a lookahead window's."""
    target = tiny_gpt2(seed=1, vocab_size=16, n_positions=24)
    prompts = [reference.prompt_of(24, 1, 16), reference.prompt_of(22, 2, 16), reference.prompt_of(10, 3, 16)]
    out = speculative_generate(target, name, *reference.batch_of(prompts), max_new_tokens=50, eos_token_id=[])
    assert rows_of(out) == [reference.naive_greedy(target, prompt, 24 - len(prompt)) for prompt in prompts]


@pytest.mark.parametrize(("name", "tree"), TREES, ids=IDS)
def test_the_repetition_penalty_follows_the_draft(name, tree, tiny_llama, reference):
    target, prompt = tiny_llama(seed=1, vocab_size=16), reference.prompt_of(8, 2, 16)
    expected = target.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, repetition_penalty=1.1, pad_token_id=0
    )
    out = speculative_generate(
        target, name, torch.tensor([prompt]), max_new_tokens=20, repetition_penalty=1.1, tree=tree, eos_token_id=[]
    )
    assert out.tokens.tolist() == expected.tolist()
    assert out.stats.drafted > 0


@pytest.mark.parametrize("name", NAMES, ids=IDS[:4])
def test_other_rules_take_their_drafts_too(name, tiny_llama, reference):
    target, prompts = tiny_llama(seed=1, vocab_size=8), [reference.prompt_of(n, n, 8) for n in (9, 1, 4)]
    ids, mask = reference.batch_of(prompts)
    settings = {"max_new_tokens": 12, "temperature": 1.0, "eos_token_id": []}
    for rule in ("multi", "typical", "lenient", "tolerant", "fallback_rollback"):
        out = speculative_generate(target, name, ids, mask, rule=rule, **settings)
        assert out.stats.emitted == 36
    if not name.startswith("lookahead"):
        assert speculative_generate(target, name, ids, mask, rule="block", **settings).stats.emitted == 36


class TestNames:
    def test_options_follow_a_colon(self):
        assert vars(drafter_without_training("prompt_lookup:max_ngram=5, min_ngram=2"))["max_ngram"] == 5
        assert vars(drafter_without_training("lookahead:window=7"))["window"] == 7
        assert vars(drafter_without_training("suffix:max_match=9"))["max_match"] == 9
        assert [is_without_training(name) for name in ("jacobi", "jacobi:pad_id=3", "org/jacobi")] == [
            True,
            True,
            False,
        ]

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("lookahed", "unknown 'lookahed' .did you mean 'lookahead'.*prompt_lookup, lookahead, jacobi, suffix"),
            ("suffix:max_ngram=3", "'suffix' has no option 'max_ngram=3'.*max_match=NUMBER, min_match=NUMBER"),
            ("suffix:max_match", "has no option 'max_match'"),
            ("suffix:max_match=long", "max_match of 'suffix' is 'long', expected a whole number"),
            ("suffix:max_match=0", "max_match is 0, expected a whole number of at least 1"),
            ("lookahead:window=2.5", "window of 'lookahead' is '2.5', expected a whole number"),
            ("lookahead:window=600", "a window of 600 positions"),
            ("lookahead:window=500,ngram=100000", "99999 levels of 500 positions, expected at most 16,384 together"),
            ("jacobi:pad_id=-1", "pad_id is -1"),
        ],
    )
    def test_mistakes_are_one_line(self, name, says):
        with pytest.raises(BadInput, match=says):
            drafter_without_training(name)

    def test_jacobi_pads_with_the_targets_padding(self, tiny_llama):
        def padding(name, **config):
            return vars(as_drafter(name, as_target(tiny_llama(**config))))["pad_id"]

        assert padding("jacobi", pad_token_id=9) == 9
        assert padding("jacobi", eos_token_id=[5, 6]) == 5
        assert padding("jacobi:pad_id=4", eos_token_id=5) == 4
        assert vars(drafter_without_training("jacobi"))["pad_id"] == 0

    def test_the_names_are_those_that_the_command_line_knows(self):
        assert tuple(WITHOUT_TRAINING) == checks.WITHOUT_TRAINING

    @pytest.mark.parametrize("name", [name for name in WITHOUT_TRAINING if name != "suffix"])
    def test_drafters_of_chains_take_no_tree(self, name, tiny_llama):
        with pytest.raises(BadInput, match="takes no tree"):
            as_drafter(name, as_target(tiny_llama()), as_layout([2]))


def test_a_padding_token_outside_the_vocabulary_is_refused(tiny_llama):
    with pytest.raises(BadInput, match="pad_id is 64, the target's vocabulary has 64 ids"):
        speculative_generate(tiny_llama(), "jacobi:pad_id=64", torch.tensor([[1, 2]]))
