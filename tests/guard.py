"""Guarded memory for GPU tests: an out-of-bounds access fails the test that causes it.

All allocations of CuPy during a test, including scratch memory inside ops, come from
`cukit.memory.guard`. After the test body the device is synchronised, so that a fault is reported in
the test that caused it, and the memory around the test's arrays is checked.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import pytest

from cukit.core.device import gpu_available
from cukit.errors import UnsupportedDeviceError
from cukit.memory.guard import GuardedMemory

LOST = """\
A kernel of this test accessed unmapped addresses, or failed for another reason; this process can no
longer use the GPU. CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 makes the driver write a core dump, in which
cuda-gdb shows the instruction. The most recent arrays:"""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cukit")
    group.addoption(
        "--guard",
        choices=("on", "off"),
        default="on",
        help="place GPU arrays in pattern-filled memory between unmapped addresses",
    )
    group.addoption(
        "--guard-seed",
        type=int,
        metavar="N",
        help="seed of the placement and contents of arrays; random by default",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.guard_seed is None:  # set here, so that worker processes use the same seed
        config.option.guard_seed = random.SystemRandom().randrange(1 << 31)
    if config.option.guard == "on" and gpu_available():
        config.pluginmanager.register(Guard(config.option.guard_seed), "cukit-guard")


def pytest_report_header(config: pytest.Config) -> str:
    if not config.pluginmanager.has_plugin("cukit-guard"):
        return "guard: off"
    return f"guard: on, --guard-seed {config.option.guard_seed} repeats it"


def guarded_memory(seed: int) -> Any:
    """Return a CudaGuard; None if the GPU does not support one."""
    from cukit.memory.cuda_guard import CudaGuard

    try:
        return CudaGuard(seed)
    except UnsupportedDeviceError:
        return None


class Guard:
    """Installs the guard around each test that is not marked `unguarded`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._made = False
        self._guard: Any = None

    def _of(self, item: pytest.Item) -> Any:
        if "unguarded" in item.keywords:
            return None
        if not self._made:
            self._made, self._guard = True, guarded_memory(self._seed)
        return self._guard

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        guard = self._of(item)
        if guard is None:
            return (yield)
        guard.memory.label = item.nodeid
        with guard.installed():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        guard = self._of(item)
        if guard is None:
            return (yield)
        try:
            result = yield
        except BaseException:
            found = report(guard.memory, item)
            if found:
                item.add_report_section("call", "guard", found)
            raise
        found = report(guard.memory, item)
        if found:
            pytest.fail(found, pytrace=False)
        return result


def report(memory: GuardedMemory, item: pytest.Item) -> str:
    """Return a report of the damage, or "". Ends the run if the GPU is no longer usable."""
    latest = list(memory.latest)
    try:
        return "\n\n".join(map(str, memory.check()))
    except Exception as error:  # any CUDA error: all later calls fail
        item.session.shouldstop = f"the GPU was lost in {item.nodeid}"
        return "\n\n".join([f"{error}\n{LOST}", *map(str, latest)])
