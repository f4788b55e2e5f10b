"""The emulator reports misuse of wgmma: registers, groups, fences and warpgroups."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cukit.errors import EmulatorError
from tests.emulator.test_planted_groups import KERNELS, PRODUCT, A, empty, run

pytestmark = pytest.mark.emulator

SOURCE = "wgmma.cu"
THREADS = 256
IN_FLIGHT = r"wgmma not waited for: {} in flight\n  block .*/wgmma\.cu:[\s\S]*was issued at"
LATER = r"[\s\S]*{} groups have been committed after its own: call wgmma_wait<{}> or less"
UNFENCED = r"missing wgmma_fence: {}[\s\S]*the last one was executed at"
MISSING = r"missing threads: {} is an instruction of a whole warpgroup .*, here threads {}"

BUGS = {
    "accumulators_read_in_flight": IN_FLIGHT.format("read of 4 bytes of accumulator 0")
    + LATER.format(0, 0),
    "accumulators_changed_in_flight": IN_FLIGHT.format("write of 4 bytes of accumulator 0"),
    "operand_a_changed_in_flight": IN_FLIGHT.format("write of 16 bytes of operand a"),
    "operand_a_read_in_flight": IN_FLIGHT.format("write of 4 bytes of operand a"),
    "missing_commit": IN_FLIGHT.format("read of 4 bytes of accumulator 0")
    + "[\\s\\S]*no wgmma_commit has followed it",
    "commit_too_early": IN_FLIGHT.format("read of 4 bytes of accumulator 0")
    + "[\\s\\S]*no wgmma_commit has followed it",
    "lax_wait": IN_FLIGHT.format("read of 4 bytes of accumulator 0") + LATER.format(0, 0),
    "lax_wait_for_an_operand": r"race: write of 4[\s\S]*after the read by\n  wgmma",
    "missing_barrier_after_the_wait": r"race: write of 4[\s\S]*after the read by\n  wgmma",
    "exit_in_flight": "wgmma not waited for: a thread exits while" + r"[\s\S]*" + "was issued at",
    "missing_first_fence": "missing wgmma_fence: call it before a warpgroup's first wgmma",
    "missing_fence_after_the_accumulators": UNFENCED.format("accumulator 0 was accessed"),
    "missing_fence_after_a_read": UNFENCED.format("accumulator 0 was accessed"),
    "missing_fence_after_operand_a": UNFENCED.format("register 0 of operand a was accessed"),
    "missing_fence_between_shapes": UNFENCED.format(
        "a wgmma of m64n64k16 uses accumulators of one of m64n32k16"
    ),
    "accumulators_as_operand_a": "wgmma not waited for: register 0 of operand a of a new wgmma "
    "is an accumulator of one in flight",
    "half_a_warpgroup": MISSING.format(
        "wgmma.mma_async", r"128-255 .* and threads 192-255 do not reach it"
    )
    + r"[\s\S]*threads 0-127, 192-255 have exited",
    "half_a_warpgroup_waits": r"divergent warpgroup: a thread reaches wgmma\.\w+ while others of "
    r"its warpgroup[\s\S]*threads [\d, -]+ are at wgmma\.\w+ at",
    "half_a_warpgroup_polls": MISSING.format(
        "wgmma.mma_async", r"128-255 .* and threads 192-255 do not reach it"
    )
    + r"[\s\S]*no progress: a thread polls",
    "waits_differ": r"divergent warpgroup: wgmma.wait_group 1 by one thread and 0 by the first\n  "
    r"block \(0, 0, 0\), thread \(224, 0, 0\)",
    "descriptors_differ": r"wgmma.mma_async: all threads of a warpgroup must give.*\n  block "
    r"\(0, 0, 0\), thread \(224, 0, 0\)",
    "misplaced_warpgroup": MISSING.format(
        "wgmma.fence", r"0-127 .* and threads 0-95 do not reach it"
    )
    + r"\n"
    + MISSING.format("wgmma.fence", r"128-255 .* and threads 224-255 do not reach it"),
    "missing_proxy_fence": r"missing fence.proxy.async: read of 16[\s\S]*the write is by",
}


NUMBERS = re.findall(r"^  X\((\w+)\)", (KERNELS / SOURCE).read_text(), re.MULTILINE)


def launch(bug: str, planted: int, **options: Any) -> np.ndarray[Any, Any]:
    number = NUMBERS.index(bug)

    def make() -> tuple[Any, ...]:
        return A.copy(), np.int32(number), np.int32(planted), empty(4096)

    return run(SOURCE, "planted_wgmma", make, THREADS, A.nbytes, **options)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("bug", BUGS)
def test_the_bug_is_named(bug, late):
    with pytest.raises(EmulatorError, match=BUGS[bug]) as caught:
        launch(bug, 1, late=late, seed=int(late), patience=0.1)
    assert str(caught.value).startswith("planted_wgmma(): ")
    assert re.search(r"/wgmma\.cu:\d+", str(caught.value))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("bug", BUGS)
def test_the_correct_version_passes(bug, late):
    for seed in (0, 1):
        np.testing.assert_array_equal(launch(bug, 0, late=late, seed=seed), PRODUCT)


@pytest.mark.parametrize("bug", ["accumulators_read_in_flight", "lax_wait"])
def test_accumulators_read_too_early_are_nan_in_the_late_mode_without_checks(bug):
    np.testing.assert_array_equal(launch(bug, 1, checked=False), PRODUCT)
    assert np.isnan(launch(bug, 1, checked=False, late=True)).all()


INSTRUCTIONS = ("ldmatrix", "stmatrix", "mma.sync", "movmatrix")
REGISTERS = np.arange(128, dtype=np.float32).view(np.uint32)


def launch_lanes(instruction: str, bug: int, threads: int = 32) -> np.ndarray[Any, Any]:
    number = INSTRUCTIONS.index(instruction)

    def make() -> tuple[Any, ...]:
        return REGISTERS.copy(), np.int32(number), np.int32(bug), np.zeros_like(REGISTERS)

    return run("lanes.cu", "planted_lanes", make, threads, 0)


@pytest.mark.parametrize("bug", [1, 2])
@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_missing_lanes_are_named(instruction, bug):
    message = (
        rf"missing threads: {instruction} is an instruction of all 32 lanes of a warp, here "
        r"threads 0-31 of block \(0, 0, 0\), and threads 16-31 do not reach it"
    )
    with pytest.raises(EmulatorError, match=message) as caught:
        launch_lanes(instruction, bug)
    text = str(caught.value)
    assert re.search(rf"threads 0-15 wait at {instruction} at .*lanes\.cu:\d+", text), text
    assert f"threads 16-31 {'have exited' if bug == 1 else 'wait at __syncwarp'}" in text


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_instructions_of_whole_warps_pass(instruction):
    np.testing.assert_array_equal(launch_lanes(instruction, 0), REGISTERS)


def test_a_partial_warp_is_reported():
    with pytest.raises(EmulatorError, match=r"ldmatrix is .* and threads 16-31 do not reach it"):
        launch_lanes("ldmatrix", 0, threads=16)
