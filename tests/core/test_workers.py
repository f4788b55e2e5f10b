"""Work in other processes: results, errors, deaths, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from cukit.core.workers import run_in_workers
from cukit.errors import CukitError


def square(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number * number


def die(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def wait_for_their_end() -> None:
    deadline = time.monotonic() + 10
    while multiprocessing.active_children():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_task_is_done_once() -> None:
    assert sorted(run_in_workers(square, range(20), 3)) == [n * n for n in range(20)]
    assert list(run_in_workers(square, [], 3)) == []
    wait_for_their_end()


def test_an_error_comes_through_and_ends_the_rest() -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        list(run_in_workers(square, [1, -1, *range(1000)], 2))
    wait_for_their_end()


def test_a_worker_that_is_killed_is_said() -> None:
    with pytest.raises(CukitError, match="was killed"):
        list(run_in_workers(die, range(4), 2))
    wait_for_their_end()


def test_a_closed_iterator_ends_its_workers() -> None:
    results = run_in_workers(square, range(1000), 2)
    next(results)
    results.close()  # type: ignore[attr-defined]
    wait_for_their_end()
