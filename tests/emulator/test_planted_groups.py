"""The emulator reports cause and line of planted bugs, and nothing for the correct versions.

A file of `planted_groups/` contains several bugs, a file of `planted/` only one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import cukit
from cukit.core.kernel import KernelSpec, load_kernel
from cukit.core.tensor_map import encode_tensor_map
from cukit.errors import EmulatorError

pytestmark = pytest.mark.emulator

KERNELS = Path(__file__).parent / "planted_groups"
SEEDS = (0, 1, 2)

X = np.arange(1, 2049, dtype=np.float32)
REVERSED = X[:256][::-1]
TILE_BYTES = 64 * 128


def run(
    source: str,
    entry: str,
    make: Callable[[], tuple[Any, ...]],
    threads: int,
    shared: int,
    grid: int = 1,
    bug: int | None = None,
    **options: Any,
) -> np.ndarray[Any, Any]:
    """Launches a kernel and returns its last argument."""
    defines = () if bug is None else (("BUG", bug),)
    spec = KernelSpec(str(KERNELS / source), entry, defines, threads, shared)
    with cukit.backend("emulator", **options):
        args = make()
        load_kernel(spec)((grid,), args)
    result: np.ndarray[Any, Any] = args[-1]
    return result


def empty(count: int = 256) -> np.ndarray[Any, Any]:
    return np.full(count, np.nan, np.float32)


def line_of(source: str, text: str) -> int:
    """The number of the only line of a kernel file that contains `text`."""
    lines = (KERNELS / source).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if text in line]
    return number


def x_to_out(elements: int = 256, count: int = 256) -> Callable[[], tuple[Any, ...]]:
    return lambda: (X[:elements].copy(), empty(count))


class Bug(NamedTuple):
    """elements: of x. shared: dynamic shared bytes. message: matches the report. expected: out of
    the correct version."""

    elements: int
    shared: int
    message: str
    expected: np.ndarray[Any, Any]

    def run(self, entry: str, bug: int, **options: Any) -> np.ndarray[Any, Any]:
        count = self.expected.size
        threads = min(256, count)
        make = x_to_out(self.elements, count)
        return run("general.cu", entry, make, threads, self.shared, bug=bug, **options)


PLAIN = {
    "missing_barrier": Bug(256, 0, "uninitialised shared memory: read of 4", REVERSED),
    "missing_second_barrier": Bug(
        512,
        0,
        r"race: (write|read) of 4[\s\S]*nothing orders it after the (read|write) by",
        np.concatenate([REVERSED, X[256:512][::-1]]),
    ),
    "race_between_warps": Bug(
        256, 0, "uninitialised shared memory|race", np.roll(X[:256:32], -1).repeat(32)
    ),
    "outside_dynamic_shared": Bug(
        256, 1024, "out of bounds: write of 4 bytes at byte 1024 of the dynamic", X[:256]
    ),
    "outside_static_shared": Bug(256, 0, r"out of bounds: index 256 of 'float \[256\]'", X[:256]),
    "outside_global": Bug(
        256, 0, r"out of bounds: read of 4.*0 bytes past the end of argument 0", X[:256]
    ),
    "misaligned_vector_load": Bug(
        1028,
        0,
        r"misaligned: .*float4.* needs 16-byte alignment, the address has 4-byte alignment",
        X[:1024:4],
    ),
    "missing_copy_wait": Bug(
        1024, 4096, "asynchronous copy not waited for: read", X[:1024:4][::-1]
    ),
    "wait_for_the_wrong_group": Bug(
        2048, 8192, "asynchronous copy not waited for: read", X[1024:2048:4][::-1]
    ),
    "mismatched_barrier": Bug(
        64,
        0,
        r"mismatched barrier: (32|64) threads are expected here, and (64|32) by",
        X[:64][::-1],
    ),
    "divergent_barrier": Bug(
        256,
        0,
        r"uninitialised|race|deadlock[\s\S]*threads 0-39 wait at __syncthreads",
        REVERSED,
    ),
    "two_barriers_in_a_warp": Bug(
        256, 0, "threads of one warp wait at different __syncthreads", REVERSED
    ),
    "shuffle_of_half_a_warp": Bug(
        256,
        0,
        r"deadlock[\s\S]*threads 0-15.* wait at __shfl_xor_sync, mask 0xffffffff",
        X[:256].reshape(-1, 2)[:, ::-1].reshape(-1),
    ),
    "uninitialised_shared": Bug(
        256,
        0,
        "uninitialised shared memory: read of 4 bytes at byte 28 of the static",
        REVERSED,
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("entry", PLAIN)
def test_a_planted_bug_is_named(entry, seed):
    with pytest.raises(EmulatorError, match=PLAIN[entry].message) as caught:
        PLAIN[entry].run(entry, 1, seed=seed)
    text = str(caught.value)
    assert text.startswith(f"{entry}(BUG=1): ")
    assert re.search(r"thread \(\d+, 0, 0\)|threads [\d, -]+ wait", text), text
    assert re.search(r"general\.cu:\d+", text), text


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("entry", PLAIN)
def test_the_version_without_the_bug_passes(entry, seed, late):
    got = PLAIN[entry].run(entry, 0, seed=seed, late=late)
    np.testing.assert_array_equal(got, PLAIN[entry].expected)


def test_the_line_is_the_one_at_fault():
    line = line_of("general.cu", "out[threadIdx.x] = x[threadIdx.x + BUG];")
    place = rf"block \(0, 0, 0\), thread \(255, 0, 0\) at .*general\.cu:{line}"
    with pytest.raises(EmulatorError, match=place):
        PLAIN["outside_global"].run("outside_global", 1)


def test_a_missing_barrier_shows_as_a_difference_between_seeds_without_checks():
    name = "missing_second_barrier"
    results = [PLAIN[name].run(name, 1, seed=seed, checked=False) for seed in range(6)]
    assert len({result.tobytes() for result in results}) > 1


@pytest.mark.parametrize("entry", ["missing_copy_wait", "wait_for_the_wrong_group"])
def test_a_missing_wait_shows_in_the_late_mode_without_checks(entry):
    at_once = PLAIN[entry].run(entry, 1, checked=False)
    np.testing.assert_array_equal(at_once, PLAIN[entry].expected)
    late = PLAIN[entry].run(entry, 1, checked=False, late=True)
    assert np.isnan(late).any()


@pytest.mark.parametrize("bug", [0, 1])
def test_a_wrong_software_swizzle_gives_wrong_numbers(bug):
    """All accesses are legal; only the result differs from the intended one."""
    tile = np.arange(512, dtype=np.uint16).reshape(16, 32)

    def make() -> tuple[Any, ...]:
        return tile.copy(), np.zeros((4, 32), np.uint32)

    got = run("general.cu", "wrong_software_swizzle", make, 32, 1024, bug=bug)
    blocks = [tile[rows, cols] for cols in (slice(8), slice(8, 16)) for rows in
              (slice(8), slice(8, 16))]  # fmt: skip
    expected = np.stack([block.reshape(-1).view(np.uint32) for block in blocks])
    assert np.array_equal(got, expected) == (not bug)


A = (np.arange(4096) % 7 - 3).reshape(64, 64).astype(np.float16)
TARGET = np.empty((64, 64), np.float16)  # a tensor map holds only its address: keep it alive
PRODUCT = (A.astype(np.float32) @ A.astype(np.float32).T).reshape(-1)


def with_map(count: int = 4096) -> Callable[[], tuple[Any, ...]]:
    return lambda: (encode_tensor_map(A, (64, 64)), empty(count))


def only_map() -> tuple[Any, ...]:
    return (encode_tensor_map(TARGET, (64, 64)),)


HOPPER = {
    "missing_mbarrier_wait": (
        with_map(), "asynchronous copy not waited for: read|uninitialised shared memory: read",
    ),
    "wrong_swizzle": (
        with_map(),
        r"wrong swizzle[\s\S]*with a swizzle of 64 bytes what was written with a swizzle of 128",
    ),
    "operand_reused_too_early": (with_map(), r"race: write[\s\S]*after the read by\n  wgmma"),
    "missing_proxy_fence": (only_map, "missing fence.proxy.async: read"),
    "exit_before_the_store_has_read": (only_map, "exits before its bulk copies have"),
    "mbarrier_never_completes": (
        with_map(), r"deadlock[\s\S]*threads 0-127 wait at the mbarrier at shared address \d+",
    ),
}  # fmt: skip


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("entry", HOPPER)
def test_a_bug_with_hopper_s_units_is_named(entry, late):
    make, message = HOPPER[entry]
    with pytest.raises(EmulatorError, match=message) as caught:
        run("hopper.cu", entry, make, 128, TILE_BYTES, bug=1, late=late)
    assert re.search(r"hopper\.cu:\d+", str(caught.value))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("entry", HOPPER)
def test_the_correct_version_passes(entry, seed, late):
    make, _ = HOPPER[entry]
    got = run("hopper.cu", entry, make, 128, TILE_BYTES, bug=0, seed=seed, late=late)
    if entry in ("missing_mbarrier_wait", "wrong_swizzle", "mbarrier_never_completes"):
        np.testing.assert_array_equal(got, PRODUCT)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_cluster_barrier_is_named(seed):
    def make() -> tuple[Any, ...]:
        return (empty(2),)

    def launch(bug: int) -> np.ndarray[Any, Any]:
        return run("hopper.cu", "missing_cluster_barrier", make, 64, 0, grid=2, bug=bug, seed=seed)

    np.testing.assert_array_equal(launch(0), [1.0, 0.0])
    with pytest.raises(EmulatorError, match=r"uninitialised shared memory|race|has exited"):
        launch(1)
