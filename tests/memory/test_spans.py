"""The index of free spans, compared with a plain sorted list."""

from __future__ import annotations

import random

import pytest

from cukit.memory.bookkeeping.spans import FREE, SizeIndex, Span


@pytest.mark.parametrize("max_per_chunk", [4, SizeIndex.MAX_PER_CHUNK])
def test_the_index_agrees_with_a_sorted_list(max_per_chunk: int) -> None:
    index = SizeIndex()
    index.MAX_PER_CHUNK = max_per_chunk
    model: list[tuple[int, int]] = []
    spans: dict[int, Span] = {}
    numbers = random.Random(5)
    for step in range(4000):
        if model and numbers.random() < (0.3 if step < 3000 else 0.9):
            size, address = model.pop(numbers.randrange(len(model)))
            index.remove(spans.pop(address))
        else:
            size, address = 512 * numbers.randrange(1, 60), 512 * step
            spans[address] = Span(address, size, FREE)
            index.add(spans[address])
            model.append((size, address))
            model.sort()
        assert len(index) == len(model)
        assert bool(index) == bool(model)
        wanted = 512 * numbers.randrange(0, 64)
        fitting = [address for size, address in model if size >= wanted]
        found = index.best_fit(wanted)
        assert (found.address if found else None) == (fitting[0] if fitting else None)
        if step % 50 == 0:
            assert [span.address for span in index.at_least(wanted)] == fitting
            assert [span.address for span in index] == [address for _, address in model]


def test_spans_split_and_merge_back() -> None:
    whole = Span(4096, 8192, FREE)
    middle = whole.isolate(5120, 1024)
    assert [(part.address, part.size) for part in (whole, middle, middle.next)] == [
        (4096, 1024),
        (5120, 1024),
        (6144, 6144),
    ]
    middle.swallow_next()
    whole.swallow_next()
    assert (whole.size, whole.next, middle.gone) == (8192, None, True)
