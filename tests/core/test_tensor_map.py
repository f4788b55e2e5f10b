"""TMA descriptors: rules are checked before the driver is asked."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.core.tensor_map import encode_tensor_map
from cukit.errors import ArrayLayoutError, ArrayShapeError, ConfigError

pytestmark = pytest.mark.gpu


@pytest.fixture
def matrix():
    import cupy

    return cupy.zeros((256, 128), cupy.float16)


def test_a_descriptor_is_one_128_byte_value(matrix):
    tensor_map = encode_tensor_map(matrix, (64, 64))
    assert isinstance(tensor_map, np.ndarray)
    assert tensor_map.size == 1
    assert tensor_map.nbytes == 128
    assert any(tensor_map.tobytes())


def test_rules_are_named(matrix):
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
