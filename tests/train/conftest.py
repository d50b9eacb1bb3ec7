"""The toy run as a fixture; it is also a module that subprocesses execute."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture(scope="session")
def toy_module() -> ModuleType:
    """tests/train/toy_run.py."""
    spec = importlib.util.spec_from_file_location("toy_run", FOLDER / "toy_run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_run"] = module  # typing.NamedTuple looks its module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def toy(toy_module: ModuleType) -> Iterator[ModuleType]:
    """The same, fit for starting an engine in this process."""
    yield toy_module
    toy_module.reset()


@pytest.fixture(scope="session")
def losses() -> Callable[[Path], list[tuple[int, float, float]]]:
    """Reads (step, loss, gradient norm) of every training record of a run folder."""
    from draftsmith.train.logs import read_metrics

    def read(folder: Path) -> list[tuple[int, float, float]]:
        records = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "train"]
        return [(record["step"], record["loss"], record.get("gradient_norm", 0.0)) for record in records]

    return read
