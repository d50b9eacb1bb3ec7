"""From a recipe to a drafter on data that are made while training: the drafter's own answers, or what is served online."""

import os
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

from draftsmith.data.chats import Encoded
from draftsmith.data.encoded_set import EncodedSet
from draftsmith.distill.batch import DistillBatch
from draftsmith.distill.rollouts import RolloutBuffer
from draftsmith.distill.steps import RolloutSteps
from draftsmith.errors import BadInput
from draftsmith.eval.run import training_curve
from draftsmith.heads.build import build_trainable
from draftsmith.models.target import as_target
from draftsmith.recipe import Recipe
from draftsmith.recipe_io import load_recipe
from draftsmith.train import run
from draftsmith.train.budget import split_minutes
from draftsmith.train.data import TrainingData, served_sampling
from draftsmith.train.dry_run import dry_run
from draftsmith.train.engine import Engine
from draftsmith.train.logs import read_metrics
from draftsmith.train.run import train
from draftsmith.train.steps import answerable, build_steps

ONE_LAYER = {"kind": "model", "init": {"layers": [0]}}
ON_POLICY = {"source": "drafter", "fraction": 0.5, "max_new_tokens": 10}
ONLINE = {"source": "online", "max_new_tokens": 12}


def a_recipe(chat_folder, output, rollouts, drafter=ONE_LAYER, **sections):
    base = {
        "target": {"model": str(chat_folder / "model"), "dtype": "float32"},
        "drafter": drafter,
        "data": {
            "prompts": str(chat_folder / "chats.jsonl"),
            "responses": "given",
            "max_length": 64,
            "generation_batch": 8,
        },
        "objective": {"rollouts": rollouts},
        "optimizer": {"learning_rate": 1e-2},
        "engine": {"steps": 8, "tokens_per_step": 400, "checkpoint_every": 3},
        "evaluate": {
            "prompts": str(chat_folder / "prompts.jsonl"),
            "every": 8,
            "max_new_tokens": 10,
            "num_speculative_tokens": 2,
            "sampling": {"temperature": 0},
        },
        "output": str(output),
    }
    for key, section in sections.items():
        base[key] = {**base.get(key, {}), **section}
    return base


@pytest.fixture
def start(chat_folder, tmp_path, toy):
    def begin(rollouts, name="run", resume=False, **sections):
        toy.reset()
        recipe = Recipe.model_validate(a_recipe(chat_folder, tmp_path / name, rollouts, **sections))
        train(recipe, resume=resume, command=["draftsmith", "train", "x"])
        return tmp_path / name

    return begin


def records(folder, kind="train"):
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == kind]


@pytest.mark.parametrize(
    ("rollouts", "drafter"),
    [
        (ON_POLICY, ONE_LAYER),
        ({**ON_POLICY, "fraction": 1.0, "staleness": 2}, {**ONE_LAYER, "vocabulary": 150}),
        (ON_POLICY, {**ONE_LAYER, "lora": {"rank": 4}}),
        (ONLINE, ONE_LAYER),
        ({**ONLINE, "fraction": 0.5, "staleness": 1}, {"kind": "medusa", "num_heads": 2}),
        (ONLINE, {"kind": "hydra", "num_heads": 2, "prefix_attention": True}),
        (ONLINE, {"kind": "eagle", "unroll": 2}),
        (ONLINE, {"kind": "early_exit", "exit_layer": 1}),
        (ONLINE, {"kind": "medusa2", "num_heads": 2, "lora": {"rank": 4}}),
        (ONLINE, {"kind": "blockwise", "num_heads": 2, "inner_size": 32, "train_layers": 1}),
        (ONLINE, {"kind": "lookahead_tokens", "num_tokens": 2, "anchors": 0.5}),
    ],
    ids=lambda value: value.get("kind", value.get("source")),
)
def test_every_source_and_every_kind_that_takes_it_trains(rollouts, drafter, start, capsys):
    folder = start(rollouts, drafter=drafter, engine={"steps": 6})
    curve = records(folder)
    assert len(curve) == 6
    assert all(record["supervised"] > 0 for record in curve)
    assert ("stream_block_efficiency" in curve[0]) == (rollouts["source"] == "online")
    asked = drafter["kind"] in ("medusa2", "blockwise", "lookahead_tokens")
    assert ("the target runs a second time" in capsys.readouterr().out) == asked


def test_cached_states_and_rollouts_are_mixed(start):
    for rollouts, drafter in (({**ONLINE, "fraction": 0.5}, {"kind": "eagle", "unroll": 2}), (ON_POLICY, ONE_LAYER)):
        folder = start(rollouts, name=drafter["kind"], drafter=drafter, engine={"steps": 3}, data={"cache": "hidden"})
        assert len(records(folder)) == 3


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("source", ["drafter", "online"])
def test_a_mixture_s_share_of_rollouts_holds_over_a_run(source, fraction, start, monkeypatch):
    made, real = [], RolloutBuffer.take

    def take(buffer, step):
        rollouts = real(buffer, step)
        made.append(sum(len(rollout.encoded.input_ids) for rollout in rollouts))
        return rollouts

    monkeypatch.setattr(RolloutBuffer, "take", take)
    rollouts = {"source": source, "fraction": fraction, "max_new_tokens": 10, "staleness": 1}
    folder = start(rollouts, engine={"steps": 16, "tokens_per_step": 300})
    tokens = sum(record["tokens"] for record in records(folder))
    assert sum(made) / tokens == pytest.approx(fraction, abs=0.05)
    assert tokens / 16 == pytest.approx(300, rel=0.1)


CASES = {
    "drafter": (ON_POLICY, ONE_LAYER),
    "drafter, stale": ({**ON_POLICY, "staleness": 2, "fraction": 1.0}, ONE_LAYER),
    "online": ({**ONLINE, "staleness": 1, "buffer": 30}, ONE_LAYER),
    "online, eagle": ({**ONLINE, "fraction": 0.5}, {"kind": "eagle", "unroll": 2}),
    "online, early exit": (ONLINE, {"kind": "early_exit", "exit_layer": 1}),
    "online, medusa2": (ONLINE, {"kind": "medusa2", "num_heads": 2, "lora": {"rank": 4, "dropout": 0.1}}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_where_an_unbroken_one_does(case, start, monkeypatch):
    rollouts, drafter = CASES[case]
    whole = start(rollouts, "whole", drafter=drafter)
    taken, real = [], RolloutSteps.__next__

    def killed(steps):
        taken.append(1)
        if len(taken) > 5:  # between the checkpoints of steps 3 and 6
            raise KeyboardInterrupt
        return real(steps)

    with monkeypatch.context() as patch:
        patch.setattr(RolloutSteps, "__next__", killed)
        with pytest.raises(KeyboardInterrupt):
            start(rollouts, "broken", drafter=drafter)
    broken = start(rollouts, "broken", resume=True, drafter=drafter)
    figures = [
        [{k: v for k, v in r.items() if k not in ("seconds", "tokens_per_second")} for r in records(folder)]
        for folder in (whole, broken)
    ]
    if case in ("online, early exit", "online, medusa2"):  # which count their calls anew, to say when they measure
        names = ("step", "loss", "gradient_norm", "tokens", "stream_block_efficiency")
        figures = [[{name: record[name] for name in names} for record in some] for some in figures]
    assert figures[0] == figures[1]
    for name, tensor in load_file(whole / "final" / "model.safetensors").items():
        assert torch.equal(tensor, load_file(broken / "final" / "model.safetensors")[name]), name


def test_serving_and_learning_makes_acceptance_over_the_stream_rise(start):
    folder = start(
        {**ONLINE, "sampling": {"temperature": 0.5}},
        drafter={"kind": "model", "init": {"config": {"num_hidden_layers": 1}}},
        engine={"steps": 40},
    )
    served = [record["stream_block_efficiency"] for record in records(folder)]
    assert len(served) == 40
    first, last = sum(served[:10]) / 10, sum(served[-10:]) / 10
    assert last > first + 0.3
    assert all(1.0 <= value <= 3.0 for value in served)
    accepted = [record["stream_acceptance_rate"] for record in records(folder)]
    assert sum(accepted[-10:]) > sum(accepted[:10])
    curve = training_curve(folder / "final")
    assert curve is not None
    assert curve["stream_block_efficiency"] == served


def test_what_was_served_is_logged_in_the_steps_that_served(start):
    folder = start({**ONLINE, "staleness": 2}, engine={"steps": 7})
    assert [record["step"] for record in records(folder) if "stream_block_efficiency" in record] == [1, 4, 7]


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_budget_in_minutes_counts_the_time_that_rollouts_take(staleness, start, monkeypatch):
    def a_tenth(work, repeats=1):
        work()
        return 0.1

    monkeypatch.setattr(run, "timed", a_tenth)
    monkeypatch.setattr(run, "_shares", lambda recipe, target: split_minutes(recipe.engine))  # untimed
    # A data share that no machine exceeds here, since training pays for that; of 1,200 s it gets 0.54.
    shares = {"minutes": 20, "data_share": 0.5, "evaluate_share": 0.5 - 0.54 / 1200}
    folder = start({**ONLINE, "staleness": staleness}, engine={"steps": None, **shares})
    # Passes take 1.125 x 0.1 s a step, rollouts 0.1 s whenever they are made.
    assert len(records(folder)) == int(0.54 / (0.1125 + 0.1 / (staleness + 1) + 0.1 / 8))


@pytest.mark.parametrize("source", ["drafter", "online"])
def test_two_processes_make_rollouts_of_their_own_prompts(source, chat_folder, tmp_path):
    rollouts = {"source": source, "fraction": 0.6, "max_new_tokens": 8, "staleness": 1}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(a_recipe(chat_folder, tmp_path / "run", rollouts, engine={"steps": 4})))
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}

    def launched(*more):
        done = subprocess.run(
            [sys.executable, "-m", "draftsmith", "train", str(recipe), "--num-processes", "2", *more],
            env=environment | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    launched()
    folder = tmp_path / "run"
    curve = records(folder)
    assert len(curve) == 4
    assert all(abs(record["tokens"] - 400) < 130 for record in curve)
    states = [torch.load(folder / "step_000004" / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)]
    kept = [{tuple(one["input_ids"]) for one in state["states"]["steps"]["buffer"]["rollouts"]} for state in states]
    assert kept[0]
    assert not kept[0] & kept[1]
    if source == "online":
        assert "stream_block_efficiency" in curve[0]


def builder(target, rollouts, drafter, documents):
    """``build_steps`` of a recipe for some number of processes."""
    recipe = Recipe.model_validate(
        {
            "target": {"model": "x"},
            "drafter": drafter,
            "data": {"prompts": "x", "max_length": 30},
            "objective": {"rollouts": rollouts},
            "engine": {"steps": 1, "tokens_per_step": 100},
            "output": "x",
        }
    )
    encoded = EncodedSet.collect(enumerate(documents))
    served = served_sampling(recipe.evaluate.sampling)
    built = build_trainable(recipe.drafter, recipe.objective, target, encoded, served)

    class FirstOf(Engine):
        def __init__(self, world_size):
            self.rank, self.world_size, self.device = 0, world_size, torch.device("cpu")

    def build(world_size):
        return build_steps(recipe, target, TrainingData(encoded, None), FirstOf(world_size), built)

    return build


@pytest.mark.parametrize("rollouts", [ON_POLICY, ONLINE])
def test_fewer_distinct_prompts_than_processes_are_refused(rollouts, tiny_llama):
    documents = [Encoded([prompt, 9, i], [False, False, True]) for i in range(6) for prompt in (4, 5)]
    build = builder(as_target(tiny_llama(layers=2)), rollouts, ONE_LAYER, documents)
    with pytest.raises(BadInput, match=r"objective\.rollouts: 2 distinct prompts for 3 processes, expected one each"):
        build(3)
    assert next(build(2))


def test_prompts_without_room_for_an_answer_are_left_out(capsys):
    prompts = [[1] * length for length in (3, 8, 7, 9)]
    assert answerable(prompts, None) == prompts
    assert [len(prompt) for prompt in answerable(prompts, 8)] == [3, 7]
    assert "2 prompts leave no room for an answer in 8 tokens" in capsys.readouterr().out
    with pytest.raises(BadInput, match="no prompt leaves room for an answer in the 3 tokens of the context"):
        answerable(prompts, 3)


@pytest.mark.parametrize("rollouts", [{**ON_POLICY, "max_new_tokens": 40}, {**ONLINE, "max_new_tokens": 40}])
def test_a_target_with_a_short_context_trains_within_it(rollouts, tiny_gpt2):
    """Learned positions: beyond the last one there is none."""
    target = as_target(tiny_gpt2(layers=2, n_positions=24))
    documents = [
        Encoded(list(range(i, i + 24)), [False] * length + [True] * (24 - length))
        for i, length in enumerate((4, 12, 20, 23, 8, 16))
    ]
    steps = builder(target, rollouts, ONE_LAYER, documents)(1)
    for batch in next(steps):
        assert isinstance(batch, DistillBatch)
        assert int(batch.position_ids.max()) <= 23


REFUSED = {
    "layer_skip": (ONLINE, {"kind": "layer_skip"}, {}, "nothing of this layer_skip drafter is trained"),
    "layer_skip, drafter": (ON_POLICY, {"kind": "layer_skip"}, {}, "nothing of this layer_skip drafter is trained"),
    "bare exit": (
        ONLINE,
        {"kind": "early_exit", "exit_layer": 1, "adapter": "none"},
        {},
        "nothing of this early_exit drafter is trained",
    ),
    "heads": (ON_POLICY, {"kind": "medusa"}, {}, "rollouts.source: drafters of kind medusa write no text of their own"),
    "exit": (
        ON_POLICY,
        {"kind": "early_exit", "exit_layer": 1},
        {},
        "rollouts.source: drafters of kind early_exit write no text of their own",
    ),
    "sharded": (
        ON_POLICY,
        ONE_LAYER,
        {"engine": {"deepspeed": {"zero_optimization": {"stage": 3}}}},
        "a drafter sharded by ZeRO-3 cannot decode",
    ),
    "top k": (ON_POLICY, ONE_LAYER, {"data": {"cache": "topk"}}, "fixed data with a top-k cache cannot be mixed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rollouts_that_cannot_be_made_are_refused_with_the_recipe(case, chat_folder, tmp_path):
    """In one line, before anything is read or loaded: a dry run hears it too."""
    rollouts, drafter, sections, said = REFUSED[case]
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(a_recipe(chat_folder, tmp_path / "run", rollouts, drafter, **sections)))
    with pytest.raises(BadInput) as caught:
        load_recipe(str(path))
    (line,) = str(caught.value).splitlines()
    assert said in line


def test_a_share_of_zero_is_no_rollouts(chat_folder, tmp_path, capsys):
    path = tmp_path / "r.yaml"
    none = {"source": "drafter", "fraction": 0}
    path.write_text(yaml.safe_dump(a_recipe(chat_folder, tmp_path / "run", none, {"kind": "layer_skip"})))
    assert load_recipe(str(path)).objective.rollouts is None
    path.write_text(yaml.safe_dump(a_recipe(chat_folder, tmp_path / "run", ONLINE)))
    assert "source: online" in dry_run(load_recipe(str(path)))
