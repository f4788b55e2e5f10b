"""pack_kv: the bits of the reference, for any source and target groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cukit as ck
from cukit.core.arrays import bfloat16, float16
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError
from cukit.reference import pack_kv as reference
from tests.contract import array_module
from tests.quick_run import emulated


def int4_cache(xp: Any, shape: tuple[int, ...], axis: int, size: int) -> ck.QuantizedArray:
    """A cache with poisoned codes (0xCC) and factors (NaN)."""
    blocks, rows, heads, width = shape
    codes = xp.full((*shape[:3], width // 2), 0xCC, xp.uint8)
    if axis == 1:
        factors = [xp.full((blocks, rows // size, heads, width), xp.nan, float16) for _ in "sz"]
    else:
        factors = [xp.full((blocks, heads, rows, 1), xp.nan, float16).swapaxes(1, 2) for _ in "sz"]
    return ck.QuantizedArray(codes, ck.int4, shape, *factors, axis, size)


def on_host(cache: ck.QuantizedArray) -> list[Any]:
    arrays = cache.storage, cache.scales, cache.zero_points
    return [x if isinstance(x, np.ndarray) else x.get() for x in arrays]


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
@pytest.mark.parametrize(
    ("size", "head_dim", "value_dim", "index"),
    [(64, 128, 128, np.int64), (32, 96, 64, np.int32), (32, 32, 32, np.int64)],
)
@emulated(lambda dtype, head_dim: (dtype == float16) == (head_dim == 96))
def test_groups_of_any_source(
    device: str, dtype: Any, size: int, head_dim: int, value_dim: int, index: Any
) -> None:
    """Channels far from zero, constant, tiny and huge; NaN affects only the scale of its group."""
    xp = array_module(device)
    rng = np.random.default_rng(0)
    heads = 3
    k = rng.standard_normal((4, 2 * size, heads, head_dim))
    v = rng.standard_normal((4, 2 * size, heads, value_dim))
    k += rng.uniform(-30, 30, (1, 1, heads, head_dim))
    k[..., 1], k[..., 2], k[..., 3] = 5.0, 0.0, k[..., 3] * 1e-5
    k[..., 4] *= 1000
    k[1, 3, 0, 5], v[1, 7, 1, 2] = np.nan, np.inf
    sources = np.array([5, -1, 2, 7, 0, 99, 3], index)
    targets = np.array([0, 1, 5, 2, -3, 4, 3], index)
    caches = [
        int4_cache(xp, (3, 2 * size, heads, width), axis, size if axis == 1 else width)
        for width, axis in ((head_dim, 1), (value_dim, 3))
    ]
    given = [xp.asarray(x.astype(dtype)) for x in (k, v)]
    ck.pack_kv(*given, *caches, *(xp.asarray(x) for x in (sources, targets)))
    want = [
        int4_cache(np, (3, 2 * size, heads, width), axis, size if axis == 1 else width)
        for width, axis in ((head_dim, 1), (value_dim, 3))
    ]
    reference.pack_kv(*(x.astype(dtype) for x in (k, v)), *want, sources, targets)
    for got, expected in zip(caches, want, strict=True):
        for a, b in zip(on_host(got), on_host(expected), strict=True):
            if a.dtype == np.uint8:
                assert (a == b).all()
            else:
                np.testing.assert_array_equal(a, b)
    # Decoded values are within half a quantisation step.
    rows = k.astype(dtype).astype(np.float64).reshape(-1, size, heads, head_dim)[2]
    scales = on_host(caches[0])[1].reshape(-1, 1, heads, head_dim)[5].astype(np.float64)
    host = ck.QuantizedArray(on_host(caches[0])[0], ck.int4, caches[0].shape,
                             *on_host(caches[0])[1:], 1, size)  # fmt: skip
    decoded = np.asarray(host.dense(), np.float64).reshape(-1, size, heads, head_dim)[5]
    good = np.isfinite(rows).all(axis=0) & np.isfinite(scales[0])
    bound = 0.5 * scales + np.abs(rows).max(axis=0) * 2.0**-9 + 1e-3 * scales
    assert (np.abs(decoded - rows) <= bound)[:, good].all()
    assert good.sum() >= good.size - 1


def test_invalid_arguments_are_rejected(device: str) -> None:
    xp = array_module(device)
    k = xp.zeros((2, 64, 1, 32), float16)
    caches = [int4_cache(xp, (2, 64, 1, 32), axis, size) for axis, size in ((1, 64), (3, 32))]
    groups = xp.zeros(1, np.int64)
    with pytest.raises(ArrayDtypeError, match="must be QuantizedArrays of int4"):
        ck.pack_kv(k, k, k, k, groups, groups)
    with pytest.raises(ArrayShapeError, match="multiple of the group size 64, got"):
        ck.pack_kv(k[:, :40], k[:, :40], *caches, groups, groups)
    with pytest.raises(ArrayShapeError, match="pack_kv: targets must have shape"):
        ck.pack_kv(k, k, *caches, groups, xp.zeros(2, np.int64))
    if device != "cpu":
        rows = ck.QuantizedArray(caches[1].storage, ck.int4, caches[1].shape,
                                 xp.ascontiguousarray(xp.zeros((2, 64, 2, 1), float16))[:, :, :1],
                                 xp.zeros((2, 64, 2, 1), float16)[:, :, :1], 3, 32)  # fmt: skip
        with pytest.raises(ArrayLayoutError, match="contiguous along axis 1"):
            ck.pack_kv(k, k, caches[0], rows, groups, groups)
