"""Ctrl-C at any time raises KeyboardInterrupt, and the pool stays consistent and usable."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import pytest

from cukit.errors import PointerError
from cukit.memory import MemoryPool, MemoryPoolConfig
from cukit.memory.bookkeeping.blocks import Event
from cukit.memory.uninterrupted import InterruptedAsUsual, Uninterrupted
from tests.memory.invariants import check_invariants
from tests.memory.simulation import PAGE, SimulatedProvider
from tests.memory.test_failures import DriverCallSequence, intact, slid_pool

pytestmark = pytest.mark.usefixtures("default_sigint")

T = TypeVar("T")


class InterruptedCallSequence(DriverCallSequence):
    """Repeats an interrupted step unless it was completed."""

    def step(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except KeyboardInterrupt:
            self.failures += 1
        finally:
            check_invariants(self.pool)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self.provider.interrupting:
            with suppress(PointerError):  # freed before the interrupt was raised
                return action()
            return None  # type: ignore[return-value]
        return action()


@pytest.mark.parametrize("lagging", [False, True])
@pytest.mark.parametrize("can_remap", [True, False])
@pytest.mark.parametrize("how", ["signal", "raised"])
def test_ctrl_c_in_every_driver_call(how: str, *, can_remap: bool, lagging: bool) -> None:
    """signal: SIGINT arrives during the call. raised: the call raises KeyboardInterrupt."""
    clean = InterruptedCallSequence(can_remap=can_remap, lagging=lagging)
    clean.run()
    for number in range(len(clean.provider.calls)):
        sequence = InterruptedCallSequence(can_remap=can_remap, lagging=lagging)
        sequence.provider.interrupting = how == "signal"
        sequence.provider.fail_with = KeyboardInterrupt
        sequence.provider.fail_in = number
        sequence.run()
        assert sequence.failures == 1, f"call {number} was interrupted without an exception"


def test_a_slide_is_completed_before_the_interrupt() -> None:
    pool, provider, buffers = slid_pool()
    provider.interrupting, provider.fail_in = True, 2
    with pytest.raises(KeyboardInterrupt):
        pool.defragment()
    check_invariants(pool)
    assert intact(buffers)
    assert pool.statistics().bytes_moved > 0


def test_an_interrupted_allocation_leaks_nothing() -> None:
    provider = SimulatedProvider()
    pool = MemoryPool(MemoryPoolConfig(), provider)
    provider.interrupting, provider.fail_in = True, 0
    with pytest.raises(KeyboardInterrupt):
        pool.allocate(3 * PAGE)
    check_invariants(pool)
    statistics = pool.statistics()
    assert (statistics.num_live, statistics.num_allocations) == (0, 0)
    pool.allocate(3 * PAGE)
    assert pool.statistics().reserved_bytes == statistics.reserved_bytes


@pytest.mark.parametrize("action", ["alloc", "free"])
def test_a_listener_is_completed_before_the_interrupt(action: str) -> None:
    """Every listener receives the event; then the allocation is undone, or the free is done."""
    pool = MemoryPool(MemoryPoolConfig(), SimulatedProvider())
    received: list[str] = []

    def interrupt(event: Event) -> None:
        if event.action == action and action not in received:
            signal.raise_signal(signal.SIGINT)

    pool.add_listener(interrupt)
    pool.add_listener(lambda event: received.append(event.action))
    with pytest.raises(KeyboardInterrupt):
        pool.free(pool.allocate(512))
    assert received[-3:] == ["alloc", "free", "free_completed"]
    assert pool.statistics().num_live == 0
    check_invariants(pool)


def test_an_interrupt_while_waiting_for_the_lock() -> None:
    """Ctrl-C while another thread holds the lock: the pool is unlocked afterwards."""
    pool = MemoryPool(MemoryPoolConfig(), SimulatedProvider())
    begun, end = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._locked():
            begun.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
    threading.Timer(0.1, end.set).start()
    with pytest.raises(KeyboardInterrupt):
        pool.allocate(512)
    thread.join()
    check_invariants(pool)
    assert pool.statistics().num_live == 0


def test_a_callback_can_be_interrupted() -> None:
    """on_out_of_memory is user code, so Ctrl-C interrupts it immediately."""
    reached = []

    def refuse(size: int) -> bool:
        signal.raise_signal(signal.SIGINT)
        reached.append(size)
        return False

    config = MemoryPoolConfig(max_pool_size=4 * PAGE, on_out_of_memory=refuse)
    pool = MemoryPool(config, SimulatedProvider())
    with pytest.raises(KeyboardInterrupt):
        pool.allocate(8 * PAGE)
    assert not reached
    check_invariants(pool)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nested_blocks_defer_and_interrupted_as_usual_does_not() -> None:
    done = []

    def nested() -> None:
        with Uninterrupted():
            with Uninterrupted():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("never")

    def lifted() -> None:
        signal.raise_signal(signal.SIGINT)
        with InterruptedAsUsual():
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        nested()
    with Uninterrupted(), pytest.raises(KeyboardInterrupt):
        lifted()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_and_other_handlers_are_unaffected() -> None:
    seen: list[object] = []

    def work() -> None:
        with Uninterrupted(), InterruptedAsUsual():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Uninterrupted():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
