"""One key among many: low-bit caches find it as often as 16-bit caches."""

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
    """Plain FP8 attention misses most of them, because the tensor core accumulates with 14 bits."""
    check(131072, 512, 0.75, 0.03)


def test_the_document_has_every_row() -> None:
    match = MARKS.search((ROOT / DOCUMENT).read_text(encoding="utf-8"))
    assert match is not None
    for name in ROWS:
        assert f"| {name} |" in match[0], "run `python -m profiling.needle --write`"
