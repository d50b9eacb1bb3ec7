"""Answers that the drafter writes while it is trained, and the buffer that steps draw from."""

import pytest
import torch
from scipy import stats

from draftsmith.data.chats import encode_response
from draftsmith.data.packing import pack
from draftsmith.decode.sampling import Sampling, probabilities
from draftsmith.distill.batch import distill_batch
from draftsmith.distill.rollouts import DrafterAnswers, Rollout, RolloutBuffer, readable_length
from draftsmith.distill.steps import RolloutSteps
from draftsmith.distill.teacher import Teacher
from draftsmith.models.draft_lm import DraftLM, cut_vocabulary
from draftsmith.models.target import Target, as_target

CPU = torch.device("cpu")
FAMILIES = ["tiny_llama", "tiny_qwen3", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]
GREEDY = Sampling(0.0)


def prompts_of(lengths, vocab_size=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def alone(model, ids):
    """Logits of a pass over one unpadded sequence."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def answers(lm, target, sampling=GREEDY, max_new_tokens=12, batch_size=3):
    return DrafterAnswers(lm, target, sampling, max_new_tokens, batch_size)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_student_and_teacher_read_the_positions_of_an_unpadded_pass(family, request):
    """Prompts of unequal length side by side, some past the sliding windows: what the student writes is what it says of the
    text alone, and what the teacher says of its words is what it says of the text alone."""
    make = request.getfixturevalue(family)
    target, lm = as_target(make(layers=3)), DraftLM(make(layers=2, seed=5)).eval()
    prompts = prompts_of((3, 17, 1, 9, 5))
    buffer = RolloutBuffer(
        answers(lm, target), prompts, tokens_per_step=10_000, staleness=0, size=5, replay=False, seed=1
    )
    (batch,) = next(RolloutSteps(None, buffer, length=64, tokens_per_forward=None, device=CPU))
    assert batch.teacher is None, "the target is asked"
    teacher = Teacher(target)
    said = teacher.head(teacher.hidden(batch))
    at = 0
    rollouts = sorted(buffer.rollouts, key=lambda rollout: -len(rollout.encoded.input_ids))
    found = {}
    for row in range(len(batch.input_ids)):
        for segment in range(int(batch.segment_ids[row].max()) + 1):
            inside = batch.segment_ids[row] == segment
            ids = batch.input_ids[row][inside].tolist()
            assert batch.position_ids[row][inside].tolist() == list(range(len(ids)))
            labels = int(batch.loss_mask[row][inside].sum())
            found[tuple(ids)] = said[at : at + labels]
            at += labels
    assert set(found) == {tuple(rollout.encoded.input_ids) for rollout in rollouts}
    for ids, logits in found.items():
        predictors = slice(len(ids) - len(logits) - 1, len(ids) - 1)
        assert alone(lm.model, ids)[predictors].argmax(-1).tolist() == list(ids[-len(logits) :])
        torch.testing.assert_close(logits, alone(target.model, ids)[predictors], rtol=1e-4, atol=1e-4)


def test_exactly_what_the_drafter_wrote_is_supervised_its_end_included(tiny_llama):
    model = as_target(tiny_llama(layers=3)).model
    target, lm = Target(model, None, "tiny", (7, 11, 13, 40, 41, 42)), DraftLM(tiny_llama(layers=2, seed=5))
    prompts = prompts_of((4, 9, 2, 6, 3, 8, 5))
    made = answers(lm, target, Sampling(1.0), max_new_tokens=20)(prompts, seed=3, step=6)
    ends = 0
    for prompt, rollout in zip(prompts, made, strict=True):
        ids, mask = rollout.encoded.input_ids, rollout.encoded.loss_mask
        written = ids[len(prompt) :]
        assert ids[: len(prompt)] == prompt
        assert mask == [False] * len(prompt) + [True] * len(written)
        assert not set(written[:-1]) & set(target.eos_token_ids)
        assert len(written) == 20 or written[-1] in target.eos_token_ids
        ends += written[-1] in target.eos_token_ids
        assert (rollout.hidden, rollout.born) == (None, 6)
    assert ends > 2
    again = answers(lm, target, Sampling(1.0), max_new_tokens=20, batch_size=7)(prompts, seed=3, step=6)
    assert made == again, "whoever is beside it"
    assert made != answers(lm, target, Sampling(1.0), max_new_tokens=20)(prompts, seed=4, step=6)


@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(1.3, top_k=6)])
@torch.no_grad()
def test_answers_are_drawn_from_the_drafter_s_own_distribution(sampling, tiny_llama):
    """The first two tokens after two prompts, tested against passes over the text alone."""
    target, lm = as_target(tiny_llama(layers=3)), DraftLM(tiny_llama(layers=1, seed=5))
    kept = torch.arange(0, 64, 3)
    for drafter, ids in ((lm, torch.arange(64)), (cut_vocabulary(lm.model, kept), kept)):
        for prompt in prompts_of((3, 8)):
            made = answers(drafter, target, sampling, 2, batch_size=500)([prompt] * 1500, seed=1, step=0)
            pairs = torch.tensor([rollout.encoded.input_ids[len(prompt) :] for rollout in made])
            first = probabilities(alone(drafter.model, prompt)[-1:], sampling)[0]
            _assert_drawn(pairs[:, 0], ids, first)
            common = int(pairs[:, 0].mode().values)
            second = probabilities(alone(drafter.model, [*prompt, common])[-1:], sampling)[0]
            _assert_drawn(pairs[pairs[:, 0] == common, 1], ids, second)


def _assert_drawn(tokens, ids, expected):
    """A chi-square test; ids that are rare are counted together."""
    counts = torch.stack([(tokens == i).sum() for i in ids]).double()
    assert counts.sum() == len(tokens), "only ids that it scores"
    assert not counts[expected == 0].any()
    expected = expected.double() * len(tokens)
    rare = expected < 5
    found = [*counts[~rare].tolist(), counts[rare].sum().item()]
    wanted = [*expected[~rare].tolist(), expected[rare].sum().item()]
    if wanted[-1] == 0:
        found, wanted = found[:-1], wanted[:-1]
    scale = sum(found) / sum(wanted)
    assert stats.chisquare(found, [value * scale for value in wanted]).pvalue > 1e-4


@pytest.mark.parametrize(("target_limit", "own_limit"), [(24, 512), (512, 24)])
def test_answers_end_where_the_shorter_context_does(target_limit, own_limit, tiny_gpt2):
    """Learned positions: there is nothing to look up beyond the last one."""
    target = as_target(tiny_gpt2(layers=2, n_positions=target_limit))
    lm = DraftLM(tiny_gpt2(layers=1, seed=5, n_positions=own_limit))
    assert readable_length(target, lm) == 24
    prompts = prompts_of((10, 20, 23, 4))
    made = answers(lm, target, Sampling(1.0), max_new_tokens=16)(prompts, seed=0, step=0)
    assert [len(rollout.encoded.input_ids) for rollout in made] == [24, 24, 24, 20]
    batch = distill_batch(pack([rollout.encoded for rollout in made], 30), CPU)
    assert len(Teacher(target).hidden(batch)) == 14 + 4 + 1 + 16
    lm.model(input_ids=batch.input_ids, position_ids=batch.position_ids)


def test_answering_leaves_modes_and_weights_as_they_were(tiny_llama):
    target, lm = as_target(tiny_llama(layers=2)), DraftLM(tiny_llama(layers=1, seed=5))
    before = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    for training in (True, False):
        lm.train(training)
        answers(lm, target)(prompts_of((3, 4)), seed=0, step=0)
        assert all(module.training == training for module in lm.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in lm.state_dict().items())
    assert not any("forward" in module.__dict__ for module in lm.modules())


class Echo:
    """A source that repeats the prompt's first token as an answer of some length, and notes what it was asked."""

    def __init__(self, length=lambda prompt: 6):
        self.length, self.calls = length, []

    def __call__(self, prompts, seed, step):
        self.calls.append((step, seed, [prompt[0] for prompt in prompts]))
        return [
            Rollout(encode_response(prompt + [prompt[0]] * self.length(prompt), len(prompt)), None, step)
            for prompt in prompts
        ]


def buffer_of(source, number=30, **settings):
    prompts = [[i] * (1 + i % 5) for i in range(number)]
    known = {"tokens_per_step": 40, "staleness": 0, "size": 1000, "replay": False, "seed": 4, "answer_length": 6}
    return RolloutBuffer(source, prompts, **{**known, **settings})


def numbers(rollouts):
    return [rollout.encoded.input_ids[0] for rollout in rollouts]


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("replay", [False, True])
def test_rollouts_are_made_anew_when_they_are_too_old(staleness, replay):
    source = Echo()
    buffer = buffer_of(source, staleness=staleness, replay=replay, size=20 if replay else 1000)
    ages = [step - min(rollout.born for rollout in buffer.take(step)) for step in range(20)]
    assert [step for step, _, _ in source.calls] == list(range(0, 20, staleness + 1))
    assert len({seed for _, seed, _ in source.calls}) == len(source.calls)
    if replay:
        assert max(ages) > staleness, "older ones are drawn again"
    else:
        assert max(ages) == staleness


@pytest.mark.parametrize("staleness", [0, 3])
def test_each_rollout_is_used_once_and_steps_have_the_tokens_asked_for(staleness):
    """Answers turn out longer than expected, then shorter: the steps between two refills share what was made."""
    lengths = iter([6] * 200 + [14] * 400 + [3] * 4000)
    buffer = buffer_of(Echo(lambda prompt: next(lengths)), number=500, staleness=staleness)
    tokens, seen = [], []
    for step in range(80):
        taken = buffer.take(step)
        seen += [(rollout.born, number) for rollout, number in zip(taken, numbers(taken), strict=True)]
        tokens.append(sum(len(rollout.encoded.input_ids) for rollout in taken))
    assert len(seen) == len(set(seen))
    assert sum(tokens) / len(tokens) == pytest.approx(40, rel=0.03)


def test_prompts_are_taken_in_a_new_order_in_every_pass():
    source = Echo()
    buffer = buffer_of(source)
    for step in range(40):
        buffer.take(step)
    asked = [number for _, _, some in source.calls for number in some]
    passes = [asked[i : i + 30] for i in range(0, len(asked) - 29, 30)]
    assert len(passes) >= 4
    assert all(sorted(one) == list(range(30)) for one in passes)
    assert len({tuple(one) for one in passes}) == len(passes)


@pytest.mark.parametrize("replay", [False, True])
def test_the_buffer_is_bounded(replay):
    buffer = buffer_of(Echo(), staleness=3, size=7, replay=replay, tokens_per_step=400)
    for step in range(12):
        assert buffer.take(step)
        assert len(buffer.rollouts) <= 7
    if replay:
        assert {rollout.born for rollout in buffer.rollouts} == {8}, "the newest stay"


def test_one_long_answer_is_a_step_of_its_own():
    buffer = buffer_of(Echo(lambda prompt: 500), answer_length=500)
    assert [len(buffer.take(step)) for step in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("after", [1, 4, 5])
def test_a_buffer_that_is_put_away_goes_on_as_if_it_had_not_been(replay, after, tmp_path):
    def made():
        return buffer_of(Echo(lambda prompt: 3 + prompt[0] % 7), staleness=2, size=12, replay=replay)

    whole, first, second = made(), made(), made()
    expected = [whole.take(step) for step in range(12)]
    assert [first.take(step) for step in range(after)] == expected[:after]
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [second.take(step) for step in range(after, 12)] == expected[after:]


def test_a_step_s_rollouts_are_read_in_passes_of_bounded_size():
    steps = RolloutSteps(None, buffer_of(Echo(), tokens_per_step=100), length=16, tokens_per_forward=30, device=CPU)
    batches = next(steps)
    assert len(batches) >= 3
    assert all(batch.tokens <= 30 for batch in batches)
    whole = RolloutSteps(None, buffer_of(Echo(), tokens_per_step=100), length=16, tokens_per_forward=None, device=CPU)
    (batch,) = next(whole)
    assert batch.tokens == sum(one.tokens for one in batches)
