import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftsmith.distill.trainee import LossSums
from draftsmith.errors import BadInput
from draftsmith.train import checkpoint
from draftsmith.train.engine import start_engine
from draftsmith.train.interrupt import StopRequest
from draftsmith.train.logs import read_metrics
from draftsmith.train.loop import Diverged, Plan, accumulate, train

ADAMW = {"betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.0}


@pytest.fixture
def engine(toy):
    engine = start_engine("fp32", clip=None)
    torch.manual_seed(0)
    engine.prepare(toy.Toy(), **ADAMW)
    return engine


def plan(folder: Path, **changes) -> Plan:
    return Plan(folder, **({"total_steps": 6, "peak_learning_rate": 0.03, "checkpoint_every": 2} | changes))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(2, 9), st.integers(0, 8)), min_size=1, max_size=5), seed=st.integers(0, 99)
)
def test_the_gradient_is_the_sum_over_the_count_however_the_step_is_cut(engine, toy, lengths, seed) -> None:
    """Against one plain mean over all supervised positions; micro-batches with nothing supervised included."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for length, supervised in lengths:
        mask = torch.zeros(1, length - 1, dtype=torch.bool)
        mask[0, : min(supervised, length - 1)] = True
        batches.append(toy.Batch(torch.randint(toy.VOCABULARY, (1, length), generator=generator), mask))
    count = int(sum(batch.supervised for batch in batches))
    if count == 0:
        with pytest.raises(BadInput, match="no supervised token"):
            accumulate(engine, batches, StopRequest())
        return
    logits = torch.cat([engine.trainee.logits(batch.ids[:, :-1])[batch.mask] for batch in batches])
    labels = torch.cat([batch.ids[:, 1:][batch.mask] for batch in batches])
    loss = torch.nn.functional.cross_entropy(logits, labels)
    expected = torch.autograd.grad(loss, list(engine.trainee.parameters()))

    totals = accumulate(engine, batches, StopRequest())

    assert totals.loss == pytest.approx(loss.item(), rel=1e-5)
    assert totals.supervised == count
    assert totals.metrics["agreement"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
    for parameter, gradient in zip(engine.trainee.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    engine.optimizer.zero_grad()


def test_a_staged_trainee_hears_of_every_step_and_its_slower_part_moves_less(toy, tmp_path) -> None:
    class Staged(toy.Toy):
        heard: list[tuple[int, int]] = []  # noqa: RUF012

        def begin_step(self, step: int, total_steps: int) -> None:
            self.heard.append((step, total_steps))

        def learning_rate_share(self, name: str) -> float:
            return 0.01 if name.startswith("head.") else 1.0

    engine = start_engine("fp32", clip=None)
    trainee = Staged()
    before = {name: parameter.detach().clone() for name, parameter in trainee.named_parameters()}
    engine.prepare(trainee, **ADAMW)
    train(engine, toy.ToySteps(), plan(tmp_path, total_steps=3, warmup=0))
    assert trainee.heard == [(0, 3), (1, 3), (2, 3)]
    moved = {name: float((p.detach() - before[name]).abs().max()) for name, p in trainee.named_parameters()}
    assert 0 < moved["head.weight"] < 0.05 * moved["hidden.weight"]


def test_training_learns_logs_and_finishes(toy, tmp_path, losses) -> None:
    outcome, _ = toy.run(tmp_path, total_steps=60, checkpoint_every=50)
    assert outcome.finished
    assert outcome.step == 60
    assert outcome.checkpoint.name == "step_000060"
    curve = losses(tmp_path)
    assert len(curve) == 60
    assert curve[-1][1] < 0.5 * curve[0][1]
    record = read_metrics(tmp_path / "metrics.jsonl")[0]
    expected = {"kind", "step", "loss", "agreement", "learning_rate", "gradient_norm", "supervised", "tokens"}
    assert record.keys() == expected | {"seconds", "tokens_per_second"}


def test_a_resumed_run_repeats_the_losses_of_one_that_never_stopped(toy, tmp_path, losses) -> None:
    toy.run(tmp_path / "whole", dropout=0.2, keep_checkpoints=9)
    toy.reset()
    shutil.copytree(tmp_path / "whole", tmp_path / "cut", symlinks=True)
    for step in (8, 12):
        shutil.rmtree(tmp_path / "cut" / checkpoint.folder_name(step))
    random.seed(99)
    numpy.random.seed(98)
    outcome, _ = toy.run(tmp_path / "cut", dropout=0.2, resume=True)
    assert outcome.finished
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_resuming_a_finished_run_trains_nothing_and_says_so(toy, tmp_path, capsys, losses) -> None:
    toy.run(tmp_path)
    toy.reset()
    before = losses(tmp_path)
    outcome, _ = toy.run(tmp_path, resume=True)
    assert outcome == (12, True, None, tmp_path / "step_000012")
    assert losses(tmp_path) == before
    assert "step 12 of 12: this run is finished" in capsys.readouterr().out


def test_a_folder_that_holds_a_run_needs_resume(toy, tmp_path) -> None:
    toy.run(tmp_path, total_steps=2)
    toy.reset()
    with pytest.raises(BadInput, match="add --resume, or choose another output"):
        toy.run(tmp_path, total_steps=2)


def test_a_run_whose_checkpoints_are_all_damaged_starts_anew_and_says_so(toy, tmp_path, capsys, losses) -> None:
    toy.run(tmp_path)
    toy.reset()
    before = losses(tmp_path)
    for folder in checkpoint.list_checkpoints(tmp_path):
        (folder / "manifest.json").unlink()
    toy.run(tmp_path, resume=True)
    assert "no sound checkpoint is left: starting from step 0" in capsys.readouterr().out
    assert losses(tmp_path) == before


def test_evaluation_runs_on_its_steps_and_at_the_end_and_disturbs_nothing(engine, toy, tmp_path, losses) -> None:
    engine.trainee.dropout.p = 0.3
    engine.trainee.embedding.eval()
    seen: list[int] = []

    def evaluate(step: int) -> dict:
        seen.append(step)
        engine.trainee.eval()
        drawn = torch.rand(5), random.random(), numpy.random.rand()
        assert len(drawn) == 3
        return {"alpha": 0.1 * step}

    weights = {name: tensor.clone() for name, tensor in engine.trainee.state_dict().items()}
    train(engine, toy.ToySteps(), plan(tmp_path, total_steps=7, evaluate_every=3), evaluate=evaluate)
    assert seen == [3, 6, 7]
    assert engine.trainee.dropout.training
    assert not engine.trainee.embedding.training
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if record["kind"] == "evaluation"]
    assert [(record["step"], round(record["alpha"], 3)) for record in records] == [(3, 0.3), (6, 0.6), (7, 0.7)]

    toy.reset()
    other = start_engine("fp32", clip=None)
    other.prepare(toy.Toy(dropout=0.3), **ADAMW)
    other.trainee.load_state_dict(weights)
    train(other, toy.ToySteps(), plan(tmp_path / "without", total_steps=7))
    assert losses(tmp_path) == losses(tmp_path / "without")


def test_an_evaluation_that_was_interrupted_is_made_up_for_on_resume(engine, toy, tmp_path) -> None:
    def killed(step: int) -> dict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(engine, toy.ToySteps(), plan(tmp_path, evaluate_every=4), evaluate=killed)
    asked: list[int] = []
    train(
        engine,
        toy.ToySteps(),
        plan(tmp_path, evaluate_every=4, resume=True),
        evaluate=lambda step: asked.append(step) or {"step_asked": step},
    )
    assert asked == [4, 6]


class Poisoned(torch.nn.Module):
    """Infinite loss, or a finite loss with an infinite gradient, from the step on that is asked for."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.what, self.calls = what, 0

    def forward(self, batch) -> LossSums:
        self.calls += 1
        loss = (self.weight**2).sum()
        if self.calls > 9:  # three micro-batches a step: the fourth step
            nothing = self.weight - self.weight.detach()
            loss = loss * float("nan") if self.what == "loss" else loss + nothing.sqrt().sum()
        return LossSums(loss, batch.supervised, {})


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite_stops_the_run_by_step_and_saves_nothing(toy, tmp_path, what) -> None:
    engine = start_engine("fp32")
    engine.prepare(Poisoned(what), **ADAMW)
    with pytest.raises(Diverged, match=rf"^step 4: the .*{what} is (nan|inf); the last checkpoint is .*step_000003;"):
        train(engine, toy.ToySteps(), plan(tmp_path, checkpoint_every=1))
    assert checkpoint.list_checkpoints(tmp_path)[-1].name == "step_000003"
    assert all(torch.isfinite(parameter).all() for parameter in engine.trainee.parameters())
    json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_trainee_that_counts_otherwise_than_its_micro_batches_is_an_error(toy, tmp_path) -> None:
    class Miscounting(toy.Toy):
        def forward(self, batch) -> LossSums:
            sums = super().forward(batch)
            return sums._replace(count=sums.count + 1)

    engine = start_engine("fp32")
    engine.prepare(Miscounting(), **ADAMW)
    with pytest.raises(RuntimeError, match=r"counted .* supervised positions, its micro-batches announce"):
        train(engine, toy.ToySteps(), plan(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(engine, toy, tmp_path, capfd, losses, number) -> None:
    class Signalled(toy.ToySteps):
        drawn = 0

        def __next__(self):
            self.drawn += 1
            if self.drawn == 3:
                os.kill(os.getpid(), number)
            return super().__next__()

    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    settings_ = plan(tmp_path, checkpoint_every=100, resume_command="draftsmith train r --resume")
    outcome = train(engine, Signalled(), settings_)
    assert outcome == (3, False, number, tmp_path / "step_000003")
    assert checkpoint.damage(outcome.checkpoint) is None
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    out, err = capfd.readouterr()
    assert f"stopped after step 3 of 6, saved {tmp_path}/step_000003; to go on: draftsmith train r --resume" in out
    assert f"{number.name}: finishing this step" in err
    assert len(losses(tmp_path)) == 3


def test_a_second_signal_stops_at_once(engine, toy, tmp_path) -> None:
    class Impatient(toy.ToySteps):
        def __next__(self):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            return super().__next__()

    with pytest.raises(KeyboardInterrupt):
        train(engine, Impatient(), plan(tmp_path))
    assert not checkpoint.list_checkpoints(tmp_path)
