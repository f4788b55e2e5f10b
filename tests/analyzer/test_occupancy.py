"""Occupancy compared with NVIDIA's header, compiled by the host's C++ compiler."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from cukit.analyzer.devices import ANALYSIS_DEVICES, analysis_device
from cukit.analyzer.occupancy import occupancy, reserved_shared_bytes
from cukit.core.compiler import cuda_include_folder
from cukit.core.device import KIB, Device, typical_device
from cukit.errors import ConfigError, MissingDependencyError

THREADS = (1, 31, 32, 33, 64, 96, 128, 160, 224, 256, 384, 512, 640, 768, 1000, 1024, 1056)
REGISTERS = (0, 1, 16, 24, 32, 33, 40, 48, 63, 64, 65, 80, 96, 128, 129, 168, 200, 240, 255, 256)
SHARED_BYTES = (0, 1, 1024, 8192, 16_000, 33_000, 48 * KIB, 65_537, 99 * KIB, 163 * KIB, 227 * KIB)

ORACLE = r"""
#include <cstdio>
#include "cuda_occupancy.h"

// One line in: major minor threadsPerSm regsPerSm sharedPerSm sharedOptin reserved
//              threads registers sharedBytes;  one line out: blocks and each resource's limit.
int main() {
  int major, minor, threads_sm, regs_sm, threads, registers;
  size_t shared_sm, optin, reserved, shared;
  while (std::scanf("%d %d %d %d %zu %zu %zu %d %d %zu", &major, &minor, &threads_sm, &regs_sm,
                    &shared_sm, &optin, &reserved, &threads, &registers, &shared) == 10) {
    cudaOccDeviceProp device;
    device.computeMajor = major;
    device.computeMinor = minor;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = threads_sm;
    device.regsPerBlock = regs_sm;
    device.regsPerMultiprocessor = regs_sm;
    device.warpSize = 32;
    device.sharedMemPerBlock = 48 * 1024;
    device.sharedMemPerMultiprocessor = shared_sm;
    device.numSms = 100;
    device.sharedMemPerBlockOptin = optin;
    device.reservedSharedMemPerBlock = reserved;
    cudaOccFuncAttributes function;
    function.maxThreadsPerBlock = 1024;
    function.numRegs = registers;
    function.sharedSizeBytes = 0;
    function.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    function.maxDynamicSharedSizeBytes = shared;
    function.numBlockBarriers = 1;
    cudaOccDeviceState state;
    cudaOccResult result;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &function, &state, threads,
                                                shared) != CUDA_OCC_SUCCESS)
      return 1;
    std::printf("%d %d %d %d %d\n", result.activeBlocksPerMultiprocessor, result.blockLimitWarps,
                result.blockLimitRegs, result.blockLimitSharedMem, result.blockLimitBlocks);
  }
}
"""
UNLIMITED = 2**31 - 1


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile NVIDIA's cuda_occupancy.h with")
    try:
        headers = cuda_include_folder()
    except MissingDependencyError as error:
        pytest.skip(f"no cuda_occupancy.h: {error}")
    if not (headers / "cuda_occupancy.h").is_file():
        pytest.skip(f"no cuda_occupancy.h in {headers}")
    folder = tmp_path_factory.mktemp("occupancy")
    source, program = folder / "oracle.cpp", folder / "oracle"
    source.write_text(ORACLE)
    subprocess.run(
        [compiler, "-O1", "-w", f"-I{headers}", str(source), "-o", str(program)], check=True
    )
    return program


def query(oracle: Path, device: Device, launches: list[tuple[int, int, int]]) -> list[list[int]]:
    """Blocks per multiprocessor and the limits of each (threads, registers, shared bytes)."""
    major, minor = device.compute_capability
    facts = (
        f"{major} {minor} {device.max_threads_per_sm} {device.registers_per_sm} "
        f"{device.shared_bytes_per_sm} {device.shared_bytes_per_block} "
        f"{reserved_shared_bytes(device)}"
    )
    lines = "\n".join(f"{facts} {threads} {regs} {shared}" for threads, regs, shared in launches)
    answer = subprocess.run([oracle], input=lines, capture_output=True, text=True, check=True)
    return [[int(word) for word in line.split()] for line in answer.stdout.splitlines()]


@pytest.mark.parametrize("arch", ANALYSIS_DEVICES)
def test_agrees_with_nvidias_header(arch: str, oracle: Path) -> None:
    device = analysis_device(arch)
    draw = random.Random(arch)
    launches = list(itertools.product(THREADS, REGISTERS, SHARED_BYTES))
    launches += [
        (draw.randint(1, 1100), draw.randint(0, 256), draw.randint(0, 240 * KIB))
        for _ in range(3000)
    ]
    answers = query(oracle, device, launches)
    assert len(answers) == len(launches)
    for (threads, registers, shared_bytes), answer in zip(launches, answers, strict=True):
        ours = occupancy(device, threads=threads, registers=registers, shared_bytes=shared_bytes)
        limits = [UNLIMITED if limit is None else limit for _, limit in ours.limits]
        assert [ours.blocks, *limits] == answer, (threads, registers, shared_bytes)


def test_the_limiter_is_named() -> None:
    h200 = typical_device("sm_90a")
    by_registers = occupancy(h200, threads=256, registers=128, shared_bytes=0)
    assert (by_registers.blocks, by_registers.warps, by_registers.limiter) == (2, 16, "registers")
    assert by_registers.fraction == 0.25
    by_shared = occupancy(h200, threads=128, registers=32, shared_bytes=100 * KIB)
    assert (by_shared.blocks, by_shared.limiter) == (2, "shared memory")
    assert occupancy(h200, threads=1024, registers=32, shared_bytes=0).limiter == (
        "threads + registers"
    )


def test_a_launch_that_cannot_run_has_no_blocks() -> None:
    rtx = typical_device("sm_89")
    too_much = occupancy(rtx, threads=128, registers=32, shared_bytes=100 * KIB)
    assert (too_much.blocks, too_much.limiter) == (0, "shared memory")


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes"), [(0, 32, 0), (32, -1, 0), (32, 32, -1)]
)
def test_invalid_arguments_are_rejected(threads: int, registers: int, shared_bytes: int) -> None:
    with pytest.raises(ConfigError, match="occupancy"):
        occupancy(
            typical_device("sm_80"), threads=threads, registers=registers, shared_bytes=shared_bytes
        )
