"""Snapshots of a pool in the format of PyTorch's memory viewer (https://pytorch.org/memory_viz).

The viewer reads pickles; JSON holds the same for every other program. Segments are stretches of
addresses with memory behind them; what they are made of, and the traces, follow
`torch.cuda.memory._snapshot()`. A segment belongs to no stream here (any stream may get its free
memory): its blocks carry the stream, in a field of their own.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

from cukit.errors import ConfigError
from cukit.memory.bookkeeping.blocks import Block, Event, Frame, Range
from cukit.memory.bookkeeping.statistics import PoolStatistics
from cukit.memory.history import History
from cukit.memory.pool.memory_pool import MemoryPool

PICKLE_PROTOCOL = 4
"""The newest that the viewer understands."""

STATES = {
    "live": "active_allocated",
    "pending": "active_pending_free",
    "free": "inactive",
}


def snapshot(pool: MemoryPool, history: History | None = None) -> dict[str, Any]:
    """The pool as it is, and with a `history` what happened in it.

    For call sites in it, make the pool with `MemoryPoolConfig(call_site_depth=8)`.
    """
    events, ranges = history.moment() if history else ([], pool.ranges())
    remaps = pool.provider.can_remap
    content = describe(ranges, events, device=pool.provider.device_id, remaps=remaps)
    return content | {"statistics": _statistics(pool.statistics())}


def _statistics(found: PoolStatistics) -> dict[str, Any]:
    """The numbers of the pool as a whole."""
    numbers = {field.name: getattr(found, field.name) for field in fields(found)}
    del numbers["per_stream"]
    return numbers | {"fragmentation": found.fragmentation, "hit_rate": found.hit_rate}


def write_snapshot(
    path: Path | str, pool: MemoryPool, history: History | None = None
) -> dict[str, Any]:
    """Writes a snapshot as `.pickle` (for the viewer) or `.json`; returns it."""
    path = Path(path)
    content = snapshot(pool, history)
    if path.suffix == ".json":
        path.write_text(json.dumps(content), encoding="utf-8")
    elif path.suffix in (".pickle", ".pkl"):
        path.write_bytes(pickled(content))
    else:
        raise ConfigError(f"{path}: expected a name that ends in .pickle or .json")
    return content


def pickled(content: dict[str, Any]) -> bytes:
    """The content as the pickle that the viewer can read: it knows few of pickle's codes."""
    buffer = io.BytesIO()
    pickle.Pickler(buffer, PICKLE_PROTOCOL).dump(content)
    return buffer.getvalue()


def describe(
    ranges: Sequence[Range],
    events: Sequence[Event] = (),
    *,
    device: int = 0,
    remaps: bool = True,
) -> dict[str, Any]:
    """The same from parts: ranges, and the events that led to them.

    remaps: whether memory comes in pages; then reserving addresses takes none.
    """
    streams = _Numbers()
    segments = [
        _segment(run, part.page_bytes, device, streams, remaps=remaps)
        for part in ranges
        for run in _runs(part)
    ]
    traces: list[list[dict[str, Any]]] = [[] for _ in range(device + 1)]
    traces[device] = list(_trace(events, streams, remaps=remaps))
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {"backend": "cukit", "expandable_segments": remaps},
    }


class _Numbers(dict[Hashable, int]):
    """Streams by number: the first that comes up is 0, as the viewer likes."""

    def __missing__(self, key: Hashable) -> int:
        return self.setdefault(key, len(self))


def _runs(part: Range) -> Iterator[list[Block]]:
    """Stretches of a range with memory behind them."""
    for unmapped, blocks in groupby(part.blocks, lambda block: block.state == "unmapped"):
        if not unmapped:
            yield list(blocks)


def _segment(
    blocks: list[Block], page_bytes: int, device: int, streams: _Numbers, *, remaps: bool
) -> dict[str, Any]:
    described = [_block(block, streams) for block in blocks]
    live = sum(block.size for block in blocks if block.state == "live")
    active = sum(block.size for block in blocks if block.state != "free")
    return {
        "device": device,
        "address": blocks[0].address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": live,
        "active_size": active,
        "requested_size": sum(block.requested for block in blocks),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": [0, 0],
        "is_expandable": remaps,
        "page_bytes": page_bytes,
        "frames": [],
        "blocks": described,
    }


def _block(block: Block, streams: _Numbers) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested,
        "state": STATES[block.state],
        "stream": 0 if block.stream is None else streams[block.stream],
        "movable": block.movable,
        "frames": _frames(block.call_site),
    }


def _frames(call_site: Iterable[Frame]) -> list[dict[str, Any]]:
    return [frame._asdict() for frame in call_site]


def _trace(events: Sequence[Event], streams: _Numbers, *, remaps: bool) -> Iterator[dict[str, Any]]:
    """The events in PyTorch's words, oldest first."""
    for event in events:
        if event.action in ("segment_alloc", "segment_free") and remaps:
            continue  # addresses only
        action: str = "free_requested" if event.action == "free" else event.action
        entry = {
            "action": action,
            "addr": event.address,
            "size": event.size,
            "stream": streams[event.stream] if action.startswith(("alloc", "free")) else 0,
            "time_us": round(event.time * 1e6),
            "frames": _frames(event.call_site),
        }
        if action == "oom":
            entry["device_free"] = 0
        yield entry
