"""Random states of python, numpy and torch: seeding, keeping, restoring."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def seed_all(seed: int) -> None:
    """Seeds python, numpy and torch (all devices)."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """All random states as plain values and tensors, so that loading them needs no unpickling of objects."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (
            str(kind),
            torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Sets what :func:`rng_state` returned."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Leaves every random state as it found it: what runs inside does not change what is drawn afterwards."""
    state = rng_state()
    try:
        yield
    finally:
        restore_rng(state)
