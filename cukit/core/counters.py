"""Counters by which thread blocks of a launch find out who finishes last."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.core import backend
from cukit.core.arrays import Array
from cukit.core.device import require_cupy

_LEAST = 4096
"""Of an allocation: most launches of a stream then share one."""

_zeros: dict[tuple[Any, int], Array] = {}


def zero_counters(like: Array, count: int) -> Array:
    """At least `count` zeros, int32, which every launch leaves as zeros: a stream's launches share
    them.

    A graph gets its own, and with them the node that clears them at every replay: its replays may
    run on any stream.
    """
    if backend.active is not None:
        return np.zeros(count, np.int32)
    cupy = require_cupy("launching kernels")
    stream = cupy.cuda.get_current_stream().ptr
    if cupy.cuda.runtime.streamIsCapturing(stream):
        return cupy.zeros(count, cupy.int32)
    key = (like.data.device_id, stream)
    found = _zeros.get(key)
    if found is None or found.size < count:
        found = _zeros[key] = cupy.zeros(max(count, _LEAST), cupy.int32)
    return found
