"""Returns a pool's memory to the device after the pool has been garbage collected."""

from __future__ import annotations

import logging
import os

from cukit.memory.bookkeeping.owner_refs import OwnerRef, Queues
from cukit.memory.bookkeeping.spans import Span
from cukit.memory.bookkeeping.streams import Streams
from cukit.memory.pool.pager import Pager
from cukit.memory.providers.provider import Provider

LOG = logging.getLogger(__name__)


_waiting: list[tuple[Provider, Pager]] = []
"""Pools collected during a graph capture, when the host must not synchronise."""

os.register_at_fork(after_in_child=_waiting.clear)


def release_memory(
    provider: Provider,
    streams: Streams,
    pager: Pager,
    live: dict[int, Span],
    queues: Queues,
    process: int,
) -> None:
    """Synchronises and releases all memory of a collected pool.

    Nothing is ever released if raw allocations are live or captured graphs exist, because their
    addresses may still be used. The memory of a pool collected during a capture is released when
    the next pool is collected.
    """
    captured = any(state.private for state in streams.states.values())
    freed = {item.target if isinstance(item, OwnerRef) else item for item in queues.waiting()}
    used = [at for at, span in live.items() if not freed & {at, span, span.holder}]
    if used or captured or process != os.getpid():
        return
    _waiting.append((provider, pager))
    for _ in range(len(_waiting)):
        try:
            waiting_provider, waiting_pager = entry = _waiting.pop(0)
        except IndexError:  # another thread took it
            return
        try:
            if waiting_provider.capturing():
                _waiting.append(entry)
                continue
            waiting_provider.synchronize_device()
            waiting_pager.abandon()
        except Exception:
            LOG.exception("memory pool: the memory of a collected pool could not be released")
        except BaseException:
            _waiting.append(entry)
            raise
