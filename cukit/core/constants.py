"""Small arrays of one value, which launches read and nothing writes."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import Array, is_gpu_array, namespace
from cukit.core.counters import current_stream, is_captured

_MAX_KEPT = 4096
"""Arrays kept at most; the memory of each is 512 bytes or a little more."""

_kept: dict[tuple[Any, ...], Array] = {}


def constant(like: Array, count: int, value: float, dtype: Any) -> Array:
    """An array [count] of `value` on the device of `like`. It must not be written.

    Kept per stream, whose order places the fill before all launches that read the array. Kept
    arrays are never released, because a captured graph may read them: beyond 4096, every call fills
    a new array. So does a call during graph capture if none is kept: the graph fills that array,
    which other launches must not read before a replay.
    """
    device = like.device.id if is_gpu_array(like) else None
    key = (device, current_stream(like), count, value, dtype)
    found = _kept.get(key)
    if found is None:
        found = namespace(like).full(count, value, dtype)
        if len(_kept) < _MAX_KEPT and not is_captured(like):
            _kept[key] = found
    return found
