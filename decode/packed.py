"""Fast products of 1 to 64 rows on CPU: linear layers whose weights oneDNN has reordered.

A verification pass multiplies 2 to 16 rows by every weight. The default float32 path of torch makes that cost far more than
one row; with weights in oneDNN's blocked layout it costs little more. On some processors the plain products are the faster
ones for the fewest rows, so ``auto`` measures from how many on the packed copies are used; both give the same numbers up to
rounding. Everything falls back to the plain modules.

The passes around these products are fused where the model's layers allow it (:mod:`.fused`), on either backend. Weights are
rounded nowhere but in drafters that are to keep theirs in float16 (:mod:`.half`): a lossless rule makes that a matter of
speed alone.
"""

import statistics
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..models.draft_lm import DraftLM
from .fused import Join, fuse, is_fused, unfuse
from .half import HalfProduct, fits_half, half_supported
from .onednn import PackedProduct, product, supported
from .quick import quicker_by_onednn

Backend = Literal["auto", "plain", "packed"]


def use_backend(model: nn.Module, backend: Backend, plain_rows: int = 0) -> Backend:
    """Switch the linear layers of `model` and return the backend now in use, ``"plain"`` or ``"packed"``.

    Parameters, ``state_dict`` and gradients are untouched: a packed layer falls back to its own weight where gradients are
    recorded, and for products of at most `plain_rows` rows. ``auto`` measures that number, and leaves the model plain where
    packed copies are no gain for any number of rows that a verification pass has. Call again after weights or modules have
    changed: packed copies do not follow the former. Passes are fused on both backends.
    """
    unpack(model)
    layers = [module for module in model.modules() if _packable(module)]
    if backend == "auto" and layers:
        plain_rows = _measured_plain_rows(layers)
        if plain_rows >= _ROWS[-1]:
            backend = "plain"
    if backend == "plain" or not layers:
        _fuse(model, None)
        return "plain"
    _pack_all(model, layers, _Packing(PackedProduct, plain_rows))
    return "packed"


def use_backend_of(target: nn.Module, drafter: nn.Module, half: bool = False) -> Backend:
    """Switch a drafter's modules to the backend that its target uses, down to the rows that stay plain; those that it shares
    with the target stay the target's. (Fused passes of a packed draft model are packed for any number of rows.)

    `half`: with weights kept in float16 instead, where all of its own fit into it. Returns what became of its own modules:
    ``"packed"`` (in either way) or ``"plain"``.
    """
    shared = {id(module) for module in target.modules()}
    unpack(drafter, but=shared)
    layers = [module for module in drafter.modules() if _packable(module)]
    own = [layer for layer in layers if id(layer) not in shared]
    if half and half_supported() and own and all(fits_half(layer.weight) for layer in own):
        _pack_all(drafter, own, _Packing(HalfProduct, most_rows=_HALF_ROWS), join=len(own) == len(layers))
    elif is_packed(target) and own:
        _pack_all(drafter, own, _Packing(PackedProduct, _plain_rows_of(target)), join=len(own) == len(layers))
    else:
        if id(drafter) not in shared:
            _fuse(drafter, None)
        return "plain"
    return "packed"


def unpack(model: nn.Module, but: Container[int] = ()) -> None:
    """Give the model and all in it their own forwards back and free the copies. `but`: modules (by ``id``) left alone."""
    for module in model.modules():
        if id(module) in but:
            continue
        unfuse(module)
        module.__dict__.pop(_PACKING, None)
        if _PACKED in module.__dict__:
            del module.__dict__["forward"], module.__dict__[_PACKED]


def is_packed(model: nn.Module) -> bool:
    """Whether some layer uses a packed copy of its weights."""
    return any(_PACKED in module.__dict__ for module in model.modules())


@contextmanager
def unpacked(model: nn.Module) -> Iterator[None]:
    """Inside, plain products and transformers' own passes, and the weights may change; afterwards what :func:`use_backend`
    had set.
    """
    packing, fused = model.__dict__.get(_PACKING), is_fused(model)
    unpack(model)
    try:
        yield
    finally:
        if packing is not None:
            _pack_all(model, [module for module in model.modules() if _packable(module)], packing)
        elif fused:
            _fuse(model, None)


class _Packing(NamedTuple):
    """How layers are packed: products of more than `plain_rows` rows, and of `most_rows` at most (None: any number)."""

    make: Join
    plain_rows: int = 0
    most_rows: int | None = None


# In the ``__dict__`` of a packed layer; in that of a packed model.
_PACKED, _PACKING = "_draftsmith_packed", "_draftsmith_packing"


def _pack_all(model: nn.Module, layers: Sequence["nn.Linear | Conv1D"], packing: _Packing, join: bool = True) -> None:
    for layer in layers:
        _pack(layer, packing)
    model.__dict__[_PACKING] = packing
    _fuse(model, packing.make if join and isinstance(model, DraftLM) else None)


def _plain_rows_of(target: nn.Module) -> int:
    packing = target.__dict__.get(_PACKING)
    return 0 if packing is None else packing.plain_rows


def _fuse(model: nn.Module, join: Join | None) -> None:
    if isinstance(model, DraftLM | PreTrainedModel):
        fuse(model, join)


def _packable(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    if not isinstance(module, nn.Linear | Conv1D) or type(module) not in (nn.Linear, Conv1D):
        return False
    return module.weight.device.type == "cpu" and supported(module.weight.dtype)


def _matrix(layer: nn.Linear | Conv1D) -> Tensor:
    """The layer's weight as ``[out, in]`` (GPT-2's Conv1D stores the transpose)."""
    weight = layer.weight.detach()
    return weight.t().contiguous() if isinstance(layer, Conv1D) else weight


def _pack(layer: nn.Linear | Conv1D, packing: _Packing) -> None:
    packed, dtype, plain = packing.make(_matrix(layer), layer.bias), layer.weight.dtype, layer.forward
    plain_rows, most_rows = packing.plain_rows, packing.most_rows

    def forward(x: Tensor) -> Tensor:
        if (torch.is_grad_enabled() and x.requires_grad) or x.dtype is not dtype:
            return plain(x)
        rows = x.numel() // x.shape[-1]
        return plain(x) if rows <= plain_rows or (most_rows is not None and rows > most_rows) else packed(x)

    # Instance attributes, not submodules: the module's parameters and names stay as they are.
    layer.__dict__[_PACKED] = packed
    layer.__dict__["forward"] = forward


_HALF_ROWS = 64  # beyond these, products wait for arithmetic and no longer for weights
_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # of the products that are timed: those of verification passes
_COPIES, _MOST_WEIGHTS = 8, 2**26  # layers of one shape that take turns, and the weights that they may have in all


@torch.inference_mode()
def _measured_plain_rows(layers: list[nn.Linear | Conv1D], budget: float = 1.5) -> int:
    """Up to how many rows plain products are faster, on the largest layer of each shape, interleaved.

    Takes about `budget` seconds. Layers rotate, so that a weight comes from memory as it does in a pass.
    """
    shapes: dict[tuple[int, ...], list[nn.Linear | Conv1D]] = {}
    for layer in layers:
        shapes.setdefault(tuple(layer.weight.shape), []).append(layer)
    largest = sorted(shapes.values(), key=lambda some: some[0].weight.numel())[-4:]
    pairs = []
    for some in largest:
        for layer in some[: max(1, min(_COPIES, _MOST_WEIGHTS // some[0].weight.numel()))]:
            weight = _matrix(layer)
            pairs.append((weight, PackedProduct(weight)))
    inputs = {rows: [torch.randn(rows, weight.shape[1], dtype=weight.dtype) for weight, _ in pairs] for rows in _ROWS}
    times: dict[int, list[tuple[float, float]]] = {rows: [] for rows in _ROWS}
    deadline = time.perf_counter() + budget
    while len(times[_ROWS[-1]]) < 3 or (time.perf_counter() < deadline and len(times[_ROWS[-1]]) < 30):
        for rows, xs in inputs.items():
            start = time.perf_counter()
            for (weight, _), x in zip(pairs, xs, strict=True):
                torch.nn.functional.linear(x, weight)
            middle = time.perf_counter()
            for (_, packed), x in zip(pairs, xs, strict=True):
                packed(x)
            times[rows].append((middle - start, time.perf_counter() - middle))
    plain_rows = 0
    for rows, both in times.items():
        plain, packed = (statistics.median(column) for column in zip(*both, strict=True))
        if plain >= packed:
            break
        plain_rows = rows
    return plain_rows


# Below this many multiplications a product is over before a Python dispatch pays.
_WORTH_IT = 2**22


def fast_products(device: torch.device) -> AbstractContextManager[Any]:
    """:class:`FastProducts` on a CPU where they are the faster ones, by the clock; nothing elsewhere."""
    return FastProducts() if device.type == "cpu" and quicker_by_onednn() else nullcontext()


class FastProducts(TorchDispatchMode):
    """Large float32 matrix products on a CPU by oneDNN, forward and backward; everything else as it is.

    ``with FastProducts():`` around a training step. torch hands float32 products to the BLAS it was built with, which on
    some processors runs at half of what oneDNN's kernels reach (measured: 105-120 against 210-270 GFLOP/s on one core with
    AVX-512), on others at as much without the copies that these products take. Results differ in rounding only, and are the
    same in every run.
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
