"""Ctrl-C at every bytecode of the pool is raised, and leaks no memory, lock or open scope."""

from __future__ import annotations

import _thread
import contextlib
import gc
import operator
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import cukit.memory
from cukit.errors import OutOfMemoryError, PointerError
from cukit.memory import HostProvider, MemoryPool, MemoryPoolConfig
from cukit.memory.snapshot import snapshot
from cukit.memory.uninterrupted import Uninterrupted
from tests.memory.invariants import check_invariants
from tests.memory.simulation import KIB, PAGE

pytestmark = pytest.mark.usefixtures("default_sigint")

FILES = (str(Path(cukit.memory.__file__).parent), contextlib.__file__)
"""Paths of the interrupted code: the package of the pool, and contextlib for its managers."""

DEFERRED_STEP = 64
"""Inside Uninterrupted, where every bytecode is equivalent, only one in 64 is interrupted."""


def _deferred() -> bool:
    return isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), Uninterrupted)


class _Last:
    """An object that a tracer refers to until it returns."""


class _InC(weakref.ref):  # type: ignore[type-arg]
    """A weak reference whose callback, through its attribute, is C code only."""

    interrupt = staticmethod(_thread.interrupt_main)


class Bytecodes:
    """Raises SIGINT at the bytecode with number `target`, in order of first execution.

    As with Ctrl-C, the signal only becomes pending, and Python runs its handler at the next check
    (after a call, at the start of a function, at the end of a loop iteration). A tracer in Python
    would run the handler itself. So the signal is raised after the tracer has returned, by the
    finalizer of its last object.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._seen: set[tuple[CodeType, int]] = set()
        self._num_deferred = 0
        self.place = ""
        """The place of the interrupt; empty if there is no such bytecode."""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        frame.f_trace_opcodes = True
        if event != "opcode" or self.place:
            return self
        if (frame.f_code, frame.f_lasti) in self._seen:
            return self
        self._seen.add((frame.f_code, frame.f_lasti))
        if _deferred():
            self._num_deferred += 1
            if self._num_deferred % DEFERRED_STEP:
                return self
        if self._target:
            self._target -= 1
            return self
        self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}, bytecode {frame.f_lasti}"
        sys.settrace(None)
        last = _Last()
        self._note = _InC(last, operator.methodcaller("interrupt"))
        return None

    def run(self, action: Callable[[], Any]) -> None:
        """Raises KeyboardInterrupt if the action has a bytecode with that number."""
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # required by Python 3.12 when tracing begins
        sys.settrace(self)
        try:
            action()
        finally:
            sys.settrace(before)


class Bench:
    """A pool in use, and the actions to interrupt."""

    def __init__(self) -> None:
        config = MemoryPoolConfig(max_pool_size=64 * PAGE, block_size=PAGE)
        self.pool = MemoryPool(config, HostProvider(64 * PAGE, page_bytes=PAGE))
        self.buffers = [self.pool.allocate_buffer(20 * KIB) for _ in range(7)]
        for buffer in self.buffers[::2]:
            buffer.close()
        del self.buffers[::2]
        self.address = 0
        self.pool.free(self.pool.allocate(512))
        self.live = self.pool.statistics().num_live

    def hit(self) -> None:
        self.address = self.pool.allocate(512)

    def miss(self) -> None:
        self.pool.trim()
        self.address = self.pool.allocate(3 * PAGE)

    def listeners(self) -> None:
        with self.listening():
            self.address = self.pool.allocate(512)
            self.pool.free(self.address)
            self.address = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        def listener(event: Any) -> None:
            received.append(event)

        received: list[Any] = []
        try:
            self.pool.add_listener(listener)
            yield
        finally:
            with contextlib.suppress(ValueError):  # interrupted before it was added
                self.pool.remove_listener(listener)

    def free(self) -> None:
        self.address = self.pool.allocate(512)
        self.pool.used_on(self.address, 5)
        self.pool.free(self.address)
        self.address = 0

    def frees_of_destructors(self) -> None:
        for size in (512, 3 * KIB):
            self.pool.free_from_finalizer(self.pool.allocate(size))
        self.pool.owns(0)

    def arrays_of_cupy(self) -> None:
        pytest.importorskip("cupy")
        from cukit.memory.pool.cupy_allocator import _single

        allocate = _single(self.pool)
        held = [allocate(size) for size in (512, 512, KIB, 512)]
        held.pop()
        held.append(allocate(512))
        del held[:2]
        held.append(allocate(2 * KIB))

    def buffer(self) -> None:
        with self.pool.allocate_buffer(KIB) as buffer, buffer.pinned():
            buffer.array((4,), np.uint8)[:] = 1

    def defragment(self) -> None:
        self.pool.defragment()

    def packed_buffers(self) -> None:
        self.pool.defragment()
        self.buffers[1].array((4,), np.uint8)
        with self.buffers[0].pinned() as address:
            self.pool.owns(address)
        with contextlib.suppress(PointerError):
            self.pool.free(address)

    def report(self) -> None:
        with self.pool.scope() as statistics:
            snapshot(self.pool)
        statistics()

    def out_of_memory(self) -> None:
        with contextlib.suppress(OutOfMemoryError):
            self.address = self.pool.allocate(80 * PAGE)

    def close(self) -> None:
        """Frees what an action may leave live, and checks that all else is as before."""
        pool = self.pool
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not pool._lock._is_owned()
        if self.address and pool.owns(self.address):
            pool.free(self.address)
        self.address = 0
        if pool.statistics().num_live != self.live or len(pool._counters._opened) != 1:
            gc.collect()  # frames of exceptions may keep objects alive
        assert pool.statistics().num_live == self.live
        assert len(pool._counters._opened) == 1
        assert all(repr(buffer).endswith("movable>") for buffer in self.buffers)
        check_invariants(pool)


@pytest.mark.parametrize(
    "name",
    [
        "hit",
        "miss",
        pytest.param("listeners", marks=pytest.mark.slow),
        "free",
        pytest.param("frees_of_destructors", marks=pytest.mark.slow),
        pytest.param("arrays_of_cupy", marks=pytest.mark.slow),
        "buffer",
        pytest.param("defragment", marks=pytest.mark.slow),
        pytest.param("packed_buffers", marks=pytest.mark.slow),
        pytest.param("report", marks=pytest.mark.slow),
        pytest.param("out_of_memory", marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_at_every_bytecode(name: str) -> None:
    bench = Bench()
    action = getattr(bench, name)
    action()
    bench.close()
    number = 0
    while True:
        interrupt = Bytecodes(number)
        arrived = False
        try:
            interrupt.run(action)
        except KeyboardInterrupt:
            arrived = True
        try:
            bench.close()
        except AssertionError as wrong:
            raise AssertionError(f"interrupted at {interrupt.place}") from wrong
        assert arrived == bool(interrupt.place), f"lost: an interrupt at {interrupt.place}"
        if not arrived:
            break
        number += 1
    assert number > 30, "nothing was interrupted"
