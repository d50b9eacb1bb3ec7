"""Layer skipping: the target without some of its blocks drafts, stops by itself, and is searched for."""

import json
from typing import Any

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.data.chats import Encoded
from draftsmith.data.encoded_set import EncodedSet
from draftsmith.decode.sampling import Sampling
from draftsmith.errors import BadInput
from draftsmith.eval.alpha import Answer, teacher_forced
from draftsmith.heads import load_drafter
from draftsmith.heads.calibration import Calibration, chances, tokens_a_pass
from draftsmith.heads.layer_skip import AdaptiveExit, LayerSkip, Skipped, save_layer_skip
from draftsmith.heads.layer_skip_search import LayerSkipSearch
from draftsmith.models.target import Target, as_target
from draftsmith.recipe import DraftExitSection, LayerSkipDrafter

FAMILIES = ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]
SKIPPED = Skipped(attention=(1, 2), mlp=(2,))
GREEDY = Sampling(0.0)


def skipping(model, skipped=SKIPPED, **exit_) -> Any:
    return LayerSkip(as_target(model), skipped, AdaptiveExit(DraftExitSection(**exit_)))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_plain_greedy_output(family, request, checks):
    """Chains that stop by themselves, past sliding windows, alone and in a ragged batch."""
    model = request.getfixturevalue(family)(layers=4, seed=1)
    drafter = skipping(model, threshold=0.2)
    stats = checks.check_greedy(as_target(model), drafter, [9, 1, 6], new=14, num_speculative_tokens=4)
    assert stats.accepted > 0
    assert stats.accepted < stats.drafted or family == "tiny_gemma3"


def test_trees_and_chains_of_a_fixed_length_are_lossless_too(tiny_llama, checks):
    target = as_target(tiny_llama(layers=4, seed=1))
    drafter = LayerSkip(target, SKIPPED, None)
    assert checks.check_greedy(target, drafter, [5, 3], new=14, tree=[2, 1]).accepted > 0
    assert checks.check_greedy(target, drafter, [5, 3], new=14, num_speculative_tokens=3).accepted > 0
    adaptive = skipping(target.model)
    stats = checks.check_greedy(
        target, adaptive, [5, 3], new=14, num_speculative_tokens="confidence:threshold=0.0,most=3"
    )
    assert max(len(row.drafted_at) for row in stats.rows) == 3  # the given threshold replaces its own


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 4}], ids=["T=1", "top-k"])
def test_sampled_output_has_the_targets_joint_distribution(settings, tiny_llama, checks):
    """A threshold in the middle of the drafter's probabilities: whether a token is the last one depends on the token."""
    target = as_target(tiny_llama(vocab_size=6, layers=2, seed=5))
    drafter = skipping(target.model, Skipped((0,), (1,)), threshold=0.3, step=0.3, threshold_memory=0.0)
    checks.check_sampled(target, drafter, {**settings, "num_speculative_tokens": 2})


def test_a_rows_draft_does_not_depend_on_its_neighbours(tiny_llama, checks):
    """Thresholds are the rows' own."""
    target = as_target(tiny_llama(layers=4, seed=1))
    settings = {"max_new_tokens": 20, "temperature": 1.0, "eos_token_id": [], "num_speculative_tokens": 4}
    ids, mask = checks.ragged([6, 3])
    together = speculative_generate(target, skipping(target.model), ids, mask, seed=[7, 8], **settings)
    alone = speculative_generate(target, skipping(target.model), ids[1:, 3:], seed=[8], **settings)
    assert alone.tokens[0].tolist() == together.tokens[1, : 3 + 20].tolist()
    assert alone.stats.rows[0] == together.stats.rows[1]


def test_thresholds_follow_what_was_verified_not_what_a_neighbours_length_drafted(tiny_llama, checks):
    """A policy allows a row less than the others, or nothing: what was drafted for it all the same was not rejected."""
    target = as_target(tiny_llama(layers=4, seed=1))
    ids, mask = checks.ragged([6, 3])
    settings = {"max_new_tokens": 15, "eos_token_id": []}
    exits = []
    for rows, pattern in ((slice(None), [[4, 1], [4, 0], [3, 2]]), (slice(1, None), [[1], [0], [2]])):
        drafter = skipping(target.model, threshold=0.3, threshold_memory=0.0)
        policy = checks.Lengths(pattern)
        speculative_generate(target, drafter, ids[rows], mask[rows], num_speculative_tokens=policy, **settings)
        exits.append((float(drafter.exit.rates[-1]), float(drafter.exit.thresholds[-1])))
    assert exits[0] == pytest.approx(exits[1])
    assert exits[0][1] != pytest.approx(0.3), "it has moved"


def test_the_threshold_follows_acceptance():
    """Up while less than wanted is accepted, down while more is, as computed by hand; rows that drafted nothing stay."""
    options = DraftExitSection(threshold=0.5, target_acceptance=0.8, step=0.1, rate_memory=0.5, threshold_memory=0.75)
    exit_ = AdaptiveExit(options)
    exit_.start(3, torch.device("cpu"))
    exit_.observe(torch.tensor([4, 4, 0]), torch.tensor([1, 4, 0]))
    torch.testing.assert_close(exit_.rates, torch.tensor([0.525, 0.9, 0.8]))
    torch.testing.assert_close(exit_.thresholds, torch.tensor([0.525, 0.475, 0.5]))
    for _ in range(100):
        exit_.observe(torch.tensor([1, 1, 1]), torch.tensor([0, 1, 1]))
    torch.testing.assert_close(exit_.thresholds, torch.tensor([1.0, 0.0, 0.0]))


def test_decoding_tells_the_exit_what_was_accepted(tiny_llama):
    """Acceptance counted from the thresholds' side is what the statistics count."""
    target = as_target(tiny_llama(layers=4, seed=1))
    drafter = skipping(target.model, threshold=0.3)
    heard = []
    observe = drafter.exit.observe
    drafter.exit.observe = lambda drafted, accepted: (heard.append((drafted, accepted)), observe(drafted, accepted))
    out = speculative_generate(
        target, drafter, torch.tensor([[5, 9, 2]] * 2), max_new_tokens=17, num_speculative_tokens=4, eos_token_id=[]
    )
    assert drafter.exit.thresholds.shape == (2,)
    drafted, accepted = (sum(int(pair[i][0]) for pair in heard) for i in (0, 1))
    row = out.stats.rows[0]
    assert (drafted, accepted) == (row.drafted, row.accepted)
    assert row.accepted > 0


def test_it_shares_the_targets_weights_and_leaves_them_alone(tiny_llama, checks):
    model = tiny_llama(layers=4, seed=1)
    before = checks.fingerprint(model)
    drafter = skipping(model)
    own = {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for parameter in drafter.module.parameters()} < own
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[2].mlp
    skipped = 2 * sum(p.numel() for p in attention.parameters()) + sum(p.numel() for p in mlp.parameters())
    skipped += sum(p.numel() for p in model.model.layers[2].parameters() if p.dim() == 1)  # the norms of a whole layer
    assert drafter.num_parameters_read == sum(p.numel() for p in model.parameters()) - skipped
    speculative_generate(model, drafter, torch.tensor([[5, 9, 2]]), max_new_tokens=8, eos_token_id=[])
    assert checks.fingerprint(model) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_drafter_comes_back(dtype, tiny_llama, tmp_path):
    target = Target(tiny_llama(layers=4, seed=1).to(dtype), None, "the/target", ())
    drafter = skipping(target.model, threshold=0.25)
    save_layer_skip(drafter, target, {"trials": 3}, tmp_path / "skip")
    loaded = load_drafter(tmp_path / "skip", target)
    assert isinstance(loaded, LayerSkip)
    assert loaded.skipped == SKIPPED
    assert loaded.exit is not None
    assert loaded.exit.options == DraftExitSection(threshold=0.25)
    assert json.loads((tmp_path / "skip" / "config.json").read_text())["search"] == {"trials": 3}
    with pytest.raises(BadInput, match=r"made for the target the/target with a number of layers of 4, .* has 3"):
        load_drafter(tmp_path / "skip", tiny_llama(layers=3))


@pytest.fixture
def encoded():
    """Some greedy-looking texts; what they say does not matter."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(64, (length,), generator=generator).tolist() for length in (12, 9, 16, 7)]
    return EncodedSet.collect(enumerate(Encoded(text, [i >= 3 for i in range(len(text))]) for text in texts))


def test_expected_tokens_are_counted_within_answers(encoded, tiny_llama):
    calibration = Calibration(as_target(tiny_llama()), encoded, 10_000, GREEDY)
    labels = len(calibration.batch.labels)
    assert labels == encoded.num_supervised
    always, never = torch.ones(labels), torch.zeros(labels)
    assert tokens_a_pass(calibration.batch, always, 3) == [1.0, 2.0, 3.0, 4.0]
    assert tokens_a_pass(calibration.batch, never, 3) == [1.0, 1.0, 1.0, 1.0]
    assert tokens_a_pass(calibration.batch, 0.5 * always, 2) == [1.0, 1.5, 1.75]
    assert int((chances(calibration.batch, always, 3) < 0).sum()) == 3 * len(encoded)  # the last labels of each answer


def test_calibration_expects_what_teacher_forcing_measures(encoded, tiny_llama):
    target = as_target(tiny_llama(layers=4, seed=1))
    drafter = LayerSkip(target, SKIPPED, None)
    answers = [Answer(item.input_ids[:3], item.input_ids[3:]) for item in encoded]
    for sampling in (GREEDY, Sampling(0.8, top_p=0.9)):
        calibration = Calibration(target, encoded, 10_000, sampling)
        view = drafter.skipper.view(*SKIPPED)
        batch = calibration.batch
        states = view.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.masks(view.config, "sdpa", torch.float32),
        ).last_hidden_state
        found = calibration.acceptance(states.flatten(0, 1)[batch.predictors], view.lm_head)
        forced = teacher_forced(target, drafter, answers, sampling)
        expected = [score.agreement if sampling.temperature == 0 else score.alpha for score in forced]
        torch.testing.assert_close(found.mean(), torch.cat(expected).mean())


def a_search(target, encoded, **options) -> Any:
    settings = {"num_speculative_tokens": 3, "finalists": 2, "calibration_prompts": 1, "calibration_new_tokens": 6}
    return LayerSkipSearch(LayerSkipDrafter(**settings, **options), target, encoded, GREEDY, seed=3, seconds=0.02)


def test_the_search_improves_remembers_and_goes_on_where_it_was(encoded, tiny_llama):
    target = as_target(tiny_llama(layers=4, seed=1))
    whole = a_search(target, encoded)
    figures = [whole.trial() for _ in range(12)]
    best = [one["best_expected_speedup"] for one in figures]
    assert best == sorted(best)
    assert best[-1] == max(one["expected_speedup"] for one in figures)
    assert whole.drafter.skipped == whole.best.skipped
    assert len({trial.skipped for trial in whole.trials}) == 12
    stopped = a_search(target, encoded)
    stopped.load_state_dict({"costs": whole.state_dict()["costs"], "trials": []})  # what was measured once
    for _ in range(5):
        stopped.trial()
    resumed = a_search(target, encoded)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    for _ in range(7):
        resumed.trial()
    assert resumed.trials == whole.trials
    found = whole.finish()
    assert found["trials"] == 12
    assert whole.found is found
    assert len(found["finalists"]) == 2
    assert found["tokens_per_second"] == max(one["tokens_per_second"] for one in found["finalists"])
    assert list(whole.drafter.skipped) in [[one["skip_attention"], one["skip_mlp"]] for one in found["finalists"]]


def test_the_search_finds_blocks_that_do_nothing(encoded, tiny_llama):
    """Blocks whose output is zero cost time and change nothing: skipping just them is best, and acceptance stays 1."""
    model = tiny_llama(layers=4, seed=1)
    with torch.no_grad():
        for layer in (1, 2):
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    search = a_search(as_target(model), encoded)
    search.prepare()
    costs = search._ready.costs._replace(whole=1.0, attention=0.1, mlp=0.1, verification=[1.0, 1.05, 1.1, 1.15])
    search._ready = search._ready._replace(costs=costs)  # not what a busy machine measures
    for _ in range(15):
        search.trial()
    best = search.best
    assert best.worth.acceptance == 1.0
    assert {1, 2} <= set(best.skipped.attention)
    assert {1, 2} <= set(best.skipped.mlp)


def test_a_small_search_ends_when_nothing_is_left(encoded, tiny_llama):
    search = a_search(as_target(tiny_llama(layers=1)), encoded)
    for _ in range(20):
        if not search.trial():
            break
    assert search.exhausted
    assert len(search.trials) <= 4  # of one layer's two blocks
