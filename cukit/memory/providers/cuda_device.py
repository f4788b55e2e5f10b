"""The common part of the CUDA providers: streams, events, copies and captures, through CuPy."""

from __future__ import annotations

import math
import os
import threading
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Container, Hashable
from sys import getrefcount
from typing import Any, NamedTuple, NoReturn

import numpy as np

from cukit.core.device import gpu_available, require_cupy
from cukit.errors import ConfigError, UnsupportedDeviceError
from cukit.memory.batched_copy import Moves
from cukit.memory.providers.cuda_captures import CaptureWatch, between_captures
from cukit.memory.providers.cuda_driver import call
from cukit.memory.providers.device_copy import DeviceCopy
from cukit.memory.providers.slot_mover import SlotMover, SlotMoves
from cukit.memory.slot_grid import Grid

LEGACY_KEY = 0
"""The legacy default stream. Other streams have the driver's ids, which are larger."""

BROKEN_CAPTURE = -1
"""The id of any invalidated capture."""

_LEGACY_HANDLES = (0, 1)
_PER_THREAD_HANDLE = 2
_NO_TIMING = 2  # cudaEventDisableTiming
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY

_DONE = None
"""An event that is already complete."""

_GONE = object()
"""The result of a call for a stream that no longer exists."""

_LATER = object()
"""The event of a stream that no longer exists, recorded during a capture, when the host must not
synchronise."""


class _Stream(NamedTuple):
    handle: int
    owner: Any | None
    """CuPy's stream object, whose finalizer destroys the stream; None: CuPy does not own it."""
    of_thread: bool
    """A per-thread default stream: its handle denotes a different stream in every thread."""


_dropped = _Stream(0, object(), False)
_REFERENCES_OF_DROPPED = getrefcount(_dropped.owner)
"""The reference count of an object that only a _Stream refers to."""

_STREAMS: dict[int, dict[Hashable, _Stream]] = {}
"""Streams by device and key. All providers of a device share them, because they share the keys that
are stored in CuPy's stream objects.

Keeps CuPy's stream objects alive. Otherwise a finalizer in any thread could destroy a stream during
a driver call of another thread on that stream, which crashes the driver."""


_COPIES: dict[int, DeviceCopy] = {}
_SLOT_MOVERS: dict[int, SlotMover] = {}
"""One of each per device."""


class CudaDevice:
    """Streams of one GPU, identified by the driver's stream ids.

    Handles are recycled after a stream is destroyed, and the per-thread default streams all have
    the same handle. So keys are the driver's stream ids, which are never reused; they are stored in
    CuPy's stream objects.

    Args:
        device_id: CuPy's device number; None: the current device.

    Raises:
        UnsupportedDeviceError: no GPU, or no device with that number.
        MissingDependencyError: CuPy is not installed.
    """

    uncaptured: Container[Hashable] = (LEGACY_KEY,)
    plans_slots = True

    def __init__(self, device_id: int | None = None) -> None:
        cupy = require_cupy("the CUDA memory pool")
        if not gpu_available():
            raise UnsupportedDeviceError(
                "no CUDA device found; run `cukit doctor` to see what is missing"
            )
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._stream_module = cupy.cuda.stream
        self.device_id = self._runtime.getDevice() if device_id is None else device_id
        if not 0 <= self.device_id < self._runtime.getDeviceCount():
            raise UnsupportedDeviceError(f"there is no GPU {self.device_id}")
        self._get_current_stream: Callable[[int], Any] = cupy.cuda.get_current_stream
        self._name = f"_cukit_stream_key_{self.device_id}"
        self._streams = _STREAMS.setdefault(self.device_id, {})
        self._of_thread = threading.local()
        self._spare_events: list[int] = []
        self._captures = CaptureWatch()
        self._copy = _COPIES.setdefault(self.device_id, DeviceCopy(cupy))
        self._move_slots = _SLOT_MOVERS.setdefault(self.device_id, SlotMover(cupy))
        with self.current():
            self._runtime.memGetInfo()  # creates the primary context
        _devices.add(self)

    def for_device(self, device_id: int) -> CudaDevice:
        """The same kind of provider for another device."""
        return type(self)(device_id)

    def current(self) -> _Current:
        """Makes this device current inside the block."""
        return _Current(self._runtime, self.device_id)

    between_captures = staticmethod(between_captures)

    def memory_info(self) -> tuple[int, int]:
        with self.current():
            free, total = self._runtime.memGetInfo()
        return int(free), int(total)

    def copy(self, moves: Moves, stream: Hashable) -> None:
        with self.current():
            self._copy(moves, self._object_of(stream), apart=True)

    def move_slots(
        self, grid: Grid, addresses: array[int], walls: array[int], stream: Hashable
    ) -> SlotMoves | None:
        with self.current():
            try:
                return self._move_slots(grid, addresses, walls, self._object_of(stream))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                return None  # no memory for the table of moves: the host plans

    def array(self, address: int, shape: tuple[int, ...], dtype: Any, owner: object) -> Any:
        cuda, dtype = self._cupy.cuda, np.dtype(dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = cuda.UnownedMemory(address, num_bytes, owner, self.device_id)
        return self._cupy.ndarray(shape, dtype, cuda.MemoryPointer(memory, 0))

    # Streams ----------------------------------------------------------------------------------

    def current_stream(self) -> Hashable:
        stream = self._get_current_stream(self.device_id)
        try:
            return getattr(stream, self._name)  # type: ignore[no-any-return]
        except AttributeError:
            return self.stream_key(stream)

    def stream_key(self, stream: Any) -> Hashable:
        handle = _handle_of(stream)
        if handle in _LEGACY_HANDLES:
            key: Hashable = LEGACY_KEY
            self._streams.setdefault(key, _Stream(0, None, False))
        elif handle == _PER_THREAD_HANDLE and hasattr(self._of_thread, "key"):
            return self._of_thread.key  # type: ignore[no-any-return]
        elif self._runtime.streamIsCapturing(handle):
            return self._key_in_capture(handle, stream)
        elif handle == _PER_THREAD_HANDLE:
            return self._key_of_thread()
        else:
            key = self._stream_id(handle)
            if key not in self._streams:
                self._forget_dropped()
                self._streams[key] = _Stream(handle, self._owner(stream), False)
        if isinstance(stream, self._stream_module._BaseStream):
            setattr(stream, self._name, key)
        return key

    def _stream_id(self, handle: int) -> int:
        with self.current():
            return int(call("cuStreamGetId", handle))

    def _key_of_thread(self) -> Hashable:
        key = self._of_thread.key = self._stream_id(_PER_THREAD_HANDLE)
        self._streams[key] = _Stream(_PER_THREAD_HANDLE, None, True)
        return key

    def _key_in_capture(self, handle: int, stream: Any) -> Hashable:
        """The key of a stream first seen during its capture, when the driver does not return its
        id. After the capture the stream gets another key, and the pool treats the two keys as
        different streams."""
        key = (self._captures.capture_of(handle), handle)
        if handle == _PER_THREAD_HANDLE:
            self._of_thread.key_in_capture = key
            self._streams[key] = _Stream(handle, None, True)
        elif key not in self._streams:
            self._forget_dropped()
            self._streams[key] = _Stream(handle, self._owner(stream), False)
        return key

    def _owner(self, stream: Any) -> Any | None:
        """The stream object, if its finalizer destroys the stream; else None."""
        own = isinstance(stream, self._stream_module.Stream)
        return stream if own and stream._foreign_stream_ref is None else None

    def _forget_dropped(self) -> None:
        """Drops streams that only `_streams` refers to, which destroys them. Called whenever a new
        stream appears."""
        owned = [entry for entry in list(self._streams.items()) if entry[1].owner is not None]
        keys = Counter(id(stream.owner) for _, stream in owned)
        dropped = [
            key
            for key, stream in owned
            if getrefcount(stream.owner) == _REFERENCES_OF_DROPPED + keys[id(stream.owner)] - 1
        ]
        for key in dropped:
            self._streams.pop(key, None)

    def _call_on(self, key: Hashable, call: Callable[[int], Any]) -> Any:
        """`call(handle)` for a stream, or _GONE if it is destroyed or belongs to another thread."""
        stream = self._streams.get(key)  # this reference keeps it alive if it is dropped meanwhile
        if stream is None:
            return _GONE
        # Thread ids are recycled, so threads are told apart by their thread-local storage.
        if stream.of_thread and key not in vars(self._of_thread).values():
            return _GONE
        return call(stream.handle)

    def _object_of(self, key: Hashable) -> Any:
        """The stream as a CuPy stream object."""
        stream = self._streams.get(key)
        if stream is not None and stream.owner is not None:
            return stream.owner
        handle = self._call_on(key, int)
        if handle is _GONE:
            raise ConfigError(f"stream {key} no longer exists")
        if handle == 0:
            return self._stream_module.Stream.null
        return self._stream_module.Stream.from_external(_Foreign(handle))

    def records_late(self, stream: Hashable) -> bool:
        known = self._streams.get(stream)
        return stream == LEGACY_KEY or (known is not None and known.owner is not None)

    # Events -----------------------------------------------------------------------------------

    def record(self, stream: Hashable) -> Any:
        spare, runtime = self._spare_events, self._runtime
        with self.current():
            event = spare.pop() if spare else runtime.eventCreateWithFlags(_NO_TIMING)
            try:
                found = self._call_on(stream, lambda handle: runtime.eventRecord(event, handle))
            except BaseException:
                spare.append(event)
                raise
        if found is not _GONE:
            return event
        spare.append(event)
        # Only a synchronisation of the device covers the work of a destroyed stream.
        return _DONE if self._idle() else _LATER

    def is_done(self, event: Any) -> bool:
        if event is _DONE:
            return True
        if event is _LATER:
            return self._idle()
        with self.between_captures():
            return bool(self._runtime.eventQuery(event) == 0)

    def wait(self, stream: Hashable, event: Any) -> None:
        if event is _DONE:
            return
        if event is not _LATER:
            runtime = self._runtime
            with self.current():
                found = self._call_on(stream, lambda handle: runtime.streamWaitEvent(handle, event))
            if found is not _GONE:
                return
        self.synchronize(event)

    def synchronize(self, event: Any) -> None:
        if event is _LATER:
            self.synchronize_device()
        elif event is not _DONE:
            self._runtime.eventSynchronize(event)

    def discard(self, event: Any) -> None:
        if event is not _DONE and event is not _LATER:
            self._spare_events.append(event)

    def _idle(self) -> bool:
        """Synchronises the device unless a capture forbids that; returns whether it did."""
        if self.capturing():
            return False
        self.synchronize_device()
        return True

    def synchronize_device(self) -> None:
        with self.current():
            self._runtime.deviceSynchronize()

    # Captures ---------------------------------------------------------------------------------

    def capture_id(self, stream: Hashable) -> int | None:
        if stream == LEGACY_KEY:  # cannot be captured
            return None
        known = self._streams.get(stream)
        if known is None:
            return None
        if known.owner is None and stream != self.current_stream():
            return None  # may be destroyed; checked by the thread whose current stream it is
        try:
            capturing = self._call_on(stream, self._runtime.streamIsCapturing)
        except RuntimeError:  # the capture was invalidated, but not ended yet
            if stream == self.current_stream():
                raise
            return BROKEN_CAPTURE
        if capturing is _GONE or not capturing:
            return None
        return self._captures.capture_of(known.handle)

    def capturing(self) -> bool:
        return any(self.capture_id(key) is not None for key in list(self._streams))

    def ended_captures(self) -> list[int]:
        """Captures whose graphs, and all executable graphs made from them, are destroyed."""
        return self._captures.ended()


class _Current:
    """`with device.current():`, around most driver calls. A generator-based context manager takes
    twice as long to enter."""

    __slots__ = ("_before", "_device_id", "_runtime")

    def __init__(self, runtime: Any, device_id: int) -> None:
        self._runtime, self._device_id = runtime, device_id

    def __enter__(self) -> None:
        self._before = self._runtime.getDevice()
        if self._before != self._device_id:
            self._runtime.setDevice(self._device_id)

    def __exit__(self, *_: object) -> None:
        if self._before != self._device_id:
            self._runtime.setDevice(self._before)


class _Foreign:
    """A stream that CuPy does not own, in the form that Stream.from_external accepts."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _handle_of(stream: Any) -> int:
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "ptr"):
        return int(stream.ptr)
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    raise ConfigError(f"expected a CUDA stream or its handle, got {type(stream).__name__}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of CuPy's runtime or driver modules means that the device lacks memory."""
    return getattr(error, "status", None) == _OUT_OF_MEMORY


# After a fork -------------------------------------------------------------------------------------

_devices: weakref.WeakSet[CudaDevice] = weakref.WeakSet()


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedDeviceError(
        "this process was forked from one that uses the GPU, and CUDA cannot be used after fork: "
        "start it with multiprocessing's 'spawn' method, or use the GPU in the child only"
    )


class _Refusal:
    """Replaces a driver after a fork: every call raises."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        return _refuse


def _after_fork() -> None:
    for device in _devices:
        device._runtime = _Refusal()
        device._get_current_stream = _refuse
        device.__dict__.update(_driver=_Refusal())


os.register_at_fork(after_in_child=_after_fork)
