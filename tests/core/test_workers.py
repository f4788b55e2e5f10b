"""Work in other processes: results, errors, killed workers, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from cukit.core.workers import run_in_workers
from cukit.errors import CukitError


def square(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number * number


def kill_worker(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def make_function(_: int) -> Callable[[], int]:
    return lambda: 0


def blocks_interrupts(_: int) -> bool:
    """True if this process blocks SIGINT."""
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def wait_for_workers_to_end() -> None:
    deadline = time.monotonic() + 10
    while multiprocessing.active_children():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_task_is_done_once() -> None:
    assert sorted(run_in_workers(square, range(20), 3)) == [n * n for n in range(20)]
    assert list(run_in_workers(square, [], 3)) == []
    wait_for_workers_to_end()


def test_an_error_propagates_and_stops_the_others() -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        list(run_in_workers(square, [1, -1, *range(1000)], 2))
    wait_for_workers_to_end()


def test_a_killed_worker_is_reported() -> None:
    with pytest.raises(CukitError, match="was killed"):
        list(run_in_workers(kill_worker, range(4), 2))
    wait_for_workers_to_end()


def test_a_result_that_cannot_be_sent_is_reported() -> None:
    with pytest.raises(CukitError, match="a worker's result cannot be sent"):
        list(run_in_workers(make_function, range(3), 2))
    wait_for_workers_to_end()


def test_workers_block_interrupts() -> None:
    """Also the first worker, which Python starts together with its resource tracker."""
    lines = (
        "from cukit.core.workers import run_in_workers",
        "from tests.core.test_workers import blocks_interrupts",
        "if __name__ == '__main__': print(*run_in_workers(blocks_interrupts, range(4), 2))",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True"] * 4, done.stderr


def test_a_closed_iterator_ends_its_workers() -> None:
    results = run_in_workers(square, range(1000), 2)
    next(results)
    results.close()  # type: ignore[attr-defined]
    wait_for_workers_to_end()
