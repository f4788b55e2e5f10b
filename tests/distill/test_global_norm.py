"""global_norm and clip_scale."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cukit.distill import clip_scale, global_norm
from cukit.distill.optimizer._tensor_table import CHUNK
from cukit.errors import ArrayShapeError, ConfigError
from tests.contract import DTYPES, random, to_device, to_host

# A scalar, odd sizes, exactly one block's chunk, one more, several chunks, no elements.
SHAPES = [(), (1,), (3, 5), (CHUNK,), (CHUNK + 1,), (7, 9001), (0, 4)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_global_norm(device, rng, dtype):
    arrays = [np.asarray(random(rng, shape, dtype)) for shape in SHAPES]
    expected = math.sqrt(sum(float((a.astype(np.float64) ** 2).sum()) for a in arrays))
    norm = global_norm(to_device(device, *arrays))
    assert norm.shape == ()
    assert norm.dtype == np.float32
    np.testing.assert_allclose(to_host(norm), expected, rtol=1e-6)


def test_global_norm_of_mixed_dtypes_and_odd_views(device, rng):
    arrays = [random(rng, (5001,), dtype) for dtype in DTYPES]
    placed = to_device(device, *arrays)
    norm = global_norm([array[1:] for array in placed])
    expected = math.sqrt(sum(float((a[1:].astype(np.float64) ** 2).sum()) for a in arrays))
    np.testing.assert_allclose(to_host(norm), expected, rtol=1e-6)
    again = global_norm([array[1:] for array in placed])
    assert to_host(norm).tobytes() == to_host(again).tobytes()


@pytest.mark.parametrize(("norm", "expected"), [(0.5, 1.0), (4.0, 0.5), (0.0, 1.0)])
def test_clip_scale(device, norm, expected):
    scale = clip_scale(to_device(device, np.array(norm, np.float32))[0], 2.0)
    np.testing.assert_allclose(to_host(scale), expected, rtol=1e-5)
    assert scale.dtype == np.float32


@pytest.mark.gpu
def test_more_than_2_31_elements():
    import cupy

    size = 2**31 + 5
    grad = cupy.zeros(size, cupy.float16)
    grad[-1] = 3
    assert float(global_norm([grad])) == 3


def test_clip_scale_and_norm_reject_invalid_values():
    with pytest.raises(ConfigError, match="max_norm must be above 0"):
        clip_scale(np.array(1, np.float32), 0)
    with pytest.raises(ArrayShapeError, match="at least one array"):
        global_norm([])
