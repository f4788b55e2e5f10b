"""How a pool learns that the owner of memory is gone: through a weak reference, in C.

A destructor written in Python is a place where Ctrl-C gets lost: if the signal is handled as its
first bytecode runs, KeyboardInterrupt is raised where nothing can pass it on, and what the
destructor was to do is not done. The callback of a tie is `deque.append`, which runs no bytecode.
"""

from __future__ import annotations

import weakref
from typing import Any


class Tie(weakref.ref[Any]):
    """Ends up in the pool's queue when its referent dies, if the tie itself is kept until then."""

    __slots__ = ("target",)

    target: Any
    """What is to be freed: the Span of a block."""


class BufferTie(Tie):
    """For a DeviceBuffer: `target` is its Holder."""

    __slots__ = ()


class PinTie(Tie):
    """For what only pins a buffer: `target` is the Holder to unpin."""

    __slots__ = ()
