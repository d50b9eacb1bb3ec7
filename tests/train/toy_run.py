"""A toy run as a process of its own: a tiny next-token model through the real engine and loop.

Used as a module under the launcher and as a script; the tests also import it for its parts.
"""

import argparse
import json
import os
import shutil
import time
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from draftsmith.distill.trainee import LossSums
from draftsmith.train.engine import start_engine
from draftsmith.train.loop import Plan, train

VOCABULARY = 11


class Batch(NamedTuple):
    """Rows of one length; the last token of each row is only a label."""

    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def supervised(self) -> float:
        return float(self.mask.sum())

    @property
    def tokens(self) -> int:
        return self.ids.numel()


class Toy(nn.Module):
    """Embedding, norm, a hidden layer and a head; the head may share the embedding's weight."""

    def __init__(self, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.tanh(self.hidden(self.norm(self.embedding(ids))))))

    def forward(self, batch: Batch) -> LossSums:
        logits, labels = self.logits(batch.ids[:, :-1])[batch.mask], batch.ids[:, 1:][batch.mask]
        losses = nn.functional.cross_entropy(logits.float(), labels, reduction="none")
        hits = (logits.argmax(-1) == labels).float().sum()
        return LossSums(losses.sum(), len(labels), {"agreement": (hits, len(labels))})


class ToySteps:
    """`per_step` ragged micro-batches a step, dealt out to the ranks; its generator is its state."""

    def __init__(self, rank: int = 0, world_size: int = 1, per_step: int = 3, seed: int = 5) -> None:
        self.rank, self.world_size, self.per_step = rank, world_size, per_step
        self.generator = torch.Generator().manual_seed(seed)
        self.delay = 0.0

    def __next__(self) -> list[Batch]:
        time.sleep(self.delay)
        return [self._draw() for _ in range(self.per_step)][self.rank :: self.world_size]

    def _draw(self) -> Batch:
        rows, length = torch.randint(1, 4, (2,), generator=self.generator).tolist()
        start = torch.randint(VOCABULARY, (rows, 1), generator=self.generator)
        ids = (start + 3 * torch.arange(length + 4)) % VOCABULARY
        mask = torch.rand(rows, length + 3, generator=self.generator) < 0.7
        mask[0, 0] = True
        return Batch(ids, mask)

    def state_dict(self) -> dict:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        self.generator.set_state(state["generator"])


class Buffer:
    """An extra state: counts what it saw, as a rollout buffer would."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict) -> None:
        self.seen = list(state["seen"])


def run(
    folder: Path, *, stage: int | None = None, dropout: float = 0.0, tied: bool = False, delay: float = 0.0, **plan
):
    """One run of the toy; `stage` is a ZeRO stage. Returns the outcome and the engine."""
    torch.set_num_threads(1)
    precision = plan.pop("precision", "fp32")
    deepspeed = None if stage is None else {"zero_optimization": {"stage": stage}}
    engine = start_engine(precision, deepspeed=deepspeed, clip=0.5)
    for line in engine.describe() if engine.is_main else []:
        tell(line)
    torch.manual_seed(3)
    engine.prepare(Toy(dropout, tied), betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
    folder.mkdir(parents=True, exist_ok=True)
    steps = ToySteps(engine.rank, engine.world_size)
    steps.delay = delay
    settings = {
        "total_steps": 12,
        "peak_learning_rate": 0.03,
        "checkpoint_every": 4,
        "keep_checkpoints": 3,
        "seed": 1,
    } | plan

    def evaluate(step: int) -> dict:
        with engine.gathered():
            return {"at": step, "parameters": sum(parameter.numel() for parameter in engine.trainee.parameters())}

    outcome = train(engine, steps, Plan(folder, **settings), evaluate=evaluate, extra={"buffer": Buffer()})
    return outcome, engine


def tell(line: str) -> None:
    """Print a line in one piece: the ranks share a pipe, and each piece may be followed by another rank's."""
    print(f"{line}\n", end="", flush=True)


def reset() -> None:
    """Lets this process start another engine: Accelerate keeps its state in class attributes."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=json.loads, help="a list of run() keywords, executed in this order")
    arguments = parser.parse_args()
    for number, keywords in enumerate(arguments.runs, 1):
        folder, forget = arguments.folder / keywords.pop("name"), keywords.pop("forget", None)
        if forget is not None and os.environ.get("RANK", "0") == "0":
            for path in (path for path in folder.glob("step_*") if int(path.name[5:]) >= forget):
                shutil.rmtree(path)
        outcome, engine = run(folder, **keywords)
        tell(f"outcome {outcome.step} {outcome.finished} {outcome.signal}")
        if number == len(arguments.runs):
            model = weakref.ref(engine.model)
            engine.close()
            tell(f"model freed before its group: {model() is None}")
        reset()


if __name__ == "__main__":
    main()
