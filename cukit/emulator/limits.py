"""Limits of a launch, which the driver checks on a GPU."""

from __future__ import annotations

import math

from cukit.core.device import Device

MAX_THREADS = 1024
MAX_DYNAMIC_SHARED_BYTES = 227 * 1024
"""The largest opt-in limit of the supported GPUs."""
_BLOCK_EXTENTS = (1024, 1024, 64)
_GRID_EXTENTS = (2**31 - 1, 65535, 65535)
_PORTABLE_CLUSTER_BLOCKS = 8
_MAX_CLUSTER_BLOCKS = {9: 16, 10: 16}
"""By major compute capability, including the non-portable sizes that `core.kernel` permits."""
_MAX_STATIC_SHARED_BYTES = 48 * 1024


def reason_against_launch(
    device: Device,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    cluster: tuple[int, ...],
    static_bytes: int,
    dynamic_bytes: int,
    max_threads: int,
) -> str | None:
    """Why a GPU like `device` would reject the launch; None if it would not.

    static_bytes: size of the kernel's `__shared__` variables. max_threads: the bound in its
    `__launch_bounds__`, or 0.
    """
    threads = math.prod(block)
    bound = max_threads or MAX_THREADS
    for what, extents, limits in (("block", block, _BLOCK_EXTENTS), ("grid", grid, _GRID_EXTENTS)):
        for extent, limit, axis in zip(extents, limits, "xyz", strict=False):
            if not 1 <= extent <= limit:
                return f"{what} {extents}: {extent} along {axis}, must be 1 to {limit}"
    if threads > MAX_THREADS:
        return f"block {block} has {threads} threads, the limit is {MAX_THREADS}"
    if threads > bound:
        return f"block {block} has {threads} threads, the kernel's __launch_bounds__ allow {bound}"
    blocks = math.prod(cluster)
    if blocks > 1 and device.compute_capability < (9, 0):
        return f"clusters of {blocks} blocks need sm_90 or newer, this is {device.arch}"
    max_blocks = _MAX_CLUSTER_BLOCKS.get(device.compute_capability[0], _PORTABLE_CLUSTER_BLOCKS)
    if blocks > max_blocks:
        return f"clusters of {blocks} blocks, the limit is {max_blocks}"
    if any(extent % along for extent, along in zip(grid, cluster, strict=False)):
        return f"the cluster's extents {cluster} do not divide the grid's {grid}"
    if static_bytes > _MAX_STATIC_SHARED_BYTES:
        return (
            f"{static_bytes} bytes of static shared memory, the limit is "
            f"{_MAX_STATIC_SHARED_BYTES}; use dynamic shared memory, which may be larger"
        )
    if static_bytes + dynamic_bytes > device.shared_bytes_per_block:
        return (
            f"{static_bytes} bytes of static and {dynamic_bytes} of dynamic shared memory, "
            f"the limit on {device.arch} is {device.shared_bytes_per_block} for both"
        )
    return None
