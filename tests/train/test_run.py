"""From a recipe to a drafter on a tiny chat model: every source of data, every draft model, and nothing lost on the way."""

import faulthandler
import hashlib
import os
import signal
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftsmith.data.store_writer import StoreWriter
from draftsmith.distill import answer_rounds
from draftsmith.distill.steps import DistillSteps
from draftsmith.errors import BadInput
from draftsmith.eval.options import EvalOptions
from draftsmith.eval.run import evaluate
from draftsmith.heads import load_drafter
from draftsmith.models.target import load_target
from draftsmith.recipe import Recipe
from draftsmith.train import checkpoint, run
from draftsmith.train.logs import read_metrics
from draftsmith.train.run import train

SELF = {"prompts": "self", "num_self_prompts": 24, "responses": "target", "max_new_tokens": 12, "generation_batch": 4}
ANSWERED = {"responses": "target", "max_new_tokens": 12}
ONE_LAYER = {"layers": [0]}


@pytest.fixture
def start(chat_folder, tmp_path, toy):
    """``start(name, resume=False, **sections)`` trains in a folder of that name and returns the run's folder."""

    def begin(name="run", resume=False, **sections):
        base = {
            "target": {"model": str(chat_folder / "model"), "dtype": "float32"},
            "drafter": {"kind": "model", "init": ONE_LAYER},
            "data": {"prompts": str(chat_folder / "chats.jsonl"), "max_length": 64},
            "optimizer": {"learning_rate": 1e-2},
            "engine": {"steps": 12, "tokens_per_step": 512, "checkpoint_every": 4},
            "evaluate": {
                "prompts": str(chat_folder / "prompts.jsonl"),
                "every": 6,
                "max_new_tokens": 12,
                "sampling": {"temperature": 0},
            },
            "output": str(tmp_path / name),
        }
        for key, section in sections.items():
            base[key] = {"kind": "model", **section} if key == "drafter" else {**base.get(key, {}), **section}
        toy.reset()
        train(Recipe.model_validate(base), resume=resume, command=["draftsmith", "train", "x"])
        return tmp_path / name

    return begin


def records(folder, kind="train"):
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == kind]


def losses(folder):
    return [(record["step"], record["loss"], record["gradient_norm"]) for record in records(folder)]


def last_alpha(folder):
    return records(folder, "evaluation")[-1]["alpha"]


def untrained_alpha(folder, chat_folder):
    """Of the drafter as it was before the first step, and before anything was fitted."""
    options = EvalOptions(
        target=str(chat_folder / "model"),
        drafter=str(folder / "start"),
        prompts=str(chat_folder / "prompts.jsonl"),
        max_new_tokens=12,
        speed=False,
    )
    return evaluate(options)["runs"][0]["alpha"]


def weights(folder):
    return hashlib.sha256((folder / "final" / "model.safetensors").read_bytes()).hexdigest()


CASES = {
    "given chats": {},
    "given, hidden states kept": {"data": {"cache": "hidden"}},
    "given, top k kept": {"data": {"cache": "topk", "cache_top_k": 8}},
    "answered": {"data": ANSWERED},
    "answered, hidden states kept": {"data": {**ANSWERED, "cache": "hidden"}},
    "answered, top k kept": {"data": {**ANSWERED, "cache": "topk"}},
    "answered in bfloat16, hidden states kept": {"data": {**ANSWERED, "cache": "hidden", "dtype": "bfloat16"}},
    "answered in bfloat16, top k kept, bf16": {
        "data": {**ANSWERED, "cache": "topk", "dtype": "bfloat16"},
        "engine": {"precision": "bf16"},
    },
    "prompts of its own": {"data": {**SELF, "cache": "hidden"}},
    "cut vocabulary": {"drafter": {"init": ONE_LAYER, "vocabulary": 120}},
    "cut vocabulary, top k kept": {"drafter": {"init": ONE_LAYER, "vocabulary": 120}, "data": {"cache": "topk"}},
    "adapter": {"drafter": {"init": ONE_LAYER, "lora": {"rank": 4}}},
    "random layers": {"drafter": {"init": {"config": {"num_hidden_layers": 1}}}},
    "chosen layers": {"drafter": {"init": {"num_layers": 1}}},
}


@pytest.mark.parametrize("case", CASES)
def test_every_source_of_data_and_every_draft_model_learns(case, start, chat_folder, capsys):
    folder = start(**CASES[case])
    said = capsys.readouterr().out.splitlines()
    assert last_alpha(folder) > max(0.7, untrained_alpha(folder, chat_folder) + 0.05)
    target = load_target(str(chat_folder / "model"))
    drafter: Any = load_drafter(folder / "final", target)
    ids = torch.tensor([[5, 20, 40, 3]])
    logits = drafter.first_token_logits(drafter.teacher_forced_hidden(ids, torch.ones_like(ids), {})[0])
    if "cut" in case:
        assert torch.isfinite(logits).sum(-1).tolist() == [120] * 4
        with pytest.raises(ValueError, match="draftsmith_cut_vocabulary"):
            AutoModelForCausalLM.from_pretrained(folder / "final")
    elif case != "adapter":
        model = AutoModelForCausalLM.from_pretrained(folder / "final")
        torch.testing.assert_close(model(input_ids=ids).logits[0], logits, rtol=1e-4, atol=1e-4)
    assert (folder / "recipe.yaml").exists()
    assert (folder / "provenance.json").exists()
    assert list((folder / "tensorboard").iterdir())
    assert (folder / "latest").resolve() == folder / "step_000012"
    assert said[0] == "engine: one process, ZeRO stage none, world size 1, cpu"
    assert any(line.startswith("data: ") and "supervised" in line for line in said)
    assert said[-1] == f"finished: the drafter is in {folder}/final"


def test_cached_outputs_of_the_target_change_nothing_but_the_time(start):
    """Hidden states are kept as float16; the top 384 of 384 ids are all there is."""
    fresh = losses(start("fresh"))
    for cache in ({"cache": "hidden"}, {"cache": "topk", "cache_top_k": 384}):
        for (step, loss, norm), expected in zip(losses(start(cache["cache"], data=cache)), fresh, strict=True):
            assert (step, loss, norm) == pytest.approx(expected, rel=5e-3, abs=5e-4)


@pytest.mark.parametrize(
    "other",
    [
        {"engine": {"tokens_per_forward": 64}},
        {"data": {"packing": False}},
        {"engine": {"gradient_checkpointing": True}},
        {"objective": {"chunk_tokens": 5}},
    ],
    ids=["accumulated", "unpacked", "recomputed", "other chunks"],
)
def test_how_a_step_is_computed_does_not_matter(other, start):
    """Examples of unequal length; the first losses are the same to 1e-6, later ones as far as AdamW lets rounding grow."""
    plain, different = losses(start("plain")), losses(start("other", **other))
    assert different[0] == pytest.approx(plain[0], rel=1e-5)
    for one, expected in zip(different, plain, strict=True):
        assert one == pytest.approx(expected, rel=2e-2, abs=1e-4)


def test_the_target_is_the_same_bit_for_bit_afterwards(start, chat_folder, monkeypatch):
    target = load_target(str(chat_folder / "model"))
    monkeypatch.setattr(run, "load_target", lambda *args: target)

    def fingerprint():
        digest = hashlib.sha256()
        for name, tensor in target.model.state_dict().items():
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.hexdigest()

    before = fingerprint()
    folder = start(data=SELF, drafter={"init": {"layers": [0, 1, 2]}})
    assert fingerprint() == before
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    trained = AutoModelForCausalLM.from_pretrained(folder / "final").state_dict()
    assert any(not torch.equal(trained[name], tensor) for name, tensor in target.model.state_dict().items())


def test_the_log_s_last_alpha_is_the_report_s(start, chat_folder):
    """Greedy answers are the same wherever they are decoded, so the figures are equal; alpha is that at temperature 1."""
    folder = start()
    options = EvalOptions(
        target=str(chat_folder / "model"),
        drafter=str(folder / "final"),
        untrained=str(folder / "start"),
        prompts=str(chat_folder / "prompts.jsonl"),
        max_new_tokens=12,
        speed=False,
    )
    drafter, untrained = evaluate(options)["runs"]
    logged = records(folder, "evaluation")[-1]
    assert drafter["alpha"] == pytest.approx(logged["alpha"], abs=1e-5)
    assert drafter["greedy_agreement"] == pytest.approx(logged["greedy_agreement"], abs=1e-9)
    assert untrained["alpha"] < drafter["alpha"] - 0.1


def test_a_sampled_run_logs_an_alpha_within_the_report_s_interval(start, chat_folder):
    sampling = {"temperature": 0.9, "top_k": 40}
    folder = start(evaluate={"sampling": sampling})
    options = EvalOptions(
        target=str(chat_folder / "model"),
        drafter=str(folder / "final"),
        prompts=str(chat_folder / "prompts.jsonl"),
        max_new_tokens=12,
        speed=False,
        **sampling,
    )
    low, high = evaluate(options)["runs"][0]["alpha_ci"]
    width = high - low
    assert low - width < last_alpha(folder) < high + width


# Every source of randomness: prompts and answers are sampled, layers drawn, adapters drawn, dropout drawn.
RANDOM = {
    "drafter": {"init": {"config": {"num_hidden_layers": 1}}, "lora": {"rank": 4, "dropout": 0.2}},
    "data": {**SELF, "cache": "hidden"},
}


def adapter(folder):
    return load_file(folder / "final" / "adapter_model.safetensors")


@pytest.fixture
def whole(start):
    return start("whole", **RANDOM)


def assert_same_run(folder, whole):
    def figures(of):
        return [
            {k: v for k, v in record.items() if k not in ("seconds", "tokens_per_second")} for record in records(of)
        ]

    assert figures(folder) == figures(whole)
    for name, tensor in adapter(whole).items():
        assert torch.equal(adapter(folder)[name], tensor), name
    assert records(folder, "evaluation") == records(whole, "evaluation")


def killed_at(monkeypatch, owner, name, number, work):
    """Run `work` in a child process that kills itself (SIGKILL) at the `number`-th call of ``owner.name``."""
    real, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(0)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(600, exit=True)  # a fork that hangs is a failure that says where
        monkeypatch.setattr(owner, name, call)
        try:
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_run_killed_at_every_stage_ends_with_the_same_weights_bit_for_bit(start, whole, monkeypatch):
    for number, (owner, name, call) in enumerate(
        [
            (answer_rounds.Rounds, "_answer", 2),
            (StoreWriter, "finish", 1),
            (run, "HeldOut", 1),
            (DistillSteps, "__next__", 3),  # before the first checkpoint
            (checkpoint, "_write_manifest", 1),  # inside it
            (DistillSteps, "__next__", 6),  # between two
            (run.Trainable, "save", 1),  # after the last one, before the drafter is saved
        ]
    ):
        killed_at(monkeypatch, owner, name, call, lambda: start("killed", resume=number > 0, **RANDOM))  # noqa: B023
    assert_same_run(start("killed", resume=True, **RANDOM), whole)


def test_a_run_stopped_by_a_signal_saves_and_goes_on_bit_for_bit(start, whole, monkeypatch, capsys, tmp_path):
    real = DistillSteps.__next__

    def signalled(steps):
        if steps.state_dict() != {"epoch": 0, "index": 0} and not (tmp_path / "stopped" / "latest").exists():
            signal.raise_signal(signal.SIGTERM)
        return real(steps)

    with monkeypatch.context() as patch:
        patch.setattr(DistillSteps, "__next__", signalled)
        with pytest.raises(SystemExit) as left:
            start("stopped", **RANDOM)
    assert left.value.code == 128 + signal.SIGTERM
    said = capsys.readouterr().out
    assert "stopped after step 2 of 12, saved" in said
    assert "to go on: draftsmith train x --resume" in said
    assert_same_run(start("stopped", resume=True, **RANDOM), whole)


def test_a_run_whose_checkpoints_are_all_damaged_starts_as_it_did_at_first(start, capsys):
    """The fit before the first step included."""
    cut = {"drafter": {"init": ONE_LAYER, "vocabulary": 200}, "engine": {"checkpoint_every": 12, "steps": 12}}
    first = start("first", **cut)
    again = start("again", **cut)
    (again / "final").rename(again / "put away")
    (checkpoint_file,) = again.glob("step_*/trainee.safetensors")
    with checkpoint_file.open("ab") as file:
        file.write(b"x")
    capsys.readouterr()
    start("again", resume=True, **cut)
    said = capsys.readouterr().out
    assert "no sound checkpoint is left: starting from step 0" in said
    assert said.count("fitting the drafter to the target") == 1
    assert losses(again) == losses(first)
    file = "final/cut_vocabulary.safetensors"
    assert (again / file).read_bytes() == (first / file).read_bytes()


def test_a_finished_run_says_so_and_is_not_begun_again(start, capsys):
    folder = start()
    before, log = weights(folder), (folder / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert start(resume=True) == folder
    assert f"{folder} is finished: the drafter is in {folder}/final" in capsys.readouterr().out
    assert (weights(folder), (folder / "metrics.jsonl").read_bytes()) == (before, log)
    with pytest.raises(BadInput, match="already holds a run: add --resume, or choose another output"):
        start()
    with pytest.raises(BadInput, match=r"optimizer\.learning_rate: the run was started with 0\.01, now it is 0\.02"):
        start(resume=True, optimizer={"learning_rate": 0.02})


def test_two_runs_of_one_recipe_are_the_same_run(start, whole):
    torch.rand(7)  # whatever the process has drawn before
    assert_same_run(start("again", **RANDOM), whole)


@pytest.mark.parametrize(("seconds_a_token", "steps"), [(9.0, 11), (0.0, 15)])
def test_a_budget_in_minutes_is_turned_into_steps_once(seconds_a_token, steps, start, monkeypatch, capsys):
    budget = {"steps": None, "minutes": 20, "max_epochs": 9}  # of which the data's share is not spent here

    def slowly(work, repeats=1):
        work()
        return 100.0

    monkeypatch.setattr(run, "timed", slowly)
    monkeypatch.setattr(run, "time_passes", lambda models, prompt, seconds: {"target": seconds_a_token})
    folder = start("timed", engine=budget, data={"responses": "target", "max_new_tokens": 12})
    taken = len(records(folder))
    assert capsys.readouterr().out.count("held-out prompts after step 0: ") == 1
    # 1,200 s, of which training gets 30 %, or 40 % of all but 40 s where decoding takes no time to speak of; eight steps are
    # 1.125 x 100 s, and a sixth of an evaluation's 100 s joins each.
    available = 1200 * 0.3 if seconds_a_token else 1160 * 0.4
    assert taken == int(available / (112.5 / 8 + 100 / 6)) == steps
    monkeypatch.setattr(run, "timed", lambda work, repeats=1: 1e-9)
    (folder / "final").rename(folder / "put away")
    start("timed", resume=True, engine=budget, data={"responses": "target", "max_new_tokens": 12})
    assert len(records(folder)) == taken


def test_examples_longer_than_the_target_reads_are_cut_and_said(start, capsys):
    start(data={"max_length": 4096})
    assert "data.max_length: 4,096 tokens, but the target reads 256" in capsys.readouterr().out
