"""A memory provider over host memory: real pages, remapped with mmap.

A page is part of an anonymous file, mapped by mmap(2) at a fixed address. The pool therefore
behaves on any Linux machine as it does on a GPU: pointers stay valid across a remap, and a wrong
mapping corrupts data. There is one stream, which is always idle.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import weakref
from array import array
from collections.abc import Container, Hashable, Sequence
from typing import Any

import numpy as np

from cukit.core.scalars import check_flag, check_integer
from cukit.errors import ConfigError
from cukit.memory.batched_copy import Moves
from cukit.memory.providers.provider import DeviceOutOfMemory
from cukit.memory.providers.slot_mover import SlotMoves
from cukit.memory.slot_grid import Grid

# From <sys/mman.h> and <linux/falloc.h>; Python's mmap module does not define them.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PUNCH_HOLE_KEEP_SIZE = 0x3
_MAP_FAILED = ctypes.c_void_p(-1).value

_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_NO_ACCESS = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def _mmap(address: int | None, size: int, access: int, flags: int, file: int, offset: int) -> int:
    got = _libc.mmap(address, size, access, flags, file, offset)
    if got == _MAP_FAILED:
        code = ctypes.get_errno()
        if code == errno.ENOMEM:
            raise DeviceOutOfMemory(f"mmap of {size} bytes: {os.strerror(code)}")
        raise OSError(code, f"mmap of {size} bytes: {os.strerror(code)}")
    return int(got)


_providers: weakref.WeakSet[HostProvider] = weakref.WeakSet()


def _after_fork() -> None:
    for provider in list(_providers):
        provider.make_private()


os.register_at_fork(after_in_child=_after_fork)


class HostProvider:
    """Provider over host memory, for tests and for machines without a GPU.

    `total_bytes`: memory of the simulated device (None: the host's).
    `can_remap=False` behaves like cudaMalloc: segments are allocated and freed as a whole.
    """

    uncaptured: Container[Hashable] = (0,)
    plans_slots = False

    def __init__(
        self,
        total_bytes: int | None = None,
        *,
        page_bytes: int = 2 << 20,
        large_pages: int = 1,
        can_remap: bool = True,
    ) -> None:
        system_page = os.sysconf("SC_PAGE_SIZE")
        check_integer("HostProvider", "page_bytes", page_bytes, least=system_page)
        if page_bytes % system_page:
            raise ConfigError(
                f"HostProvider: page_bytes must be a multiple of {system_page}, got {page_bytes}"
            )
        if total_bytes is not None:
            check_integer("HostProvider", "total_bytes", total_bytes, least=0)
        check_integer("HostProvider", "large_pages", large_pages, least=1)
        check_flag("HostProvider", "can_remap", can_remap)
        self.name = "host" if can_remap else "host segments"
        self.device_id = 0
        self.page_bytes = page_bytes
        self.large_pages = large_pages
        self.can_remap = can_remap
        installed = system_page * os.sysconf("SC_PHYS_PAGES")
        self.total_bytes = installed if total_bytes is None else total_bytes
        self.used_bytes = 0
        self._file = os.memfd_create("cukit-pages", os.MFD_CLOEXEC)
        self._file_pages = 0
        self._unused: list[int] = []
        self._unused_large: list[int] = []
        self._large: set[int] = set()
        """File offsets of the large pages."""
        self._reservations: dict[int, tuple[int, int]] = {}
        self._mapped: dict[int, int] = {}
        """File offset of the mapped page by address."""
        _providers.add(self)

    def __del__(self) -> None:
        if not hasattr(self, "_reservations"):  # the constructor raised
            return
        for base, size in self._reservations.values():
            _libc.munmap(base, size)
        os.close(self._file)

    # Memory -----------------------------------------------------------------------------------

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the simulated device."""
        return self.total_bytes - self.used_bytes, self.total_bytes

    def _charge(self, size: int) -> None:
        if self.used_bytes + size > self.total_bytes:
            raise DeviceOutOfMemory(f"{size} bytes: {self.memory_info()[0]} are free")
        self.used_bytes += size

    def reserve(self, size: int) -> int:
        """Reserves addresses, backed by memory if `can_remap` is false."""
        if not self.can_remap:
            self._charge(size)
        access = _NO_ACCESS if self.can_remap else _READ_WRITE
        padded = size + self.page_bytes
        try:
            base = _mmap(None, padded, access, _RESERVED, -1, 0)
        except BaseException:
            if not self.can_remap:
                self.used_bytes -= size
            raise
        address = -(-base // self.page_bytes) * self.page_bytes
        self._reservations[address] = (base, padded)
        return address

    def release(self, address: int, size: int) -> None:
        """Undoes one `reserve`."""
        base, padded = self._reservations.pop(address)
        _libc.munmap(base, padded)
        if not self.can_remap:
            self.used_bytes -= size

    def create_pages(self, count: int) -> list[Any]:
        """Returns pages as offsets into the file."""
        return self._offsets(count, self._unused, 1)

    def create_large_pages(self, count: int) -> list[tuple[Any, ...]]:
        """Returns large pages, each as the offsets of its pages, contiguous in the file."""
        firsts = self._offsets(count, self._unused_large, self.large_pages)
        self._large.update(firsts)
        size = self.large_pages * self.page_bytes
        return [tuple(range(first, first + size, self.page_bytes)) for first in firsts]

    def _offsets(self, count: int, unused: list[int], step: int) -> list[int]:
        """File offsets of `count` times `step` contiguous pages: first from `unused`, then new ones
        at the end of the file."""
        size, end = step * self.page_bytes, self._file_pages * self.page_bytes
        fresh = max(0, count - len(unused))
        self._charge(count * size)
        try:
            os.ftruncate(self._file, end + fresh * size)
        except BaseException:
            self.used_bytes -= count * size
            raise
        self._file_pages += fresh * step
        kept = [unused.pop() for _ in range(count - fresh)]
        return kept + [end + number * size for number in range(fresh)]

    def destroy_pages(self, pages: Sequence[Any]) -> None:
        """Frees pages by punching holes into the file; later pages reuse the offsets."""
        for page in pages:
            _libc.fallocate(self._file, _PUNCH_HOLE_KEEP_SIZE, page, self.page_bytes)
        firsts = self._large.intersection(pages)
        parts = {first + n * self.page_bytes for first in firsts for n in range(self.large_pages)}
        self._large -= firsts
        self._unused_large.extend(firsts)
        self._unused.extend(page for page in pages if page not in parts)
        self.used_bytes -= len(pages) * self.page_bytes

    def map_pages(self, address: int, pages: Sequence[Any]) -> None:
        """Maps pages, with one mmap call per run that is contiguous in the file."""
        start = 0
        for position in range(1, len(pages) + 1):
            step = position - start
            if position < len(pages) and pages[position] == pages[start] + step * self.page_bytes:
                continue
            at, flags = address + start * self.page_bytes, mmap.MAP_SHARED | _MAP_FIXED
            try:
                _mmap(at, step * self.page_bytes, _READ_WRITE, flags, self._file, pages[start])
            except BaseException:
                if start:
                    self._hide(address, start)
                raise
            start = position
        self._mapped.update(zip(self._page_addresses(address, len(pages)), pages, strict=True))

    def unmap_pages(self, address: int, count: int) -> None:
        """Unmaps pages; the addresses stay reserved and inaccessible."""
        self._hide(address, count)
        for page in self._page_addresses(address, count):
            del self._mapped[page]

    def _hide(self, address: int, count: int) -> None:
        size = count * self.page_bytes
        _mmap(address, size, _NO_ACCESS, _RESERVED | _MAP_FIXED, -1, 0)

    def _page_addresses(self, address: int, count: int) -> range:
        return range(address, address + count * self.page_bytes, self.page_bytes)

    def make_private(self) -> None:
        """Remaps the pages copy-on-write in a forked child, to keep its writes from the parent."""
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        for address, offset in self._mapped.items():
            _mmap(address, self.page_bytes, _READ_WRITE, flags, self._file, offset)

    def copy(self, moves: Moves, stream: Hashable) -> None:
        """Copies immediately."""
        for destination, source, size in moves.tolist():
            ctypes.memmove(destination, source, size)

    def move_slots(
        self, grid: Grid, addresses: array[int], walls: array[int], stream: Hashable
    ) -> SlotMoves | None:
        """Never called: for host memory, the plan is computed on the host."""
        return None

    def array(self, address: int, shape: tuple[int, ...], dtype: Any, owner: object) -> Any:
        """A NumPy array over the memory."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        return np.asarray(_Memory(address, size, owner)).view(kind).reshape(shape)

    # Streams: one, always idle -----------------------------------------------------------------

    def current_stream(self) -> Hashable:
        """The one stream."""
        return 0

    def stream_key(self, stream: Any) -> Hashable:
        """Streams are integers."""
        check_integer("memory pool", "stream", stream)
        return int(stream)

    def records_late(self, stream: Hashable) -> bool:
        """Always true."""
        return True

    def record(self, stream: Hashable) -> Any:
        """The event is already complete."""
        return None

    def is_done(self, event: Any) -> bool:
        """Always true."""
        return True

    def wait(self, stream: Hashable, event: Any) -> None:
        """Does nothing."""

    def synchronize(self, event: Any) -> None:
        """Does nothing."""

    def discard(self, event: Any) -> None:
        """Does nothing."""

    def synchronize_device(self) -> None:
        """Does nothing."""

    def capture_id(self, stream: Hashable) -> int | None:
        """Always None: there are no graph captures."""
        return None

    def capturing(self) -> bool:
        """Always false."""
        return False

    def ended_captures(self) -> Sequence[int]:
        """Always empty."""
        return ()


class _Memory:
    """Exposes memory to NumPy, and keeps the owner alive as long as an array uses the memory."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
        }
