"""The lock that prevents other GPU tests from running during tests that compare times."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.gpu_lock import gpu_lock

pytest.importorskip("fcntl")


def test_holders_share_the_lock_until_one_needs_it_alone(tmp_path: Path) -> None:
    """A test that starts while a timing test waits for the lock runs after the timing test."""
    order: list[str] = []
    started = threading.Event()

    def timing() -> None:
        started.set()
        with gpu_lock(tmp_path, alone=True):
            order.append("timing")

    def later() -> None:
        with gpu_lock(tmp_path, alone=False):
            order.append("later")

    threads = [threading.Thread(target=each) for each in (timing, later)]
    with gpu_lock(tmp_path, alone=False), gpu_lock(tmp_path, alone=False):
        threads[0].start()
        started.wait()
        threads[0].join(0.2)  # enough to reach the lock
        threads[1].start()
        threads[1].join(0.2)
        assert order == []
    for each in threads:
        each.join()
    assert order == ["timing", "later"]
