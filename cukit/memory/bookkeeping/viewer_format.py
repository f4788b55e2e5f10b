"""The format of PyTorch's memory viewer (https://pytorch.org/memory_viz).

Segments are stretches of mapped addresses; their fields, and the traces, follow
`torch.cuda.memory._snapshot()`. Segments of this pool belong to no stream, because any stream may
get their free memory, so each block has its own `stream` field.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any

from cukit.memory.bookkeeping.blocks import Block, Event, Frame, Range
from cukit.memory.bookkeeping.statistics import PoolStatistics

STATES = {
    "live": "active_allocated",
    "pending": "active_pending_free",
    "free": "inactive",
}


def describe(
    ranges: Sequence[Range],
    events: Sequence[Event] = (),
    *,
    device: int = 0,
    remaps: bool = True,
) -> dict[str, Any]:
    """Describes ranges, and the events that led to them.

    remaps: whether memory is mapped in pages; if so, reserving addresses takes no memory.
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
    """Numbers streams from 0 in order of appearance, as the viewer expects."""

    def __missing__(self, key: Hashable) -> int:
        return self.setdefault(key, len(self))


def _runs(part: Range) -> Iterator[list[Block]]:
    """The mapped stretches of a range."""
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
    """The events in PyTorch's terms, oldest first."""
    for event in events:
        if event.action in ("segment_alloc", "segment_free") and remaps:
            continue  # reserves or releases addresses only
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


def describe_statistics(statistics: PoolStatistics) -> dict[str, Any]:
    """The statistics of the whole pool."""
    numbers = {field.name: getattr(statistics, field.name) for field in fields(statistics)}
    del numbers["per_stream"]
    return numbers | {"fragmentation": statistics.fragmentation, "hit_rate": statistics.hit_rate}
