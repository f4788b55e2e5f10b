"""Mistakes in using a pool, explained: wrong pointers, and use after a fork."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, NoReturn

from cukit.errors import CukitError
from cukit.memory.bookkeeping.spans import CACHED, FREE, LIVE, PENDING

if TYPE_CHECKING:
    from cukit.memory.pool.core import PoolCore

_pools: weakref.WeakSet[PoolCore] = weakref.WeakSet()


def register_pool(pool: PoolCore) -> None:
    """Makes a pool known to the explanations, and unusable in forked children."""
    _pools.add(pool)


def explain_pointer(pool: PoolCore, address: int) -> str:
    """Why `address` cannot be freed."""
    if not isinstance(address, int):
        return f"memory pool: free of {address!r}: expected the address that allocate returned"
    what = f"memory pool: free of {address:#x}"
    span = pool._arena.locate(address)
    if span is not None and span.state == LIVE:
        return (
            f"{what}: not the start of an allocation; it lies {address - span.address} bytes into"
            f" one of {span.requested} bytes at {span.address:#x}"
        )
    if span is not None and span.state in (FREE, CACHED, PENDING):
        return f"{what}: freed before (double free), or never allocated"
    if span is not None:
        return f"{what}: freed before, its memory is unmapped by now"
    for other in list(_pools):
        if other is not pool and other._arena.locate(address) is not None:
            return f"{what}: it belongs to another pool, {other!r}, not to {pool!r}"
    return f"{what}: not an address of this pool"


def _refuse() -> NoReturn:
    raise CukitError(
        "memory pool: used in a forked child. CUDA does not survive fork: start processes with the"
        " 'spawn' method and make the pool there"
    )


def _after_fork() -> None:
    for pool in list(_pools):
        pool._acquire = _refuse
        pool._parts = (_refuse, *pool._parts[1:])
        pool._listeners.active = True  # so that nothing is handed over without the lock
        # Held for good: destructors in the child put their frees aside and do no harm.
        pool._busy = True


os.register_at_fork(after_in_child=_after_fork)
