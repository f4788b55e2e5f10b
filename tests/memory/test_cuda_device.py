"""Streams of the CUDA providers, on a fake CuPy: destroyed streams, and when waiting is allowed."""
# ruff: noqa: N802 - the names are CUDA's

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cukit.memory.providers import cuda_device
from cukit.memory.providers.cuda_device import BROKEN_CAPTURE, LEGACY_KEY, CudaDevice


class RefusedError(RuntimeError):
    """CuPy's exception, with the runtime's error code."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


BROKEN = 666


class Runtime:
    """Streams are numbers; each has an id that is never reused."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}
        self.capturing: dict[int, int] = {}
        self.log: list[tuple[str, int]] = []
        self.events = 0
        self._last_id = 100

    def open(self, handle: int) -> None:
        self._last_id += 1
        self.ids[handle] = self._last_id

    def _use(self, name: str, handle: int) -> None:
        if handle not in self.ids:
            raise RefusedError(201)
        self.log.append((name, handle))

    def getDevice(self) -> int:
        return 0

    def getDeviceCount(self) -> int:
        return 1

    def memGetInfo(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def eventCreateWithFlags(self, flags: int) -> int:
        self.events += 1
        return self.events

    def eventRecord(self, event: int, handle: int) -> None:
        self._use("record", handle)

    def streamWaitEvent(self, handle: int, event: int) -> None:
        self._use("wait", handle)

    def streamIsCapturing(self, handle: int) -> bool:
        self._use("asked", handle)
        if self.capturing.get(handle) == BROKEN:
            raise RuntimeError("the stream was capturing, but an error has invalidated it")
        return handle in self.capturing

    def eventSynchronize(self, event: int) -> None:
        self.log.append(("synchronize", event))

    def deviceSynchronize(self) -> None:
        assert not self.capturing, "forbidden during a capture"
        self.log.append(("synchronize", 0))

    def calls_of(self, name: str) -> list[int]:
        return [value for what, value in self.log if what == name]


class Stream:
    """Like CuPy's: its finalizer destroys the handle."""

    def __init__(self, runtime: Runtime, handle: int) -> None:
        self._runtime, self.ptr = runtime, handle
        self._foreign_stream_ref = None
        runtime.open(handle)

    def __del__(self) -> None:
        del self._runtime.ids[self.ptr]


@pytest.fixture
def runtime() -> Runtime:
    made = Runtime()
    made.open(2)  # the per-thread default stream, here the same for all threads
    return made


@pytest.fixture
def device(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDevice]:
    module = SimpleNamespace(_BaseStream=Stream, Stream=Stream)
    cuda = SimpleNamespace(
        runtime=runtime, stream=module, get_current_stream=lambda device_id: runtime.current
    )
    monkeypatch.setattr(cuda_device, "require_cupy", lambda purpose: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cuda_device, "gpu_available", lambda: True)
    monkeypatch.setattr(cuda_device, "_STREAMS", {})

    def call(name: str, handle: int) -> int:
        assert name == "cuStreamGetId"
        assert handle not in runtime.capturing, "the driver refuses"
        return runtime.ids[handle] if handle != 2 else 1000 + threading.get_ident()

    monkeypatch.setattr(cuda_device, "call", call)
    made = CudaDevice()
    made._captures = SimpleNamespace(capture_of=runtime.capturing.get, ended=list)  # type: ignore
    runtime.current = Stream(runtime, 50)  # type: ignore[attr-defined]
    yield made
    del runtime.current  # type: ignore[attr-defined]


def test_a_reused_handle_is_another_stream(device: CudaDevice, runtime: Runtime) -> None:
    keys = []
    for _ in range(3):
        stream = Stream(runtime, 7)
        keys.append(device.stream_key(stream))
        assert device.stream_key(stream) == keys[-1]
        del stream
        device._forget_dropped()
    assert len(set(keys)) == 3
    assert device.stream_key(0) == device.stream_key(1) == LEGACY_KEY


def test_reuse_waits_for_all_work_of_a_destroyed_stream(
    device: CudaDevice, runtime: Runtime
) -> None:
    stream = Stream(runtime, 7)
    key = device.stream_key(stream)
    event = device.record(key)
    assert runtime.calls_of("record") == [7]
    device.wait(key, event)
    assert runtime.calls_of("wait") == [7]
    del stream
    device._forget_dropped()
    after = device.record(key)
    assert runtime.calls_of("record") == [7]
    assert runtime.calls_of("synchronize") == [0]
    assert device.is_done(after)
    device.wait(key, event)  # a destroyed stream cannot wait, so the host does
    assert runtime.calls_of("synchronize") == [0, event]
    assert device.capture_id(key) is None
    device.discard(after)
    device.discard(event)


def test_a_stream_is_kept_until_unreferenced_and_another_appears(
    device: CudaDevice, runtime: Runtime
) -> None:
    """A stream that the registry keeps is not destroyed during a driver call of another thread."""
    stream, kept = Stream(runtime, 7), Stream(runtime, 8)
    key, other = device.stream_key(stream), device.stream_key(kept)
    runtime.capturing[7] = 41
    del stream._cukit_stream_key_0  # type: ignore[attr-defined]
    inside = device.stream_key(stream)
    runtime.capturing.clear()
    assert len({key, other, inside}) == 3
    del stream
    for known in (key, inside):
        device.discard(device.record(known))
    assert runtime.calls_of("record") == [7, 7]
    new = device.stream_key(Stream(runtime, 9))
    assert sorted(runtime.ids) == [2, 8, 9, 50]
    for known in (key, inside):
        assert device.is_done(device.record(known))
    assert runtime.calls_of("record") == [7, 7]
    device.record(other)
    device.record(new)
    assert runtime.calls_of("record") == [7, 7, 8, 9]


def test_no_wait_for_a_destroyed_stream_during_a_capture(
    device: CudaDevice, runtime: Runtime
) -> None:
    gone, captured = Stream(runtime, 7), Stream(runtime, 8)
    key = device.stream_key(gone)
    device.stream_key(captured)
    del gone
    device._forget_dropped()
    runtime.capturing[8] = 41
    event = device.record(key)
    assert not device.is_done(event)
    assert not runtime.calls_of("synchronize")
    runtime.capturing.clear()
    assert device.is_done(event)
    device.synchronize(event)
    device.wait(device.stream_key(captured), event)
    assert runtime.calls_of("synchronize") == [0, 0, 0]
    device.discard(event)


def test_an_aborted_capture_is_an_error_of_its_own_thread(
    device: CudaDevice, runtime: Runtime
) -> None:
    """For other streams the aborted capture is still a capture: their calls do not fail."""
    stream, gone = Stream(runtime, 7), Stream(runtime, 8)
    key, other = device.stream_key(stream), device.stream_key(gone)
    runtime.capturing[7] = BROKEN
    assert device.capture_id(key) == BROKEN_CAPTURE
    del gone
    device._forget_dropped()
    assert not device.is_done(device.record(other))
    runtime.current = stream  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="invalidated"):
        device.capture_id(key)


def test_a_stream_first_seen_in_a_capture(device: CudaDevice, runtime: Runtime) -> None:
    stream = Stream(runtime, 7)
    runtime.capturing[7] = 41
    key = device.stream_key(stream)
    assert device.stream_key(stream) == key
    assert device.capture_id(key) == 41
    assert device.records_late(key)
    runtime.capturing.clear()
    later = device.stream_key(stream)
    assert later != key
    assert device.capture_id(key) is None
    device.record(key)
    assert runtime.calls_of("record") == [7], "the capture's memory is still recorded on its stream"
    runtime.capturing[7] = 42
    assert device.capture_id(later) == 42


def test_threads_have_their_own_streams(device: CudaDevice, runtime: Runtime) -> None:
    keys: list[Any] = []

    def meet() -> None:
        keys.append(device.stream_key(2))
        device.record(keys[-1])

    thread = threading.Thread(target=meet)
    thread.start()
    thread.join()
    assert runtime.calls_of("record") == [2]
    device.record(keys[0])  # not accessible from this thread
    assert runtime.calls_of("record") == [2]
    assert runtime.calls_of("synchronize") == [0]
    assert not device.records_late(keys[0])
    runtime.current = SimpleNamespace(ptr=2)  # type: ignore[attr-defined]
    runtime.capturing[2] = 43
    inside = device.current_stream()
    assert device.capture_id(inside) == 43
    runtime.capturing.clear()
    assert device.current_stream() not in (inside, LEGACY_KEY)


def test_the_device_is_current_inside_a_block(runtime: Runtime, device: CudaDevice) -> None:
    current = [0]
    runtime.getDevice = lambda: current[-1]  # type: ignore[method-assign]
    runtime.setDevice = current.append  # type: ignore[attr-defined]
    with device.current():
        assert current == [0]


def test_the_previous_device_is_restored_after_an_error(
    runtime: Runtime, device: CudaDevice
) -> None:
    current = [3]
    runtime.getDevice = lambda: current[-1]  # type: ignore[method-assign]
    runtime.setDevice = current.append  # type: ignore[attr-defined]

    def fail() -> None:
        with device.current():
            assert current == [3, 0]
            raise RefusedError(1)

    with pytest.raises(RefusedError):
        fail()
    assert current == [3, 0, 3]
