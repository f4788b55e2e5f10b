"""What a launch may ask for: the limits that the driver would refuse it by."""

from __future__ import annotations

import math

from cukit.core.device import Device

MOST_THREADS = 1024
_BLOCK_EXTENTS = (1024, 1024, 64)
_GRID_EXTENTS = (2**31 - 1, 65535, 65535)
_CLUSTER_BLOCKS = 8  # what every GPU with clusters has room for
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
    """Why a GPU like `device` would not start the launch; None if it would.

    most_threads: of the kernel's `__launch_bounds__`, or 0. static_bytes: of its `__shared__`
    variables.
    """
    threads = math.prod(block)
    bound = most_threads or MOST_THREADS
    for what, extents, most in (("block", block, _BLOCK_EXTENTS), ("grid", grid, _GRID_EXTENTS)):
        for extent, limit, axis in zip(extents, most, "xyz", strict=False):
            if not 1 <= extent <= limit:
                return f"{what} {extents}: {extent} along {axis}, allowed are 1 to {limit}"
    if threads > MOST_THREADS:
        return f"block {block} has {threads} threads, a block may have {MOST_THREADS}"
    if threads > bound:
        return (
            f"block {block} has {threads} threads, __launch_bounds__ of the kernel allows {bound}"
        )
    blocks = math.prod(cluster)
    if blocks > 1 and device.compute_capability < (9, 0):
        return f"clusters of {blocks} blocks: they exist from sm_90 on, not on {device.arch}"
    if blocks > _CLUSTER_BLOCKS:
        return f"clusters of {blocks} blocks, a cluster may have {_CLUSTER_BLOCKS}"
    if any(extent % along for extent, along in zip(grid, cluster, strict=False)):
        return f"clusters of {cluster} do not divide grid {grid}"
    if static_bytes > STATIC_SHARED_BYTES:
        return (
            f"{static_bytes} bytes of static shared memory, a kernel may have "
            f"{STATIC_SHARED_BYTES}; dynamic shared memory may be larger"
        )
    if static_bytes + dynamic_bytes > device.shared_bytes_per_block:
        return (
            f"{static_bytes} bytes of static and {dynamic_bytes} of dynamic shared memory, "
            f"a block on {device.arch} may have {device.shared_bytes_per_block}"
        )
    return None
