"""TMA descriptors: checks before the driver call, and results equal to those of cuda.bindings."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cukit.core.tensor_map import encode_tensor_map
from cukit.errors import ArrayLayoutError, ArrayShapeError, ConfigError

pytestmark = pytest.mark.gpu


@pytest.fixture
def matrix():
    import cupy

    return cupy.zeros((256, 128), cupy.float16)


def content(tensor_map) -> bytes:
    """The descriptor's bytes, from the first 64-byte aligned address of its storage."""
    start = -ctypes.addressof(tensor_map.storage) % 64
    return tensor_map.storage.raw[start : start + tensor_map.nbytes]


def test_a_descriptor_is_one_128_byte_value(matrix):
    tensor_map = encode_tensor_map(matrix, (64, 64))
    assert tensor_map.nbytes == 128
    assert len(content(tensor_map)) == 128
    assert any(content(tensor_map))


def test_errors_name_the_violated_rule(matrix):
    with pytest.raises(ConfigError, match="box needs 2 extents"):
        encode_tensor_map(matrix, (64,))
    with pytest.raises(ConfigError, match="a box row has 256 bytes"):
        encode_tensor_map(matrix, (64, 128))
    with pytest.raises(ConfigError, match="swizzle_bytes"):
        encode_tensor_map(matrix, (64, 64), swizzle_bytes=48)
    with pytest.raises(ArrayShapeError, match="2 to 5 axes"):
        encode_tensor_map(matrix[0], (64,))
    with pytest.raises(ArrayLayoutError, match="last axis must be contiguous"):
        encode_tensor_map(matrix.T, (64, 64))
    with pytest.raises(ArrayLayoutError, match="multiples of 16 bytes"):
        encode_tensor_map(matrix.ravel()[: 255 * 127].reshape(255, 127), (64, 64))


def test_descriptors_equal_those_of_cuda_bindings(matrix):
    """cuda.bindings defines the driver's enumerators by name."""
    driver = pytest.importorskip("cuda.bindings.driver")
    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    for array, kind, box, width in (
        (matrix, "FLOAT16", (64, 64), 128),
        (matrix.view("float32"), "FLOAT32", (8, 16), 64),
        (matrix.view("uint8").reshape(16, 16, 256), "UINT8", (1, 16, 32), 32),
        (matrix.view("int32"), "INT32", (256, 4), 0),
    ):
        axes = len(box)
        status, expected = driver.cuTensorMapEncodeTiled(
            getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
            axes,
            array.data.ptr,
            [driver.cuuint64_t(extent) for extent in reversed(array.shape)],
            [driver.cuuint64_t(stride) for stride in reversed(array.strides[:-1])],
            [driver.cuuint32_t(extent) for extent in reversed(box)],
            [driver.cuuint32_t(1)] * axes,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{f'{width}B' if width else 'NONE'}"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        assert int(status) == 0
        words = np.array([int(word) for word in expected.opaque], np.uint64)
        assert content(encode_tensor_map(array, box, swizzle_bytes=width)) == words.tobytes()
