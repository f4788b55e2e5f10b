"""Invalid use: options, sizes, addresses, buffers, forks."""

from __future__ import annotations

import copy
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cukit.errors import ConfigError, CukitError, OutOfMemoryError, PointerError
from cukit.memory import (
    DevicePools,
    HostProvider,
    MemoryPool,
    MemoryPoolConfig,
    batched_copy,
    default_pool,
    pools_of,
)
from cukit.memory.history import History
from cukit.memory.leaks import live_report, watch_leaks
from cukit.memory.log import LogWriter, read_log, write_log
from cukit.memory.snapshot import snapshot, write_snapshot
from tests.memory.invariants import check_invariants


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_pool_size": -1}, "initial_pool_size: expected at least 0, got -1"),
        ({"max_pool_size": 0}, "max_pool_size: expected None or at least 1, got 0"),
        (
            {"initial_pool_size": 4096, "max_pool_size": 512},
            "max_pool_size: expected None or at least 4096, got 512",
        ),
        ({"block_size": 3 << 20}, "block_size: expected a power of two of at least 512"),
        ({"block_size": 256}, "block_size: expected a power of two of at least 512"),
        ({"growth_factor": 0.9}, "growth_factor: expected between 1 and 16"),
        ({"defrag_threshold": 0.0}, "defrag_threshold: expected above 0 and at most 1"),
        ({"call_site_depth": -1}, "call_site_depth: expected at least 0"),
        ({"max_pool_size": "8G"}, "max_pool_size: expected a whole number, got '8G'"),
        ({"initial_pool_size": 1.5}, "initial_pool_size: expected a whole number, got 1.5"),
        ({"growth_factor": "2"}, "growth_factor: expected a number, got '2'"),
        ({"on_out_of_memory": 3}, "on_out_of_memory: expected None or a function, got 3"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"MemoryPoolConfig: {message}"):
        MemoryPoolConfig(**options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: HostProvider(-1), "HostProvider: total_bytes must be an integer of 0"),
        (lambda pool: HostProvider(page_bytes=4097), "page_bytes must be a multiple of 4096"),
        (lambda pool: DevicePools(3), "DevicePools: config must be a MemoryPoolConfig"),
        (lambda pool: DevicePools(make_provider=3), "make_provider must be a function"),
        (lambda pool: default_pool("x"), "device_id must be an integer of 0 or more, got 'x'"),
        (lambda pool: pools_of(3), "pools_of: pool must be a MemoryPool, got 3"),
        (lambda pool: pool.allocate(8, "x"), "stream must be an integer, got 'x'"),
        (lambda pool: pool.add_listener(3), "add_listener: listener must be a function, got 3"),
        (lambda pool: pool.remove_listener(print), "remove_listener: .* is not a listener"),
        (lambda pool: pool.release_capture("x"), "capture_id must be an integer, got 'x'"),
        (lambda pool: _array(pool, (-1,), "int8"), "shape must not be negative"),
        (lambda pool: _array(pool, (1.5,), "int8"), "shape must be integers"),
        (lambda pool: _array(pool, 10**30, "int8"), "an array of 1000.* bytes .* is larger"),
        (lambda pool: _array(pool, 4, "nothing"), "dtype must be a dtype of numbers"),
        (lambda pool: _array(pool, 4, object), "dtype must be a dtype of numbers"),
    ],
)
def test_errors_name_the_argument(call: Any, message: str) -> None:
    pool = MemoryPool(provider=HostProvider(4 << 20))
    with pytest.raises(CukitError, match=message):
        call(pool)
    assert not pool.owns([])  # type: ignore[arg-type]


WRONG = [None, 3, -1, 1.5, float("nan"), 1 << 70, True, b"x", [], {}, object(), np.zeros(3)]
"""Illegal as an address, a pool, a listener, a path or a byte array; some also as numbers."""


@pytest.mark.parametrize("value", WRONG, ids=[type(one).__name__ for one in WRONG])
def test_invalid_arguments_raise_only_cukit_errors(value: Any, tmp_path: Path) -> None:
    """Calls the public functions of the pool and its tools with `value` as one of the arguments."""
    pool = MemoryPool(provider=HostProvider(4 << 20))
    address, buffer = pool.allocate(512), pool.allocate_buffer(64)
    target = tmp_path / "snapshot.json"
    no_provider: Any = 3 if value is None else value
    numbers: list[Any] = [
        lambda: pool.free(pool.allocate(value)),
        lambda: pool.allocate_buffer(value).close(),
        lambda: pool.free(pool.allocate(512, value)),
        lambda: pool.used_on(address, value),
        lambda: pool.owns(value),
        lambda: pool.release_capture(value),
        lambda: buffer.array(value, "u1"),
        lambda: buffer.array((4,), value),
        lambda: MemoryPoolConfig(max_pool_size=value),
        lambda: MemoryPoolConfig(growth_factor=value),
        lambda: MemoryPoolConfig(enable_defrag=value),
        lambda: HostProvider(value),
        lambda: History(pool, value).close(),
        lambda: MemoryPool(value, HostProvider(4 << 20)),
        lambda: snapshot(pool, value),
        lambda: batched_copy(np.zeros(64, np.uint8), value),
    ]
    for call in numbers:
        with suppress(CukitError):
            call()
    others: list[Any] = [
        lambda: pool.free(value),
        lambda: pool.used_on(value, 0),
        lambda: pool.add_listener(value),
        lambda: pool.remove_listener(value),
        lambda: MemoryPool(provider=no_provider),
        lambda: History(value),
        lambda: snapshot(value),
        lambda: write_snapshot(value, pool),
        lambda: write_snapshot(target, value),
        lambda: live_report(value),
        lambda: watch_leaks(value).__enter__(),
        lambda: LogWriter(value),
        lambda: write_log(value, []),
        lambda: read_log(value),
        lambda: batched_copy(value, [(0, 16, 16)]),
    ]
    for call in others:
        with pytest.raises(CukitError):
            call()
    assert not target.exists()
    assert pool.statistics().num_live == 2
    check_invariants(pool)


def _array(pool: MemoryPool, shape: Any, dtype: Any) -> Any:
    with pool.allocate_buffer(64) as buffer:
        return buffer.array(shape, dtype)


def test_a_limit_below_one_page() -> None:
    with pytest.raises(ConfigError, match="max_pool_size: expected at least a page of 2097152"):
        MemoryPool(MemoryPoolConfig(max_pool_size=1 << 20), HostProvider(4 << 20))


def test_an_initial_size_beyond_the_device() -> None:
    with pytest.raises(ConfigError, match="the device lacks 8388608 bytes"):
        MemoryPool(MemoryPoolConfig(initial_pool_size=8 << 20), HostProvider(4 << 20))


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32, np.uint8, np.uint64, np.int64])
def test_sizes_of_every_integer_type(kind: type[Any]) -> None:
    pool = MemoryPool(provider=HostProvider(1 << 34))
    size = kind(min(np.iinfo(kind).max, (1 << 31) - 1))
    address = pool.allocate(size)
    assert pool.statistics().live_bytes == -(-int(size) // 512) * 512
    pool.free(address)


@pytest.mark.parametrize("size", [1.5, "8", None, np.float32(8)])
def test_sizes_that_are_not_integers(size: Any) -> None:
    pool = MemoryPool(provider=HostProvider(4 << 20))
    with pytest.raises(ConfigError, match="size: expected a whole number of bytes"):
        pool.allocate(size)
    assert pool.statistics().num_live == 0


@pytest.mark.parametrize("address", [None, "a", 1.5])
def test_freeing_a_null_address(address: Any) -> None:
    pool = MemoryPool(provider=HostProvider(4 << 20))
    with pytest.raises(PointerError, match="expected the address that allocate returned"):
        pool.free(address)


def test_a_failed_allocation_is_an_event() -> None:
    pool = MemoryPool(MemoryPoolConfig(max_pool_size=4 << 20), HostProvider())
    events: list[Any] = []
    pool.add_listener(events.append)
    with pytest.raises(OutOfMemoryError):
        pool.allocate(8 << 20)
    assert [(event.action, event.size) for event in events] == [("oom", 8 << 20)]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_buffers_have_one_owner(duplicate: Any) -> None:
    pool = MemoryPool(provider=HostProvider(4 << 20))
    with (
        pool.allocate_buffer(512) as buffer,
        pytest.raises(PointerError, match="cannot be copied"),
    ):
        duplicate(buffer)
    assert pool.statistics().num_live == 0


def test_arrays_keep_their_pins() -> None:
    pool = MemoryPool(provider=HostProvider(4 << 20))
    buffer = pool.allocate_buffer(512)
    array = buffer.array((128,), "float32")
    with pytest.raises(PointerError, match="unpin without pin"):
        buffer.unpin()
    buffer.close()
    assert pool.statistics().num_live == 1
    del array
    assert pool.statistics().num_live == 0


def test_a_forked_child_writes_to_its_own_memory() -> None:
    pool = MemoryPool(provider=HostProvider(4 << 20))
    array = pool.allocate_buffer(512).array((128,), "float32")
    array[:] = 1
    child = os.fork()
    if child == 0:
        array[:] = 2
        os._exit(0 if array[0] == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert array[0] == 1
