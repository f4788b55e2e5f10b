"""What becomes of a pool's memory when nobody has the pool any more."""

from __future__ import annotations

import logging
import os
from collections import deque
from typing import Any

from cukit.memory.pager import Pager
from cukit.memory.provider import Provider
from cukit.memory.spans import Span
from cukit.memory.streams import Streams
from cukit.memory.ties import Tie

LOG = logging.getLogger(__name__)


def give_back(
    provider: Provider,
    streams: Streams,
    pager: Pager,
    live: dict[int, Span],
    put_aside: deque[Any],
    process: int,
) -> None:
    """What a pool held goes back to the device when nobody has the pool any more.

    Not while somebody may still use the memory by its address: raw allocations, captured graphs.
    """
    captured = any(state.private for state in streams.states.values())
    freed = {item.target if isinstance(item, Tie) else item for item in put_aside}
    used = [at for at, span in live.items() if not freed & {at, span, span.holder}]
    if used or captured or process != os.getpid():
        return
    try:
        provider.synchronize_device()
        pager.abandon()
    except Exception:
        LOG.exception("memory pool: its memory could not be given back")
