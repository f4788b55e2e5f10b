"""Retrieval of one key among many: caches of few bits are as accurate as 16-bit caches."""

from __future__ import annotations

import pytest

from profiling.needle import DOCUMENT, MARKS, ROWS, measure
from profiling.tables import ROOT


def check(keys: int, queries: int, least: float, tolerance: float) -> None:
    found = measure(keys, queries)
    assert found["16 bits"] >= least
    for name, part in found.items():
        assert part >= found["16 bits"] - tolerance, name


def test_needles_among_few_keys() -> None:
    check(2048, 32, 0.4, 0.15)


@pytest.mark.gpu
def test_needles_among_128k_keys() -> None:
    """Without promoted accumulators, FP8 attention would miss most of the needles, because tensor
    cores accumulate FP8 products with about 14 bits."""
    check(131072, 512, 0.75, 0.03)


def test_the_document_has_every_row() -> None:
    match = MARKS.search((ROOT / DOCUMENT).read_text(encoding="utf-8"))
    assert match is not None
    for name in ROWS:
        assert f"| {name} |" in match[0], "run `python -m profiling.needle --write`"
