"""The emulator reports misuse of TMA: proxy fences, mbarriers, boxes outside the tensor."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cukit.core.tensor_map import encode_sequence_map, encode_tensor_map
from cukit.errors import EmulatorError
from tests.emulator.test_planted_groups import KERNELS, TILE_BYTES, A, run

pytestmark = pytest.mark.emulator

SOURCE = "tma.cu"
NUMBERS = re.findall(r"^  X\((\w+)\)", (KERNELS / SOURCE).read_text(), re.MULTILINE)
UNFENCED = r"missing fence.proxy.async: write of 8192 bytes by an async[\s\S]*the write is by"

BUGS = {
    "missing_proxy_fence_before_a_load": UNFENCED,
    "proxy_fence_of_another_thread": UNFENCED,
    "overwritten_before_it_was_read": r"race: write of 8192 bytes by an async[\s\S]*after the read",
    "operand_overwritten_by_a_copy": r"race: write of 8192 bytes by an async[\s\S]*"
    r"after the read by\n  wgmma",
    "missing_mbarrier_fence": r"missing fence_mbarrier_init: TMA uses the mbarrier at shared "
    r"address \d+\n  block .*/tma\.cu:[\s\S]*its initialisation by\n  block .*/tma\.cu:",
}


def swizzled(tile: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A tile as TMA writes it with a swizzle of 128 bytes, in 32-bit words."""
    chunks = tile.view(np.uint32).reshape(64, 8, 4)
    return np.stack([row[np.arange(8) ^ i % 8] for i, row in enumerate(chunks)]).reshape(-1)


def words(count: int) -> np.ndarray[Any, Any]:
    return np.full(count, 0xFFFFFFFF, np.uint32)


def launch(bug: str, planted: int, **options: Any) -> np.ndarray[Any, Any]:
    number = NUMBERS.index(bug)

    def make() -> tuple[Any, ...]:
        return encode_tensor_map(A, (64, 64)), np.int32(number), np.int32(planted), words(2048)

    return run(SOURCE, "planted_tma", make, 128, TILE_BYTES, **options)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("bug", BUGS)
def test_the_bug_is_named(bug, late):
    with pytest.raises(EmulatorError, match=BUGS[bug]) as caught:
        launch(bug, 1, late=late, seed=int(late))
    assert re.search(r"/tma\.cu:\d+", str(caught.value))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("bug", BUGS)
def test_the_correct_version_passes(bug, late):
    for seed in (0, 1):
        got = launch(bug, 0, late=late, seed=seed)
        np.testing.assert_array_equal(got, swizzled(A))


def launch_cluster(bug: int, **options: Any) -> np.ndarray[Any, Any]:
    def make() -> tuple[Any, ...]:
        return encode_tensor_map(A, (64, 64)), np.int32(bug), words(2 * 2048)

    return run(SOURCE, "planted_cluster", make, 128, TILE_BYTES, grid=2, **options)


@pytest.mark.parametrize("late", [False, True])
def test_a_copy_to_two_blocks_waits_for_both(late):
    for seed in (0, 1):
        got = launch_cluster(0, seed=seed, late=late)
        np.testing.assert_array_equal(got, np.tile(swizzled(A), 2))


def test_other_blocks_need_the_mbarrier_fence_too():
    message = (
        r"missing fence_mbarrier_init: another block of the cluster uses the mbarrier at shared "
        r"address \d+\n  block \((0|1), 0, 0\)[\s\S]*its initialisation by\n  block \((?!\1)"
    )
    with pytest.raises(EmulatorError, match=message):
        launch_cluster(1)


def test_a_relaxed_arrival_does_not_order_ordinary_reads():
    with pytest.raises(
        EmulatorError, match=r"race: write of 8192 bytes by an async[\s\S]*after the read"
    ):
        launch_cluster(2)


# Boxes outside the tensor: two consecutive sequences of 12 and 20 rows.

ROWS = np.arange(32 * 16, dtype=np.float32).reshape(32, 1, 16)
LONGEST = 24
BOX = (1, 8, 1, 8)


def read_box(sequences: bool, x: int, z: int, w: int) -> np.ndarray[Any, Any]:
    def make() -> tuple[Any, ...]:
        if sequences:
            box_map = encode_sequence_map(ROWS, LONGEST, BOX, swizzle_bytes=0)
        else:
            box_map = encode_tensor_map(ROWS[None], BOX, swizzle_bytes=0)
        return box_map, np.int32(x), np.int32(z), np.int32(w), np.full((8, 8), np.nan, np.float32)

    return run(SOURCE, "read_box", make, 128, 256)


@pytest.mark.parametrize(("length", "end"), [(12, 12), (20, 32)])
def test_rows_past_the_end_of_a_sequence_are_zero(length, end):
    """The last box is partly past the end of the sequence."""
    for row in range(0, length, 8):
        got = read_box(True, 8, LONGEST - length + row, end)
        expected = np.zeros((8, 8), np.float32)
        there = ROWS[end - length + row : min(end - length + row + 8, end), 0, 8:]
        expected[: len(there)] = there
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("x", "z"), [(16, 0), (-8, 0), (0, LONGEST), (0, 40)])
def test_a_box_wholly_outside_touches_the_base_of_its_map(x, z):
    """The base is in the array for an ordinary map, but not for a map of sequences."""
    outside_rows = 32 if z else 0
    np.testing.assert_array_equal(read_box(False, x, outside_rows, 0), 0)
    message = (
        r"out of bounds: .* wholly outside the tensor touches the map's base address, "
        rf"{24 * 64} bytes before the array of the map[\s\S]*/tma\.cu:\d+[\s\S]*"
        rf"begins at \({x}, 0, {z}, 12\)"
    )
    with pytest.raises(EmulatorError, match=message):
        read_box(True, x, z, 12)


@pytest.mark.parametrize("x", [1, 6, -2])
def test_a_box_must_begin_at_a_multiple_of_16_bytes(x):
    """Hopper raises an illegal-instruction error."""
    message = rf"misaligned: .* begins {4 * x} bytes into the rows of its tensor"
    with pytest.raises(EmulatorError, match=message):
        read_box(False, x, 0, 0)


def test_a_box_before_the_array_is_reported():
    """A sequence of 12 rows at the start of the array, read as if it had 16."""
    with pytest.raises(EmulatorError, match="begins 256 bytes before the array of its map"):
        read_box(True, 0, LONGEST - 16, 12)


RACES = {
    "stores_that_overlap": "race: write of 128 bytes",
    "load_of_what_another_block_stores": "race: (read|write) of 128 bytes",
}


@pytest.mark.parametrize("bug", [0, 1])
@pytest.mark.parametrize("entry", RACES)
def test_races_between_blocks_through_a_tensor_map(entry, bug):
    shared = np.zeros((128, 64), np.float16)

    def make() -> tuple[Any, ...]:
        return (encode_tensor_map(shared, (64, 64)),)

    def launch() -> None:
        run("maps.cu", entry, make, 128, TILE_BYTES, 2, bug, global_races=True)

    if not bug:
        launch()
        return
    with pytest.raises(EmulatorError, match=RACES[entry]) as caught:
        launch()
    assert re.search(r"at byte \d+ of the array of the tensor map in argument 0", str(caught.value))
    assert len(re.findall(r"maps\.cu:\d+", str(caught.value))) == 2
