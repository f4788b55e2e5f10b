"""Small read-only arrays filled with one value, cached per stream."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import Array, is_gpu_array, namespace
from cukit.core.counters import current_stream, is_captured

_MAX_KEPT = 4096
"""Maximum number of cached arrays; each occupies about 512 bytes."""

_kept: dict[tuple[Any, ...], Array] = {}


def constant(like: Array, count: int, value: float, dtype: Any) -> Array:
    """An array [count] of `value` on the device of `like`. It must not be written.

    Arrays are cached per stream, so stream order places the fill before every launch that reads the
    array. They are never released, because a captured graph may read them; once 4096 are cached,
    further arrays are filled anew by every call. An array created during graph capture is not
    cached: its fill is part of the graph and runs only when the graph is replayed.
    """
    device = like.device.id if is_gpu_array(like) else None
    key = (device, current_stream(like), count, value, dtype)
    found = _kept.get(key)
    if found is None:
        found = namespace(like).full(count, value, dtype)
        if len(_kept) < _MAX_KEPT and not is_captured(like):
            _kept[key] = found
    return found
