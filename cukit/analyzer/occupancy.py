"""How many blocks of a kernel fit on one SM, and which resource limits them.

Computed from the registers and shared memory that the compiler reports and the threads of the
launch; needs no GPU. The rules are those of NVIDIA's `cuda_occupancy.h`, for compute capability 7.0
to 12.x with the default shared-memory carveout; the tests compare every result with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from cukit.core.device import KIB, Device
from cukit.errors import ConfigError

WARP_THREADS = 32
MAX_THREADS_PER_BLOCK = 1024
MAX_REGISTERS_PER_THREAD = 256

REGISTER_GRANULE = 256
"""Registers are allocated to a warp in units of this many."""

SHARED_GRANULE = 128
"""Shared memory is allocated to a block in units of this many bytes (twice that before Ampere)."""

RESERVED_SHARED_BYTES = 1 * KIB
"""Shared memory that the driver reserves per block, since Ampere."""

SUB_PARTITIONS = 4
"""Schedulers of an SM; each has a quarter of its registers."""

_MAX_BLOCKS_PER_SM = {(7, 0): 32, (7, 2): 32, (7, 5): 16}
_MAX_BLOCKS_PER_SM |= {(8, 0): 32, (8, 6): 16, (8, 7): 16, (8, 9): 24, (9, 0): 32}
_MAX_BLOCKS_PER_SM |= {(10, 0): 32, (10, 1): 24, (10, 3): 32, (12, 0): 24, (12, 1): 24}


@dataclass(frozen=True)
class Occupancy:
    """Residency of one kernel on one SM."""

    blocks: int
    """Blocks that run at once; 0 if the launch is not possible."""
    warps: int
    max_warps: int
    limits: tuple[tuple[str, int | None], ...]
    """(resource, blocks that it allows); None if the kernel does not use it."""

    @property
    def fraction(self) -> float:
        """Resident warps over the maximum of the SM."""
        return self.warps / self.max_warps

    @property
    def limiter(self) -> str:
        """The resources that allow no further block, e.g. "registers" or "threads + blocks"."""
        return " + ".join(name for name, limit in self.limits if limit == self.blocks)


def occupancy(device: Device, *, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Theoretical occupancy of a launch on `device`.

    threads: per block. registers: per thread, as the compiler reports them. shared_bytes: static
    plus dynamic, per block, without the driver's reserve.
    Raises ConfigError for a non-positive block size, negative resources or an unknown architecture.
    """
    if threads < 1 or registers < 0 or shared_bytes < 0:
        raise ConfigError(
            "occupancy: threads must be positive, registers and shared_bytes not negative, got "
            f"{threads}, {registers}, {shared_bytes}"
        )
    if device.compute_capability not in _MAX_BLOCKS_PER_SM:
        raise ConfigError(f"occupancy: the limits of {device.arch} are not known")
    warps_per_block = -(-threads // WARP_THREADS)
    max_warps = device.max_threads_per_sm // WARP_THREADS
    limits = {
        "threads": max_warps // warps_per_block if threads <= MAX_THREADS_PER_BLOCK else 0,
        "registers": _register_limit(device, warps_per_block, registers),
        "shared memory": _shared_limit(device, shared_bytes),
        "blocks": _MAX_BLOCKS_PER_SM[device.compute_capability],
    }
    blocks = min(limit for limit in limits.values() if limit is not None)
    return Occupancy(blocks, blocks * warps_per_block, max_warps, tuple(limits.items()))


def _register_limit(device: Device, warps_per_block: int, registers: int) -> int | None:
    if registers == 0:
        return None
    per_warp = _round_up(registers * WARP_THREADS, REGISTER_GRANULE)
    # Whether a single block fits is decided as if its warps filled all sub-partitions evenly.
    assumed_per_block = per_warp * _round_up(warps_per_block, SUB_PARTITIONS)
    if registers > MAX_REGISTERS_PER_THREAD or assumed_per_block > device.registers_per_sm:
        return 0
    warps_per_partition = device.registers_per_sm // SUB_PARTITIONS // per_warp
    return warps_per_partition * SUB_PARTITIONS // warps_per_block


def _shared_limit(device: Device, shared_bytes: int) -> int | None:
    reserved = reserved_shared_bytes(device)
    granule = SHARED_GRANULE if reserved else 2 * SHARED_GRANULE
    allocated = _round_up(shared_bytes + reserved, granule)
    if allocated > device.shared_bytes_per_block + reserved:
        return 0
    return device.shared_bytes_per_sm // allocated if allocated else None


def reserved_shared_bytes(device: Device) -> int:
    """The bytes of every block's shared memory that the driver reserves on `device`."""
    return RESERVED_SHARED_BYTES if device.compute_capability >= (8, 0) else 0


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule
