import io
import sys

import pytest

from draftsmith import progress
from draftsmith.progress import duration, stage


@pytest.fixture
def clock(monkeypatch):
    """A clock the test moves: clock.now += seconds."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    monkeypatch.delenv("RANK", raising=False)
    return Clock


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0.4, 59, 60, 250, 7530)] == ["0 s", "59 s", "1 min", "4 min 10 s", "2 h 5 min"]


def test_plain_lines_say_what_how_far_and_how_long_at_a_cadence(clock, capsys) -> None:
    with stage("writing answers", total=1000, unit="tokens", expected_seconds=90, every=10.0) as bar:
        for _ in range(25):
            clock.now += 1
            bar.advance(20, alpha=0.41234)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "writing answers: 1,000 tokens, about 1 min 30 s"
    assert lines[1] == "writing answers: 40/1,000 tokens (4%), alpha 0.4123, 20 tokens/s, 48 s left"
    assert lines[2].startswith("writing answers: 240/1,000 tokens (24%)")  # ten seconds later
    assert lines[3].startswith("writing answers: 440/1,000")
    assert lines[4] == "writing answers: 500 of 1,000 tokens in 25 s, alpha 0.4123, 20 tokens/s"
    assert len(lines) == 5


def test_time_left_counts_only_what_this_session_did(clock, capsys) -> None:
    with stage("training", total=100, done=60, every=1.0) as bar:
        clock.now += 10
        bar.advance(10, tokens=5000, loss=2.5)
        assert bar.seconds_left == pytest.approx(30)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "training: 100 steps, 60 done before"
    assert out[1] == "training: 70/100 steps (70%), loss 2.5, 500 tokens/s, 30 s left"
    assert out[2] == "training: 70 of 100 steps (60 of them before) in 10 s, loss 2.5, 500 tokens/s"


def test_before_anything_is_done_the_expected_time_counts_down(clock, capsys) -> None:
    with stage("loading", expected_seconds=30) as bar:
        clock.now += 12
        assert bar.seconds_left == 18
    with stage("searching") as bar:
        assert bar.seconds_left is None
    assert "searching: 0 steps in 0 s" in capsys.readouterr().out


def test_other_ranks_are_silent_but_count(clock, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with stage("training", total=10) as bar:
        bar.advance(3)
        progress.say("nothing")
    assert bar.done == 3
    assert capsys.readouterr().out == ""


def test_on_a_terminal_a_bar_is_drawn_and_nested_stages_share_it(monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    with stage("training", total=4, expected_seconds=20) as outer:
        outer.advance(2, loss=1.25)
        with stage("evaluating", total=2, unit="prompts") as inner:
            inner.advance(2, alpha=0.5)
    text = terminal.getvalue()
    assert "2/4" in text
    assert "loss 1.25" in text
    assert "evaluating: 2 prompts in" in text
    assert "training: 2 of 4 steps in" in text
    assert not progress._live
