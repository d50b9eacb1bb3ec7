"""Training, resuming and decoding on a CUDA device: a few minutes, no downloads, random weights of a real architecture.

    python bench/gpu_check.py                  `make gpu-check`; exits 2 where there is no CUDA device
    python bench/gpu_check.py --cpu-smoke      the same code at toy size on the CPU, in seconds

Exits 1 when a part fails; its output is then printed.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# torch and the parts are imported once it is clear that they can run: a machine without CUDA gets its answer at once.
if TYPE_CHECKING:
    from _gpu_parts import Size

DEVICE = """
import torch
if torch.cuda.is_available():
    found = torch.cuda.get_device_properties(0)
    print(f"{found.name}, compute capability {found.major}.{found.minor}, {found.total_memory / 2**30:.0f} GiB, "
          f"CUDA {torch.version.cuda}, torch {torch.__version__}")
"""


class Result(NamedTuple):
    """What became of a part."""

    passed: bool
    words: str
    seconds: float


def device_words() -> str:
    """The CUDA device in words; empty where there is none. Asked in another process: this one is to stay without CUDA."""
    done = subprocess.run([sys.executable, "-c", DEVICE], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def in_child(method: str, work: Callable[..., str], arguments: tuple[Any, ...], log: Path) -> Result:
    """Run `work` in a process of its own, which starts without CUDA, process group or accelerator; output goes to `log`."""
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    start = time.perf_counter()
    process = context.Process(target=_child, args=(work, arguments, str(log), sender))
    process.start()
    sender.close()
    try:
        passed, words = receiver.recv()
    except EOFError:
        passed, words = False, "the process died"
    process.join()
    return Result(passed, words, time.perf_counter() - start)


def _child(work: Callable[..., str], arguments: tuple[Any, ...], log: str, sender: Connection) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    try:
        sender.send((True, work(*arguments)))
    except BaseException as error:  # the parent reports it
        traceback.print_exc()
        sender.send((False, f"{type(error).__name__}: {error}".splitlines()[0][:300]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run_parts(size: "Size", method: str, folder: Path) -> dict[str, Result]:
    """All parts, whatever became of those before."""
    from _gpu_parts import PARTS

    results = {}
    for number, (name, work) in enumerate(PARTS.items()):
        log = folder / f"{number}.log"
        results[name] = in_child(method, work, (folder, size), log)
        print(f"{name}: {'passed' if results[name].passed else 'FAILED'}, {results[name].seconds:.0f} s", flush=True)
        if not results[name].passed:
            print(log.read_text(errors="replace")[-6000:])
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-smoke", action="store_true", help="toy size on the CPU")
    parser.add_argument("--folder", type=Path, help="keep the runs here instead of in a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftsmith-gpu-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        return check(options.cpu_smoke, folder)


def check(smoke: bool, folder: Path) -> int:
    """Run all parts and print what they found; the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if smoke:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    device = "cpu, toy size" if smoke else device_words()
    if not device:
        print("gpu-check: there is no CUDA device that torch can use", file=sys.stderr)
        return 2
    from _common import print_table
    from _gpu_parts import SMOKE, Size

    print(f"device: {device}", flush=True)
    # Forked children are there at once, but a process that has seen CUDA cannot be forked.
    results = run_parts(SMOKE if smoke else Size("cuda"), "fork" if smoke else "spawn", folder)
    rows = [
        (name, "passed" if found.passed else "FAILED", f"{found.seconds:.0f}", found.words)
        for name, found in results.items()
    ]
    print_table("gpu-check", ["", "", "s", ""], rows, "llrl")
    return 0 if all(found.passed for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
