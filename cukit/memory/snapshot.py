"""Files for PyTorch's memory viewer (https://pytorch.org/memory_viz).

The viewer reads pickles; JSON has the same content for other programs.
"""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

from cukit.core.scalars import check_path
from cukit.errors import ConfigError
from cukit.memory.bookkeeping.viewer_format import describe, describe_statistics
from cukit.memory.history import History
from cukit.memory.pool.memory_pool import MemoryPool, check_pool

PICKLE_PROTOCOL = 4
"""The newest that the viewer supports."""


def snapshot(pool: MemoryPool, history: History | None = None) -> dict[str, Any]:
    """The state of a pool and, with a `history`, its events.

    For call sites, create the pool with `MemoryPoolConfig(call_site_depth=8)`.
    """
    check_pool("snapshot", pool)
    if history is not None and not isinstance(history, History):
        raise ConfigError(f"snapshot: history must be a History or None, got {history!r}")
    events, ranges = history.events_and_ranges() if history else ([], pool.ranges())
    remaps = pool.provider.can_remap
    content = describe(ranges, events, device=pool.provider.device_id, remaps=remaps)
    return content | {"statistics": describe_statistics(pool.statistics())}


def write_snapshot(
    path: Path | str, pool: MemoryPool, history: History | None = None
) -> dict[str, Any]:
    """Writes a snapshot as `.pickle` (for the viewer) or `.json`; returns it."""
    path = check_path("write_snapshot", "path", path)
    content = snapshot(pool, history)
    if path.suffix == ".json":
        path.write_text(json.dumps(content), encoding="utf-8")
    elif path.suffix in (".pickle", ".pkl"):
        path.write_bytes(pickled(content))
    else:
        raise ConfigError(f"{path}: expected a name that ends in .pickle or .json")
    return content


def pickled(content: dict[str, Any]) -> bytes:
    """Pickles the content in a form that the viewer can read: it implements few pickle opcodes."""
    buffer = io.BytesIO()
    pickle.Pickler(buffer, PICKLE_PROTOCOL).dump(content)
    return buffer.getvalue()
