"""Progress displays: lines without a terminal, a live display with one, nothing left at the end."""

from __future__ import annotations

import io
import sys
import time

import pytest

from steepen.utils import progress as module
from steepen.utils.progress import Progress, ProgressDisplay, ProgressRow, stage_progress


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Replaces time.monotonic."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module.time, "monotonic", found.monotonic)
    return found


def state(done: int) -> Progress:
    return Progress((ProgressRow("train", done, 10, f"step {done}"),), f"step {done}/10")


def test_without_a_terminal_lines_are_printed_at_intervals(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressDisplay(line_seconds=10) as display:
        for done in range(5):
            display.update(state(done))
            clock.now += 4
        display.print("a message")
        display.update(state(10), final=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "step 0/10\nstep 3/10\na message\nstep 10/10\n"


def test_without_a_terminal_polled_lines_stop_with_close(capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay(line_seconds=0.01, poll=lambda: state(3))
    time.sleep(0.2)
    display.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines and set(lines) == {"step 3/10"}
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(quiet=True) as display:
        display.update(state(1), final=True)
        display.print("a message")
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_in_a_terminal_the_display_is_erased_and_messages_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    with ProgressDisplay() as display:
        display.update(state(4), final=True)
        display.print("a message")
    text = terminal.getvalue()
    assert "step 4" in text and "a message" in text and "step 4/10" not in text
    after = text.rpartition("step 4")[2]
    assert "\x1b[2K" in after, "the last frame was not erased"
    assert text.rstrip().endswith("\x1b[2K") or "\x1b[?25h" in after, "the cursor was not restored"


def test_stages_print_fraction_tokens_rate_and_eta(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with stage_progress() as report:
        report("tokenize", 0, 100, tokens=0)
        clock.now += 20
        report("tokenize", 25, 100, tokens=5000)
        report("read", 0, 100, tokens=0)  # a stage that makes no tokens
        clock.now += 20
        report("read", 50, 100, tokens=0)
        report("write", 0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["tokenize …", "tokenize: 25%, 5,000 tokens, 250 tokens/s, ETA 1:00"]
    assert lines[2:] == ["read …", "read: 50%, ETA 0:20", "write …"]


def test_in_a_narrow_terminal_a_row_is_one_line_without_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    text = "step 9/195  loss 5.8345  lr 5.97e-02  K 2  8.88k tok/s  ETA 0:49"
    with ProgressDisplay() as display:
        display.update(Progress((ProgressRow("Untied-Grow d2", 9, 195, text),), ""))
    assert " ".join(text.split()) in terminal.getvalue() and "━" not in terminal.getvalue()


def test_the_bar_leaves_room_for_the_longest_text_beside_the_longest_title(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    rows = (
        ProgressRow("squared-relu d5 seed 0", 1, 274, "step 1/274 loss 6.2383"),
        ProgressRow("batch 1", 0, 8, "0/8 runs done, 2 running, ETA 1 min 49 s"),
    )
    with ProgressDisplay() as display:
        display.update(Progress(rows, ""))
    assert rows[1].text in terminal.getvalue()
