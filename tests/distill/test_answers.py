"""The target writes the data: what is asked, what is dropped, and that it does not depend on interruptions."""

import json
import os
import signal
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftsmith.data.chats import encode_response
from draftsmith.data.encoded_set import EncodedSet
from draftsmith.data.packing import pack
from draftsmith.data.sources import Example
from draftsmith.data.store import Store
from draftsmith.decode import quick
from draftsmith.decode.packed import is_packed, unpack, use_backend
from draftsmith.decode.sampling import Sampling
from draftsmith.distill import answer_rounds, answers, author
from draftsmith.distill.answers import Amount, AnswerSettings, write_answers
from draftsmith.distill.batch import distill_batch
from draftsmith.distill.id_frequencies import expected_counts
from draftsmith.distill.steps import CachedTeacher
from draftsmith.distill.teacher import Teacher, all_hidden
from draftsmith.errors import BadInput
from draftsmith.models.target import load_target
from draftsmith.progress import stage

SETTINGS = AnswerSettings(
    Sampling(0.8), max_new_tokens=16, max_prompt_length=40, max_length=64, batch_size=4, seed=3, keep_hidden=False
)
SELF = Amount(own_prompts=24)


@pytest.fixture(scope="module")
def target(chat_folder):
    return load_target(str(chat_folder / "model"))


def user(*turns, system=None, name=0):
    messages = [{"role": "user", "content": turn} for turn in turns]
    return Example(name, ([] if system is None else [{"role": "system", "content": system}]) + messages)


def questions(count):
    return [user(f"How many {word} are in the market?") for word in ("boats", "doors", "lamps", "birds")[:count]]


def content(store):
    return [(sequence.input_ids.tolist(), sequence.prompt_length, sequence.source) for sequence in store]


def texts(target, store):
    return [target.tokenizer.decode(sequence.input_ids) for sequence in store]


def test_the_target_answers_in_its_own_template_after_a_system_prompt_too(target, tmp_path):
    asked = [user("How many boats are in the river?"), user("How many lamps are in the tower?", system="Count.")]
    settings = SETTINGS._replace(max_prompt_length=60, max_length=90)
    store = write_answers(target, asked, False, settings, Amount(), tmp_path)
    plain, guided = texts(target, store)
    head = "<|im_start|>user\nHow many boats are in the river?<|im_end|>\n<|im_start|>assistant\n"
    assert plain.startswith(head)
    assert guided.startswith("<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\nHow many lamps")
    for sequence in store:
        answer = sequence.input_ids[sequence.prompt_length :].tolist()
        assert 0 < len(answer) <= 16
        assert 2 not in answer[:-1], "EOS ends an answer"
    assert target.tokenizer.decode(store[0].input_ids[: store[0].prompt_length]) == head


def test_every_user_turn_is_answered_after_the_answers_before_it(target, tmp_path):
    asked = [user("How many boats are in the river?", "How many doors are in the tower?"), *questions(1)]
    store = write_answers(target, asked, False, SETTINGS._replace(max_length=96), Amount(), tmp_path)
    assert [sequence.source for sequence in store] == [0, 1, 0], "turn by turn"
    first, _, second = texts(target, store)
    answered = first.removesuffix("<|im_end|>") + "<|im_end|>\n<|im_start|>user\nHow many doors"
    assert second.startswith(answered)
    assert store[2].prompt_length > len(store[0].input_ids)


def test_repeated_empty_and_long_prompts_are_dropped_and_counted(target, tmp_path, capsys):
    long = " ".join(["apples"] * 60)
    asked = [*questions(1), user(" How many  BOATS are in the market?"), user("  "), user(long), user(), *questions(2)]
    store = write_answers(target, asked, False, SETTINGS, Amount(), tmp_path)
    assert [sequence.source for sequence in store] == [0, 6]
    assert "dropped: 2 empty or unfinished, 2 repeated, 1 too long" in capsys.readouterr().out


def test_nothing_left_to_answer_is_an_error(target, tmp_path):
    with pytest.raises(BadInput, match=r"answered none of the prompts \(dropped: 1 empty"):
        write_answers(target, [user(" ")], False, SETTINGS, Amount(), tmp_path)


def test_the_target_writes_its_own_prompts_each_once_beside_the_given_ones(target, tmp_path):
    store = write_answers(target, questions(4), True, SETTINGS, SELF, tmp_path)
    prompts = [target.tokenizer.decode(s.input_ids[: s.prompt_length]) for s in store]
    assert len(set(prompts)) == len(prompts)
    sources = [sequence.source for sequence in store]
    assert sources[:4] == [0, 1, 2, 3], "given prompts first"
    assert max(sources) < 28, "no more than were asked for"
    own = [prompt for prompt, source in zip(prompts, sources, strict=True) if source > 3]
    assert len(own) > 12
    assert all(prompt.startswith("<|im_start|>user\n") and prompt.count("<|im_start|>") == 2 for prompt in own)
    assert sum(prompt.startswith("<|im_start|>user\nHow many") for prompt in own) > len(own) / 2, "in its own words"


@pytest.mark.parametrize("given", [0, 3, 4, 30])
@pytest.mark.parametrize("own", [1, 8, 13])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_rounds_hold_exactly_what_was_asked_for(target, given, own, share):
    settings = SETTINGS._replace(self_share=share)
    job = answer_rounds.Rounds(target, [user(f"{i}") for i in range(given)], True, settings, Amount(own))
    total = given + own
    assert job.prompts == total
    assert job.given_before(total) == given
    rounds = job.number(total - 1) + 1
    with stage("test") as bar:
        job._write_prompts = lambda numbers, bar: [answer_rounds.Conversation(n, [f"own {n}"]) for n in numbers]
        found = [[c.number for c in job._conversations(n, bar)] for n in range(rounds)]
    assert [number for numbers in found for number in numbers] == list(range(total))
    assert all(job.number(number) == n for n, numbers in enumerate(found) for number in numbers)
    assert all(len(numbers) == job.round_size for numbers in found[:-1])


def test_a_chat_that_the_template_refuses_is_named_before_anything_is_written(chat_folder, tmp_path):
    target = load_target(str(chat_folder / "model"))
    assert target.tokenizer is not None
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}"
    target.tokenizer.chat_template = refusing + target.tokenizer.chat_template  # type: ignore[operator]
    asked = [*questions(3), user("How many lamps?", system="Count.", name=7)]
    with pytest.raises(BadInput, match=r"data\.prompts: example 7: .*no system prompt"):
        write_answers(target, asked, False, SETTINGS, Amount(), tmp_path / "answers")
    assert not (tmp_path / "answers").exists()


def killed(work, moment):
    """Run `work` in a child process that `moment(kill)` prepares; it must end by SIGKILL."""
    child = os.fork()
    if child == 0:
        try:
            moment(lambda: os.kill(os.getpid(), signal.SIGKILL))
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def on_call(monkeypatch, owner, name, number):
    """Prepare a kill on the `number`-th call of ``owner.name``, before it does anything."""
    real, calls = getattr(owner, name), []

    def moment(kill):
        def call(*args, **kwargs):
            calls.append(0)
            if len(calls) == number:
                kill()
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    return moment


def test_a_killed_run_goes_on_to_the_same_answers(target, tmp_path, monkeypatch):
    """Killed while prompts are written, in the middle of a round, before and after its shard: as if nothing had been."""
    asked = [*questions(4), user("How many boats are in the river?", "How many doors are in the tower?")]
    settings = SETTINGS._replace(keep_hidden=True)

    def work():
        return write_answers(target, asked, True, settings, Amount(own_prompts=40), tmp_path / "killed")

    whole = write_answers(target, asked, True, settings, Amount(own_prompts=40), tmp_path / "whole")
    for owner, name, number in [
        (answer_rounds, "generate_batched", 2),  # round 0: prompts are written, answers are not
        (answers.StoreWriter, "_take", 3),
        (answers.StoreWriter, "flush", 4),  # round 1 is complete but for its shard
        (answer_rounds.Rounds, "_answer", 2),  # in round 2
        (answers.StoreWriter, "finish", 1),
    ]:
        with monkeypatch.context() as patch:
            killed(work, on_call(patch, owner, name, number))
    resumed = work()
    assert content(resumed) == content(whole)
    for one, other in zip(resumed, whole, strict=True):
        torch.testing.assert_close(one.arrays["hidden"], other.arrays["hidden"], rtol=1e-3, atol=1e-3)


def test_ctrl_c_in_a_later_turn_leaves_no_half_round(target, tmp_path, monkeypatch):
    """The store's `with` block flushes on an exception; a round whose second turns are missing would be skipped later."""
    asked = [user(f"How many {word} are in the river?", "And in the tower?") for word in ("boats", "doors", "lamps")]
    settings = SETTINGS._replace(max_length=96)
    whole = write_answers(target, asked, False, settings, Amount(), tmp_path / "whole")

    def interrupted(job, conversations, prompts, contexts, turn, bar, real=answer_rounds.Rounds._answer):
        if turn:
            raise KeyboardInterrupt
        yield from real(job, conversations, prompts, contexts, turn, bar)

    with monkeypatch.context() as patch:
        patch.setattr(answer_rounds.Rounds, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_answers(target, asked, False, settings, Amount(), tmp_path / "stopped")
    assert content(write_answers(target, asked, False, settings, Amount(), tmp_path / "stopped")) == content(whole)


class Clock:
    """Ten seconds a round, as far as the stage that writes answers can tell."""

    def __init__(self, monkeypatch, stop_before=None):
        self.now, self.rounds, self.stop_before = 0.0, [], stop_before
        monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(answer_rounds.Rounds, "round", lambda job, number, bar: self.round(job, number, bar))
        monkeypatch.setattr(answer_rounds.Rounds, "_write_prompts", self.prompts)

    def round(self, job, number, bar, real=answer_rounds.Rounds.round):
        if number == self.stop_before:
            raise KeyboardInterrupt
        self.rounds.append(number)
        self.now += 10.0
        return real(job, number, bar)

    @staticmethod
    def prompts(job, numbers, bar):
        return [answer_rounds.Conversation(n, [f"How many apples and {n}?"]) for n in numbers]


QUICK = SETTINGS._replace(batch_size=1, max_new_tokens=2)  # four prompts a round


@pytest.mark.parametrize("own", [True, False])
def test_a_budget_in_seconds_fixes_the_prompts_once(own, target, tmp_path, monkeypatch, capsys):
    """A short and a whole round are timed at 10 s each, so that 50 s hold five; the clock does not matter afterwards."""
    asked = [] if own else [user(f"How many apples and {i}?") for i in range(40)]
    folder, other = tmp_path / "whole", tmp_path / "stopped"
    clock = Clock(monkeypatch)
    store = write_answers(target, asked, own, QUICK, Amount(seconds=50.0), folder)
    assert clock.rounds == [0, 1, 2, 3, 4]
    assert json.loads((folder / "planned.json").read_text())["prompts"] == 1 + 4 * 4
    assert ("23 of 40 given prompts are left out: the budget" in capsys.readouterr().out) is not own
    clock = Clock(monkeypatch, stop_before=3)
    with pytest.raises(KeyboardInterrupt):
        write_answers(target, asked, own, QUICK, Amount(seconds=50.0), other)
    clock.stop_before, clock.now = None, 1e9
    assert content(write_answers(target, asked, own, QUICK, Amount(seconds=50.0), other)) == content(store)
    assert clock.rounds == [0, 1, 2, 3, 4]


def test_a_budget_that_is_not_spent_ends_with_the_prompts(target, tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    asked = [user(f"How many apples and {i}?") for i in range(18)]
    store = write_answers(target, asked, False, QUICK, Amount(seconds=1e6), tmp_path)
    assert len(store) == 18
    assert clock.rounds == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("seconds", "prompts"), [(5.0, 1), (30.0, 3), (47.0, 4), (27.0, 2)])
def test_a_budget_for_less_than_a_round_ends_within_it(seconds, prompts, target, tmp_path, monkeypatch):
    """The first round, of one prompt, took 10 s."""
    Clock(monkeypatch)
    write_answers(target, [], True, QUICK, Amount(seconds=seconds), tmp_path)
    assert json.loads((tmp_path / "planned.json").read_text())["prompts"] == prompts


def test_stored_hidden_states_are_those_that_the_answers_were_predicted_from(target, tmp_path):
    store = write_answers(target, questions(4), True, SETTINGS._replace(keep_hidden=True), SELF, tmp_path)
    for sequence in store:
        out = target.model.base_model(input_ids=sequence.input_ids[None])
        expected = out.last_hidden_state[0, sequence.prompt_length - 1 : -1]
        found = sequence.arrays["hidden"].float()
        assert found.shape == (len(sequence.input_ids) - sequence.prompt_length, target.hidden_size)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)  # kept as float16


def test_stored_states_train_like_those_of_a_pass_over_the_answers(target, tmp_path):
    """Read in batches: everywhere but after an answer's last token they are what the target computes over the text."""
    settings = SETTINGS._replace(keep_states=(1, target.num_layers))
    store = write_answers(target, questions(4), True, settings, SELF, tmp_path)
    encoded = EncodedSet.collect(
        (i, encode_response(s.input_ids.tolist(), s.prompt_length)) for i, s in enumerate(store)
    )
    packed = pack([encoded[i] for i in range(len(encoded))], 64, numbers=list(range(len(encoded))))
    batch = distill_batch(packed, target.device, CachedTeacher(store, encoded).outputs(packed, target.device))
    expected = all_hidden(Teacher(target), batch, settings.keep_states)
    read = torch.nn.functional.pad(batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1], (0, 1)) & (
        batch.segment_ids >= 0
    )
    assert isinstance(batch.teacher, dict)
    for layer in settings.keep_states:
        assert len(store[0].arrays[f"states_{layer}"]) == len(store[0].input_ids) - 1
        torch.testing.assert_close(batch.teacher[layer][read].float(), expected[layer][read], rtol=2e-3, atol=4e-3)


def test_expected_counts_are_the_same_of_either_kind_of_states(target, tmp_path):
    ways = ({"keep_hidden": True}, {"keep_states": (1, target.num_layers)})
    stores = [
        write_answers(target, questions(4), True, SETTINGS._replace(**way), SELF, tmp_path / str(way)) for way in ways
    ]
    counts = [expected_counts(target, store) for store in stores]
    torch.testing.assert_close(counts[0], counts[1], rtol=1e-3, atol=1e-3)


def test_answers_do_not_depend_on_the_slot_they_were_written_in(target, tmp_path):
    """Other neighbours, another order of finishing; a prompt's number alone decides its random stream."""
    both = write_answers(target, questions(4), False, SETTINGS, Amount(), tmp_path / "all")
    alone = write_answers(target, questions(4), False, SETTINGS._replace(batch_size=1), Amount(), tmp_path / "one")
    assert content(both) == content(alone)


def test_answers_are_cut_to_max_length_with_their_hidden_states(target, tmp_path):
    settings = SETTINGS._replace(max_length=34, max_new_tokens=60, keep_hidden=True, keep_states=(1,))
    store = write_answers(target, questions(4), False, settings, Amount(), tmp_path)
    whole = write_answers(target, questions(4), False, settings._replace(max_length=90), Amount(), tmp_path / "whole")
    for cut, long in zip(store, whole, strict=True):
        assert len(cut.input_ids) <= 34
        assert cut.input_ids.tolist() == long.input_ids[:34].tolist()
        assert len(cut.arrays["hidden"]) == len(cut.input_ids) - cut.prompt_length
        assert len(cut.arrays["states_1"]) in (len(cut.input_ids) - 1, len(cut.input_ids))


@pytest.mark.parametrize("backend", ["plain", "packed"])
def test_a_copy_in_another_dtype_writes_and_is_gone_afterwards(
    target, backend, chat_folder, tmp_path, monkeypatch, capsys
):
    """Answers and states are those of the model as loaded in that dtype; the target stays as it was, packed or not."""
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    backend = use_backend(target.model, backend)
    made = []
    copying = author.in_dtype
    monkeypatch.setattr(
        author, "in_dtype", lambda *asked: (copied := copying(*asked), made.append(weakref.ref(copied.model)))[0]
    )
    layers = (1, target.num_layers)
    settings = SETTINGS._replace(keep_states=layers, dtype=torch.bfloat16)
    store = write_answers(target, questions(4), True, settings, SELF, tmp_path / "cast")
    assert "the target writes in bfloat16" in capsys.readouterr().out
    assert [model() for model in made] == [None]
    assert is_packed(target.model) is (backend == "packed")
    unpack(target.model)
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    loaded = load_target(str(chat_folder / "model"), "bfloat16")
    use_backend(loaded.model, "auto")
    expected = write_answers(loaded, questions(4), True, settings._replace(dtype=None), SELF, tmp_path / "loaded")
    assert expected.fingerprint["dtype"] == store.fingerprint["dtype"] == "torch.bfloat16"
    assert store[0].arrays["states_1"].dtype == torch.bfloat16
    for one in store:
        hidden = loaded.model.base_model(input_ids=one.input_ids[None]).last_hidden_state[0, :-1]
        found = one.arrays[f"states_{target.num_layers}"]
        torch.testing.assert_close(found, hidden, rtol=0.1, atol=0.1)  # bfloat16 in a batch, and alone
    # The backends of the two may differ in rounding, so in a token now and then.
    assert (
        sum(a.input_ids.tolist() == b.input_ids.tolist() for a, b in zip(store, expected, strict=False))
        >= len(store) / 2
    )
    again = write_answers(target, questions(4), True, settings, SELF, tmp_path / "cast")
    assert len(made) == 1, "a finished store is read without a copy"
    assert content(again) == content(store)


def test_the_target_s_own_dtype_needs_no_copy(target, tmp_path, monkeypatch):
    monkeypatch.setattr(author, "in_dtype", lambda *asked: pytest.fail("copied"))
    settings = SETTINGS._replace(dtype=torch.float32)
    store = write_answers(target, questions(2), False, settings, Amount(), tmp_path)
    again = write_answers(target, questions(2), False, SETTINGS, Amount(), tmp_path)
    assert content(store) == content(again), "the same store, whether the dtype was named or not"


@pytest.mark.parametrize(
    ("asked", "loaded", "device", "native", "expected"),
    [
        (None, torch.float32, "cpu", True, torch.float32),
        (None, torch.float16, "cuda", True, torch.float16),
        ("auto", torch.float32, "cpu", True, torch.bfloat16),
        ("auto", torch.float32, "cpu", False, torch.float32),
        ("auto", torch.float32, "cuda", True, torch.float32),
        ("auto", torch.float16, "cpu", True, torch.float16),
        ("float32", torch.bfloat16, "cpu", True, torch.float32),
        ("bfloat16", torch.float32, "cpu", False, torch.bfloat16),
    ],
)
def test_the_dtype_that_is_meant(asked, loaded, device, native, expected, monkeypatch):
    monkeypatch.setattr(quick, "quicker_in_bf16", lambda device, rows: native and rows == 64)
    assert author.writing_dtype(asked, loaded, torch.device(device), 64) == expected


def test_a_target_without_a_template_continues_plain_text(chat_folder, tmp_path):
    target = load_target(str(chat_folder / "model"))
    assert target.tokenizer is not None
    target.tokenizer.chat_template = None
    text = Example(7, [], "There are four")
    settings = SETTINGS._replace(max_prompt_length=12)
    store = write_answers(target, [text], True, settings, Amount(own_prompts=4), tmp_path)
    first = store[0]
    assert target.tokenizer.decode(first.input_ids[: first.prompt_length]) == "There are four"
    assert len(store) > 2, "prompts that stop in the middle are as good as others here"


def test_another_target_template_sampling_or_amount_is_refused_by_name(target, chat_folder, tmp_path):
    write_answers(target, questions(2), False, SETTINGS, Amount(), tmp_path)
    other = load_target(str(chat_folder / "model"))
    assert other.tokenizer is not None
    other.tokenizer.chat_template = str(other.tokenizer.chat_template).replace("assistant", "helper")
    cases = [
        (other, questions(2), SETTINGS, Amount(), "another chat_template"),
        (target, questions(3), SETTINGS, Amount(), "another prompts"),
        (target, questions(2), SETTINGS._replace(sampling=Sampling(0.7)), Amount(), "another sampling"),
        (target, questions(2), SETTINGS._replace(seed=4), Amount(), "another seed"),
        (
            target,
            questions(2),
            SETTINGS._replace(dtype=torch.bfloat16),
            Amount(),
            r"another dtype \(dtype: torch.float32",
        ),
        (target, questions(2), SETTINGS, SELF, "another own_prompts"),
    ]
    for model, asked, settings, amount, reason in cases:
        with pytest.raises(BadInput, match=reason):
            write_answers(model, asked, amount == SELF, settings, amount, tmp_path)


def test_self_written_prompts_need_an_amount(target, tmp_path):
    with pytest.raises(BadInput, match=r"data\.num_self_prompts: needed for prompts 'self'"):
        write_answers(target, [], True, SETTINGS, Amount(), tmp_path)


def test_a_finished_store_is_read_without_its_lock(target, tmp_path):
    """All ranks but the first open it at the same time."""
    store = write_answers(target, questions(2), False, SETTINGS, Amount(), tmp_path)
    with answers.StoreWriter(tmp_path, store.fingerprint):
        again = write_answers(target, questions(2), False, SETTINGS, Amount(), tmp_path)
    assert content(again) == content(Store(Path(tmp_path)))


def harm(path, how):
    content = path.read_bytes()
    match how:
        case "truncated":
            path.write_bytes(content[:-7])
        case "corrupted":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case _:
            path.unlink()


MIXED = [*questions(4), user("How many boats are in the river?", "How many doors are in the tower?")]


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("how", ["truncated", "corrupted", "missing"])
def test_damaged_shards_are_named_and_written_again(how, finished, target, tmp_path, monkeypatch, capsys):
    """Two of three rounds, the first of several turns, with hidden states: each knows what the rounds before it asked."""
    settings = SETTINGS._replace(keep_hidden=True, max_length=96, batch_size=2)

    def work():
        return write_answers(target, MIXED, True, settings, SELF, tmp_path)

    if finished:
        whole = content(work())
    else:
        with monkeypatch.context() as patch:
            patch.setattr(answers.StoreWriter, "finish", lambda writer: pytest.fail("stopped before"))
            with pytest.raises(pytest.fail.Exception):
                work()
        whole = content(Store(tmp_path))
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) >= 3
    for shard in shards[:2]:
        harm(shard, how)
    capsys.readouterr()
    mended = work()
    said = capsys.readouterr().out
    for shard in shards[:2]:
        assert f"answers: {shard} is {how}" in said
    assert content(mended) == whole
    assert mended.complete
    assert not mended.damaged()
    expected = target.model.base_model(input_ids=mended[0].input_ids[None]).last_hidden_state
    found = mended[0].arrays["hidden"].float()
    torch.testing.assert_close(found, expected[0, mended[0].prompt_length - 1 : -1], rtol=2e-3, atol=2e-3)


def test_a_round_that_comes_back_different_is_written_anew_with_all_after_it(target, tmp_path, monkeypatch, capsys):
    """As where the target's own prompts end elsewhere on another machine."""
    settings = SETTINGS._replace(batch_size=2)
    whole = content(write_answers(target, MIXED[:4], True, settings, SELF, tmp_path))
    shards = sorted(tmp_path.glob("*.safetensors"))
    harm(shards[1], "corrupted")
    real, rounds = answer_rounds.Rounds.round, []

    def different(job, number, bar):
        rounds.append(number)
        return iter(list(real(job, number, bar))[:-1] if len(rounds) == 1 else real(job, number, bar))

    monkeypatch.setattr(answer_rounds.Rounds, "round", different)
    store = write_answers(target, MIXED[:4], True, settings, SELF, tmp_path)
    assert rounds == [1, *range(1, len(shards))]
    assert content(store) == whole
    assert not store.damaged()
    assert f"{shards[1]} came back different; it and what follows it are written anew" in capsys.readouterr().out


def test_the_log_says_what_kept_states_take_before_they_are_written(target, tmp_path, monkeypatch, capsys):
    size, asked = target.hidden_size, questions(4)
    for name, way, line in [
        ("hidden", {"keep_hidden": True}, f"{2 * size} bytes an answer token, at most {28 * 16} of them, 0 MiB"),
        ("states", {"keep_states": (1, 3)}, f"{4 * size} bytes a token, at most {28 * 64:,} of them, 0 MiB"),
    ]:
        write_answers(target, asked, True, SETTINGS._replace(**way), SELF, tmp_path / name)
        said = capsys.readouterr().out
        assert said.index(f"answers: {line}") < said.index("the target writes and answers prompts")
    write_answers(target, asked, True, SETTINGS, SELF, tmp_path / "ids")
    assert " bytes a" not in capsys.readouterr().out
    Clock(monkeypatch)
    write_answers(target, [], True, QUICK._replace(keep_hidden=True), Amount(seconds=50.0), tmp_path / "timed")
    said = capsys.readouterr().out
    assert f"answers: {2 * size} bytes an answer token, as many as the minutes allow" in said
    assert f"answers: {2 * size} bytes an answer token, at most {17 * 2} of them" in said


def test_answers_of_other_weights_under_the_same_name_are_refused(target, chat_folder, tmp_path):
    write_answers(target, questions(2), False, SETTINGS, Amount(), tmp_path)
    other = load_target(str(chat_folder / "model"))
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1.1)
    with pytest.raises(BadInput, match=r"was made with another weights"):
        write_answers(other, questions(2), False, SETTINGS, Amount(), tmp_path)
