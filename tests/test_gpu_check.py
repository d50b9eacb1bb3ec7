"""`make gpu-check` on a machine without a GPU: refused in one line, and its code runs at toy size."""

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "bench" / "gpu_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


def test_without_cuda_it_says_so_in_one_line() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "gpu-check: there is no CUDA device that torch can use\n"


def test_every_part_passes_at_toy_size_on_the_cpu(tmp_path: Path) -> None:
    done = run("--cpu-smoke", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout.split("gpu-check\n")[1].splitlines()[1:]
    passed = {line.split("  ")[0]: line for line in table if "  passed  " in line}
    assert len(passed) == len(table) >= 7, done.stdout
    first, last = map(float, re.findall(r"loss (\S+) -> (\S+?)[; ]", passed["train, bf16"])[0])
    assert last < first
    assert "losses differ by 0.0e+00" in passed["resume"]
    assert "ZeRO stage 2, world size 1 over gloo" in passed["train, DeepSpeed ZeRO-2"]
    assert "2/2 identical" in passed["greedy identity, float32"]
    assert (tmp_path / "bf16" / "final").is_dir()
