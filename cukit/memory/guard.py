"""Guarded memory: every allocation has its own pages, with unmapped addresses around them.

A slot is a run of pages in the middle of reserved addresses. An allocation is placed at the very
end or the very start of its slot, so that an access past its end, or before its start, leaves the
mapped pages and faults. The rest of the slot holds a pattern; a check finds changes to it. The
allocation itself holds the pattern until it is written.

Slots are filled before they are allocated and checked while the device is idle, so an allocation
enqueues no work on the program's streams, captured or not.
"""

from __future__ import annotations

import gc
import random
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cukit.memory.bookkeeping.blocks import Frame
from cukit.memory.bookkeeping.streams import CaptureKey
from cukit.memory.pool.listeners import call_site
from cukit.memory.providers.cuda_driver import VirtualMemoryDriver
from cukit.memory.providers.provider import DeviceOutOfMemory

ALIGNMENT = 16
"""Alignment of allocations at the end of a slot: what cukit's ops require of an array. CuPy's own
pool aligns to 512 bytes, so an access up to 511 bytes past an array would not fault."""

GAP_PAGES = 16
"""Unmapped pages on either side of a slot."""

LARGEST_RECYCLED = 32
"""Pages. Slots up to this size have a power of two of pages and are reused; larger slots have the
fewest pages that hold the allocation, and are released after use."""

MAX_READY_BYTES = MAX_UNCHECKED_BYTES = 4 << 30
"""Maximum bytes in slots ready for reuse, and in freed slots not checked yet; but at most 1/8 and
1/32 of the GPU's memory."""

WORDS = (
    0xFFFFFFFF,  # NaN in every format of 8 bits or more, -1
    0x7FFF7FFF,  # NaN in every format of 16 bits or more, a huge index
    0x7F7F7F7F,  # NaN in float8 and float16, 3.4e38 in bfloat16 and float32
    0x7BFF7BFF,  # the largest finite float16
    0x7F817F81,  # signalling NaN in bfloat16 and float32
    0xFFC1FFC1,  # negative quiet NaN in bfloat16 and float32
    0x80808080,  # close to -0.0, a large negative index
)
"""Fill patterns of one repeated word. A pattern `n << 32` stands for hashes with seed n."""

LATEST = 48
"""Maximum number of allocations listed after a fault."""

CALLS = 8
"""Stack frames recorded per allocation."""


class Allocation(NamedTuple):
    """An allocation as requested."""

    address: int
    size: int
    label: str
    """GuardedMemory.label at the time of the allocation."""
    call_site: tuple[Frame, ...]

    def __str__(self) -> str:
        where = [f"{frame.filename}:{frame.line} in {frame.name}" for frame in self.call_site]
        by = f" by {self.label}" if self.label else ""
        return "\n    ".join([f"{self.size:,} bytes at {self.address:#x}, allocated{by}", *where])


class Damage(NamedTuple):
    """Changed bytes around an allocation."""

    allocation: Allocation
    num_bytes: int
    first: int
    """The lowest changed byte, relative to the allocation's start; negative before it."""
    last: int

    def __str__(self) -> str:
        size = self.allocation.size
        places = [
            f"{-place} bytes before its start"
            if place < 0
            else f"{place - size} bytes past its end"
            for place in (self.first, self.last)
        ]
        return f"{self.num_bytes} byte(s) changed, from {' to '.join(places)}: {self.allocation}"


class GuardDevice(Protocol):
    """The device operations of guarded memory, apart from addresses and pages."""

    total_bytes: int

    def capture(self) -> CaptureKey | None:
        """The graph capture that the current stream takes part in, and the stream."""

    def ended_captures(self) -> list[int]:
        """Captures whose graphs are destroyed; each is returned once."""

    def between_captures(self) -> AbstractContextManager[None]:
        """Inside the block, calls that a capture forbids are allowed."""

    def synchronize(self) -> None:
        """Waits for all streams."""

    def fill(self, address: int, size: int, word: int) -> None:
        """Fills unused memory. Complete on return; uses no stream that may be captured."""

    def guard_pages(self, pages: npt.NDArray[np.int64], page_bytes: int) -> npt.NDArray[np.int32]:
        """Like cukit.reference.memory.guard_pages, on memory that is not in use."""


@dataclass(eq=False)
class Slot:
    """Pages around one allocation."""

    address: int
    size: int
    handle: Any
    pattern: int
    allocation: Allocation
    begin: int = 0
    """[begin, end): the bytes of all allocations since the slot was filled."""
    end: int = 0
    capture: CaptureKey | None = None
    """The capture whose graph keeps the slot, freed or not, because its launches write to it."""


_UNUSED = Allocation(0, 0, "nothing", ())


class GuardedMemory:
    """Allocates so that out-of-bounds accesses fault or are found by `check`.

    Args:
        driver: addresses and pages.
        device: fills and checks.
        seed: for the random choice of fill patterns, and of the end of the slot where each
            allocation is placed.

    Thread-safe. `free` may be called in a finalizer: it only appends to a queue.
    """

    def __init__(self, driver: VirtualMemoryDriver, device: GuardDevice, seed: int) -> None:
        self.label = ""
        """Recorded with each allocation: the origin of the allocations."""
        self._driver = driver
        self._device = device
        self._random = random.Random(seed)
        self._page_bytes = driver.granularity()
        self._max_ready_bytes = min(MAX_READY_BYTES, device.total_bytes // 8)
        self._max_unchecked_bytes = min(MAX_UNCHECKED_BYTES, device.total_bytes // 32)
        self._lock = threading.Lock()
        self._freed: deque[Slot] = deque()
        self._live: dict[Slot, None] = {}
        self._unchecked: list[Slot] = []
        """Freed slots, to be checked and refilled."""
        self._ready: defaultdict[int, list[Slot]] = defaultdict(list)
        """Filled slots by size."""
        self._kept: defaultdict[tuple[CaptureKey, int], list[Slot]] = defaultdict(list)
        """Freed slots that a graph still uses, by capture and size. Reused only in the same capture
        on the same stream, which orders the accesses."""
        self._damage: list[Damage] = []
        self.latest: deque[Allocation] = deque(maxlen=LATEST)
        """The last LATEST allocations since the last check, freed or not: candidates after a
        fault."""
        self.free = self._freed.append

    def allocate(self, size: int) -> Slot:
        """Allocates at least one byte. Raises DeviceOutOfMemory."""
        site = call_site(CALLS)
        capture = self._device.capture()
        with self._lock:
            self._retire()
            slot = self._find(self._slot_bytes(size), capture)
            offset = 0
            if self._random.random() < 0.5:
                offset = slot.size - -(-size // ALIGNMENT) * ALIGNMENT
            address = slot.address + offset
            slot.begin = min(slot.begin or address, address)
            slot.end = max(slot.end, address + size)
            slot.allocation = Allocation(address, size, self.label, site)
            self._live[slot] = None
            self.latest.append(slot.allocation)
        return slot

    def check(self) -> list[Damage]:
        """Synchronises the device and returns the damage since the last call.

        Checks the slots of all live allocations and of those freed since the last call.
        """
        with self._lock:
            self._check_and_refill()
            found, self._damage = self._damage, []
            self.latest.clear()
        return found

    def trim(self) -> None:
        """Synchronises the device and releases all unused slots to it."""
        with self._lock:
            self._trim()

    def _trim(self) -> None:
        self._check_and_refill()
        self._destroy(self._ready_slots())
        self._ready.clear()

    # Slots ------------------------------------------------------------------------------------

    def _slot_bytes(self, size: int) -> int:
        pages = -(-size // self._page_bytes)
        if pages <= LARGEST_RECYCLED:
            pages = 1 << (pages - 1).bit_length()
        return pages * self._page_bytes

    def _find(self, size: int, capture: CaptureKey | None) -> Slot:
        """An unused slot."""
        if capture is not None and self._kept[capture, size]:
            return self._kept[capture, size].pop()
        if (
            capture is None
            and not self._ready[size]
            and _bytes(self._unchecked) > self._max_unchecked_bytes
        ):
            self._check_and_refill()
        slot = self._ready[size].pop() if self._ready[size] else self._grow(size, capture)
        slot.begin = slot.end = 0
        slot.capture = capture
        return slot

    def _grow(self, size: int, capture: CaptureKey | None) -> Slot:
        try:
            return self._create(size)
        except DeviceOutOfMemory:
            if capture is not None:  # `_trim` synchronises, which a capture forbids
                raise
        gc.collect()
        self._trim()
        return self._create(size)

    def _create(self, size: int) -> Slot:
        driver, gap = self._driver, GAP_PAGES * self._page_bytes
        word = self._random.choice(WORDS)
        with self._device.between_captures(), ExitStack() as undo:
            handle = driver.create(size)
            undo.callback(driver.release, handle)
            start = driver.reserve(size + 2 * gap, self._page_bytes)
            undo.callback(driver.free_addresses, start, size + 2 * gap)
            driver.map(start + gap, size, handle)
            undo.callback(driver.unmap, start + gap, size)
            driver.set_access(start + gap, size)
            self._device.fill(start + gap, size, word)
            undo.pop_all()
        return Slot(start + gap, size, handle, word, _UNUSED)

    def _destroy(self, slots: Sequence[Slot]) -> None:
        gap = GAP_PAGES * self._page_bytes
        for slot in slots:
            self._driver.unmap(slot.address, slot.size)
            self._driver.release(slot.handle)
            self._driver.free_addresses(slot.address - gap, slot.size + 2 * gap)

    def _ready_slots(self) -> list[Slot]:
        return [slot for slots in self._ready.values() for slot in slots]

    def _retire(self) -> None:
        """Processes the queue of `free`."""
        while self._freed:
            slot = self._freed.popleft()
            del self._live[slot]
            if slot.capture is None:
                self._unchecked.append(slot)
            else:
                self._kept[slot.capture, slot.size].append(slot)

    # Checks -----------------------------------------------------------------------------------

    def _check_and_refill(self) -> None:
        """Checks all slots, and refills freed ones for reuse."""
        self._device.synchronize()
        self._retire()
        self._release_captures()
        freed, self._unchecked = self._unchecked, []
        room = self._max_ready_bytes - _bytes(self._ready_slots())
        again, surplus = [], []
        for slot in freed:
            if slot.size <= min(room, LARGEST_RECYCLED * self._page_bytes):
                room -= slot.size
                again.append(slot)
            else:
                surplus.append(slot)
        used = [*self._live, *surplus, *(slot for kept in self._kept.values() for slot in kept)]
        patterns = [self._pattern() for _ in again]
        slots = [*again, *used]
        if slots:
            self._check_slots(slots, [*patterns, *(0 for _ in used)])
        for slot, pattern in zip(again, patterns, strict=True):
            slot.pattern = pattern
            self._ready[slot.size].append(slot)
        self._destroy(surplus)

    def _release_captures(self) -> None:
        ended = set(self._device.ended_captures())
        for key in [key for key in self._kept if key[0].capture in ended]:
            self._unchecked += self._kept.pop(key)
        for slot in self._live:
            if slot.capture is not None and slot.capture.capture in ended:
                slot.capture = None

    def _pattern(self) -> int:
        choice = self._random.randrange(len(WORDS) + 3)
        return WORDS[choice] if choice < len(WORDS) else self._random.randrange(1, 1 << 31) << 32

    def _check_slots(self, slots: Sequence[Slot], patterns: Sequence[int]) -> None:
        """patterns: what to refill each slot with; 0: leave it unchanged."""
        rows = [
            (slot.address, slot.begin, slot.end, slot.pattern, pattern)
            for slot, pattern in zip(slots, patterns, strict=True)
        ]
        counts = [slot.size // self._page_bytes for slot in slots]
        pages = np.repeat(np.array(rows, np.int64), counts, axis=0)
        firsts = np.cumsum([0, *counts])
        in_slot = np.arange(firsts[-1]) - np.repeat(firsts[:-1], counts)
        pages[:, 0] += in_slot * self._page_bytes
        damage = self._device.guard_pages(pages, self._page_bytes)
        for slot, start, end in zip(slots, firsts, firsts[1:], strict=False):
            if damage[start:end, 0].any():
                found = self._damage_of(slot, damage[start:end])
                self._damage.append(found)
                # The slot may stay in use; do not report these bytes again.
                slot.begin = min(slot.begin, found.allocation.address + found.first)
                slot.end = max(slot.end, found.allocation.address + found.last + 1)

    def _damage_of(self, slot: Slot, pages: npt.NDArray[np.int32]) -> Damage:
        bad = np.flatnonzero(pages[:, 0])
        start = slot.address - slot.allocation.address
        first = start + int(bad[0] + 1) * self._page_bytes - int(pages[bad[0], 1])
        last = start + int(bad[-1]) * self._page_bytes + int(pages[bad[-1], 2]) - 1
        return Damage(slot.allocation, int(pages[:, 0].sum()), first, last)


def _bytes(slots: Sequence[Slot]) -> int:
    return sum(slot.size for slot in slots)
