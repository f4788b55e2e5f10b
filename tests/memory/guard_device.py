"""A fake device for guarded memory, in host memory."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from cukit.memory import DeviceOutOfMemory
from cukit.memory.bookkeeping.streams import CaptureKey
from cukit.memory.guard import GAP_PAGES, Slot
from cukit.reference import memory as reference

PAGE = 1 << 14
GAP = GAP_PAGES * PAGE
MAX_PAGES = 256


class Driver:
    """Reserves host addresses; mappings are only recorded."""

    def __init__(self) -> None:
        self.reserved: dict[int, Any] = {}
        self.mapped: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.refused = ""
        self.made = 0

    def granularity(self) -> int:
        return PAGE

    def _called(self, name: str) -> None:
        if name == self.refused:
            raise RuntimeError(name)

    def reserve(self, size: int, alignment: int) -> int:
        self._called("reserve")
        memory = mmap.mmap(-1, size + alignment)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        address = -(-start // alignment) * alignment
        self.reserved[address] = memory
        return address

    def free_addresses(self, address: int, size: int) -> None:
        del self.reserved[address]

    def create(self, size: int) -> int:
        if sum(self.handles.values()) + size > MAX_PAGES * PAGE:
            raise DeviceOutOfMemory("full")
        self.made += 1
        self.handles[self.made] = size
        return self.made

    def release(self, handle: int) -> None:
        del self.handles[handle]

    def map(self, address: int, size: int, handle: int) -> None:
        self._called("map")
        assert self.handles[handle] == size
        self.mapped[address] = size

    def set_access(self, address: int, size: int) -> None:
        self._called("set_access")

    def unmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address) == size


class Device:
    """Fills memory, and checks guard pages with the reference implementation."""

    total_bytes = MAX_PAGES * PAGE

    def __init__(self) -> None:
        self.capturing: CaptureKey | None = None
        self.gone: list[int] = []
        self.waits = 0
        self.lost = False
        """Whether calls fail as after an illegal memory access."""

    def capture(self) -> CaptureKey | None:
        return self.capturing

    def ended_captures(self) -> list[int]:
        gone, self.gone = self.gone, []
        return gone

    def between_captures(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None:
        assert self.capturing is None, "the host waits during a capture"
        self.waits += 1
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")

    def fill(self, address: int, size: int, word: int) -> None:
        bytes_at(address, size).view(np.uint32)[:] = word

    def guard_pages(self, pages: Any, page_bytes: int) -> Any:
        found = []
        for address, begin, end, before, after in pages.tolist():
            row = np.array([[0, begin - address, end - address, before, after]])
            memory = bytes_at(address, page_bytes)
            found.append(reference.guard_pages(memory, row, page_bytes))
        return np.concatenate(found)


def bytes_at(address: int, size: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def poke(slot: Slot, offset: int, size: int = 1) -> None:
    """Changes bytes at an offset from the allocation's start."""
    bytes_at(slot.allocation.address + offset, size)[:] ^= 0x55
