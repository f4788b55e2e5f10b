"""Model files: round trips, and errors for damaged files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from cukit.core.files import read_arrays
from cukit.errors import DataError
from cukit.models import load_model, save_model
from tests.models.small import small_model


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_round_trip_is_exact(dtype: str, tmp_path: Path) -> None:
    model = small_model(dtype=dtype)
    save_model(tmp_path / "model.safetensors", model, note="hello")
    again = load_model(tmp_path / "model.safetensors")
    assert again.config == model.config
    assert again.parameters.flat.tobytes() == model.parameters.flat.tobytes()
    assert read_arrays(tmp_path / "model.safetensors")[1]["note"] == "hello"
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_dtype_can_change_on_the_way(tmp_path: Path) -> None:
    model = small_model(dtype="bfloat16")
    save_model(tmp_path / "model.safetensors", model)
    wide = load_model(tmp_path / "model.safetensors", dtype="float32")
    assert wide.config.dtype == "float32"
    for name, array in model.parameters.items():
        assert np.array_equal(wide.parameters[name], array.astype(np.float32))


def truncate(content: bytes) -> bytes:
    return content[:-10]


def flip_a_bit(content: bytes) -> bytes:
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


def break_header(content: bytes) -> bytes:
    return b"\xff" * 8 + content[8:]


@pytest.mark.parametrize(
    "damage", [truncate, flip_a_bit, break_header, lambda _: b"", lambda _: b"x"]
)
def test_damage_is_detected(damage: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, small_model())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"model\.safetensors"):
        load_model(path)


def test_foreign_and_missing_files_are_rejected(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(3)}, foreign)
    with pytest.raises(DataError, match="not written by cukit"):
        load_model(foreign)
    with pytest.raises(DataError, match=r"absent.*no such file"):
        load_model(tmp_path / "absent.safetensors")


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_model(path, small_model(seed=1))
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left"):
        save_model(path, small_model(seed=2))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]
