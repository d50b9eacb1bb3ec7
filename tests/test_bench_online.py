"""`make results-online` at toy size: a run, its quarters, a section; and how quarters are compared."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from draftsmith.errors import BadInput

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture
def online(monkeypatch):
    """The script as a module; its folder is no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("online")


def test_a_toy_stream_gives_a_section_and_is_not_served_again(chat_folder, tmp_path):
    command = [sys.executable, str(BENCH / "online.py"), "--target", str(chat_folder / "model"), "--threads", "1"]
    command += ["--prompts", str(chat_folder / "chats.jsonl"), "--steps", "24", "--tokens-per-step", "300"]
    command += [
        "--staleness",
        "0",
        "--max-new-tokens",
        "12",
        "--learning-rate",
        "0.01",
        "--folder",
        str(tmp_path / "run"),
    ]
    command += ["--override", "drafter={init: {config: {num_hidden_layers: 1}}, vocabulary: 150}"]
    command += [
        "--override",
        f"evaluate.prompts={chat_folder / 'prompts.jsonl'}",
        "--out",
        str(tmp_path / "results.md"),
    ]

    def run():
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)

    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "results.md").read_text()
    assert page.startswith("# Learning online: acceptance over the stream\n")
    assert "| first quarter | " in page
    assert "A quarter of the stream are 6 batches" in page
    assert "The last quarter's block efficiency is above the first's." in page
    assert "at least 0: met" in done.stdout
    (tmp_path / "results.md").unlink()
    log = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again = run()
    assert again.returncode == 0, again.stdout + again.stderr
    assert (tmp_path / "results.md").exists()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == log


def test_the_difference_of_quarters_has_an_interval_over_batches(online):
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.1, 80)
    flat, rising = (
        online.quarters((1.5 + noise).tolist()),
        online.quarters((1.5 + noise + np.arange(80) / 100).tolist()),
    )
    assert flat.batches == 20
    assert flat.gain.low < 0 < flat.gain.high
    assert rising.gain.low > 0
    assert rising.gain.value == pytest.approx(rising.last.value - rising.first.value)
    # Of the mean of 20 values of standard deviation 0.1 the interval is 4 x 0.1 / sqrt(20) wide, of a difference sqrt(2) wider.
    assert flat.first.high - flat.first.low == pytest.approx(0.088, rel=0.4)
    assert flat.gain.high - flat.gain.low == pytest.approx(0.124, rel=0.4)
    with pytest.raises(BadInput, match="7 batches were served, expected 8 at least"):
        online.quarters([1.0] * 7)
