import math

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from draftsmith.decode import packed
from draftsmith.decode.quick import MANY_ROWS
from draftsmith.distill.trainee import LossSums
from draftsmith.errors import BadInput
from draftsmith.train import engine as engine_module
from draftsmith.train.engine import Engine, resolve_precision, start_engine

ADAMW = {"betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.0}


def gradients_of(engine: Engine) -> list[torch.Tensor]:
    return [parameter.grad for parameter in engine.trainee.parameters() if parameter.grad is not None]


def test_an_engine_other_than_the_one_asked_for_is_noticed(toy) -> None:
    engine = start_engine("fp32")
    engine.zero_stage = 2
    with pytest.raises(RuntimeError, match="asked for DeepSpeed, Accelerate runs"):
        engine.check()
    engine.zero_stage = None
    engine.accelerator.state.distributed_type = DistributedType.DEEPSPEED
    with pytest.raises(RuntimeError, match="asked for one process, Accelerate runs"):
        engine.check()


def test_a_world_of_another_size_than_the_launcher_s_is_noticed(toy, monkeypatch) -> None:
    engine = start_engine("fp32")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="the launcher announced 2 processes, Accelerate sees 1"):
        engine.check()


@pytest.mark.parametrize(("name", "message"), [("FSDP", "asked for FSDP"), ("DEEPSPEED", "has no engine.deepspeed")])
def test_a_launcher_that_asks_for_another_engine_than_the_recipe_is_refused(monkeypatch, name, message) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(BadInput, match=message):
        start_engine("fp32")


def test_bf16_is_autocast_over_fp32_weights(toy) -> None:
    class Watching(toy.Toy):
        def logits(self, ids):
            self.seen = self.hidden(self.norm(self.embedding(ids))).dtype
            return super().logits(ids)

    engine = start_engine("bf16")
    engine.prepare(Watching(), **ADAMW)
    sums = engine.forward_backward(next(toy.ToySteps())[0], 1.0, last=True)
    assert engine.trainee.seen == torch.bfloat16
    assert sums.loss_sum.dtype == torch.float32
    assert {parameter.dtype for parameter in engine.trainee.parameters()} == {torch.float32}
    assert {gradient.dtype for gradient in gradients_of(engine)} == {torch.float32}
    assert engine.describe()[1].startswith("precision: bf16 (autocast, fp32 weights)")


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_where_a_step_s_products_are_faster_in_it(native, precision, toy, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        engine_module, "quicker_in_bf16", lambda device, rows: (asked.append((device.type, rows)), native)[1]
    )
    engine = start_engine("auto")
    assert engine.precision == precision
    assert engine.accelerator.mixed_precision == {"bf16": "bf16", "fp32": "no"}[precision]
    assert engine.describe()[1].startswith(f"precision: {precision}")
    assert asked == [(engine.device.type, MANY_ROWS)]
    assert {resolve_precision(named, engine.device) for named in ("fp32", "bf16")} == {"fp32", "bf16"}
    assert len(asked) == 1, "what is named is not looked up"


@pytest.mark.parametrize(("precision", "onednn"), [("fp32", True), ("fp32", False), ("bf16", True)])
def test_passes_are_timed_as_they_will_be_computed(precision, onednn, toy, monkeypatch) -> None:
    monkeypatch.setattr(packed, "quicker_by_onednn", lambda: onednn)

    class Watching(toy.Toy):
        def logits(self, ids):
            hidden = self.hidden(self.norm(self.embedding(ids)))
            self.seen.append((hidden.dtype, bool(_get_current_dispatch_mode_stack())))
            return super().logits(ids)

    engine, trainee = start_engine(precision), Watching()
    trainee.seen = []
    batch = next(toy.ToySteps())[0]
    with engine.as_in_training():
        for _ in range(2):
            trainee(batch).loss_sum.backward()
    trainee.zero_grad()
    engine.prepare(trainee, **ADAMW)
    engine.forward_backward(batch, 1.0, last=True)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    # In fp32 on a CPU large products are dispatched to oneDNN where it is faster; in bf16 torch does so by itself.
    dispatched = precision == "fp32" and engine.device.type == "cpu" and onednn
    assert trainee.seen == [(dtype, dispatched)] * 3


def test_clipping_bounds_the_step_s_gradient_and_the_norm_before_it_is_returned(toy) -> None:
    engine = start_engine("fp32", clip=1e-3)
    engine.prepare(toy.Toy(), **ADAMW)
    engine.forward_backward(next(toy.ToySteps())[0], 1.0, last=True)
    gradients = gradients_of(engine)
    norm = engine.step(0.0)
    assert norm is not None
    assert norm > 1e-2
    assert math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients)) == pytest.approx(1e-3, rel=1e-2)
    assert all(parameter.grad is None for parameter in engine.trainee.parameters())


def test_a_gradient_that_is_not_finite_changes_no_weight(toy) -> None:
    engine = start_engine("fp32")
    engine.prepare(toy.Toy(), **ADAMW)
    before = [parameter.clone() for parameter in engine.trainee.parameters()]
    engine.forward_backward(next(toy.ToySteps())[0], math.inf, last=True)
    assert not math.isfinite(engine.step(0.1) or 0.0)
    assert all(torch.equal(now, then) for now, then in zip(engine.trainee.parameters(), before, strict=True))


def test_a_loss_that_depends_on_nothing_trainable_is_an_error(toy) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def forward(self, batch) -> LossSums:
            return LossSums(torch.zeros(()), 0, {})

    engine = start_engine("fp32")
    engine.prepare(Constant(), **ADAMW)
    with pytest.raises(RuntimeError, match="depends on no trainable parameter"):
        engine.forward_backward(next(toy.ToySteps())[0], 1.0, last=True)


def test_ranks_draw_differently_and_rank_0_by_the_seed_itself(toy) -> None:
    engine = start_engine("fp32")
    engine.seed(5)
    first = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), first)
    engine.rank = 1
    engine.seed(5)
    assert not torch.equal(torch.rand(3), first)
