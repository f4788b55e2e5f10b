"""The invariants of a pool between calls."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise

from cukit.memory import MemoryPool
from cukit.memory.bookkeeping.spans import (
    ALIASED,
    CACHED,
    FREE,
    LIVE,
    PACKED,
    PENDING,
    UNMAPPED,
    Span,
)


def check_invariants(pool: MemoryPool) -> None:
    """Compares all records of a pool with one another."""
    arena, pager, streams = pool._arena, pool._pager, pool._streams
    page = pager.page_bytes
    assert not pool._busy
    sizes = dict.fromkeys((LIVE, CACHED, FREE, PENDING, UNMAPPED, ALIASED, PACKED), 0)
    seen: dict[int, list[Span]] = {state: [] for state in sizes}
    mapped: set[int] = set()
    end = 0
    for part in arena.ranges():
        assert part.address >= end, "ranges overlap"
        end = part.address
        before = None
        for span in part.spans():
            assert span.address == end, "spans do not tile their range"
            assert span.size > 0
            assert span.size % 512 == 0
            assert span.prev is before
            if before is not None:
                assert before.next is span
                if before.state == span.state == FREE:
                    assert before.stream != span.stream, "neighbours that should have merged"
                assert not before.state == span.state == UNMAPPED
            sizes[span.state] += span.size
            seen[span.state].append(span)
            if span.state != UNMAPPED and pool.provider.can_remap:
                first = span.address // page * page
                mapped.update(range(first, span.end, page))
            before, end = span, span.end
        assert end == part.address + part.size

    # Every span is in the container of its state, and in no other.
    live = {span.address: span for span in seen[LIVE]}
    assert pool._live == live
    for span in live.values():
        assert span.holder is None or span.holder.span is span
    movables = pool._movables
    movables.settle()
    rows, addresses, row_sizes = movables.columns()
    assert len(rows) == len(movables)
    assert set(rows.tolist()) == set(range(len(movables._holders))) - set(movables._empty)
    holders = movables.holders(rows)
    assert [holder.row for holder in holders] == rows.tolist()
    packed: list[tuple[int, int]] = []
    for number, group in enumerate(movables._groups):
        if group is None:
            continue
        assert group.state == PACKED
        of = movables._packed_rows[movables._first[number] : movables._first[number + 1]].tolist()
        assert (movables._groups_by_row()[of] == number).all()
        at = group.address
        for row in of:
            assert movables._address[row] == at
            packed.append((at, movables._size[row]))
            at += movables._size[row]
        assert at == group.end
    assert {id(span) for span in movables._groups if span} == {id(span) for span in seen[PACKED]}
    assert len(packed) == movables.num_packed
    columns = set(zip(addresses.tolist(), row_sizes.tolist(), strict=True))
    alone = {(span.address, span.size) for span in live.values() if span.movable}
    assert len(alone) + len(packed) == len(rows)
    assert alone | set(packed) == columns
    for state in streams.states.values():
        for size, spans in state.bins.items():
            for span in spans:
                assert (span.state, span.size, span.stream) == (CACHED, size, state.key)
        entries = [entry for chunk in state.index._chunks for entry in chunk]
        assert entries == sorted(entries, key=lambda entry: entry[:2])
        assert state.index._lasts == [chunk[-1] for chunk in state.index._chunks]
        for size, address, span in entries:
            assert (span.state, span.size, span.address) == (FREE, size, address)
            assert span.stream == state.key
        epochs = [epoch for epoch, _ in state.marks]
        assert epochs == sorted(set(epochs))
    cached = [
        span for state in streams.states.values() for spans in state.bins.values() for span in spans
    ]
    assert {id(span) for span in cached} == {id(span) for span in seen[CACHED]}
    assert len(cached) == len(seen[CACHED])
    indexed = [span for state in streams.states.values() for span in state.index]
    assert {id(span) for span in indexed} == {id(span) for span in seen[FREE]}
    assert len(indexed) == len(seen[FREE])
    assert {id(span) for span, _ in pool._supply.pending} == {id(span) for span in seen[PENDING]}
    assert {id(span) for span in arena.unmapped.values()} == {id(span) for span in seen[UNMAPPED]}
    assert all(address == span.address for address, span in arena.unmapped.items())

    # Pages and their bytes are counted once, at however many addresses they are mapped.
    if pool.provider.can_remap:
        pages_at = pages_mapped(pool)
        assert set(pages_at) == mapped
        held = [*pager.spare, *chain.from_iterable(pager.large_spare)]
        pages = {*pages_at.values(), *held}
        assert len(pages) == len(set(pages_at.values())) + len(held)
        assert pager._large_starts == sorted(pager.large_mapped)
        assert len(pages_at) == len(pager.mapped) + pager.large_pages * len(pager.large_mapped)
        assert pager.reserved_bytes == len(pages) * page
        check_second_mappings(pool)
    else:
        assert pager.reserved_bytes == sum(part.size for part in arena.ranges())

    # Totals are consistent.
    spare = pager.num_spare * page
    free = sizes[FREE] + sizes[CACHED] + spare
    assert pager.reserved_bytes == sizes[LIVE] + sizes[PACKED] + sizes[PENDING] + free
    assert pool._counters.live_bytes == sizes[LIVE] + sizes[PACKED]
    assert pool._supply.pending_bytes == sizes[PENDING]
    assert pool._counters.peak_live_bytes >= sizes[LIVE] + sizes[PACKED]
    limit = pool.config.max_pool_size
    assert limit is None or pager.peak_reserved_bytes <= limit
    assert pager.peak_reserved_bytes >= pager.reserved_bytes
    used = getattr(pool.provider, "used_bytes", None)
    assert used is None or used == pager.reserved_bytes, "the device and the pool disagree"


def pages_mapped(pool: MemoryPool) -> dict[int, object]:
    """All mapped pages by address; those of large pages, too."""
    pager = pool._pager
    found: dict[int, object] = dict(pager.mapped)
    for first, parts in pager.large_mapped.items():
        found.update(
            zip(
                range(first, first + len(parts) * pager.page_bytes, pager.page_bytes),
                parts,
                strict=True,
            )
        )
    return found


def check_second_mappings(pool: MemoryPool) -> None:
    """Each byte of a page that is mapped several times is in use at exactly one address."""
    page = pool._pager.page_bytes
    at_address = pages_mapped(pool)
    counts = Counter(at_address.values())
    used: dict[object, list[tuple[int, int]]] = {
        handle: [] for handle, count in counts.items() if count > 1
    }
    for span in pool._arena.spans():
        if span.state in (UNMAPPED, ALIASED):
            continue
        for at in range(span.address // page * page, span.end, page):
            if at_address[at] in used:
                low, high = max(span.address, at), min(span.end, at + page)
                used[at_address[at]].append((low - at, high - at))
    for parts in used.values():
        parts.sort()
        assert parts[0][0] == 0
        assert parts[-1][1] == page
        assert all(end == start for (_, end), (start, _) in pairwise(parts)), "a byte used twice"
    aliases = pool._supply._stitcher._aliases
    assert len(aliases) == sum(counts.values()) - len(counts)
