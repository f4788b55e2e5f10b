"""What becomes of a pool's memory when nobody has the pool any more."""

from __future__ import annotations

import logging
import os

from cukit.memory.bookkeeping.spans import Span
from cukit.memory.bookkeeping.streams import Streams
from cukit.memory.bookkeeping.ties import Tie
from cukit.memory.pool.handover import Queues
from cukit.memory.pool.pager import Pager
from cukit.memory.providers.provider import Provider

LOG = logging.getLogger(__name__)


_waiting: list[tuple[Provider, Pager]] = []
"""Pools that ended while the device could not be waited for."""

os.register_at_fork(after_in_child=_waiting.clear)


def give_back(
    provider: Provider,
    streams: Streams,
    pager: Pager,
    live: dict[int, Span],
    queues: Queues,
    process: int,
) -> None:
    """What a pool held goes back to the device when nobody has the pool any more.

    Not while somebody may still use the memory by its address: raw allocations, captured graphs. If
    a garbage collection ends the pool during a capture, with the end of the next pool.
    """
    captured = any(state.private for state in streams.states.values())
    freed = {item.target if isinstance(item, Tie) else item for item in queues.waiting()}
    used = [at for at, span in live.items() if not freed & {at, span, span.holder}]
    if used or captured or process != os.getpid():
        return
    _waiting.append((provider, pager))
    for entry in list(_waiting):
        try:
            if entry[0].capturing():
                continue
            entry[0].synchronize_device()
            entry[1].abandon()
        except Exception:
            LOG.exception("memory pool: its memory could not be given back")
        _waiting.remove(entry)
