"""Fast products of 1 to 64 rows on CPU: linear layers whose weights oneDNN has reordered.

A verification pass multiplies 2 to 16 rows by every weight. The default float32 path of torch makes that cost far more than
one row; with weights in oneDNN's blocked layout it costs little more. Everything falls back to the plain modules.

The target stays transformers' own code with other products inside, so that what it computes is beyond doubt. A draft model
may go further: its layers are fused (:mod:`.fused`), which a lossless rule makes a matter of speed alone.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from ..models.draft_lm import DraftLM
from .fused import fuse, unfuse
from .onednn import PackedProduct, product, supported

Backend = Literal["auto", "plain", "packed"]


def use_backend(model: nn.Module, backend: Backend) -> Backend:
    """Switch the linear layers of `model` and return the backend now in use, ``"plain"`` or ``"packed"``.

    Parameters, ``state_dict`` and gradients are untouched: a packed layer falls back to its own weight where gradients are
    recorded. ``auto`` measures both on one-token and five-token products and keeps the faster. Call again after the weights
    have changed: the packed copies do not follow them.
    """
    unpack(model)
    layers = [module for module in model.modules() if _packable(module)]
    if backend == "plain" or not layers:
        return "plain"
    if backend == "auto" and not _packed_is_faster(layers):
        return "plain"
    for layer in layers:
        _pack(layer)
    if isinstance(model, DraftLM):
        fuse(model)
    return "packed"


def unpack(model: nn.Module) -> None:
    """Give every layer its own forward back and free the packed copies."""
    if isinstance(model, DraftLM):
        unfuse(model)
    for module in model.modules():
        if _PACKED in module.__dict__:
            del module.__dict__["forward"], module.__dict__[_PACKED]


def is_packed(model: nn.Module) -> bool:
    """Whether some layer uses a packed copy of its weights."""
    return any(_PACKED in module.__dict__ for module in model.modules())


_PACKED = "_draftsmith_packed"


def _packable(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    if not isinstance(module, nn.Linear | Conv1D) or type(module) not in (nn.Linear, Conv1D):
        return False
    return module.weight.device.type == "cpu" and supported(module.weight.dtype)


def _matrix(layer: nn.Linear | Conv1D) -> Tensor:
    """The layer's weight as ``[out, in]`` (GPT-2's Conv1D stores the transpose)."""
    weight = layer.weight.detach()
    return weight.t().contiguous() if isinstance(layer, Conv1D) else weight


def _pack(layer: nn.Linear | Conv1D) -> None:
    packed, dtype, plain = PackedProduct(_matrix(layer), layer.bias), layer.weight.dtype, layer.forward

    def forward(x: Tensor) -> Tensor:
        if (torch.is_grad_enabled() and x.requires_grad) or x.dtype is not dtype:
            return plain(x)
        return packed(x)

    # Instance attributes, not submodules: the module's parameters and names stay as they are.
    layer.__dict__[_PACKED] = packed
    layer.__dict__["forward"] = forward


@torch.inference_mode()
def _packed_is_faster(layers: list[nn.Linear | Conv1D], rows: tuple[int, ...] = (1, 5), budget: float = 1.0) -> bool:
    """Time the largest layers of each shape both ways, interleaved, for at most about `budget` seconds."""
    shapes: dict[tuple[int, ...], nn.Linear | Conv1D] = {tuple(_matrix(layer).shape): layer for layer in layers}
    chosen = sorted(shapes.values(), key=lambda layer: layer.weight.numel())[-4:]
    pairs = []
    for layer in chosen:
        weight = _matrix(layer)
        pairs.append((weight, PackedProduct(weight)))
    plain_times: list[float] = []
    packed_times: list[float] = []
    inputs = [[torch.randn(n, weight.shape[1], dtype=weight.dtype) for n in rows] for weight, _ in pairs]
    deadline = time.perf_counter() + budget
    while len(plain_times) < 3 or (time.perf_counter() < deadline and len(plain_times) < 30):
        start = time.perf_counter()
        for (weight, _), xs in zip(pairs, inputs, strict=True):
            for x in xs:
                torch.nn.functional.linear(x, weight)
        middle = time.perf_counter()
        for (_, packed), xs in zip(pairs, inputs, strict=True):
            for x in xs:
                packed(x)
        plain_times.append(middle - start)
        packed_times.append(time.perf_counter() - middle)
    middle_of = len(plain_times) // 2
    return sorted(packed_times)[middle_of] < sorted(plain_times)[middle_of]


# Below this many multiplications a product is over before a Python dispatch pays.
_WORTH_IT = 2**22


def fast_products(device: torch.device) -> AbstractContextManager[Any]:
    """:class:`FastProducts` on a CPU, nothing elsewhere."""
    return FastProducts() if device.type == "cpu" and supported() else nullcontext()


class FastProducts(TorchDispatchMode):
    """Large float32 matrix products on a CPU by oneDNN, forward and backward; everything else as it is.

    ``with FastProducts():`` around a training step. torch hands float32 products to the BLAS it was built with, which on
    some processors runs at half of what oneDNN's kernels reach (measured: 105-120 against 210-270 GFLOP/s on one core with
    AVX-512). Results differ in rounding only, and are the same in every run.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not kwargs:
            if func is torch.ops.aten.mm.default and _large(*args):
                return product(*args)
            if func is torch.ops.aten.addmm.default and _large(*args[1:]):
                return product(*args[1:]).add_(args[0])
            if func is torch.ops.aten.addmm_.default and _large(*args[1:]):
                return args[0].add_(product(*args[1:]))
        return func(*args, **kwargs)


def _large(a: Tensor, b: Tensor) -> bool:
    on_cpu = a.device.type == "cpu" and a.dtype is b.dtype is torch.float32
    return on_cpu and a.shape[0] * a.shape[1] * b.shape[1] >= _WORTH_IT
