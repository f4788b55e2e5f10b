"""The limits by which the driver rejects a launch."""

from __future__ import annotations

import math

from cukit.core.device import Device

MAX_THREADS = 1024
_BLOCK_EXTENTS = (1024, 1024, 64)
_GRID_EXTENTS = (2**31 - 1, 65535, 65535)
_CLUSTER_BLOCKS = 8
"""The portable cluster size."""
_MOST_CLUSTER_BLOCKS = {9: 16, 10: 16}
"""The non-portable one, by the major compute capability; `core.kernel` permits it."""
STATIC_SHARED_BYTES = 48 * 1024


def refusal(
    device: Device,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    cluster: tuple[int, ...],
    static_bytes: int,
    dynamic_bytes: int,
    most_threads: int,
) -> str | None:
    """Why a GPU like `device` would reject the launch; None if it would not.

    most_threads: the bound of the kernel's `__launch_bounds__`, or 0. static_bytes: the size of its
    `__shared__` variables.
    """
    threads = math.prod(block)
    bound = most_threads or MAX_THREADS
    for what, extents, most in (("block", block, _BLOCK_EXTENTS), ("grid", grid, _GRID_EXTENTS)):
        for extent, limit, axis in zip(extents, most, "xyz", strict=False):
            if not 1 <= extent <= limit:
                return f"{what} {extents}: {extent} along {axis}, allowed are 1 to {limit}"
    if threads > MAX_THREADS:
        return f"block {block} has {threads} threads, the limit is {MAX_THREADS}"
    if threads > bound:
        return f"block {block} has {threads} threads, the kernel's __launch_bounds__ allow {bound}"
    blocks = math.prod(cluster)
    if blocks > 1 and device.compute_capability < (9, 0):
        return f"clusters of {blocks} blocks: clusters need sm_90 or newer, this is {device.arch}"
    most_blocks = _MOST_CLUSTER_BLOCKS.get(device.compute_capability[0], _CLUSTER_BLOCKS)
    if blocks > most_blocks:
        return f"clusters of {blocks} blocks, the limit is {most_blocks}"
    if any(extent % along for extent, along in zip(grid, cluster, strict=False)):
        return f"the cluster's extents {cluster} do not divide the grid's {grid}"
    if static_bytes > STATIC_SHARED_BYTES:
        return (
            f"{static_bytes} bytes of static shared memory, the limit is "
            f"{STATIC_SHARED_BYTES}; use dynamic shared memory, which may be larger"
        )
    if static_bytes + dynamic_bytes > device.shared_bytes_per_block:
        return (
            f"{static_bytes} bytes of static and {dynamic_bytes} of dynamic shared memory, "
            f"the limit on {device.arch} is {device.shared_bytes_per_block} for both"
        )
    return None
