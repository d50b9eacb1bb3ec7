"""The run's numbers: TensorBoard events and ``metrics.jsonl``, both cut back to the step a resumed run goes on from."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RunLog:
    """Writes on rank 0; on other ranks every call does nothing."""

    def __init__(self, run_folder: Path, *, is_main: bool, resumed_step: int = 0) -> None:
        self.last_evaluation: int | None = None  # step of the newest evaluation on record
        self._file = self._board = None
        if not is_main:
            return
        from torch.utils.tensorboard.writer import SummaryWriter

        run_folder.mkdir(parents=True, exist_ok=True)
        path = run_folder / "metrics.jsonl"
        kept = [record for record in read_metrics(path) if record["step"] <= resumed_step] if resumed_step else []
        _rewrite(path, kept)
        evaluations = [record["step"] for record in kept if record["kind"] == "evaluation"]
        self.last_evaluation = max(evaluations, default=None)
        self._file = path.open("a")
        self._board = SummaryWriter(str(run_folder / "tensorboard"), purge_step=resumed_step + 1)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One line ``{"kind", "step", ...values}`` and a TensorBoard scalar ``kind/name`` for each number."""
        if self._file is None or self._board is None:
            return
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"{kind}/{name}", value, step)
        if kind == "evaluation":
            self.last_evaluation = step
            self.flush()

    def flush(self) -> None:
        """Puts TensorBoard's events on disk: what a checkpoint is about to cover must outlive a kill."""
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Flushes and closes both."""
        if self._file is not None and self._board is not None:
            self._file.close()
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``; a last line that was cut off by a kill is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def _rewrite(path: Path, records: list[dict[str, Any]]) -> None:
    temporary = path.with_suffix(".partial")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(temporary, path)
