"""Where the time of a decoding step goes, and how often a step makes the host wait for the device."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from draftsmith.decode.drafters import as_drafter
from draftsmith.decode.forward import OWN_PASSES
from draftsmith.decode.loop import decode_steps
from draftsmith.decode.prompts import pad_rows
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.step import Decoding, Step
from draftsmith.models.target import Target

PHASES = ("draft", "verification_pass", "judge", "emit")
# What reads a value of a tensor: on a GPU the host waits for it.
_READS = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "masked_select"}


@dataclass
class StepTimes:
    """Seconds of one step. `outside` is by phase, the forwards of target and drafter taken off."""

    whole: float = 0.0
    forward: dict[str, float] = field(default_factory=lambda: {"target": 0.0, "drafter": 0.0})
    outside: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def share_outside(self) -> float:
        """Time outside of model forwards over the whole."""
        return 1 - sum(self.forward.values()) / self.whole


class _Clock:
    """Times the forwards and the phases of one step after another."""

    def __init__(self) -> None:
        self.now = StepTimes()
        self.inside = 0

    @contextmanager
    def forwards_of(self, name: str, module: nn.Module) -> Iterator[None]:
        """Time the calls of `module`."""
        started = 0.0

        def before(*_: Any) -> None:
            nonlocal started
            self.inside += 1
            started = time.perf_counter()

        def after(*_: Any) -> None:
            self.now.forward[name] += time.perf_counter() - started
            self.inside -= 1

        hooks = [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]
        own = module.__dict__.get(OWN_PASSES)  # fused passes, which call no forward
        with ExitStack() as stack:
            for method in ("run", "first", "rest") if own is not None else ():
                stack.enter_context(patch.object(own, method, _between(before, getattr(own, method), after)))
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()

    def timed(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method` of the decoder, timed without the forwards in it."""

        def run(decoding: Decoding, *arguments: Any) -> Any:
            forwards, start = sum(self.now.forward.values()), time.perf_counter()
            result = method(decoding, *arguments)
            passed = time.perf_counter() - start
            self.now.outside[phase] += passed - (sum(self.now.forward.values()) - forwards)
            return result

        return run


def _between(before: Callable[..., None], method: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
    def run(*arguments: Any, **more: Any) -> Any:
        before()
        try:
            return method(*arguments, **more)
        finally:
            after()

    return run


class _CountReads(TorchFunctionMode):
    """Counts the calls that read tensors, apart from those that a model's own code makes."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__()
        self.clock, self.reads = clock, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        by_mask = name in ("__getitem__", "__setitem__") and _is_mask(args[1])
        self.reads += (name in _READS or by_mask) and not self.clock.inside
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in parts)


def _steps(target: Target, drafter: Any, prompt: list[int], settings: dict[str, Any]) -> Iterator[Step]:
    return decode_steps(
        target, drafter, pad_rows([prompt], target), sampling=Sampling(0.0), eos_token_id=[], **settings
    )


def _models(target: Target, drafter: Any) -> list[tuple[str, nn.Module]]:
    """The modules whose calls are forwards."""
    module = getattr(drafter, "module", None)
    parts = [] if module is None else list(module) if isinstance(module, nn.ModuleList) else [module]
    return [("target", target.model), *(("drafter", part) for part in parts)]


def time_steps(target: Target, drafter: Any, prompt: list[int], **settings: Any) -> list[StepTimes]:
    """Every step after `prompt` but the first, which prefills. `settings` are those of ``decode_steps``."""
    clock, times = _Clock(), []
    drafter = as_drafter(drafter, target)
    with ExitStack() as stack:
        for name, module in _models(target, drafter):
            stack.enter_context(clock.forwards_of(name, module))
        for phase in PHASES:
            stack.enter_context(patch.object(Decoding, phase, clock.timed(phase, getattr(Decoding, phase))))
        steps = _steps(target, drafter, prompt, settings)
        next(steps)
        while True:
            clock.now, start = StepTimes(), time.perf_counter()
            if next(steps, None) is None:
                return times
            clock.now.whole = time.perf_counter() - start
            times.append(clock.now)


def count_reads(target: Target, drafter: Any, prompt: list[int], **settings: Any) -> float:
    """Reads of tensors by the decoder in a step (the first one aside), on average."""
    clock = _Clock()
    drafter = as_drafter(drafter, target)
    with ExitStack() as stack:
        for name, module in _models(target, drafter):
            stack.enter_context(clock.forwards_of(name, module))
        steps = _steps(target, drafter, prompt, settings)
        next(steps)
        with _CountReads(clock) as counted:
            number = sum(1 for _ in steps)
    return counted.reads / number


def median_rows(times: list[StepTimes]) -> list[tuple[str, float]]:
    """(what, median milliseconds) of a step's parts."""
    middle = statistics.median
    rows = [("whole step", middle(step.whole for step in times))]
    rows += [(f"{name}'s forwards", middle(step.forward[name] for step in times)) for name in times[0].forward]
    rows += [(f"{phase.replace('_', ' ')}, outside", middle(step.outside[phase] for step in times)) for phase in PHASES]
    return [(name, 1000 * seconds) for name, seconds in rows]
