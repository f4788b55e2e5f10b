"""Which arrays share memory."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.core.overlap import check_overlap
from cukit.errors import ArrayLayoutError

WHOLE = np.zeros((8, 16), np.float32)
FLAT = WHOLE.reshape(-1)

OVERLAPS = {
    "shifted": (FLAT[:100], FLAT[4:104]),
    "inside": (WHOLE, WHOLE[2:4]),
    "the same bytes as another dtype": (FLAT, FLAT.view(np.int16)),
    "columns that meet": (WHOLE[:, :9], WHOLE[:, 8:]),
    "backwards": (FLAT[::-1], FLAT[:1]),
}
APART = {
    "neighbours": (FLAT[:64], FLAT[64:]),
    "columns side by side": (WHOLE[:, :8], WHOLE[:, 8:]),
    "even and odd": (FLAT[::2], FLAT[1::2]),
    "empty": (FLAT[:0], FLAT),
    "other arrays": (FLAT, np.zeros(4)),
}


@pytest.mark.parametrize(("out", "x"), OVERLAPS.values(), ids=OVERLAPS)
@pytest.mark.parametrize("itself", ["", "x"])
def test_overlaps_are_rejected(out, x, itself):
    for first, second in ((out, x), (x, out)):
        with pytest.raises(ArrayLayoutError, match="op: out overlaps x in memory"):
            check_overlap("op", first, itself=itself, x=second)


@pytest.mark.parametrize(("out", "x"), APART.values(), ids=APART)
def test_disjoint_arrays_are_accepted(out, x):
    check_overlap("op", out, x=x, absent=None)
    check_overlap("op", x, x=out)


def test_in_place_is_allowed_where_the_op_allows_it():
    check_overlap("op", FLAT[4:20], itself="x", x=FLAT[4:20])
    with pytest.raises(ArrayLayoutError, match="out overlaps x"):
        check_overlap("op", FLAT[4:20], x=FLAT[4:20])
    with pytest.raises(ArrayLayoutError, match="out may be x itself"):
        check_overlap("op", FLAT[4:20].reshape(4, 4), itself="x", x=FLAT[4:20])
