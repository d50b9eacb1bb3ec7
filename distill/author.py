"""The target as it writes prompts and answers: itself, or a copy in a dtype in which it writes faster."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..decode.packed import unpack, unpacked, use_backend
from ..decode.quick import quick_dtype
from ..models.target import Target, in_dtype
from ..progress import say


def writing_dtype(asked: str | None, loaded: torch.dtype, device: torch.device, rows: int) -> torch.dtype:
    """What `data.dtype` means for a target that was loaded in `loaded` on `device` and writes `rows` sequences side by side.

    None is `loaded` itself, ``"auto"`` the :func:`~.decode.quick.quick_dtype`. Other values name a torch dtype.
    """
    if asked == "auto":
        return quick_dtype(loaded, device, rows)
    return loaded if asked is None else getattr(torch, asked)


def in_words(dtype: torch.dtype) -> str:
    """A dtype's name as a recipe has it: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def writing_in(target: Target, dtype: torch.dtype) -> Iterator[Target]:
    """`target` as it writes in `dtype`: itself, or a copy that is gone afterwards. The target's weights are only read."""
    say(f"the target writes in {in_words(dtype)}")
    if dtype == target.dtype:
        yield target
        return
    with unpacked(target.model):  # its packed copies would only take memory while another model writes
        copied = in_dtype(target, dtype)
        use_backend(copied.model, "auto")
        try:
            yield copied
        finally:
            unpack(copied.model)  # breaks the cycles that would keep the copy until the next garbage collection
