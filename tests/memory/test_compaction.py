"""Compaction plans, applied to plain bytes."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from cukit.memory.bookkeeping.compaction import FREE, IMMOVABLE, MIN_GAP, MOVABLE, Pieces, Plan
from cukit.memory.bookkeeping.compaction import plan_compaction as plan_pieces

PAGE = 256 << 10
UNIT = 16 << 10

CODES = {"movable": MOVABLE, "free": FREE, "immovable": IMMOVABLE}


class Piece(NamedTuple):
    """A row of Pieces."""

    address: int
    size: int
    kind: str

    @property
    def end(self) -> int:
        return self.address + self.size


def plan_compaction(pieces: list[Piece], page_bytes: int, *, remap: bool) -> Plan:
    rows = [(address, size, CODES[kind], 0) for address, size, kind in pieces]
    return plan_pieces(Pieces.of(rows), page_bytes, remap=remap)


KINDS = st.sampled_from(["movable", "movable", "movable", "free", "free", "immovable", "hole"])


def layout(parts: list[tuple[str, int]]) -> list[Piece]:
    """Contiguous pieces; a "hole" skips addresses up to the next page."""
    pieces: list[Piece] = []
    address = 0
    for kind, units in parts:
        if kind == "hole":
            address = -(-address // PAGE) * PAGE + PAGE
            continue
        if kind == "free" and pieces and pieces[-1].kind == "free" and pieces[-1].end == address:
            last = pieces.pop()
            pieces.append(last._replace(size=last.size + units * UNIT))
        else:
            pieces.append(Piece(address, units * UNIT, kind))
        address += units * UNIT
    return pieces


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.tuples(KINDS, st.integers(1, 24)), min_size=1, max_size=40),
    remap=st.booleans(),
)
def test_bytes_are_preserved(parts: list[tuple[str, int]], *, remap: bool) -> None:
    pieces = layout(parts)
    if not pieces:
        return
    memory = bytearray(max(piece.end for piece in pieces) // UNIT)
    movable = [piece for piece in pieces if piece.kind != "free"]
    for number, piece in enumerate(movable):
        for unit in range(piece.size // UNIT):
            memory[piece.address // UNIT + unit] = (number * 37 + unit) % 256
    plan = plan_compaction(pieces, PAGE, remap=remap)
    for step in plan.steps:
        before = bytes(memory)
        written: set[int] = set()
        read: set[int] = set()
        for to, at, size in step.tolist():
            assert (to | at | size) % UNIT == 0
            units = range(to // UNIT, (to + size) // UNIT)
            assert not written & set(units)
            written |= set(units)
            read |= set(range(at // UNIT, (at + size) // UNIT))
            memory[units.start : units.stop] = before[at // UNIT : (at + size) // UNIT]
        assert not written & read
    taken: list[tuple[int, int]] = []
    mapped = {unit for piece in pieces for unit in range(piece.address // UNIT, piece.end // UNIT)}
    for number, piece in enumerate(movable):
        at = plan.relocations.get(piece.address, piece.address)
        if piece.kind == "immovable":
            assert at == piece.address
        units = range(at // UNIT, (at + piece.size) // UNIT)
        assert set(units) <= mapped
        taken.append((units.start, units.stop))
        for unit, position in enumerate(units):
            assert memory[position] == (number * 37 + unit) % 256
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))
    assert bool(plan.relocations) == bool(plan.steps)


def test_moves_as_few_bytes_as_possible() -> None:
    """The only buffer of a page moves into the hole of another, almost full page."""
    pieces = [
        Piece(0, PAGE - 4 * UNIT, "movable"),
        Piece(PAGE - 4 * UNIT, 4 * UNIT, "free"),
        Piece(PAGE, 3 * UNIT, "movable"),
        Piece(PAGE + 3 * UNIT, PAGE - 3 * UNIT, "free"),
    ]
    plan = plan_compaction(pieces, PAGE, remap=True)
    assert plan.relocations == {PAGE: PAGE - 4 * UNIT}
    assert plan.bytes_moved == 3 * UNIT


def test_pages_with_immovable_memory_are_filled_first() -> None:
    pieces = [
        Piece(0, 8 * UNIT, "movable"),
        Piece(8 * UNIT, 8 * UNIT, "free"),
        Piece(PAGE, UNIT, "immovable"),
        Piece(PAGE + UNIT, 15 * UNIT, "free"),
    ]
    plan = plan_compaction(pieces, PAGE, remap=True)
    assert plan.relocations == {0: PAGE + UNIT}


def test_buffers_too_large_for_any_hole_slide() -> None:
    """Holes of a quarter of a page between buffers of three quarters."""
    pieces = []
    for number in range(8):
        pieces.append(Piece(number * PAGE, 4 * UNIT, "free"))
        pieces.append(Piece(number * PAGE + 4 * UNIT, 12 * UNIT, "movable"))
    plan = plan_compaction(pieces, PAGE, remap=True)
    ends = [plan.relocations[piece.address] + piece.size for piece in pieces[1::2]]
    assert max(ends) == 6 * PAGE
    assert len(plan.steps) > 1


def test_useless_moves_are_not_planned() -> None:
    fixed = [Piece(0, UNIT, "immovable"), Piece(UNIT, 15 * UNIT, "free")]
    assert not plan_compaction([*fixed, Piece(PAGE, PAGE, "movable")], PAGE, remap=True).steps
    small = MIN_GAP // 2
    dense = [Piece(0, small, "free"), Piece(small, PAGE - small, "movable")]
    assert not plan_compaction(dense, PAGE, remap=True).steps
