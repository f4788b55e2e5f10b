"""Error messages of array checks; arrays of other libraries are used without a copy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cukit.core.arrays import access_width, adopt, check_array, runs_kernel
from cukit.errors import ArrayDtypeError, ArrayError, ArrayLayoutError, ArrayShapeError


class Tensor:
    """An array of another library with DLPack, like those of torch and JAX."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_adopt_shares_memory():
    array = np.arange(6, dtype=np.float32)
    (adopted,) = adopt("op", Tensor(array))
    assert np.shares_memory(adopted, array)


def test_adopt_passes_arrays_and_none_through():
    array = np.zeros(3)
    got, nothing = adopt("op", array, None)
    assert got is array
    assert nothing is None


def test_adopt_names_the_op_and_the_type():
    with pytest.raises(ArrayError, match=r"op: expected a NumPy or CuPy array .* got str"):
        adopt("op", "text")


@pytest.mark.parametrize(
    ("array", "options", "error", "message"),
    [
        (np.zeros(3, np.int32), {}, ArrayDtypeError, "x must be float32, .* got int32"),
        (np.zeros((3, 4)), {"ndim": 3}, ArrayShapeError, r"3 axes, got shape \(3, 4\)"),
        (np.zeros((3, 4)), {"shape": (None, 5)}, ArrayShapeError, "axis 1: 4 instead of 5"),
        (np.zeros((3, 4)), {"shape": (3,)}, ArrayShapeError, r"shape \(3,\), got \(3, 4\)"),
        (np.zeros((3, 4)).T, {}, ArrayLayoutError, "C-contiguous"),
        (np.zeros((3, 4))[:, ::2], {"contiguous": False}, ArrayLayoutError, "last axis"),
    ],
)
def test_check_array_reports_the_requirement_and_the_value(array, options, error, message):
    with pytest.raises(error, match=f"op: .*{message}"):
        check_array("op", "x", array, **options)


def test_strided_rows_pass_where_allowed():
    check_array("op", "x", np.zeros((3, 8))[:, :4], contiguous=False)


def test_numpy_arrays_run_the_reference():
    assert not runs_kernel("op", np.zeros(3), None)


@pytest.mark.gpu
def test_arrays_on_different_devices_are_rejected():
    import cupy

    with pytest.raises(ArrayLayoutError, match="one device, got CPU, GPU"):
        runs_kernel("op", np.zeros(3), cupy.zeros(3))


@pytest.mark.parametrize(
    ("extent", "offset", "width"), [(64, 0, 8), (64, 1, 1), (64, 4, 4), (12, 0, 4), (7, 0, 1)]
)
def test_access_width_follows_extent_and_alignment(extent, offset, width):
    buffer = np.zeros(256, ml_dtypes.bfloat16)
    start = (-buffer.ctypes.data % 16) // 2 + offset
    assert access_width(extent, buffer[start : start + 64]) == width
