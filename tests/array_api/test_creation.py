"""Creation functions and default devices: the same calls on every device."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cukit as ck
from cukit.errors import ConfigError, UnsupportedDeviceError
from tests.contract import BFLOAT16


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """The devices of arrays. The emulator is not among them: its arrays are on the CPU."""
    return request.param


def test_creation_functions(device):
    for dtype in ("float32", "float16", "bfloat16", np.int32):
        expected = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        for array, values in (
            (ck.zeros((2, 3), dtype, device=device), np.zeros((2, 3))),
            (ck.ones((2, 3), dtype, device=device), np.ones((2, 3))),
            (ck.full((2, 3), 7, dtype, device=device), np.full((2, 3), 7)),
            (ck.arange(4, dtype=dtype, device=device), np.arange(4)),
            (ck.arange(1, 9, 2, dtype, device=device), np.arange(1, 9, 2)),
            (ck.linspace(0, 4, 5, dtype, device=device), np.linspace(0, 4, 5)),
        ):
            assert array.dtype == expected
            np.testing.assert_array_equal(ck.to_numpy(array).astype(np.float64), values)
        like = ck.zeros((4, 5), dtype, device=device)
        assert ck.empty_like(like).shape == (4, 5)
        assert ck.to_numpy(ck.ones_like(like)).astype(int).all()
        assert not ck.to_numpy(ck.zeros_like(like)).astype(int).any()
        assert (ck.to_numpy(ck.full_like(like, 2)).astype(int) == 2).all()


def test_python_floats_become_float32(device):
    assert ck.asarray([1.0, 2.0], device=device).dtype == np.float32
    assert ck.asarray([1, 2], device=device).dtype == np.int64
    assert ck.arange(0.0, 1.0, 0.25, device=device).dtype == np.float32


def test_asarray_shares_memory_where_possible():
    array = np.arange(4, dtype=np.float32)
    assert ck.asarray(array, device="cpu") is array
    assert not np.shares_memory(ck.asarray(array, device="cpu", copy=True), array)
    with pytest.raises(ValueError, match="copy=False"):
        ck.asarray(array, np.float16, device="cpu", copy=False)
    quantized = ck.asarray([1.0, 2.0], ck.int8, device="cpu")
    for copied in ([1.0], 2, np.float64(3), quantized):
        with pytest.raises(ValueError, match="copy=False"):
            ck.asarray(copied, device="cpu", copy=False)
    with pytest.raises(ValueError, match="copy=False"):
        ck.asarray(array, ck.int8, device="cpu", copy=False)
    assert ck.asarray(array, device="cpu", copy=False) is array


def test_asarray_converts(device):
    array = ck.asarray([1.5, 2.5], "bfloat16", device=device)
    assert array.dtype == BFLOAT16
    np.testing.assert_array_equal(ck.to_numpy(array).astype(np.float32), [1.5, 2.5])


@pytest.mark.gpu
def test_gpu_data_stays_and_cpu_data_moves():
    import cupy

    there = cupy.arange(4)
    assert ck.asarray(there) is there
    assert isinstance(ck.asarray(np.arange(4)), cupy.ndarray)
    assert isinstance(ck.asarray(there, device="cpu"), np.ndarray)


def test_xp_follows_the_array_api_standard(device):
    xp = ck.xp_namespace(device)
    array = xp.reshape(xp.arange(6, dtype=xp.float32), (2, 3))
    total = xp.sum(xp.matmul(array, xp.permute_dims(array, (1, 0))))
    assert float(total) == 83.0
    assert xp.__array_api_version__ >= "2023.12"


def test_default_device_can_be_chosen(monkeypatch):
    monkeypatch.setenv("CUKIT_DEVICE", "cpu")
    assert ck.default_device() == "cpu"
    assert isinstance(ck.zeros(3), np.ndarray)
    assert ck.xp.asarray([1]).__class__ is np.ndarray
    monkeypatch.setenv("CUKIT_DEVICE", "tpu")
    with pytest.raises(ConfigError, match="expected 'cpu' or 'gpu', got 'tpu'"):
        ck.default_device()


def test_a_missing_gpu_is_an_error():
    if ck.default_device() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(UnsupportedDeviceError, match="cukit doctor"):
        ck.zeros(3, device="gpu")


def test_errors_for_narrow_dtypes_suggest_asarray():
    with pytest.raises(ConfigError, match=r"asarray\(values, int4\)"):
        ck.zeros(3, ck.int4)
