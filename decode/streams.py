"""One random stream per row, so that a row's sample depends on its seed and its tokens, never on its neighbours."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor


class RowStreams:
    """Random numbers of a batch. Every step forks two generators a row, one for drafting and one for judging.

    Forking makes a step independent of how many numbers the steps before it used, which depends on neighbours when drafts
    are padded to the widest row.
    """

    def __init__(self, seeds: Sequence[int]):
        # Python's generator on the host: a torch one would have to be read back.
        self._masters = [random.Random(seed) for seed in seeds]
        self.drafting = [torch.Generator() for _ in seeds]
        self._judging = [torch.Generator() for _ in seeds]

    def next_step(self) -> None:
        """Fork the generators of the coming step."""
        for master, drafting, judging in zip(self._masters, self.drafting, self._judging, strict=True):
            drafting.manual_seed(master.getrandbits(63))
            judging.manual_seed(master.getrandbits(63))

    def uniforms(self, count: int, device: torch.device) -> Tensor:
        """``[batch, count]`` float64 in [0, 1) for this step's verification; the last one is for the next token.

        The last one is made first: how many come before it depends on the widest draft of the batch.
        """
        rows = [torch.rand(count, generator=g, dtype=torch.float64).roll(-1) for g in self._judging]
        return torch.stack(rows).to(device, non_blocking=True)


def row_uniforms(count: int, generators: Sequence[torch.Generator], device: torch.device) -> Tensor:
    """``[batch, count]`` float64 in [0, 1) to draft with, each row's from its own generator."""
    rows = [torch.rand(count, generator=generator, dtype=torch.float64) for generator in generators]
    return torch.stack(rows).to(device, non_blocking=True)


def row_seeds(seed: int | Sequence[int], batch: int) -> list[int]:
    """Seeds of the rows: the given ones, or `seed` mixed with the row's number."""
    if isinstance(seed, int):
        return [mix(seed, row) for row in range(batch)]
    if len(seed) != batch:
        raise ValueError(f"{len(seed)} seeds for a batch of {batch} rows")
    return list(seed)


def mix(seed: int, index: int) -> int:
    """A 63-bit seed for item `index` of a run (the finaliser of SplitMix64: neighbours share no bits)."""
    z = (seed * 0x9E3779B97F4A7C15 + index + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1
