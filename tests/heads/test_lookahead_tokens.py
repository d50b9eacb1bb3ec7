"""Look-ahead embeddings: guesses that ride along in the verification pass, and embeddings trained for them alone."""

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.data.chats import Encoded
from draftsmith.data.packing import pack
from draftsmith.decode.costs import measure_costs
from draftsmith.decode.draft import Drafter
from draftsmith.decode.loop import plain_generate
from draftsmith.decode.sampling import Sampling
from draftsmith.distill.batch import distill_batch
from draftsmith.distill.mixture import parse_mixture
from draftsmith.errors import BadInput
from draftsmith.eval.alpha import Answer, teacher_forced
from draftsmith.heads import load_drafter
from draftsmith.heads.lookahead_objective import LookaheadObjective
from draftsmith.heads.lookahead_pass import context_pass, lookahead_pass
from draftsmith.heads.lookahead_tokens import LookaheadEmbeddings, LookaheadTokens, save_lookahead_tokens
from draftsmith.models.head import split
from draftsmith.models.target import Target, as_target

FAMILIES = ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]
GREEDY = Sampling(0.0)


def looking_ahead(model, num_tokens=3, seed=0):
    torch.manual_seed(seed)
    target = as_target(model)
    return LookaheadTokens(LookaheadEmbeddings(target, num_tokens), target)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_plain_greedy_output(family, request, checks):
    """Past sliding windows, alone and in a ragged batch."""
    model = request.getfixturevalue(family)(layers=3, seed=1)
    drafter = looking_ahead(model)
    assert isinstance(drafter, Drafter)
    stats = checks.check_greedy(as_target(model), drafter, [9, 1, 6], new=16, num_speculative_tokens=3)
    assert stats.drafted > 0


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}], ids=["T=1", "top-p"])
@pytest.mark.parametrize("length", [2, "confidence:threshold=0.3,most=2"], ids=["fixed", "confidence"])
def test_sampled_output_has_the_targets_joint_distribution(settings, length, tiny_llama, checks):
    target = as_target(tiny_llama(vocab_size=6, layers=1, seed=5))
    checks.check_sampled(target, looking_ahead(target.model, 2), {**settings, "num_speculative_tokens": length})


def ahead_by_hand(model, ids, embeddings):
    """Last hidden states at embeddings behind the last of `ids`, in a pass without a cache."""
    known = model.get_input_embeddings()(torch.tensor([ids]))
    both = torch.cat([known, embeddings[None].to(known.dtype)], 1)
    return split(model)[0](inputs_embeds=both, use_cache=False).last_hidden_state[0, len(ids) :]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_embeddings_see_what_stands_before_them_and_nothing_else(family, request):
    """Two documents in a row and a padded one: behind every token as if the text ended there."""
    model = request.getfixturevalue(family)(layers=3, seed=1)
    documents = [list(range(3, 15)), list(range(20, 30)), list(range(40, 47))]
    ids = torch.tensor([documents[0] + documents[1], documents[2] + [0] * 15])
    positions = torch.tensor([[*range(12), *range(10)], [*range(7), *range(15)]])
    segments = torch.tensor([[0] * 12 + [1] * 10, [2] * 7 + [-1] * 15])
    embeddings = looking_ahead(model).embeddings()
    context = context_pass(split(model)[0], model, ids, positions, segments)
    anchors = torch.tensor([[11, 4, 15, 21], [0, 6, 3, 6]])
    found = lookahead_pass(context, anchors, embeddings)
    for row, column, document, length in [
        (0, 0, 0, 12),
        (0, 1, 0, 5),
        (0, 2, 1, 4),
        (0, 3, 1, 10),
        (1, 0, 2, 1),
        (1, 2, 2, 4),
    ]:
        expected = ahead_by_hand(model, documents[document][:length], embeddings)
        torch.testing.assert_close(found[row, column], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3", "tiny_gpt2"])
@torch.no_grad()
def test_drafts_are_what_the_target_says_at_the_embeddings(family, request):
    """In every step, for every row: computed from the text so far without a cache."""
    model = request.getfixturevalue(family)(layers=3, seed=1)
    drafter: Any = looking_ahead(model)
    embeddings, head = drafter.embeddings(), split(model)[1]
    drafts = []
    propose = drafter.propose
    drafter.propose = lambda *args: (drafts.append(propose(*args)), drafts[-1])[1]
    prompts = [[5, 9, 2, 7], [3], [8, 8, 1]]
    ids, mask = torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, 4, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), 1
    out = speculative_generate(model, drafter, ids, mask, max_new_tokens=14, num_speculative_tokens=3, eos_token_id=[])
    assert drafts[0].tokens.shape[1] == 0
    for row, prompt in enumerate(prompts):
        text, starts = out.tokens[row].tolist(), out.stats.rows[row].step_starts
        assert starts[0] == 1  # the first step only feeds embeddings
        for draft, start in zip(drafts[1:], starts, strict=False):
            before = text[: len(prompt) + start - 1]  # without the newest token
            expected = head(ahead_by_hand(model, before, embeddings)).argmax(-1)
            assert draft.tokens[row].tolist() == expected.tolist()[: draft.tokens.shape[1]]


def test_decoding_accepts_what_teacher_forcing_predicts(tiny_gemma3):
    target = as_target(tiny_gemma3(layers=3, seed=1))
    drafter = looking_ahead(target.model)
    prompt = [5, 9, 2, 7]
    out = speculative_generate(
        target, drafter, torch.tensor([prompt]), max_new_tokens=30, num_speculative_tokens=3, eos_token_id=[]
    )
    (scores,) = teacher_forced(target, drafter, [Answer(prompt, out.tokens[0, 4:34].tolist())], GREEDY)
    row = out.stats.rows[0]
    assert int(scores.agreement[row.step_starts].sum()) == row.accepted_at[0]


def test_training_teaches_copying_and_decoding_gets_what_training_measured(copying, checks):
    """Each embedding copies what stands a period before its own guess; none is a copy of another."""
    target = copying.target
    before = checks.fingerprint(target.model)
    torch.manual_seed(0)
    embeddings = LookaheadEmbeddings(target, 3)
    objective = LookaheadObjective(embeddings, target, parse_mixture("forward_kl"), GREEDY, share=0.5, decay=0.8)
    assert [name for name, _ in objective.named_parameters()] == ["embeddings.raw"]
    batches = (copying.batch(16, 20, seed=1000 + i) for i in range(1000))
    metrics = checks.train_steps(objective, batches, steps=100, learning_rate=3e-2)
    for i in range(3):
        assert metrics[f"heads/{i}/top1"] > 0.99
        assert metrics[f"heads/{i}/top5"] >= metrics[f"heads/{i}/top1"]
    assert metrics["block_efficiency"] > 3.9
    assert metrics["alpha"] > 0.8
    out = speculative_generate(
        target,
        LookaheadTokens(embeddings, target),
        copying.rows(8, 2 * copying.period, seed=7),
        max_new_tokens=24,
        num_speculative_tokens=3,
        eos_token_id=[],
    )
    assert out.stats.accepted / out.stats.drafted > 0.97
    assert checks.fingerprint(target.model) == before


def test_training_metrics_are_the_decoders_acceptance(tiny_llama, checks):
    """From every place where a training text could be gone on with, a step that feeds the embeddings and one that drafts:
    as many tokens are accepted as counted.
    """
    target = as_target(tiny_llama(vocab_size=24, layers=2, seed=3))
    drafter = looking_ahead(target.model)
    objective = LookaheadObjective(
        drafter.embeddings, target, parse_mixture("forward_kl"), GREEDY, share=1.0, decay=0.8
    )
    prompt, new = 5, 20
    ids = torch.randint(24, (12, prompt), generator=torch.Generator().manual_seed(0))
    texts = plain_generate(target, ids, max_new_tokens=new, eos_token_id=[]).tokens.tolist()
    examples = [Encoded(text, [False] * prompt + [True] * new) for text in texts]
    batch = distill_batch(pack(examples, 50), torch.device("cpu"))
    measured = checks.train_steps(objective, itertools.repeat(batch), 40, 3e-2)
    starts = range(prompt, prompt + new - 1)
    rows = checks.accepted_from(target, drafter, [text[:n] for text in texts for n in starts], 3, steps=2)
    first, whole = ([row for i, row in enumerate(rows) if i % len(starts) <= len(starts) - most] for most in (1, 3))
    assert measured["heads/0/top1"] == pytest.approx(sum(n > 0 for n in first) / len(first), abs=1e-6)
    assert measured["block_efficiency"] == pytest.approx(1 + sum(whole) / len(whole), abs=1e-6)
    assert 1.1 < measured["block_efficiency"] < 3.8, "the comparison must have something to compare"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_its_embeddings_alone(family, request, checks):
    target = as_target(request.getfixturevalue(family)(vocab_size=24, layers=2, tie_word_embeddings=False))
    before = checks.fingerprint(target.model)
    torch.manual_seed(0)
    embeddings = LookaheadEmbeddings(target, 2)
    objective = LookaheadObjective(
        embeddings, target, parse_mixture({"forward_kl": 0.5, "cross_entropy": 0.5}), GREEDY, share=1.0, decay=0.8
    )
    batch = request.getfixturevalue("copying").batch(3, 12, seed=3)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=3e-2)
    losses = []
    for _ in range(8):
        sums = objective(batch)
        losses.append(float(sums.loss_sum.detach()))
        sums.loss_sum.backward()
        assert embeddings.raw.grad is not None
        assert float(embeddings.raw.grad.abs().sum(1).min()) > 0
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert checks.fingerprint(target.model) == before


def test_the_loss_is_that_of_a_pass_behind_every_token(copying):
    """With all tokens as anchors the sums are exact: label by label by hand, at each embedding's own weight."""
    target = copying.target
    torch.manual_seed(0)
    embeddings = LookaheadEmbeddings(target, 2)
    objective = LookaheadObjective(embeddings, target, parse_mixture("cross_entropy"), GREEDY, share=1.0, decay=0.5)
    batch = copying.batch(2, 9, seed=3)
    head = split(target.model)[1]
    expected = 0.0
    for row in batch.input_ids.tolist():
        for anchor in range(copying.period - 1, 9):
            ahead = head(ahead_by_hand(target.model, row[: anchor + 1], embeddings())).log_softmax(-1)
            for i in range(2):
                if anchor + i + 2 < 9:
                    expected = expected - 0.5**i * ahead[i, row[anchor + i + 2]]
    torch.testing.assert_close(objective(batch).loss_sum, expected, atol=1e-3, rtol=1e-4)


def test_a_share_of_the_tokens_estimates_the_same_loss(copying):
    target = copying.target
    torch.manual_seed(0)
    embeddings = LookaheadEmbeddings(target, 2)
    batch = copying.batch(4, 20, seed=3)
    made = {
        share: LookaheadObjective(embeddings, target, parse_mixture("forward_kl"), GREEDY, share, 0.8)
        for share in (0.3, 1.0)
    }
    with torch.no_grad():
        exact = float(made[1.0](batch).loss_sum)
        estimates = [float(made[0.3](batch).loss_sum) for _ in range(40)]
    assert abs(sum(estimates) / len(estimates) - exact) < 0.1 * exact
    assert min(estimates) < exact < max(estimates)


def test_rows_of_unequal_length_count_as_they_should(tiny_llama):
    """A row with few labels has most of its tokens taken where a row with many has few: each is scaled by its own share."""
    target = as_target(tiny_llama(vocab_size=24, layers=2, seed=3))
    torch.manual_seed(0)
    embeddings = LookaheadEmbeddings(target, 2)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(24, (length,), generator=generator).tolist() for length in (40, 6)]
    examples = [Encoded(row, [False] + [True] * (len(row) - 1)) for row in rows]
    batch = distill_batch(pack(examples, 40, packing=False), torch.device("cpu"))
    assert len(batch.input_ids) == 2
    exact, estimated = (
        LookaheadObjective(embeddings, target, parse_mixture("cross_entropy"), GREEDY, share, 0.8)
        for share in (1.0, 0.25)
    )
    anchors, scale = estimated._anchors(estimated._following(batch))
    able = (estimated._following(batch) > 0).sum(1)
    torch.testing.assert_close(scale * (estimated._following(batch).gather(1, anchors) > 0).sum(1), able.float())
    weights = batch.weights.clone()
    with torch.no_grad():
        for row in range(2):  # one row's labels at a time
            inside = (batch.predictors // 40 == row).float()
            one = dataclasses.replace(batch, weights=weights * inside)
            estimates = torch.tensor([float(estimated(one).loss_sum) for _ in range(60)])
            error = float(estimates.std()) / 60**0.5
            assert abs(float(estimates.mean()) - float(exact(one).loss_sum)) < 4 * error + 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_embeddings_come_back(dtype, tiny_llama, tmp_path):
    target = Target(tiny_llama(layers=2, seed=1).to(dtype), None, "the/target", ())
    drafter = looking_ahead(target.model)
    save_lookahead_tokens(drafter.embeddings, target, tmp_path / "ahead")
    loaded = load_drafter(tmp_path / "ahead", target)
    assert isinstance(loaded, LookaheadTokens)
    exact: dict[str, Any] = {"atol": 0.0, "rtol": 1e-6 if dtype == torch.float32 else 8e-3}
    torch.testing.assert_close(loaded.embeddings(), drafter.embeddings(), **exact)
    assert json.loads((tmp_path / "ahead" / "draftsmith.json").read_text())["kind"] == "lookahead_tokens"
    with pytest.raises(BadInput, match=r"made for the target the/target, and the weights of .* are others"):
        load_drafter(tmp_path / "ahead", tiny_llama(layers=2, seed=9))


def test_embeddings_begin_in_the_targets_own_units(tiny_gemma3, tiny_llama):
    for model in (tiny_gemma3(), tiny_llama()):
        drafter = looking_ahead(model)
        known = model.get_input_embeddings()(torch.arange(64))
        ahead = drafter.embeddings().detach()
        assert 0.01 < float(ahead.square().mean().sqrt() / known.square().mean().sqrt()) < 1.0
        assert not torch.equal(ahead[0], ahead[1])


def test_what_it_costs_is_in_the_verification_pass(tiny_llama):
    model = tiny_llama(layers=2)
    drafter = looking_ahead(model, 3)
    assert [drafter.num_companions(n) for n in (0, 2, 3, 5)] == [3, 9, 12, 12]
    assert drafter.num_passes(3) == 0
    assert drafter.num_parameters_read == 3 * 32
    widths = set()
    model.model.layers[0].register_forward_pre_hook(lambda _, args: widths.add(args[0].shape[1]))
    measure_costs(as_target(model), drafter, [5, 9, 2, 7, 1, 3], 3, seconds=0.05, min_rounds=1)
    assert widths == {
        5,
        1,
        2 + 6,
        3 + 9,
        4 + 12,
    }  # the prompt, a plain step, drafts of 1, 2 and 3 with their embeddings
