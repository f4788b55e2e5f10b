"""Plots of a pool: they show every byte once, are self-contained, and stay small."""

from __future__ import annotations

import random
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from cukit.memory import MemoryPool, MemoryPoolConfig
from cukit.memory.bookkeeping.blocks import Block, Event, Range
from cukit.memory.history import FreeMap, History, Sample, timeline
from cukit.memory.layout import KINDS, Layout, kinds_of, largest_hole, totals
from cukit.memory.picture import map_svg, map_text, num_bytes, summary, timeline_svg
from cukit.memory.providers.host import HostProvider

MIB = 1 << 20
PAGE = 2 * MIB


def block(address: int, size: int, state: Any) -> Block:
    return Block(address, size, size, state, None, False, ())


def range_of(address: int, *blocks: tuple[int, Any]) -> Range:
    """A range of contiguous (bytes, state)."""
    found, place = [], address
    for size, state in blocks:
        found.append(block(place, size, state))
        place += size
    return Range(address, place - address, PAGE, tuple(found))


HALF_FREE = range_of(
    4 * PAGE,
    (MIB, "live"),
    (6 * MIB, "free"),
    (MIB, "pending"),
    (4 * MIB, "unmapped"),
    (MIB, "free"),
    (MIB, "free"),
    (MIB, "live"),
    (MIB, "free"),
)


def crowded(num_blocks: int, seed: int = 2) -> list[Range]:
    rng = random.Random(seed)
    states = ["live"] * 6 + ["free"] * 4 + ["pending", "unmapped"]
    sizes = (512, 5 * 512, 300_032, 3 * MIB)
    ranges = []
    for number in range(3):
        blocks = [(rng.choice(sizes), rng.choice(states)) for _ in range(num_blocks)]
        ranges.append(range_of((number + 1) << 44, *blocks))
    return ranges


def test_two_kinds_of_free_memory() -> None:
    """Wholly free pages (at 2, 4 and 12 MiB), and free parts of pages in use."""
    assert [(address - 4 * PAGE, size, kind) for address, size, kind in kinds_of(HALF_FREE)] == [
        (0, MIB, "live"),
        (MIB, MIB, "part"),
        (2 * MIB, 4 * MIB, "whole"),
        (6 * MIB, MIB, "part"),
        (7 * MIB, MIB, "pending"),
        (8 * MIB, 4 * MIB, "unmapped"),
        (12 * MIB, 2 * MIB, "whole"),
        (14 * MIB, MIB, "live"),
        (15 * MIB, MIB, "part"),
    ]
    assert largest_hole([HALF_FREE]) == 6 * MIB
    assert summary([HALF_FREE]) == (
        "2 MiB live · 1 MiB pending · 9 MiB free, 6 MiB of it whole pages · "
        "largest hole 6 MiB · fragmentation 33%"
    )


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("least", [1, 10_000, 5 * MIB])
def test_every_byte_is_drawn_once(rows: int, least: int) -> None:
    ranges = crowded(300)
    layout = Layout(ranges, rows)
    drawn = dict.fromkeys(KINDS, 0)
    for start, end in layout.rows():
        place = start
        for piece in layout.pieces(start, end, least):
            assert piece.start >= place
            assert piece.size == sum(piece.shares.values()) > 0
            place = piece.start + piece.size
            for kind in KINDS:
                drawn[kind] += piece.shares[kind]
        assert place <= end
    real = totals(ranges)
    assert {k: drawn[k] for k in KINDS if k != "unmapped"} == {
        k: real[k] for k in KINDS if k != "unmapped"
    }


def test_addresses_without_memory_do_not_fill_the_picture() -> None:
    far = range_of(0, (PAGE, "live"), (1 << 40, "unmapped"), (PAGE, "live"), (1 << 41, "unmapped"))
    layout = Layout([far, range_of(1 << 43, (1 << 42, "unmapped"))], 8)
    assert 2 * PAGE < layout.end < 2.1 * PAGE


def rectangles(svg: str, kind: str) -> list[tuple[float, float, float, float]]:
    """x, y, width and height of all shapes of a kind."""
    path = re.search(rf'<path class="{kind}" d="([^"]*)"', svg)
    if path is None:
        return []
    number = r"(-?[\d.]+)"
    found = re.findall(rf"M{number} {number}h{number}v{number}h{number}z", path[1])
    return [(float(x), float(y), float(w), float(h)) for x, y, w, h, _ in found]


def test_the_map_is_to_scale() -> None:
    svg = map_svg([range_of(0, (PAGE, "live"), (PAGE, "free"), (2 * PAGE, "live"))], rows=1)
    left, right = rectangles(svg, "live")
    (hole,) = rectangles(svg, "whole")
    assert right[2] == pytest.approx(2 * left[2], rel=0.01)
    assert hole[2] == pytest.approx(left[2], rel=0.01)
    assert hole[0] == pytest.approx(left[0] + left[2], abs=1)
    assert not rectangles(svg, "part")


def test_many_small_blocks_are_drawn_as_shares() -> None:
    blocks = [(512, "live" if number % 4 else "free") for number in range(40_000)]
    svg = map_svg([range_of(0, *blocks)], rows=1)
    assert len(svg) < 60_000
    area = {kind: sum(w * h for _, _, w, h in rectangles(svg, kind)) for kind in ("live", "part")}
    assert area["part"] / (area["live"] + area["part"]) == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("svg", [map_svg(crowded(3000)), timeline_svg([]), map_svg([])])
def test_a_picture_is_self_contained(svg: str) -> None:
    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"]
    assert "prefers-color-scheme: dark" in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert len(svg) < 250_000
    for selector in re.findall(r"^\s*([.@][^{]*)\{", svg, re.MULTILINE):
        assert selector.startswith((".cukit-memory", "@media")), "selectors are scoped"


def test_text_is_escaped() -> None:
    assert "A &lt;b&gt;" in map_svg([HALF_FREE], title="A <b>")


def test_the_terminal_shows_the_same_content() -> None:
    text = map_text([range_of(0, (3 * PAGE, "live"), (PAGE, "free"))], width=40, rows=1).plain
    first, row, legend = text.splitlines()
    assert first.startswith("6 MiB live · 2 MiB free, 2 MiB of it whole pages")
    assert row.endswith(" " + "█" * 30 + "░" * 10)
    assert "free, whole pages" in legend


# Over time ----------------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["pages", "segments"])
def pool(request: pytest.FixtureRequest) -> MemoryPool:
    return MemoryPool(MemoryPoolConfig(), HostProvider(can_remap=request.param))


def test_the_timeline_matches_the_events_of_the_pool(pool: MemoryPool) -> None:
    """The timeline, computed backwards from the end, matches statistics taken along the way."""
    rng = random.Random(9)
    expected: dict[int, tuple[int, int]] = {}
    live: list[int] = []
    with History(pool) as history:
        for _ in range(300):
            if live and rng.random() < 0.5:
                pool.free(live.pop(rng.randrange(len(live))))
            else:
                live.append(pool.allocate(rng.choice((5_000, MIB, 5 * MIB))))
            now = pool.statistics()
            expected[len(history.events)] = now.live_bytes, now.largest_free_bytes
        samples = history.timeline()
    assert len(samples) == len(history.events)
    for number, (live_bytes, largest) in expected.items():
        assert samples[number - 1].live == live_bytes
        assert samples[number - 1].largest_free == largest
    for address in live:
        pool.free(address)


def test_a_history_drops_the_oldest_events(pool: MemoryPool) -> None:
    with History(pool, max_events=10) as history:
        for _ in range(20):
            pool.free(pool.allocate(700))
        samples = history.timeline()
    assert len(samples) == len(history.events) == 10
    assert samples[-1].live == 0
    pool.free(pool.allocate(700))
    assert len(history.events) == 10, "events after the end are not recorded"


def test_events_of_another_pool_end_the_curve() -> None:
    events = [Event(float(n), "alloc", 512 * n, 512, None, 1, ()) for n in range(3)]
    assert len(timeline(events, [range_of(0, (2048, "free"))])) == 1


def test_the_curve_is_drawn() -> None:
    samples = [Sample(n / 1000, n * MIB, 2 * n * MIB, n * MIB // 2) for n in range(1, 2001)]
    svg = timeline_svg(samples)
    assert len(svg) < 40_000
    assert "2,000 events in 2 s" in svg
    assert "at most 1.953 GiB live and 3.906 GiB held · fragmentation 50% on average" in svg


def test_pieces_of_free_memory_are_merged_and_cut() -> None:
    free = FreeMap()
    free.add(0, 10)
    free.add(20, 10)
    assert free.largest == 10
    free.add(10, 10)
    assert free.pieces() == [(0, 30)]
    free.remove(5, 5)
    assert free.pieces() == [(0, 5), (10, 20)]
    assert free.largest == 20
    for address, size in ((3, 5), (29, 2), (12, 3)):
        with pytest.raises(KeyError):
            free.add(address, size)
    for address, size in ((4, 3), (40, 1), (28, 4)):
        with pytest.raises(KeyError):
            free.remove(address, size)
    assert free.pieces() == [(0, 5), (10, 20)]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (5 * MIB, "5 MiB"), (1 << 34, "16 GiB")]
)
def test_formatted_sizes(value: int, text: str) -> None:
    assert num_bytes(value) == text
