"""Snapshots: state and history of a pool in the format of PyTorch's memory viewer."""

from __future__ import annotations

import json
import pickle
import pickletools
import random
from pathlib import Path
from typing import Any

import pytest

from cukit.errors import ConfigError
from cukit.memory import MemoryPool, MemoryPoolConfig
from cukit.memory.bookkeeping.blocks import Block, Event, Frame, Range
from cukit.memory.bookkeeping.viewer_format import describe
from cukit.memory.history import FreeMap, History
from cukit.memory.providers.host import HostProvider
from cukit.memory.snapshot import snapshot, write_snapshot

MIB = 1 << 20
PAGE = 2 * MIB

READABLE = {
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT",
    "BINUNICODE", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1",
    "LONG_BINGET", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM",
    "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip
"""The pickle opcodes that the viewer implements."""


@pytest.fixture(params=[True, False], ids=["pages", "segments"])
def pool(request: pytest.FixtureRequest) -> MemoryPool:
    provider = HostProvider(can_remap=request.param)
    return MemoryPool(MemoryPoolConfig(call_site_depth=3), provider)


def busy(pool: MemoryPool, steps: int = 400, seed: int = 5) -> list[int]:
    """Random allocations and frees; returns the live blocks."""
    rng = random.Random(seed)
    live: list[int] = []
    for _ in range(steps):
        if live and rng.random() < 0.45:
            pool.free(live.pop(rng.randrange(len(live))))
        else:
            live.append(pool.allocate(rng.choice((300, 70_000, 3 * MIB, 9 * MIB))))
    return live


def live_blocks(content: dict[str, Any]) -> dict[int, int]:
    return {
        block["address"]: block["size"]
        for segment in content["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def test_segments_are_tiled_by_their_blocks(pool: MemoryPool) -> None:
    live = busy(pool)
    content = pool.snapshot()
    for segment in content["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            assert block["state"] in ("active_allocated", "active_pending_free", "inactive")
            address += block["size"]
        assert address - segment["address"] == segment["total_size"]
        allocated = [b["size"] for b in segment["blocks"] if b["state"] == "active_allocated"]
        assert sum(allocated) == segment["allocated_size"]
        assert segment["page_bytes"] == pool.provider.page_bytes
    assert live_blocks(content).keys() == set(live)
    total = sum(segment["total_size"] for segment in content["segments"])
    statistics = content["statistics"]
    assert total <= statistics["reserved_bytes"] == pool.statistics().reserved_bytes
    assert statistics["fragmentation"] == pool.statistics().fragmentation
    for address in live:
        pool.free(address)


def test_a_live_block_has_its_call_site(pool: MemoryPool) -> None:
    address = pool.allocate(1000)
    (block,) = [
        block
        for segment in snapshot(pool)["segments"]
        for block in segment["blocks"]
        if block["address"] == address
    ]
    assert block["requested_size"] == 1000
    assert block["size"] == 1024
    assert block["frames"][0]["name"] == "test_a_live_block_has_its_call_site"
    assert block["frames"][0]["filename"] == __file__
    pool.free(address)


def replayed(content: dict[str, Any]) -> tuple[dict[int, int], FreeMap]:
    """Replays the trace from an empty state, like the viewer; returns live blocks and memory."""
    live: dict[int, int] = {}
    requested: dict[int, int] = {}
    memory = FreeMap()
    for entry in content["device_traces"][0]:
        action, address, size = entry["action"], entry["addr"], entry["size"]
        if action == "alloc":
            assert address not in live
            live[address] = size
        elif action == "free_requested":
            requested[address] = live.pop(address)
            assert requested[address] == size
        elif action == "free_completed":
            assert requested.pop(address) == size
        elif action in ("segment_map", "segment_alloc"):
            memory.add(address, size)
        elif action in ("segment_unmap", "segment_free"):
            memory.remove(address, size)
    return live, memory


def test_the_trace_leads_to_the_segments(pool: MemoryPool) -> None:
    with History(pool) as history:
        live = busy(pool)
        pool.trim()
        content = snapshot(pool, history)
    found, memory = replayed(content)
    assert found == live_blocks(content)
    shown = FreeMap()
    for segment in content["segments"]:
        shown.add(segment["address"], segment["total_size"])
    assert memory.pieces() == shown.pieces()
    for address in live:
        pool.free(address)


def test_moved_buffers_are_followed() -> None:
    pool = MemoryPool(MemoryPoolConfig(), HostProvider())
    with History(pool) as history:
        buffers = [pool.allocate_buffer(MIB) for _ in range(16)]
        for buffer in buffers[::2]:
            buffer.close()
        report = pool.defragment()
        assert report.bytes_moved > 0
        content = snapshot(pool, history)
        assert replayed(content)[0] == live_blocks(content)
        samples = history.timeline()
    assert len(samples) == len(history.events)
    assert samples[-1].fragmentation == pytest.approx(pool.statistics().fragmentation)


def test_the_viewer_can_read_the_pickle(tmp_path: Path, pool: MemoryPool) -> None:
    with History(pool) as history:
        live = busy(pool, steps=1000)
        content = write_snapshot(tmp_path / "pool.pickle", pool, history)
        write_snapshot(tmp_path / "pool.json", pool, history)
    data = (tmp_path / "pool.pickle").read_bytes()
    codes = {code.name for code, _, _ in pickletools.genops(data)}
    assert codes <= READABLE
    assert pickle.loads(data) == content
    assert json.loads((tmp_path / "pool.json").read_text()) == content
    with pytest.raises(ConfigError, match=r"\.pickle or \.json"):
        write_snapshot(tmp_path / "pool.txt", pool)
    for address in live:
        pool.free(address)


@pytest.mark.gpu
def test_pytorch_reads_it() -> None:
    """PyTorch's own text reports check that sizes add up."""
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    pool = MemoryPool(MemoryPoolConfig(call_site_depth=3), HostProvider())
    with History(pool) as history:
        live = busy(pool)
        content = snapshot(pool, history)
    summary = viewer.segsum(content)
    assert f"segments: {len(content['segments'])}" in summary
    assert "TOTAL MEM" in viewer.trace(content)
    assert "MemoryViz.js" in viewer.trace_plot(content)
    for address in live:
        pool.free(address)


def block(address: int, size: int, state: Any, stream: Any = None) -> Block:
    return Block(address, size, size, state, stream, False, ())


def test_holes_split_segments_and_pending_blocks_are_marked() -> None:
    blocks = (
        block(0, PAGE, "live", "a"),
        block(PAGE, PAGE, "unmapped"),
        block(2 * PAGE, PAGE, "pending", "b"),
        block(3 * PAGE, PAGE, "free"),
    )
    content = describe([Range(0, 4 * PAGE, PAGE, blocks)], device=1)
    first, second = content["segments"]
    assert (first["address"], first["total_size"], first["device"]) == (0, PAGE, 1)
    assert (second["address"], second["total_size"]) == (2 * PAGE, 2 * PAGE)
    assert (second["allocated_size"], second["active_size"]) == (0, PAGE)
    assert [b["state"] for b in second["blocks"]] == ["active_pending_free", "inactive"]
    assert [b["stream"] for s in content["segments"] for b in s["blocks"]] == [0, 1, 0]
    assert content["device_traces"] == [[], []]


def test_reserved_addresses_are_not_memory() -> None:
    site = (Frame("a.py", 3, "f"),)
    events = [
        Event(0.0, "segment_alloc", 0, 8 * PAGE, None, 1, ()),
        Event(0.1, "segment_map", 0, PAGE, None, 1, ()),
        Event(0.2, "alloc", 0, 512, "s", 1, site),
        Event(0.3, "oom", 0, 1 << 50, "s", 1, ()),
    ]
    trace = describe([], events, remaps=True)["device_traces"][0]
    assert [entry["action"] for entry in trace] == ["segment_map", "alloc", "oom"]
    assert trace[1]["frames"] == [{"filename": "a.py", "line": 3, "name": "f"}]
    assert trace[1]["time_us"] == 200_000
    trace = describe([], events[:1], remaps=False)["device_traces"][0]
    assert [entry["action"] for entry in trace] == ["segment_alloc"]
