"""Exclusive use of the GPU for tests that compare times, also under pytest-xdist.

Every test marked `gpu` holds a lock while it runs: shared with others, or alone if it is marked
`timing`. The lock is a pair of files, so it is common to all pytest processes of a user on this
machine. Programs other than pytest do not take it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

try:
    import fcntl
except ImportError:  # Windows, where the tests are not run by several processes
    fcntl = None  # type: ignore[assignment]


@contextmanager
def gpu_lock(folder: Path, *, alone: bool) -> Iterator[None]:
    """Holds the lock in `folder`: shared, or `alone` after all current holders have ended.

    A test that waits to be alone holds the file `gate` exclusively, which blocks later tests;
    otherwise, overlapping tests could keep the lock shared forever.
    """
    with _opened(folder / "gate") as gate, _opened(folder / "gpu") as gpu:
        fcntl.flock(gate, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests marked `timing` last, so that few others are running when each begins."""
    items.sort(key=lambda item: "timing" in item.keywords)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hold the lock during set-up, test and teardown; a test's time limit begins after the wait."""
    if fcntl is None or "gpu" not in item.keywords or "skip" in item.keywords:
        return (yield)
    folder = Path(tempfile.gettempdir()) / f"cukit-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with gpu_lock(folder, alone="timing" in item.keywords):
        return (yield)
