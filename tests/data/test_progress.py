"""Progress: lines with an ETA where nobody looks, a bar where somebody does, or silence."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from hydra_ensembles.data import progress as module
from hydra_ensembles.data.progress import Progress, announce, duration, progress_bar, silence


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report after hundredths of seconds."""
    monkeypatch.setattr(module, "FIRST", 0.01)
    monkeypatch.setattr(module, "EVERY", 0.01)


def wait_for(caplog: pytest.LogCaptureFixture, text: str) -> str:
    """Wait for a line that holds a text."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for line in list(caplog.messages):
            if text in line:
                return line
        time.sleep(0.005)
    raise AssertionError(caplog.messages)


def test_lines_come_before_the_first_step_and_tell_the_time_left(quick, caplog):
    caplog.set_level(logging.INFO, "hydra_ensembles")
    with Progress("heads", 4, unit="batches") as progress:
        assert wait_for(caplog, "heads: 0 of 4 batches")  # the first step has not ended
        progress.update(2)
        progress.show("loss 0.5")
        assert wait_for(caplog, "left, loss 0.5").startswith("heads: 2 of 4 batches, 50 %, 00:0")
    caplog.clear()
    time.sleep(0.05)
    assert not caplog.messages  # nothing after the end


def test_a_stream_has_a_count_only(quick, caplog):
    caplog.set_level(logging.INFO, "hydra_ensembles")
    with Progress("stream", unit="rows", done=3), Progress("inner", 2):
        assert wait_for(caplog, "stream") == "stream: 3 rows"
        assert wait_for(caplog, "inner: 0 of 2 batches")


def test_short_work_says_nothing(caplog):
    caplog.set_level(logging.INFO, "hydra_ensembles")
    assert list(progress_bar(range(3), description="short")) == [0, 1, 2]
    assert not caplog.messages


def test_without_logging_lines_go_to_standard_error(quick, capsys, monkeypatch):
    monkeypatch.setattr(module.logger, "hasHandlers", lambda: False)
    announce("a word")
    assert capsys.readouterr().err == "a word\n"


def test_silence_and_a_generator_that_is_left_early(quick, caplog):
    caplog.set_level(logging.INFO, "hydra_ensembles")
    silence()
    try:
        with Progress("quiet", 3):
            time.sleep(0.05)
        announce("nothing")
    finally:
        silence(False)
    assert not caplog.messages
    for _ in progress_bar(range(100), description="left"):
        break
    deadline = time.monotonic() + 60
    while any(thread.name == "progress" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(module, "shows_bars", lambda: True)
    assert list(progress_bar(range(3), description="shown")) == [0, 1, 2]
    assert "shown:   0%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (75, "75 s"), (200, "3 min"), (7500, "2 h 5 min")],
)
def test_durations_for_people(seconds, text):
    assert duration(seconds) == text
