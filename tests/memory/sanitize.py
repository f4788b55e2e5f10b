"""Groups for `tests.sanitize`: the copies and plans of a pool, and guard pages."""

from __future__ import annotations

import numpy as np

from cukit.memory import batched_copy
from cukit.memory.batched_copy import TILE_BYTES
from cukit.memory.cuda_guard import CHUNK_BYTES, plan_guard_pages
from tests.contract import to_device
from tests.memory.test_batched_copy import SLIDES, bytes_of
from tests.memory.test_slots import check_kernel, make_rows, move_bytes
from tests.sanitize import Group


def copies() -> None:
    """Copies between two halves of the memory, slides over several gaps, a slide of 20 tiles."""
    rng = np.random.default_rng(3)
    size = 1 << 18
    apart = [(size + 4112 * i, 4096 * i, 16 * (i % 200)) for i in range(60)]
    batched_copy(*to_device("gpu", bytes_of(rng, 2 * size)), apart)
    for length, gap in [*SLIDES, (20 * TILE_BYTES, 16)]:
        count = max(1, min(12, 300_000 // length))
        moves = [(i * length, i * (length + gap) + gap, length) for i in range(count)]
        batched_copy(*to_device("gpu", bytes_of(rng, count * (length + gap))), moves)


def guard() -> None:
    """Fills pages, then checks them with a few changed bytes."""
    import cupy

    from cukit.core.kernel import load_kernel

    kernel = load_kernel(plan_guard_pages(2 * CHUNK_BYTES))
    memory = cupy.empty(3 * 2 * CHUNK_BYTES, cupy.uint8)
    pages = np.zeros((3, 5), np.int64)
    pages[:, 0] = np.arange(3) * 2 * CHUNK_BYTES
    for before, after in ((0, 7 << 32), (7 << 32, 0xFFFFFFFF), (0xFFFFFFFF, 0)):
        pages[:, 1:] = 1000, 2005, before, after
        damage = cupy.zeros((3, 3), cupy.int32)
        kernel((3, 2), (memory, cupy.asarray(pages), damage))
        memory[1001:2000] = 1
        memory[-3] = 5


def plans() -> None:
    """Plans with and without walls; copies with fewer and with more thread blocks than tiles."""
    rng = np.random.default_rng(4)
    for per_page, walls in ((1, 0), (16, 5), (256, 3)):
        check_kernel("gpu", *make_rows(rng, 20 * per_page, per_page, 0.4, walls))
    for blocks in (7, 1000):
        move_bytes("gpu", rng, blocks)


GROUPS = {
    "plan_slots": Group(plans, shares=True),
    "batched_copy": Group(copies, shares=True, quick=True),
    "guard_pages": Group(guard),
}
