"""dequantize: cases that the round trips in test_quantize.py do not cover."""

from __future__ import annotations

import numpy as np
import pytest

import cukit as ck
from cukit.errors import ArrayDtypeError, ArrayError, ArrayLayoutError, ArrayShapeError
from cukit.quantization._matrices import matrices_of
from cukit.quantization.dequantize import plan_dequantize
from cukit.reference import quantize as reference
from tests.contract import to_device, to_host

X = np.ones((4, 8), np.float32)


def test_factors_of_any_layout_are_applied(device, rng):
    codes = rng.integers(-128, 128, (6, 64)).astype(np.int8)
    scales = rng.uniform(0.5, 2, (4, 6)).astype(np.float32).T
    zeros = rng.integers(-9, 9, (6, 4)).astype(np.int8)
    placed = to_device(device, codes, np.ascontiguousarray(scales.T), zeros)
    array = ck.QuantizedArray(placed[0], ck.int8, (6, 64), placed[1].T, placed[2], -1, 16)
    want = reference.dequantize(codes, "int8", 64, scales, zeros, (1, 16))
    np.testing.assert_array_equal(to_host(ck.dequantize(array)), want)


def test_errors_of_dequantize():
    array = ck.quantize(X, ck.int8)
    with pytest.raises(ArrayError, match="dequantize: array must be a QuantizedArray, got ndarray"):
        ck.dequantize(X)
    with pytest.raises(ArrayDtypeError, match=r"dtype must be float32, .* got 'int32'"):
        ck.dequantize(array, np.int32)
    with pytest.raises(ArrayShapeError, match="out must have shape"):
        ck.dequantize(array, out=np.ones((4, 7), np.float32))
    with pytest.raises(ArrayLayoutError, match="out must be C-contiguous"):
        ck.dequantize(array, out=np.ones((8, 4), np.float32).T)


def test_plans_of_dequantize():
    config = plan_dequantize(
        matrices_of((4096, 4096), (1, 128)), ck.int4, np.dtype(np.float16), "float16"
    )
    assert (config.block, config.one_scale, config.index) == ((1, 128), True, "uint32")
    assert config.num_blocks == 4096 * 4096 // 8 // 1024
    ragged = matrices_of((70_000, 65_536), (1, 12))
    config = plan_dequantize(ragged, ck.int4, np.dtype(np.float16), "float16", aligned=False)
    assert (config.block, config.one_scale, config.index) == ((1, 0), False, "uint64")
