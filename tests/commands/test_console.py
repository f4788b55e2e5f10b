"""Progress: a bar on a terminal, occasional lines elsewhere, nothing for short tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cukit.commands import _console
from cukit.commands._console import tracked

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test advances."""
    now = [0.0]
    monkeypatch.setattr(_console.time, "monotonic", lambda: now[0])
    return now


def ticking(clock: list[float], seconds: float, count: int) -> Iterator[int]:
    for number in range(count):
        clock[0] += seconds
        yield number


def test_lines_show_the_remaining_time(clock: list[float], capsys: Capture) -> None:
    found = list(tracked(ticking(clock, 2.0, 60), 60, "compiling"))
    assert found == list(range(60))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "compiling: 2 of 60, about 2 min left",
        "compiling: 10 of 60, about 2 min left",
        "compiling: 18 of 60, about 84 s left",
        "compiling: 26 of 60, about 68 s left",
        "compiling: 34 of 60, about 52 s left",
        "compiling: 42 of 60, about 36 s left",
        "compiling: 50 of 60, about 20 s left",
        "compiling: 58 of 60, about 4 s left",
    ]


@pytest.mark.parametrize(("seconds", "quiet"), [(0.01, False), (100.0, True)])
def test_short_or_quiet_work_prints_nothing(
    seconds: float, quiet: bool, clock: list[float], capsys: Capture
) -> None:
    assert list(tracked(ticking(clock, seconds, 10), 10, "compiling", quiet=quiet)) == [*range(10)]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert list(tracked(iter(range(3)), 3, "compiling")) == [0, 1, 2]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "compiling" in captured.err
    assert "3/3" in captured.err
