"""How steps are executed: one process, DDP or DeepSpeed, behind the few calls the loop makes.

The loop normalises: it hands in un-normalised sums and a scale of ``ranks / supervised positions of the whole step``.
DDP and DeepSpeed both average gradients over ranks, so what remains is exactly sum / count, whatever the lengths, the
number of accumulated micro-batches and the number of ranks.
"""

import logging
import math
import os
import socket
import warnings
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from torch import nn

from ..decode.packed import fast_products
from ..decode.quick import MANY_ROWS, quicker_in_bf16
from ..distill.trainee import LossSums, MicroBatch
from ..errors import BadInput
from .optimizer import build_adamw
from .rng import seed_all
from .weights import read_weights, write_weights
from .zero import zero_config

Precision = Literal["fp32", "bf16"]
# Ranks wait for rank 0 while it evaluates or writes: far longer than the backends' ten to thirty minutes.
_PATIENCE = timedelta(hours=12)


def resolve_precision(asked: Precision | Literal["auto"], device: torch.device) -> Precision:
    """`asked` itself; ``"auto"`` is bf16 where the products of a training step are faster in it on `device`, else fp32."""
    if asked != "auto":
        return asked
    return "bf16" if quicker_in_bf16(device, MANY_ROWS) else "fp32"


def start_engine(
    precision: Precision | Literal["auto"] = "fp32",
    *,
    deepspeed: dict[str, Any] | None = None,
    clip: float | None = 1.0,
    threads: int | None = None,
) -> "Engine":
    """Joins the process group that torchrun (or deepspeed, or accelerate launch) announced and checks what came of it.

    `deepspeed` is the recipe's ``engine.deepspeed``; without it several processes run DDP. Call it once, before any
    model is loaded: it sets the device. Raises BadInput when the launcher asked for an engine that the recipe does not
    name.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    cuda = torch.cuda.is_available()
    precision = resolve_precision(precision, torch.device("cuda" if cuda else "cpu"))
    zero = None if deepspeed is None else zero_config(deepspeed, precision=precision, clip=clip)
    _check_launcher(zero is not None)
    if cuda and precision == "bf16" and not torch.cuda.is_bf16_supported():
        raise BadInput("engine.precision: this GPU has no bf16; set fp32")
    if zero is not None:
        accelerator = _start_deepspeed(zero, precision, cuda)
    else:
        handlers: list[Any] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
        if "WORLD_SIZE" in os.environ:
            handlers.append(InitProcessGroupKwargs(backend="nccl" if cuda else "gloo", timeout=_PATIENCE))
        mixed = "bf16" if precision == "bf16" else "no"
        accelerator = Accelerator(cpu=not cuda, mixed_precision=mixed, kwargs_handlers=handlers)
    engine = Engine(accelerator, precision, zero, clip)
    engine.check()
    return engine


def _check_launcher(deepspeed: bool) -> None:
    """The recipe decides the engine: a launcher that decides otherwise is refused or, for the CPU flag, overruled."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise BadInput(
            "accelerate launch asked for FSDP, expected DDP or DeepSpeed: set engine.deepspeed in the recipe"
        )
    if not deepspeed and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise BadInput("the launcher asked for DeepSpeed, but the recipe has no engine.deepspeed: add it there")
    os.environ.pop("ACCELERATE_USE_CPU", None)  # with it, Accelerate silently ignores DeepSpeed


def _start_deepspeed(config: dict[str, Any], precision: Precision, cuda: bool) -> Accelerator:
    """An Accelerator over DeepSpeed; alone, this process is its own group of one."""
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it guesses and warns
    try:
        import deepspeed
    except ImportError as error:
        raise BadInput("engine.deepspeed: DeepSpeed is not installed (pip install 'draftsmith[gpu]')") from error
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    if "WORLD_SIZE" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if not cuda:  # plain gloo: DeepSpeed's shared-memory collectives need a compiler and half a minute on first use
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed's calls of collectives that torch renamed, one warning a call: nothing its user could change.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False),
        cpu=False,
        mixed_precision="bf16" if precision == "bf16" else "no",
        kwargs_handlers=[InitProcessGroupKwargs(backend="nccl" if cuda else "gloo", timeout=_PATIENCE)],
    )
    # Under ZeRO-3 transformers would shard every model it loads from now on, the target too, and layers copied out of a
    # sharded target are empty. Only the trainee is sharded, by `prepare`.
    unset_hf_deepspeed_config()
    return accelerator


class Engine:
    """Runs forward, backward and optimizer steps of one trainee on this rank."""

    trainee: nn.Module
    model: Any  # the trainee itself, or it in DDP or in a DeepSpeed engine
    optimizer: Any

    def __init__(self, accelerator: Accelerator, precision: Precision, zero: dict | None, clip: float | None) -> None:
        self.accelerator = accelerator
        self.precision = precision
        self.clip = clip
        self.zero_stage: int | None = None if zero is None else zero["zero_optimization"]["stage"]
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        self.device: torch.device = accelerator.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs, evaluates and writes."""
        return self.rank == 0

    @property
    def deepspeed(self) -> bool:
        """Whether DeepSpeed runs the steps."""
        return self.zero_stage is not None

    def check(self) -> None:
        """Raises RuntimeError unless engine and world size are what was asked for: Accelerate changes both silently."""
        expected = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world_size != expected:
            raise RuntimeError(f"the launcher announced {expected} processes, Accelerate sees {self.world_size}")
        is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        if is_deepspeed != self.deepspeed:
            raise RuntimeError(f"asked for {self.name}, Accelerate runs {self.accelerator.distributed_type}")

    @property
    def name(self) -> str:
        """The engine in words."""
        if self.deepspeed:
            return "DeepSpeed"
        return "DDP" if self.world_size > 1 else "one process"

    def describe(self) -> list[str]:
        """The log's first lines: engine, ZeRO stage, world size, device, precision."""
        stage = "none" if self.zero_stage is None else str(self.zero_stage)
        words = {
            "fp32": "fp32",
            "bf16": "bf16 (parameters in bf16, fp32 master copies)"
            if self.deepspeed
            else "bf16 (autocast, fp32 weights)",
        }
        distributed = torch.distributed.is_initialized()
        backend = f" over {torch.distributed.get_backend()}" if distributed else ""
        return [
            f"engine: {self.name}, ZeRO stage {stage}, world size {self.world_size}{backend}, {self.device.type}",
            f"precision: {words[self.precision]}, {torch.get_num_threads()} CPU threads a process",
        ]

    def seed(self, seed: int) -> None:
        """Seeds this rank: rank 0 with `seed` itself, every rank differently."""
        seed_all(seed + 1_000_003 * self.rank)

    def prepare(self, trainee: nn.Module, *, betas: tuple[float, float], epsilon: float, weight_decay: float) -> None:
        """Moves the trainee to the device, builds AdamW over its trainable parameters and wraps both.

        Train and eval modes stay as the caller set them. A frozen target that the trainee uses should not be registered
        as its submodule, or it would be wrapped, cast and saved along.
        """
        self.trainee = trainee.to(self.device)
        fused = not self.deepspeed and self.device.type in ("cpu", "cuda")
        optimizer = build_adamw(trainee, betas=betas, epsilon=epsilon, weight_decay=weight_decay, fused=fused)
        if self.deepspeed:
            self.model, _ = self.accelerator.prepare(trainee, optimizer)
            self.optimizer = self.model.optimizer
        else:
            self.model, self.optimizer = self.accelerator.prepare(trainee), optimizer

    def forward_backward(self, micro_batch: MicroBatch, scale: float, *, last: bool) -> LossSums:
        """Adds the gradient of ``loss_sum * scale`` to what is accumulated; the sums come back detached.

        `last` says that the optimizer step follows, so that gradients are averaged over ranks now (ZeRO-2 and 3 do it
        at every call, so all ranks make the same number of calls).
        """
        if self.deepspeed:
            self.model.set_gradient_accumulation_boundary(last)
        with self._no_sync() if not last else nullcontext(), self.products():
            sums = self.model(micro_batch)
            if not sums.loss_sum.requires_grad:
                raise RuntimeError("the trainee's loss_sum depends on no trainable parameter: make it zero times one")
            loss = sums.loss_sum * scale
            if self.deepspeed:
                self.model.backward(loss)
            else:
                loss.backward()
        return LossSums(sums.loss_sum.detach(), sums.count, sums.metrics)

    def products(self) -> AbstractContextManager[Any]:
        """Faster products of training passes in fp32 on a CPU. In bf16 torch calls oneDNN by itself."""
        return fast_products(self.device) if self.precision == "fp32" else nullcontext()

    def as_in_training(self) -> AbstractContextManager[Any]:
        """Inside, passes of a trainee that is not prepared yet compute as those of :meth:`forward_backward`: to time them."""
        inside = ExitStack()
        inside.enter_context(self.products())
        # Without the cache, which would keep the cast weights from one pass to the next: each training pass casts them.
        in_bf16 = self.precision == "bf16"
        inside.enter_context(torch.autocast(self.device.type, torch.bfloat16, enabled=in_bf16, cache_enabled=False))
        return inside

    def _no_sync(self) -> AbstractContextManager[Any]:
        return self.model.no_sync() if isinstance(self.model, nn.parallel.DistributedDataParallel) else nullcontext()

    def step(self, learning_rate: float) -> float | None:
        """Clips, takes the optimizer step, drops the gradients and returns the gradient's norm before clipping.

        A gradient that is not finite changes nothing (under DeepSpeed the step is taken: the caller stops without
        saving). None where the engine does not tell the norm (ZeRO stage 0).
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("rate", 1.0)
        if self.deepspeed:
            self.model.step()
            norm = self.model.get_global_grad_norm()
            return None if norm is None else float(norm)
        trainable = [parameter for parameter in self.trainee.parameters() if parameter.requires_grad]
        norm = float(nn.utils.clip_grad_norm_(trainable, self.clip or math.inf))
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (numbers, strings, dicts, …), in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def share(self, value: Any) -> Any:
        """Rank 0's value on every rank; also makes the ranks wait for rank 0."""
        return self.gather(value if self.is_main else None)[0]

    def wait(self) -> None:
        """Waits until every rank is here."""
        self.gather(None)

    def gathered(self) -> AbstractContextManager[Any]:
        """Inside, the trainee's parameters are whole on every rank, for reading; ZeRO-3 shards them elsewhere."""
        if self.zero_stage != 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(self.trainee.parameters()), modifier_rank=None)

    def save(self, folder: Path) -> None:
        """Writes weights and optimizer state into `folder`; all ranks call it.

        ``trainee.safetensors`` holds the whole weights whatever the engine; the rest is in ``optimizer.pt`` or
        ``deepspeed/``.
        """
        if self.deepspeed:
            self.model.save_checkpoint(str(folder), tag="deepspeed", save_latest=False)
            weights: Any = self.accelerator.get_state_dict(self.model)
        else:
            weights = self.trainee.state_dict()
        if self.is_main:
            write_weights(weights, folder / "trainee.safetensors")
            if not self.deepspeed:
                torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        """Reads what :meth:`save` wrote; all ranks call it. DeepSpeed unpickles its own files, written by this run."""
        if self.deepspeed:
            path, _ = self.model.load_checkpoint(str(folder), tag="deepspeed")
            if path is None:
                raise RuntimeError(f"DeepSpeed could not load {folder / 'deepspeed'}")
            return
        self.trainee.load_state_dict(read_weights(folder / "trainee.safetensors"))
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True, map_location="cpu"))

    def close(self) -> None:
        """Leaves the process group. The trainee can be used further, in this process alone.

        DDP goes first. As the last owner of the group it would end gloo's threads with Python's lock held, and wait
        forever for one that needs the lock to let go of its last collective.
        """
        self.model = None
        if self.name == "DDP":
            self.accelerator.free_memory()
        self.accelerator.end_training()
