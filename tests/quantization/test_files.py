"""Files of quantised arrays, and reports on them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import safetensors.numpy

import cukit as ck
from cukit.errors import ArrayShapeError, ConfigError, DataError
from tests.contract import random, to_device, to_host

LAYOUTS = [
    (ck.int8, {}),
    (ck.int4, {"group_size": 32, "zero_points": True, "scale_dtype": "bfloat16"}),
    (ck.float8_e4m3, {"axis": (-2, -1), "group_size": 16}),
    (ck.float8_e5m2, {"group_size": 16, "scale_layout": "column"}),
]


@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_file_round_trip(tmp_path, rng, place):
    arrays = {
        f"layer.{i}": ck.quantize(
            *to_device(place, random(rng, (9, 77), "float32")), dtype, **options
        )
        for i, (dtype, options) in enumerate(LAYOUTS)
    }
    arrays["codes"] = ck.QuantizedArray.encode(random(rng, (3, 5), "float32"), ck.int4)
    arrays["norm"] = to_device(place, random(rng, (8,), "bfloat16"))[0]
    path = tmp_path / "weights.safetensors"
    ck.save_quantized(path, arrays, {"step": 3, "tags": ["a"]})
    loaded, metadata = ck.load_quantized(path, place)
    assert metadata == {"step": 3, "tags": ["a"]}
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        got = loaded[name]
        if name == "norm":
            assert to_host(got).tobytes() == to_host(array).tobytes()
            assert got.dtype == array.dtype
            continue
        assert repr(got) == repr(array)
        assert got.device == place
        assert ck.to_numpy(got).tobytes() == ck.to_numpy(array).tobytes()
        for part in ("storage", "scales", "zero_points"):
            want = getattr(array, part)
            assert want is None or to_host(getattr(got, part)).tobytes() == to_host(want).tobytes()


def test_other_safetensors_readers_find_the_codes(tmp_path, rng):
    path = tmp_path / "weights.safetensors"
    ck.save_quantized(path, {"w": ck.quantize(random(rng, (4, 8), "float32"), ck.int8)})
    with safetensors.safe_open(path, "numpy") as file:
        assert set(file.keys()) == {"w", "w.scales"}
        assert file.get_tensor("w").dtype == np.int8


def test_invalid_files(tmp_path):
    path = tmp_path / "weights.safetensors"
    array = ck.quantize(np.ones((2, 4), np.float32), ck.int8)
    with pytest.raises(ConfigError, match=r"two arrays would be named 'w.scales'"):
        ck.save_quantized(path, {"w.scales": np.ones(3), "w": array})
    with pytest.raises(DataError, match="no such file"):
        ck.load_quantized(path)
    ck.save_quantized(path, {"w": array})
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="damaged"):
        ck.load_quantized(path)
    safetensors.numpy.save_file({"w": np.ones(3)}, path)
    with pytest.raises(DataError, match="was not written by cukit"):
        ck.load_quantized(path)
    with pytest.raises(ConfigError, match="device must be 'cpu' or 'gpu'"):
        ck.load_quantized(path, "tpu")


@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_report_counts_every_error(monkeypatch, rng, place):
    monkeypatch.setattr("cukit.quantization.report._CHUNK", 100)
    x = random(rng, (37, 64), "float32")
    placed = to_device(place, x)[0]
    array = ck.quantize(placed, ck.int4, axis=(-2, -1), group_size=16)
    report = ck.quantization_report(array, placed)
    error = ck.to_numpy(array).astype(np.float64) - x
    assert report.max_error == pytest.approx(np.abs(error).max(), rel=1e-6)
    relative = np.linalg.norm(error) / np.linalg.norm(x.astype(np.float64))
    assert report.relative_error == pytest.approx(relative, rel=1e-6)
    assert report.sqnr_db == pytest.approx(-20 * math.log10(relative), rel=1e-6)
    assert report.bits_per_value == pytest.approx(4 + 32 * 12 / x.size)
    assert "SQNR" in str(report)


def test_reports_of_exact_and_nan_arrays():
    zeros = np.zeros((2, 4), np.float32)
    exact = ck.quantization_report(ck.quantize(zeros, ck.int8), zeros)
    assert (exact.sqnr_db, exact.max_error, exact.relative_error) == (math.inf, 0.0, 0.0)
    broken = np.array([[1.0, np.nan]], np.float32)
    report = ck.quantization_report(ck.quantize(broken, ck.int8), broken)
    assert math.isnan(report.sqnr_db)
    assert math.isnan(report.max_error)
    with pytest.raises(ArrayShapeError, match="x must have shape"):
        ck.quantization_report(ck.quantize(zeros, ck.int8), zeros[:1])


def test_formats_rank_as_documented(rng):
    """Normally distributed weights; the figures of docs/quantization.md."""
    x = random(rng, (512, 1024), "float32")

    def sqnr(dtype, **options):
        return ck.quantization_report(ck.quantize(x, dtype, **options), x).sqnr_db

    assert sqnr(ck.int8) > sqnr(ck.float8_e4m3) > sqnr(ck.int4, group_size=32)
    zero_points, searched = {"zero_points": True}, {"clip": "mse"}
    options = ({}, searched, zero_points, {**zero_points, **searched})
    found = [sqnr(ck.int4, group_size=128, **each) for each in options]
    assert found == pytest.approx([18.6, 19.9, 19.9, 20.4], abs=0.06)
