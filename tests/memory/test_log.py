"""Allocation logs: written logs are readable; errors name the line and the column."""

from __future__ import annotations

import codecs
import gc
import gzip
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cukit.memory import log
from cukit.memory.bookkeeping.blocks import Event
from cukit.memory.log import (
    BUFFERED,
    DAY_US,
    LogAction,
    LogError,
    LogEvent,
    LogWriter,
    read_log,
    write_log,
)
from cukit.memory.recorder import record_allocations
from cukit.memory.replay.mixes import STANDARD, make_log
from cukit.memory.replay.replay import Step, script_of

HEADER = "Thread,Time,Action,Pointer,Size,Stream"
ALLOCATE = "7,09:00:00.000001,allocate,0x7f00,512,0"
FREE = "7,09:00:00.000002,free,0x7f00,512,0"


def file_of(folder: Path, *lines: str) -> Path:
    path = folder / "log.csv"
    path.write_text("\n".join((HEADER, *lines)) + "\n")
    return path


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
def test_a_log_round_trip_through_a_file(tmp_path: Path, name: str) -> None:
    events = make_log("torture", seed=3)
    path = tmp_path / name
    write_log(path, events)
    assert read_log(path) == events


def test_the_same_events_make_the_same_file(tmp_path: Path) -> None:
    contents = []
    for folder in ("a", "b"):
        path = tmp_path / folder / "log.csv.gz"
        path.parent.mkdir()
        write_log(path, make_log("random-100-4"))
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]


def test_rmm_logs_are_read(tmp_path: Path) -> None:
    """Older RMM releases put a colon before the microseconds; a null pointer is (nil)."""
    path = file_of(
        tmp_path,
        "140213,10:30:59:104551,allocate,0x7f2a00000000,1048576,0x0",
        "140213,10:31:00:000000,allocate failure,(nil),99999999999999,0",
        "140213,10:31:00.104923,free,7f2a00000000,1048576,0x7f31",
    )
    first, second, third = read_log(path)
    clock = ((10 * 60 + 30) * 60 + 59) * 1_000_000 + 104551
    assert first == (140213, clock, LogAction.ALLOCATE, 0x7F2A00000000, 1048576, 0)
    assert second.action is LogAction.FAILURE
    assert second.pointer == 0
    assert third.stream == 0x7F31


def test_times_continue_past_midnight(tmp_path: Path) -> None:
    late = LogEvent(1, DAY_US - 5, LogAction.ALLOCATE, 512, 512, 0)
    later = LogEvent(1, DAY_US + 5, LogAction.FREE, 512, 512, 0)
    write_log(tmp_path / "log.csv", [late, later])
    assert read_log(tmp_path / "log.csv") == [late, later]


def test_features_of_real_logs(tmp_path: Path) -> None:
    """A byte-order mark, blank lines, rows of zero bytes, frees of earlier allocations."""
    empty = ALLOCATE.replace("0x7f00,512", "(nil),0"), FREE.replace("0x7f00,512", "(nil),0")
    earlier = FREE.replace("0x7f00,512", "0x9000,1024")
    path = file_of(tmp_path, "", ALLOCATE, "  ", empty[0], earlier, empty[1], FREE)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    events = read_log(path)
    assert [(e.action.value, e.size) for e in events] == [
        ("allocate", 512),
        ("free", 1024),
        ("free", 512),
    ]
    script = script_of(events)
    assert script.steps == (Step(1, 1024, 0), Step(0, 512, 0), Step(1, 0, 0), Step(0, 0, 0))
    assert script.peak_live_bytes == 1536


DAMAGED = {
    f"3: Size: expected a whole number, got '{'9' * 60}...'": FREE.replace("512", "9" * 5000),
    "3: expected 6 columns, got 5": "7,09:00:00.000002,free,0x7f00,512",
    "3: Thread: expected a whole number, got '-7'": FREE.replace("7,", "-7,", 1),
    "3: Time: expected hours:minutes:seconds.microseconds, got 'noon'": (
        FREE.replace("09:00:00.000002", "noon")
    ),
    "3: Action: expected 'allocate' or 'free' or 'allocate failure', got 'release'": (
        FREE.replace("free", "release")
    ),
    "3: Pointer: expected an address such as 0x7f2000000000, got '0xno'": (
        FREE.replace("0x7f00", "0xno")
    ),
    "3: Pointer: expected an address such as 0x7f2000000000, got '0x-5'": (
        FREE.replace("0x7f00", "0x-5")
    ),
    "3: Pointer: expected an address such as 0x7f2000000000, got '7_f'": (
        FREE.replace("0x7f00", "7_f")
    ),
    "3: Stream: expected an address such as 0x7f2000000000, got '-1'": FREE[:-1] + "-1",
    "3: Time: expected hours:minutes:seconds.microseconds, got '24:00:00.000002'": (
        FREE.replace("09:00:00.000002", "24:00:00.000002")
    ),
    "3: Size: expected a whole number, got '5e2'": FREE.replace("512", "5e2"),
    "3: Stream: expected an address such as 0x7f2000000000, got 'main'": FREE[:-1] + "main",
    "4: Pointer: expected memory that is allocated at this line, got '0x7f00'": f"{FREE}\n{FREE}",
    "3: Pointer: expected memory that is not allocated already, got '0x7f00'": ALLOCATE,
    "3: Size: expected the 512 bytes that were allocated there, got '1024'": (
        FREE.replace("512", "1024")
    ),
    "3: Pointer: expected above 0 in an allocation, got '(nil)'": (
        ALLOCATE.replace("0x7f00", "(nil)")
    ),
}


@pytest.mark.parametrize("complaint", DAMAGED)
def test_damage_is_reported_by_line_and_column(tmp_path: Path, complaint: str) -> None:
    path = file_of(tmp_path, ALLOCATE, DAMAGED[complaint])
    with pytest.raises(LogError) as error:
        read_log(path)
    assert str(error.value) == f"{path}:{complaint}"


def test_a_file_that_is_not_a_log_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("a,b\n")
    with pytest.raises(LogError, match=r"log\.csv:1: expected the columns Thread,Time,Action"):
        read_log(path)
    packed = tmp_path / "log.csv.gz"
    packed.write_bytes(b"plain")
    with pytest.raises(LogError, match="not an allocation log"):
        read_log(packed)
    damaged = bytearray(gzip.compress(f"{ALLOCATE}\n".encode() * 100))
    damaged[20] ^= 0xFF
    packed.write_bytes(damaged)
    with pytest.raises(LogError, match="not an allocation log"):
        read_log(packed)


def event(action: Any, address: int = 512, size: int = 512, stream: Any = "main") -> Event:
    return Event(time.perf_counter(), action, address, size, stream, 7, ())


def test_a_pools_events_become_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    with LogWriter(path) as writer:
        writer(event("segment_map", size=2 << 20))
        writer(event("alloc"))
        writer(event("alloc", address=1024, stream="other"))
        writer(event("free"))
        writer(event("free_completed"))
        writer(event("oom", address=0, size=1 << 40))
    found = read_log(path)
    assert [(e.action.value, e.pointer, e.stream) for e in found] == [
        ("allocate", 512, 1),
        ("allocate", 1024, 2),
        ("free", 512, 1),
        ("allocate failure", 0, 1),
    ]
    assert [e.time_us for e in found] == sorted(e.time_us for e in found)


def test_events_after_the_end_are_discarded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(log, "BUFFERED", 2)
    with LogWriter(tmp_path / "log.csv") as writer:
        writer(event("alloc"))
    for _ in range(5):
        writer(event("free"))
    writer.close()
    assert len(read_log(tmp_path / "log.csv")) == 1


def test_a_long_log_is_written_during_recording(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    writer = LogWriter(path)
    for _ in range(BUFFERED):
        writer(event("alloc"))
        writer(event("free"))
    assert path.stat().st_size > 0
    writer.close()
    writer.close()
    assert len(read_log(path)) == 2 * BUFFERED


@pytest.mark.parametrize("name", STANDARD)
def test_a_synthetic_log_is_determined_by_its_seed(name: str) -> None:
    if name.startswith("random-100000"):
        name = name.replace("100000", "1000")  # the same code, in less time
    first = make_log(name, seed=1)
    assert first == make_log(name, seed=1)
    assert first != make_log(name, seed=2)
    live: dict[int, int] = {}
    for e in first:
        if e.action is LogAction.ALLOCATE:
            assert e.pointer not in live
            live[e.pointer] = e.size
        else:
            assert live.pop(e.pointer) == e.size
    assert not live


class FakeMemory:
    """The part of an allocator's result that the recorder uses."""

    device_id = 0

    def __init__(self, ptr: int, on_death: Callable[[int], None]) -> None:
        self.ptr, self._on_death = ptr, on_death

    def __del__(self) -> None:
        self._on_death(self.ptr)


def test_a_free_is_logged_before_the_memory_is_returned(tmp_path: Path) -> None:
    cupy = pytest.importorskip("cupy")
    from cukit.memory.recorder import AllocationRecorder

    path = tmp_path / "log.csv"
    given_back: list[tuple[int, int]] = []
    with LogWriter(path) as writer:

        def inner(size: int) -> Any:
            if size > 1000:
                raise cupy.cuda.memory.OutOfMemoryError(size, 0, 0)
            return FakeMemory(512, lambda ptr: given_back.append((ptr, len(writer._queue))))

        recorder = AllocationRecorder(writer, inner)
        recorder._cuda = SimpleNamespace(  # CuPy's module needs a driver
            get_current_stream=lambda: SimpleNamespace(ptr=0),
            memory=cupy.cuda.memory,
            MemoryPointer=cupy.cuda.MemoryPointer,
            UnownedMemory=cupy.cuda.UnownedMemory,
        )
        memory = recorder.allocate(100)
        assert memory.ptr == 512
        view = memory + 8
        del memory
        assert not given_back
        del view
        gc.collect()
        assert given_back == [(512, 2)]
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            recorder.allocate(2000)
    assert [(e.action.value, e.size) for e in read_log(path)] == [
        ("allocate", 100),
        ("free", 100),
        ("allocate failure", 2000),
    ]


@pytest.mark.gpu
def test_cupy_allocations_are_recorded(tmp_path: Path) -> None:
    import cupy

    path = tmp_path / "log.csv.gz"
    before = cupy.cuda.get_allocator()
    stream = cupy.cuda.Stream()
    with record_allocations(path):
        kept = cupy.zeros(1000, "float32")
        with stream:
            gone = cupy.ones((256, 1024), "float32")
            del gone
        del kept
    assert cupy.cuda.get_allocator() == before
    events = read_log(path)
    assert [(e.action.value, e.size) for e in events] == [
        ("allocate", 4000),
        ("allocate", 1 << 20),
        ("free", 1 << 20),
        ("free", 4000),
    ]
    assert [e.stream for e in events] == [0, stream.ptr, stream.ptr, 0]
