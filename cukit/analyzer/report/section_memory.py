"""The chapter on a memory pool: its address map, fragmentation over time, memory by call site.

Made from a snapshot in the format of PyTorch's memory viewer, as written by `cukit.memory.snapshot`
(JSON). It may also contain `statistics`, a mapping of names to numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cukit.analyzer.report import numbers
from cukit.analyzer.report.layout import (
    Block,
    Cell,
    Column,
    FixedFigure,
    Paragraph,
    Section,
    Table,
    Tile,
    Tiles,
)
from cukit.memory.bookkeeping.blocks import Block as PoolBlock
from cukit.memory.bookkeeping.blocks import BlockState, Event, Frame, Range
from cukit.memory.history import Sample, timeline
from cukit.memory.layout import largest_hole, totals
from cukit.memory.picture import map_svg, timeline_svg

STATES: Mapping[str, BlockState] = {
    "active_allocated": "live",
    "active_pending_free": "pending",
    "active_awaiting_free": "pending",
    "inactive": "free",
}
ACTIONS = {"free_requested": "free"}

LARGEST_PAGE = 2 << 20
"""The page size of GPUs. For a snapshot without a page size, the page is the greatest common
divisor of this size and of the addresses and sizes of all segments."""

MAX_CALL_SITES = 20


def memory_section(content: Mapping[str, Any]) -> Section:
    """Tiles, map, timeline, and the call sites that hold the most memory."""
    ranges = ranges_of(content["segments"])
    remaps = any(segment.get("is_expandable", True) for segment in content["segments"])
    samples = timeline(list(events_of(content["device_traces"])), ranges, remaps=remaps)
    blocks: list[Block] = [_tiles(ranges, samples)]
    if ranges:
        blocks.append(FixedFigure("Map of the pool", map_svg(ranges)))
    if samples:
        blocks.append(FixedFigure("Memory and fragmentation over time", timeline_svg(samples)))
    else:
        blocks.append(Paragraph("The snapshot has no history, so there is no plot over time."))
    if sites := _call_sites(ranges):
        blocks.append(sites)
    if statistics := content.get("statistics"):
        rows = tuple(_statistic(name, value) for name, value in statistics.items())
        blocks.append(Table((Column("statistic"), Column("value", numeric=True)), rows))
    settings = content.get("allocator_settings") or {}
    facts = (settings.get("backend"), f"{len(ranges):,} segments", f"{len(samples):,} events")
    return Section("Memory", " · ".join(str(fact) for fact in facts if fact), tuple(blocks))


def ranges_of(segments: Sequence[Mapping[str, Any]]) -> list[Range]:
    """The segments of a snapshot as ranges of the pool."""
    sizes = [value for s in segments for value in (s["address"], s["total_size"])]
    page = math.gcd(LARGEST_PAGE, *sizes)
    found = []
    for segment in sorted(segments, key=lambda s: int(s["address"])):
        blocks, address = [], segment["address"]
        for block in segment["blocks"]:
            # Older snapshots have no addresses: blocks follow one another.
            address = block.get("address", address)
            site = tuple(
                Frame(f["filename"], f["line"], f["name"]) for f in block.get("frames", ())
            )
            requested, movable = block.get("requested_size", 0), block.get("movable", False)
            state = STATES[block["state"]]
            blocks.append(
                PoolBlock(
                    address, block["size"], requested, state, block.get("stream"), movable, site
                )
            )
            address += block["size"]
        pages = segment.get("page_bytes", page)
        found.append(Range(segment["address"], segment["total_size"], pages, tuple(blocks)))
    return found


def events_of(traces: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[Event]:
    """The events of all devices, oldest first."""
    entries = sorted((e for trace in traces for e in trace), key=lambda e: int(e.get("time_us", 0)))
    for entry in entries:
        action = ACTIONS.get(entry["action"], entry["action"])
        time = entry.get("time_us", 0) / 1e6
        address, size = entry.get("addr", 0), entry["size"]
        yield Event(time, action, address, size, entry.get("stream"), 0, ())


def _tiles(ranges: Sequence[Range], samples: Sequence[Sample]) -> Tiles:
    found = totals(ranges)
    free = found["whole"] + found["part"]
    tiles = [
        Tile(numbers.num_bytes(found["live"]), "live"),
        Tile(numbers.num_bytes(sum(part.mapped for part in ranges)), "held"),
    ]
    if samples:
        tiles.append(Tile(numbers.num_bytes(max(s.live for s in samples)), "peak live"))
    if free:
        hole = largest_hole(ranges)
        tiles.append(Tile(numbers.num_bytes(hole), "largest free block"))
        tiles.append(
            Tile(
                numbers.percent(1 - hole / free),
                "fragmentation: free memory outside the largest free block",
            )
        )
    return Tiles(tuple(tiles))


def _call_sites(ranges: Sequence[Range]) -> Table | None:
    """Live bytes by the line that allocated them; None if the pool did not record call sites."""
    held: dict[Frame, tuple[int, int]] = {}
    for block in (block for part in ranges for block in part.blocks):
        if block.state == "live" and block.call_site:
            size, count = held.get(block.call_site[0], (0, 0))
            held[block.call_site[0]] = size + block.size, count + 1
    if not held:
        return None
    largest = sorted(held.items(), key=lambda item: -item[1][0])[:MAX_CALL_SITES]
    rows = tuple(
        (
            Cell(f"{frame.filename}:{frame.line} {frame.name}", tone="code"),
            Cell(numbers.num_bytes(size), size),
            Cell(f"{count:,}", count),
        )
        for frame, (size, count) in largest
    )
    columns = (Column("allocated at"), Column("live", numeric=True), Column("blocks", numeric=True))
    return Table(columns, rows, "Memory by call site")


def _statistic(name: str, value: Any) -> tuple[Cell, Cell]:
    label = Cell(name.replace("_", " "))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return label, Cell("" if value is None else str(value))
    if name.endswith("bytes"):
        return label, Cell(numbers.num_bytes(value), value)
    return label, Cell(f"{value:,}" if isinstance(value, int) else numbers.digits(value), value)
