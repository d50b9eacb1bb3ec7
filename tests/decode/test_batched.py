"""Batched plain sampling with refill: every prompt is answered as if it were alone."""

import pytest
import torch

from draftsmith.decode import batched
from draftsmith.decode.batched import generate_batched
from draftsmith.decode.forward import CachedLM
from draftsmith.decode.sampling import Sampling
from draftsmith.models.draft_lm import cut_vocabulary
from draftsmith.models.target import as_target

FAMILIES = ["tiny_llama", "tiny_qwen2", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]
GREEDY, SAMPLED = Sampling(0.0), Sampling(0.9, top_p=0.95)
LENGTHS = (9, 1, 6, 14, 3, 2, 11, 5, 7)


@pytest.fixture
def prompts(reference):
    return [reference.prompt_of(length, seed=length) for length in LENGTHS]


def answers(target, prompts, count: int | list[int] = 12, sampling=GREEDY, **settings):
    rows = list(generate_batched(target, prompts, max_new_tokens=count, sampling=sampling, **settings))
    assert len({row.index for row in rows}) == len(rows) == len(prompts)
    return {row.index: row for row in rows}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_refilled_slots_answer_as_one_by_one(family, batch_size, prompts, reference, request):
    """Past the windows of 8, with prompts of one token, and rows that end at different times, so that slots change hands."""
    target = as_target(request.getfixturevalue(family)(layers=3))
    whole = [reference.naive_greedy(target.model, prompt, 12)[len(prompt) :] for prompt in prompts]
    eos = [whole[0][2], whole[3][6], whole[5][0]]
    found = answers(target, prompts, batch_size=batch_size, eos_token_ids=eos)
    for i, tokens in enumerate(whole):
        end = next((n for n, token in enumerate(tokens, 1) if token in eos), None)
        assert found[i].tokens == tokens[:end]
        assert found[i].ended is (end is not None)
        assert found[i].hidden is None
    assert len({len(row.tokens) for row in found.values()}) > 1


def test_an_eos_in_the_last_place_allowed_counts_as_an_end(tiny_llama, prompts):
    target = as_target(tiny_llama())
    tokens = answers(target, prompts[:1], count=4)[0].tokens
    (row,) = answers(target, prompts[:1], count=4, eos_token_ids=[tokens[-1]]).values()
    assert row.ended is (tokens.index(tokens[-1]) == 3) or len(row.tokens) < 4
    (row,) = answers(target, prompts[:1], count=1, eos_token_ids=[tokens[0]]).values()
    assert (row.tokens, row.ended) == (tokens[:1], True)


def test_a_target_s_own_eos_ends_rows_unless_told_otherwise(tiny_llama, prompts):
    model = tiny_llama()
    first = answers(as_target(model), prompts, count=3)[0].tokens
    model.generation_config.eos_token_id = [first[1]]
    target = as_target(model)
    assert answers(target, prompts, count=3)[0].tokens == first[: first.index(first[1]) + 1]
    assert answers(target, prompts, count=3, eos_token_ids=[])[0].tokens == first


def test_a_sample_depends_on_its_number_and_the_seed_alone(tiny_llama, prompts):
    target = as_target(tiny_llama())
    eos = [5, 17, 40]
    base = answers(target, prompts, sampling=SAMPLED, eos_token_ids=eos, batch_size=4, seed=7)
    order = [4, 8, 0, 2, 6, 1, 7, 3, 5]
    for batch_size in (1, 3, 9):
        shuffled = [prompts[i] for i in order]
        found = answers(
            target, shuffled, sampling=SAMPLED, eos_token_ids=eos, batch_size=batch_size, seed=7, indices=order
        )
        assert {i: row.tokens for i, row in found.items()} == {i: row.tokens for i, row in base.items()}
    alone = answers(target, [prompts[6]], sampling=SAMPLED, eos_token_ids=eos, seed=7, indices=[6])
    assert alone[6].tokens == base[6].tokens
    longer = answers(target, prompts, count=20, sampling=SAMPLED, eos_token_ids=eos, batch_size=4, seed=7)
    assert all(longer[i].tokens[:12] == row.tokens for i, row in base.items())
    other = answers(target, prompts, sampling=SAMPLED, eos_token_ids=eos, batch_size=4, seed=8)
    assert sum(other[i].tokens == base[i].tokens for i in base) < len(base) / 2


def test_rows_that_are_drawn_a_few_at_a_time_get_the_same_tokens(tiny_llama, prompts, monkeypatch):
    target = as_target(tiny_llama())
    expected = answers(target, prompts, sampling=SAMPLED, seed=3)
    for at_once in (1, 2 * target.vocab_size, 3 * target.vocab_size + 1):
        monkeypatch.setattr(batched, "_LOGITS_AT_ONCE", at_once)
        found = answers(target, prompts, sampling=SAMPLED, seed=3)
        assert {i: row.tokens for i, row in found.items()} == {i: row.tokens for i, row in expected.items()}


@pytest.mark.parametrize("settings", [Sampling(1.0), Sampling(0.7, top_k=4, top_p=0.9)])
def test_samples_have_the_targets_joint_distribution(settings, tiny_llama, reference):
    """2,000 prompts in 64 slots that are refilled all the time, against exact enumeration."""
    target = as_target(tiny_llama(vocab_size=6, layers=1, seed=5))
    prompt = [1, 4, 2]
    exact = reference.joint_distribution(target.model, prompt, 3, settings)
    rows = answers(target, [prompt] * 2000, count=3, sampling=settings, batch_size=64)
    reference.check_joint([row.tokens for row in rows.values()], exact)


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_hidden_states_are_those_that_the_tokens_were_predicted_from(family, prompts, request):
    target = as_target(request.getfixturevalue(family)(layers=3))
    found = answers(target, prompts, keep_hidden=True, batch_size=3, sampling=SAMPLED, eos_token_ids=[5, 17, 40])
    for i, row in found.items():
        ids = torch.tensor([prompts[i] + row.tokens])
        expected = target.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        torch.testing.assert_close(row.hidden, expected[0, len(prompts[i]) - 1 : -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_states_are_those_of_every_position_but_the_last(family, prompts, request):
    """In slots that are refilled, with the hidden states of the answers beside them or without."""
    target = as_target(request.getfixturevalue(family)(layers=3))
    asked = {"batch_size": 3, "sampling": SAMPLED, "eos_token_ids": [5, 17, 40], "keep_states": (0, 2, 3)}
    found, both = answers(target, prompts, **asked), answers(target, prompts, keep_hidden=True, **asked)
    for i, row in found.items():
        ids = torch.tensor([prompts[i] + row.tokens])
        expected = target.model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        assert set(row.states) == {0, 2, 3}
        for layer, states in row.states.items():
            torch.testing.assert_close(states, expected[layer][0, :-1], rtol=1e-4, atol=1e-4)
        assert row.hidden is None
        torch.testing.assert_close(both[i].hidden, row.states[3][len(prompts[i]) - 1 :], rtol=1e-4, atol=1e-4)


BEGINNING = 11  # tokens, past the windows of 8
SETS = {  # lengths of what follows the shared beginning
    "prompts": (9, 1, 6, 14, 3, 2, 11, 5, 7),
    "one prompt": (4,),
    "nothing but the beginning and a token": (1, 1, 1),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", SETS.values(), ids=SETS.keys())
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_a_shared_beginning_read_once_changes_nothing(family, lengths, batch_size, reference, request, monkeypatch):
    target = as_target(request.getfixturevalue(family)(layers=3))
    beginning = reference.prompt_of(BEGINNING, seed=1)
    # From different first tokens on, lest more is shared; the last prompt is there twice.
    prompts = [[*beginning, n, *reference.prompt_of(length - 1, seed=n)] for n, length in enumerate(lengths)]
    prompts.append(prompts[-1])
    fed = []
    prefill = CachedLM.prefill
    monkeypatch.setattr(
        CachedLM, "prefill", lambda lm, ids, *rest: (fed.append(tuple(ids.shape)), prefill(lm, ids, *rest))[1]
    )
    asked = {"batch_size": batch_size, "eos_token_ids": [5, 17, 40], "keep_hidden": True, "keep_states": (0, 2, 3)}
    found = answers(target, prompts, **asked)
    shared = BEGINNING if len(lengths) > 1 else len(prompts[0]) - 1
    assert fed[0] == (1, shared)
    assert sum(rows for rows, _ in fed[1:]) == len(prompts)
    assert max(width for _, width in fed[1:]) == max(map(len, prompts)) - 1 - shared
    with monkeypatch.context() as patch:
        patch.setattr(batched, "_num_shared", lambda prompts: 0)
        expected = answers(target, prompts, **asked)
    for i, row in expected.items():
        assert (found[i].tokens, found[i].ended) == (row.tokens, row.ended)
        torch.testing.assert_close(found[i].hidden, row.hidden, rtol=1e-4, atol=2e-5)
        assert set(found[i].states) == {0, 2, 3}
        for layer, states in row.states.items():
            assert len(states) == len(prompts[i]) + len(row.tokens) - 1
            torch.testing.assert_close(found[i].states[layer], states, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        ([], 0),
        ([[7]], 0),
        ([[7, 8, 9]], 2),
        ([[7, 8, 9], [7, 8, 9]], 2),
        ([[7, 8, 9], (7, 8, 4, 5)], 2),
        ([[7, 8], [7, 8, 9, 10]], 1),  # the shorter one's last token is fed by the first step
        ([[7, 8, 9], [6, 8, 9]], 0),
        ([[7, 8, 9], [7], [7, 8, 9]], 0),
    ],
)
def test_what_all_prompts_begin_with_leaves_a_token_of_each(prompts, shared):
    assert batched._num_shared(prompts) == shared


def test_prompts_read_together_are_of_similar_length():
    """A new pass begins where padding would cost more than the pass itself: 64 tokens on a CPU."""
    lengths = [30, 3, 10, 2, 31, 100, 9, 30, 0]
    cpu, gpu = (batched._of_similar_length(lengths, torch.device(name)) for name in ("cpu", "cuda"))
    assert cpu == [[8, 3, 1, 6, 2], [0, 7, 4], [5]]
    assert gpu == [[8, 3, 1, 6, 2, 0, 7, 4, 5]]
    for group in cpu:
        assert sum(lengths[group[-1]] - lengths[i] for i in group) <= 64
    assert batched._of_similar_length([7] * 100, torch.device("cpu")) == [list(range(100))]


@pytest.mark.parametrize("at_once", [0, 20, 10**6])
def test_answers_and_states_do_not_depend_on_which_prompts_are_read_together(
    at_once, tiny_gemma3, prompts, monkeypatch
):
    target = as_target(tiny_gemma3(layers=3))
    asked = {"batch_size": 4, "sampling": SAMPLED, "eos_token_ids": [5, 17, 40], "keep_states": (0, 3)}
    expected = answers(target, prompts, **asked)
    monkeypatch.setitem(batched._PASS_IN_TOKENS, "cpu", at_once)
    for i, row in answers(target, prompts, **asked).items():
        assert row.tokens == expected[i].tokens
        for layer, states in row.states.items():
            torch.testing.assert_close(states, expected[i].states[layer], rtol=1e-4, atol=2e-5)


def test_a_draft_model_writes_with_the_ids_that_it_scores(tiny_llama, prompts):
    model, kept = tiny_llama(), torch.arange(0, 64, 5)
    found = answers(cut_vocabulary(model, kept), prompts, batch_size=4)
    for i, row in found.items():
        tokens = list(prompts[i])
        for _ in range(12):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(kept[logits[kept].argmax()]))
        assert row.tokens == tokens[len(prompts[i]) :]
        assert not row.ended


def test_no_prompts_no_answers(tiny_llama):
    assert answers(as_target(tiny_llama()), []) == {}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_prompt_may_have_a_limit_of_its_own(sampling, tiny_llama, prompts):
    """Each answer is the long one, cut: neighbours and their limits change nothing."""
    target = as_target(tiny_llama())
    whole = answers(target, prompts, sampling=sampling, batch_size=3)
    limits = [1 + 5 * i % 12 for i in range(len(prompts))]
    found = answers(target, prompts, count=limits, sampling=sampling, batch_size=3)
    for i, limit in enumerate(limits):
        assert found[i].tokens == whole[i].tokens[:limit]
