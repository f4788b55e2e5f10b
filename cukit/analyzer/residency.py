"""Occupancy of one launch: curves over each resource, the smallest changes that raise it, waves.

Pure arithmetic on `cukit.analyzer.occupancy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cukit.analyzer.occupancy import (
    MAX_THREADS_PER_BLOCK,
    WARP_THREADS,
    Occupancy,
    occupancy,
)
from cukit.analyzer.schema import CurvePoint, NextStep, OccupancyAnalysis, ResourceLimit, Waves
from cukit.core.device import KIB, Device

CURVE_REGISTERS = range(16, 257, 8)
CURVE_SHARED_STEP = 2 * KIB


def analyze_occupancy(
    device: Device, *, threads: int, registers: int, shared_bytes: int
) -> OccupancyAnalysis:
    """Occupancy of a launch and of variants with other resources. Arguments as `occupancy`."""

    def at(threads: int = threads, registers: int = registers, shared: int = shared_bytes) -> float:
        return _occupancy(device, threads, registers, shared).fraction

    now = _occupancy(device, threads, registers, shared_bytes)
    block_sizes = range(WARP_THREADS, MAX_THREADS_PER_BLOCK + 1, WARP_THREADS)
    shared_sizes = range(0, device.shared_bytes_per_block + 1, CURVE_SHARED_STEP)
    return OccupancyAnalysis(
        blocks_per_sm=now.blocks,
        warps_per_sm=now.warps,
        max_warps_per_sm=now.max_warps,
        fraction=now.fraction,
        limiter=now.limiter,
        limits=tuple(ResourceLimit(name, blocks) for name, blocks in now.limits),
        next_steps=_next_steps(device, threads, registers, shared_bytes, now),
        by_threads=tuple(CurvePoint(n, at(threads=n)) for n in block_sizes),
        by_registers=tuple(CurvePoint(n, at(registers=n)) for n in CURVE_REGISTERS),
        by_shared_bytes=tuple(CurvePoint(n, at(shared=n)) for n in shared_sizes),
    )


def analyze_waves(device: Device, blocks: int, blocks_per_sm: int) -> Waves | None:
    """How a grid of `blocks` fills the GPU; None for an empty grid or if no block fits."""
    blocks_per_wave = blocks_per_sm * device.num_sms
    if blocks == 0 or blocks_per_wave == 0:
        return None
    waves = blocks / blocks_per_wave
    last = blocks - (math.ceil(waves) - 1) * blocks_per_wave
    return Waves(blocks, blocks_per_wave, waves, last / blocks_per_wave, waves / math.ceil(waves))


def _occupancy(device: Device, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    return occupancy(device, threads=threads, registers=registers, shared_bytes=shared_bytes)


def _next_steps(
    device: Device, threads: int, registers: int, shared_bytes: int, now: Occupancy
) -> tuple[NextStep, ...]:
    """For each resource alone: the smallest change that makes more warps resident.

    Residency never decreases when registers or shared memory do, so bisection finds the step. It is
    not monotonic in threads, so every block size is tried, the nearest first.
    """
    steps = []

    def by_bisection(resource: str, current: int, of: Callable[[int], Occupancy]) -> None:
        low, high = 0, current  # of(low) is better if any value is; of(high) is not better
        if of(low).warps <= now.warps:
            return
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if of(middle).warps > now.warps else (low, middle)
        found = of(low)
        steps.append(NextStep(resource, current, low, found.blocks, found.fraction))

    if registers > 1:
        by_bisection(
            "registers", registers, lambda n: _occupancy(device, threads, max(n, 1), shared_bytes)
        )
    if shared_bytes:
        by_bisection(
            "shared memory", shared_bytes, lambda n: _occupancy(device, threads, registers, n)
        )
    sizes = range(WARP_THREADS, MAX_THREADS_PER_BLOCK + 1, WARP_THREADS)
    for size in sorted(sizes, key=lambda size: abs(size - threads)):
        found = _occupancy(device, size, registers, shared_bytes)
        if found.warps > now.warps:
            steps.append(NextStep("threads", threads, size, found.blocks, found.fraction))
            break
    return tuple(steps)
