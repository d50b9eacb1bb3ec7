"""Which dtype and which library products are faster in, by the clock: what a processor has does not settle it.

Measured on two processors that both have AVX-512's dot products in bfloat16: a product of a thousand rows takes 0.6 of its
time in float32 on the one, 1.9 times as long on the other. With one row, which waits for memory, it is faster on both. And
oneDNN's products take half the time of the BLAS that torch was built with on the first, but as long on the second.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch

from ..models.native import has_bf16_products
from ..paths import home
from .half import HalfProduct, half_supported
from .onednn import PackedProduct, product, supported

Work = Callable[[], Any]

MANY_ROWS = 512  # of a training step's products
_WORTH_IT = 0.9  # of float32's time: what rounding must at least buy; of the BLAS's: what copies and calls must
_SHAPES = ((576, 1536), (1536, 576))  # columns, rows of the weights that are timed: a small model's layers
_COPIES = 12  # weights that take turns, so that each comes from memory as it does in a pass


def quicker_in_bf16(device: torch.device, rows: int) -> bool:
    """Whether products of `rows` rows are faster in bfloat16 than in float32 on `device`.

    On a GPU what its hardware has decides. On a CPU that has such instructions both are timed, in a second, the first time
    that a number of rows is asked for with a number of threads; the ratio is kept in the cache folder, so that every
    process of a run, and a run that goes on, decides alike.
    """
    if not has_bf16_products(device):
        return False
    return device.type != "cpu" or (supported(torch.bfloat16) and bf16_time(rows) <= _WORTH_IT)


def quick_dtype(loaded: torch.dtype, device: torch.device, rows: int) -> torch.dtype:
    """What ``"auto"`` means for work in passes of `rows` rows that need not be in float32: bfloat16 in the place of float32
    on a CPU that is faster in it, else the dtype that the target was loaded in.
    """
    quicker = loaded == torch.float32 and device.type == "cpu" and quicker_in_bf16(device, rows)
    return torch.bfloat16 if quicker else loaded


def quickest_weights(loaded: torch.dtype, device: torch.device) -> torch.dtype:
    """In what a drafter keeps its weights to be fastest over one token, beside a target that was loaded in `loaded`.

    Beside float32 on a CPU: bfloat16 for weights and passes, float16 for the weights alone (:mod:`.half`), or float32 where
    neither is faster. Measured and kept as :func:`quicker_in_bf16` has it. Elsewhere as the target.
    """
    if loaded != torch.float32 or device.type != "cpu":
        return loaded
    times = {torch.float32: _WORTH_IT}
    if has_bf16_products(device) and supported(torch.bfloat16):
        times[torch.bfloat16] = bf16_time(1)
    if half_supported() and supported():
        times[torch.float16] = _noted("half", 1, torch.get_num_threads())
    return min(times, key=times.__getitem__)


def bf16_time(rows: int) -> float:
    """Time of products of `rows` rows in bfloat16 on this CPU as a share of their time in float32, as first measured."""
    return _noted("bf16", rows, torch.get_num_threads())


def quicker_by_onednn() -> bool:
    """Whether the float32 products of a training step, forward and backward, are faster by oneDNN than by torch's BLAS on
    this CPU; measured and kept as :func:`quicker_in_bf16` has it.
    """
    return supported() and _noted("onednn", MANY_ROWS, torch.get_num_threads()) <= _WORTH_IT


@cache
def _noted(what: Literal["bf16", "half", "onednn"], rows: int, threads: int) -> float:
    file = home() / "speed" / f"{what}_{_machine()}_{rows}rows_{threads}threads.json"
    existed, noted = file.exists(), _read(file)
    if noted is None:
        if existed:  # damaged: left there, every process would measure anew
            with suppress(OSError):
                file.unlink()
        measure = {"bf16": _measured_bf16, "half": _measured_half, "onednn": _measured_onednn}[what]
        noted = _note(file, measure(rows))
    return noted


def _read(file: Path) -> float | None:
    try:
        return float(json.loads(file.read_text())["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _note(file: Path, value: float) -> float:
    """`value`, kept in `file`; or what another process has kept there in the meantime. A folder that cannot be written is
    no error: the value then holds for this process.
    """
    value = round(value, 4)  # as the others will read it
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".partial", delete=False) as written:
            json.dump({"time": value}, written)
        try:
            os.link(written.name, file)  # unlike a rename, it leaves the first one's
        except FileExistsError:
            value = _read(file) or value
        finally:
            os.unlink(written.name)
    except OSError:
        pass
    return value


def _machine() -> str:
    """What a measurement is good for: this processor with this build of torch."""
    try:
        info = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        info = []
    lasting = [
        line for line in info if line.split(":")[0].strip() in ("model name", "model", "stepping", "flags", "Features")
    ]
    return hashlib.sha256("\n".join([torch.__version__, *lasting]).encode()).hexdigest()[:12]


def _measured_bf16(rows: int) -> float:
    return _measured_products(rows, torch.bfloat16, PackedProduct)


def _measured_half(rows: int) -> float:
    return _measured_products(rows, torch.float32, HalfProduct)


@torch.inference_mode()
def _measured_products(rows: int, dtype: torch.dtype, kind: Any, seconds: float = 0.6) -> float:
    """Of inputs and weights in `dtype`, by products of this kind, against packed ones in float32."""
    weights = [torch.randn(*shape[::-1]) for _ in range(_COPIES) for shape in _SHAPES]
    sides = []
    for used, make in ((torch.float32, PackedProduct), (dtype, kind)):
        inputs = {columns: torch.randn(rows, columns, dtype=used) for columns, _ in _SHAPES}
        products = [(make(weight.to(used)), inputs[weight.shape[1]]) for weight in weights]
        sides.append([partial(one, x) for one, x in products])
    plain, other = sides
    return _ratio(other, plain, seconds)


@torch.inference_mode()
def _measured_onednn(rows: int, seconds: float = 1.0) -> float:
    plain: list[Work] = []
    other: list[Work] = []
    for out, size in _SHAPES:
        weight, x, gradient = torch.randn(out, size), torch.randn(rows, size), torch.randn(rows, out)
        # Forward, and the gradients of input and weight.
        for a, b in ((x, weight.t()), (gradient, weight), (gradient.t(), x)):
            plain.append(partial(torch.mm, a, b))
            other.append(partial(product, a, b))
    return _ratio(other, plain, seconds)


def _ratio(work: list[Work], reference: list[Work], seconds: float) -> float:
    """Of their times, in turns, the least of each: whatever else the machine does only adds."""
    sides = (reference, work)
    times: list[list[float]] = [[], []]
    deadline = time.perf_counter() + seconds
    while len(times[1]) < 3 or (time.perf_counter() < deadline and len(times[1]) < 200):
        for side, some in zip(sides, times, strict=True):
            some.append(_seconds(side))
    return min(times[1]) / min(times[0])


def _seconds(work: list[Work]) -> float:
    start = time.perf_counter()
    for one in work:
        one()
    return time.perf_counter() - start
