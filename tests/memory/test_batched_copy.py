"""batched_copy: scattered blocks, overlapping slides, and invalid overlaps."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.core.arrays import ACCESS_BYTES
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError
from cukit.memory import batched_copy
from cukit.memory.batched_copy import TILE_BYTES
from tests.contract import to_device, to_host

# (size, gap) in bytes of sliding blocks: one access, one tile, three tiles and a tail, part of a
# tile; gaps of one access, of two, and of almost a block.
SLIDES = [(16, 16), (TILE_BYTES, 16), (3 * TILE_BYTES + 48, 32), (4096, 4096 - 16)]


def expected(memory, moves):
    """The expected result; reads from a copy, so the order of moves does not matter."""
    before, after = memory.copy(), memory.copy()
    for destination, source, size in moves:
        after[destination : destination + size] = before[source : source + size]
    return after


def check(device, memory, moves):
    wanted = expected(memory, moves)
    (placed,) = to_device(device, memory.copy())
    result = batched_copy(placed, moves)
    assert result is placed
    np.testing.assert_array_equal(to_host(result), wanted)


def bytes_of(rng, size):
    return rng.integers(0, 256, size).astype(np.uint8)


def test_scattered_blocks(device, rng):
    """Blocks of one access to four tiles, most of them shorter than a tile, in random order, from
    one half of the memory to the other."""
    accesses = TILE_BYTES // ACCESS_BYTES
    sizes = ACCESS_BYTES * np.concatenate(
        [rng.integers(1, 400, 54), rng.integers(accesses + 1, 4 * accesses, 6)]
    )
    starts = np.concatenate([[0], np.cumsum(sizes)])
    half = int(starts[-1])
    order = rng.permutation(len(sizes))
    at, moves = half, []
    for i in order:
        moves.append((at, int(starts[i]), int(sizes[i])))
        at += int(sizes[i])
    check(device, bytes_of(rng, 2 * half), [moves[i] for i in rng.permutation(len(moves))])


@pytest.mark.parametrize(("size", "gap"), SLIDES)
def test_slides(device, rng, size, gap):
    count = max(3, min(40, 200_000 // size))
    moves = [(i * size, i * (size + gap) + gap, size) for i in range(count)]
    check(device, bytes_of(rng, count * (size + gap) + gap), moves)


def test_one_long_slide(device, rng):
    """200 tiles on a GPU, else 12; each overwrites bytes that the previous tile reads."""
    size = 200 * TILE_BYTES if device == "gpu" else 12 * TILE_BYTES
    check(device, bytes_of(rng, size + 16), [(0, 16, size)])


def test_nothing_to_move(device, rng):
    check(device, bytes_of(rng, 64), [])
    check(device, bytes_of(rng, 64), [(16, 16, 32), (0, 32, 0)])


@pytest.mark.gpu
def test_twenty_slides_give_the_same_bytes(rng):
    memory = bytes_of(rng, 1 << 24)
    moves = [(i * 8176, i * 8192 + 16, 8176) for i in range((1 << 24) // 8192 - 1)]
    wanted = expected(memory, moves)
    for _ in range(20):
        (placed,) = to_device("gpu", memory)
        np.testing.assert_array_equal(to_host(batched_copy(placed, moves)), wanted)


@pytest.mark.parametrize(
    ("moves", "error", "message"),
    [
        ([(0, 96, 64)], ArrayShapeError, "outside memory of 128 bytes"),
        ([(-16, 0, 16)], ArrayShapeError, "outside memory"),
        ([(0, 2**63 - 16, 32)], ArrayShapeError, "outside memory"),
        ([(2**63 - 16, 0, 32)], ArrayShapeError, "outside memory"),
        ([(0, 0, 2**63 - 1)], ArrayShapeError, "outside memory"),
        ([(0, 32, -16)], ArrayShapeError, "negative size"),
        ([(0, 32, 32), (16, 64, 32)], ArrayLayoutError, "overlapping destinations"),
        ([(32, 16, 64)], ArrayLayoutError, "slide down"),
    ],
)
def test_invalid_moves(moves, error, message):
    with pytest.raises(error, match=message):
        batched_copy(np.zeros(128, np.uint8), moves)


def test_memory_is_bytes():
    with pytest.raises(ArrayDtypeError, match="memory"):
        batched_copy(np.zeros(4, np.float32), [])


@pytest.mark.emulator
def test_kernels_move_sixteen_bytes_at_a_time():
    import cukit

    with cukit.backend("emulator"), pytest.raises(ArrayLayoutError, match="multiples of 16"):
        batched_copy(np.zeros(128, np.uint8), [(0, 40, 8)])
